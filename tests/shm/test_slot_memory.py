"""Groups free the memory of their slots for other groups of the process, unless a call or a peer may use it.

test_rounds_model.py explores the schedules of ranks that free their slots between calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from shm.groups import allocated

import fastcoll as dist
from fastcoll import config
from fastcoll.core.status import DONE, LATER
from fastcoll.shm import context_layout as at
from fastcoll.shm import slot_memory


def slot_bytes(group: Any) -> int:
    return int(group.backend._segment.layout.slots_of(group.rank)[1])


def reduce(group: Any, n: int = 5000) -> None:
    x = np.full(n, group.rank + 1.0)
    dist.all_reduce(x, group=group)
    assert (x == sum(range(group.size + 1))).all()


def free(group: Any) -> int:
    """Free this rank's slots of a group, and of no other."""
    segment = group.backend._segment
    start, nbytes = segment.layout.slots_of(group.rank)
    code: int = slot_memory.free.call(group.backend.context.address, segment.address + start, nbytes)
    return code


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Five groups that have made small calls, of which the process keeps the slots of two."""
    monkeypatch.setenv("FASTCOLL_SHM_ALGORITHMS", "close")
    config.forget()
    made = [dist.new_group() for _ in range(5)]
    monkeypatch.setattr(slot_memory, "_MOST_BYTES", 2 * slot_bytes(made[0]))
    for group in made:
        reduce(group, 2)
    yield made
    for group in made:
        dist.destroy_process_group(group)
    assert not slot_memory._holders


def holding(groups: list[Any]) -> list[int]:
    """Return the numbers of the groups whose slots are allocated."""
    dist.barrier()
    assert all(allocated(group) in (0, slot_bytes(group)) for group in groups)
    return [number for number, group in enumerate(groups) if allocated(group)]


@pytest.mark.ranks(2, 3)
def test_the_groups_that_have_held_their_slots_for_longest_free_them(rank, world_size, groups) -> None:
    for number in (0, 1, 2, 3, 4, 0, 4, 2):
        reduce(groups[number])
        dist.barrier()  # a peer may still read the slots of the group's last call
    assert holding(groups) == [0, 2]


@pytest.mark.ranks(2)
def test_a_group_that_is_inside_a_call_keeps_its_slots(rank, world_size, groups) -> None:
    reduce(groups[0])
    dist.barrier()
    groups[0].backend.context.words[at.BUSY] = threading.get_ident() + 1
    assert free(groups[0]) == LATER
    for number in (1, 2, 3):
        reduce(groups[number])
        dist.barrier()
    assert holding(groups) == [0, 3]
    groups[0].backend.context.words[at.BUSY] = 0
    assert free(groups[0]) == DONE
    assert holding(groups) == [3]
    reduce(groups[0])


@pytest.mark.ranks(2)
def test_a_peer_that_has_not_read_a_round_keeps_the_slots(rank, world_size, groups) -> None:
    reduce(groups[0])
    dist.barrier()
    # As if this rank had written a round that the peer has not read.
    groups[0].backend.context.words[at.ROUND] += 1
    assert free(groups[0]) == LATER
    groups[0].backend.context.words[at.ROUND] -= 1
    assert holding(groups) == [0]


@pytest.mark.ranks(2)
def test_a_failed_group_keeps_its_slots(rank, world_size, groups) -> None:
    reduce(groups[0])
    dist.barrier()
    groups[0].abort()
    for number in (1, 2, 3):
        reduce(groups[number])
    assert free(groups[0]) == LATER
    assert holding(groups) == [0, 2, 3]
