"""A small or full /dev/shm: an error with sizes and the cure on every rank, or a smaller group; never SIGBUS."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.path.insert(0, {path!r})
from faults import crew, victims
if __name__ == "__main__":
    for outcome in crew.run(victims.make_world, 2):
        print("RESULT", outcome.exitcode, outcome.result if outcome.result is not None else outcome.error)
"""


def run_in_small_shm(tmp_path, size: str) -> list[str]:
    """The program's results in a mount namespace whose /dev/shm has `size`."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small /dev/shm in a namespace of its own")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(path=os.path.dirname(os.path.dirname(__file__))))
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm && exec {sys.executable} {script}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True, timeout=120)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert len(results) == 2, done.stderr
    return results


def test_too_small_is_refused_with_sizes_and_the_cure_on_every_rank(tmp_path):
    for result in run_in_small_shm(tmp_path, "16k"):
        assert "RESULT 0" in result
        assert "KiB free" in result
        assert "--shm-size" in result


def test_small_means_smaller_segments(tmp_path):
    assert run_in_small_shm(tmp_path, "1m") == ["RESULT 0 "] * 2
