"""The protocol of fastcoll/kernels/cuda/steps.py and gpu/ipc/schedules.py as a model, explored over every schedule.

A rank is a list of atomic actions; any rank may take its next one. A slot that is being written holds TORN, and a read
takes two actions, so a slot that is written while somebody reads it is caught wherever that can happen. A rank may be
stopped wherever it waits; from then on it says nothing, while what it has queued goes on and writes over its slots.
A call has ended well on a rank when nothing it read was wrong, or no peer had failed the group before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from fastcoll.gpu.ipc.schedules import slot_of

TORN = (-1, -1)
LAST = 99
Word = tuple[int, int]


class Rules(NamedTuple):
    """The protocol's, or with a fault."""

    slot: Callable[[int, int], int] = slot_of
    lines: int = 2
    says_last: bool = True
    dead_are_silent: bool = True
    fails_before_it_stops: bool = True
    meets_all: bool = True
    steps_wait: bool = True


class Rank(NamedTuple):
    """What a rank alone writes, in its peers' pages and its slots."""

    at: int = 0
    slots: tuple[Word, ...] = (TORN,) * 4
    lines: tuple[int, ...] = (0, 0)
    step: Word = (0, 0)
    dead: bool = False
    failed: bool = False
    wrong: bool = False


State = tuple[Rank, ...]
Action = tuple[str, Any, Any]


def actions(rank: int, size: int, program: Sequence[Sequence[int]], rules: Rules) -> list[Action]:
    """What a rank does in calls of so many steps, one number a rank; all read all slots at every step they share."""
    done: list[Action] = []
    peers = [peer for peer in range(size) if peer != rank]
    for call, steps in enumerate(program, 1):
        for step in range(steps[rank]):
            slot = rules.slot(call, step)
            done += [("write", slot, TORN), ("write", slot, (call, step))]
            if step == 0:
                done.append(("line", call, None))
                done += [("meet", peer, call) for peer in peers if rules.meets_all or peer == 0]
                done += [("compare", peer, call) for peer in peers]
            else:
                done.append(("step", (call, step), None))
                done += [("wait", peer, (call, step)) for peer in peers if rules.steps_wait]
            done += [
                (how, peer, (call, step)) for peer in peers if step < steps[peer] for how in ("read", "read")
            ]
        if rules.says_last and len(set(steps)) > 1:
            done.append(("step", (call, LAST), None))
        done.append(("end", call, None))
    return done


class Model:
    """All ranks over a program of calls.

    Args:
        program: for each call, the number of steps of each rank.
        stopped: the rank that is stopped once, wherever it waits.
    """

    def __init__(
        self, program: Sequence[Sequence[int]], rules: Rules | None = None, stopped: int | None = None
    ) -> None:
        self.rules, self.size, self.stopped = rules or Rules(), len(program[0]), stopped
        self.todo = [actions(rank, self.size, program, self.rules) for rank in range(self.size)]

    def explore(self) -> int:
        """Visit all states; how many there are."""
        first: State = (Rank(),) * self.size
        seen, left = {first}, [first]
        while left:
            state = left.pop()
            following = [after for rank in range(self.size) for after in self._after(state, rank)]
            over = all(self._is_over(state, rank) for rank in range(self.size))
            assert following or over, f"deadlock: {state}"
            new = [after for after in following if after not in seen]
            seen.update(new)
            left += new
        return len(seen)

    def _is_over(self, state: State, rank: int) -> bool:
        """Whether it has ended, or waits for one that says nothing, until it is stopped itself."""
        return state[rank].at == len(self.todo[rank]) or any(r.failed or r.dead for r in state)

    def _after(self, state: State, rank: int) -> list[State]:
        me = state[rank]
        if me.at == len(self.todo[rank]):
            return []
        what, which, value = self.todo[rank][me.at]
        waits = what in ("meet", "wait")
        following = []
        if not waits or me.dead or self._has_come(state[which], what, value):
            following.append(self._done(state, rank, what, which, value))
        if waits and rank == self.stopped and not me.failed:
            early = self.rules.fails_before_it_stops
            following.append(self._with(state, rank, me._replace(failed=early, dead=not early)))
        if waits and me.failed and not me.dead:
            following.append(self._with(state, rank, me._replace(dead=True, at=me.at + 1)))
        return following

    def _has_come(self, peer: Rank, what: str, value: Any) -> bool:
        return max(peer.lines) >= value if what == "meet" else peer.step >= value

    def _done(self, state: State, rank: int, what: str, which: Any, value: Any) -> State:
        me = state[rank]._replace(at=state[rank].at + 1)
        silent = me.dead and self.rules.dead_are_silent
        if what == "write":
            me = me._replace(slots=_put(me.slots, which, value))
        elif what == "line" and not silent:
            me = me._replace(lines=_put(me.lines, which % self.rules.lines, which))
        elif what == "step" and not silent:
            me = me._replace(step=which)
        elif what == "compare" and not me.dead:
            assert state[which].lines[value % self.rules.lines] == value, (
                f"call {value} compared with another one"
            )
        elif what == "read" and state[which].slots[self.rules.slot(*value)] != value:
            me = me._replace(wrong=True)
        elif what == "end":
            well = me.dead or not me.wrong or any(peer.failed for peer in state)
            assert well, f"call {which} read from a slot that was written again"
            me = me._replace(wrong=False)
        return self._with(state, rank, me)

    @staticmethod
    def _with(state: State, rank: int, me: Rank) -> State:
        return (*state[:rank], me, *state[rank + 1 :])


def _put(items: tuple[Any, ...], place: int, item: Any) -> tuple[Any, ...]:
    return (*items[:place], item, *items[place + 1 :])


EVEN = [(1, 1), (3, 3), (1, 1), (1, 1), (2, 2), (1, 1)]
UNEVEN = [(3, 1), (1, 1), (1, 4), (2, 2), (1, 3)]


@pytest.mark.parametrize("program", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("stopped", [None, 0, 1])
def test_two_ranks_every_schedule(program, stopped) -> None:
    assert Model(program, stopped=stopped).explore() > 100


@pytest.mark.parametrize("program", [[(1, 1, 1), (2, 2, 2)], [(2, 1, 1), (1, 1, 1)]], ids=["even", "uneven"])
@pytest.mark.parametrize("stopped", [None, 2])
def test_three_ranks_every_schedule(program, stopped) -> None:
    assert Model(program, stopped=stopped).explore() > 1000


def only(slot: Callable[[int, int], int]) -> Rules:
    return Rules(slot=slot)


FAULTS = {
    "two slots in all": (EVEN, only(lambda call, step: (call + step) % 2), None, "written again"),
    "one slot of first steps": (EVEN, only(lambda call, step: 0 if step == 0 else 2 + step % 2), None, "written"),
    "one slot of later steps": (EVEN, only(lambda call, step: call % 2 if step == 0 else 2), None, "written again"),
    "one line": (EVEN, Rules(lines=1), None, "another one"),
    "nobody says that it was its last step": ([(3, 1)], Rules(says_last=False), None, "deadlock"),
    "steps do not wait": (EVEN, Rules(steps_wait=False), None, "written again"),
    "the dead speak": ([(2, 2, 2)] * 2, Rules(dead_are_silent=False, fails_before_it_stops=False), 0, "written again"),
    "a rank stops before it fails": ([(2, 2, 2), (3, 3, 3)], Rules(fails_before_it_stops=False), 0, "written again"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_model_finds(name) -> None:
    program, rules, stopped, message = FAULTS[name]
    with pytest.raises(AssertionError, match=message):
        Model(program, rules, stopped).explore()
