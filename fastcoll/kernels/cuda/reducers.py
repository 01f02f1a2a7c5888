"""Reducers for arrays on a GPU: the operations and dtypes of kernels/reduce.py.

They reduce in rank order and in one pass. The result has the bits of the CPU's reducers, with two exceptions. A NaN
that SUM, AVG or PRODUCT of float32, float64 or complex numbers produces has another sign and payload (MIN and MAX keep
a NaN's bits; float16 and bfloat16 have one NaN). In a custom operation's function, NVVM fuses a * b + c, which is then
rounded once instead of twice.

A reduction is a kernel:

    kernel(dst, head, packs, count, srcs)

`srcs` is a tuple of the n sources' addresses. A *pack* is 16 bytes of elements. After the first `head` elements there
are `packs` packs; a thread moves a pack of every source at a time through registers. The `head` elements, and those
after the packs, are processed one by one. A thread reads all sources' elements before it writes any, so `dst` may be
one of the sources. Otherwise it must not overlap them.

Functions over many lanes and over many sources are built recursively from two functions of half the size. So the
generated code has no loops over lanes or sources and stays in registers, and the simulator runs the same code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...arrays.dtypes import is_structured
from ...core.reduce_op import NAMES, ReduceOp
from ...errors import ArrayError, UsageError
from ..reduce import kind_of, refuse_undefined
from .accesses import VECTOR, accesses, size_of
from .combining import DeviceElement, combination, combination_by, element_of, ending, records_kernel
from .kernel import CompilationError, Kernel, cuda, device

MOST_SOURCES = 64
"""With more sources, a kernel's straight-line code and its compilation would be long; a node has fewer GPUs."""

_compiling = threading.Lock()


