"""A rank is killed while the job starts or ends: the others raise, name it, and no segment is left behind."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from fastcoll.launch.nodes import free_port
from faults import crew, failing_victims

# Failpoints, and the ranks that hit them: rank 0 creates the segment, the others attach to it.
STARTING = {
    "start.after_join": [0, 1, 2],
    "shm.meeting.after_create": [0],
    "shm.meeting.after_attach": [1, 2],
    "shm.meeting.after_proof": [0, 1, 2],
    "start.after_world": [0, 1, 2],
    "new_group.enter": [0, 2],
    "new_group.after_request": [0, 2],
    "new_group.after_made": [0, 1],
}
STARTING_TCP = {
    "tcp.meeting.after_listen": [0, 2],
    "tcp.meeting.after_connect": [0, 1],
    "tcp.connection.enter": [0],  # the lower rank may have made a higher rank's connection already
    "new_group.after_request": [1],
}
ENDING = ["destroy.enter", "destroy.after_groups", "destroy.after_store"]


def world(where: str, victim: int, how: str, meeting: str = "", n: int = 3) -> tuple[object, ...]:
    return (failing_victims.start_and_leave, n, f"{where}:kill@1", victim, how, meeting)


def run(where: str, ranks: list[int], how: str) -> dict[int, list[crew.Outcome]]:
    """Run a world for each victim, all at once, and return the outcomes."""
    worlds = [world(where, victim, how) for victim in ranks]
    with crew.nothing_left():
        return dict(zip(ranks, crew.run_together(worlds), strict=True))


def check(outcomes: Sequence[crew.Outcome], victim: int, within: float = math.inf) -> None:
    """Check that the survivors named the dead rank."""
    dead = outcomes[victim]
    for saw in crew.survivors(outcomes, victim):
        assert f"rank {victim} (pid {dead.pid} on " in saw["error"], saw
        assert saw["raised"] - dead.died < within, saw


CASES = [(where, "auto", ranks) for where, ranks in STARTING.items()]
CASES += [(where, "tcp", ranks) for where, ranks in STARTING_TCP.items()]


@pytest.mark.parametrize(("where", "how", "ranks"), CASES)
def test_killed_while_starting(where: str, how: str, ranks: list[int]) -> None:
    for victim, outcomes in run(where, ranks, how).items():
        check(outcomes, victim)


@pytest.mark.timed
@pytest.mark.parametrize(("where", "how", "ranks"), CASES)
def test_killed_while_starting_is_named_in_time(where: str, how: str, ranks: list[int]) -> None:
    for victim, outcomes in run(where, ranks[-1:], how).items():
        check(outcomes, victim, crew.SOON if how == "auto" else crew.WITHIN)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_attaches_after_a_death_was_noticed_names_it_too(victim: int) -> None:
    """The others unlink the segment first, and then publish the reason."""
    with crew.nothing_left():
        outcomes = crew.run(
            *world("shm.meeting.after_proof", victim, "attach late", meeting() if victim == 0 else "")
        )
    check(outcomes, victim)


@pytest.mark.parametrize(("how", "n"), [("auto", 3), ("nodes", 4)])
@pytest.mark.parametrize("where", ["shm.meeting.after_create", "shm.meeting.after_proof"])
def test_the_store_dies_with_rank_0_while_a_segment_or_parts_of_a_group_are_made(
    where: str, how: str, n: int
) -> None:
    """The segment's name in the store is lost, and the rank that made the segment is dead and cannot unlink it.

    On several nodes a rank that waits for a rank which has failed and ended names the rank that was killed.
    """
    with crew.nothing_left():
        outcomes = crew.run(*world(where, 0, how, meeting(), n))
    for saw in crew.survivors(outcomes, 0):
        # A rank that knows nothing of rank 0 yet may see only the death of a rank that failed because of it.
        is_named = f"rank 0 (pid {outcomes[0].pid} on " in saw["error"]
        assert is_named or (
            saw["error"].startswith("joining as ") and "the store is lost, too" in saw["error"]
        ), saw
        assert how == "auto" or not is_named or "making the default group: " in saw["error"], saw


def meeting() -> str:
    """Return a meeting point at rank 0, which then serves the store."""
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("how", ["auto", "tcp"])
@pytest.mark.parametrize(
    ("where", "within"),
    [
        *(pytest.param(where, math.inf, marks=pytest.mark.long) for where in ENDING),
        pytest.param("destroy.after_groups", crew.SOON, marks=pytest.mark.timed),
    ],
)
def test_killed_while_leaving(where: str, how: str, within: float) -> None:
    """The others no longer need a rank that dies while it leaves, and leave in order."""
    for victim, outcomes in run(where, [0, 1], how).items():
        for saw in crew.survivors(outcomes, victim):
            assert saw["raised"] - outcomes[victim].died < within, saw
        assert {outcome.exitcode for outcome in outcomes} == {-9, 0}
