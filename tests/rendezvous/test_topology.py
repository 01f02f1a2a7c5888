"""Which ranks share a node, and which ranks communicate with other nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll.system.processes import Member, Topology

HERE = Member.here(0, 1, "auto")


def topologies(homes: list[int]) -> list[Topology]:
    """Return every rank's view of a group whose rank r is on the node homes[r]."""
    members = [replace(HERE, rank=10 + r, shm_device=home) for r, home in enumerate(homes)]
    return [Topology(members, rank) for rank in range(len(homes))]


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_every_rank_sees_the_same_nodes_and_its_own_place(homes: list[int]) -> None:
    views = topologies(homes)
    nodes = views[0].nodes
    with pytest.raises(ValueError, match="no rank 12"):
        views[0].home_of(12)
    assert sorted(rank for node in nodes for rank in node) == list(range(len(homes)))
    assert [node[0] for node in nodes] == sorted(node[0] for node in nodes)
    for rank, view in enumerate(views):
        assert view.nodes == nodes
        assert view.local == tuple(r for r, home in enumerate(homes) if home == homes[rank])
        assert view.local[view.local_rank] == rank
        assert view.home_of(rank) == (view.node, view.local_rank)
        assert nodes[view.node] == view.local


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_a_rail_has_one_rank_of_each_node_and_its_ranks_agree_on_it(homes: list[int]) -> None:
    views = topologies(homes)
    smallest = min(map(len, views[0].nodes))
    rails = {view.rail for view in views} - {None}
    assert len(rails) == views[0].rails == smallest
    for rank, view in enumerate(views):
        assert (view.rail is None) == (view.local_rank >= smallest)
        if view.rail is not None:
            assert rank in view.rail
            assert all(views[other].rail == view.rail for other in view.rail)
            assert [views[other].node for other in view.rail] == list(range(len(view.nodes)))


@pytest.mark.parametrize(
    ("homes", "even", "in_order"),
    [
        ([1, 1, 2, 2], True, True),
        ([1, 2, 1, 2], True, False),
        ([1, 1, 2], False, True),
        ([2, 1, 1], False, True),
        ([1, 2, 1], False, False),
        ([7], True, True),
    ],
)
def test_even_and_in_order(homes: list[int], even: bool, in_order: bool) -> None:
    view = topologies(homes)[0]
    assert (view.even, view.in_order) == (even, in_order)


@pytest.mark.parametrize("differs", [{"boot_id": "another"}, {"shm_device": HERE.shm_device + 1}])
def test_another_boot_or_another_dev_shm_is_another_node(differs: dict[str, Any]) -> None:
    there = replace(HERE, rank=1, pid=1)
    assert Topology([HERE, there], 0).nodes == ((0, 1),)
    assert Topology([HERE, replace(there, **differs)], 0).nodes == ((0,), (1,))
