"""A fake GPU for tests, which must free everything that they allocate on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from unittest import mock

import numba
import pytest

from fastcoll.gpu import auto

from .fake_runtime import FakeRuntime


@pytest.fixture
def gpu() -> Iterator[FakeRuntime]:
    """Install a FakeRuntime; the test fails if anything is left on it."""
    yield from _installed(FakeRuntime())


@pytest.fixture
def two_gpus() -> Iterator[FakeRuntime]:
    """Install a FakeRuntime with two GPUs; memory is on the first unless `place` assigns it."""
    yield from _installed(FakeRuntime(devices=2))


@pytest.fixture
def prompt_gpu() -> Iterator[FakeRuntime]:
    """Install a FakeRuntime whose streams run by themselves."""
    yield from _installed(FakeRuntime(prompt=True))


def _installed(fake: FakeRuntime) -> Iterator[FakeRuntime]:
    # If numba-cuda is installed, kernels for a real GPU would be compiled; the simulator's run on the fake's memory.
    kernels = nullcontext() if numba.config.ENABLE_CUDASIM else mock.patch.object(auto, "has_kernels", bool)
    with fake.installed(), kernels:
        yield fake
        fake.await_nothing_left()
