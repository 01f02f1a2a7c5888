"""Multiplying an array on a GPU by a number, as NumPy does: what PREMUL_SUM adds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ...reduce_op import PRODUCT
from .elements import combination, element_of
from .launch import Kernel
from .memory import accesses, size_of
from .toolkit import cuda, device


def scale(dst: int, src: int, count: int, dtype: np.dtype[Any], factor: int, stream: int) -> None:
    """dst = src * factor; does not wait.

    Args:
        dst, src: device addresses, the same or apart, aligned to the elements.
        count: elements.
        dtype: float or complex, also bfloat16.
        factor: the address of a number of this dtype, in device memory or pinned host memory.
        stream: the handle of a CUDA stream of the current device.
    """
    if count:
        _kernel(dtype)(count, stream, dst, src, count, factor)


@cache
def _kernel(dtype: np.dtype[Any]) -> Any:
    return Kernel(scaler(dtype), 4, ())


def scaler(dtype: np.dtype[Any]) -> Callable[..., None]:
    """The kernel, as Python, an element at a time."""
    element = element_of(dtype)
    load, store = accesses(element.lane, element.lanes, False)
    size = size_of(element.lane) * element.lanes
    widen = element.widen or device(lambda a: a)
    narrow = element.narrow or device(lambda a: a)
    times = combination(PRODUCT, element, "c" if element.lanes == 2 else "f")

    def multiply(dst, src, count, factor):
        by = widen(load(factor))
        index = cuda.grid(1)
        while index < count:
            store(dst + index * size, narrow(times(widen(load(src + index * size)), by)))
            index += cuda.gridsize(1)

    return multiply
