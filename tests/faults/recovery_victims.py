"""The programs of ranks in the tests of recovery."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import fastcoll as dist
from fastcoll import GroupError
from fastcoll.job.world import current_job
from fastcoll.testing.worker import clock_at_work
from faults import net_victims, victims
from faults.failing_victims import HOW


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _meet() -> None:
    """Meet all others. A rank that has left the barrier may die, or shrink, before others leave it: these fail."""
    with suppress(GroupError):
        dist.barrier()


def _work(group: Any = None) -> float:
    """Call until the group fails; return the time of the error (`clock_at_work`)."""
    x = np.ones(1000, np.float32)
    try:
        for _ in range(10**7):
            x[:] = 1
            dist.all_reduce(x, group=group)
            assert (x == dist.get_world_size(group)).all()
    except GroupError as error:
        failed, named = clock_at_work(), error.ranks
    assert set(named) <= set(dist.get_process_group_ranks(group)), named
    return failed


def _join(rank: int, n: int, url: str, backend: str, timeout: float = 60.0) -> None:
    if backend in HOW:
        backend, before, _ = HOW[backend]
        before(rank)
    elif backend == "auto":
        net_victims.live_on_nodes(rank)
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=n, timeout=timeout)


def _sum(value: float = 1.0) -> dict[str, Any]:
    """Return the sum of the world's values, and leave."""
    x = np.full(1, value)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return {"sum": x[0]}


def kill_until_one_is_left(rank: int, n: int, url: str, backend: str, order: list[int]) -> dict[str, Any]:
    """Kill ranks one by one, in an `order` of ranks of the first world; return the seconds of each `shrink`."""
    _join(rank, n, url, backend)
    _meet()
    took, left = [], sorted(range(n))
    kept = np.full(3, rank)  # the memory of a program
    for victim in order:
        if victim == rank:
            time.sleep(random.random() * 0.002)
            _die()
        old, failed = dist.group.WORLD, _work()
        world = dist.shrink()
        took.append(clock_at_work() - failed)
        left.remove(victim)
        assert world is dist.group.WORLD
        assert dist.get_world_size() == len(left), (left, world.monitor.members, old.monitor.failure)
        assert dist.get_rank() == left.index(rank)
        everybody = np.zeros(len(left), np.int64)
        dist.all_gather_into_tensor(everybody, kept[:1].astype(np.int64))
        assert everybody.tolist() == left
        _meet()
    pair = dist.new_group()  # the first rank left serves the store
    assert dist.get_world_size(pair) == len(left)
    dist.destroy_process_group()
    return {"took": took, "kept": kept.tolist()}


def die_while_shrinking(rank: int, n: int, url: str, backend: str, dying: dict[int, float]) -> dict[str, Any]:
    """Kill the last rank, and others some seconds after they begin to shrink; the rest form one group."""
    _join(rank, n, url, backend)
    _meet()
    if rank == n - 1:
        _die()
    _work()
    if rank in dying:
        threading.Timer(dying[rank], _die).start()
    end = time.monotonic() + 60
    wanted = n - 1 - len(dying)
    while True:
        try:
            dist.shrink()
            x = np.ones(1)
            while dist.get_world_size() > wanted and time.monotonic() < end:
                dist.all_reduce(x)  # until the others have died
            break
        except GroupError:
            assert time.monotonic() < end
    assert dist.get_world_size() == wanted
    return _sum(2.0**rank)


def shrink_once_while_one_dies(rank: int, n: int, url: str, backend: str) -> dict[str, Any]:
    """Kill the last rank, and the one before it while the new group is made; all others call `shrink` once."""
    if rank == n - 2:
        net_victims.arm("shm.meeting.after_attach:kill@2")
    _join(rank, n, url, backend)
    _meet()
    if rank == n - 1:
        _die()
    _work()
    dist.shrink()
    return _sum()


def shrink_a_part(rank: int, n: int, url: str, backend: str) -> dict[str, Any]:
    """Kill rank 1; the group of the odd ranks shrinks, that of the even ranks goes on."""
    _join(rank, n, url, backend)
    even, odd = (dist.new_group(range(k, n, 2)) for k in range(2))
    mine = (even, odd)[rank % 2]
    _meet()
    if rank == 1:
        _die()
    if rank % 2:
        _work(mine)
        mine = dist.shrink(mine)
        assert not current_job()._places  # the failed group is no longer registered
        assert dist.get_process_group_ranks(mine) == list(range(3, n, 2))
    x = np.full(3, rank)
    dist.all_reduce(x, group=mine)
    with_world: Any = None
    try:
        dist.barrier()
    except GroupError as error:
        with_world = error.ranks
    dist.shrink()
    dist.barrier()
    dist.destroy_process_group()
    return {"sum": int(x[0]), "world": with_world}


def shrink_without_a_death(rank: int, n: int, url: str, backend: str) -> dict[str, Any]:
    """Shrink on rank 0 a group in which the others wait; no rank has died, so all are left."""
    _join(rank, n, url, backend)
    said = ""
    if rank == 0:
        _meet()
    else:
        try:
            for _ in range(2):
                dist.barrier()
        except GroupError as error:
            said = str(error)
    dist.shrink()
    return {"said": said, **_sum()}


def shrink_without_one_that_left(rank: int, n: int, url: str, backend: str) -> dict[str, Any]:
    """The last rank leaves in order, and its process runs until the others have shrunk."""
    _join(rank, n, url, backend)
    shrunk = [Path(f"{url.removeprefix('file://')}-shrunk-{other}") for other in range(n - 1)]
    _meet()
    if rank == n - 1:
        dist.destroy_process_group()
        net_victims.await_all(shrunk)
        return {}
    _meet()
    dist.shrink()
    shrunk[rank].touch()
    return _sum()


def shrink_beside_a_stopped_rank(rank: int, n: int, url: str, backend: str) -> dict[str, Any]:
    """The last rank is stopped, so it neither arrives nor is dead."""
    _join(rank, n, url, backend)
    _meet()
    last, aborted = (
        victims.pid_of(n - 1),
        [Path(f"{url.removeprefix('file://')}-{other}") for other in range(n - 1)],
    )
    if rank == n - 1:
        signal.pause()  # until it is killed
    if rank == 0:
        net_victims.stop(last)
    dist.abort(reason="a test")
    aborted[rank].touch()
    net_victims.await_all(aborted)  # so that these ranks shrink at about the same time
    began, at_work = time.monotonic(), clock_at_work()
    try:
        dist.shrink(timeout=3 if rank == 0 else 2)  # rank 0 serves
    except dist.CollectiveTimeoutError as error:
        took = time.monotonic() - began, clock_at_work() - at_work
        return {"ranks": error.ranks, "said": str(error), "took": took}
    finally:
        if rank == 0:
            os.kill(last, signal.SIGKILL)
    raise AssertionError("it was left out")


def interrupt_shrinking(rank: int, n: int, url: str, backend: str) -> dict[str, Any]:
    """Only rank 0 shrinks; Ctrl-C ends its wait."""
    _join(rank, n, url, backend)
    dist.barrier()
    interrupted = Path(url.removeprefix("file://") + "-interrupted")
    if rank:
        _work()
        net_victims.await_all([interrupted])
        return {}
    sent = victims.interrupt_in_the_package()
    try:
        dist.shrink()
    except KeyboardInterrupt:
        return {"after": time.monotonic() - sent[0]}
    finally:
        interrupted.touch()
    raise AssertionError("nobody was interrupted")
