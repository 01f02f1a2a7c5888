"""DeviceMemory: the memory of GPUs as the MPI group's calls use it (fastcoll/net/mpi/memory.py says what that is).

Copies and reductions are queued on a stream of the group's and waited for: MPI, which comes next, knows no streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..core.reduce_op import ReduceOp
from . import choice
from .array import DeviceArray
from .movers import scratch
from .runtime import runtime
from .transit import Transit

Block = tuple[int, int]
"""Address and bytes."""


class Reducing(NamedTuple):
    """A compiled reduction of one operation and dtype."""

    kernel: Any  # a CudaReducer
    itemsize: int


class DeviceMemory:
    """The memory of the GPU that is in use: that of the arrays of the call under way."""

    on_gpu = True

    def __init__(self, transit: Transit) -> None:
        self._transit = transit
        self._device = 0
        self._stream = 0

    @contextmanager
    def use(self, arrays: Sequence[DeviceArray]) -> Iterator[None]:
        """Work on the arrays' GPU; one call at a time."""
        with self._transit.in_use(arrays):
            self._device = next((x.device for x in arrays if x.size), arrays[0].device)
            self._stream = self._transit.stream(self._device, "own")
            yield

    def has_kernels(self) -> bool:
        """Whether our kernels can be used."""
        return choice.has_kernels()

    # ---- what net/mpi_memory.py asks for -------------------------------------------------------------

    def blocks(self, arrays: Sequence[DeviceArray]) -> list[Block]:
        return [(x.address, x.nbytes) for x in arrays]

    def copy(self, source: Block, target: Block) -> None:
        if source[0] != target[0]:
            runtime().copy(target[0], source[0], source[1], self._stream)
            runtime().wait_stream(self._stream)

    def scratch(self, nbytes: int) -> tuple[int, Any]:
        memory = runtime().allocate(nbytes, self._device, self._stream)
        return memory.ptr, memory

    def reducer(self, op: ReduceOp, dtype: np.dtype[Any], blocks: Sequence[Block]) -> Reducing | None:
        if not self.has_kernels() or any(address % dtype.alignment for address, _ in blocks):
            return None
        from ..kernels.cuda.reduce import cuda_reducer

        return Reducing(cuda_reducer(op, dtype), dtype.itemsize)

    def fold(self, how: Reducing, target: int, sources: Sequence[int], nbytes: int) -> None:
        how.kernel.launch(target, sources, nbytes // how.itemsize, self._stream)
        runtime().wait_stream(self._stream)

    # ---- arrays --------------------------------------------------------------------------------------

    def array(self, size: int, like: DeviceArray) -> DeviceArray:
        """A flat array of the call's own."""
        return scratch(size, like.dtype, self._device, self._stream, like.owner)

    def lay_out(self, xs: Sequence[DeviceArray]) -> DeviceArray:
        """Copies of arrays, one after the other."""
        flat = self.array(sum(x.size for x in xs), xs[0])
        self.copy_all(xs, parts(flat, xs))
        return flat

    def copy_all(self, sources: Sequence[DeviceArray], targets: Sequence[DeviceArray]) -> None:
        """Copy arrays to others of their sizes, which are apart from all of them."""
        for source, target in zip(sources, targets, strict=True):
            runtime().copy(target.address, source.address, source.nbytes, self._stream)
        runtime().wait_stream(self._stream)

    def scale(self, x: DeviceArray, factor: Any) -> None:
        """Multiply an array by a number, in place."""
        from ..kernels.cuda.scale import scale

        scale(x.address, x.address, x.size, x.dtype, factor, self._stream)
        runtime().wait_stream(self._stream)


def parts(flat: DeviceArray, xs: Sequence[DeviceArray]) -> list[DeviceArray]:
    """The parts of a flat array that are as long as others."""
    end = 0
    return [flat[end : (end := end + x.size)] for x in xs]
