"""Plugin that copies all arrays that tests pass to fastcoll to a GPU, and the results back.

    GPU_TEST_ARRAYS=torch PYTHONPATH=tests pytest -p gpu.on_gpu tests/conformance -k n2

The variable names the library whose arrays fastcoll gets: cupy, torch or numba; or fake, an array on a FakeRuntime,
which tests this plugin. An array whose dtype the library lacks is a Holder, which only has `__cuda_array_interface__`.
Works copy back when they are waited for, so tests that look at an array after another kind of wait are left out.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fastcoll
from fastcoll import Work

from .fake_array import FakeArray
from .fake_runtime import FakeRuntime
from .on_fakes import TAKE_ARRAYS

LIBRARY = os.environ["GPU_TEST_ARRAYS"]
FAKE = FakeRuntime()
_P2POp, _batch_isend_irecv = fastcoll.P2POp, fastcoll.batch_isend_irecv
Array = np.ndarray[Any, Any]


class Holder:
    """An array of any dtype in GPU memory, with the interface that any library's array may have."""

    def __init__(self, host: Array) -> None:
        import cupy

        self._bytes = cupy.asarray(np.frombuffer(host.tobytes(), np.uint8))
        self.dtype, self._shape = host.dtype, host.shape

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address = (self._bytes.data.ptr if self._bytes.size else 0, False)
        return {"shape": self._shape, "typestr": self.dtype.str, "data": address, "version": 3, "stream": 1}

    def get(self) -> Array:
        host: Array = np.frombuffer(bytearray(self._bytes.get().tobytes()), self.dtype).reshape(self._shape)
        return host


def _to_torch(host: Array) -> Any:
    import torch

    words = host.view(np.int16) if host.dtype.name == "bfloat16" else host
    x = torch.from_numpy(np.ascontiguousarray(words)).cuda()
    return x.view(torch.bfloat16) if host.dtype.name == "bfloat16" else x


def _of_torch(x: Any) -> Array:
    import torch

    host: Array = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).cpu().numpy()
    return host


def _to_cupy(host: Array) -> Any:
    import cupy

    return cupy.asarray(host)


def _to_numba(host: Array) -> Any:
    from numba import cuda

    return cuda.to_device(np.ascontiguousarray(host))


def _of_fake(x: FakeArray) -> Array:
    FAKE.settle()
    return x.host


LIBRARIES: dict[str, tuple[str, Callable[[Array], Any], Callable[[Any], Array]]] = {
    "cupy": ("biufc", _to_cupy, lambda x: x.get()),
    "torch": ("biufcV", _to_torch, _of_torch),
    "numba": ("biufc", _to_numba, lambda x: x.copy_to_host()),
    "fake": ("biufcV", lambda host: FakeArray(host.copy()), _of_fake),
}
"""The kinds of dtypes that a library has (V: bfloat16), and copies to it and from it."""


class Moved:
    """The arrays of one call, on the GPU and on the host."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[Array, Array, Any]] = {}

    def to_gpu(self, value: Any) -> Any:
        """Return arrays, also in lists, as arrays on the GPU; anything else unchanged."""
        if type(value) in (list, tuple):
            return [self.to_gpu(item) for item in value]
        if type(value) is not np.ndarray or value.dtype.hasobject:
            return value
        if id(value) not in self._pairs:
            (kinds, to_library, _), dtype = LIBRARIES[LIBRARY], value.dtype
            plain = dtype.isnative and (dtype.kind != "V" or dtype.name == "bfloat16")
            has = LIBRARY == "fake" or (plain and dtype.kind in kinds and dtype.type is not np.longdouble)
            self._pairs[id(value)] = (value, value.copy(), (to_library if has else Holder)(value))
        return self._pairs[id(value)][2]

    def back(self) -> None:
        """Copy arrays that have changed back."""
        for host, before, there in self._pairs.values():
            after = there.get() if isinstance(there, Holder) else LIBRARIES[LIBRARY][2](there)
            if after.tobytes() != before.tobytes():
                host[...] = after.view(host.dtype).reshape(host.shape)


class MovedWork:
    """A Work that copies results back when it is waited for."""

    def __init__(self, work: Work, moved: Moved) -> None:
        self._work, self._moved = work, moved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def _ended(self, end: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return end(*args, **options)
        finally:
            self._moved.back()

    def wait(self, *args: Any, **options: Any) -> Any:
        return self._ended(self._work.wait, *args, **options)

    def result(self, *args: Any, **options: Any) -> Any:
        return self._ended(self._work.result, *args, **options)

    def source_rank(self) -> Any:
        return self._ended(self._work.source_rank)


def _on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        moved = Moved()
        args = tuple(map(moved.to_gpu, args))
        options = {name: moved.to_gpu(value) for name, value in options.items()}
        result = None
        try:
            result = function(*args, **options)
        finally:
            if not isinstance(result, Work):
                moved.back()
        return MovedWork(result, moved) if isinstance(result, Work) else result

    return call


def _batch(ops: list[Any]) -> list[Any]:
    """Post the P2POps of `_posted`, and return their Works."""
    works = _batch_isend_irecv([op for op, _ in ops])
    return [MovedWork(work, moved) for work, (_, moved) in zip(works, ops, strict=True)]


def _posted(op: Callable[..., Any], tensor: Any, *args: Any, **options: Any) -> Any:
    """Make a P2POp with the unwrapped isend or irecv, which P2POp requires; keep its arrays beside it."""
    moved = Moved()
    return _P2POp(op.__wrapped__, moved.to_gpu(tensor), *args, **options), moved  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    if LIBRARY == "fake":
        from fastcoll.gpu import auto

        auto.choose = lambda facts, one_node: auto.STAGED
        auto.has_kernels = bool
        installed = FAKE.installed()
        installed.__enter__()
        config.add_cleanup(lambda: installed.__exit__(None, None, None))
    else:
        from fastcoll.testing import worker

        worker.lasting = lambda look: []  # CUDA and the library keep what they open until the process ends
    for name in set(TAKE_ARRAYS) - {"send_init", "recv_init"}:
        setattr(fastcoll, name, _on_gpu(getattr(fastcoll, name)))
    fastcoll.P2POp = _posted  # type: ignore[assignment,misc]
    fastcoll.batch_isend_irecv = _batch  # type: ignore[assignment]
