"""Symmetric memory: an array of each rank of a group, all of them mapped by every rank. The contract for backends.

The ndarrays that lead into it have it as their base, so it stays as long as there is one of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..interop.arrays import Array


class SymmetricMemory(ABC):
    """As many bytes a rank, at equal distances in this process's memory.

    Attributes:
        ranks: global rank of each group rank.
        rank: this process's rank in the group.
        address: of group rank 0's array.
        stride: bytes from one rank's array to the next one's.
        nbytes: of one rank's array.
    """

    def __init__(self, ranks: Sequence[int], rank: int, address: int, stride: int, nbytes: int) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.address = address
        self.stride = stride
        self.nbytes = nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        length = (len(self.ranks) - 1) * self.stride + self.nbytes
        return {"version": 3, "typestr": "|u1", "shape": (length,), "data": (self.address, False)}

    def array(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """The beginning of this rank's array."""
        return np.ndarray(shape, dtype, np.asarray(self), self.rank * self.stride)

    def peer(self, x: Array, rank: int) -> Array:
        """What x, a part of one rank's array, is in the array of group rank `rank`."""
        offset = (x.__array_interface__["data"][0] - self.address) % self.stride
        return np.ndarray(x.shape, x.dtype, np.asarray(self), offset + rank * self.stride, x.strides)

    @abstractmethod
    def copy(self, dst: Array, src: Array) -> None:
        """dst = src, both C-contiguous and apart, of one dtype and size. Does not wait for anybody.

        Raises:
            GroupError: the group has failed.
            NotInitializedError: it was destroyed.
        """

    @abstractmethod
    def signal(self, rank: int, channel: int) -> None:
        """Count one signal to group rank `rank`, who then sees all that was written before; raises as `copy`."""

    @abstractmethod
    def wait(self, rank: int, channel: int, timeout: float | None) -> None:
        """Take one signal from group rank `rank`; blocks until there is one.

        Args:
            timeout: seconds; None for the group's own.

        Raises:
            GroupError: the peer died, left, or sent none in time; the group has failed then, as after a collective.
            NotInitializedError: it was destroyed.
            UsageError: another thread waits for the same signals.
        """

    @property
    @abstractmethod
    def channels(self) -> int:
        """How many channels there are."""


def memory_of(x: Array) -> SymmetricMemory | None:
    """The symmetric memory that an ndarray leads into; None: it is an ordinary one."""
    base: Any = x
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, SymmetricMemory) else None
