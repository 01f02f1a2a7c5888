"""Symmetric arrays of a group in shared memory: creation by all ranks, signals, and all_reduce in place.

Each array has a segment of its own. The ranks communicate through the group itself: they compare the requested arrays,
and rank 0 publishes the segment's name before it creates the segment, so that every survivor can unlink the name. All
ranks unlink it at the end, also after an error.

all_reduce combines the arrays in rank order, like ordinary arrays. Each rank reduces its slice directly from
all ranks' arrays and stores the result into all of them. It begins after the meeting (rounds.py), because a peer that
has not begun the call may still use its array. A second round ends when all slices are stored. No two ranks write to
the same cache line.

Three alternatives were measured (2 ranks on 2 cores of an EPYC). If each rank reads the results of its peers instead of
storing its own result into their arrays, a third round is needed; this took 3 to 9 % longer up to 4 MiB, and as long
for larger arrays. Stores past the caches took up to 40 % longer. A reduce_scatter that reads peers' arrays directly
took as long as the ordinary one.

A table lists the ranges of this process's memory that are symmetric arrays of the group. The compiled functions that
Python calls (*entries*) look up the addresses of a call's arrays in it.

    word 0      number of rows that were ever used
    row         ROW_WORDS words: START address of this rank's array (0: free), its NBYTES, ID of its segment, which
                is the same on all ranks, and STRIDE from one rank's array to the next rank's

Rows may change while entries of other threads read them, but the row of an array that is in use does not change. So
Python publishes START last and clears it first, and a reader checks START before and after it reads the other words,
all of them with acquire.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import errors, failpoints
from ..arrays.arrays import Array
from ..compiler.jit import entry, inlined, kernel
from ..core import signature
from ..core.backend import SymmetricMemory
from ..core.gate import Gate
from ..core.monitor import Monitor, Wait
from ..core.status import AGAIN, DONE, WORKED
from ..kernels import waiting
from ..kernels.copy import copy
from ..kernels.failing import reached
from ..kernels.primitives import (
    address_of,
    call_reducer,
    load_acquire,
    load_word,
    start_of,
    store_word,
    swap_if_equal,
    weigh,
)
from ..kernels.pyobjects import Index, integer
from ..kernels.shared_words import publish_in
from . import context_layout as at
from . import rounds as r
from . import segment as shared
from . import validate as v
from .context import BUDGET, ShmContext
from .layout import CHANNELS, SymmetricLayout

START, NBYTES, ID, STRIDE = range(4)
ROW_WORDS = 4
Words = np.ndarray[Any, np.dtype[np.int64]]
MOST_ROWS = 1 << 16  # about as many segments as Linux lets a process map

_COPY_BYTES = 64 << 20  # bytes, which take a few ms; after them, Python handles signals
Exchange = Callable[[str], list[str]]
"""A collective function: each rank passes a note of at most signature.NOTE_BYTES, and gets the notes of all ranks."""


@kernel
def find_row(c, address, nbytes):
    """Return the address of the row of the array that contains these bytes; 0: no symmetric array contains them."""
    table = load_acquire(c + 8 * at.SYMMETRIC)
    for k in range(load_acquire(table)):
        row = table + 8 * (1 + ROW_WORDS * k)
        start = load_acquire(row)
        end = start + load_acquire(row + 8 * NBYTES)
        if start != 0 and start <= address and address + nbytes <= end and load_acquire(row) == start:
            return row
    return 0


class SymmetricTable:
    """The table of a group, allocated with the group's first array; unused pages take no memory."""

    def __init__(self, context: Words) -> None:
        self._context = context
        self._words: Words | None = None
        self._free: list[int] = []

    def add(self, owner: object, start: int, nbytes: int, identity: int, stride: int) -> None:
        """Add an array until `owner` is garbage-collected."""
        if self._words is None:
            self._words = np.zeros(1 + ROW_WORDS * MOST_ROWS, np.int64)
            publish_in(self._context, at.SYMMETRIC, address_of(self._words))
        words = self._words
        if self._free:
            first = self._free.pop()
        else:
            assert words[0] < MOST_ROWS
            first = 1 + ROW_WORDS * int(words[0])
            words[0] += 1
        words[first + ID], words[first + STRIDE] = identity, stride
        publish_in(words, first + NBYTES, nbytes)
        publish_in(words, first, start)

        def take_out() -> None:
            publish_in(words, first, 0)
            self._free.append(first)

        weakref.finalize(owner, take_out).atexit = False


