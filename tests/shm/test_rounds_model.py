"""The protocol of fastcoll/shm/rounds.py: its own code, and the collectives on it, in every schedule of small worlds.

A slot has room for a word, so that calls of a few words take several rounds, and there are two or three slots. Every
rank checks what each call gives it. What the model finds is shown by planted faults.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from shm.explorer import FOUND, SHARED, Explorer, load

from fastcoll.core import signature
from fastcoll.core.status import AGAIN, DIVIDED, DONE, MISMATCH, MIXED, WORKED

CONTEXT, LANE, WHAT, IN, OUT = (k << 20 for k in range(1, 6))
WAYS = 6


class Call(NamedTuple):
    """A call: how many words a rank gives, its root, how far each rank writes ahead, and which ranks divide it."""

    kind: str
    words: int
    root: int
    lags: tuple[int, ...]
    divided: tuple[bool, ...]

    @classmethod
    def parse(cls, text: str) -> Call:
        """Read a call as in "reduce 3 @1 +1", with its words, root and lag; "+1/0" is each rank's own lag."""
        kind, *rest = text.split()
        given = {each[0]: each[1:] for each in rest}
        words = [int(each) for each in rest if each.isdigit()]
        lags = [int(lag) for lag in given.get("+", "0").split("/")]
        divided = [which == "1" for which in given.get("%", "0").split("/")]
        return cls(kind, *(words or [1]), int(given.get("@", "0")), tuple(lags * 4), tuple(divided * 4))

    def words_of(self, rank: int) -> int:
        return self.words + (self.kind == "sizes_differ" and rank != self.root)

    def root_of(self, rank: int) -> int:
        return min(rank, 1) if self.kind == "roots_differ" else self.root

    def given(self, number: int, rank: int) -> list[int]:
        return [1000 * number + 100 * rank + k for k in range(1, self.words_of(rank) + 1)]


