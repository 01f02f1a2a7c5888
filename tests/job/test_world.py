"""Joining the world, making groups of its ranks, and leaving it."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import os
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from faults.crew import nothing_left
from programs import DIES_WITH_A_SEGMENT, python, python_ranks
from rendezvous.observed import FourOperations, store_messages

import fastcoll as dist
from fastcoll import config
from fastcoll.errors import (
    AbortedError,
    FastcollError,
    MismatchError,
    NotInitializedError,
    PeerDiedError,
    RendezvousError,
    ResourceError,
    StoreError,
    StoreTimeoutError,
    UnavailableError,
    UsageError,
)
from fastcoll.job.backends import make_group, parse_backend
from fastcoll.job.discovery import Found, finder
from fastcoll.job.lease import StoreLease
from fastcoll.launch.nodes import free_port
from fastcoll.net.mpi import library as mpi_library
from fastcoll.rendezvous.join import join
from fastcoll.store import Rendezvous
from fastcoll.system.processes import Member, status_of

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER


def total(group: Any = None) -> float:
    """Return the number of ranks of a group, by an all_reduce of ones."""
    x = np.ones(1)
    dist.all_reduce(x, group=group)
    return float(x[0])


# ---- backends --------------------------------------------------------------------------------------


@pytest.fixture
def without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make mpi4py unavailable."""
    monkeypatch.setattr(mpi_library, "why_unavailable", lambda: "mpi4py is not installed")


@pytest.mark.usefixtures("without_mpi")
def test_names_of_backends_and_which_are_available() -> None:
    assert dist.Backend("GLOO") == dist.Backend.GLOO == "gloo"
    with pytest.raises(UsageError, match=r"no backend 'ucc'; known: auto, shm, gloo, tcp, mpi, nccl"):
        dist.Backend("ucc")
    available = [name for name in ("auto", "SHM", "gloo", "mpi", "ucc") if dist.is_backend_available(name)]
    assert available == ["auto", "SHM", "gloo"]
    asked = dist.is_available(), dist.is_gloo_available(), dist.is_mpi_available(), dist.is_nccl_available()
    assert asked == (True, True, False, False)


@pytest.mark.parametrize(
    ("text", "config"),
    [
        (None, "cpu:auto"),
        ("auto", "cpu:auto"),
        ("Gloo", "cpu:gloo"),
        ("shm", "cpu:shm"),
        ("cpu:auto,cuda:nccl", "cpu:auto,cuda:nccl"),
        ("cuda:nccl, CPU:gloo", "cuda:nccl,cpu:gloo"),
    ],
)
def test_a_backend_for_each_device(text: str | None, config: str) -> None:
    assert str(parse_backend(text)) == config


@pytest.mark.usefixtures("without_mpi")
def test_an_unknown_or_unavailable_backend_is_refused() -> None:
    for text in ("cpu:auto,cpu:shm", "tpu:auto", "cpu:", "auto,shm", "", "cpu:auto,"):
        with pytest.raises(UsageError):
            parse_backend(text)
    for text in ("nccl", "cuda:nccl", "mpi", "cpu:mpi"):
        with pytest.raises(UnavailableError, match="available: auto, shm, gloo, tcp"):
            parse_backend(text)


def test_ranks_on_two_nodes_are_refused_by_name() -> None:
    here = Member.here(0, 2, "cpu:auto")
    there = dataclasses.replace(here, rank=1, host="node7", boot_id="another")
    said = rf"rank 1 \(pid {here.pid} on node7\) does not share /dev/shm with rank 0"
    with pytest.raises(UnavailableError, match=said):
        make_group(parse_backend("shm"), dist.HashStore(), "WORLD", [here, there], 0, 1.0)


# ---- joining ---------------------------------------------------------------------------------------


