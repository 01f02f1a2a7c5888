"""A fake GPU for tests; what they make there must be given back."""

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
    """FakeRuntime, installed; the test fails if anything is left on it."""
    yield from _installed(FakeRuntime())


@pytest.fixture
def two_gpus() -> Iterator[FakeRuntime]:
    """As `gpu`, with two GPUs; memory is on the first if `place` has not said otherwise."""
    yield from _installed(FakeRuntime(devices=2))


@pytest.fixture
def prompt_gpu() -> Iterator[FakeRuntime]:
    """As `gpu`, whose streams run by themselves."""
    yield from _installed(FakeRuntime(prompt=True))


def _installed(fake: FakeRuntime) -> Iterator[FakeRuntime]:
    # Where numba-cuda is installed, kernels for a real GPU would be compiled; the simulator's run on the fake's memory.
    kernels = nullcontext() if numba.config.ENABLE_CUDASIM else mock.patch.object(auto, "has_kernels", bool)
    with fake.installed(), kernels:
        yield fake
        fake.await_nothing_left()
