"""The rings of a segment as a pipe for messages."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from ..core.monitor import Monitor
from ..core.status import DONE, LATER
from ..errors import AbortedError, GroupError
from ..kernels import waiting
from ..kernels.primitives import address_of
from ..kernels.shared_words import publish_in, read
from ..p2p import handles
from ..p2p.pipe import Ack, Begun, Header, Posted, WordPipe
from ..p2p.transfers import Send, Transfer
from . import autotune, requests, ring_kernels, slot_memory
from . import rings as words
from .context import BUDGET, BackoffCounts
from .layout import RING_CONTROL
from .reach import unreadable
from .segment import Segment

OUT_ADDRESSES = [words.OUT_HEAD_AT, words.OUT, words.OUT_DATA]
IN_ADDRESSES = [words.IN_HEAD_AT, words.IN, words.IN_DATA]


class RingPipe(WordPipe):
    """The rings that begin or end at one rank; a peer's number is its rank in the segment.

    Args:
        segment: the ranks' segment.
        rank: this process's rank.
        monitor: the monitor of the segment's ranks.
        backoff: how the group's ranks wait.
        context: address of the group's context.
    """

    attends = True
    waits = requests.wait

    def __init__(
        self, segment: Segment, rank: int, monitor: Monitor, backoff: BackoffCounts, context: int
    ) -> None:
        layout = segment.layout
        super().__init__(words, words.MAILBOX_WORDS, words.CHANNEL_WORDS, layout.size)
        self._segment, self._rank, self._monitor = segment, rank, monitor
        self.table[waiting.SPINS], self.table[waiting.YIELDS] = backoff.spins, backoff.caller_yields
        self.table[words.BACKGROUND_YIELDS] = backoff.yields
        self.table[waiting.BUDGET] = BUDGET
        self.table[words.CHANNELS] = address_of(self.rows)
        self.table[words.SIZE] = layout.size
        self.table[words.RANK] = rank
        self.table[words.RING] = layout.ring
        self.table[words.CONTEXT] = context
        self.table[words.DIRECT_FROM] = autotune.NEVER
        self.table[words.ALGORITHMS] = 1 << autotune.CLOSE | 1 << autotune.PAST
        for peer in [peer for peer in range(layout.size) if peer != rank]:
            out, arriving = layout.ring_of(rank, peer), layout.ring_of(peer, rank)
            self.rows[peer, OUT_ADDRESSES] = [segment.address + offset for offset in out]
            self.rows[peer, IN_ADDRESSES] = [segment.address + offset for offset in arriving]

    def go_direct(self, algorithms: int, pids: Sequence[int], states: Sequence[int]) -> None:
        """Allow direct messages between the ranks, whose processes are `pids`.

        Args:
            algorithms: the allowed algorithms, as bits (autotune.py).
            states: addresses of the ranks' STATE words.
        """
        self.table[words.DIRECT_FROM] = autotune.direct_from(algorithms)
        self.table[words.ALGORITHMS] &= algorithms
        self.rows[:, words.IN_PID], self.rows[:, words.IN_STATE] = pids, states

    # ---- the lock of the rings -------------------------------------------------------------------

    def seize(self) -> bool:
        return waiting.seize.call(self.address + 8 * words.BUSY) == DONE

    def ring_bell(self) -> None:
        self.words[words.BELL] = 1

    def silence_bell(self) -> None:
        self.words[words.BELL] = 0

    # ---- memory ----------------------------------------------------------------------------------

    def is_ready(self, peer: int) -> bool:
        return peer == self._rank or self.word(peer, words.OUT_READY) != 0

    def prepare(self, peer: int) -> None:
        """Allocate the ring to a peer: its control words, except for HEAD, and its memory.

        Raises:
            ResourceError: /dev/shm is full, and no group of this process can free its slots.
        """
        layout = self._segment.layout
        _, control, memory = layout.ring_of(self._rank, peer)
        slot_memory.with_room(lambda: self._segment.allocate(control, RING_CONTROL))
        slot_memory.with_room(lambda: self._segment.allocate(memory, layout.ring))
        publish_in(self.rows.reshape(-1), peer * words.CHANNEL_WORDS + words.OUT_READY, 1)

    # ---- peers -----------------------------------------------------------------------------------

    def check(self, peer: int | None) -> None:
        for each in range(len(self.rows)) if peer is None else (peer,):
            if self.word(each, words.IN_REFUSED):
                raise unreadable(self._monitor, each)

    def garbled(self, peer: int) -> GroupError:
        return AbortedError(
            f"{self._monitor.name(peer)} wrote something into shared memory that is not a message of fastcoll",
            [self._monitor.members[peer].rank],
        )

    def has_unread(self, peer: int) -> bool:
        return read.call(self.word(peer, words.IN_HEAD_AT)) > self.word(peer, words.IN_TAIL)

    def retire(self) -> None:
        ring_kernels.retire.call(self.address)

    # ---- short cuts ------------------------------------------------------------------------------

    def send(self, array: NDArray[Any], peer: int, kind: int) -> int:
        return ring_kernels.send.call(self.address, peer, array, kind, array.nbytes)

    def receive(self, array: NDArray[Any], source: int, kind: int) -> int:
        return ring_kernels.receive.call(self.address, source, array, kind, array.nbytes)

    def leave_send(self, peer: int) -> tuple[int, bool, bool]:
        return self.word(peer, words.SENT), self._is_entering(peer), False

    def leave_receive(self, source: int) -> Begun | None:
        peer = self.words[words.SOURCE] - 1 if source < 0 else source
        self.words[words.SOURCE] = 0
        if peer < 0 or not self._is_receiving(peer):
            return None
        header = self.header(peer)
        return Begun(peer, header.number, arriving=True, whole=False, asking=False)

    # ---- requests ---------------------------------------------------------------------------------

    def request(self, transfer: Transfer, peer: int) -> bool:
        array, entry = (
            transfer.array,
            requests.post_send if isinstance(transfer, Send) else requests.post_receive,
        )
        number = entry.call(self.address, peer, array, transfer.kind, array.nbytes, transfer)
        if number >= 0:
            transfer.request = number
        return number >= 0

    def test_request(self, number: int) -> bool | None:
        code = requests.test.call(self.address, number)
        return None if code == LATER else code == -2

    def has_posted(self) -> bool:
        return self.words[words.REQUESTS + words.PENDING] != 0

    def take_posted(self, ended: bool) -> list[Posted]:
        table = self.table[words.REQUESTS :]
        found = [
            (index, record) for index, record in self._records() if record[words.STATE] < words.ENDED + ended
        ]
        taken = self._claim(found)
        table[words.PENDING] = table[words.TIMED] = 0
        return [self._posted(record) for record in taken]

    def take_ended(self) -> list[Transfer]:
        found = [
            (index, record)
            for index, record in self._records()
            if record[words.STATE] == words.ENDED and record[words.OWNER] & words.IS_WORK
        ]
        return [_work_of(record[words.OWNER]) for record in self._claim(found)]

    def _records(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each record in use, with its index.

        Other threads may change it meanwhile. NUMBER and STATE are acquired first, so the other words belong to this
        request and are complete, unless a thread has collected it; `_claim` finds that.
        """
        first = words.REQUESTS + words.RECORDS
        for index in range(words.RECORDS_AT_MOST):
            at = first + index * words.RECORD_WORDS
            number, state = (
                read.call(self.address + 8 * (at + word)) for word in (words.NUMBER, words.STATE)
            )
            if number > 0:
                yield index, [number, state, *self.words[at + words.STATE + 1 : at + words.RECORD_WORDS]]

    def _claim(self, found: list[tuple[int, list[int]]]) -> list[list[int]]:
        """Take these records, each with its index, from the mailbox; return those that were taken, in order.

        A waiting thread may collect an ended request at the same time; only one of the two threads gets it.
        """
        return sorted(
            record
            for index, record in found
            if ring_kernels.claim.call(self.address, index, record[words.NUMBER]) == DONE
        )

    def _posted(self, record: Sequence[int]) -> Posted:
        number, state, peer, message, kind, nbytes, address, owner, *refused = record
        entering = message == self.word(peer, words.SENT) and self._is_entering(peer)
        work = _work_of(owner) if owner & words.IS_WORK else None
        return Posted(
            number,
            work,
            message > 0,
            peer,
            kind,
            handles.memory(address, nbytes, 0 if work else owner),
            message,
            under_way=entering or state == words.ARRIVING,
            ended=state == words.ENDED,
            refused=(refused[1], refused[0]) if state == words.MISFIT else None,
        )

    def _is_entering(self, peer: int) -> bool:
        return self.word(peer, words.OUT_HEAD) < self.word(peer, words.OUT_END)

    def touched(self) -> int:
        return self.words[words.REQUESTS + words.TOUCHED]

    def stay_awake(self) -> None:
        self.words[words.REQUESTS + words.ATTENDANT] = threading.get_ident()
        self.words[words.REQUESTS + words.AWAKE] = 1

    def attend(self) -> int:
        return requests.attend.call(self.address)

    def recall(self) -> None:
        self.words[words.REQUESTS + words.RECALLED] = 1

    def may_sleep(self) -> bool:
        if not self.words[words.REQUESTS + words.AWAKE]:
            return True
        if not self.seize():
            return False
        quiet = not self.has_posted()
        if quiet:
            self.words[words.REQUESTS + words.AWAKE] = 0
        self.let_go()
        return quiet

    def _is_receiving(self, peer: int) -> bool:
        return self.word(peer, words.IN_TAIL) < self.word(peer, words.IN_END)

    # ---- steps -----------------------------------------------------------------------------------

    def advance(self, handled: int, wait: bool) -> int:
        return ring_kernels.advance.call(self.address, handled, wait)

    def begin(self, peer: int, send: Send, attached: int) -> tuple[int, bool]:
        ring_kernels.begin.call(self.address, peer, send.address, send.nbytes, send.kind)
        number, entering, _ = self.leave_send(peer)
        return number, entering

    def header(self, peer: int) -> Header:
        nbytes = self.word(peer, words.IN_NBYTES)
        # RECEIVED already counts a message that is arriving.
        number = self.word(peer, words.RECEIVED) + (not self._is_receiving(peer))
        return Header(self.word(peer, words.IN_KIND), nbytes, number, nbytes)

    def accept(self, peer: int, address: int, nbytes: int, keep: object) -> None:
        ring_kernels.accept.call(self.address, peer, address)

    def acknowledge(self, peer: int, ack: Ack) -> bool:
        return ring_kernels.acknowledge.call(self.address, peer, *ack) == DONE


def _work_of(owner: int) -> Transfer:
    """Return the Work that a record owns, and drop the record's reference."""
    work = ctypes.cast(owner ^ words.IS_WORK, ctypes.py_object)
    transfer: Transfer = work.value
    ctypes.pythonapi.Py_DecRef(work)
    return transfer
