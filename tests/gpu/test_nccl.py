"""Every operation of the NCCL carrier on a fake NCCL, against the oracle; ranks are threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import oracle
import pytest

from fastcoll import ReduceOp
from fastcoll.core.operation import Operation
from fastcoll.errors import UnavailableError
from fastcoll.gpu.nccl import blocks

from . import collectives
from .collectives import *  # noqa: F403
from .collectives import copies, inputs
from .nccl_world import NcclRanks, world


@pytest.fixture(scope="module", params=[1, 2, 5])
def ranks(request: pytest.FixtureRequest) -> Iterator[NcclRanks]:
    with world(request.param) as made:
        yield made


def test_ranks_that_may_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    with world(3, devices=1, version=23000) as ranks:
        collectives.test_empty_arrays(ranks)


def test_large_arrays_are_split_into_segments_and_blocks(
    ranks: NcclRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "SCRATCH", 4000)
    monkeypatch.setattr(blocks, "DIVIDED", 100)
    everybody = inputs(ranks, 3001, "i2")
    hosts = copies(everybody)
    ranks.run(lambda rank, group: group.all_reduce(ranks.array(rank, hosts[rank])))
    for host in hosts:
        oracle.assert_same(host, oracle.reduced(everybody, ReduceOp.SUM))


@pytest.mark.parametrize("name", ["f4", "i2"])
def test_reduce_scatter_into_the_last_of_blocks_of_different_sizes(ranks: NcclRanks, name: str) -> None:
    sizes = [3 + rank for rank in range(ranks.size)]
    bases = inputs(ranks, sum(sizes) + 1, np.dtype(name))
    before = [np.split(x.copy()[:-1], np.cumsum(sizes)[:-1]) for x in bases]

    def does(rank: int, group: Any) -> None:
        ranks.array(rank, bases[rank])
        blocks = np.split(bases[rank][:-1], np.cumsum(sizes)[:-1])
        out = bases[rank][-sizes[rank] :]
        group.reduce_scatter(ranks.array(rank, out), ranks.arrays(rank, blocks))

    ranks.run(does)
    for rank, base in enumerate(bases):
        want = oracle.reduced([blocks[rank] for blocks in before], ReduceOp.SUM)
        oracle.assert_same(base[-sizes[rank] :], want)


@pytest.mark.parametrize("name", ["f4", "i2"])
def test_the_hooks_take_outputs_that_overlap_inputs(
    ranks: NcclRanks, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hooks allow more overlaps than the public calls; only the root's output is written."""
    monkeypatch.setattr(blocks, "SCRATCH", 4)  # in several segments
    bases = [[oracle.values(r, 14, np.dtype(name), k) for r in range(ranks.size)] for k in range(2)]
    before = [copies(xs) for xs in bases]

    def does(rank: int, group: Any) -> None:
        def taken(k: int, start: int) -> Any:
            _, x = ranks.arrays(rank, [bases[k][rank], bases[k][rank][start : start + 12]])
            return group.import_array(x, writable=True).array

        plan = group.devices().plan
        plan(Operation("reduce", (taken(0, 1),), (taken(0, 0),), ReduceOp.SUM))()
        plan(Operation("scan", (taken(1, 1),), (taken(1, 0),), ReduceOp.SUM))()

    ranks.run(does)
    for rank in range(ranks.size):
        total = oracle.reduced([x[:12] for x in before[0]], ReduceOp.SUM)
        want = before[0][rank][1:13] if rank else total
        oracle.assert_same(bases[0][rank][1:13], want, rank)
        oracle.assert_same(bases[0][rank][[0, 13]], before[0][rank][[0, 13]], rank)
        want = oracle.reduced([x[:12] for x in before[1][: rank + 1]], ReduceOp.SUM)
        oracle.assert_same(bases[1][rank][1:13], want, rank)


def test_an_average_of_more_ranks_than_our_kernels_take_is_refused() -> None:
    def does(rank: int, group: Any) -> None:
        x = ranks.array(rank, hosts[rank])
        with pytest.raises(UnavailableError, match="up to 4 ranks, this one has 8; use SUM"):
            group.all_reduce(x, ReduceOp.AVG)
        group.all_reduce(x)  # three kernels, one after the other

    hosts = [np.full(3, 1 << rank, "i2") for rank in range(8)]
    with world(8) as ranks:
        ranks.run(does)
    assert all((host == 255).all() for host in hosts)
