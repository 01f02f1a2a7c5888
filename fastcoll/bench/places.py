"""Where the arrays of a run lie: in host memory, or on a GPU as CuPy's.

A rank on a GPU takes the one of its local rank, modulo how many there are, so that several ranks may share one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .patterns import Tile, count_wrong, fill

Array = NDArray[Any]

DEVICES = ("cpu", "cuda")


class Place(ABC):
    """What makes arrays there, and moves patterns in and out."""

    @abstractmethod
    def zeros(self, count: int, dtype: np.dtype[Any]) -> Any:
        """A flat array."""

    @abstractmethod
    def fill(self, x: Any, tile: Tile, start: int = 0) -> None:
        """As `patterns.fill`."""

    @abstractmethod
    def count_wrong(self, x: Any, tile: Tile, start: int = 0) -> int:
        """As `patterns.count_wrong`."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until what was called is done; at the end of each batch that is timed."""


class Host(Place):
    """NumPy's arrays, on which calls are done when they return."""

    def zeros(self, count: int, dtype: np.dtype[Any]) -> Array:
        return np.zeros(count, dtype)

    def fill(self, x: Array, tile: Tile, start: int = 0) -> None:
        fill(x, tile, start)

    def count_wrong(self, x: Array, tile: Tile, start: int = 0) -> int:
        return count_wrong(x, tile, start)

    def settle(self) -> None:
        """Nothing to do."""


class Cuda(Place):
    """CuPy's arrays on the GPU of a local rank, on CuPy's current stream."""

    def __init__(self, cupy: Any, local_rank: int) -> None:
        self._cupy = cupy
        cupy.cuda.Device(local_rank % cupy.cuda.runtime.getDeviceCount()).use()

    def zeros(self, count: int, dtype: np.dtype[Any]) -> Any:
        return self._cupy.zeros(count, dtype)

    def fill(self, x: Any, tile: Tile, start: int = 0) -> None:
        host = np.empty(x.shape, x.dtype)
        fill(host, tile, start)
        x.set(host)

    def count_wrong(self, x: Any, tile: Tile, start: int = 0) -> int:
        return count_wrong(x.get(), tile, start)

    def settle(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()


def place_of(device: str, local_rank: int) -> Place:
    """The place that `--device` names.

    Raises:
        UnavailableError: there is no CuPy, or no GPU.
    """
    if device == "cpu":
        return Host()
    from ..gpu.runtime import cupy

    return Cuda(cupy(), local_rank)
