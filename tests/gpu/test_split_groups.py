"""new_group where the world's GPU carrier can be split: all ranks take part, members or not."""

from __future__ import annotations

from typing import Any

import pytest

import fastcoll as dist
from fastcoll.job.groups import groups

NCCL = "cpu:shm,cuda:nccl"


class Splitting:
    """The part of a DeviceCarrier that new_group and the end of a group need."""

    splits = True

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def split(self, group: Any) -> Any:
        self.asked.append(group)
        return None if group is None else Splitting()

    def abort(self) -> None: ...
    def close(self, reason: Any) -> None: ...


@pytest.fixture
def parent(rank: int) -> Splitting:
    groups.world.gpus.carrier = made = Splitting()  # type: ignore[assignment]
    return made


@pytest.mark.ranks(3)
def test_all_ranks_split_or_get_the_error_and_members_get_the_result(rank: int, parent: Splitting) -> None:
    with pytest.raises(
        dist.MismatchError, match=r"rank \d asks for ranks \[.*\] with cpu:shm,cuda:nccl, rank"
    ):
        dist.new_group([0, 1] if rank == 2 else [0], backend=NCCL)  # also if it is no member
    assert parent.asked == []
    group = dist.new_group([0, 2], backend=NCCL)
    member = rank != 1
    assert parent.asked == [group if member else None]
    assert isinstance(getattr(getattr(group, "gpus", None), "carrier", None), Splitting) == member
    assert dist.new_group([rank], backend=NCCL, use_local_synchronization=True).gpus.carrier is None
    assert dist.new_group([0, 1], backend="shm") is not None
    assert len(parent.asked) == 1  # not with local synchronisation, nor for another backend
