"""A rank is killed at every phase of a call: within the second promised all others name it, and the call."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence

import pytest

from faults import crew, failing_victims

SOON = 1.0
"""Seconds within which ranks of one node know of a death; the deadline of their calls is 30."""
FIFTH = 5  # the call in which the victim dies; the group has no calls but these
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


def check(outcomes: Sequence[crew.Outcome], victim: int, op: str, calls: Sequence[int] = ()) -> None:
    """Every survivor names rank, host, pid, operation and call, soon, and goes on without it."""
    n, dead = len(outcomes), outcomes[victim]
    assert dead.exitcode == -9, dead.error or dead.result
    for outcome in outcomes:
        if outcome is dead:
            continue
        assert outcome.result is not None, outcome.error
        saw = outcome.result
        assert (saw["kind"], saw["ranks"]) == ("PeerDiedError", (victim,)), saw
        assert f"rank {victim} (pid {dead.pid} on {socket.gethostname()}) died" in saw["error"], saw
        called = re.search(rf"; {op}\(.*?\), call (\d+) of group 'WORLD'", saw["error"])
        assert called, saw
        assert not calls or int(called[1]) in calls, saw
        assert saw["raised"] - dead.died < SOON, saw
        assert saw["again"] == saw["error"]
        assert saw["again_after"] < 0.1, saw
        assert saw["others"] == sum(range(1, n + 1)) - (victim + 1)


def die(op: str, phase: str, count: int, victim: int, n: int = 3, which: int = FIFTH) -> tuple[object, ...]:
    failpoint = f"shm.{op}.{phase}:kill@{which}"
    return (failing_victims.work_until_failpoint, n, op, count, failpoint, victim)


@pytest.mark.parametrize("op", OPERATIONS)
def test_killed_in_every_phase_of_a_short_call(op: str) -> None:
    with crew.nothing_left():
        worlds = [die(op, phase, 7, number % 3) for number, phase in enumerate(PHASES, OPERATIONS.index(op))]
        ends = crew.run_together(worlds)
    for calls, world, outcomes in zip(PHASES.values(), worlds, ends, strict=True):
        check(outcomes, world[5], op, calls)  # type: ignore[arg-type]
