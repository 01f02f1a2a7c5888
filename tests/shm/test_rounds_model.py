"""The protocol of fastcoll/shm/rounds.py as a model, explored over every schedule of small worlds.

The model keeps the shared words (call lines, PROGRESS, slots) and lets any rank take its next atomic
step. Slots hold the number of the round that was written last, and a read takes two steps, so a slot that is
written while somebody reads it is caught wherever it can happen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

SLOTS = 2
OPEN, WRITE, PUBLISH, AWAIT, COMPARE, READ, READING, CLOSE = range(8)


@dataclass(frozen=True)
class Op:
    """A call: its kind, its number of rounds, its root."""

    kind: str
    rounds: int
    root: int = 0

    def writes(self, rank: int) -> bool:
        return {"all": True, "out": rank == self.root, "in": True, "rooted": True}[self.kind]

    def reads(self, rank: int, size: int) -> tuple[int, ...]:
        peers = tuple(p for p in range(size) if p != rank)
        return {
            "all": peers,  # all_reduce, all_gather, all_to_all
            "out": () if rank == self.root else (self.root,),  # broadcast, scatter
            "in": peers if rank == self.root else (),  # gather: waits for single peers
            "rooted": peers if rank == self.root else (),  # reduce: waits for all in every round
        }[self.kind]

    def waits_for_all(self) -> bool:
        return self.kind in ("all", "rooted")


@dataclass(frozen=True)
class Rank:
    """Private words of a rank, and those that it alone writes."""

    op: int = 0
    step: int = 0
    phase: int = OPEN
    peer: int = 0
    round: int = 0
    seen: int = 1
    lines: tuple[int, int] = (0, 0)
    progress: int = 0
    slots: tuple[int, int] = (-1, -1)


State = tuple[Rank, ...]


class Model:
    """The transitions of all ranks over a program of calls.

    `credit` is the bound that open_slot waits for, relative to the round; the protocol's is 2 - SLOTS.
    """

    def __init__(self, size: int, program: list[Op], credit: int = 2 - SLOTS, meets: bool = True) -> None:
        self.size, self.program, self.credit, self.meets = size, program, credit, meets

    def explore(self) -> int:
        """Visit every reachable state; returns their number."""
        start: State = (Rank(),) * self.size
        known, todo = {start}, [start]
        while todo:
            state = todo.pop()
            nexts = [n for r in range(self.size) if (n := self.step(state, r)) is not None]
            done = all(rank.op == len(self.program) for rank in state)
            assert nexts or done, f"deadlock: {state}"
            for n in nexts:
                if n not in known:
                    known.add(n)
                    todo.append(n)
        return len(known)

    def step(self, state: State, r: int) -> State | None:
        """The state after rank r's next step; None when r must wait or has finished."""
        me = state[r]
        if me.op == len(self.program):
            return None
        after = self.act(me, r, state)
        return None if after is None else (*state[:r], after, *state[r + 1 :])

    def act(self, me: Rank, r: int, state: State) -> Rank | None:
        op = self.program[me.op]
        peers = [p for p in range(self.size) if p != r]
        parity = me.round % SLOTS
        if me.phase == OPEN:
            if not op.writes(r):
                return replace(me, phase=PUBLISH)
            want = me.round + self.credit
            if me.seen < want and any(state[p].progress < want for p in peers):
                return None
            return replace(me, phase=WRITE, seen=max(me.seen, want))
        if me.phase == WRITE:
            return replace(me, phase=PUBLISH, slots=_put(me.slots, parity, me.round))
        if me.phase == PUBLISH:
            if me.step:
                return replace(me, phase=AWAIT, progress=me.round + 1)
            return replace(me, phase=AWAIT, lines=_put(me.lines, me.op % 2, me.op + 1))
        if me.phase == AWAIT:
            return self.wait(me, r, op, peers, state)
        if me.phase == COMPARE:
            assert all(state[p].lines[me.op % 2] == me.op + 1 for p in peers), "a line was overwritten"
            return replace(me, phase=READ, peer=0, seen=me.round + 1)
        reads = op.reads(r, self.size)
        if me.phase == READ:
            if me.peer == len(reads):
                return replace(me, phase=CLOSE)
            if me.step and state[reads[me.peer]].progress < me.round + 1:
                return None
            return replace(me, phase=READING)
        if me.phase == READING:
            held = state[reads[me.peer]].slots[parity]
            assert held == me.round, f"round {me.round} read from a slot that holds {held}"
            return replace(me, phase=READ, peer=me.peer + 1)
        return self.close(me, op)

    def wait(self, me: Rank, r: int, op: Op, peers: list[int], state: State) -> Rank | None:
        if me.step == 0:
            present = all(state[p].lines[me.op % 2] >= me.op + 1 for p in peers)
            if not present and (self.meets or op.waits_for_all()):
                return None
            return replace(me, phase=COMPARE) if self.meets else replace(me, phase=READ, peer=0)
        if not op.waits_for_all():
            return replace(me, phase=READ, peer=0)
        if any(state[p].progress < me.round + 1 for p in peers):
            return None
        return replace(me, phase=READ, peer=0, seen=max(me.seen, me.round + 1))

    def close(self, me: Rank, op: Op) -> Rank:
        me = replace(me, round=me.round + 1, step=me.step + 1, phase=OPEN, peer=0)
        if me.step < op.rounds:
            return me
        progress = me.round + 1 if op.rounds > 1 else me.progress
        return replace(me, op=me.op + 1, step=0, progress=progress)


def _put(pair: tuple[int, int], index: int, value: int) -> tuple[int, int]:
    return (value, pair[1]) if index == 0 else (pair[0], value)


PROGRAMS = {
    "single rounds": [Op("all", 1)] * 4,
    "long all": [Op("all", 4), Op("all", 1), Op("all", 3)],
    "long broadcasts": [Op("out", 4), Op("out", 3), Op("out", 1), Op("out", 2)],
    "changing roots": [Op("out", 3, 0), Op("out", 3, 1), Op("in", 3, 0), Op("in", 2, 1)],
    "rooted, then all": [Op("rooted", 3), Op("out", 1), Op("all", 3)],
    "gather, then all": [Op("in", 3), Op("all", 1), Op("all", 2)],
    "short between long": [Op("out", 3), Op("in", 1), Op("out", 3), Op("all", 2), Op("in", 3)],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_ranks_every_schedule(name: str) -> None:
    assert Model(2, PROGRAMS[name]).explore() > 100


@pytest.mark.parametrize(
    "program", [[Op("out", 3, 1), Op("in", 2)], [Op("all", 2), Op("out", 2), Op("all", 1)]]
)
def test_three_ranks_every_schedule(program: list[Op]) -> None:
    assert Model(3, program).explore() > 1000


def test_the_model_finds_a_slot_reused_too_early() -> None:
    with pytest.raises(AssertionError, match="read from a slot"):
        Model(2, [Op("out", 4)], credit=1 - SLOTS).explore()


def test_the_model_finds_a_first_round_without_a_meeting() -> None:
    with pytest.raises(AssertionError, match="read from a slot"):
        Model(2, [Op("out", 1)] * 4, meets=False).explore()
