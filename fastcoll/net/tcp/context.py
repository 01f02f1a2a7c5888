"""A TCP group's tables for the engine: the context, and the prepared calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.operands import Array
from ...kernels import waiting
from ...kernels.primitives import address_of
from . import words
from .dissemination import dissemination
from .plans.shape import MEET_RANKS, Limits, default_limits
from .plans.table import (
    BUFFER,
    BUFFER2,
    COPY,
    FOLD,
    FRAMES,
    KIND,
    NBYTES,
    OFFSET,
    OFFSET2,
    PAYLOAD,
    PEER,
    PHASE,
    RECV,
    REDUCE,
    SCRATCH,
    SEND,
    SOURCE,
    Plan,
)
from .rows import PIECE
from .sizes import Sizes
from .words import PREPARED_WORDS, header_bytes

BUDGET = 50_000_000  # ns that the engine may work before Python looks at signals, deadlines and peers


def limits_for(size: int) -> Limits:
    """The limits of plans in a group of `size` ranks; a frame holds a header and the largest payload."""
    limits = default_limits(size)
    return limits._replace(frame_stride=header_bytes(size) + limits.payload)


class Prepared:
    """One call as the engine knows it, for any arrays of these sizes.

    Attributes:
        address: of the words that the engine reads; valid while this object lives.
        call, shape: the fingerprint, see core/signature.py.
        peers: whom its plan sends to or receives from.
        ready: whether there are connections to all of them, and room for it.
    """

    def __init__(
        self,
        call: int,
        sizes: Sizes,
        plan: Plan,
        frame: int,
        reducer: Sequence[int],
        itemsize: int,
        balance: int = 0,
    ) -> None:
        table = plan.table
        moves = table[np.isin(table[:, KIND], (SEND, RECV, REDUCE))]
        self.plan = plan
        self.call, self.shape = call, sizes.shape
        self.ready = False
        self.peers = sorted(set(moves[:, PEER].tolist()))
        self.rows_of_a_phase = _longest_run(table[:, PHASE])
        self.reduces_of_a_phase = _longest_run(table[table[:, KIND] == REDUCE][:, PHASE])
        self.sources = int(table[table[:, KIND] == FOLD][:, PEER].max(initial=2))
        self._tables = [
            np.array(_attached(table, frame, len(sizes.gives)), np.int64),
            np.array([*sizes.gives, *sizes.takes], np.int64),
            table,
        ]
        attached, told, _ = map(address_of, self._tables)
        payloads = int((table[:, KIND] == PAYLOAD).sum())
        at = address_of(table)
        values = [call, sizes.shape, at, len(table), payloads, *reducer, itemsize, attached, told, balance]
        self._words = np.array(values, np.int64)
        assert self._words.size == PREPARED_WORDS
        self.address = address_of(self._words)


def _longest_run(phases: Array) -> int:
    return int(np.unique(phases, return_counts=True)[1].max(initial=0))


def _attached(table: Array, frame: int, size: int) -> list[int]:
    """Bytes that each peer attaches to its header, as the local rows use them."""
    found = [0] * size

    def used(offset: int, nbytes: int) -> None:
        peer, start = divmod(offset, frame)
        found[peer] = max(found[peer], start + nbytes)

    folded = 0
    for row in table.tolist():
        if row[KIND] == FOLD:
            folded = row[NBYTES]
        elif row[KIND] == SOURCE and row[BUFFER] == FRAMES:
            used(row[OFFSET], folded)
        elif row[KIND] == COPY and row[BUFFER2] == FRAMES:
            used(row[OFFSET2], row[NBYTES])
    return found


class NetContext:
    """The context of one rank, and typed access to the words that Python needs.

    Args:
        limits: as `limits_for` gives them.
        streams: connections to each peer.
        patience: sweeps in vain before the thread sleeps.
    """

    def __init__(self, size: int, rank: int, limits: Limits, streams: int, patience: int) -> None:
        self.size, self.rank, self.streams = size, rank, streams
        header = header_bytes(size)
        self.frame = limits.frame_stride
        self.words = np.zeros(words.CONTEXT_WORDS, np.int64)
        self.address = address_of(self.words)
        self._kept: dict[int, Array] = {}
        self._buffers = np.zeros(2 * size + 8, np.int64)
        self.fds = np.full((size, streams), -1, np.int64)
        self._inbox = np.zeros(size * self.frame // 8, np.int64)
        self._set(words.RANK, rank)
        self._set(words.SIZE, size)
        self._set(words.STREAMS, streams)
        self._set(words.HEADER, header)
        self._set(words.FRAME, self.frame)
        self._set(words.PATIENT_SWEEPS, patience)
        self._set(words.PATIENCE + waiting.BUDGET, BUDGET)
        self._keep(words.FDS, self.fds)
        self._keep(words.OUTBOX, np.zeros(size * self.frame // 8, np.int64))
        self._keep(words.INBOX, self._inbox)
        self._keep(words.SENT, np.zeros(size, np.int64))
        self._keep(words.HAVE, np.zeros(size, np.int64))
        self._keep(words.BUFFERS, self._buffers)
        self._keep(words.BUSY, np.zeros(2 * size * streams, np.int64))
        self._keep(words.POLLFDS, np.zeros(2 * size * streams, np.int64))
        self._buffers[FRAMES] = address_of(self._inbox) + (header if size <= MEET_RANKS else 0)
        self._scratch = np.empty(0, np.uint8)
        if size > MEET_RANKS:
            self._meeting = self._prepare_meeting(header)
            self._set(words.MEETING, self._meeting.address)
            self.make_room(self._meeting)

    def __getitem__(self, index: int) -> int:
        return int(self.words[index])

    def _set(self, word: int, value: int) -> None:
        self.words[word] = value

    def _keep(self, word: int, table: Array) -> None:
        """Let a word be a table's address; the table lives until another takes its place."""
        self._kept[word] = table
        self.words[word] = address_of(table)

    def _prepare_meeting(self, header: int) -> Prepared:
        plan = Plan(dissemination(self.size, self.rank, header), 0, "dissemination")
        nothing = (0,) * self.size
        return Prepared(0, Sizes(0, nothing, nothing), plan, self.frame, (0, 0), 1)

    @property
    def met(self) -> list[int]:
        """The peers that a meeting sends to or receives from."""
        if self.size > MEET_RANKS:
            return self._meeting.peers
        return [peer for peer in range(self.size) if peer != self.rank]

    def make_room(self, prepared: Prepared) -> None:
        """Let the private tables be as large as a call needs them."""
        self._grow(words.PARTS, 16 * prepared.rows_of_a_phase * self.streams)
        self._grow(words.STAGING, 2 * PIECE * prepared.reduces_of_a_phase * self.streams)
        self._grow(words.SOURCES, 8 * prepared.sources)
        if prepared.plan.scratch > self._scratch.nbytes:
            self._scratch = np.empty(prepared.plan.scratch, np.uint8)
            self._buffers[SCRATCH] = address_of(self._scratch)

    def _grow(self, word: int, nbytes: int) -> None:
        if word not in self._kept or nbytes > self._kept[word].nbytes:
            self._keep(word, np.empty(-(-nbytes // 8), np.int64))

    def headers(self) -> Array:
        """The headers of the call under way, a row of words a rank; what has not come is of an earlier call."""
        count = self[words.HEADER] // 8
        return self._inbox.reshape(self.size, -1)[:, :count]

    @property
    def waited_for(self) -> list[int]:
        """The peers of the connections that the engine has waited for last."""
        listed = self._kept[words.POLLFDS][: self[words.WAITING]] & 0xFFFFFFFF
        return np.flatnonzero(np.isin(self.fds, listed).any(axis=1)).tolist()

    @property
    def under_way(self) -> bool:
        """Whether a call has begun and is not over."""
        return self[words.STAGE] != words.IDLE