class World:
    """Ranks that make some calls one after the other.

    Args:
        slots, slot: how many there are in the ring, and their bytes.
        group: ranks that meet in a group; 0: all meet at once.
        hurried: every entry comes back between two rounds, as if they took long.
    """

    def __init__(
        self,
        size: int,
        calls: str,
        slots: int = 2,
        slot: int = 8,
        group: int = 0,
        hurried: bool = False,
        plant: str = "",
    ) -> None:
        sizes = {"SLOTS": slots, "INLINE": 8, "GROUP": group or 8, "FLAT": 1 if group else 16}
        self.machine, self.made = load(plant, layout=sizes)
        self.size, self.hurried = size, hurried
        self.calls = [Call.parse(each) for each in calls.split(", ")]
        self.layout = self.made.layout.Layout(size, slot)
        self.lag = self.way = 0
        plain = self.made.autotune.choose_none

        def choose(t: int) -> None:
            plain(t)
            self.machine.store_words(t, (self.lag, self.way))  # LAG, WAY

        self.made.autotune.choose_none = choose

    def begin(self, rank: int) -> tuple[Any, dict[int, Any]]:
        at, layout, waiting = self.made.context_layout, self.layout, self.made.waiting
        private = {}
        for c in (CONTEXT, LANE):
            words = {
                at.RANK: rank, at.SIZE: self.size, at.SECTIONS: SHARED + layout.section(0), at.STRIDE: layout.stride,
                at.SLOTS_AT: self.made.layout.CONTROL, at.SLOT: layout.slot, at.LATE: -1, at.LANES: 1,
                at.ONE_SHOT: 8, at.DIRECT_FROM: self.made.autotune.NEVER,
                at.PATIENCE + waiting.BUDGET: -1 if self.hurried else 1,
            }  # fmt: skip
            private |= {c + 8 * word: value for word, value in words.items()}
        private[CONTEXT + 8 * at.COMBINED] = SHARED + self.made.layout.COMBINED if layout.groups else 0
        private[CONTEXT + 8 * at.LANE_CONTEXTS] = LANE
        control = self.made.layout.LANES  # the lane's, which has all of the slots (lanes.py)
        private[LANE + 8 * at.SECTIONS] += control
        private[LANE + 8 * at.SLOTS_AT] = layout.lane_slots_at(0, 1) - control
        private[LANE + 8 * at.LANE] = 1
        return (0, 0, CONTEXT), private

    def go_on(self, rank: int, at: tuple[int, int, int]) -> tuple[int, int, int] | None:
        number, how, c = at
        r, words, m = self.made.rounds, self.made.context_layout, self.machine
        call = self.calls[number]
        again = how & (r.RESUMED | r.HELD)
        self.lag, divided = (0, False) if how & r.HELD else (call.lags[rank], call.divided[rank])
        self.way = WAYS if divided else 0
        if not again and c == CONTEXT:
            m.store_words(IN, call.given(number + 1, rank))
            m.store_words(OUT, [0] * self.size * (call.words + 1))
        assert r.take(c | how) == c
        code = self.enter(call, rank, c | how, c)
        if code == DIVIDED:
            return number, r.PREPARED, LANE
        if code in (AGAIN, WORKED):
            return number, how & ~r.HELD | r.RESUMED, c
        if code == MIXED:
            return number, r.HELD, c
        if call.kind.endswith("_differ"):
            assert code == MISMATCH, f"a mismatch is seen as {code}"
            # What is said of it is read from all ranks' own lines.
            lines = [m.load_words(r.line_of(c, peer), 3) for peer in range(self.size)]
            expected = [
                [number + 1, self.word(call, rank), 8 * call.words_of(rank)] for rank in range(self.size)
            ]
            assert lines == expected, f"lines of call {number + 1} are {lines}"
            m.store(c + 8 * words.BUSY, 0)
        else:
            assert code == DONE, f"{call} has ended with {code}"
        if c == LANE:
            return number, r.RESUMED, CONTEXT
        self.check(call, number + 1, rank)
        number += 1
        return (number, 0, CONTEXT) if number < len(self.calls) else None

    def word(self, call: Call, rank: int) -> int:
        kind = "broadcast" if call.kind.endswith("_differ") else call.kind
        return signature.encode(kind) | call.root_of(rank) << signature.ROOT_SHIFT

    def enter(self, call: Call, rank: int, h: int, c: int) -> int:
        made, m = self.made, self.machine
        at, v, code = made.context_layout, made.validate, signature.code_of
        nbytes = 8 * call.words_of(rank)
        word, root = self.word(call, rank), call.root_of(rank)
        m.store_words(WHAT, (word ^ root << signature.ROOT_SHIFT, 0, 0, 8))
        if call.kind == "barrier":
            return made.reductions.run_barrier(h, c, word)
        if call.kind in ("broadcast", "sizes_differ", "roots_differ"):
            return made.movement.run_broadcast(h, c, IN if rank == root else OUT, nbytes, WHAT, root)
        if call.kind == "all_reduce":
            if not h & (made.rounds.RESUMED | made.rounds.HELD) and c == CONTEXT:
                m.copy(OUT, IN, nbytes)
            return made.reductions.run_all_reduce(h, c, OUT, nbytes, WHAT)
        if call.kind == "reduce":
            return made.reductions.run_reduce(h, c, OUT, IN, nbytes, WHAT, call.root)
        many = rank == call.root
        if call.kind == "reduce_scatter":
            v.list_parts(c, at.GIVES, IN, nbytes // self.size)
            return made.reductions.run_reduce_scatter(h, c, OUT, nbytes // self.size, WHAT)
        v.list_none(c, at.GIVES)
        v.list_none(c, at.TAKES)
        if call.kind == "all_gather":
            v.list_same(c, at.GIVES, IN, nbytes)
            v.list_parts(c, at.TAKES, OUT, nbytes)
        elif call.kind == "all_to_all":
            v.list_parts(c, at.GIVES, IN, nbytes // self.size)
            v.list_parts(c, at.TAKES, OUT, nbytes // self.size)
        else:
            v.list_one(c, at.GIVES, call.root, IN, nbytes)
            if many:
                v.list_parts(c, at.TAKES, OUT, nbytes)
        return made.movement.run_exchange(h, c, code(call.kind), WHAT, call.root)

    def check(self, call: Call, number: int, rank: int) -> None:
        """What a rank got."""
        given = [call.given(number, peer) for peer in range(self.size)]
        total = [sum(column) for column in zip(*given, strict=False)]
        part = call.words // self.size
        mine = slice(rank * part, (rank + 1) * part)
        is_root = rank == call.root
        expected = {
            "broadcast": [] if is_root else given[call.root],
            "all_reduce": total,
            "reduce": total if is_root else [],
            "reduce_scatter": total[mine],
            "all_gather": [word for each in given for word in each],
            "gather": [word for each in given for word in each] if is_root else [],
            "all_to_all": [word for each in given for word in each[mine]],
        }.get(call.kind, [])
        found = self.machine.load_words(OUT, len(expected))
        assert found == expected, f"{call.kind}, call {number}, gave rank {rank} {found} and not {expected}"
        self.machine.store_words(OUT, [0] * self.size * (call.words + 1))
        self.machine.store_words(IN, [0] * (call.words + 1))


PROGRAMS = {
    "single rounds": "all_reduce, barrier, broadcast, all_reduce",
    "long all": "all_reduce 4, all_reduce, all_reduce 3",
    "long all, writing ahead": "all_reduce 4 +1, barrier, all_reduce 3 +1",
    "one writes ahead": "all_reduce 3 +1/0, all_reduce 3 +0/1, all_reduce 2",
    "long broadcasts": "broadcast 4, broadcast 3 @1, barrier, broadcast 2",
    "broadcasts, writing ahead": "broadcast 4 +1, broadcast, broadcast 3 @1 +1",
    "changing roots": "broadcast 3 +1, broadcast 3 @1, reduce 3 +1, reduce 2 @1",
    "short between long": "broadcast 3, reduce, broadcast 3, all_reduce 2, reduce 3",
    "mismatches between": "all_reduce 2, sizes_differ 2 +1, all_reduce 3 +1, broadcast 3",
    "two mismatches": "roots_differ 1 +1, sizes_differ 2 +1, all_reduce 4",
    "divided between": "all_reduce 3 +1, broadcast 2 +1 %1, broadcast 2 +1, all_reduce 3 +1 %1, all_reduce 2",
    "divided and mismatches": "sizes_differ 1 +1 %1, broadcast 2 %1, roots_differ 2 +1",
    "only one rank divides": "broadcast 3 +1 %1/0, all_reduce 2 +1 %0/1, all_reduce 2",
}


def explore(size: int, calls: str, again: bool = False, **how: Any) -> int:
    return Explorer(World(size, calls, **how), size, again).explore()


@pytest.mark.parametrize("hurried", [False, True], ids=["", "hurried"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_ranks_every_schedule(name: str, hurried: bool) -> None:
    assert explore(2, PROGRAMS[name], again=True, hurried=hurried) > 100


def test_moving_every_schedule() -> None:
    assert explore(2, "gather 20 +1, all_gather 2, all_to_all 4, gather 40 @1 +1", slot=64) > 100


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_more_slots_every_lag_that_they_allow(lag: int) -> None:
    program = f"all_reduce 5 +{lag}, broadcast 4 +{lag}, sizes_differ 3 +{lag}, all_reduce 4"
    assert explore(2, program, slots=3) > 100


@pytest.mark.parametrize(
    "program",
    [
        "broadcast 3 @1 +1, reduce 2, barrier",
        "all_reduce 2 +1, broadcast 2, all_reduce",
        "reduce_scatter 3, all_reduce 3",
        "broadcast 2 +1, all_reduce 1 +1 %1, broadcast 2 @1 +1",
    ],
)
def test_three_ranks_every_schedule(program: str) -> None:
    assert explore(3, program, slot=16) > 100


@pytest.mark.parametrize(
    ("again", "program"),
    [
        (False, "all_reduce, all_reduce, all_reduce, all_reduce"),
        (False, "broadcast 2 @2 +1, reduce, all_reduce 2 +1 %1"),
        (True, "broadcast, barrier"),
        (True, "sizes_differ 1, broadcast 1 @2"),
    ],
)
def test_three_ranks_in_two_groups_every_schedule(again: bool, program: str) -> None:
    assert explore(3, program, again, group=2) > 1000


@pytest.mark.long  # three ranks are in two groups, too
def test_four_ranks_in_two_groups_every_schedule() -> None:
    assert explore(4, "all_reduce, all_reduce, all_reduce", group=2) > 10000


AHEAD = PROGRAMS["long all, writing ahead"]
WORDS = "broadcast, all_reduce, all_reduce"
PLANTS = [
    # A slot is written before it was read, as the credit is too high, or nobody waits, or resuming forgets to.
    (2, AHEAD, "at.WROTE) - layout.SLOTS + 1 => at.WROTE) - layout.SLOTS"),
    (2, AHEAD, "_await_all(c, layout.CONSUMED, want) != DONE => False"),
    (2, AHEAD, "if _await_all(c, layout.CON => store_word(c, at.SEEN, want)\n    if _await_all(c, layout.CON"),
    (2, AHEAD, "max(load_word(c, at.SEEN), load_word(c, at.ROUND)) => load_word(c, at.ROUND) + 1"),
    (2, AHEAD, "CONSUMED, load_word(c, at.ROUND) + read) => CONSUMED, load_word(c, at.ROUND) + read + 1)"),
    (2, "broadcast 3, all_reduce 3", "load_word(c, at.ROUND) + step) % => step) %"),
    (2, "sizes_differ 3 +1, all_reduce 4", "store_word(c, at.READ, layout.SLOTS) => 0"),
    (2, PROGRAMS["divided between"], "store_word(c, at.READ, SLOTS) => store_word(c, at.READ, 1)"),
    # A round is read before it was written.
    (2, "broadcast 3", "return DONE if step == 0 else => return DONE if step <= 1 else"),
    (2, AHEAD, "PUBLISHED, load_word(c, at.ROUND) + read + 1) => PUBLISHED, load_word(c, at.ROUND) + read)"),
    (2, "all_reduce 4", "load_word(c, at.ROUND) + wrote + 1) => load_word(c, at.ROUND) + wrote + 2)"),
    (2, "all_reduce", "store_word(line, layout.CALL, => store_release(line, load_word(c, at.CALLS)), (line, 1,"),
    (2, "broadcast, barrier", "% 2)\n\n\n@inlined\ndef combined_of => * 0)\n\n\n@inlined\ndef combined_of"),
    # Calls go on without the meeting, or take what differs for the same.
    (2, "all_reduce, all_reduce", "if load_word(c, at.MET):\n => if True:\n"),
    (2, "all_reduce, all_reduce", "store_word(c, at.MET, 0) => 0"),
    (2, "roots_differ 1", "load_word(line, layout.CALL) == call and => True and"),
    (2, "sizes_differ 1", "theirs == shape or => True or"),
    (2, PROGRAMS["only one rank divides"], "mixed & _BESIDE_TIME\n => 0\n"),
    # Nobody goes on.
    (2, "all_reduce 3", "load_word(c, at.ROUND) + wrote + 1) => load_word(c, at.ROUND) + wrote)"),
    (2, "all_reduce 3", "if read < total: => if False:"),
    (2, AHEAD, "wrote <= load_word(c, at.READ) => wrote <= 1 + load_word(c, at.READ)"),
    # Ranks that meet in groups.
    (3, WORDS, "layout.GROUP * 2 + load_word(c, at.CALLS) % 2) => layout.GROUP * 2)"),
    (3, WORDS, "first, end, 1, load_word(c, at.RANK), => first, end - 1, 1, load_word(c, at.RANK),"),
    (3, WORDS, "0, groups, layout.GROUP => 0, 1, layout.GROUP"),
    (3, WORDS, "store_word(combined, layout.CALL, => store_release(combined, load_word(c, at.CALLS)), (combined, 1,"),
    (3, WORDS, "for peer in range(first, end): => for peer in range(load_word(c, at.RANK), end):"),
    (3, "sizes_differ 1, broadcast", "call if same else -1 => call"),
]  # fmt: skip


@pytest.mark.parametrize(("size", "program", "plant"), PLANTS)
def test_a_planted_fault_is_found(size: int, program: str, plant: str) -> None:
    file = "shm.lanes" if "SLOTS) => store" in plant else "shm.rounds"
    with pytest.raises(AssertionError, match=FOUND):
        explore(size, program, again=size == 2, group=2 * (size > 2), plant=f"{file}: {plant}")
