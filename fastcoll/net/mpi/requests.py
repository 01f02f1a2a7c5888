"""Waiting for MPI requests, in compiled code, with looks at signals, peers and the clock in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core.status import AGAIN, DONE
from ...kernels import waiting
from ...kernels.primitives import address_of
from . import compiled as words
from .library import Library

_BUDGET = 50_000_000  # ns until Python looks at signals, deadlines and peers
_SERIAL_BUDGET = 1_000_000  # where other threads wait for this one's turn with MPI
_LOOK_EVERY = 0.05
# Sweeps before a thread yields, and before it sleeps; a sweep takes some 0.2 us. With more ranks than cores a
# spinning rank keeps the core from those it waits for.
_DEDICATED, _OVERSUBSCRIBED = (300, 1000), (0, 200)

_abandoned: list[Any] = []
"""Requests that nobody waits for any more, and what they read or write: MPI may use it until it is finalized."""


class Requests:
    """Waits for requests, one wait at a time; `dedicated` says whether every rank of this host has a core of its own.

    Attributes:
        address: of the table, until there are more requests than ever, or than were reserved for.
    """

    def __init__(self, library: Library, dedicated: bool) -> None:
        self._library = library
        self._table = np.zeros(words.SLOTS + 8, np.int64)
        spins, yields = _DEDICATED if dedicated else _OVERSUBSCRIBED
        self._table[waiting.SPINS], self._table[waiting.YIELDS] = spins, yields
        self._table[waiting.BUDGET] = _SERIAL_BUDGET if library.serial else _BUDGET
        self._table[words.TEST] = library.test
        self.address = address_of(self._table)
        self._looked = 0.0

    def ring(self) -> None:
        """Have a wait under way come back at once. From any thread."""
        self._table[words.BELL] = 1

    def silence(self) -> None:
        """The next wait goes on until something happens."""
        self._table[words.BELL] = 0

    def handles(self, requests: Sequence[Any]) -> list[int]:
        """The addresses of the requests' handles, valid while these live."""
        address = self._library.MPI._addressof
        return [address(request) for request in requests]

    def reserve(self, count: int) -> None:
        """Make room for so many requests."""
        if words.SLOTS + count > self._table.size:
            self._table = np.concatenate([self._table, np.zeros(2 * count, np.int64)])
            self.address = address_of(self._table)

    def load(self, handles: Sequence[int]) -> None:
        """Take requests in hand; they must be active."""
        count = len(handles)
        self.reserve(count)
        self._table[words.SLOTS : words.SLOTS + count] = handles
        self._table[words.COUNT] = count

    def open(self) -> list[int]:
        """The places of those that are not complete."""
        count = int(self._table[words.COUNT])
        return np.flatnonzero(self._table[words.SLOTS : words.SLOTS + count]).tolist()

    def poll(self, mode: int) -> bool:
        """Wait at most 50 ms for those in hand, as compiled.py says; whether that was enough.

        Raises:
            mpi4py.MPI.Exception: one of them failed.
        """
        self._table[words.MODE] = mode
        with self._library.lock:
            code = words.poll.call(self.address)
        if code < 0:
            raise self._library.MPI.Exception(-code)
        if code == AGAIN:
            self._give_way()
        return code == DONE

    def pause(self, look: Callable[[], None]) -> None:
        """Between two waits that were not enough: let other threads have their turn, and look every 50 ms."""
        self._give_way()
        if not self._library.serial or time.monotonic() - self._looked >= _LOOK_EVERY:
            self._looked = time.monotonic()
            look()

    def _give_way(self) -> None:
        if self._library.serial:
            time.sleep(1e-5)  # or the lock would be ours again before another thread has woken up

    def finish(self, requests: Sequence[Any], look: Callable[[], None], mode: int, keep: Any = ()) -> None:
        """Wait until all are complete, or `look`, called every 50 ms, raises.

        Args:
            keep: what the requests read and write, kept alive if the wait ends without them.
        """
        self.load(self.handles(requests))
        try:
            while not self.poll(mode):
                self.pause(look)
        except BaseException:
            abandon(requests, keep)
            raise


def abandon(requests: Sequence[Any], keep: Any = ()) -> None:
    """Never wait for these; MPI has no way to take back what others may be reading."""
    _abandoned.append((list(requests), keep))
