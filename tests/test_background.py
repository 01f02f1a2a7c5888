"""The tests pass as a shell's background job, too, which ignores Ctrl-C: `nohup bash -c pytest &`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED = "tests/faults/test_waiting.py::test_ctrl_c_ends_a_blocked_call_soon"


@pytest.mark.long
def test_a_test_that_interrupts_a_rank_passes_in_the_background() -> None:
    ignoring = ["bash", "-c", "trap '' INT; exec \"$@\"", "bash"]
    done = subprocess.run(
        [*ignoring, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "recv", INTERRUPTED],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
