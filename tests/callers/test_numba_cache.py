"""Ranks that compile one function at the same time do not get the code of another signature, or old code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from numba.core.caching import IndexDataCacheFile

import fastcoll.callers.njit  # noqa: F401  locks Numba's caches
from fastcoll.compiler import cache


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Future[Any]]]:
    """Run a function in another thread after a step of `file`, until it ends or waits for the lock."""
    with ThreadPoolExecutor(1) as executor:

        def run(file: IndexDataCacheFile, step: str, function: Callable[[], Any]) -> Future[Any]:
            ended_or_waits, result = Event(), Future[Any]()
            original, try_lock = getattr(file, step), cache._try_lock

            def other() -> None:
                result.set_result(function())
                ended_or_waits.set()

            def interrupted(*args: Any) -> Any:
                found = original(*args)
                executor.submit(other)
                assert ended_or_waits.wait(60)
                return found

            def tried(lock: int) -> bool:
                got: bool = try_lock(lock)
                if not got:
                    ended_or_waits.set()
                return got

            monkeypatch.setattr(cache, "_try_lock", tried)
            monkeypatch.setattr(file, step, interrupted)
            return result

        yield run


def files_of(folder: object, *stamps: str) -> list[IndexDataCacheFile]:
    """Return the cache of one function as processes see it, each with its version of the source."""
    return [IndexDataCacheFile(str(folder), "function", stamp) for stamp in stamps]


def test_two_save_code_of_different_signatures(tmp_path, between) -> None:
    mine, others = files_of(tmp_path, "source", "source")
    saved = between(mine, "_load_index", lambda: others.save("int64", "code for int64"))
    mine.save("float64", "code for float64")
    saved.result(60)
    assert others.load("float64") == "code for float64"
    assert others.load("int64") == "code for int64"


def test_one_loads_while_another_replaces_the_code_of_an_older_source(tmp_path, between) -> None:
    old, mine, others = files_of(tmp_path, "old source", "source", "source")
    old.save("int64", "old code")
    loaded = between(mine, "_save_index", lambda: others.load("int64"))
    mine.save("int64", "code")
    assert loaded.result(60) == "code"


def test_a_folder_without_a_lock_is_used_nevertheless(tmp_path) -> None:
    (tmp_path / "function.nbi.lock").mkdir()
    (file,) = files_of(tmp_path, "source")
    file.save("int64", "code")
    assert file.load("int64") == "code"
