"""Packing of strided arrays on a GPU into contiguous ones and back, and scaled copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np
from numba import types

from ...arrays.dtypes import number
from ...core.reduce_op import PRODUCT
from .accesses import VECTOR, accesses, lane_of, size_of
from .combining import combination, element_of
from .kernel import Kernel, cuda, device

_WORDS = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}


class Strided(NamedTuple):
    """An array in device memory: its address, shape, strides in bytes, and bytes of an element."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def pack(dense: int, x: Strided, stream: int, back: bool = False, and_back: bool = False) -> None:
    """Copy a strided array to contiguous memory at `dense`, in C order; does not wait.

    Args:
        stream: a stream of the current device.
        back: copy in the other direction; the array's elements must not overlap.
        and_back: load the kernel for the other direction, too, so that nothing is loaded when that is queued.
    """
    nbytes = x.itemsize * prod(x.shape)
    if nbytes == 0:
        return
    extents, steps = coalesced((*x.shape, x.itemsize), (*x.strides, 1))
    if steps[-1] != 1:  # the last dimension must be consecutive bytes
        extents, steps = (*extents, 1), (*steps, 1)
    word = gcd(VECTOR, extents[-1], dense, x.address, *steps[:-1])
    extents, steps = coalesced((*extents[:-1], extents[-1] // word), (*steps[:-1], word))
    kernel, items = _mover(word, len(extents), not back), nbytes // word
    if and_back:
        _mover(word, len(extents), back).load()
    kernel(items, stream, dense, x.address, items, *extents, *steps)


def coalesced(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a shape and strides of the same elements in the same order.

    They have as few dimensions as possible, but at least one.
    """
    extents: list[int] = []
    steps: list[int] = []
    for extent, step in zip(shape, strides, strict=True):
        if extent == 1:
            continue
        if extents and steps[-1] == extent * step:
            extents[-1] *= extent
            steps[-1] = step
        else:
            extents.append(extent)
            steps.append(step)
    return (tuple(extents), tuple(steps)) if extents else ((1,), (0,))


@cache
def _mover(word: int, dimensions: int, packing: bool) -> Any:
    name = f"{'pack' if packing else 'unpack'} {word} {dimensions}"
    return Kernel(mover(word, dimensions, packing), 3, (dimensions, dimensions), name)


def mover(word: int, dimensions: int, packing: bool) -> Callable[..., None]:
    """Return the kernel that moves words of `word` bytes, as a Python function."""
    if word == VECTOR:
        load, store = accesses(types.uint64, 2, True)
    else:
        load, store = accesses(_WORDS[word], 1, False)
    offset = _offset(dimensions)

    def move(dense, strided, count, extents, steps):
        index = cuda.grid(1)
        while index < count:
            there = strided + offset(index, extents, steps)
            if packing:
                store(dense + index * word, load(there))
            else:
                store(there, load(dense + index * word))
            index += cuda.gridsize(1)

    return move


@cache
def _offset(dimensions: int) -> Any:
    """Return a function that computes an element's byte offset from its number in C order."""
    if dimensions == 1:
        return device(lambda index, extents, steps: index * steps[0])
    outer, last = _offset(dimensions - 1), dimensions - 1

    @device
    def offset(index, extents, steps):
        rest = index // extents[last]
        return outer(rest, extents[:last], steps[:last]) + (index - rest * extents[last]) * steps[last]

    return offset


def scale(dst: int, src: int, count: int, dtype: np.dtype[Any], factor: Any, stream: int) -> None:
    """Write src * factor to dst, for float or complex elements; does not wait.

    The two addresses are equal, or the arrays do not overlap. The factor is passed as launch arguments, not in pinned
    memory, which would be freed on a thread that must not wait.
    """
    if count:
        # The bits of its lanes.
        words = number(factor, dtype).view(f"i{size_of(element_of(dtype).lane)}").tolist()
        _scaler(dtype)(count, stream, dst, src, count, *words)


@cache
def _scaler(dtype: np.dtype[Any]) -> Any:
    return Kernel(scaler(dtype), 3, (element_of(dtype).lanes,), f"scale {dtype.str} {dtype}")


def scaler(dtype: np.dtype[Any]) -> Callable[..., None]:
    """Return the kernel that multiplies elements by a factor, as a Python function.

    The kernel's argument `factor` is a tuple of words, one per lane.
    """
    element = element_of(dtype)
    load, store = accesses(element.lane, element.lanes, False)
    size = size_of(element.lane) * element.lanes
    widen = element.widen or device(lambda a: a)
    narrow = element.narrow or device(lambda a: a)
    times = combination(PRODUCT, element, "c" if element.lanes == 2 else "f")
    lane = lane_of(element.lane)
    one = device(lambda words: (lane(words[0]),))
    lanes = device(lambda words: (lane(words[0]), lane(words[1]))) if element.lanes == 2 else one

    def multiply(dst, src, count, factor):
        by = widen(lanes(factor))
        index = cuda.grid(1)
        while index < count:
            store(dst + index * size, narrow(times(widen(load(src + index * size)), by)))
            index += cuda.gridsize(1)

    return multiply
