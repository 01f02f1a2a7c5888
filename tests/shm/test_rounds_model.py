"""The protocol of fastcoll/shm/rounds.py: the package's code, with its collectives, in every schedule of small worlds.

A slot has room for one word, so calls of a few words take several rounds, and there are two or three slots. Every rank
checks each result. Planted faults show what the model finds.
"""

from __future__ import annotations

from typing import Any

import pytest
from shm.collectives import explore
from shm.explorer import FOUND

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
    "direct between": "all_reduce 5 +1, broadcast 2 direct, broadcast 4 +1, all_reduce 3 direct, all_reduce 4",
    "direct and mismatches": "sizes_differ 1 direct, broadcast 2 direct, roots_differ 2 +1",
    "only one rank goes direct": "broadcast 5 +1 %1/0, all_reduce 4 +1 %0/1, all_reduce 4",
}


@pytest.mark.parametrize("hurried", [False, True], ids=["", "hurried"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_ranks_every_schedule(name: str, hurried: bool) -> None:
    assert explore(2, PROGRAMS[name], again=True, hurried=hurried) > 50


OTHERS: list[tuple[int, str, dict[str, Any]]] = [
    (2, "gather 20 +1, all_gather 2, blocks_differ 1, all_to_all 4, gather 40 @1 +1", {"slot": 64}),
    (3, "blocks_differ 1, broadcast", {"slot": 128, "group": 2}),
    # More slots, with every lag that they allow.
    (2, "all_reduce 5 +0, broadcast 4 +0, sizes_differ 3 +0, all_reduce 4", {"slots": 3}),
    (2, "all_reduce 5 +1, broadcast 4 +1, sizes_differ 3 +1, all_reduce 4", {"slots": 3}),
    (2, "all_reduce 5 +2, broadcast 4 +2, sizes_differ 3 +2, all_reduce 4", {"slots": 3}),
    (3, "broadcast 3 @1 +1, reduce 2, barrier", {"slot": 16}),
    (3, "all_reduce 2 +1, broadcast 2, all_reduce", {"slot": 16}),
    (3, "reduce_scatter 3, all_reduce 3", {"slot": 16}),
    (3, "broadcast 5 +1, all_reduce 1 direct, broadcast 5 @1 +1", {"slot": 16}),
    # Ranks that meet in two groups.
    (3, "all_reduce, all_reduce, all_reduce, all_reduce", {"group": 2}),
    (3, "broadcast 2 @2 +1, reduce, all_reduce 2 +1", {"group": 2}),
    (3, "broadcast, barrier", {"group": 2, "again": True}),
    (3, "sizes_differ 1, broadcast 1 @2", {"group": 2, "again": True}),
    # Ranks that look at a word only when its writer wakes them.
    (2, "all_reduce, barrier, all_reduce", {"crowded": True}),
    pytest.param(2, "broadcast 3", {"crowded": True}, marks=pytest.mark.long),
    pytest.param(2, "reduce 2 @1 +1, broadcast 2", {"crowded": True}, marks=pytest.mark.long),
    # Ranks that free their slots between calls.
    (2, "all_reduce 3 +1, broadcast, broadcast 3 @1 +1, all_reduce 2", {"frees": True}),
    (2, "broadcast 3 +1, sizes_differ 2, all_reduce 3, broadcast 2", {"frees": True, "again": True}),
    (3, "broadcast 3, barrier, all_reduce 2", {"slot": 16, "frees": True}),
    pytest.param(4, "all_reduce, all_reduce, all_reduce", {"group": 2}, marks=pytest.mark.long),
]  # fmt: skip


@pytest.mark.parametrize(("size", "program", "how"), OTHERS)
def test_other_worlds_every_schedule(size: int, program: str, how: dict[str, Any]) -> None:
    assert explore(size, program, **how) > (100 if "slot" in how or "slots" in how else 1000)


AHEAD = PROGRAMS["long all, writing ahead"]
WORDS = "broadcast, all_reduce, all_reduce"
PLANTS = [
    # A slot is overwritten before it is read: the bound is too high, no rank waits, or a resumed wait is skipped.
    (2, AHEAD, "at.WROTE) - layout.SLOTS + 1 => at.WROTE) - layout.SLOTS"),
    (2, AHEAD, "_await_all(c, layout.CONSUMED, want) != DONE => False"),
    (2, AHEAD, "if _await_all(c, layout.CON => store_word(c, at.SEEN, want)\n    if _await_all(c, layout.CON"),
    (2, AHEAD, "max(load_word(c, at.SEEN), load_word(c, at.ROUND)) => load_word(c, at.ROUND) + 1"),
    (2, AHEAD, "CONSUMED, load_word(c, at.ROUND) + read) => CONSUMED, load_word(c, at.ROUND) + read + 1)"),
    (2, "broadcast 3, all_reduce 3", "load_word(c, at.ROUND) + step) % => step) %"),
    (2, "sizes_differ 3 +1, all_reduce 4", "store_word(c, at.READ, layout.SLOTS) => 0"),
    # A round has less than an element.
    (2, "reduce 2", "max(_ONE_WAY_ROUND, itemsize) => _ONE_WAY_ROUND"),
    # A round is read before it is written.
    (2, "broadcast 3", "return DONE if step == 0 else => return DONE if step <= 1 else"),
    (2, AHEAD, "PUBLISHED, load_word(c, at.ROUND) + read + 1) => PUBLISHED, load_word(c, at.ROUND) + read)"),
    (2, "all_reduce 4", "load_word(c, at.ROUND) + wrote + 1) => load_word(c, at.ROUND) + wrote + 2)"),
    (2, "all_reduce", "store_word(line, layout.CALL, => store_release(line, load_word(c, at.CALLS)), (line, 1,"),
    (2, "broadcast, barrier", "% 2)\n\n\n@inlined\ndef combined_of => * 0)\n\n\n@inlined\ndef combined_of"),
    # Calls run without a meeting, or do not find differences.
    (2, "all_reduce, all_reduce", "if load_word(c, at.MET):\n => if True:\n"),
    (2, "all_reduce, all_reduce", "store_word(c, at.MET, 0) => 0"),
    (2, "roots_differ 1", "load_word(line, layout.CALL) == call and => True and"),
    (2, "sizes_differ 1", "theirs == shape or => True or"),
    (2, "blocks_differ 1", "same &= balance == 0 => same &= True"),
    (2, PROGRAMS["only one rank goes direct"], "mixed & _BESIDE_TIME\n => 0\n"),
    # Deadlocks.
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
    slot = 64 if "blocks" in program else 8
    with pytest.raises(AssertionError, match=FOUND):
        explore(size, program, again=size == 2, slot=slot, group=2 * (size > 2), plant=f"shm.rounds: {plant}")


def test_slots_freed_before_a_peer_has_read_them_are_found() -> None:
    with pytest.raises(AssertionError, match=FOUND):
        explore(
            2,
            "broadcast 3, all_reduce 3",
            frees=True,
            plant="shm.slot_memory: load_acquire(word) < => load_acquire(word) + 1 <",
        )


def test_freed_slots_are_allocated_again() -> None:
    with pytest.raises(AssertionError, match="no memory has ended with"):
        explore(
            2,
            "broadcast 3, all_reduce 3",
            frees=True,
            plant="shm.slot_memory: at.ALLOCATED, 0 => at.ALLOCATED, 1",
        )


def test_a_rank_that_nobody_wakes_is_found() -> None:
    with pytest.raises(AssertionError, match="deadlock"):
        explore(
            2, "broadcast 2", crowded=True, plant="shm.rounds: if load_word(c, at.CROWDED):\n => if False:\n"
        )
