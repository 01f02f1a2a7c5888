"""Groups without a world: several in a process and in one store, with a world and without."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from faults.crew import nothing_left
from programs import python, python_ranks

import fastcoll as dist
from fastcoll.errors import AbortedError, NotInitializedError, StoreTimeoutError, UsageError
from fastcoll.job import standalone
from fastcoll.job.backends import parse_backend
from fastcoll.job.groups import Standalone, groups
from fastcoll.system.processes import Member


def total(group: dist.ProcessGroup) -> float:
    x = np.full(3, dist.get_rank(group) + 1.0)
    dist.all_reduce(x, group=group)
    return float(x[0])


@pytest.mark.ranks(3, init=False)
@pytest.mark.parametrize("backend", ["auto", "tcp"])
def test_groups_in_one_store_do_not_interfere(
    rank: int, world_size: int, backend: str, tmp_path: Path
) -> None:
    store = dist.FileStore(str(tmp_path / "store"), world_size)
    everybody = dist.group_from_store(store, rank, 3, timeout=60, backend=backend)
    again = dist.group_from_store(store, 2 - rank, 3, timeout=60, backend=backend)  # in reverse order
    assert not dist.is_initialized()
    assert (total(everybody), total(again)) == (6, 6)
    if rank < 2:
        pair = dist.group_from_store(store, rank, 2, timeout=60, group_name="pair", backend=backend)
        assert pair.name == "pair"
        assert total(pair) == 3
        x = np.full(2, rank)
        dist.broadcast(x, 1, group=pair)
        assert (x == 1).all()
        assert dist.get_process_group_ranks(pair) == [0, 1]
        dist.destroy_process_group(pair)
        with pytest.raises(NotInitializedError):
            dist.destroy_process_group(pair)
        with pytest.raises(NotInitializedError, match="'pair' was destroyed"):
            dist.get_rank(pair)
    x = np.full(1, rank)
    dist.broadcast(x, 0, group=again)
    assert x == 2
    assert total(everybody) == 6
    for group in (everybody, again):
        dist.destroy_process_group(group)
    assert not groups.standalone


@pytest.mark.ranks(2, init=False)
def test_the_keys_of_a_group_are_deleted_when_all_have_left(rank: int, tmp_path: Path) -> None:
    with dist.FileStore(str(tmp_path / "store"), 2) as store:
        dist.destroy_process_group(dist.group_from_store(store, rank, 2, timeout=60))
        store.barrier("left", 2)
        # One key for each process counts how often it has used the store.
        assert [key for key in store.list_keys() if key.startswith("fastcoll/") and "/use/" not in key] == []
        store.barrier("seen", 2)


@pytest.mark.ranks(1, init=False)
def test_a_group_is_made_while_another_thread_makes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Growing(list[Member]):
        def __iter__(self) -> Iterator[Member]:
            monkeypatch.setitem(groups.standalone, "another", first)
            return super().__iter__()

    first = Standalone(parse_backend(None), Growing(), lambda: None)
    monkeypatch.setitem(groups.standalone, "first", first)
    dist.destroy_process_group(dist.group_from_store(dist.HashStore(), 0, 1))


@pytest.mark.ranks(2)
def test_a_group_outlives_the_world_beside_it(rank: int, tmp_path: Path) -> None:
    with dist.FileStore(str(tmp_path / "store"), 2) as store:
        group = dist.group_from_store(store, 1 - rank, 2, timeout=60)
        x = np.full(1, rank)
        dist.broadcast(x, 0)
        assert x == 0
        dist.destroy_process_group()
        assert total(group) == 3
        dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_groups_of_the_job_are_not_made_of_a_group_with_its_own_ranks(rank: int, tmp_path: Path) -> None:
    with dist.FileStore(str(tmp_path / "store"), 2) as store:
        group = dist.group_from_store(store, 1 - rank, 2, timeout=60)
        for make in (
            dist.shrink,
            lambda group: dist.split_group(group, [[0], [1]]),
            lambda group: dist.new_subgroups(1, group),
        ):
            with pytest.raises(dist.UnavailableError, match="group_from_store made the group 'group'"):
                make(group)
        assert total(group) == 3
        dist.destroy_process_group(group)


@pytest.mark.ranks(2, init=False)
def test_children_of_fork_have_no_group(rank: int, tmp_path: Path) -> None:
    with dist.FileStore(str(tmp_path / "store"), 2) as store:
        group = dist.group_from_store(store, rank, 2, timeout=60)
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(AbortedError, match="was forked"):
                    group.all_reduce(np.ones(1))
                os._exit(0 if not groups.standalone else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert total(group) == 3
        dist.destroy_process_group(group)


PROGRAM = """
import sys, numpy as np, fastcoll as dist
store = dist.FileStore(sys.argv[1], 2)
group = dist.group_from_store(store, int(sys.argv[2]), 2, timeout=60)
x = np.ones(1 << 16)
dist.all_reduce(x, group=group, async_op=True)  # completed at exit
"""


def test_a_program_that_does_not_leave_leaves_at_exit(tmp_path: Path) -> None:
    with nothing_left():
        ends = python_ranks(2, "-c", PROGRAM, tmp_path / "store")
    assert [end.returncode for end in ends] == [0, 0], ends


FORKING = """
import logging, multiprocessing, fastcoll as dist

def make():
    return dist.group_from_store(dist.HashStore(), 0, 1)

logging.basicConfig(level=logging.INFO)
dist.destroy_process_group(make())
child = multiprocessing.get_context("fork").Process(target=make)
child.start()
child.join()
"""


def test_a_child_of_multiprocessing_leaves_at_exit_like_its_parent() -> None:
    ended = python("-c", FORKING)
    assert ended.stderr.count("destroy_process_group was not called; leaving at exit") == 1, ended


@pytest.mark.ranks(1, init=False)
def test_a_group_of_one_and_wrong_arguments(rank: int) -> None:
    store = dist.HashStore()
    group = dist.group_from_store(store, 0, 1)
    assert total(group) == 1
    dist.destroy_process_group(group)
    for place in ((1, 1), (-1, 2)):
        with pytest.raises(UsageError, match="rank goes from 0 to world_size - 1"):
            dist.group_from_store(store, *place)
    with pytest.raises(UsageError, match=r"give a fastcoll\.Store"):
        dist.group_from_store({}, 0, 1)
    with pytest.raises(StoreTimeoutError, match=r"not all of 2 ranks came within 0\.2 s; missing: 1"):
        dist.group_from_store(store, 0, 2, timeout=0.2)
    with pytest.raises(StoreTimeoutError, match=r"not all of 2 ranks came within 3 s; missing: 1"):
        standalone.make(store, "late", 0, 2, 3.0, began=time.monotonic() - 60)
