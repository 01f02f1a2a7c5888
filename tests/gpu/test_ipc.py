"""Runs simulated_ipc*.py with Numba's simulator, and tests that need no kernels."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fastcoll.core import signature
from fastcoll.gpu.ipc.schedules import is_one_shot
from fastcoll.kernels.cuda import page as at

from .simulator import passed


@pytest.mark.parametrize(
    ("files", "chosen", "least"),
    [
        (["_model"], "not long", 13),
        pytest.param(["_model"], "long", 2, marks=pytest.mark.long),
        pytest.param(["", "_failures"], "not slow", 55, marks=pytest.mark.long),
    ],
    ids=["every order of steps", "every order of more steps", "the carrier"],
)
def test_on_simulated_kernels(files: list[str], chosen: str, least: int) -> None:
    assert passed(*(f"gpu/simulated_ipc{name}.py" for name in files), "-m", chosen) >= least


def test_words_of_a_page_do_not_overlap() -> None:
    every = range(at.MOST_RANKS)
    lines = [(at.line(rank, number), at.LINE) for rank in every for number in (0, 1)]
    steps = [(at.rank_words(rank) + offset, 8) for rank in every for offset in (at.STEP, at.BYE)]
    header = [(offset, 8) for offset in (at.DEAD, at.SIZE, at.RANK, at.CONTROL)]
    many = [(at.ARRIVED, 8 * at.MOST_RANKS), (at.REPORTED, 32 * at.MOST_RANKS)]
    for words, end in (
        (sorted([*lines, *steps, *header, (at.PEERS, 8 * at.MOST_RANKS)]), at.PAGE),
        ([(at.STOP, 8), (at.STOPPED, 8), (at.WHY, 8), *many], at.CONTROL_BYTES),
    ):
        assert all(start + n <= after for (start, n), (after, _) in pairwise(words))
        assert sum(words[-1]) <= end
    assert sum(many[-1]) == at.CONTROL_BYTES


@pytest.mark.parametrize(
    ("ranks", "nbytes", "wanted"),
    [
        (2, 1 << 40, True),
        (4, (512 << 10) - 1, True),
        (4, 512 << 10, False),
        (8, 200 << 10, True),
        (16, 200 << 10, False),
    ],
)
def test_one_shot_by_bytes_and_ranks(ranks: int, nbytes: int, wanted: bool) -> None:
    assert is_one_shot(ranks, nbytes) == wanted


def test_different_sizes_are_reported() -> None:
    same = signature.encode("gather", np.dtype("f4"))
    text = signature.describe_mismatch([(same, 4), (same, 8)], [0, 1])
    assert "the sizes that ranks send and expect differ" in text
    other = signature.encode("barrier")
    assert "rank 7 called barrier()" in signature.describe_mismatch([(same, 0), (other, 0)], [3, 7])
