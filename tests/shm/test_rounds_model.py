"""The protocol of fastcoll/shm/rounds.py as a model, explored over every schedule of small worlds.

The model keeps the shared words (call lines, PUBLISHED, CONSUMED, slots) and lets any rank take its next atomic
step. Slots hold the number of the round that was written last, and a write and a read take two steps each, so a
slot that is written while somebody reads it is caught wherever it can happen.

A call that is divided among lanes (shm/lanes.py) is here one round without data, and then what the lanes do
to the slots, which they share with the rounds: each rank writes all of its own, and reads a slot of every other.

Ranks may meet in groups. A combined line is a sequence and words, both the number of the call that they are for; to
write the words takes two steps. Any rank of the group may write them, and be slow in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

NEXT, WRITING, PUBLISH, COMPARE, READING, BEGIN_TO_TELL, TELL, TOLD = range(8)
TORN = -2


@dataclass(frozen=True)
class Op:
    """A call: its kind, its number of rounds, its root, and how far each rank writes ahead."""

    kind: str
    rounds: int
    root: int = 0
    lags: tuple[int, ...] = (0, 0, 0, 0)

    def total(self, rank: int) -> int:
        """Rounds as this rank sees them; where the calls differ, so may these."""
        return self.rounds + rank if self.kind == "mismatch" else self.rounds

    def writes(self, rank: int) -> bool:
        return {"all": True, "word": False, "mismatch": True, "out": rank == self.root, "in": True}[self.kind]

    def reads(self, rank: int, size: int) -> tuple[int, ...]:
        peers = tuple(p for p in range(size) if p != rank)
        return {
            "all": peers,  # all_reduce, all_gather, all_to_all
            "word": peers,  # the same of a word, which the combined lines have
            "mismatch": peers,
            "out": () if rank == self.root else (self.root,),  # broadcast, scatter
            "in": peers if rank == self.root else (),  # gather, reduce
        }[self.kind]


@dataclass(frozen=True)
class Rank:
    """Private words of a rank, and those that it alone writes."""

    slots: tuple[int, ...]
    op: int = 0
    phase: int = NEXT
    peer: int = 0
    round: int = 0
    wrote: int = 0
    read: int = 0
    met: bool = False
    seen: int = 0
    lines: tuple[int, int] = (0, 0)
    laned: int = 0  # calls whose lanes have written here
    published: int = 0
    consumed: int = 0
    combined: tuple[tuple[int, int], ...] = ((0, 0), (0, 0))  # in a group's first rank: sequence and words


State = tuple[Rank, ...]


class Model:
    """The transitions of all ranks over a program of calls.

    Args:
        size: ranks.
        program: calls, the same on all ranks.
        slots: in the ring.
        credit: what `open_slot` waits for, relative to the round; the protocol's is 1 - slots.
        skip: rounds that a call takes that turned out to be a mismatch; the protocol's is `slots`.
        span: rounds that a divided call takes; the protocol's is `slots`.
        meets: whether a call's first round waits for all ranks.
        group: ranks that meet in a group; 0: all meet at once.
        parities: combined lines of a group; the protocol's are 2.
        tells: the steps in which a combined line is written.
        awaits: what a rank waits for in groups: the lines of its own, and the combined ones of all.
    """

    def __init__(
        self,
        size: int,
        program: list[Op],
        slots: int = 2,
        credit: int | None = None,
        skip: int | None = None,
        span: int | None = None,
        meets: bool = True,
        group: int = 0,
        parities: int = 2,
        tells: tuple[int, ...] = (BEGIN_TO_TELL, TELL, TOLD),
        awaits: tuple[str, ...] = ("lines", "groups"),
    ) -> None:
        self.size, self.program, self.slots, self.meets = size, program, slots, meets
        self.group, self.parities, self.tells, self.awaits = group, parities, tells, awaits
        self.credit = 1 - slots if credit is None else credit
        self.skip = slots if skip is None else skip
        self.span = slots if span is None else span

    def explore(self) -> int:
        """Visit every reachable state; returns their number."""
        start: State = (Rank((-1,) * self.slots),) * self.size
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
        if me.phase in self.tells:
            return self.tell(state, r)
        after = self.act(me, r, state)
        return None if after is None else (*state[:r], after, *state[r + 1 :])

    def act(self, me: Rank, r: int, state: State) -> Rank | None:
        op = self.program[me.op]
        if op.kind == "divided" and me.phase in (NEXT, READING):
            return self.divide(me, r, state)
        if me.phase == WRITING:
            return replace(me, phase=PUBLISH, slots=self.put(me, me.round + me.wrote))
        if me.phase == PUBLISH:
            return self.publish(me)
        if me.phase == COMPARE:
            return self.compare(me, r, op, state)
        if me.phase == READING:
            peer = op.reads(r, self.size)[me.peer]
            if op.kind == "word":
                self.assert_combined(me, peer, state)
                return replace(me, phase=NEXT, peer=me.peer + 1)
            held = state[peer].slots[(me.round + me.read) % self.slots]
            assert held == me.round + me.read, (
                f"round {me.round + me.read} read from a slot that holds {held}"
            )
            return replace(me, phase=NEXT, peer=me.peer + 1)
        if me.wrote < op.total(r) and me.wrote <= me.read + op.lags[r]:
            return self.write(me, r, op, state)
        if not me.met and self.meets:
            return self.meet(me, r, state)
        return self.begin_read(me, r, op, state)

    def divide(self, me: Rank, r: int, state: State) -> Rank | None:
        if me.wrote == 0:
            return replace(me, phase=PUBLISH)
        if not me.met:
            return self.meet(me, r, state)
        mark = -10 - me.op
        if me.laned <= me.op:
            torn = (-2,) * self.slots
            return replace(me, slots=torn) if me.slots != torn else self.lanes_write(me, mark)
        if me.peer == self.size:
            return self.finish(replace(me, read=self.span))
        peer = state[me.peer]
        if peer.laned <= me.op:
            return None
        if me.phase == NEXT:
            return replace(me, phase=READING)
        if me.peer != r:
            assert peer.slots == (mark,) * self.slots, f"lanes read from slots that hold {peer.slots}"
        return replace(me, phase=NEXT, peer=me.peer + 1)

    def lanes_write(self, me: Rank, mark: int) -> Rank:
        return replace(me, slots=(mark,) * self.slots, laned=me.op + 1)

    def write(self, me: Rank, r: int, op: Op, state: State) -> Rank | None:
        if not op.writes(r):
            return replace(me, phase=PUBLISH)
        want = me.round + me.wrote + self.credit
        if me.seen < want and any(p.consumed < want for k, p in enumerate(state) if k != r):
            return None
        torn = self.put(me, -2)  # half-written
        return replace(me, phase=WRITING, seen=max(me.seen, want), slots=torn)

    def put(self, me: Rank, value: int) -> tuple[int, ...]:
        place = (me.round + me.wrote) % self.slots
        return (*me.slots[:place], value, *me.slots[place + 1 :])

    def publish(self, me: Rank) -> Rank:
        after = replace(me, phase=NEXT, wrote=me.wrote + 1)
        if me.wrote:
            return replace(after, published=me.round + me.wrote + 1)
        lines = (me.op + 1, me.lines[1]) if me.op % 2 == 0 else (me.lines[0], me.op + 1)
        return replace(after, lines=lines)

    def meet(self, me: Rank, r: int, state: State) -> Rank | None:
        """Go on to what the lines allow: to compare them all, or to combine those of the group."""
        if not self.group:
            begun = self.have_begun(me, range(self.size), state)
        elif self.told(me, r, state) <= me.op:
            mine = range(r - r % self.group, min(r - r % self.group + self.group, self.size))
            begun = "lines" not in self.awaits or self.have_begun(me, mine, state)
            return replace(me, phase=self.tells[0]) if begun else None
        else:
            firsts = range(0, self.size, self.group)
            begun = "groups" not in self.awaits or all(self.told(me, k, state) > me.op for k in firsts)
        return replace(me, phase=COMPARE) if begun else None

    def have_begun(self, me: Rank, ranks: range, state: State) -> bool:
        return all(state[k].lines[me.op % 2] > me.op for k in ranks)

    def told(self, me: Rank, r: int, state: State) -> int:
        """The sequence of a group's combined line."""
        return state[r - r % self.group].combined[me.op % self.parities][0]

    def tell(self, state: State, r: int) -> State:
        """A step of writing the combined line of r's group."""
        me, first, number = state[r], r - r % self.group, state[r].op + 1
        lines = list(state[first].combined)
        sequence, words = lines[me.op % self.parities]
        if me.phase == self.tells[0]:
            members = state[first : min(first + self.group, self.size)]
            assert "lines" not in self.awaits or all(p.lines[me.op % 2] == number for p in members), (
                "a line was overwritten"
            )
        step, after = self.tells.index(me.phase), NEXT
        if step or sequence < number:  # else another rank was faster
            after = (*self.tells, NEXT)[step + 1]
            if me.phase == BEGIN_TO_TELL and words != number:  # words that are the same are not torn
                words = TORN
            elif me.phase == TELL:
                words = number
            elif me.phase == TOLD:
                sequence = number
        lines[me.op % self.parities] = sequence, words
        ranks = list(state)
        ranks[first] = replace(ranks[first], combined=tuple(lines))
        ranks[r] = replace(ranks[r], phase=after)
        return tuple(ranks)

    def assert_combined(self, me: Rank, r: int, state: State) -> None:
        number = me.op + 1
        line = state[r - r % self.group].combined[me.op % self.parities]
        assert line == (number, number), f"a combined line of call {number} holds {line}"

    def compare(self, me: Rank, r: int, op: Op, state: State) -> Rank:
        if self.group and "groups" in self.awaits:
            for first in range(0, self.size, self.group):
                self.assert_combined(me, first, state)
        elif not self.group:
            others = [p for k, p in enumerate(state) if k != r]
            assert all(p.lines[me.op % 2] == me.op + 1 for p in others), "a line was overwritten"
        me = replace(me, phase=NEXT, met=True, seen=max(me.seen, me.round))
        if op.kind == "mismatch":
            # What is said of a mismatch is read from all ranks' own lines.
            assert all(p.lines[me.op % 2] == me.op + 1 for p in state), "a line was overwritten"
            return self.finish(replace(me, read=self.skip))
        return me

    def begin_read(self, me: Rank, r: int, op: Op, state: State) -> Rank | None:
        reads = op.reads(r, self.size)
        if me.peer == len(reads):
            me = replace(me, read=me.read + 1, peer=0, consumed=me.round + me.read + 1)
            return self.finish(me) if me.read == op.rounds else me
        if me.read and state[reads[me.peer]].published < me.round + me.read + 1:
            return None
        return replace(me, phase=READING)

    def finish(self, me: Rank) -> Rank:
        end = me.round + me.read
        return replace(me, op=me.op + 1, round=end, consumed=end, wrote=0, read=0, peer=0, met=False)


