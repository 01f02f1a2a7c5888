"""A reduction as a kernel: each thread takes 16 bytes of every source through registers, in rank order, in one pass.

    kernel(dst, head, packs, count, srcs)

`srcs` is a tuple of n addresses. The first `head` elements and those after the packs are taken one by one. `dst` is one
of the sources or apart from all: a thread reads all sources' elements before it writes any.

Functions over many lanes and over many sources are put together from two of half the size, so that the code that
results has no loop over either and stays in registers, and the simulator runs the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import types

from .elements import Element
from .memory import VECTOR, accesses, size_of
from .toolkit import cuda, device


@dataclass(frozen=True)
class Fold:
    """What is done to elements."""

    element: Element
    combine: Callable[..., Any]
    """Of two groups."""
    end: Callable[..., Any] | None
    """Of the combined group."""


def signature(n: int) -> Any:
    """The kernel's for n sources."""
    word = types.int64
    return types.void(word, word, word, word, types.UniTuple(word, n))


def unroll(n: int) -> int:
    """Packs of every source that a thread has in flight. Unmeasured: it keeps 64 bytes a thread on their way."""
    return max(1, 4 // n)


def kernel_of(fold: Fold, n: int) -> Callable[..., None]:
    """The kernel for n sources, as Python."""
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


def _transfer(fold: Fold, n: int, lanes: int, whole: bool, ahead: int) -> Any:
    """A function that reduces lanes at some bytes from the arrays' beginnings, at `ahead` places a gap apart.

    What is at all places is read before any is written, so that the loads are under way together.
    """
    load, store = accesses(fold.element.lane, lanes, whole)
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
    """A function that combines lanes of all sources, some bytes from their beginnings."""
    group = fold.element.lanes
    widen = _chain(lanes, group, fold.element.widen)
    finish = _chain(lanes, group, fold.end, fold.element.narrow)
    if n == 1:
        return device(lambda srcs, at: finish(widen(load(srcs[0] + at))))
    rest = _taking(load, widen, _lanewise(fold.combine, lanes // group, group))(n - 1)
    return device(lambda srcs, at: finish(rest(widen(load(srcs[0] + at)), srcs[1:], at)))


def _taking(load: Any, widen: Any, combine: Any) -> Callable[[int], Any]:
    """Makes functions that combine what was taken with some more sources, in order."""

    @cache
    def take(sources: int) -> Any:
        if sources == 1:
            return device(lambda taken, srcs, at: combine(taken, widen(load(srcs[0] + at))))
        half = sources // 2
        first, second = take(half), take(sources - half)
        return device(lambda taken, srcs, at: second(first(taken, srcs[:half], at), srcs[half:], at))

    return take


def _lanewise(combine: Any, parts: int, group: int) -> Any:
    """`combine` for tuples of `parts` groups."""
    if parts == 1:
        return combine
    half = parts // 2 * group
    part = _lanewise(combine, parts // 2, group)
    return device(lambda a, b: part(a[:half], b[:half]) + part(a[half:], b[half:]))


def _chain(lanes: int, group: int, *functions: Callable[..., Any] | None) -> Any:
    """Functions of a group one after another, for tuples of lanes."""
    chained = device(lambda a: a)
    for function in functions:
        if function is not None:
            chained = _after(chained, _mapped(function, lanes // group, group))
    return chained


def _after(first: Any, second: Any) -> Any:
    return device(lambda a: second(first(a)))


def _mapped(function: Any, parts: int, group: int) -> Any:
    """`function` for tuples of `parts` groups."""
    if parts == 1:
        return function
    half = parts // 2 * group
    part = _mapped(function, parts // 2, group)
    return device(lambda a: part(a[:half]) + part(a[half:]))
