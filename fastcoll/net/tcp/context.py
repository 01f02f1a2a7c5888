"""The tables that the engine reads and writes for a TCP group: the context, and the prepared calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core import signature
from ...core.operands import Array
from ...core.operations import KINDS
from ...kernels import waiting
from ...kernels.primitives import address_of
from ...kernels.shared_words import read
from . import engine_layout as w
from .executor import IO_BYTES
from .meet import AHEAD, PIGGYBACK_BYTES
from .plans import plan as t
from .plans.circulant import combine_headers, gather_headers, known_before
from .plans.node_meeting import combine_by_nodes, nodes_before
from .plans.relayed import parts_written
from .plans.shape import HEADER_BYTES, MEET_RANKS, CallShape, Limits, relay

BUDGET = 50_000_000  # ns after which the engine returns so that Python looks at signals, deadlines and peers


class PreparedPlan:
    """A prepared call in the form that the engine reads.

    It serves for all arrays of the same sizes.

    Attributes:
        address: the address of the prepared call's words (engine_layout.py); valid while this object lives.
        call, shape: the call word and shape (core/signature.py).
        sizes: the bytes that this rank sends to each rank, and the bytes that it expects from each rank.
        peers: the ranks with which the plan exchanges data.
        ready: whether this rank has connections with all peers of the meeting, and memory for the plan.
        even: the call that the engine makes instead if all blocks of all ranks have one size; or None.
        relays: the parts of this rank's relay memory to which the plan writes.
    """

    def __init__(
        self,
        call: int,
        call_shape: CallShape,
        plan: t.Plan,
        reducer: Sequence[int] = (0, 0),
        even: PreparedPlan | None = None,
    ) -> None:
        table, kinds = plan.table, plan.table[:, t.KIND]
        moves = table[np.isin(kinds, (t.SEND, t.RECV, t.REDUCE))]
        self.shape, gives, takes = call_shape.sizes()
        self.sizes = gives, takes
        self.address: int
        self.call, self.plan, self.ready, self.even = call, plan, False, even
        self.relays = parts_written(call_shape, table)
        self.peers = sorted(set(moves[:, t.PEER].tolist()))
        self.rows_of_a_phase = _longest_run(table[:, t.PHASE])
        self.reduces_of_a_phase = _longest_run(table[kinds == t.REDUCE][:, t.PHASE])
        self.sources = int(table[kinds == t.FOLD][:, t.PEER].max(initial=2))
        # How many bytes each peer attaches to its header: local rows of the plan read all of these bytes.
        operands = table[kinds == t.SOURCE][:, [t.BUFFER, t.OFFSET, t.NBYTES]]
        reads = np.concatenate([operands, table[kinds == t.COPY][:, [t.BUFFER2, t.OFFSET2, t.NBYTES]]])
        _, offsets, nbytes = reads[reads[:, 0] == t.FRAMES].T
        attached = np.zeros(call_shape.size, np.int64)
        np.maximum.at(
            attached, offsets // call_shape.limits.stride, offsets % call_shape.limits.stride + nbytes
        )
        if call_shape.operation == "refused":
            attached[:] = call_shape.total
        self._tables = attached, table
        self._words = np.zeros(w.PREPARED_WORDS, np.int64)
        self._words[[w.CALL, w.SHAPE]] = call, self.shape
        self._words[[w.TABLE, w.ROWS, w.PAYLOADS]] = address_of(table), len(table), (kinds == t.PAYLOAD).sum()
        self._words[[w.REDUCER, w.CODE, w.ITEMSIZE]] = *reducer, call_shape.itemsize
        self._words[w.ATTACHED] = address_of(attached)
        self._words[w.BALANCE] = signature.balance(call_shape.rank, gives, takes)
        kind = KINDS[call_shape.operation]
        travels_attached = len(table) > 0 == len(moves) and call_shape.limits.payload > 0
        returns_early = bool(kind.root) and not kind.has_blocks and travels_attached
        self._words[w.CAN_RETURN_EARLY] = returns_early and (call_shape.size == 2 or not attached.any())
        self._words[w.CARRIED] = plan.carried
        self._words[w.CARRIED_ITEMS] = plan.carried // (call_shape.itemsize if kind.reduces else 1)
        self._words[w.MOVES] = len(moves) > 0
        split = w.BOTH if kind.takes_blocks and kind.gives_blocks else int(kind.gives_blocks)
        self._words[w.SPLIT_ARRAY] = split if kind.has_blocks and not kind.root else -1
        self._words[w.BLOCK_BYTES] = call_shape.nbytes[0] if call_shape.nbytes else 0
        self._words[w.BLOCK] = call_shape.nbytes[0] if len(set(call_shape.nbytes)) == 1 else -1
        self._words[w.EVEN] = 0 if even is None else even.address
        self.address = address_of(self._words)

    @property
    def lacks_peers(self) -> bool:
        """Whether connections with peers of the plan may be missing."""
        return bool(self._words[w.LACKS_PEERS])

    @lacks_peers.setter
    def lacks_peers(self, lacks: bool) -> None:
        self._words[w.LACKS_PEERS] = lacks


def _longest_run(phases: Array) -> int:
    return int(np.unique(phases, return_counts=True)[1].max(initial=0))


def _text(note: Array) -> str:
    return note[: signature.NOTE_BYTES].tobytes().rstrip(b"\0").decode(errors="replace")


class NetContext:
    """The context of one rank, and typed access to the words that Python needs.

    Args:
        backoff: the number of sweeps in which nothing moves before the thread sleeps.
        words: memory for the context, CONTEXT_WORDS zeros.
        nodes: the ranks of each node, if they meet by nodes (plans/node_meeting.py). `share` must follow.

    Attributes:
        combines: whether headers are combined on their way, so that nothing is attached to them.
    """

    def __init__(
        self,
        size: int,
        rank: int,
        limits: Limits,
        streams: int,
        backoff: int,
        words: Array | None = None,
        nodes: Sequence[Sequence[int]] = (),
    ) -> None:
        self.combines = size > MEET_RANKS or len(nodes) > 0
        self._nodes = nodes or [(each,) for each in range(size)]
        self._node = next(number for number, node in enumerate(self._nodes) if rank in node)
        self.size, self.rank, self.streams, self._relayed = size, rank, streams, limits.relayed
        frame = limits.stride
        self.words = np.zeros(w.CONTEXT_WORDS, np.int64) if words is None else words
        self.address = address_of(self.words)
        self._kept: dict[int, Array] = {}
        self.words[[w.RANK, w.SIZE, w.STREAMS]] = rank, size, streams
        self.words[[w.FRAME, w.BACKOFF_SWEEPS]] = frame, backoff
        self.words[w.BACKOFF + waiting.BUDGET] = BUDGET
        self.fds = self._keep(w.FDS, np.full((size, streams), -1, np.int64))
        self._inbox = self._keep(w.INBOX, np.zeros(size * frame // 8, np.int64))
        here = len(self._nodes[self._node])
        self._buffers = self._keep(w.BUFFERS, np.zeros(relay(size, here), np.int64))
        self._keep(w.OUTBOX, np.zeros(size * (frame + PIGGYBACK_BYTES) // 8, np.int64))
        for word, count in (
            (w.SENT, 1),
            (w.HAVE, 1),
            (w.BEGINS, 1),
            (w.ENDS, 1),
            (w.BUSY, 2 * streams),
            (w.POLLFDS, 2 * streams),
        ):
            self._keep(word, np.zeros(size * count, np.int64))
        self._buffers[t.FRAMES] = address_of(self._inbox) + (0 if self.combines else HEADER_BYTES)
        self._scratch = np.empty(0, np.uint8)
        self._next = self._keep(w.NEXT, np.ones(size, np.int64))
        meets = 0 if self.combines else size
        self._records = self._keep(w.RECORDS, np.zeros((AHEAD, meets, 2), np.int64))
        self._notes = self._keep(w.NOTES, np.zeros((meets, 8 + signature.NOTE_BYTES), np.uint8))
        self.met = [peer for peer in range(size) if peer != rank]
        """The peers with which a meeting exchanges headers."""
        self._lines = self._keep(w.LINES, np.zeros(0, np.int64))
        self._no_line = np.zeros(frame // 8, np.int64)
        if self.combines:
            meeting = CallShape("barrier", size, rank, (), limits)
            by_nodes = combine_by_nodes(nodes, rank, frame) if nodes else None
            self._meeting = PreparedPlan(0, meeting, by_nodes or combine_headers(size, rank, frame))
            self._gathering = PreparedPlan(0, meeting, gather_headers(size, rank, frame))
            self.words[[w.MEETING, w.GATHERING]] = self._meeting.address, self._gathering.address
            self.met = sorted({*self._meeting.peers, *self._gathering.peers})
            for prepared in (self._meeting, self._gathering):
                self.make_room(prepared)

    def __getitem__(self, index: int) -> int:
        return int(self.words[index])

    def _keep(self, word: int, table: Array) -> Array:
        """Store a table's address in a word.

        The table is kept alive until another one is stored there.
        """
        self._kept[word] = table
        self.words[word] = address_of(table)
        return table

    def make_room(self, prepared: PreparedPlan) -> None:
        """Enlarge the context's tables to the sizes that a call needs."""
        if prepared.even is not None:
            self.make_room(prepared.even)
        for word, nbytes in (
            (w.PROGRESS, 16 * prepared.rows_of_a_phase * self.streams),
            (w.STAGING, 2 * IO_BYTES * prepared.reduces_of_a_phase * self.streams),
            (w.SOURCES, 8 * prepared.sources),
        ):
            if word not in self._kept or nbytes > self._kept[word].nbytes:
                self._keep(word, np.empty(-(-nbytes // 8), np.int64))
        if prepared.plan.scratch > self._scratch.nbytes:
            self._scratch = np.empty(prepared.plan.scratch, np.uint8)
            self._buffers[t.SCRATCH] = address_of(self._scratch)

    def head(self) -> tuple[int, int, int]:
        """Return number, call word and shape of the current call, from this rank's header."""
        header = self.headers()[self.rank]
        return self[w.CALLS], int(header[w.HEAD_CALL]), int(header[w.HEAD_SHAPE])

    def headers(self) -> Array:
        """The headers of the current call, a row for each rank.

        If a header has not arrived, its row is from an earlier call.
        """
        return self._inbox.reshape(self.size, -1)[:, : HEADER_BYTES // 8]

    def late_ranks(self) -> list[int]:
        """Return the ranks whose headers the current call waits for, of other nodes all whose headers it lacks.

        If headers are combined on their way, the result has the rank that passes on the next ones, too: it may have
        stopped after its own header arrived here.
        """
        if not self.combines:
            return self.waited_for
        if self[w.STAGE] == w.GATHER:
            return np.flatnonzero(self.headers()[:, w.NUMBER] < self[w.CALLS]).tolist()
        if self[w.STAGE] != w.MEET:
            return []
        table, count = self._meeting.plan.table, len(self._nodes)
        phase = int(table[min(self[w.PHASE], len(table) - 1), t.PHASE])
        by_nodes = self._lines.size > 0
        before = nodes_before(count) if by_nodes else known_before(count)
        known = [*before, count][max(0, phase - by_nodes)]
        unknown = (self._nodes[(self._node + step) % count] for step in range(known, count))
        passes_on = table[(table[:, t.PHASE] == phase) & (table[:, t.KIND] == t.RECV), t.PEER].tolist()
        return sorted({*self._awaited_here(), *passes_on, *(rank for node in unknown for rank in node)})

    def share(self, lines: Sequence[int], relays: Sequence[int]) -> None:
        """Set the addresses of the node's lines and relay memories. Must be called before the first call."""
        self._lines = self._keep(w.LINES, np.array(lines, np.int64))
        self._buffers[relay(self.size, 0) :] = relays

    def running(self, prepared: PreparedPlan) -> PreparedPlan:
        """Return the call that the engine makes for a prepared call: that call, or its `even`."""
        even = prepared.even
        return even if even is not None and self[w.RUNNING] == even.address else prepared

    def drop_lines(self) -> None:
        """Stop using the node's lines and relay memory, which may then be unmapped. The engine must not be running."""
        self._lines[:] = address_of(self._no_line)
        self._no_relay = np.zeros(2 * self._relayed, np.uint8)
        self._buffers[relay(self.size, 0) :] = address_of(self._no_relay)

    def _awaited_here(self) -> list[int]:
        """Return the ranks of this node for whose lines this rank waits.

        In the meeting, they are the ranks that have not posted their headers of the current call. If all have posted
        them, it is the first rank, which posts the result, unless this is the first rank. After the meeting, they are
        the ranks whose signals of relayed data this rank lacks.
        """
        node = self._nodes[self._node]
        if self[w.STAGE] == w.RUN:
            table, columns = read.call(self[w.RUNNING] + 8 * w.TABLE), 8 * t.COLUMNS
            rows = range(table + columns * self[w.PHASE], table + columns * self[w.PHASE_END], columns)
            awaited = [read.call(row + 8 * t.PEER) for row in rows if read.call(row + 8 * t.KIND) == t.WAIT]
            late = [line for line in awaited if read.call(int(self._lines[line])) < self[w.CALLS]]
            # The lines of relayed data follow those of headers; the first rank signals the result, in the last line.
            return [node[(line - 1) % len(node)] for line in late]
        posted = map(read.call, self._lines[: len(node)].tolist())
        late = [rank for rank, number in zip(node, posted, strict=False) if number < self[w.CALLS]]
        return late or [first for first in node[:1] if first != self.rank]

    @property
    def is_ahead(self) -> bool:
        """Whether a call from which this rank returned early has unread headers."""
        others = np.arange(self.size) != self.rank
        return not self.combines and bool((self._next[others] <= self[w.CALLS]).any())

    def heads(self) -> tuple[int, list[tuple[int, int]], list[str]]:
        """Return the current call's number, all ranks' call words and shapes, and the texts of refusals."""
        heads = [tuple(head) for head in self.headers()[:, [w.HEAD_CALL, w.HEAD_SHAPE]].tolist()]
        frames = self._inbox.view(np.uint8).reshape(self.size, -1)[:, HEADER_BYTES:]
        return self[w.CALLS], heads, [_text(frame) for frame in frames]

    def take_earlier_heads(self) -> tuple[int, list[tuple[int, int]], list[str]] | None:
        """Return what `heads` returns, for the first call with a mismatch that is not reported yet.

        Marks the mismatch as reported. Returns None if there is no such call, or if some of its headers have not
        arrived.
        """
        number, others = self[w.DIFFERS], np.arange(self.size) != self.rank
        if number == 0 or (self._next[others] <= number).any():
            return None
        later = range(number + 1, self[w.CALLS] + 1)
        differ = (
            each for each in later if (self._records[each % AHEAD] != self._records[each % AHEAD, 0]).any()
        )
        self.words[w.DIFFERS] = next(differ, 0)
        texts = [
            _text(note[8:]) if note[:8].view(np.int64)[0] == number else "a call was refused"
            for note in self._notes
        ]
        return number, [tuple(head) for head in self._records[number % AHEAD].tolist()], texts

    @property
    def waited_for(self) -> list[int]:
        """The peers whose connections or lines the engine last waited for."""
        if self[w.AWAITED] and self[w.STAGE] in (w.MEET, w.RUN):
            return self._awaited_here()
        listed = self._kept[w.POLLFDS][: self[w.WAITING]] & 0xFFFFFFFF
        return np.flatnonzero(np.isin(self.fds, listed).any(axis=1)).tolist()

    @property
    def in_progress(self) -> bool:
        """Whether a call has begun and has not ended."""
        return self[w.STAGE] != w.IDLE
