"""The tests also pass in a shell's background job, which ignores Ctrl-C: `nohup bash -c pytest &`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from apart import ELSEWHERE, TESTS, environment

CASES = {
    "a rank that is interrupted": (
        "faults/test_waiting.py::test_ctrl_c_ends_a_blocked_call",
        "auto-recv",
        1,
    ),
    "a launcher that gets signals": (
        "launch/test_launcher.py",
        "signals_are_passed_on or second_signal",
        5,
    ),
    "a shell that is interrupted": ("launch/test_run.py", "ctrl_c", 1),
}


@pytest.mark.long
@pytest.mark.parametrize("what", CASES)
def test_tests_of_signals_pass_in_the_background(what: str) -> None:
    test, chosen, count = CASES[what]
    ignoring = ["setsid", "nohup", "bash", "-c", "trap '' INT HUP QUIT; exec \"$@\"", "bash"]
    done = subprocess.run(
        [*ignoring, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, TESTS / test],
        cwd=ELSEWHERE, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert f"{count} passed" in done.stdout
