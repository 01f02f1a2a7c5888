"""The arithmetic of a segment: nothing overlaps, everything is aligned, and what does not fit is refused."""

from __future__ import annotations

import pytest

from fastcoll import config
from fastcoll.errors import ResourceError
from fastcoll.shm import layout


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 16, 33, 64])
@pytest.mark.parametrize("per_rank", [1 << 19, 1 << 20, 2 << 20, 4 << 20])
def test_parts_do_not_overlap(size: int, per_rank: int) -> None:
    plan = layout.plan(size, per_rank)
    last_head = plan.heads_at + (size - 1) * layout.LINE
    last_control = plan.ring_controls_at + (size - 1) * layout.RING_CONTROL
    last_ring = plan.rings_at + (size - 1) * plan.ring
    assert (
        layout.REASON + layout.REASON_BYTES <= layout.HEADER < layout.RESULT <= layout.CONTROL - layout.LINE
    )
    assert sum(plan.slots_of(0)) <= plan.section(0) + plan.heads_at
    assert last_head <= plan.ring_controls_at
    assert last_control <= plan.rings_at
    assert last_ring <= plan.stride
    if size > 1:
        rings = [plan.ring_of(size - 1, peer) for peer in range(size - 1)]
        starts = plan.heads_at, plan.ring_controls_at, plan.rings_at
        assert {plan.section(size - 1) + offset for offset in starts} <= set(sum(rings, ()))
        assert len(set(sum(rings, ()))) == 3 * (size - 1)
    for start, nbytes in plan.always_there(size - 1):
        assert start % layout.PAGE == nbytes % layout.PAGE == 0
    assert plan.section(size - 1) + plan.stride == plan.nbytes
    assert all(plan.section(rank) % layout.PAGE == 0 for rank in range(size))
    assert layout.COMBINED + 2 * layout.LINE * plan.groups <= plan.section(0)
    assert plan.groups == {33: 5, 64: 8}.get(size, 0)
    for number in (plan.slot, plan.ring):
        assert number & (number - 1) == 0


def test_a_rank_brings_at_most_what_it_was_asked_for_and_by_default_6_mib() -> None:
    for size in (*range(1, 65), 128):
        for per_rank in (1 << 20, 2 << 20, 4 << 20, 6 << 20):
            assert layout.plan(size, per_rank).stride <= per_rank
        by_default = layout.plan(size, config.SETTINGS["FASTCOLL_SHM_BYTES_PER_RANK"].default)
        assert by_default.nbytes <= size * (6 << 20)


@pytest.mark.parametrize(("size", "most"), [(8, 8 << 10), (33, 8 << 10), (256, 36 << 10), (1024, 132 << 10)])
def test_a_rank_begins_with_little_memory(size: int, most: int) -> None:
    plan = layout.plan(size, 8 << 20)
    for rank in (0, size - 1):
        assert sum(nbytes for _, nbytes in plan.always_there(rank)) <= most


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ResourceError, match="16384 each"):
        layout.plan(2, 10_000)
    need = -(-8 * 99 * 2048 // 3)
    with pytest.raises(ResourceError, match=f"{need} each"):
        layout.plan(100, 1 << 19)
    layout.plan(100, need)
