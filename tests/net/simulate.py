"""Runs the plans of all ranks on symbols instead of numbers, under random schedules and with bounded channels.

An item is a string. A reduction joins strings and adds parentheses, so a result shows which items were reduced, how
often, in which order and in how many passes. `check_tables` checks the plans alone, `simulate` runs them. Both raise
PlanError.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import numpy as np

from fastcoll.net.tcp.plans import plan as t
from fastcoll.net.tcp.plans.plan import Plan
from fastcoll.net.tcp.plans.shape import relay

Row = Sequence[int]
Arrays = Sequence[np.ndarray]  # the arrays of one rank: object arrays of strings, as the plan numbers them
Interval = tuple[int, int, int]  # a buffer, its first byte, the byte after the last
RUBBISH = "?"
COPIES = (
    t.COPY,
    t.NARROW,
    t.NARROW_KEEPING,
    t.WIDEN,
)  # conversions copy symbols, whose items are as large as elements


class PlanError(AssertionError):
    """A plan breaks the rules of plans/plan.py."""


def require(condition: bool, *what: object) -> None:
    if not condition:
        raise PlanError(" ".join(map(str, what)))


# ---- checks of the tables -----------------------------------------------------------------------


def check_tables(
    plans: Sequence[Plan],
    lengths: Sequence[Mapping[int, int]],
    same: Sequence[tuple[int, int]] = (),
    payload: int = 1 << 60,
) -> None:
    """Check the form, the bounds, the pairs and the hazards of all ranks' plans.

    Args:
        lengths: for each rank, the bytes of each of its buffers.
        same: for each rank, two buffers that are the same array, or (0, 0).
        payload: bytes that may be attached for a peer.
    """
    for rank, plan in enumerate(plans):
        check_form(plan, rank, len(plans), payload)
        check_bounds(plan, rank, lengths[rank])
        check_hazards(plan, rank, same[rank] if same else (0, 0))
    check_pairs(plans)


def check_form(plan: Plan, rank: int, size: int, payload: int) -> None:
    table = plan.table
    require(table.dtype == np.int64 and table.flags.c_contiguous, "not contiguous int64")
    require(table.ndim == 2 and table.shape[1] == t.COLUMNS, "shape", table.shape)
    rows = table.tolist()
    order = [(row[t.PHASE], row[t.KIND] not in t.LOCAL) for row in rows]
    require(order == sorted(order), f"rank {rank}: rows are not sorted by phase, local ones first")
    left = 0
    for row in rows:
        require(
            (row[t.KIND] == t.SOURCE) == (left > 0), f"rank {rank}: sources do not follow their fold", row
        )
        left = row[t.PEER] if row[t.KIND] == t.FOLD else max(left - 1, 0)
        require((row[t.KIND] == t.PAYLOAD) == (row[t.PHASE] == t.ATTACHED), "phase of a payload", row)
        require(row[t.PHASE] >= t.ATTACHED and row[t.NBYTES] > 0, "phase or size", row)
        if row[t.KIND] not in t.LOCAL and row[t.KIND] != t.WAIT:
            require(0 <= row[t.PEER] < size and row[t.PEER] != rank, f"rank {rank}: peer", row)
        if row[t.KIND] == t.PAYLOAD:
            require(row[t.NBYTES] <= payload, f"rank {rank} attaches too much", row)
    require(left == 0, "a fold lacks sources")
    peers = [row[t.PEER] for row in rows if row[t.KIND] == t.PAYLOAD]
    require(len(peers) == len(set(peers)), f"rank {rank} attaches twice for a peer")


def check_bounds(plan: Plan, rank: int, lengths: Mapping[int, int]) -> None:
    for row in plan.table.tolist():
        for buffer, low, high in (*reads(row), *writes(row)):
            require(buffer in lengths, f"rank {rank} has no buffer {buffer}:", row)
            require(low >= 0 and high <= lengths[buffer], f"rank {rank}: outside of {lengths[buffer]}:", row)


def check_pairs(plans: Sequence[Plan]) -> None:
    """Check that every send has its receive: in the same phase, with the same size, in the same order."""
    sent: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        for row in plan.table.tolist():
            if row[t.KIND] == t.SEND:
                sent[rank, row[t.PEER]].append((row[t.PHASE], row[t.NBYTES]))
            elif row[t.KIND] in (t.RECV, t.REDUCE):
                received[row[t.PEER], rank].append((row[t.PHASE], row[t.NBYTES]))
    for pair in sent.keys() | received.keys():
        require(sent[pair] == received[pair], f"{pair}: sent {sent[pair]}, received {received[pair]}")


def check_hazards(plan: Plan, rank: int, same: tuple[int, int]) -> None:
    """Check that the bytes a phase receives overlap no others that it receives, sends, reads or writes."""
    phases: dict[int, list[Row]] = defaultdict(list)
    for row in plan.table.tolist():
        phases[row[t.PHASE]].append(row)
    for phase, rows in phases.items():
        arriving, others = [], []
        for row in rows:
            arrives = row[t.KIND] in (t.RECV, t.REDUCE)
            intervals = [(*_alias(interval, same), arrives) for interval in (*reads(row), *writes(row))]
            (arriving if arrives else others).extend(intervals if row[t.KIND] != t.PAYLOAD else [])
        _check_overlap(arriving, others, f"rank {rank}, phase {phase}")


def _check_overlap(arriving: list[tuple], others: list[tuple], where: str) -> None:
    """Sweep over the intervals: none may begin before one that is received has ended, and none received within any."""
    ends = {True: (-1, 0), False: (-1, 0)}  # buffer and end of the interval that ends last so far
    for buffer, low, high, arrives in sorted(arriving + others):
        for kind in (True, False) if arrives else (True,):
            seen, end = ends[kind]
            require(seen != buffer or end <= low, f"{where}: buffer {buffer} from {low} is in use twice")
        seen, end = ends[arrives]
        ends[arrives] = (buffer, max(high, end) if seen == buffer else high)


def _alias(interval: Interval, same: tuple[int, int]) -> Interval:
    return (same[1] if interval[0] == same[0] else interval[0], *interval[1:])


def reads(row: Row) -> list[Interval]:
    """Return the bytes that a row reads; t.FOLD and t.REDUCE count as writing."""
    if row[t.KIND] in (t.SEND, t.SOURCE, t.PAYLOAD, t.POST):
        return [(row[t.BUFFER], row[t.OFFSET], row[t.OFFSET] + row[t.NBYTES])]
    if row[t.KIND] in COPIES:
        return [(row[t.BUFFER2], row[t.OFFSET2], row[t.OFFSET2] + row[t.NBYTES])]
    return []


def writes(row: Row) -> list[Interval]:
    if row[t.KIND] in (t.RECV, t.REDUCE, t.FOLD, t.AWAIT, *COPIES):
        return [(row[t.BUFFER], row[t.OFFSET], row[t.OFFSET] + row[t.NBYTES])]
    return []


# ---- running them -------------------------------------------------------------------------------------


class Rank:
    """One rank: its buffers, its phase, and the incomplete rows."""

    def __init__(self, plan: Plan, arrays: Arrays, itemsize: int, frames: np.ndarray) -> None:
        self.itemsize = itemsize
        self.buffers: dict[int, np.ndarray] = {t.SCRATCH: rubbish(plan.scratch // itemsize), t.FRAMES: frames}
        self.buffers.update((t.FIRST_ARRAY + k, array) for k, array in enumerate(arrays))
        self._phases: deque[list[Row]] = deque()
        for row in plan.table.tolist():
            if not self._phases or self._phases[-1][0][t.PHASE] != row[t.PHASE]:
                self._phases.append([])
            self._phases[-1].append(row)
        # By (sends, peer): the rows in progress; the first one moves.
        self.queues: dict[tuple[bool, int], deque[Row]] = {}
        self.moved: dict[tuple[bool, int], int] = {}  # items of the first row
        self.lines: dict[int, str] = {}

    def payloads(self) -> list[Row]:
        return self._phases.popleft() if self._phases and self._phases[0][0][t.PHASE] == t.ATTACHED else []

    def advance(self) -> bool:
        """Begin phases until one has to wait; False if the plan is complete."""
        while not self.queues and self._phases:
            rows = self._phases.popleft()
            for number, row in enumerate(rows):
                if row[t.KIND] in COPIES:
                    self.part(row)[:] = self.interval(row[t.BUFFER2], row[t.OFFSET2], row[t.NBYTES])
                elif row[t.KIND] == t.FOLD:
                    self._fold(row, rows[number + 1 : number + 1 + row[t.PEER]])
                elif row[t.KIND] == t.POST:
                    require(row[t.PEER] not in self.lines, "a line is posted twice", row)
                    (self.lines[row[t.PEER]],) = self.part(row)
                elif row[t.KIND] == t.SIGNAL:
                    require(row[t.PEER] not in self.lines, "a line is signalled twice", row)
                    self.lines[row[t.PEER]] = "!"
                elif row[t.KIND] in (t.AWAIT, t.WAIT):
                    self.queues[False, line_key(row[t.PEER])] = deque([row])
                elif row[t.KIND] != t.SOURCE:
                    self.queues.setdefault((row[t.KIND] == t.SEND, row[t.PEER]), deque()).append(row)
        return bool(self.queues)

    def _fold(self, row: Row, sources: Sequence[Row]) -> None:
        self.part(row)[:] = [joined(*items) for items in zip(*map(self.part, sources), strict=True)]

    def part(self, row: Row) -> np.ndarray:
        return self.interval(row[t.BUFFER], row[t.OFFSET], row[t.NBYTES])

    def interval(self, buffer: int, offset: int, nbytes: int) -> np.ndarray:
        require(offset % self.itemsize == 0 and nbytes % self.itemsize == 0, "an item is cut")
        return self.buffers[buffer][offset // self.itemsize : (offset + nbytes) // self.itemsize]

    def move(self, key: tuple[bool, int], channel: deque[str], transfer: int, room: int) -> int:
        """Move at most `piece` items of the first row of a connection; return how many."""
        row = self.queues[key][0]
        if row[t.KIND] == t.WAIT:
            if channel:
                self._complete(key)
            return len(channel)
        part, done = self.part(row), self.moved.get(key, 0)
        count = min(transfer, len(part) - done, room if key[0] else len(channel))
        for at in range(done, done + count):
            if row[t.KIND] == t.SEND:
                channel.append(part[at])
            elif row[t.KIND] in (t.RECV, t.AWAIT):
                part[at] = channel.popleft()
            else:
                got = channel.popleft()
                part[at] = joined(got, part[at]) if row[t.OFFSET2] else joined(part[at], got)
        self.moved[key] = done + count
        if done + count == len(part):
            self._complete(key)
        return count

    def _complete(self, key: tuple[bool, int]) -> None:
        self.moved[key] = 0
        self.queues[key].popleft()
        if not self.queues[key]:
            del self.queues[key]


def line_key(line: int) -> int:
    """Return the number in place of a peer's for a row that waits for a line."""
    return -1 - line


