"""A rank is killed in every phase of every operation over shared memory: all others name it, and nothing is left."""

from __future__ import annotations

from typing import Any

import pytest

from faults import failing_victims
from faults.crew import SOON, see
from faults.failing_victims import FIFTH, LONG, MESSAGES, SHORT, die

# The call in which the others notice: they may complete the fifth once the victim has published its part.
PHASES = {
    "enter": (FIFTH,),
    "after_publish": (FIFTH, FIFTH + 1),
    "after_meeting": (FIFTH, FIFTH + 1),
    "before_done": (FIFTH, FIFTH + 1),
    "after_done": (FIFTH + 1,),
}
OPERATIONS = [
    "all_reduce", "reduce", "scan", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all",
    "barrier",
]  # fmt: skip
LARGE = [op for op in OPERATIONS if op != "barrier"]
PUT = ["symmetric.after_put", "symmetric.before_signal", "symmetric.after_segment"]
# The rank that reads the others' arrays.
READERS = {"broadcast": 1, "all_gather": 2, "gather": 0, "scatter": 1, "all_to_all": 0}
SOME = ["all_reduce", "broadcast", "all_to_all", "barrier"]
"""Operations of every kind: those that reduce, that have a root, and that have blocks for each rank."""
LONG_MESSAGE = ["piece_sent@9", "piece_read@9", "before_ack@3"]


def some_long(operations: list[str]) -> list[Any]:
    return [op if op in SOME else pytest.param(op, marks=pytest.mark.long) for op in operations]


@pytest.mark.parametrize("op", some_long(OPERATIONS))
def test_killed_rank_of_a_short_call(op: str) -> None:
    places = enumerate(PHASES, OPERATIONS.index(op))
    worlds = [die(op, f"shm.{op}.{phase}", SHORT, number % 3, "auto") for number, phase in places]
    see(worlds, calls=list(PHASES.values()))


@pytest.mark.parametrize("op", some_long(LARGE))
def test_killed_rank_of_a_long_call(op: str) -> None:
    places = enumerate(["mid_chunk@3", "after_meeting", "before_done"], LARGE.index(op))
    see([die(op, f"shm.{op}.{place}", LONG, number % 3) for number, place in places])


@pytest.mark.timed
def test_killed_rank_is_named_within_a_second() -> None:
    worlds = [die("all_reduce", f"shm.all_reduce.{phase}", SHORT, 1, "auto") for phase in PHASES]
    see(worlds, SOON)
    see([die(op, f"shm.{op}.mid_chunk@3", LONG, 2) for op in ("all_reduce", "broadcast", "all_to_all")], SOON)
    see([die("send_recv", f"shm.message.{place}", LONG, n) for n, place in enumerate(LONG_MESSAGE)], SOON)


@pytest.mark.long
@pytest.mark.parametrize("op", [*MESSAGES, "put"])
def test_killed_rank_of_a_short_message(op: str) -> None:
    places = PUT if op == "put" else MESSAGES[op]
    see([die(op, f"shm.{place}", SHORT, number % 3) for number, place in enumerate(places)])


@pytest.mark.parametrize("op", ["send_recv", pytest.param("batch_isend_irecv", marks=pytest.mark.long)])
def test_killed_rank_of_a_long_message(op: str) -> None:
    see([die(op, f"shm.message.{place}", LONG, number) for number, place in enumerate(LONG_MESSAGE)])


def test_killed_rank_of_a_call_in_symmetric_memory() -> None:
    op, places = "symmetric_all_reduce", ["after_publish", "after_meeting", "before_done"]
    worlds = [die(op, f"shm.{op}.{place}", LONG, rank, n=3 + rank % 2) for rank, place in enumerate(places)]
    see([*worlds, die(op, "shm.symmetric.piece_stored@30", LONG, 0, n=4)])


@pytest.mark.parametrize("how", [pytest.param("direct", marks=pytest.mark.long), "shared"])
def test_killed_reader_of_arrays_in_place(how: str) -> None:
    see([die(op, "shm.single_copy.piece_read@3", LONG, reader, how) for op, reader in READERS.items()])


def test_killed_rank_that_reads_arrays_directly() -> None:
    see([die(op, "shm.single_copy.piece_read@3", LONG, 0, "direct") for op in ("all_reduce", "reduce")])


def test_killed_rank_of_a_reduction_of_shared_arrays() -> None:
    worlds = [die("all_reduce", "shm.single_copy.pushing@9", LONG, 1, "shared")]
    worlds += [die("reduce", "shm.reduce.after_publish", LONG, 2, "shared")]
    worlds += [die("reduce_scatter", "shm.reduce_scatter.mid_chunk", LONG, 0, "shared")]
    see(worlds)


@pytest.mark.parametrize("place", ["after_create", "before_mapping", "after_mapping"])
def test_killed_rank_that_makes_or_maps_an_arena(place: str) -> None:
    see([die("all_reduce", f"shm.arena.{place}@1", LONG, victim, "shared") for victim in (0, 2)])


@pytest.mark.parametrize("op", ["all_reduce", "all_gather"])
def test_killed_rank_whose_arena_was_named_and_is_not_mapped(op: str) -> None:
    """In the second call, the first on shared arrays: the victim's descriptors are gone when the others open them."""
    late = f"shm.{op}.after_publish:kill@2#1,shm.arena.before_mapping:delay=0.1"
    world = (failing_victims.work_until_failpoint, 3, op, LONG, late, 1, "shared")
    see([world], calls=[(2, 3)])  # the third if the victim dies so late that its array could be mapped
