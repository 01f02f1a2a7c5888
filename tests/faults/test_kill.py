"""A rank is killed at every phase of every operation: within a second all others name it, and nothing is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from faults import crew, failing_victims
from faults.failing_victims import FIFTH, LONG, SHORT, die

# In which call the others learn of it: they may be through with the fifth once the victim has published its part.
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
MESSAGES = {
    "send_recv": ["send.enter", "send.after_done", "recv.enter", "recv.after_done", "message.before_ack"],
    "batch_isend_irecv": ["isend.after_post", "message.piece_sent", "message.before_ack"],
    "irecv": ["irecv.after_post"],  # where the message has not come: of rank 0, for sure
    "put": ["symmetric.after_put", "symmetric.before_signal", "symmetric.after_segment"],
}
# Who reads the others' arrays.
READERS = {"broadcast": 1, "all_gather": 2, "gather": 0, "scatter": 1, "all_to_all": 0, "reduce_scatter": 2}


def see(worlds: Sequence[tuple[Any, ...]], calls: Sequence[Sequence[int]] = ()) -> None:
    """Run worlds together, as what they do is mostly to wait, and check what the survivors saw."""
    with crew.nothing_left():
        ends = crew.run_together(worlds)
    for number, (world, outcomes) in enumerate(zip(worlds, ends, strict=True)):
        crew.check(outcomes, world[5], world[2], calls=calls[number] if calls else ())


@pytest.mark.parametrize("op", OPERATIONS)
def test_killed_rank_of_a_short_call(op: str) -> None:
    first = OPERATIONS.index(op)
    worlds = [
        die(op, f"shm.{op}.{phase}", SHORT, number % 3, "auto") for number, phase in enumerate(PHASES, first)
    ]
    see(worlds, list(PHASES.values()))


@pytest.mark.parametrize("op", LARGE)
def test_killed_rank_of_a_long_call(op: str) -> None:
    first, places = LARGE.index(op), ["mid_chunk@3", "after_meeting", "before_done"]
    see([die(op, f"shm.{op}.{place}", LONG, number % 3) for number, place in enumerate(places, first)])


@pytest.mark.long
@pytest.mark.parametrize("op", MESSAGES)
def test_killed_rank_of_a_short_message(op: str) -> None:
    see([die(op, f"shm.{place}", SHORT, number % 3) for number, place in enumerate(MESSAGES[op])])


@pytest.mark.parametrize("op", ["send_recv", "batch_isend_irecv"])
def test_killed_rank_of_a_long_message(op: str) -> None:
    places = ["piece_sent@9", "piece_read@9", "before_ack@3"]
    see([die(op, f"shm.message.{place}", LONG, number) for number, place in enumerate(places)])


def test_killed_rank_of_a_call_in_symmetric_memory() -> None:
    call, place = "shm.symmetric_all_reduce", "shm.symmetric.piece_stored@30"
    places = [f"{call}.after_publish", f"{call}.after_meeting", f"{call}.before_done", place]
    see(
        [
            die("symmetric_all_reduce", place, LONG, number % 3, n=3 + number % 2)
            for number, place in enumerate(places)
        ]
    )


@pytest.mark.parametrize("how", ["direct", "shared"])
def test_killed_reader_of_arrays_where_they_are(how: str) -> None:
    read = "shm.single_copy.piece_read@3"
    see([die(op, read, LONG, reader, how) for op, reader in READERS.items() if op != "reduce_scatter"])


def test_killed_rank_of_a_reduction_of_arrays_where_they_are() -> None:
    worlds = [die(op, "shm.single_copy.piece_read@3", LONG, 0, "direct") for op in ("all_reduce", "reduce")]
    worlds += [die("all_reduce", "shm.single_copy.pushing@9", LONG, 1, "shared")]
    worlds += [die("reduce", "shm.reduce.after_publish", LONG, 2, "shared")]
    worlds += [die("reduce_scatter", "shm.reduce_scatter.mid_chunk", LONG, 0, "shared")]
    see(worlds)


@pytest.mark.parametrize("place", ["after_create", "before_mapping", "after_mapping"])
def test_killed_rank_that_makes_or_maps_an_arena(place: str) -> None:
    see([die("all_reduce", f"shm.arena.{place}@1", LONG, victim, "shared") for victim in (0, 2)])


@pytest.mark.parametrize("op", ["all_reduce", "all_gather"])
def test_killed_rank_whose_arena_was_named_and_nobody_has_mapped(op: str) -> None:
    """In the first call on shared arrays, the second one: its descriptors are gone when the others come to them."""
    late = f"shm.{op}.after_publish:kill@2#1,shm.arena.before_mapping:delay=0.1"
    world = (failing_victims.work_until_failpoint, 3, op, LONG, late, 1, "shared")
    see([world], [(2,)])


@pytest.mark.long
@pytest.mark.parametrize("op", LARGE)
def test_killed_rank_of_a_call_that_lanes_share(op: str) -> None:
    """The lanes alone come by so often: the first call, which they do not share, has at most 31 chunks."""
    see([die(op, f"shm.{op}.mid_chunk@50", LONG, victim, "lanes") for victim in (0, 2)])
