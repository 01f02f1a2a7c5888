"""Groups free the memory of their slots for other groups of the process, unless a call or a peer may use it.

test_rounds_model.py explores the schedules of ranks that free their slots between calls.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from shm.groups import allocated

import fastcoll as dist
from fastcoll import config
from fastcoll.core.status import DONE, LATER
from fastcoll.errors import ResourceError
from fastcoll.shm import context_layout as at
from fastcoll.shm import slot_memory
from fastcoll.shm.segment import Segment


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


@pytest.mark.ranks(2)
def test_a_call_that_has_let_go_without_an_end_keeps_the_slots(rank, world_size, groups) -> None:
    reduce(groups[0])
    dist.barrier()
    groups[0].backend.context.words[at.WROTE] = 1
    assert free(groups[0]) == LATER
    groups[0].backend.context.words[at.WROTE] = 0
    assert holding(groups) == [0]


@pytest.mark.ranks(2)
def test_a_group_is_not_busy_while_its_slots_are_freed(rank, world_size, groups) -> None:
    words = groups[0].backend.context.words
    for owner, is_busy in ((at.FREEING, False), (threading.get_ident() + 1, True)):
        words[at.BUSY] = owner
        assert groups[0].gate.is_busy() == is_busy
    words[at.BUSY] = 0


@pytest.mark.ranks(2)
def test_rings_and_groups_get_the_memory_of_slots_where_there_is_no_other(rank, groups, monkeypatch) -> None:
    def while_no_group_has_slots(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*arguments: Any) -> Any:
            if slot_memory._holders:
                raise ResourceError("/dev/shm is full")
            return allocate(*arguments)

        return attempt

    monkeypatch.setattr(Segment, "allocate", while_no_group_has_slots(Segment.allocate))
    monkeypatch.setattr(Segment, "create", while_no_group_has_slots(Segment.create))
    reduce(groups[0])
    dist.barrier()
    x = np.zeros(4)
    if rank:
        dist.send(x, 0, groups[1])
    else:
        dist.recv(x, 1, groups[1])
    assert holding(groups) == ([0] if rank == 0 else []), "only the sender needs a ring"
    if rank == 0:
        dist.send(x, 1, groups[1])
    else:
        dist.recv(x, 0, groups[1])
    reduce(groups[2])
    dist.barrier()
    dist.destroy_process_group(dist.new_group())
    assert holding(groups) == ([2] if rank else [])


@pytest.mark.ranks(2)
def test_a_forked_child_frees_no_slots_of_its_parent(rank, world_size, groups) -> None:
    reduce(groups[0])
    child = os.fork()
    if child == 0:
        os._exit(len(slot_memory._holders))
    assert os.waitpid(child, 0)[1] == 0
    assert holding(groups) == [0]