# Bytes. Smaller arrays use the ordinary algorithm, which waits for all ranks once instead of twice. Microseconds of an
# all_reduce after an in-place product of the array, first by the ordinary algorithm, then by the one of this file (2
# cores of an EPYC; docs/arrays.md): for 8 KiB 2.5 and 1.7 with 2 ranks, 10.6 and 13.6 with 4 ranks; for 16 KiB 3.5
# and 2.0 with 2 ranks, 14.1 and 13.3 with 4 ranks.
SMALLEST = 16 << 10
PIECE = 64 << 10  # bytes reduced before they are stored to the peers; 16 to 256 KiB took the same time
_LINE_OF_ELEMENTS = 64  # slices begin at multiples of 64 elements, so that ranks share no cache line
_ORDINARY = signature.code_of("all_reduce")
OPERATION = signature.code_of("symmetric:all_reduce")
_STORED = failpoints.number_of("shm.symmetric.piece_stored")
_PUT = failpoints.number_of("shm.symmetric.after_put")
_SIGNAL = failpoints.number_of("shm.symmetric.before_signal")


@inlined
def _balance_of(c, position):
    """Return this rank's balance: over all ranks, the balances add up to 0 if all have the same `position`."""
    rank, size = load_word(c, at.RANK), load_word(c, at.SIZE)
    return weigh(rank, (rank + 1) % size, position) - weigh((rank - 1) % size, rank, position)


