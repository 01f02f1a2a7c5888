"""The protocol of fastcoll/shm/rings.py as a model of one ordered pair, over every schedule of small programs.

Positions count frame units. Writing and reading a piece takes a step for each unit, publishing it another;
each cell of the ring holds which unit of which message was written last, so that a unit that is overwritten
before it is read, or read before it is written, is caught wherever it can happen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

Cell = tuple[int, int]  # message, unit


@dataclass(frozen=True)
class Program:
    """What the two ranks do, and the protocol's sizes.

    `messages`: (tag, units of the frame) in the order sent; `receives`: tags in the order posted.
    Blocking ranks begin an operation only when the one before is complete.
    """

    messages: tuple[tuple[int, int], ...]
    receives: tuple[int, ...]
    blocking_sends: bool = False
    blocking_receives: bool = False
    ring: int = 4
    piece: int = 1
    ack_slots: int = 2
    ack_batch: int = 1
    room_error: int = 0  # a wrong protocol: believes to have that many units more room
    ack_error: int = 0


class State(NamedTuple):
    """Shared words, then what the sender keeps, then what the receiver keeps."""

    head: int = 0
    tail: int = 0
    acks_taken: int = 0
    cells: tuple[Cell, ...] = ()
    acks: tuple[tuple[int, int], ...] = ()  # sequence, message

    sending: int = 0  # the message that enters
    written: int = 0  # position up to which units are written
    out_head: int = 0
    tail_seen: int = 0
    acks_read: int = 0
    acked: frozenset[int] = frozenset()

    begun: int = 0  # messages whose header was read
    in_tail: int = 0
    in_end: int = 0
    read: int = 0  # position up to which units are read
    head_seen: int = 0
    taken_seen: int = 0
    acks_given: int = 0
    next_receive: int = 0
    posted: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    matched: tuple[tuple[int, int], ...] = ()  # receive, message
    owed: tuple[int, ...] = ()


class Model:
    """The transitions of both ranks. `steps` yields every state that one atomic step can reach."""

    def __init__(self, program: Program) -> None:
        self.p = program
        ends = [0]
        for _, units in program.messages:
            ends.append(ends[-1] + units)
        self.start_of, self.end_of = ends[:-1], ends[1:]

    def initial(self) -> State:
        return State(cells=((-1, -1),) * self.p.ring, acks=((0, -1),) * self.p.ack_slots)

    def is_complete(self, s: State) -> bool:
        return len(s.acked) == len(self.p.messages) and s.next_receive == len(self.p.receives)

    def check_order(self, s: State) -> None:
        """Of one tag the first receive posted got the first message sent, and so on."""
        for tag in set(self.p.receives):
            receives = [r for r, t in enumerate(self.p.receives) if t == tag]
            messages = [m for m, (t, _) in enumerate(self.p.messages) if t == tag]
            assert [dict(s.matched)[r] for r in receives] == messages

    def steps(self, s: State) -> Iterator[State]:
        for actor in (self._push, self._read_ack, self._post, self._header, self._pull, self._acknowledge):
            yield from actor(s)

    # ---- the sender

    def _push(self, s: State) -> Iterator[State]:
        p = self.p
        if s.tail_seen != s.tail:
            yield s._replace(tail_seen=s.tail)
        if s.sending == len(p.messages) or (p.blocking_sends and len(s.acked) < s.sending):
            return
        part = min(self.end_of[s.sending] - s.out_head, p.piece)
        if s.out_head + part - p.ring > s.tail_seen + p.room_error:
            return
        if s.written < s.out_head + part:
            assert s.written - p.ring < s.read, f"unit {s.written} is written over an unread one"
            cell = (s.sending, s.written - self.start_of[s.sending])
            yield s._replace(cells=_put(s.cells, s.written, cell), written=s.written + 1)
        else:
            last = s.written == self.end_of[s.sending]
            yield s._replace(head=s.written, out_head=s.written, sending=s.sending + last)

    def _read_ack(self, s: State) -> Iterator[State]:
        p = self.p
        sequence, message = s.acks[s.acks_read % p.ack_slots]
        if sequence == s.acks_read + 1 and s.sending > len(s.acked):
            assert message in range(s.sending), "an ack for a message that was not sent"
            assert message not in s.acked, "a message is acked twice"
            read = s.acks_read + 1
            yield s._replace(
                acks_read=read,
                acked=s.acked | {message},
                acks_taken=read if read % p.ack_batch == 0 else s.acks_taken,
            )

    # ---- the receiver

    def _post(self, s: State) -> Iterator[State]:
        p = self.p
        idle = not s.posted and not s.owed and s.in_tail == s.in_end
        if s.next_receive == len(p.receives) or (p.blocking_receives and not idle):
            return
        receive, tag = s.next_receive, p.receives[s.next_receive]
        after = s._replace(next_receive=receive + 1)
        for message in s.stored:
            if p.messages[message][0] == tag:
                stored = tuple(m for m in s.stored if m != message)
                yield self._match(after._replace(stored=stored), receive, message)
                return
        yield after._replace(posted=(*s.posted, receive))

    def _match(self, s: State, receive: int, message: int) -> State:
        """A message is acked when it has arrived and has a receive, whichever comes later."""
        arrived = message < s.begun - 1 or s.in_tail == s.in_end
        owed = (*s.owed, message) if arrived else s.owed
        return s._replace(matched=(*s.matched, (receive, message)), owed=owed)

    def _header(self, s: State) -> Iterator[State]:
        if s.head_seen != s.head:
            yield s._replace(head_seen=s.head)
        if s.in_tail < s.in_end or not s.posted or s.head_seen <= s.in_tail:
            return
        message = s.begun
        assert s.cells[s.in_tail % self.p.ring] == (message, 0), "not a header"
        after = s._replace(begun=message + 1, in_end=self.end_of[message])
        for receive in s.posted:
            if self.p.receives[receive] == self.p.messages[message][0]:
                posted = tuple(r for r in s.posted if r != receive)
                yield self._match(after._replace(posted=posted), receive, message)
                return
        yield after._replace(stored=(*s.stored, message))

    def _pull(self, s: State) -> Iterator[State]:
        if s.in_tail == s.in_end:
            return
        message = s.begun - 1
        part = min(s.in_end - s.in_tail, self.p.piece)
        if s.in_tail + part > s.head_seen:
            return
        if s.read < s.in_tail + part:
            expected = (message, s.read - self.start_of[message])
            assert s.cells[s.read % self.p.ring] == expected, f"unit {s.read} is read before it is written"
            yield s._replace(read=s.read + 1)
            return
        after = s._replace(tail=s.read, in_tail=s.read)
        if after.in_tail == after.in_end and message in dict(map(reversed, s.matched)):
            after = after._replace(owed=(*s.owed, message))
        yield after

    def _acknowledge(self, s: State) -> Iterator[State]:
        p = self.p
        if s.taken_seen != s.acks_taken:
            yield s._replace(taken_seen=s.acks_taken)
        if s.owed and s.taken_seen + p.ack_error > s.acks_given - p.ack_slots:
            assert s.acks_read > s.acks_given - p.ack_slots, "an ack is written over an unread one"
            acks = _put(s.acks, s.acks_given, (s.acks_given + 1, s.owed[0]))
            yield s._replace(acks=acks, acks_given=s.acks_given + 1, owed=s.owed[1:])


def _put(cells: tuple[Cell, ...], position: int, cell: Cell) -> tuple[Cell, ...]:
    at = position % len(cells)
    return (*cells[:at], cell, *cells[at + 1 :])


def explore(program: Program) -> int:
    """Visit every reachable state; returns their number."""
    model = Model(program)
    known = {model.initial()}
    todo = list(known)
    while todo:
        state = todo.pop()
        nexts = list(model.steps(state))
        if not nexts:
            assert model.is_complete(state), f"deadlock: {state}"
            model.check_order(state)
        fresh = [n for n in nexts if n not in known]
        known.update(fresh)
        todo.extend(fresh)
    return len(known)


def walk(program: Program, seed: int) -> None:
    """Take random steps until none is left."""
    model, chance = Model(program), random.Random(seed)
    state = model.initial()
    while nexts := list(model.steps(state)):
        state = chance.choice(nexts)
    assert model.is_complete(state), f"deadlock: {state}"
    model.check_order(state)


PROGRAMS = {
    "longer than the ring": Program(((0, 9),), (0,), piece=2),
    "pieces wrap unevenly": Program(((0, 3), (0, 5)), (0, 0), piece=2),
    "reversed tags": Program(((0, 1), (1, 1), (2, 1)), (2, 1, 0), blocking_receives=True),
    "reversed tags, longer than the ring": Program(((0, 5), (1, 5)), (1, 0), blocking_receives=True, piece=2),
    "one tag": Program(((0, 1), (0, 2), (0, 1)), (0, 0, 0), blocking_sends=True),
    "more acks than slots": Program(((0, 1), (1, 1), (2, 1), (3, 1)), (3, 0, 1, 2), ring=8),
    "acks told in batches": Program(((0, 1), (0, 1), (0, 1), (0, 1)), (0, 0, 0, 0), ack_batch=2),
    "blocking both": Program(((0, 2), (1, 6)), (0, 1), blocking_sends=True, blocking_receives=True),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_schedule(name: str) -> None:
    assert explore(PROGRAMS[name]) > 20


@st.composite
def programs(draw: st.DrawFn) -> Program:
    messages = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 11)), min_size=1, max_size=12))
    tags = draw(st.permutations([tag for tag, _ in messages]))
    return Program(
        tuple(messages),
        tuple(tags),
        blocking_receives=draw(st.booleans()),
        ring=draw(st.sampled_from([4, 8])),
        piece=draw(st.sampled_from([1, 2])),
        ack_slots=draw(st.integers(2, 4)),
        ack_batch=draw(st.integers(1, 2)),
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(programs(), st.integers(0, 1 << 32))
def test_random_schedules(program: Program, seed: int) -> None:
    walk(program, seed)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (Program(((0, 9),), (0,), room_error=1), "over an unread one"),
        (Program(((0, 1),) * 4, (0,) * 4, ack_error=1), "ack is written over an unread one"),
        (Program(((0, 1),) * 4, (0,) * 4, ack_slots=2, ack_batch=3), "deadlock"),
        (Program(((0, 1), (1, 1)), (1, 0), blocking_sends=True, blocking_receives=True), "deadlock"),
    ],
)
def test_the_model_catches_wrong_protocols(program: Program, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        explore(program)
