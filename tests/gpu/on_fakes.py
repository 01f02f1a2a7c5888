"""Plugin that puts all arrays that tests pass to fastcoll on a fake GPU.

    PYTHONPATH=tests NUMBA_ENABLE_CUDASIM=1 pytest -p gpu.on_fakes tests/conformance

fastcoll gets a FakeArray over the memory of the test's ndarray, so the ndarray has the result. Work that a call leaves
queued runs before the call returns. A test that leaves anything on the GPU fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

import fastcoll
from fastcoll.gpu import auto

from .fake_array import FakeArray
from .fake_runtime import FakeRuntime

FAKE = FakeRuntime()
_P2POp = fastcoll.P2POp
TAKE_ARRAYS = """
    all_gather all_gather_coalesced all_gather_into_tensor all_gather_single all_reduce all_reduce_coalesced all_to_all
    all_to_all_single broadcast exscan gather gather_into_tensor gather_single irecv isend recv recv_init reduce
    reduce_scatter reduce_scatter_single reduce_scatter_tensor scan scatter scatter_single send send_init
""".split()


def on_gpu(value: Any) -> Any:
    """Return arrays, also in lists, as arrays on the GPU; anything else unchanged."""
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return FakeArray(value)
    if type(value) in (list, tuple):
        return [on_gpu(item) for item in value]
    return value


def _moved(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        moved = {name: on_gpu(value) for name, value in options.items()}
        try:
            return function(*map(on_gpu, args), **moved)
        finally:
            FAKE.settle()

    return call


def _posted(op: Callable[..., Any], tensor: Any, *args: Any, **options: Any) -> Any:
    """Make a P2POp with the unwrapped isend or irecv, which P2POp requires."""
    return _P2POp(op.__wrapped__, on_gpu(tensor), *args, **options)  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    # Ranks in separate processes can only stage without a GPU.
    auto.choose = lambda facts, one_node: auto.STAGED
    installed = FAKE.installed()
    installed.__enter__()
    config.add_cleanup(lambda: installed.__exit__(None, None, None))
    for name in TAKE_ARRAYS:
        setattr(fastcoll, name, _moved(getattr(fastcoll, name)))
    fastcoll.P2POp = _posted  # type: ignore[assignment,misc]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    yield
    if fastcoll.is_initialized():  # the test has failed; this process ends soon and keeps its group
        return
    FAKE.await_nothing_left()
    FAKE.forget()
