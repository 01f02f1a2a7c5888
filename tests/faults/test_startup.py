"""A rank is killed while the job starts: the others raise soon, name it, and no segment is left behind."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import cache

import pytest

from faults import crew, net_victims, victims


def victims_at(where):
    """The ranks that pass there: rank 0 creates the segment, the others attach to it."""
    return {"segment created": [0], "segment attached": [1, 2]}.get(where, [0, 1, 2])


@cache
def outcomes_by_victim(where):
    """Of a world for each victim, at once."""
    worlds = [(victims.die_while_starting, 3, where, victim) for victim in victims_at(where)]
    with crew.nothing_left():
        return dict(zip(victims_at(where), crew.run_together(worlds), strict=True))


@pytest.mark.parametrize(
    ("where", "victim"), [(where, victim) for where in victims.PLACES for victim in victims_at(where)]
)
def test_killed_while_starting(where, victim):
    check(outcomes_by_victim(where)[victim], victim)


@pytest.mark.parametrize("where", ["segment created", "said so"])
def test_the_store_dies_with_rank_0_while_a_segment_is_made(where: str) -> None:
    """Nobody can read the segment's name in the store any more, and who made it unlinks it no more."""
    with crew.nothing_left():
        outcomes = crew.run(victims.die_while_starting, 3, where, 0, meeting())
    check(outcomes, 0)


@pytest.mark.parametrize("where", ["segment created", "said so"])
def test_the_store_dies_with_rank_0_while_parts_of_a_group_are_made(where: str) -> None:
    """Who waits for a rank that has failed by then, and ended, names the one that was killed."""
    with crew.nothing_left():
        outcomes = crew.run(net_victims.die_while_starting_on_nodes, 4, where, 0, meeting())
    check(outcomes, 0)
    for outcome in outcomes[1:]:
        assert "making the default group: " in outcome.result["error"], outcome.result
        assert "rank 0 (" in outcome.result["error"], outcome.result


def meeting() -> str:
    """At rank 0, which serves the store then."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def check(outcomes: Sequence[crew.Outcome], victim: int) -> None:
    """The survivors knew soon who had died."""
    *others, dead = [outcome for outcome in outcomes if outcome.rank != victim] + [outcomes[victim]]
    assert dead.exitcode == -9
    for outcome in others:
        assert outcome.result is not None, outcome.error
        assert f"rank {victim}" in outcome.result["error"], outcome.result
        assert outcome.result["delay"] < crew.WITHIN, outcome.result