@kernel
def all_reduce_in_place(c, x, nbytes, spec, call, row):
    """Run an all_reduce of nbytes at x, which are part of the symmetric array of `row`."""
    rank, size = load_word(c, at.RANK), load_word(c, at.SIZE)
    itemsize, stride = load_word(spec, v.ITEMSIZE), load_word(row, STRIDE)
    call += OPERATION - _ORDINARY
    balance = _balance_of(c, load_word(row, ID) + x - load_word(row, START))
    if load_word(c, at.WROTE) == 0:
        # If the calls do not match, the error shows the array, and the offset in it.
        store_word(r.table(c, at.GIVES + 1), 0, load_word(row, ID))
        store_word(r.table(c, at.GIVES + 1), 1, x - load_word(row, START))
        store_word(c, at.DID, 0)
        r.publish(c, call, nbytes, balance)
    met = r.meet(c, call, nbytes, balance)
    if met != DONE:
        return met
    if load_word(c, at.READ) == 0:
        r.close_round(c, 2)
    low = start_of(nbytes, size, rank, _LINE_OF_ELEMENTS * itemsize)
    high = start_of(nbytes, size, rank + 1, _LINE_OF_ELEMENTS * itemsize)
    piece = max(1, PIECE // itemsize) * itemsize
    while low + load_word(c, at.DID) < high:
        start = low + load_word(c, at.DID)
        part = min(piece, high - start)
        mine = x + start
        for peer in range(size):
            store_word(r.table(c, at.SOURCES), peer, mine + (peer - rank) * stride)
        reducer, code = load_word(spec, v.REDUCER), load_word(spec, v.CODE)
        call_reducer(reducer, code, mine, r.table(c, at.SOURCES), size, part // itemsize)
        for shift in range(1, size):
            copy(mine + ((rank + shift) % size - rank) * stride, mine, part)
        reached(_STORED)
        store_word(c, at.DID, load_word(c, at.DID) + part)
        if r.time_is_up(c):
            return WORKED
    if load_word(c, at.WROTE) == 1:
        r.publish(c, call, nbytes, balance)
    if r.await_all(c) != DONE:
        return AGAIN
    r.close_round(c, 2)
    return r.finish(c)


@entry
def copy_bytes(dst: Index, src: Index, nbytes: Index) -> int:
    """Copy nbytes between two ranges that are equal or disjoint."""
    copy(integer(dst), integer(src), integer(nbytes))
    reached(_PUT)
    return DONE


@entry
def count_signal(word: Index) -> int:
    """Add 1 to a shared word; earlier writes are visible to a reader that acquires the word."""
    address = integer(word)
    reached(_SIGNAL)
    while True:
        count = load_acquire(address)
        if swap_if_equal(address, count, count + 1):
            return DONE


@entry
def await_signal(backoff: Index, word: Index, want: Index) -> int:
    """Wait until a shared word is at least `want`: DONE, or AGAIN after 50 ms."""
    return DONE if waiting.wait_for(integer(backoff), integer(word), integer(want)) else AGAIN


# ---- the arrays --------------------------------------------------------------------------------------------


class SymmetricArrays:
    """The symmetric arrays of a group on one of its ranks. `fail` is a function that fails the group."""

    def __init__(
        self, gate: Gate, monitor: Monitor, context: ShmContext, fail: Callable[[errors.GroupError], None]
    ) -> None:
        self.gate, self.monitor, self.context, self.fail = gate, monitor, context, fail
        self.waits: set[object] = set()
        self._table = SymmetricTable(context.words)

    def allocate(self, exchange: Exchange, nbytes: int, label: str) -> ShmMemory:
        """Allocate nbytes for each rank, all zeros; collective."""
        layout = SymmetricLayout(self.gate.size, nbytes)
        segment = self._meet(exchange, layout, label)
        memory = ShmMemory(self, segment, layout)
        own = memory.address + memory.rank * memory.stride
        self._table.add(memory, own, nbytes, segment.nonce, memory.stride)
        return memory

    def _meet(self, exchange: Exchange, layout: SymmetricLayout, label: str) -> shared.Segment:
        rank, ranks = self.gate.rank, self.gate.ranks
        name = self._agree(exchange, label)
        segment: shared.Segment | None = None
        try:
            for maker in (True, False):
                error = ""
                if maker == (rank == 0):
                    try:
                        # Check before anything is reserved: to reserve memory and release it again could make another
                        # program fail for lack of it.
                        if maker and layout.nbytes > shared.free_bytes():
                            raise errors.ResourceError(shared.shortage(layout.nbytes, layout.cure))
                        segment = (shared.Segment.create if maker else shared.Segment.attach)(name, layout)
                        failpoints.reach("shm.symmetric.after_segment")
                    except (errors.ResourceError, OSError) as refused:
                        # A peer that gives up fails the group before it unlinks the name. So if the group has failed,
                        # that may be the cause of this error, and is raised instead.
                        if (failure := self.monitor.decide((), f"symmetric.empty of {label}")) is not None:
                            self.fail(failure)
                            raise failure from None
                        error = f"{label}: {refused}"
                for peer, refusal in zip(ranks, exchange(error), strict=True):
                    if refusal:
                        raise errors.ResourceError(f"rank {peer} cannot make a symmetric array of {refusal}")
        except BaseException as error:
            if not isinstance(error, errors.FastcollError):
                me = f"rank {ranks[rank]}"
                self.fail(errors.AbortedError(f"{me} was interrupted in symmetric.empty: {error!r}"))
            raise
        finally:
            shared.unlink(name)
        assert segment is not None
        return segment

    def _agree(self, exchange: Exchange, label: str) -> str:
        """Return the segment's name if all ranks request the same array, else raise MismatchError."""
        name = shared.new_name() if self.gate.rank == 0 else ""
        if len(label.encode()) > signature.NOTE_BYTES // 2:
            label = f"{label[: signature.NOTE_BYTES // 8]}... ({zlib.crc32(label.encode()):#x})"
        notes = exchange(f"{name}\n{label}")
        labels = [note.partition("\n")[2] for note in notes]
        if len(set(labels)) > 1:
            asked = "; ".join(
                f"rank {rank}: {text}" for rank, text in zip(self.gate.ranks, labels, strict=True)
            )
            raise errors.MismatchError(
                f"the ranks ask for different symmetric arrays: {asked}; give the same shape and dtype on all ranks"
            )
        return notes[0].partition("\n")[0]


class ShmMemory(SymmetricMemory):
    """The segment of one symmetric array.

    When this object is garbage-collected, the array's row is removed from the table, and then the segment is unmapped.
    """

    channels = CHANNELS

    def __init__(self, arrays: SymmetricArrays, segment: shared.Segment, layout: SymmetricLayout) -> None:
        address = segment.address + layout.section(0) + layout.array_at
        super().__init__(arrays.gate.ranks, arrays.gate.rank, address, layout.stride, layout.slot)
        self._segment, self._layout = segment, layout
        # A weak reference, because of a cycle: a failed group keeps its error, the error's traceback keeps frames,
        # frames keep ndarrays, and an ndarray keeps this object. The garbage collector would not find the cycle,
        # because it does not follow an ndarray's base.
        self._arrays = weakref.ref(arrays)
        self._incoming: dict[tuple[int, int], _Incoming] = {}

    def _usable_arrays(self) -> SymmetricArrays:
        arrays = self._arrays()
        if arrays is None:
            raise errors.NotInitializedError("the group of the symmetric array was destroyed; make a new one")
        arrays.gate.check_usable()
        return arrays

    def copy(self, dst: Array, src: Array) -> None:
        self._usable_arrays()
        to, source, nbytes = address_of(dst), address_of(src), dst.nbytes
        for start in range(0, nbytes, _COPY_BYTES):
            copy_bytes.call(to + start, source + start, min(_COPY_BYTES, nbytes - start))

    def signal(self, rank: int, channel: int) -> None:
        self._usable_arrays()
        count_signal.call(self._segment.address + self._layout.signal(self.rank, rank, channel))

    def wait(self, rank: int, channel: int, timeout: float | None) -> None:
        arrays = self._usable_arrays()
        key = rank, channel
        incoming = self._incoming.get(key) or self._incoming.setdefault(key, _Incoming(arrays.context))
        word = self._segment.address + self._layout.signal(rank, self.rank, channel)
        limit = arrays.gate.timeout if timeout is None else timeout
        wait: Wait | None = None
        if not incoming.lock.acquire(blocking=False):
            raise errors.UsageError(
                f"two threads wait for signals of rank {self.ranks[rank]} on channel {channel}; give each a channel"
            )
        try:
            arrays.waits.add(incoming)  # now the group counts as busy, so `destroy` aborts it first
            arrays.gate.check_usable()
            while await_signal.call(incoming.address, word, incoming.taken + 1) != DONE:
                doing = f"symmetric.wait on channel {channel}"
                wait = wait or Wait(arrays.monitor, doing, lambda: [rank], limit)
                wait.look()
            incoming.backoff[waiting.IDLE] = 0
            incoming.taken += 1
        except errors.GroupError as error:
            arrays.fail(error)
            raise
        finally:
            arrays.waits.discard(incoming)
            incoming.lock.release()
            if wait is not None:
                wait.over()


class _Incoming:
    """State of the signals that this rank receives from one peer on one channel."""

    def __init__(self, context: ShmContext) -> None:
        self.lock = threading.Lock()
        self.taken = 0
        self.backoff = context.words[at.BACKOFF : at.CHOOSING].copy()
        self.backoff[waiting.IDLE], self.backoff[waiting.BUDGET] = 0, BUDGET
        self.backoff[[waiting.SPINS, waiting.YIELDS]] = context.words[at.FULL_WAIT : at.FULL_WAIT + 2]
        self.address = address_of(self.backoff)
