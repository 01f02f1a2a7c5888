"""Tests with Numba's simulator of a GPU, which a process has from its start or not at all."""

from __future__ import annotations

import re
import subprocess
import sys

from apart import ELSEWHERE, TESTS, environment


def passed(*arguments: str) -> int:
    """Run pytest on paths below tests/, with options, in a process of its own; return how many tests passed."""
    paths = [str(TESTS / each) if (TESTS / each).exists() else each for each in arguments]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths],
        env=environment(NUMBA_ENABLE_CUDASIM="1"), cwd=ELSEWHERE, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return int(re.findall(r"(\d+) passed", done.stdout)[-1])
