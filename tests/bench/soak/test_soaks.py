"""The soaks in their short form: nothing is found. `cd bench; python -m soak --long` is the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from soak import phases
from soak.__main__ import SOAKS
from soak.kills import CALLS, draw

BENCH = Path(__file__).parents[3] / "bench"


@pytest.mark.long
@pytest.mark.parametrize("name", SOAKS)
def test_nothing_is_found(name: str) -> None:
    command = [sys.executable, "-m", "soak", name]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"| {name} | "), done.stdout


def test_a_case_follows_from_its_number_and_the_seed() -> None:
    cases = [draw(1, number) for number in range(500)]
    assert cases == [draw(1, number) for number in range(500)]
    assert {case.op for case in cases} == set(CALLS)
    assert {(case.backend, case.n, case.moment) for case in cases} >= {
        (backend, n, moment)
        for backend in ("shm", "tcp", "auto")
        for n in (2, 4, 8)
        for moment in ("call", "start")
    }


def test_few_cases_of_phases_are_of_all_backends() -> None:
    cases = [phases.draw(1, number) for number in range(SOAKS["phases"].short)]
    assert {case.backend for case in cases} == {"shm", "tcp", "auto"}
    everywhere = [phases.draw(1, number) for number in range(3 * len(phases.places(1)))]
    assert {case.failpoint.partition(":")[0] for case in everywhere} == set(phases.places(1))
    assert min(case.n for case in everywhere if case.backend == "auto") == 4
