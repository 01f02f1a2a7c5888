"""Waiting for MPI's requests, and the meeting that begins every collective over MPI.

Compiled code waits for requests. It returns at least every 50 ms, so that Python can check signals, peers and the
clock. In the meeting, each rank sends every other rank a *row*: 40 bytes that describe its call and, if its data is
small, the data. Rows are sent and received by persistent requests, not by a collective operation of MPI, because
requests show which ranks' rows have not arrived. MPI lets a message be shorter than the receive buffer, so one receive
request matches rows of any size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core import signature
from ...core.sizes import Sizes
from ...core.status import AGAIN, DONE
from ...kernels import waiting
from ...kernels.primitives import address_of
from ...record.recorder import GroupRecorder
from . import compiled as c
from .library import MpiLibrary

_BUDGET = 50_000_000  # ns after which a wait returns, so that Python checks signals, deadlines and peers
# The same if one lock serialises all calls of MPI (library.py); it is shorter because other threads wait for the lock.
_SERIAL_BUDGET = 1_000_000
_LOOK_EVERY = 0.05  # seconds between two calls of `look` with this shorter budget
# How many sweeps over the requests a thread does before its first yield, and how many yields before its first sleep. A
# sweep takes about 0.2 us. If there are more ranks than cores, a spinning rank would occupy the core of a rank for
# which it waits.
_DEDICATED, _OVERSUBSCRIBED = (300, 1000), (0, 200)

_abandoned: list[Any] = []
"""Requests for which no thread waits, and the memory that they use. MPI may access this memory until MPI_Finalize."""


class Requests:
    """Waits for MPI requests. Only one thread at a time may wait.

    `dedicated` is whether every rank of this host has a core of its own.

    Attributes:
        address: the address of the table of a wait (compiled.py); it changes when `load` or `reserve` enlarges the
            table.
    """

    def __init__(self, library: MpiLibrary, dedicated: bool) -> None:
        self._library = library
        self._table = np.zeros(c.SLOTS + 8, np.int64)
        spins, yields = _DEDICATED if dedicated else _OVERSUBSCRIBED
        self._table[waiting.SPINS], self._table[waiting.YIELDS] = spins, yields
        self._table[waiting.BUDGET] = _SERIAL_BUDGET if library.serial else _BUDGET
        self._table[c.TEST] = library.test
        self.address = address_of(self._table)
        self._looked = 0.0

    def ring(self) -> None:
        """Make the current or next wait return at once. Any thread may call this."""
        self._table[c.BELL] = 1

    def silence(self) -> None:
        """Undo `ring`: later waits do not return at once."""
        self._table[c.BELL] = 0

    def handles(self, requests: Sequence[Any]) -> list[int]:
        """Return the addresses of the requests' handles, valid while the requests live."""
        address = self._library.MPI._addressof
        return [address(request) for request in requests]

    def reserve(self, count: int) -> None:
        """Allocate slots for `count` requests."""
        if c.SLOTS + count > self._table.size:
            self._table = np.concatenate([self._table, np.zeros(2 * count, np.int64)])
            self.address = address_of(self._table)

    def load(self, handles: Sequence[int]) -> None:
        """Set the requests for which `poll` waits. All of them must be active."""
        count = len(handles)
        self.reserve(count)
        self._table[c.SLOTS : c.SLOTS + count] = handles
        self._table[c.COUNT] = count

    def open(self) -> list[int]:
        """Return the positions of the loaded requests that are not complete."""
        count = int(self._table[c.COUNT])
        return np.flatnonzero(self._table[c.SLOTS : c.SLOTS + count]).tolist()

    def poll(self, mode: int) -> bool:
        """Wait at most 50 ms for the loaded requests; return whether the wait is over.

        Args:
            mode: see MODE in compiled.py.

        Raises:
            MPI.Exception: a request failed.
        """
        self._table[c.MODE] = mode
        with self._library.lock:
            code = c.poll.call(self.address)
        if code < 0:
            raise self._library.MPI.Exception(-code)
        if code == AGAIN:
            self._yield_lock()
        return code == DONE

    def pause(self, look: Callable[[], None]) -> None:
        """Let other threads take the lock between two waits.

        Also calls `look`, at most every 50 ms.
        """
        self._yield_lock()
        if not self._library.serial or time.monotonic() - self._looked >= _LOOK_EVERY:
            self._looked = time.monotonic()
            look()

    def _yield_lock(self) -> None:
        if self._library.serial:
            # Without this sleep, this thread would take the lock again before a waiting thread has woken up.
            time.sleep(1e-5)

    def finish(self, requests: Sequence[Any], look: Callable[[], None], mode: int, keep: Any = ()) -> None:
        """Wait until all requests are complete.

        Args:
            look: called every 50 ms. If it raises an error, the requests and `keep` are kept until MPI is finalized.
            mode: see MODE in compiled.py.
            keep: the memory that the requests use.
        """
        self.load(self.handles(requests))
        try:
            while not self.poll(mode):
                self.pause(look)
        except BaseException:
            abandon(requests, keep)
            raise


def abandon(requests: Sequence[Any], keep: Any = ()) -> None:
    """Keep requests and their memory until MPI is finalized.

    They cannot be freed earlier, because MPI cannot cancel a request while a peer may be reading its data.
    """
    _abandoned.append((list(requests), keep))


