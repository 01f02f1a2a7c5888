"""Multiplying an array on a GPU by a number, as NumPy does: what PREMUL_SUM adds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ...core.reduce_op import PRODUCT
from .bits import lane_of
from .elements import combination, element_of
from .launch import Kernel
from .memory import accesses, size_of
from .toolkit import cuda, device


def scale(dst: int, src: int, count: int, dtype: np.dtype[Any], factor: Any, stream: int) -> None:
    """dst = src * factor; does not wait.

    Args:
        dst, src: device addresses, the same or apart, aligned to the elements.
        count: elements.
        dtype: float or complex, also bfloat16.
        factor: a number. It goes with the launch: pinned memory for it would be released on a thread that may not wait.
        stream: the handle of a CUDA stream of the current device.
    """
    if count:
        _kernel(dtype)(count, stream, dst, src, count, *_words(factor, dtype))


def _words(factor: Any, dtype: np.dtype[Any]) -> list[int]:
    """The bits of a number's lanes."""
    number = np.zeros(1, dtype)
    number[0] = factor
    words: list[int] = number.view(f"i{size_of(element_of(dtype).lane)}").tolist()
    return words


@cache
def _kernel(dtype: np.dtype[Any]) -> Any:
    return Kernel(scaler(dtype), 3, (element_of(dtype).lanes,))


def scaler(dtype: np.dtype[Any]) -> Callable[..., None]:
    """The kernel, as Python, an element at a time; `factor` is a tuple of words, one a lane."""
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