AHEAD = (1, 1, 1)

PROGRAMS = {
    "single rounds": [Op("all", 1)] * 4,
    "long all": [Op("all", 4), Op("all", 1), Op("all", 3)],
    "long all, writing ahead": [Op("all", 4, lags=AHEAD), Op("all", 1), Op("all", 3, lags=AHEAD)],
    "one writes ahead": [Op("all", 3, lags=(1, 0)), Op("all", 3, lags=(0, 1)), Op("all", 2)],
    "long broadcasts": [Op("out", 4), Op("out", 3), Op("out", 1), Op("out", 2)],
    "broadcasts, writing ahead": [Op("out", 4, lags=AHEAD), Op("out", 1), Op("out", 3, 1, AHEAD)],
    "changing roots": [Op("out", 3, 0, AHEAD), Op("out", 3, 1), Op("in", 3, 0, AHEAD), Op("in", 2, 1)],
    "gather, then all": [Op("in", 3, 0, AHEAD), Op("all", 1), Op("all", 2, 0, AHEAD)],
    "short between long": [Op("out", 3), Op("in", 1), Op("out", 3), Op("all", 2), Op("in", 3)],
    "mismatches between": [
        Op("all", 2),
        Op("mismatch", 2, lags=AHEAD),
        Op("all", 3, lags=AHEAD),
        Op("out", 3),
    ],
    "divided between": [
        Op("all", 3, lags=AHEAD),
        Op("divided", 1),
        Op("out", 2, lags=AHEAD),
        Op("divided", 1),
    ],
    "divided, then single ones": [
        Op("divided", 1),
        Op("all", 1),
        Op("divided", 1),
        Op("in", 2),
        Op("all", 1),
    ],
    "divided and mismatches": [
        Op("mismatch", 1, lags=AHEAD),
        Op("divided", 1),
        Op("mismatch", 2, lags=AHEAD),
    ],
    "two divided": [Op("out", 3, lags=AHEAD), Op("divided", 1), Op("divided", 1), Op("in", 3, lags=AHEAD)],
    "a refused call, what is told of it, and the next ones": [
        Op("mismatch", 1, lags=AHEAD),
        Op("all", 1),
        Op("mismatch", 1),
        Op("all", 2),
        Op("all", 3, lags=AHEAD),
    ],
    "two mismatches": [Op("mismatch", 1, lags=AHEAD), Op("mismatch", 2, lags=AHEAD), Op("all", 4)],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_ranks_every_schedule(name: str) -> None:
    assert Model(2, PROGRAMS[name]).explore() > 100


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_more_slots_every_lag_that_they_allow(lag: int) -> None:
    lags = (lag, lag)
    program = [Op("all", 5, lags=lags), Op("out", 4, lags=lags), Op("mismatch", 3, lags=lags), Op("all", 4)]
    assert Model(2, program, slots=3).explore() > 100


@pytest.mark.parametrize(
    "program",
    [
        [Op("out", 3, 1, AHEAD), Op("in", 2)],
        [Op("all", 2, lags=AHEAD), Op("out", 2), Op("all", 1)],
        [Op("out", 2, lags=AHEAD), Op("divided", 1), Op("out", 2, 1, AHEAD)],
    ],
)
def test_three_ranks_every_schedule(program: list[Op]) -> None:
    assert Model(3, program).explore() > 1000


GROUPED = {
    "words": [Op("word", 1)] * 4,
    "words and slots": [Op("word", 1), Op("all", 2), Op("word", 1)],
    "a mismatch between": [Op("word", 1), Op("mismatch", 1), Op("word", 1)],
    "out, in, divided": [Op("out", 2, 2, AHEAD), Op("in", 1), Op("divided", 1)],
}


@pytest.mark.long
@pytest.mark.parametrize("name", GROUPED)
def test_three_ranks_in_two_groups_every_schedule(name: str) -> None:
    assert Model(3, GROUPED[name], group=2).explore() > 1000


@pytest.mark.long  # 4 to 8 s; three ranks are in two groups, too
def test_four_ranks_in_two_groups_every_schedule() -> None:
    assert Model(4, [Op("word", 1)] * 3, group=2).explore() > 1000


@pytest.mark.parametrize("size", [3, 4])
def test_the_model_finds_a_group_told_of_before_all_its_ranks_are_there(size: int) -> None:
    with pytest.raises(AssertionError, match="read from a slot"):
        Model(size, [Op("all", 1)] * 2, group=2, awaits=("groups",)).explore()


def test_the_model_finds_a_rank_that_waits_for_its_own_group_only() -> None:
    with pytest.raises(AssertionError, match="read from a slot"):
        Model(3, [Op("all", 1)] * 2, group=2, awaits=("lines",)).explore()


def test_the_model_finds_a_combined_line_told_of_before_it_is_written() -> None:
    with pytest.raises(AssertionError, match="a combined line of call"):
        Model(3, [Op("word", 1)], group=2, tells=(TOLD, BEGIN_TO_TELL, TELL)).explore()


def test_the_model_finds_that_one_combined_line_is_not_enough() -> None:
    with pytest.raises(AssertionError, match="a combined line of call"):
        Model(3, [Op("word", 1)] * 3, group=2, parities=1).explore()


def test_the_model_finds_a_slot_reused_too_early() -> None:
    with pytest.raises(AssertionError, match="read from a slot"):
        Model(2, [Op("out", 4, lags=AHEAD)], credit=-2).explore()


def test_the_model_finds_a_first_round_without_a_meeting() -> None:
    with pytest.raises(AssertionError, match="read from a slot"):
        Model(2, [Op("out", 1)] * 4, meets=False).explore()


def test_the_model_finds_writing_too_far_ahead() -> None:
    with pytest.raises(AssertionError, match="deadlock"):
        Model(2, [Op("all", 4, lags=(2, 2))]).explore()


def test_the_model_finds_rounds_of_a_mismatch_taken_for_later_ones() -> None:
    with pytest.raises(AssertionError, match="read from a slot"):
        Model(2, [Op("mismatch", 3, lags=(2, 2)), Op("all", 3)], slots=3, skip=1).explore()


def test_the_model_finds_slots_written_while_lanes_still_read_them() -> None:
    with pytest.raises(AssertionError, match="read from slots"):
        Model(2, [Op("divided", 1), Op("all", 2)], span=1).explore()
