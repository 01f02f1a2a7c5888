"""all_reduce with `travel` through the public functions, in groups on shared memory and over TCP."""

from __future__ import annotations

import numpy as np
import pytest

import fastcoll as dist
from fastcoll.core.group import ProcessGroup


def groups() -> list[ProcessGroup]:
    return [dist.new_group(backend=backend) for backend in ("shm", "tcp")]


@pytest.mark.ranks(1, 2, 3)
def test_sums_and_averages(rank: int, world_size: int) -> None:
    for group in groups():
        rounds = group.backend.name == "tcp"
        for travel in ("bfloat16", "float16", "int8"):
            for asynchronous in (False, True):
                x = np.linspace(0.5, 1, 1000, dtype="f4")
                expected = x.copy()
                work = dist.all_reduce(x, dist.ReduceOp.AVG, group, asynchronous, travel=travel)
                assert work.wait() if asynchronous else work is None
                assert np.abs(x - expected).max() <= (0.02 if rounds else 1e-6)
                assert (np.abs(x - expected).max() > 1e-5) == rounds
        x = np.zeros((0, 3), "f4")
        dist.all_reduce(x, group=group, travel="int8", lost=x.copy())


@pytest.mark.ranks(2)
def test_ranks_that_disagree_change_neither_the_array_nor_lost(rank: int) -> None:
    for group in groups():
        for names in (("int8", "bfloat16"), ("float16", None)):
            x, lost = np.full(300, 0.1 + rank, "f4"), np.full(300, 0.3, "f4")
            before = x.copy(), lost.copy()
            with pytest.raises(dist.MismatchError, match="float32 that travels as"):
                dist.all_reduce(x, group=group, travel=names[rank], lost=lost if names[rank] else None)
            np.testing.assert_array_equal((x, lost), before)
        dist.all_reduce(x, group=group, travel="int8", lost=lost)
        total = 2 * np.float32(0.3) + np.float32(0.1) + np.float32(1.1)
        np.testing.assert_allclose(x, total, rtol=0.02)
        assert np.abs(lost).max() < 0.02


@pytest.mark.ranks(2)
def test_a_call_that_one_rank_refuses_changes_nothing_on_the_others(rank: int) -> None:
    for group in groups():
        x, lost = np.full(300, 0.1, "f4"), np.full(300, 0.3, "f4")
        with pytest.raises((dist.ArrayError, dist.MismatchError)):
            dist.all_reduce(x if rank else x.astype("i4"), group=group, travel="int8", lost=lost)
        assert (x == np.float32(0.1)).all()
        assert (lost == np.float32(0.3)).all()


@pytest.mark.ranks(2)
def test_lost_without_travel_is_refused_with_the_cure() -> None:
    for group in groups():
        x = np.ones(3, "f4")
        with pytest.raises(dist.UsageError, match="lost is given without travel; give travel, one of 'bfl"):
            dist.all_reduce(x, group=group, lost=np.zeros_like(x))
        dist.all_reduce(x, group=group)
        assert (x == 2).all()
