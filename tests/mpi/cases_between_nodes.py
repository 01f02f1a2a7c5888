"""The default backend with MPI between nodes, run inside MPI jobs by rank.py."""

from __future__ import annotations

import numpy as np
import pytest
from conformance.test_every_operation import ROWS

import fastcoll as dist
from fastcoll.config import forget
from fastcoll.hybrid import backend as hybrid
from fastcoll.hybrid.backend import DIRECT, HybridBackend
from fastcoll.net.mpi.backend import MpiBackend
from fastcoll.system import processes


@pytest.fixture
def start_on_nodes(rank, world_size, tmp_path, monkeypatch):
    """Start the default backend with MPI between nodes, with this host's ranks divided into nodes."""

    def start(homes):
        monkeypatch.setattr(processes, "_shm_device", lambda: 1_000_000 + homes[rank])
        monkeypatch.setattr(hybrid, "SEGMENT", DIRECT)
        monkeypatch.setenv("FASTCOLL_BETWEEN_NODES", "mpi")
        forget()
        url = f"file://{tmp_path}/store"
        dist.init_process_group(init_method=url, rank=rank, world_size=world_size, timeout=100)
        return dist.GroupMember.WORLD

    return start


def all_operations(rank, world_size, nbytes, rows=tuple(ROWS)):
    for row in rows:
        ROWS[row](rank, world_size, nbytes // 4)


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize("homes", [[0, 0, 1, 1], [0, 1, 1, 1]])
def test_rails_between_nodes(rank, world_size, homes, start_on_nodes):
    """Also where a node has more ranks than another, and the additional ranks have no rail."""
    world = start_on_nodes(homes)
    assert type(world.backend) is HybridBackend
    index = homes[:rank].count(homes[rank])
    if index < min(homes.count(0), homes.count(1)):
        assert type(world.backend.rail.backend) is MpiBackend
        assert world.backend.rail.size == 2
    else:
        assert world.backend.rail is None
    for nbytes in (8, DIRECT + 40):
        all_operations(rank, world_size, nbytes)
    # Larger arrays are divided into segments.
    all_operations(rank, world_size, 4 * DIRECT, ["all_reduce, all_reduce_coalesced", "broadcast"])
    with pytest.raises(dist.MismatchError):
        dist.all_reduce(np.ones(DIRECT // 4 + rank))
    x = np.ones(2)
    dist.all_reduce(x)
    assert (x == world_size).all()


@pytest.mark.ranks(4, init=False)
def test_an_abort_ends_waiting_for_a_rail(rank, world_size, start_on_nodes):
    world = start_on_nodes([0, 0, 1, 1])
    dist.all_gather_object([None] * world_size, None)
    if rank == 3:
        world.abort("enough")
    with pytest.raises(dist.AbortedError, match="enough"):
        dist.all_reduce(np.ones(DIRECT))


@pytest.mark.ranks(2, 4, init=False)
def test_nodes_of_one_rank_each(rank, world_size, start_on_nodes):
    assert type(start_on_nodes(range(world_size)).backend) is MpiBackend
    all_operations(rank, world_size, DIRECT + 40)