ROOMS = (88, 1 << 10, 4 << 10, 16 << 10, 64 << 10)
"""A row has one of several sizes; these are the bytes of data for which each size has room. Times of an all_reduce with
its data in rows, and with its data moved after the meeting:

    us, 2-core AMD EPYC            1 KiB          16 KiB         64 KiB
    two ranks, MPICH 5.0.2         2.5 and 21     18 and 38      51 and 74
    two ranks, Open MPI 5.0.11     3.7 and 22     20 and 37      51 and 73
    four ranks                     12 and 118     43 and 178     86 and 232
"""
MEETING_WORDS = c.LIMITS + len(ROOMS)  # words of the largest context (compiled.py)
_MOST_BYTES = 256 << 10  # maximum memory that a rank has for the data in all ranks' rows


class Prepared:
    """The table of a call (compiled.py).

    It is made once for all calls with the same arguments and sizes.

    Args:
        code: the call word (core/signature.py), with the bit ON_GPU.
        sizes: bytes that the rank contributes, sends and expects.
        finish: the table's words from FINISH on. If there are none, Python completes the call after the meeting.

    Attributes:
        address: the address of the table.
        finishes: whether compiled code completes the call, without Python.
    """

    def __init__(self, code: int, sizes: Sizes, rank: int, finish: Sequence[int]) -> None:
        words = (code, sizes.shape, signature.balance(rank, sizes.gives, sizes.takes), *finish)
        self._table = np.array([*words, *[0] * (c.CALL_WORDS - len(words))], np.int64)
        self.address, self.sizes, self.finishes = address_of(self._table), sizes, bool(finish)


def row_sizes(ranks: int) -> list[int]:
    """Return the sizes of rows in bytes, ascending, in a group of `ranks` ranks."""
    rooms = [room for room in ROOMS if room == ROOMS[0] or room * ranks <= _MOST_BYTES]
    return [c.HEAD_BYTES + room for room in rooms]


class RowExchange:
    """The exchange of rows between a group's ranks, in MPI messages with one `tag`.

    Attributes:
        address: the address of the context (compiled.py).
        room: how many bytes of data a rank may attach to its row.
        rows: the rows of the current call, by group rank; the words of a row are ROW_... in compiled.py.
        attached: for each rank, the address in `rows` of the data attached to its row.
    """

    def __init__(
        self, library: MpiLibrary, comm: Any, dedicated: bool, tag: int, record: GroupRecorder
    ) -> None:
        sizes = row_sizes(comm.size)
        self.room = sizes[-1] - c.HEAD_BYTES
        self.rows: NDArray[np.int64] = np.zeros((comm.size, sizes[-1] // 8), np.int64)
        first = address_of(self.rows) + c.HEAD_BYTES
        self.attached = [first + sizes[-1] * rank for rank in range(comm.size)]
        self._library = library
        self._peers = [(comm.rank + step) % comm.size for step in range(1, comm.size)]
        MPI, own_row = library.MPI, self.rows[comm.rank]
        with library.lock:
            made = [comm.Recv_init([self.rows[peer], MPI.BYTE], peer, tag) for peer in self._peers]
            for size in sizes:
                made += [comm.Send_init([own_row[: size // 8], MPI.BYTE], peer, tag) for peer in self._peers]
        self._persistent = made
        self._requests = Requests(library, dedicated)
        self._requests.reserve(2 * len(self._peers))
        self._tables = [
            np.array(addresses, np.int64) for addresses in (self._requests.handles(made), self.attached)
        ]
        self._words: NDArray[np.int64] = record.context[: c.LIMITS + len(sizes)]
        self._record = record
        record.follow(c.CALLS, c.FINISHED)
        self._words[c.ROWS : c.CALLS] = address_of(self.rows), sizes[-1], comm.size, comm.rank
        self._words[c.TABLE : c.NEAR] = self._requests.address, library.start
        self._words[c.HANDLES : c.RING] = [address_of(table) for table in self._tables]
        self._words[c.RING] = record.ring
        self._words[c.LIMITS :] = [size - c.HEAD_BYTES for size in sizes]
        self.address = address_of(self._words)

    def __getitem__(self, word: int) -> int:
        return int(self._words[word])

    def end(self, how: str = "done") -> None:
        """End the current call, and record how it ended.

        `how` is one of ENDS in record/record.py.
        """
        self._words[c.IN_PROGRESS] = 0
        self._record.end(self[c.CALLS], how)

    def meet(
        self, prepared: Prepared, near: bool, attached: tuple[int, int], look: Callable[[], None]
    ) -> int:
        """Begin a call, and wait for all rows; return DONE or MISMATCH.

        Args:
            near: whether MPI's collective operations can address this rank's arrays (execution.py).
            attached: address and size of the data to attach, at most `room` bytes.
            look: called every 50 ms (see Requests.finish).
        """
        self._words[c.NEAR : c.HANDLES] = near, *attached
        with self._library.lock:
            code = c.meet.call(self.address, prepared.address)
        return self.resume(code, lambda: c.meet.call(self.address | c.RESUMED, prepared.address), look)

    def resume(self, code: int, again: Callable[[], int], look: Callable[[], None]) -> int:
        """Continue a compiled call that has returned `code`, and return its last status.

        `again` continues the compiled call, until it ends; `look` is called in between (see Requests.finish).
        """
        try:
            while code == AGAIN:
                self._requests.pause(look)
                with self._library.lock:
                    code = again()
            if code < 0:
                raise self._library.MPI.Exception(-code)
        except BaseException:
            abandon(self._persistent, (self.rows, self._words, self._tables))
            raise
        return code

    def late(self) -> list[int]:
        """Return the group ranks whose rows have not arrived."""
        return [self._peers[slot] for slot in self._requests.open() if slot < len(self._peers)]

    def free(self) -> None:
        """Free the requests; none may be active."""
        with self._library.lock:
            for request in self._persistent:
                request.Free()
