"""The protocol of fastcoll/shm/single_copy.py as a model, explored over every schedule of small worlds.

A rank's array is a cell for each rank's slice. A cell says which call's input or result it holds, or that its owner has
put something else there, as anybody may whose call has ended, well or not. What a rank reads is noted; a call that
returns well must have read what it meant to. One rank may give up in any wait, as by a timeout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

JUNK = ("junk", -1)


@dataclass(frozen=True)
class Rank:
    """What a rank shows to the others, and where it stands in its program."""

    cells: tuple[tuple[str, int], ...]
    line: int = -1
    published: int = -1  # rounds of all calls, 10 a call
    failed: bool = False
    op: int = 0
    step: int = 0
    bad: bool = False  # it has read something wrong in this call
    over: bool = False
    giving_up: bool = False


State = tuple[Rank, ...]
Step = tuple[object, ...]


def exchange(rank: int, size: int, root: int) -> list[Step]:
    """Rank `root` gives its array to all others."""
    if rank == root:
        return [("line",), ("meet",), *[("await", peer, 1) for peer in range(size) if peer != root], ("end",)]
    reads: list[Step] = [("read", root, cell, "in") for cell in range(size)]
    return [("line",), ("meet",), *reads, ("sound", root), ("publish", 1), ("end",)]


def all_reduce(rank: int, size: int) -> list[Step]:
    others = [(rank + turn) % size for turn in range(1, size)]
    steps: list[Step] = [("line",), ("meet",)]
    steps += [("read", peer, rank, "in") for peer in others]
    steps += [("sound", peer) for peer in others]
    steps += [("write", rank), ("publish", 1)]
    for peer in others:
        steps += [("await", peer, 1), ("read", peer, peer, "out"), ("write", peer), ("sound", peer)]
    return [*steps, ("publish", 2), *[("await", peer, 2) for peer in others], ("end",)]


class Model:
    """All ranks over a program of calls; `quitter` is who may give up, `late` plants: it says so only afterwards."""

    def __init__(
        self, programs: list[list[list[Step]]], quitter: int | None = None, late: bool = False
    ) -> None:
        self.programs, self.size, self.quitter, self.late = programs, len(programs), quitter, late

    def explore(self) -> int:
        """Visit every reachable state; returns their number."""
        start: State = (Rank((JUNK,) * self.size),) * self.size
        known, todo = {start}, [start]
        while todo:
            state = todo.pop()
            nexts = [
                (*state[:r], after, *state[r + 1 :])
                for r in range(self.size)
                for after in self.after(state, r)
            ]
            assert nexts or all(rank.over for rank in state), f"deadlock: {state}"
            for found in nexts:
                if found not in known:
                    known.add(found)
                    todo.append(found)
        return len(known)

    def after(self, state: State, r: int) -> list[Rank]:
        """The rank after its next step; several where it may also give up."""
        me = state[r]
        if me.over:
            return []
        if me.giving_up:  # the second half of it
            return [replace(me, failed=True, over=True, cells=(JUNK,) * self.size)]
        kind, *args = self.programs[r][me.op][me.step]
        onward = replace(me, step=me.step + 1)
        if kind in ("meet", "await"):
            return self.wait(state, r, kind, args, onward)
        if kind == "sound":
            (peer,) = args
            return [self.fails(me)] if state[peer].failed else [onward]
        if kind == "line":
            return [replace(onward, line=me.op, cells=(("in", me.op),) * self.size)]
        if kind == "read":
            peer, cell, what = args
            return [replace(onward, bad=me.bad or state[peer].cells[cell] != (what, me.op))]
        if kind == "write":
            (cell,) = args
            return [replace(onward, cells=(*me.cells[:cell], ("out", me.op), *me.cells[cell + 1 :]))]
        if kind == "publish":
            return [replace(onward, published=10 * me.op + args[0])]
        assert kind == "end"
        assert not me.bad, f"rank {r} returned from call {me.op} with what it should not have read"
        done = replace(me, op=me.op + 1, step=0, cells=(JUNK,) * self.size)
        return [replace(done, over=done.op == len(self.programs[r]))]

    def wait(self, state: State, r: int, kind: object, args: list, onward: Rank) -> list[Rank]:
        me, found = state[r], []
        if kind == "meet":
            there = all(peer.line >= me.op for peer in state)
        else:
            peer, number = args
            # Who has gone on to the next call has published all rounds of this one.
            there = state[peer].published >= 10 * me.op + number or state[peer].line > me.op
        if there:
            found.append(onward)
        if any(peer.failed for peer in state):
            found.append(self.fails(me))
        if r == self.quitter:
            found.append(self.fails(me))
        return found

    def fails(self, me: Rank) -> Rank:
        """A rank fails the group: it says so, and then its array is its own again."""
        return replace(
            me, giving_up=True, failed=not self.late, cells=(JUNK,) * self.size if self.late else me.cells
        )


def world(size: int, *calls: str) -> list[list[list[Step]]]:
    """Each rank's calls: all_reduce, or the rank that gives in an exchange."""
    return [
        [all_reduce(r, size) if call == "all_reduce" else exchange(r, size, int(call)) for call in calls]
        for r in range(size)
    ]


def without(programs, *steps: Step):
    """The programs with some steps left out."""
    return [[[s for s in call if s not in steps] for call in rank] for rank in programs]


@pytest.mark.parametrize("quitter", [None, 0, 1])
@pytest.mark.parametrize(
    ("size", "calls"),
    [
        (2, ("0", "all_reduce", "1")),
        (2, ("all_reduce", "all_reduce", "0")),
        (3, ("0", "2", "0")),
        (3, ("all_reduce",)),
    ],
)
def test_nobody_returns_with_anything_wrong_and_nobody_waits_for_ever(size, calls, quitter):
    assert Model(world(size, *calls), quitter).explore() > 20


@pytest.mark.parametrize(
    ("calls", "left_out", "quitter"),
    [
        (("0", "0"), [("await", 1, 1)], None),  # the owner does not wait for its readers
        (("all_reduce", "0"), [("await", 0, 2), ("await", 1, 2)], None),  # nor does it in an all_reduce
        (
            ("all_reduce",),
            [("await", 0, 1), ("await", 1, 1)],
            None,
        ),  # slices are read before they are reduced
        (("0",), [("meet",)], None),
        (("0", "0"), [("sound", 0)], 0),  # nobody looks whether the owner has failed meanwhile
        (("all_reduce",), [("sound", 0), ("sound", 1)], 0),
    ],
)
def test_a_planted_fault_is_found(calls, left_out, quitter):
    with pytest.raises(AssertionError, match=r"should not have read|deadlock"):
        Model(without(world(2, *calls), *left_out), quitter).explore()


def test_an_array_that_changes_before_its_owner_has_said_that_it_failed_is_found():
    with pytest.raises(AssertionError, match="should not have read"):
        Model(world(2, "0"), quitter=0, late=True).explore()
