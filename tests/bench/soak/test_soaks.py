"""Short soaks find no faults. `cd bench; python -m soak --long` runs long ones."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from soak import phases
from soak.__main__ import SOAKS
from soak.kills import CALLS, draw
from soak.mutations import HEADER_ONLY, MUTATIONS

BENCH = Path(__file__).parents[3] / "bench"


# Fewer than `short`, which takes half a minute.
AMOUNTS = {
    "kills": 30, "phases": 30, "survivors": 5, "stops": 12, "starving": 9, "strangers": 10_000,
    "frames": 1500, "middle": 10, "signals": 4, "elastic": 4, "rpc": 6, "churn": 10, "history": 5, "schedules": 500,
}  # fmt: skip
# They also find ranks and launchers that react too late.
TIMED = ("kills", "phases", "stops", "signals")


@pytest.mark.limit(1200)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long, pytest.mark.timed][name in TIMED]) for name in SOAKS]
)
def test_a_short_soak_finds_no_fault(name: str) -> None:
    command = [sys.executable, "-m", "soak", name, "--amount", str(AMOUNTS[name])]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"| {name} | "), done.stdout


def test_frames_follow_from_the_seed_and_are_broken_in_every_way() -> None:
    frame, fields = bytes(range(64)), ((0, 8), (8, 4), (12, 4))
    for name, mutation in MUTATIONS.items():
        made = [mutation(random.Random(seed), frame, fields) for seed in range(100)]
        assert made == [mutation(random.Random(seed), frame, fields) for seed in range(100)]
        assert (name == "whole") == (set(made) == {frame})
        if name in HEADER_ONLY:
            assert all(each[16:] in (frame[16:], frame[16 : len(each)]) for each in made)


def test_a_case_follows_from_its_number_and_the_seed() -> None:
    cases = [draw(1, number) for number in range(500)]
    assert cases == [draw(1, number) for number in range(500)]
    assert {case.op for case in cases} == set(CALLS)
    drawn = {(case.backend, case.n, case.moment) for case in cases}
    assert drawn >= {*product(("shm", "tcp", "auto"), (2, 4, 8), ("call", "start"))}


def test_few_cases_of_phases_are_of_all_backends() -> None:
    cases = [phases.draw(1, number) for number in range(AMOUNTS["phases"])]
    assert {case.backend for case in cases} == {"shm", "tcp", "auto"}
    everywhere = [phases.draw(1, number) for number in range(3 * len(phases.places(1)))]
    assert {case.failpoint.partition(":")[0] for case in everywhere} == set(phases.places(1))
    assert min(case.n for case in everywhere if case.backend == "auto") == 4
