"""Reducers for arrays on a GPU: the operations and dtypes of kernels/reduce.py, in rank order and in one pass.

The bits are those of the CPU's reducers, but for two things. A NaN that SUM, AVG or PRODUCT makes of float32, float64
or complex numbers has another sign and payload (MIN and MAX hand on its bits, float16 and bfloat16 have one NaN).
And in a custom operation's function NVVM fuses a * b + c, which rounds once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ...core.reduce_op import NAMES, ReduceOp
from ...errors import ArrayError, UsageError
from ..reduce import kind_of, memory_type, refuse_undefined
from .addresses import address_of
from .custom import combination_by, records_kernel
from .elements import combination, element_of, ending
from .fold import Fold, kernel_of, unroll
from .launch import CompilationError, Kernel
from .memory import VECTOR, size_of

MOST_SOURCES = 64
"""More make the straight-line code of a kernel, and so its compilation, long; a node has fewer GPUs."""

_compiling = threading.Lock()


class CudaReducer:
    """A reduction of one operation and dtype; its kernels are compiled at the first launch with so many sources."""

    def __init__(self, op: ReduceOp, dtype: np.dtype[Any]) -> None:
        self._op, self._dtype = op, dtype
        memory_type(op, dtype)
        refuse_undefined(op, dtype)
        structured = dtype.names is not None
        self._itemsize = dtype.itemsize
        lane = dtype.itemsize if structured else size_of(element_of(dtype).lane)
        self._misaligned = 0 if structured else lane - 1
        self._per_pack = 0 if structured else VECTOR // dtype.itemsize
        self._kernels: dict[int, Callable[..., None]] = {}

    def launch(self, dst: Any, srcs: Sequence[Any], count: int, stream: int = 0) -> None:
        """Reduce n arrays of `count` elements into `dst`, one of them or apart from all; does not wait.

        Args:
            dst: a device address, or a contiguous array with `__cuda_array_interface__`.
            srcs: likewise, in rank order.
            count: elements.
            stream: the handle of a CUDA stream of the current device; what wrote the sources must precede on it.

        Raises:
            ArrayError: an array is not contiguous, too small or not aligned to its elements.
            UsageError: no sources or more than MOST_SOURCES, another device is current, or a custom operation's
                function cannot be compiled.
            UnavailableError: there is no GPU.
        """
        nbytes = count * self._itemsize
        if nbytes == 0:
            return
        kernel = self._kernels.get(len(srcs)) or self._compile(len(srcs))
        to = address_of(dst, nbytes, "dst")
        addresses = [address_of(src, nbytes, "a source") for src in srcs]
        bits = to
        for address in addresses:
            bits |= address
        head = 0 if not bits & (VECTOR - 1) else self._head(to, addresses, count, bits)
        packs = (count - head) // self._per_pack if self._per_pack else 0
        items = max(packs // unroll(len(addresses)), count - packs * self._per_pack, 1)
        kernel(items, stream, to, head, packs, count, *addresses)

    def prepare(self, n: int) -> None:
        """Compile the kernel for n sources now; raises what `launch` would."""
        if n not in self._kernels:
            self._compile(n)

    def _head(self, dst: int, srcs: list[int], count: int, bits: int) -> int:
        """Elements until all arrays are at multiples of 16 bytes: all, if they never are together."""
        if bits & self._misaligned:
            raise ArrayError(
                f"{self._dtype} arrays on a GPU must be aligned to {self._misaligned + 1} bytes, got addresses "
                f"{', '.join(hex(address) for address in (dst, *srcs))}; give copies"
            )
        ahead = -dst % VECTOR
        if ahead % self._itemsize or any((src - dst) % VECTOR for src in srcs):
            return count
        return min(count, ahead // self._itemsize)

    def _compile(self, n: int) -> Callable[..., None]:
        if not 0 < n <= MOST_SOURCES:
            raise UsageError(f"a reduction on a GPU takes 1 to {MOST_SOURCES} arrays, got {n}")
        with _compiling:
            if n not in self._kernels:
                self._kernels[n] = _custom_errors(
                    self._op, self._dtype, lambda: Kernel(self.kernel(n), 4, (n,))
                )
            return self._kernels[n]

    def kernel(self, n: int) -> Callable[..., None]:
        """The kernel for n sources, as Python; see fold.py."""
        op, dtype, kind = self._op, self._dtype, kind_of(self._dtype)
        if dtype.names is not None:
            assert op.function is not None
            return records_kernel(op.function, dtype)
        element = element_of(dtype)
        if op.function is not None:
            combine = combination_by(op.function, element, kind)
        else:
            combine = combination(op.code, element, kind)
        return kernel_of(Fold(element, combine, ending(op.code, element, n)), n)


def _custom_errors(op: ReduceOp, dtype: np.dtype[Any], compile: Callable[[], Any]) -> Any:
    if op.function is None:
        return compile()
    try:
        return compile()
    except CompilationError as error:
        said = error.__cause__
    except UsageError:
        raise
    except Exception as error:  # Numba lets errors of many kinds through
        said = error
    raise UsageError(
        f"{op!r}: Numba cannot compile the function {op.name!r} for CUDA and elements of dtype {dtype}; "
        f"it must take two of them and return one. Numba says: {said}"
    ) from said


def cuda_reducer(op: ReduceOp, dtype: np.dtype[Any]) -> CudaReducer:
    """The reduction by `op` of arrays of `dtype` on a GPU; PREMUL_SUM adds what was multiplied before.

    A custom operation stays compiled, and its ReduceOp alive, until the process ends.

    Raises:
        ArrayError: there is no such operation for this dtype.
    """
    return _custom(op, dtype) if op.function is not None else _predefined(op.code, dtype)


@cache
def _custom(op: ReduceOp, dtype: np.dtype[Any]) -> CudaReducer:
    return CudaReducer(op, dtype)


@cache
def _predefined(code: int, dtype: np.dtype[Any]) -> CudaReducer:
    return CudaReducer(ReduceOp(NAMES[code], code), dtype)
