"""Ranks reach a compiled function at the same time; here one of them compiles it, and the others load its code."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from numba.core.dispatcher import Dispatcher

from fastcoll.compiler.cache import acquire


@pytest.fixture(autouse=True)
def one_rank_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold a lock while a function with cache=True is compiled, which ranks that wait for the lock then load."""
    compile: Callable[..., Any] = Dispatcher.compile

    def compile_once(self: Any, signature: Any) -> Any:
        file = getattr(self._cache, "_cache_file", None)
        if file is None:
            return compile(self, signature)
        self._cache._impl.locator.ensure_cache_path()
        lock = acquire(f"{file._index_path}.compiling")
        try:
            return compile(self, signature)
        finally:
            if lock is not None:
                os.close(lock)

    monkeypatch.setattr(Dispatcher, "compile", compile_once)
