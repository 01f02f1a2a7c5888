"""The meeting of a group: sizes of memory, errors if there is too little, and deaths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest

import fastcoll as dist
from fastcoll import config
from fastcoll.core.group import ProcessGroup
from fastcoll.errors import PeerDiedError, ResourceError
from fastcoll.rendezvous.assemble import GroupMeeting
from fastcoll.shm import context_layout as words
from fastcoll.shm import meeting as meet
from fastcoll.shm import segment
from fastcoll.shm.backend import ShmBackend
from fastcoll.store import HashStore
from fastcoll.system.processes import Member


@pytest.fixture(autouse=True)
def _read_anew() -> Iterator[None]:
    config.forget()
    yield
    config.forget()


@pytest.mark.parametrize(
    ("wanted", "free", "cure", "no_cure"),
    [
        (1000, 1 << 30, "raise FASTCOLL_SHM_BYTES_PER_RANK", "make it larger"),
        (4 << 20, 16 << 10, "make it larger .* or free what fills it", "FASTCOLL_SHM_BYTES_PER_RANK"),
    ],
)
def test_the_error_names_the_cure_for_the_size_that_is_too_small(
    wanted: int, free: int, cure: str, no_cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTCOLL_SHM_BYTES_PER_RANK", str(wanted))
    for module in (meet, segment):
        monkeypatch.setattr(module, "free_bytes", lambda: free)
    with pytest.raises(ResourceError, match=cure) as caught:
        meet.choose_layout(2)
    assert no_cure not in str(caught.value)


@pytest.mark.parametrize("late", [[[1], []], [[1], [1]]])
def test_a_death_counts_only_if_a_rank_is_still_late(
    late: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may finish its part, leave the meeting and end while another rank waits for a core."""
    members = [Member.here(rank, 2, "shm") for rank in range(2)]
    monkeypatch.setattr(meet, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(meet, "gone_among", lambda _: dict.fromkeys(members[1:]))
    looks = iter(late)
    with HashStore() as store:
        meeting = GroupMeeting(store, members, 0, 60.0, "testing")
        died = pytest.raises(PeerDiedError, match=r"rank 1 \(.*\) died while making a group")
        with died if late[-1] else nullcontext():
            meet.await_all(lambda: next(looks), "attach", members, meeting, 60.0)


@pytest.mark.ranks(3)
def test_a_resource_error_of_one_rank_is_raised_on_all(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("FASTCOLL_SHM_BYTES_PER_RANK", "1000")
        config.forget()
        with pytest.raises(ResourceError, match="1000 bytes of shared memory a rank are too few") as caught:
            dist.new_group(backend="shm")
    assert type(caught.value) is ResourceError
    assert str(caught.value).startswith("rank 0 (") == (rank > 0)
    config.forget()
    dist.barrier(dist.new_group(backend="shm"))


def is_crowded(group: ProcessGroup) -> bool:
    backend = group.backend
    assert isinstance(backend, ShmBackend)
    return backend.context[words.CROWDED] != 0


@pytest.mark.ranks(3)
def test_a_group_shares_its_cores_with_the_job_s_other_ranks(
    rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks have two cores of their own only if the third rank is bound to another one."""
    pids = np.empty(world_size, np.int64)
    dist.all_gather_into_tensor(pids, np.array([os.getpid()]))
    core_of = dict(zip(pids.tolist(), range(world_size), strict=True)) | {0: rank}
    for crowded, cores in ((True, lambda pid: {0, 1}), (False, lambda pid: {core_of[pid]})):
        monkeypatch.setattr(os, "sched_getaffinity", cores)
        pair = dist.new_group([0, 1])
        if rank < 2:
            assert is_crowded(pair) is crowded
            dist.barrier(group=pair)
