"""Device memory for the kernels' tests: a GPU's, or host memory for Numba's simulator (NUMBA_ENABLE_CUDASIM=1)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernels.cuda.fake_driver import HOPPER

Array = np.ndarray[Any, Any]

GUARD = 64
"""Bytes on each side of an array that nobody may write to."""


class Placed:
    """A copy of an array in device memory, at some offset from a multiple of 16."""

    def __init__(self, array: Array, shift: int = 0, extent: int | None = None) -> None:
        from fastcoll.kernels.cuda.kernel import SIMULATED, cuda

        self._start, self._like = GUARD + shift, array
        nbytes = array.nbytes if extent is None else extent
        host = np.full(self._start + nbytes + GUARD, 0xA5, np.uint8)
        host[self._start : self._start + array.nbytes] = array.reshape(-1).view(np.uint8)
        if SIMULATED:
            room = np.empty(host.size + 16, np.uint8)
            first = -room.ctypes.data % 16
            self._memory = room[first : first + host.size]
            self._memory[:] = host
            base = self._memory.ctypes.data
        else:
            self._memory = cuda.to_device(host)
            base = self._memory.__cuda_array_interface__["data"][0]
        self.address = base + self._start

    def _host(self) -> Array:
        memory = self._memory
        return np.array(memory if isinstance(memory, np.ndarray) else memory.copy_to_host())

    def get(self) -> Array:
        """Return the array now; the guard bytes must be unchanged."""
        host, end = self._host(), self._start + self._like.nbytes
        assert (host[: self._start] == 0xA5).all(), "written before the array"
        assert (host[-GUARD:] == 0xA5).all(), "written after the array"
        return host[self._start : end].copy().view(self._like.dtype).reshape(self._like.shape)


@pytest.fixture(scope="session")
def device() -> type[Placed]:
    """Put arrays into device memory; skip if there is none."""
    from fastcoll.errors import UnavailableError

    try:
        from fastcoll.kernels.cuda.driver import driver
        from fastcoll.kernels.cuda.kernel import SIMULATED

        if not SIMULATED:
            driver()
    except UnavailableError as error:
        pytest.skip(str(error))
    return Placed


@pytest.fixture(scope="session")
def cuda_reduce(device: type[Placed]) -> Callable[..., Array]:
    """Reduce `sources` on the device into a new array, or into copy number `into`."""
    from fastcoll.kernels.cuda.reducers import cuda_reducer

    def reduce(
        op: Any, sources: Sequence[Array], into: int | None = None, shifts: Sequence[int] | None = None
    ) -> Array:
        *places, last = shifts or [0] * (len(sources) + 1)
        placed = [device(x, shift) for x, shift in zip(sources, places, strict=True)]
        result = device(np.full_like(sources[0], 1), last) if into is None else placed[into]
        addresses = [there.address for there in placed]
        cuda_reducer(op, sources[0].dtype).launch(result.address, addresses, sources[0].size)
        for index, (there, source) in enumerate(zip(placed, sources, strict=True)):
            assert there is result or there.get().tobytes() == source.tobytes(), (
                f"source {index} was written to"
            )
        return result.get()

    return reduce


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install numba-cuda with NVVM and a fake device; skip if they are missing."""
    if importlib.util.find_spec("numba_cuda") is None:
        pytest.skip("numba-cuda is not installed; pip install numba-cuda nvidia-nvvm")
    from fastcoll.kernels.cuda.kernel import SIMULATED, cuda

    if SIMULATED:
        pytest.skip("the simulator compiles nothing")
    try:
        cuda.cudadrv.nvvm.NVVM()
    except cuda.cudadrv.error.NvvmSupportError as error:
        pytest.skip(f"there is no NVVM ({error}); pip install nvidia-nvvm")
    device = SimpleNamespace(compute_capability=HOPPER)
    monkeypatch.setattr(cuda.dispatcher, "get_current_device", lambda: device)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The simulator computes with NumPy's scalars, which warn where processors wrap."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