class CudaReducer:
    """A reduction of one operation and dtype.

    The kernel for n sources is compiled at the first launch with n sources.
    """

    def __init__(self, op: ReduceOp, dtype: np.dtype[Any]) -> None:
        self._op, self._dtype = op, dtype
        refuse_undefined(op, dtype)
        structured = is_structured(dtype)
        self.itemsize = dtype.itemsize
        lane = dtype.itemsize if structured else size_of(element_of(dtype).lane)
        self._misaligned = 0 if structured else lane - 1
        self._per_pack = 0 if structured else VECTOR // dtype.itemsize
        self._kernels: dict[int, Any] = {}

    def launch(self, dst: int, srcs: Sequence[int], count: int, stream: int = 0) -> None:
        """Reduce n arrays of `count` elements into `dst`; does not wait.

        Args:
            dst: device address; equal to a source, or not overlapping any.
            srcs: device addresses, in rank order.
            stream: the handle of a CUDA stream of the current device; the work that writes the sources must be queued
                there already.

        Raises:
            ArrayError: an array is not aligned to its elements.
            UsageError: no sources or more than MOST_SOURCES, another device is current, or a custom operation's
                function cannot be compiled.
            UnavailableError: there is no GPU.
        """
        if count * self.itemsize == 0:
            return
        kernel = self._kernels.get(len(srcs)) or self.prepare(len(srcs))
        # `head` is the first index at which all addresses are multiples of 16, or `count` if there is none.
        bits, head = dst, 0
        for src in srcs:
            bits |= src
        if bits & (VECTOR - 1):
            if bits & self._misaligned:
                raise ArrayError(
                    f"{self._dtype} arrays on a GPU must be aligned to {self._misaligned + 1} bytes, got addresses "
                    f"{', '.join(hex(address) for address in (dst, *srcs))}; give copies"
                )
            ahead = -dst % VECTOR
            never = ahead % self.itemsize or any((src - dst) % VECTOR for src in srcs)
            head = count if never else min(count, ahead // self.itemsize)
        packs = (count - head) // self._per_pack if self._per_pack else 0
        items = max(packs // unroll(len(srcs)), count - packs * self._per_pack, 1)
        kernel(items, stream, dst, head, packs, count, *srcs)

    def prepare(self, n: int) -> Any:
        """Return the kernel for n sources, loaded into the current context; raises the errors of `launch`."""
        if not 0 < n <= MOST_SOURCES:
            raise UsageError(f"a reduction on a GPU takes 1 to {MOST_SOURCES} arrays, got {n}")
        op = self._op
        with _compiling:
            if n not in self._kernels:
                try:
                    # A function of the user is not known by its name.
                    name = (
                        f"reduce {op.name} {self._dtype.str} {self._dtype} {n}" if op.function is None else ""
                    )
                    self._kernels[n] = Kernel(self.kernel(n), 4, (n,), name)
                except Exception as error:  # Numba raises errors of many kinds
                    failed = isinstance(error, CompilationError)
                    if op.function is None or (isinstance(error, UsageError) and not failed):
                        raise
                    cause = error.__cause__ if failed else error
                    raise UsageError(
                        f"{op!r}: Numba cannot compile the function {op.name!r} for CUDA and elements of dtype "
                        f"{self._dtype}; it must take two of them and return one. Numba says: {cause}"
                    ) from cause
            kernel = self._kernels[n]
        kernel.load()
        return kernel

    def kernel(self, n: int) -> Callable[..., None]:
        """Return the kernel (see the module) for n sources, as a Python function."""
        op, dtype, kind = self._op, self._dtype, kind_of(self._dtype)
        if is_structured(dtype):
            assert op.function is not None
            return records_kernel(op.function, dtype)
        element = element_of(dtype)
        if op.function is not None:
            combine = combination_by(op.function, element, kind)
        else:
            combine = combination(op.code, element, kind)
        return kernel_of(Fold(element, combine, ending(op.code, element, n)), n)


def cuda_reducer(op: ReduceOp, dtype: np.dtype[Any]) -> CudaReducer:
    """Return the reduction by `op` of arrays of `dtype` on a GPU, or raise ArrayError.

    PREMUL_SUM adds arrays that are scaled already. A custom operation stays compiled, and its ReduceOp alive, until the
    process ends.
    """
    return _made(_PREDEFINED[op.code] if op.function is None else op, dtype)


_PREDEFINED = {code: ReduceOp(name, code) for code, name in NAMES.items()}
_made = cache(CudaReducer)


# ---- the kernel ------------------------------------------------------------------------------------------


class Fold(NamedTuple):
    """The functions of a reduction: `combine` of two groups, and `end`, applied to the result."""

    element: DeviceElement
    combine: Callable[..., Any]
    end: Callable[..., Any] | None


def unroll(n: int) -> int:
    """Return how many packs of every source a thread loads at once.

    With these numbers a thread has at least 48 bytes of loads in flight; they were not chosen by measurement.
    """
    return max(1, 4 // n)


def kernel_of(fold: Fold, n: int) -> Callable[..., None]:
    """Return the kernel for n sources, as a Python function."""
    element = fold.element
    lanes, group = VECTOR // size_of(element.lane), element.lanes
    size, per_pack = size_of(element.lane) * group, lanes // group
    ahead = unroll(n)
    many = _transfer(fold, n, lanes, True, ahead)
    wide = _transfer(fold, n, lanes, True, 1)
    one = _transfer(fold, n, group, False, 1)

    def reduce(dst, head, packs, count, srcs):
        step = cuda.gridsize(1)
        start = head * size
        pack = cuda.grid(1)
        while pack + (ahead - 1) * step < packs:
            many(dst, srcs, start + pack * VECTOR, step * VECTOR)
            pack += ahead * step
        while pack < packs:
            wide(dst, srcs, start + pack * VECTOR, 0)
            pack += step
        taken = packs * per_pack
        index = cuda.grid(1)
        while index < count - taken:
            one(dst, srcs, (index if index < head else index + taken) * size, 0)
            index += step

    return reduce


def _transfer(fold: Fold, n: int, lanes: int, wide: bool, ahead: int) -> Any:
    """Return a function that reduces `lanes` lanes at each of `ahead` offsets.

    The offsets are `gap` bytes apart. The function reads all lanes before it writes any, so that the loads are in
    flight together.
    """
    load, store = accesses(fold.element.lane, lanes, wide)
    value = _reduction(fold, n, lanes, load)
    values, write = _values(value, ahead), _writes(store, lanes, ahead)
    return device(lambda dst, srcs, at, gap: write(dst + at, gap, values(srcs, at, gap)))


def _values(value: Any, ahead: int) -> Any:
    if ahead == 1:
        return device(lambda srcs, at, gap: value(srcs, at))
    half = ahead // 2
    some = _values(value, half)
    return device(lambda srcs, at, gap: some(srcs, at, gap) + some(srcs, at + half * gap, gap))


def _writes(store: Any, lanes: int, ahead: int) -> Any:
    if ahead == 1:
        return device(lambda address, gap, values: store(address, values))
    half = ahead // 2
    some, middle = _writes(store, lanes, half), lanes * half

    @device
    def write(address, gap, values):
        some(address, gap, values[:middle])
        some(address + half * gap, gap, values[middle:])

    return write


def _reduction(fold: Fold, n: int, lanes: int, load: Any) -> Any:
    """Return a function that combines `lanes` lanes of all sources at one offset."""
    group = fold.element.lanes
    widen, parts = _chain(lanes, group, fold.element.widen), lanes // group
    finish = _chain(lanes, group, fold.end, fold.element.narrow)
    if n == 1:
        return device(lambda srcs, at: finish(widen(load(srcs[0] + at))))
    combine = _lanewise(fold.combine, parts, group)

    @cache
    def take(sources: int) -> Any:
        """Return a function that combines a value with `sources` sources, in order."""
        if sources == 1:
            return device(lambda taken, srcs, at: combine(taken, widen(load(srcs[0] + at))))
        half = sources // 2
        first, second = take(half), take(sources - half)
        return device(lambda taken, srcs, at: second(first(taken, srcs[:half], at), srcs[half:], at))

    rest = take(n - 1)
    return device(lambda srcs, at: finish(rest(widen(load(srcs[0] + at)), srcs[1:], at)))


def _lanewise(combine: Any, parts: int, group: int) -> Any:
    """Return `combine` for tuples of `parts` groups."""
    if parts == 1:
        return combine
    half = parts // 2 * group
    part = _lanewise(combine, parts // 2, group)
    return device(lambda a, b: part(a[:half], b[:half]) + part(a[half:], b[half:]))


def _chain(lanes: int, group: int, *functions: Callable[..., Any] | None) -> Any:
    """Return a function of a tuple of lanes that applies `functions` to each group.

    They are applied in order; None is skipped.
    """

    def after(first: Any, second: Any) -> Any:
        return device(lambda a: second(first(a)))

    chained = device(lambda a: a)
    for function in functions:
        if function is not None:
            chained = after(chained, _mapped(function, lanes // group, group))
    return chained


def _mapped(function: Any, parts: int, group: int) -> Any:
    """Return `function` for tuples of `parts` groups."""
    if parts == 1:
        return function
    half = parts // 2 * group
    part = _mapped(function, parts // 2, group)
    return device(lambda a: part(a[:half]) + part(a[half:]))
