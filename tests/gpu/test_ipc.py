"""Runs simulated_ipc*.py in a process with Numba's simulator, and tests that need no kernels."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from apart import ELSEWHERE, TESTS, environment

from fastcoll.core import signature
from fastcoll.gpu.ipc.schedules import is_one_shot
from fastcoll.kernels.cuda import page as at


@pytest.mark.parametrize(
    ("files", "least"),
    [(["_model"], 15), pytest.param(["", "_failures"], 55, marks=pytest.mark.long)],
    ids=["every order of steps", "the carrier"],
)
def test_on_simulated_kernels(files: list[str], least: int) -> None:
    paths = [str(TESTS / "gpu" / f"simulated_ipc{name}.py") for name in files]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths],
        env=environment(NUMBA_ENABLE_CUDASIM="1"), cwd=ELSEWHERE, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= least


def test_words_of_a_page_do_not_overlap() -> None:
    lines = [(at.line(rank, number), at.LINE) for rank in range(at.MOST_RANKS) for number in (0, 1)]
    steps = [
        (at.rank_words(rank) + offset, 8) for rank in range(at.MOST_RANKS) for offset in (at.STEP, at.BYE)
    ]
    header = [(offset, 8) for offset in (at.DEAD, at.SIZE, at.RANK, at.CONTROL)]
    peers = [(at.PEERS, 8 * at.MOST_RANKS)]
    places = sorted([*lines, *steps, *header, *peers])
    assert all(start + n <= after for (start, n), (after, _) in pairwise(places))
    assert sum(places[-1]) <= at.PAGE
    words = [
        (at.STOP, 8),
        (at.STOPPED, 8),
        (at.WHY, 8),
        (at.ARRIVED, 8 * at.MOST_RANKS),
        (at.REPORTED, 32 * at.MOST_RANKS),
    ]
    assert all(start + n <= after for (start, n), (after, _) in pairwise(words))
    assert sum(words[-1]) == at.CONTROL_BYTES


def test_one_shot_by_bytes_and_ranks() -> None:
    assert is_one_shot(2, 1 << 40)
    assert is_one_shot(4, (512 << 10) - 1)
    assert not is_one_shot(4, 512 << 10)
    assert is_one_shot(8, 200 << 10)
    assert not is_one_shot(16, 200 << 10)


def test_different_sizes_are_reported() -> None:
    same = signature.encode("gather", np.dtype("f4"))
    assert "the sizes that ranks send and expect differ" in signature.describe_mismatch(
        [(same, 4), (same, 8)], [0, 1]
    )
    other = signature.encode("barrier")
    assert "rank 7 called barrier()" in signature.describe_mismatch([(same, 0), (other, 0)], [3, 7])
