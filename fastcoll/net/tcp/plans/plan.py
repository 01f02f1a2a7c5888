"""The format of a plan: the steps of one rank in one collective, as a table of integers that the engine runs.

    column     meaning
    PHASE      rows are sorted by phase; the rows of a phase run concurrently, and a phase begins when all rows of
               the previous phase are complete on this rank
    KIND       one of the kinds below
    PEER       the other rank; FOLD: the number of SOURCE rows that follow; POST, AWAIT, SIGNAL, WAIT: the
               number of a line
    BUFFER     the buffer (see below) that the row writes; SEND, SOURCE, PAYLOAD and POST: the buffer that it reads
    OFFSET     bytes into BUFFER
    NBYTES     how many bytes
    BUFFER2    COPY, NARROW, WIDEN: the buffer that the row reads
    OFFSET2    COPY, NARROW, WIDEN: bytes into BUFFER2; REDUCE: 1 if the received operand is the left one, else 0

    kind       meaning
    SEND       send to PEER; complete when the kernel has taken the bytes, so that the buffer may be changed
    RECV       receive from PEER
    REDUCE     receive from PEER, and reduce into the buffer as bytes arrive
    FOLD       local: reduce the SOURCE rows that follow, in row order, into the buffer, which may be a source
    SOURCE     an operand of the FOLD row above
    COPY       local copy; both locations may be the same
    PAYLOAD    PHASE -1: send to PEER with the header of the meeting; PEER reads the bytes in its FRAMES, at
               offset (this rank) * `Limits.stride`. If PEER is this rank, combined headers carry the bytes, OFFSET2
               bytes into the data behind the header
    POST       local: publish a header in a line, a place in memory that the ranks of a node share (node_meeting.py)
    AWAIT      wait until the line has the current call's header, and copy it
    SIGNAL     local: publish the number of the current call in a line without a header (relayed.py)
    WAIT       wait for that number
    NARROW     local: convert NBYTES of float32 to items of a narrow type (kernels/narrow.py)
    NARROW_KEEPING  the same with error feedback: array 1, `lost`, is read and written at OFFSET2
    WIDEN      local: convert items to NBYTES of float32

For each SEND, the peer's plan has a RECV or REDUCE of the same size in the same phase; the rows of one pair and
direction match in row order. So the ranks in the lowest phase can always go on, and no plan deadlocks, however little
the connections buffer. The local rows of a phase come first, and run in row order before the phase's communication
begins. No receive of a phase writes bytes that the same phase sends or reads locally.

The buffers are SCRATCH, which belongs to the group and has at least `Plan.scratch` bytes; FRAMES, which holds the data
attached to the headers; the relay memory of each rank of the node (relayed.py); and the arrays of the call in this
order, where `..` means one array for each rank:

    all_reduce            x                with error feedback: x, lost
    reduce, scan, exscan  out, x           out may be x; reduce writes it on the root only
    reduce_scatter        out, block 0..   out may be this rank's block
    broadcast             x
    all_gather            out 0.., x       x may be this rank's out
    gather                root: out 0.., x (which may be the root's out); others: x
    scatter               root: out, block 0.. (out may be the root's); others: out
    all_to_all            out 0.., block 0..
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ....core.partition import Span

PHASE, KIND, PEER, BUFFER, OFFSET, NBYTES, BUFFER2, OFFSET2 = range(8)
COLUMNS = 8
SEND, RECV, REDUCE, FOLD, SOURCE, COPY, PAYLOAD, POST, AWAIT, SIGNAL, WAIT, NARROW, NARROW_KEEPING, WIDEN = (
    range(14)
)
SCRATCH, FRAMES, FIRST_ARRAY = range(3)
ATTACHED = -1  # the phase of PAYLOAD rows

LOCAL = frozenset({FOLD, SOURCE, COPY, POST, SIGNAL, NARROW, NARROW_KEEPING, WIDEN})

Table = np.ndarray[Any, np.dtype[np.int64]]
Location = tuple[int, int]
"""A buffer and an offset in it."""


class Plan(NamedTuple):
    """One rank's table for a collective.

    Attributes:
        scratch: the bytes that SCRATCH must have.
        carried: the bytes of data that the combined headers carry.
    """

    table: Table
    scratch: int
    carried: int = 0


class Rows:
    """Collects the rows of a plan. Rows of 0 bytes are left out; the peers leave out the corresponding rows, too."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []

    def send(self, phase: int, peer: int, location: Location, nbytes: int) -> None:
        self._add(phase, SEND, peer, location, nbytes)

    def recv(self, phase: int, peer: int, location: Location, nbytes: int) -> None:
        self._add(phase, RECV, peer, location, nbytes)

    def reduce(self, phase: int, peer: int, location: Location, nbytes: int, left: bool) -> None:
        """Receive and reduce; `left` is whether the received operand is the left one."""
        self._add(phase, REDUCE, peer, location, nbytes, (0, int(left)))

    def fold(self, phase: int, location: Location, nbytes: int, sources: Sequence[Location]) -> None:
        """Reduce `sources` into `location`, or copy if there is only one."""
        if len(sources) == 1:
            self.copy(phase, location, sources[0], nbytes)
        elif nbytes:
            self._add(phase, FOLD, len(sources), location, nbytes)
            for source in sources:
                self._add(phase, SOURCE, 0, source, nbytes)

    def copy(self, phase: int, location: Location, source: Location, nbytes: int) -> None:
        if location != source:
            self._add(phase, COPY, 0, location, nbytes, source)

    def narrow(self, phase: int, items: Location, x: tuple[int, Span], keeps: bool) -> None:
        """Convert a span of the buffer `x`; `keeps` is whether array 1 has what rounding takes."""
        self._add(phase, NARROW_KEEPING if keeps else NARROW, 0, items, x[1].nbytes, (x[0], x[1].offset))

    def widen(self, phase: int, x: tuple[int, Span], items: Location) -> None:
        self._add(phase, WIDEN, 0, (x[0], x[1].offset), x[1].nbytes, items)

    def post(self, phase: int, line: int, location: Location, nbytes: int) -> None:
        self._add(phase, POST, line, location, nbytes)

    def wait_for(self, phase: int, line: int, location: Location, nbytes: int) -> None:
        self._add(phase, AWAIT, line, location, nbytes)

    def signal(self, phase: int, line: int) -> None:
        self._add(phase, SIGNAL, line, (0, 0), 1)

    def wait(self, phase: int, line: int) -> None:
        self._add(phase, WAIT, line, (0, 0), 1)

    def payload(self, peer: int, location: Location, nbytes: int, offset: int = 0) -> None:
        self._add(ATTACHED, PAYLOAD, peer, location, nbytes, (0, offset))

    def include(
        self, plan: Plan, first: int, ranks: Sequence[int], arrays: Sequence[Location], scratch: int
    ) -> int:
        """Add the rows of another plan, without payloads, from phase `first` on; return the phase after them.

        Args:
            ranks: the ranks of this plan that are the ranks of the other one.
            arrays: where the arrays of the other plan are.
            scratch: where the other plan's SCRATCH begins in this plan's.
        """

        def place(buffer: int, offset: int) -> Location:
            assert buffer != FRAMES, "a plan without payloads reads no frames"
            begin = (SCRATCH, scratch) if buffer == SCRATCH else arrays[buffer - FIRST_ARRAY]
            return begin[0], begin[1] + offset

        for phase, kind, peer, buffer, offset, nbytes, buffer2, offset2 in plan.table.tolist():
            target = place(buffer, offset)
            second = place(buffer2, offset2) if kind == COPY else (buffer2, offset2)
            if target != second or kind != COPY:
                other = ranks[peer] if kind in (SEND, RECV, REDUCE) else peer
                self._add(first + phase, kind, other, target, nbytes, second)
        return first + int(plan.table[:, PHASE].max(initial=-1)) + 1

    def plan(self, scratch: int = 0, carried: int = 0) -> Plan:
        """Return all rows, sorted by phase with local rows first.

        Apart from that, rows keep the order in which they were added.
        """
        rows = sorted(self._rows, key=lambda row: (row[PHASE], row[KIND] not in LOCAL))
        table = np.array(rows, np.int64).reshape(len(rows), COLUMNS)
        table.setflags(write=False)  # plans are cached and shared
        return Plan(table, scratch, carried)

    def _add(
        self, phase: int, kind: int, peer: int, location: Location, nbytes: int, second: Location = (0, 0)
    ) -> None:
        if nbytes:
            self._rows.append((phase, kind, peer, *location, nbytes, *second))
