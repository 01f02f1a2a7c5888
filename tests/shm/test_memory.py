"""Shared memory that groups use, and that they release all of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from messages.worlds import DEADLINE, Rank, RingWorld
from shm.groups import allocated, allocated_pages, holdings, mappings, pages_of

import fastcoll as dist
from fastcoll import config
from fastcoll.shm import context_layout as at
from fastcoll.shm import rings
from fastcoll.shm.layout import RING_CONTROL
from fastcoll.shm.meeting import choose_layout

BYTES_A_RANK = 6 << 20
WARM_UP = 30


@pytest.mark.ranks(1, 2, 3)
def test_a_real_group_maps_no_more(rank: int, world_size: int) -> None:
    before = mappings()
    group = dist.new_group()
    dist.barrier()
    assert len(mappings()) == len(before) + 1
    assert all(0 < nbytes <= world_size * BYTES_A_RANK for nbytes in mappings())
    dist.destroy_process_group(group)
    assert mappings() == before


def exchanges(n: int, group: Any) -> dict[str, Callable[[], Any]]:
    """Return, by name, calls with n elements from each rank."""
    x, size = np.ones(n, np.float32), group.size
    many, of_root = np.ones((size, n), np.float32), group.rank == 0
    return {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "reduce": lambda: dist.reduce(x, 0, group=group),
        "scan": lambda: dist.scan(x, group=group),
        "broadcast": lambda: dist.broadcast(x, 0, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(many, x, group=group),
        "gather": lambda: dist.gather(x, list(many) if of_root else None, group=group),
        "scatter": lambda: dist.scatter(x, list(many) if of_root else None, group=group),
        "all_to_all": lambda: dist.all_to_all_single(many, many.copy(), group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(x, many, group=group),
    }


@pytest.mark.ranks(3)
@pytest.mark.parametrize("algorithm", ["close", "direct"])
@pytest.mark.parametrize("n", [1, 5, 1000, 100_000])
def test_memory_of_slots_is_allocated_before_the_first_write(
    rank, world_size, n, algorithm, monkeypatch
) -> None:
    """A rank must not write into memory for which there may be no room."""
    monkeypatch.setenv("FASTCOLL_SHM_ALGORITHMS", algorithm)
    config.forget()
    for name in exchanges(1, dist.new_group()):
        group = dist.new_group()
        exchanges(n, group)[name]()
        words = group.backend.context.words
        expected = group.backend._segment.layout.slots_of(rank)[1] if words[at.ALLOCATED] else 0
        assert allocated(group) == expected, name
        dist.destroy_process_group(group)
        if algorithm == "direct":
            continue  # which needs slots for some operations
        if n == 1 and name not in ("all_to_all", "scatter", "reduce_scatter"):
            assert expected == 0, name
        elif n == 100_000 and (rank == 0 or name not in ("broadcast", "scatter")):
            assert expected, name


def test_only_rings_with_messages_take_memory() -> None:
    """Neither a receive from any rank nor the end of a group accesses the other rings, which would allocate them."""
    count = 3 * rings.ACK_SLOTS

    def first(me: Rank) -> None:
        works = [me.isend(np.full(4, tag), 1, tag) for tag in range(count)]
        assert all(work.wait(DEADLINE) for work in works)

    def second(me: Rank) -> None:
        for tag in reversed(range(count)):
            got = np.zeros(4, np.int64)
            assert me.recv(got, None, tag) == 0
            assert (got == tag).all()

    def third(me: Rank) -> None:
        assert me.iprobe() is None

    with closing(RingWorld(3)) as world:
        (segment,) = world.segments
        segment.prefault(0)
        layout = segment.layout
        there = [(0, layout.header), *(part for rank in range(3) for part in layout.always_there(rank))]
        assert allocated_pages(segment) == pages_of(*there)
        world.run(first, second, third)
        for rank in world.ranks:
            rank.mailbox.close(None)
        _, control, memory = layout.ring_of(0, 1)
        ring = pages_of((control, RING_CONTROL), (memory, layout.ring))
        assert allocated_pages(segment) == pages_of(*there) | ring


@pytest.mark.ranks(2)
def test_groups_with_small_calls_take_little_memory(rank, world_size) -> None:
    """Thirty groups of eight ranks take less than 3 MiB."""
    groups = [dist.new_group() for _ in range(3)]
    for group in groups:
        dist.all_reduce(np.ones(2), group=group)
        assert allocated(group) == 0
    assert groups[0].backend._segment.layout == choose_layout(world_size)
    layout = choose_layout(8)
    there = sum(nbytes for _, nbytes in layout.always_there(rank))
    assert 30 * (layout.header + 8 * there) < 3 << 20
    for group in groups:
        dist.destroy_process_group(group)


def all_holdings() -> dict[str, int]:
    return holdings() | {"threads": threading.active_count()}


def resident_bytes() -> int:
    """Bytes of this process's own memory, without pages of files, which the kernel may evict."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def live(groups: int) -> None:
    """Make, use and destroy groups."""
    x = np.ones(50_000, np.float32)
    for _ in range(groups):
        group = dist.new_group()
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group, async_op=True).wait()
        dist.destroy_process_group(group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "groups", [pytest.param(60, marks=pytest.mark.long), pytest.param(1000, marks=pytest.mark.slow)]
)
def test_groups_made_and_destroyed_leave_nothing(rank: int, world_size: int, groups: int) -> None:
    live(WARM_UP)
    before, resident = all_holdings(), resident_bytes()
    live(groups)
    dist.barrier()
    after = all_holdings()  # and collect garbage: a group is a cycle of objects, with tables of 30 KiB
    grown = resident_bytes() - resident
    end = time.monotonic() + 60
    while any(after[what] > before[what] for what in before) and time.monotonic() < end:
        after = all_holdings()  # a thread of the last group may not have ended
    # Fewer are fine: an idle thread of the pool of ranks may end in between.
    assert all(after[what] <= before[what] for what in before), f"{before} became {after}"
    # The tables of a segment would be 30 KiB a group. Rank 0 keeps the keys in its store: 0.8 KiB.
    assert grown < (1 << 20) + groups * (2 << 10), f"{grown} bytes"
