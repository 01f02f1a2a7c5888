"""Movers: what a rank does with arrays of its own, on the host or on a stream of a GPU."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.operands import divide, scaled, sum_for
from ..core.reduce_op import PREMUL_SUM, ReduceOp
from ..interop.arrays import Array
from .array import DeviceArray
from .runtime import runtime

_BYTE = np.dtype(np.uint8)


class Mover(ABC):
    """What a rank does with its own arrays. Arrays of a call have one dtype and lie in one kind of memory."""

    @abstractmethod
    def fold(self, out: Any, xs: Sequence[Any], op: ReduceOp) -> None:
        """out = reduction of xs, in their order, with which the ranks' reduction begins; out is apart from them.

        An average is a sum, to be divided later; what PREMUL_SUM scales is scaled here or by the GPU's carrier.
        """

    @abstractmethod
    def divide(self, x: Any, n: int) -> None:
        """x /= n, as AVG divides."""

    @abstractmethod
    def copy(self, out: Any, x: Any) -> None:
        """out = x."""


def _local(op: ReduceOp) -> ReduceOp:
    return ReduceOp.SUM if op.code == PREMUL_SUM else sum_for(op)


class OnHost(Mover):
    def fold(self, out: Array, xs: Sequence[Array], op: ReduceOp) -> None:
        from ..kernels.reduce import reducer

        how = reducer(_local(op), out.dtype)
        addresses = np.array([x.ctypes.data for x in xs])
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(how.address)
        function(how.code, out.ctypes.data, addresses.ctypes.data, len(xs), out.size)
        source, _ = scaled(out, op)
        if source is not out:
            out[...] = source

    def divide(self, x: Array, n: int) -> None:
        divide(x, n)

    def copy(self, out: Array, x: Array) -> None:
        out.reshape(-1)[...] = x.reshape(-1)


class OnStream(Mover):
    """Queues on a stream of one GPU, which is current."""

    def __init__(self, device: int, stream: int) -> None:
        self._device, self._stream = device, stream

    def fold(self, out: DeviceArray, xs: Sequence[DeviceArray], op: ReduceOp) -> None:
        from ..kernels.cuda.reduce import cuda_reducer

        here = [x if x.device == self._device else self._brought(x) for x in xs]
        addresses = [x.address for x in here]
        cuda_reducer(_local(op), out.dtype).launch(out.address, addresses, out.size, self._stream)

    def _brought(self, x: DeviceArray) -> DeviceArray:
        # Dropped when the fold is queued: the pool gives it to what is queued later on this stream.
        copied = scratch(x.size, x.dtype, self._device, self._stream)
        self.copy(copied, x)
        return copied

    def divide(self, x: DeviceArray, n: int) -> None:
        from ..kernels.cuda.reduce import cuda_reducer

        zero = scratch(x.size, x.dtype, self._device, self._stream)
        bytes_of = cuda_reducer(ReduceOp.BXOR, _BYTE)
        bytes_of.launch(zero.address, [x.address, x.address], x.nbytes, self._stream)
        others = [zero.address] * (n - 1)
        cuda_reducer(ReduceOp.AVG, x.dtype).launch(x.address, [x.address, *others], x.size, self._stream)

    def copy(self, out: DeviceArray, x: DeviceArray) -> None:
        if out.address != x.address:
            runtime().copy(out.address, x.address, x.nbytes, self._stream)


def scratch(size: int, dtype: np.dtype[Any], device: int, stream: int, owner: Any = None) -> DeviceArray:
    """GPU memory for a stream; `owner` is the array that tells its library."""
    memory = runtime().allocate(size * dtype.itemsize, device, stream)
    return DeviceArray(memory.ptr, dtype, (size,), device, stream, (memory, owner))