def joined(*items: str) -> str:
    """Return the result of reducing some items in one pass."""
    return f"({''.join(items)})"


def rubbish(items: int) -> np.ndarray:
    return np.full(items, RUBBISH, object)


def simulate(
    plans: Sequence[Plan],
    arrays: Sequence[Arrays],
    *,
    itemsize: int = 1,
    frame_stride: int = 0,
    frames: Sequence[np.ndarray] | None = None,
    capacity: int = 1 << 60,
    seed: int = 0,
    nodes: Sequence[Sequence[int]] = (),
    relay_bytes: int = 0,
) -> list[Rank]:
    """Run all ranks' plans to their ends; the results are in the arrays and the other buffers of the ranks.

    Args:
        frames: the contents of each rank's FRAMES at the start; None: garbage.
        capacity: items that the connection from one rank to another buffers.
        seed: of the schedule.
        nodes: the ranks that share lines and relay memory, of which each has `relay_bytes`.
    """
    size, chance = len(plans), random.Random(seed)
    frames = frames or [rubbish(size * frame_stride // itemsize) for _ in plans]
    ranks = [Rank(plan, arrays[k], itemsize, frames[k]) for k, plan in enumerate(plans)]
    for node in nodes:
        memory = {relay(size, place): rubbish(relay_bytes // itemsize) for place in range(len(node))}
        for number in node:
            ranks[number].lines = ranks[node[0]].lines
            ranks[number].buffers.update(memory)
    _meet(ranks, frame_stride)
    channels: dict[tuple[int, int], deque[str]] = defaultdict(deque)
    working = {number for number in range(size) if ranks[number].advance()}
    while working:
        progress = 0
        for number in chance.sample(sorted(working), len(working)):
            progress += _step(ranks[number], number, channels, capacity, chance)
            if not ranks[number].advance():
                working.remove(number)
        require(progress > 0, f"deadlock of ranks {sorted(working)}")
    require(not any(channels.values()), "an item was sent but not received")
    return ranks


def _meet(ranks: Sequence[Rank], frame_stride: int) -> None:
    for number, rank in enumerate(ranks):
        for row in rank.payloads():
            ranks[row[t.PEER]].interval(t.FRAMES, number * frame_stride, row[t.NBYTES])[:] = rank.part(row)


def _step(rank: Rank, number: int, channels: dict, capacity: int, chance: random.Random) -> int:
    """Let some connections of a rank, in any order, move some items each."""
    keys = list(rank.queues)
    moved = 0
    for key in chance.sample(keys, len(keys)):
        if key[1] < 0:
            channel = deque(text for line, text in rank.lines.items() if line_key(line) == key[1])
        else:
            channel = channels[(number, key[1]) if key[0] else (key[1], number)]
        transfer = chance.choice((1, 3, 1 << 60))
        moved += rank.move(key, channel, transfer, capacity - len(channel))
    return moved