@pytest.mark.ranks(3, init=False)
def test_at_a_start_on_one_node_a_rank_sends_the_store_four_messages(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It claims its rank, waits for the list of members and for the shared memory, and has then settled."""
    asked = store_messages(monkeypatch)
    dist.init_process_group()
    others = ["SET_NEW", "GET", "GET", "ADD"]
    assert [each.name for each in asked] == (others if rank else ["SET_NEW", "GET", "SET_NEW", "SET", "ADD"])
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "ucc"}, "no backend 'ucc'"),
        ({"store": dist.HashStore(), "init_method": "env://"}, "are both given"),
        ({"store": dist.HashStore()}, "rank is -1 and world_size is -1"),
        ({"store": dist.HashStore(), "rank": 2, "world_size": 2}, "rank is 2 and world_size is 2"),
        ({"store": {}, "rank": 0, "world_size": 1}, "store is dict"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": timedelta(seconds=-1)}, "greater than 0"),
        ({"pg_options": object()}, "leave it out"),
        ({"init_method": "carrier-pigeon://coop"}, "carrier-pigeon"),
        ({"rank": "0", "world_size": 1}, "rank is '0', a str; give a whole number"),
        ({"rank": 0, "world_size": 1.0}, "world_size is 1.0, a float; give a whole number"),
        ({"backend": 3}, "backend is 3, a int; give a str"),
        ({"timeout": "x"}, "timeout is 'x'; give seconds"),
        ({"timeout": float("nan")}, "timeout is nan; give seconds"),
        ({"init_method": 3}, "init_method is 3, a int; give a str"),
        ({"group_name": 3}, "group_name is 3, a int; give a str"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dist.init_process_group(**arguments)
    assert not dist.is_initialized()


@pytest.mark.ranks(1, init=False)
def test_a_world_of_one(rank: int) -> None:
    dist.init_process_group(
        "gloo", rank=np.int64(0), world_size=np.int8(1), store=dist.HashStore(), timeout=timedelta(seconds=20)
    )
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    assert total() == 1
    with pytest.raises(UsageError, match="already; call destroy_process_group first"):
        dist.init_process_group()
    world = dist.group.WORLD
    assert world is not None
    assert world.timeout == 20
    dist.destroy_process_group()
    assert not dist.is_initialized()
    with pytest.raises(NotInitializedError):
        total()
    with pytest.raises(NotInitializedError, match="destroyed"):
        world.all_reduce(np.ones(1))
    with pytest.raises(NotInitializedError, match="does not exist, or was destroyed"):
        dist.destroy_process_group()


@pytest.mark.parametrize("timeout", [float("inf"), 2e9, timedelta.max])
def test_every_call_limits_a_timeout_to_the_longest(timeout: float | timedelta) -> None:
    with dist.world(timeout=timeout) as world:
        assert world.timeout == config.MOST_SECONDS
        dist.barrier(timeout=timeout)
        dist.monitored_barrier(timeout=timeout)
        group = dist.new_group([0], timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        assert group.timeout == config.MOST_SECONDS


@pytest.mark.ranks(2, init=False)
def test_a_world_as_a_context_again_and_again(rank: int, world_size: int, tmp_path: Path) -> None:
    """An early rank finds the store of the previous world, and must not join that world."""
    for _ in range(5):
        with dist.world("shm") as group:
            assert (group, total(), dist.get_backend()) == (dist.group.WORLD, 2, "shm")
        assert not dist.is_initialized()
    with dist.world(rank=rank, world_size=world_size):
        dist.destroy_process_group()
    left = tmp_path / "left"

    def fail() -> None:
        with dist.world():
            if rank == 0:
                dist.new_group([0])  # rank 1 does not make this group, so rank 0 would wait for it
                raise ValueError("bad data")
            while not left.exists():  # otherwise rank 0 waits for this rank
                time.sleep(0.01)
            raise ValueError("bad data")

    with pytest.raises(ValueError, match="bad data"):
        fail()
    left.touch()
    assert not dist.is_initialized()
    assert inspect.signature(dist.world) == inspect.signature(dist.init_process_group)


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("again", [False, True])
def test_one_store_for_two_worlds(rank: int, world_size: int, again: bool, tmp_path: Path) -> None:
    """Rank 0 uses one store object for both worlds; rank 1 uses one or two."""
    with dist.FileStore(str(tmp_path / "store"), world_size) as first:
        for _ in range(2):
            anew = rank == 1 and again
            store = dist.FileStore(str(tmp_path / "store"), world_size) if anew else first
            dist.init_process_group(store=store, rank=rank, world_size=world_size)
            assert total() == world_size
            dist.destroy_process_group()
            if anew:
                store.close()


@pytest.mark.ranks(2, init=False)
def test_ranks_that_disagree_get_an_error(rank: int, tmp_path: Path) -> None:
    with dist.FileStore(str(tmp_path / "store"), 2) as store:
        with pytest.raises(FastcollError, match="backend"):
            dist.init_process_group(["auto", "gloo"][rank], store=store, rank=rank, world_size=2, timeout=60)
        assert not dist.is_initialized()
        dist.init_process_group("auto", store=store, rank=rank, world_size=2, timeout=60)
        assert total() == 2
        dist.destroy_process_group()


class Clock:
    """A module `time` whose clock moves only when somebody looks at it or sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 0.01
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let joining measure its time by a Clock."""
    for module in ("job.discovery", "store.waiting"):
        monkeypatch.setattr(f"fastcoll.{module}.time", Clock())


@pytest.mark.usefixtures("clock")
def test_the_store_of_a_running_job_is_not_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dist.HashStore] = []

    def meet_again(*_: Any) -> Rendezvous:
        opened.append(dist.HashStore())
        earlier = dist.PrefixStore("fastcoll", opened[-1])
        join(earlier, 0, 1, "cpu:auto", 1)
        earlier.add("settled/0", 1)
        return Rendezvous(opened[-1], 0, 2, "here")

    monkeypatch.setattr("fastcoll.job.discovery.meet", meet_again)
    text = "file:///x leads to a job in which rank 0 has started before"
    with pytest.raises(RendezvousError, match=text):
        dist.init_process_group(init_method="file:///x", rank=0, world_size=2, timeout=1)
    assert len(opened) > 10
    for store in opened:
        with pytest.raises(StoreError, match="closed"):
            store.set("key", "value")


def test_only_one_thread_of_a_process_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a scheduler starts two ranks as threads, the second one fails at once, and the first continues."""
    begun, ended = threading.Event(), threading.Event()

    def meet(*_: Any) -> Rendezvous:
        begun.set()
        assert ended.wait(60)
        raise RendezvousError("nobody came")

    monkeypatch.setattr("fastcoll.job.discovery.meet", meet)
    with ThreadPoolExecutor(1) as other:
        first = other.submit(dist.init_process_group, init_method="file:///x", rank=0, world_size=2)
        try:
            assert begun.wait(60)
            with pytest.raises(
                UsageError, match="is joining a job already, on another thread; a process is one"
            ):
                dist.init_process_group(init_method="file:///x", rank=1, world_size=2)
        finally:
            ended.set()
        with pytest.raises(RendezvousError, match="nobody came"):
            first.result()
        with pytest.raises(RendezvousError, match="nobody came"):
            dist.init_process_group(init_method="file:///x", rank=1, world_size=2)


def meet_in(store: dist.Store, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every init_method use `store`."""
    monkeypatch.setattr(
        "fastcoll.job.discovery.meet", lambda *_: Rendezvous(Unclosed(store), rank, 2, "here")
    )


class Unclosed(dist.PrefixStore):
    """A view whose `close` does nothing, like a client's of a server."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__("", store)


@pytest.fixture
def other() -> Member:
    """Rank 1 of a job of two, in another process that is alive: the parent of this one."""
    pid = os.getppid()
    return dataclasses.replace(Member.here(1, 2, "cpu:auto"), pid=pid, start_time=int(status_of(pid)[19]))


def test_a_second_process_with_a_rank_of_a_running_job_is_refused_at_once(
    other: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    meet_in(store, 1, monkeypatch)
    started = Unclosed(store)
    started.set("fastcoll/join/member/1", other.to_bytes())
    started.add("fastcoll/settled/1", 1)
    said = rf"rank 1 is claimed by two processes, {other.where}, .* and pid {os.getpid()} on \S+;"
    with pytest.raises(UsageError, match=said):
        dist.init_process_group(init_method="tcp://x:1", rank=1, world_size=2, timeout=60)


@pytest.mark.usefixtures("clock")
def test_a_rank_waits_for_a_job_that_its_predecessor_has_left(
    other: Member, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.HashStore()
    meet_in(store, 1, monkeypatch)
    view = dist.PrefixStore("fastcoll", Unclosed(store))
    view.set("join/member/1", other.to_bytes())
    lease = StoreLease(view, [other, other], 1, lambda: None)
    lease.settle()
    lease.leave(0.0)
    with pytest.raises(RendezvousError, match="rank 1 has started before"):
        dist.init_process_group(init_method="tcp://x:1", rank=1, world_size=2, timeout=60)
    assert len(re.findall(r"starting at tcp://x:1: has waited \S+ s for rank 0 to leave", caplog.text)) == 1


def parts(store: dist.Store, *ranks: int) -> list[Found]:
    """Return the part of a user's store that each of these ranks of a job of two uses, one after the other."""
    return [finder(None, store, rank, 2, 60.0, "", parse_backend(None))() for rank in ranks]


@pytest.fixture(params=[dist.HashStore, FourOperations])
def users_store(request: pytest.FixtureRequest) -> dist.Store:
    return request.param()


def test_a_rank_that_comes_again_goes_to_the_next_job_in_a_store(users_store: dist.Store) -> None:
    first = parts(users_store, 0, 1)
    assert [found.store.prefix for found in first] == ["0", "0"]
    first[0].close(0.0)
    second = parts(users_store, 1, 0)  # rank 1 is a new process, and its predecessor has not left yet
    first[1].close(0.0)
    third = parts(users_store, 1)
    assert [found.store.prefix for found in second + third] == ["1"] * 3
    for found in second:
        found.close(0.0)
    if isinstance(users_store, dist.HashStore):
        assert users_store.list_keys() == ["fastcoll//job"]


@pytest.mark.parametrize("is_first", [False, True])
def test_the_job_of_a_killed_process_in_a_store_is_over(
    users_store: dist.Store, other: Member, is_first: bool
) -> None:
    """The new process has the rank of the killed one, or the killed one was the first that joined."""
    dead = dataclasses.replace(other, start_time=other.start_time - 1)  # its pid is another process's now
    (found,) = parts(users_store, 0)
    found.store.set("join/terms", (dead if is_first else other).to_bytes())
    found.store.set("join/member/1", dead.to_bytes())
    assert [found.store.prefix for found in parts(users_store, 0 if is_first else 1, 1, 0)] == ["1"] * 3


def test_a_failed_meeting_in_a_store_is_over(users_store: dist.Store) -> None:
    (found,) = parts(users_store, 0)
    with pytest.raises(StoreTimeoutError):
        join(found.store, 0, 2, "tcp", 0.0)
    assert [found.store.prefix for found in parts(users_store, 1, 0)] == ["1"] * 2


def test_a_second_process_with_a_rank_of_a_running_job_in_a_store_is_refused(
    users_store: dist.Store, other: Member
) -> None:
    (found,) = parts(users_store, 1)
    found.store.set("join/member/1", other.to_bytes())
    assert parts(users_store, 1)[0].store.prefix == "0"  # all ranks meet there, and all get the error
    found.store.add("settled/1", 1)
    said = rf"rank 1 is claimed by two processes, {other.where}, whose job in this store has started, and pid"
    with pytest.raises(UsageError, match=said):
        parts(users_store, 1)
    assert parts(users_store, 0)[0].store.prefix == "0"


@pytest.mark.ranks(3, init=False)
def test_a_new_process_meets_the_ranks_that_stay_in_a_store(rank: int, tmp_path: Path) -> None:
    with dist.FileStore(tmp_path / "store", 3) as store:
        for job in range(2):
            if rank != 2 - job:
                store.wait([] if job == 0 else ["the first has ended"])
                dist.init_process_group(store=store, rank=min(rank, 1), world_size=2, timeout=60)
                assert total() == 2
                dist.destroy_process_group()
                store.set("the first has ended", b"")
        store.barrier("done", 3)


LATE = """
import fastcoll as dist
try:
    dist.init_process_group(timeout=60)
except dist.UsageError as error:
    print(error)
"""


@pytest.mark.ranks(2)
def test_a_late_second_rank_1_is_refused(rank: int) -> None:
    if rank == 1:
        late = python("-c", LATE)
        said = f"rank 1 is claimed by two processes, pid {os.getpid()} on {os.uname().nodename}"
        assert said in late.stdout, late
    dist.barrier()


# ---- groups ----------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_groups_of_any_ranks(rank: int) -> None:
    for ranks in ([3, 1], [0], [2, 0, 3], None, range(1, 4), [3, 1]):
        group = dist.new_group(ranks, group_desc="mine")
        members = sorted(range(4) if ranks is None else ranks)
        if rank in members:
            assert dist.get_process_group_ranks(group) == members
            assert dist.get_rank(group) == members.index(rank)
            assert total(group) == len(members)
        else:
            assert group is OUTSIDE
            assert dist.get_rank(group) == -1
    assert total() == 4


@pytest.mark.ranks(3)
def test_wrong_ranks_are_refused(rank: int) -> None:
    for ranks in ([], [0, 0], [3], [-1, 0]):
        with pytest.raises(UsageError, match=r"expected at least one of the ranks 0\.\.2, each at most once"):
            dist.new_group(ranks)

    enumerated = dist.new_subgroups_by_enumeration
    for wrong, message in (
        (lambda: dist.new_group(3), "ranks is 3; give a list of whole numbers"),
        (lambda: dist.new_group(["0"]), r"ranks\[0\] is '0', a str; give a whole number"),
        (lambda: dist.new_group([0, 1.5]), r"ranks\[1\] is 1.5, a float"),
        (lambda: dist.new_group(timeout=-5), "timeout is -5; give seconds greater than 0"),
        (lambda: dist.new_group(timeout="x"), "timeout is 'x'"),
        (lambda: dist.new_group(backend=3), "backend is 3"),
        (lambda: dist.new_group([0], pg_options=object()), "leave it out"),
        (lambda: dist.new_subgroups("3"), "group_size is '3', a str"),
        (lambda: enumerated(3), "give a list of lists of ranks"),
        (lambda: enumerated([1, 2]), r"ranks_per_subgroup_list\[0\] is 1; give a list of whole numbers"),
        (lambda: dist.monitored_barrier(timeout=-1), "timeout is -1"),
    ):
        with pytest.raises(UsageError, match=message):
            wrong()
    assert total() == 3
    assert total(dist.new_group(np.arange(3))) == 3


@pytest.mark.ranks(2)
def test_a_member_that_does_not_call_is_named_in_a_warning_and_an_error(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if rank == 1:
        dist.barrier()
        return
    monkeypatch.setenv("FASTCOLL_WARN_AFTER", "0.001")
    config.forget()
    said = r"^timed out: new_group\(\[0, 1\]\): rank 1 \(pid \d+ on \S+\) did not come"
    with pytest.raises(StoreTimeoutError, match=said):
        dist.new_group(timeout=2)
    config.forget()
    assert re.search(r"new_group\(\[0, 1\]\): has waited \S+ s for rank 1 \(", caplog.text)
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_rank_without_descriptors_for_a_group_fails_all_ranks(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        if rank == 1:
            patch.setattr("fastcoll.net.tcp.mesh.gather", exhausted)
        said = r"no file descriptor is left to process \d+, .* \(ulimit -n"
        with pytest.raises(ResourceError, match=said) as caught:
            dist.new_group(backend="tcp")
    assert rank == 1 or "rank 1 (pid" in str(caught.value)
    assert total(dist.new_group(backend="tcp")) == 2
    dist.barrier()


@pytest.mark.long
@pytest.mark.ranks(2, fresh=True, may_die=(0,))
def test_making_a_group_names_rank_0_if_it_dies_with_the_store(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerDiedError):
        dist.barrier()
    for ranks in ([0, 1], [1], [0]):
        said = rf"new_group\({re.escape(str(ranks))}\): rank 0 \(pid \d+ on \S+\) died"
        with pytest.raises(PeerDiedError, match=said):
            dist.new_group(ranks)


@pytest.mark.ranks(3)
def test_different_ranks_for_one_group_are_an_error_that_names_both(rank: int) -> None:
    said = r"asks for ranks .* with cpu:auto, rank \d for ranks .*same order"
    with pytest.raises(MismatchError, match=said):
        dist.new_group([[0, 1], [1, 2], [0, 2]][rank])
    assert total(dist.new_group()) == 3


@pytest.mark.ranks(3)
def test_wrong_arguments_of_one_rank_are_an_error_on_all_that_wait_for_it(rank: int) -> None:
    wrong = ({"ranks": [0, 7]}, {"timeout": -5}, {"backend": 3}, {"pg_options": 4})
    for call, arguments in enumerate(wrong):
        name, refuser = next(iter(arguments)), call % 3
        said = f"^{name} is " if rank == refuser else rf"rank {refuser} gave wrong arguments: \w+: {name} is "
        with pytest.raises(UsageError, match=said):
            dist.new_group(**arguments if rank == refuser else {})
    if rank == 2:  # the members of the others' group do not wait for it
        with pytest.raises(UsageError, match="ranks is "):
            dist.new_group([7])
    else:
        assert total(dist.new_group([0, 1])) == 2
    assert total(dist.new_group()) == 3


@pytest.mark.ranks(4)
def test_a_rank_that_leaves_out_a_call_for_another_group_is_warned_and_stays_in_step(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    if rank in (0, 1):
        assert total(dist.new_group([0, 1])) == 2  # ranks 2 and 3 do not make this call
    pair = dist.new_group([2, 3])  # the first call of its members, and the second one of the other ranks
    assert rank < 2 or total(pair) == 2
    assert total(dist.new_group()) == 4
    wanted = rf"rank {rank} has not called new_group\(\[0, 1\]\), .* or pass use_local_synchronization=True"
    assert bool(re.search(wanted, caplog.text)) == (rank > 1)
    caplog.clear()
    if rank != 3:
        assert total(dist.new_group([0, 2, 1])) == 3
    assert total(dist.new_group([1, 3, 0])) == 3 if rank != 2 else dist.new_group([0, 1, 3])
    assert total(dist.new_group()) == 4
    assert ("rank 3 has not called new_group([0, 1, 2])" in caplog.text) == (rank == 3)
    with pytest.raises(
        MismatchError, match=r"ranks \[0, 1, 2\] .*ranks \[0, 1, 2, 3\]|ranks \[0, 1, 2, 3\] "
    ):
        dist.new_group(range(3) if rank == 1 else None)
    caplog.clear()
    assert total(dist.new_group()) == 4
    assert not caplog.text


@pytest.mark.ranks(4)
def test_subgroups(rank: int) -> None:
    own, made = dist.new_subgroups(2)
    assert len(made) == 2
    assert own is made[rank // 2]
    assert dist.get_process_group_ranks(own) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert total(own) == 2
    whole, parts = dist.new_subgroups()  # all ranks are on this node
    assert len(parts) == 1
    assert total(whole) == 4
    single, parts = dist.new_subgroups(1, group=own)
    assert [part is single for part in parts] == [rank % 2 == 0, rank % 2 == 1]
    dist.barrier()  # rank 0 must not leave while members of other groups meet
    with pytest.raises(UsageError, match="group_size is 3; it must divide the 4 ranks"):
        dist.new_subgroups(3)
    own, made = dist.new_subgroups_by_enumeration([[3, 0], [1]])
    assert [group is OUTSIDE for group in made] == [rank not in (0, 3), rank != 1]
    assert own is (OUTSIDE if rank == 2 else made[rank == 1])
    with pytest.raises(UsageError, match="rank 1 is listed twice"):
        dist.new_subgroups_by_enumeration([[0, 1], [1, 2]])


@pytest.mark.ranks(4)
def test_a_group_may_keep_the_order_of_its_ranks_and_be_split(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = [3, 0, 2]
    group = dist.new_group(order, backend="gloo", sort_ranks=False, device_id=0)
    everybody = np.empty(3, np.int64)
    if rank in order:
        assert dist.get_process_group_ranks(group) == order
        assert dist.get_rank(group) == order.index(rank)
        dist.all_gather_into_tensor(everybody, np.array([rank]), group)
        assert everybody.tolist() == order
        first = np.array([rank])
        dist.broadcast(first, group_src=0, group=group)
        assert first[0] == 3
        part = dist.split_group(group, [[2, 0]], timeout=60)  # ranks 3 and 2, in the order of the group
        assert (part is None) == (rank == 0)
        if part is not None:
            assert (dist.get_process_group_ranks(part), dist.get_backend(part)) == ([3, 2], "gloo")
        with pytest.raises(UsageError, match=r"split_ranks is \[\[0, 3\]\]; give lists of the ranks 0\.\.2"):
            dist.split_group(group, [[0, 3]])
    part = dist.split_group(split_ranks=[[1, 2], [0]], group_desc="part")
    assert (part is None) == (rank == 3)
    if part is not None:
        assert dist.get_process_group_ranks(part) == ([0] if rank == 0 else [1, 2])
        dist.barrier(part)
    for wrong in (None, [], [[]], [[0], [0, 1]], 5):
        with pytest.raises(UsageError, match=r"split_ranks|is listed twice"):
            dist.split_group(split_ranks=wrong)  # type: ignore[arg-type]
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert dist.get_node_local_rank() == rank


@pytest.mark.ranks(2)
def test_orders_that_differ_are_an_error_that_names_both(rank: int) -> None:
    for by_members_alone in (False, True):
        with pytest.raises(
            MismatchError, match=r"asks for ranks \[(0, 1|1, 0)\] .* for ranks \[(0, 1|1, 0)\]"
        ):
            dist.new_group([rank, 1 - rank], None, None, None, by_members_alone, sort_ranks=False)
        dist.barrier()  # rank 0 serves the store


@pytest.mark.ranks(2)
def test_a_user_defined_backend(rank: int) -> None:
    from fastcoll.core.operation import Call, Operation
    from fastcoll.job import backends
    from fastcoll.shm.backend import ShmBackend

    class Loud(ShmBackend):
        calls = 0

        def plan(self, operation: Operation, timeout: float | None = None) -> Call:
            Loud.calls += 1
            return super().plan(operation, timeout)

        def fast(self, group: dist.ProcessGroup) -> dict[str, Any]:
            return {}

    before = list(backends.KNOWN)
    dist.Backend.register_backend("Loud", Loud.make, devices="cpu")
    try:
        group = dist.new_group(backend="loud")
        dist.all_reduce(x := np.ones(2), group=group)
        assert (x.tolist(), Loud.calls) == ([2, 2], 1)
        assert dist.get_backend(group) == dist.Backend.LOUD == "loud"  # type: ignore[attr-defined]
        assert dist.is_backend_available("loud")
        with pytest.raises(UsageError, match="'loud'; give a word"):
            dist.Backend.register_backend("loud", Loud.make)
        with pytest.raises(dist.UnavailableError, match="is for arrays in host memory"):
            dist.Backend.register_backend("louder", Loud.make, devices=["cpu", "cuda"])
    finally:
        backends.KNOWN[:] = before
        del backends.BACKENDS["loud"], dist.Backend.LOUD  # type: ignore[attr-defined]


@pytest.mark.ranks(3)
def test_members_make_a_group_among_themselves(rank: int) -> None:
    if rank != 1:
        assert total(dist.new_group([2, 0], use_local_synchronization=True)) == 2
    assert total(dist.new_group()) == 3
    if rank != 0:
        assert total(dist.new_group([1, 2], use_local_synchronization=True)) == 2
        assert total(dist.new_group([1, 2], use_local_synchronization=True)) == 2
    dist.barrier()  # rank 0 must not leave while the others meet


@pytest.mark.ranks(2)
def test_a_group_is_destroyed_alone(rank: int) -> None:
    group = dist.new_group(backend="gloo", timeout=77)
    assert (dist.get_backend(group), dist.get_backend(), group.timeout) == ("gloo", "shm", 77)
    assert total(group) == 2
    dist.barrier()
    dist.destroy_process_group(group)
    for function in (total, dist.get_backend, dist.destroy_process_group):
        with pytest.raises(NotInitializedError, match="destroyed"):
            function(group)
    dist.destroy_process_group(OUTSIDE)
    assert total() == 2


# ---- leaving ---------------------------------------------------------------------------------------


@pytest.mark.ranks(3, init=False)
def test_rank_0_leaves_while_others_still_make_a_group(rank: int) -> None:
    """Rank 0 serves the store; the others see that it has left before they begin to make the group."""
    dist.init_process_group()
    if rank == 0:
        dist.new_group([1, 2])
    else:
        with pytest.raises(AbortedError, match=r"rank 0 .* left the group"):
            dist.barrier()
        assert total(dist.new_group([1, 2])) == 2
    dist.destroy_process_group()


def run_ranks(tmp_path: Path, code: str, size: int) -> list[subprocess.CompletedProcess[str]]:
    """Run plain scripts as ranks of one world, without a launcher; `rank` and `dist` are defined in them."""
    head = (
        "import os, signal, sys\nimport numpy as np\nimport fastcoll as dist\nrank = int(sys.argv[1])\n"
        f"dist.init_process_group(init_method='file://{tmp_path}/meet', rank=rank, world_size={size}, timeout=60)\n"
    )
    return python_ranks(size, "-c", head + code)


def complaints(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what a process has written to stderr, without the messages about compiling kernels."""
    return [line for line in done.stderr.splitlines() if "fastcoll compiles " not in line]


def test_a_script_that_does_not_leave_leaves_at_exit(tmp_path: Path) -> None:
    with nothing_left():
        done = run_ranks(tmp_path, "x = np.ones(1); dist.all_reduce(x); print(x)", 2)
    assert [(p.returncode, p.stdout, complaints(p)) for p in done] == [(0, "[2.]\n", [])] * 2
    assert not (tmp_path / "meet").exists()


def test_leaving_at_exit_does_not_wait_for_a_killed_rank(tmp_path: Path) -> None:
    code = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.barrier()
except dist.PeerDiedError as error:
    print(error.ranks)
"""
    survivor, killed = run_ranks(tmp_path, code, 2)
    assert (survivor.returncode, survivor.stdout) == (0, "(1,)\n"), survivor.stderr
    assert killed.returncode == -9


def test_operations_under_way_are_completed_at_exit_or_named(tmp_path: Path) -> None:
    code = """
x, y = np.full(300_000, rank + 1.0), np.zeros(300_000)
if rank == 0:
    dist.isend(x, 1)
    dist.all_reduce(np.ones(3), async_op=True)
else:
    dist.recv(y, 0)
    dist.all_reduce(np.ones(3))
    print(y[-1])
    dist.irecv(y, 0, tag=7)

class Last:
    def __del__(self, print=print):  # Python comes to its own end, whatever the exit code
        print("the last word", flush=True)

last = Last()
"""
    with nothing_left():
        sender, receiver = run_ranks(tmp_path, code, 2)
    assert (sender.returncode, sender.stdout) == (0, "the last word\n"), sender.stderr
    assert (receiver.returncode, receiver.stdout) == (1, "1.0\nthe last word\n"), receiver.stderr
    assert re.search(r"at exit: .*lost .*recv from rank 0 .*tag 7 of the group WORLD", receiver.stderr)
    assert "Traceback" not in receiver.stderr


FORK = """
group = dist.new_group()
x = np.ones(1)
dist.all_reduce(x)
dist.all_reduce(x, group=group)
got = np.zeros(1)
for _ in range(3):  # from the second one on, compiled code completes them
    sent = dist.isend(x, 1 - rank)
    dist.irecv(got, 1 - rank).wait()
    sent.wait()
received = dist.irecv(got, 1 - rank)
has_ended, ended = os.pipe()
child = os.fork()
if child == 0:
    os.read(has_ended, 1)
    assert not received.done()  # its message is in the parent's ring, which the child may not change
    assert dist.get_rank() == rank
    for wait in (received.wait, lambda: dist.waitany([received])):
        try:
            wait()
        except dist.AbortedError as error:
            assert f"from which process {os.getpid()} was forked" in str(error), error
        else:
            raise SystemExit("it came to an end")
    for call in (
        lambda: dist.all_reduce(x), lambda: dist.all_reduce(x, group=group), lambda: group.barrier(),
        lambda: dist.new_group(), lambda: dist.send(x, 0), lambda: dist.all_reduce(x, async_op=True),
    ):
        try:
            call()
        except dist.AbortedError as error:
            assert f"belong to process {os.getppid()}" in str(error), error
        else:
            raise SystemExit("an inherited group was used")
    if rank == 0:
        dist.destroy_process_group(group)
        dist.destroy_process_group()
    dist.init_process_group(rank=0, world_size=1, store=dist.HashStore())
    dist.all_reduce(x)
    sys.exit(0)
dist.barrier()  # both have forked, so nothing has been received before
sent = dist.isend(x, 1 - rank)
received.wait()
sent.wait()
os.write(ended, b".")
assert os.waitpid(child, 0)[1] == 0
dist.all_reduce(x)
dist.all_reduce(x, group=group)
dist.destroy_process_group()
"""


def test_a_forked_process_cannot_use_the_groups_and_does_not_affect_them(tmp_path: Path) -> None:
    for done in run_ranks(tmp_path, FORK, 2):
        assert (done.returncode, complaints(done)) == (0, [])


CHILDREN = """
import multiprocessing, sys
import numpy as np
import fastcoll as dist

def main(rank):
    dist.init_process_group(init_method=sys.argv[1], rank=rank, world_size=2, timeout=60)
    if rank == 0:
        try:
            dist.recv(np.zeros(1), 1)
        except dist.AbortedError as error:
            print(error)
    else:
        dist.irecv(np.zeros(1), rank)

ranks = [multiprocessing.get_context("fork").Process(target=main, args=(rank,)) for rank in range(2)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
print([rank.exitcode for rank in ranks])
"""


def test_children_of_multiprocessing_leave_when_they_end(tmp_path: Path) -> None:
    """They end by os._exit, without atexit hooks, and must not be declared dead. Lost operations are reported."""
    done = python("-c", CHILDREN, f"file://{tmp_path}/meet")
    assert re.match(r"rank 1 .* left \(its program ended\); recv from rank 1", done.stdout), done
    assert done.stdout.endswith("[0, 1]\n")
    assert re.search(r"at exit: .*recv from rank 1 .*, tag 0 of the group WORLD", done.stderr)


def test_a_start_that_fails_unlinks_the_segment_of_a_rank_that_died_in_it() -> None:
    """This rank fails before the meeting for the segment, in which ranks unlink it as well."""
    left = Path("/dev/shm", python("-c", DIES_WITH_A_SEGMENT).stdout.strip())
    assert left.is_file()
    with pytest.raises(StoreTimeoutError):
        dist.init_process_group(
            "shm", init_method=f"tcp://127.0.0.1:{free_port()}", rank=1, world_size=2, timeout=0.1
        )
    assert not left.exists()


def test_errors_name_the_given_timeout() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(StoreTimeoutError, match=r"not all of 2 ranks came within 0\.5 s; missing: 1"):
        dist.init_process_group("shm", url, timeout=0.5, rank=0, world_size=2)


@pytest.mark.ranks(1)
def test_ctrl_c_while_the_job_is_left_leaves_no_group_open(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(members: Any) -> NoReturn:
        raise KeyboardInterrupt

    made = dist.new_group([0])
    assert isinstance(made, dist.ProcessGroup)
    monkeypatch.setattr("fastcoll.job.world.gone_among", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dist.destroy_process_group()
    assert not dist.is_initialized()
    assert made.gate.closed


@pytest.mark.ranks(1)
def test_a_port_that_is_taken_does_not_keep_the_old_groups_open(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise ResourceError("the port is taken")

    old, made = dist.group.WORLD, dist.new_group([0])
    assert isinstance(made, dist.ProcessGroup)
    assert old is not None
    monkeypatch.setattr("fastcoll.job.world.in_rank.follow", refuse)
    with pytest.raises(ResourceError, match="the port is taken"):
        dist.shrink()
    assert (old.gate.closed, made.gate.closed) == (True, True)
    assert dist.get_world_size() == 1
