"""The meeting that every collective over MPI begins with: each rank tells every other what it calls.

A row of 128 bytes travels between each two ranks by persistent requests, which can be taken back and show who has
not come; a collective operation of MPI can neither. Data of up to 88 bytes travels in the row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..kernels.pointers import address_of
from ..operands import Array
from . import mpi_kernels as words
from .mpi_library import Library
from .mpi_requests import Requests
from .sizes import Sizes

MOST_ATTACHED = 8 * (words.ROW_WORDS - words.PAYLOAD)
_MASK = (1 << 64) - 1


class Call(NamedTuple):
    """What a rank says of its call.

    Attributes:
        code: the call word of calls.py.
        sizes: bytes that it contributes, gives and expects.
        balance: a sum over what it gives less one over what it expects; over all ranks it is 0 if these match.
    """

    code: int
    sizes: Sizes
    balance: int


def balance_of(sizes: Sizes, rank: int) -> int:
    """The balance of one rank's sizes, as a signed word."""
    total = sum(_weight(rank, peer, nbytes) for peer, nbytes in enumerate(sizes.gives) if nbytes)
    total -= sum(_weight(peer, rank, nbytes) for peer, nbytes in enumerate(sizes.takes) if nbytes)
    return ((total & _MASK) ^ (1 << 63)) - (1 << 63)


def _weight(source: int, destination: int, nbytes: int) -> int:
    """64 well mixed bits (the finalizer of SplitMix64, Steele et al. 2014) for so many bytes between two ranks."""
    z = (nbytes + 0x9E3779B97F4A7C15 * (1 + source + (destination << 24))) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class Meeting:
    """The rows of a group's ranks.

    Args:
        comm: the group's communicator.
        tag: of the rows.

    Attributes:
        calls: how many calls have begun.
        under_way: whether a call has begun and is not over.
        rows: of the call under way, by group rank.
        attached: the address of what each rank attached.
    """

    def __init__(self, library: Library, comm: Any, requests: Requests, tag: int) -> None:
        self.size, self.rank = comm.size, comm.rank
        self.calls = 0
        self.under_way = False
        self.rows: Array = np.zeros((self.size, words.ROW_WORDS), np.int64)
        self._mine = self.rows[self.rank]
        self._address = address_of(self.rows)
        self.attached = [
            self._address + 8 * (words.ROW_WORDS * rank + words.PAYLOAD) for rank in range(self.size)
        ]
        self._library = library
        self._requests = requests
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        byte = library.MPI.BYTE
        with library.lock:
            takes = [comm.Recv_init([self.rows[peer], byte], peer, tag) for peer in self._peers]
            gives = [comm.Send_init([self._mine, byte], peer, tag) for peer in self._peers]
        self._persistent = [*takes, *gives]
        self._handles = requests.handles(self._persistent)

    def meet(self, call: Call, near: bool, attached: Sequence[int], look: Callable[[], None]) -> int:
        """Begin a call; returns what `mpi_kernels.compare` says once all rows are here.

        Args:
            near: whether MPI's collective operations can address this rank's arrays.
            attached: address and bytes, at most 88, of what goes in the row; or empty.
            look: as for Requests.finish.
        """
        self.calls += 1
        self.under_way = True
        mine = self._mine
        mine[: words.PAYLOAD] = (self.calls, call.code, call.sizes.shape, call.balance, near)
        if attached:
            ctypes.memmove(self.attached[self.rank], *attached)
        if self._persistent:
            with self._library.lock:
                self._library.MPI.Prequest.Startall(self._persistent)
            self._requests.finish(self._persistent, look, 0, self.rows, self._handles)
        return words.compare.call(self._address, self.size)

    def late(self) -> list[int]:
        """The group ranks whose rows have not come."""
        return [self._peers[slot] for slot in self._requests.open() if slot < len(self._peers)]

    def free(self) -> None:
        """Release the requests; none may be active."""
        with self._library.lock:
            for request in self._persistent:
                request.Free()
