"""The flight record as another process reads it: of a group that runs, hangs, is stopped, forks, and closes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import fastcoll as dist
from fastcoll import config
from fastcoll.core.signature import describe
from fastcoll.record import dump, recorder
from fastcoll.record import record as r
from fastcoll.record.recorder import GroupRecorder, own, read
from fastcoll.system.processes import Member, status_of

START = time.time()


def members(count: int) -> list[Member]:
    me = Member.here(0, count, "cpu:auto")
    return [Member(**(vars(me) | {"rank": rank, "pid": me.pid + rank - 1})) for rank in range(count)]


def descriptors() -> int:
    return sum(
        f"memfd:{r.NAME}" in os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    )


@pytest.fixture
def group():
    made = GroupRecorder("WORLD", members(3), 1, "mpi", words=8)
    yield made
    made.close()


def only():
    """Return the record of this process's only group."""
    (recorded,) = own().groups
    return recorded


def test_a_group_is_read_with_its_members(group: GroupRecorder) -> None:
    found = read(os.getpid())
    assert found is not None
    assert found == own()
    assert (found.pid, found.world_size, found.rank) == (os.getpid(), 3, 1)
    assert START <= found.started <= time.time()
    assert found.job.split(":")[1] == str(os.getpid() - 1)
    (recorded,) = found.groups
    assert (recorded.name, recorded.backend, recorded.rank) == ("WORLD", "mpi", 1)
    assert (recorded.calls, recorded.under_way) == (0, None)
    host = os.uname().nodename
    peers = [(peer.rank, peer.pid, peer.host) for peer in recorded.members]
    assert peers == [(rank, os.getpid() + rank - 1, host) for rank in range(3)]
    assert r.record_of(found.as_dict()) == found


def test_a_call_site_in_a_file_whose_name_is_not_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("FASTCOLL_TRACE_SITES", "1")
        config.forget()
        group = GroupRecorder("WORLD", members(2), 1, "shm")
    config.forget()
    group.called_from("caf\udce9.py", 3)
    group.begin(11, 0)
    assert [call.site for call in only().ring] == ["caf\\udce9.py:3"]
    group.close()


def test_calls_begin_and_end_and_the_ring_wraps(group: GroupRecorder) -> None:
    barrier = 11
    for number in range(1, r.RING + 11):
        assert group.begin(barrier, 0) == number
        if number in (1, r.RING, r.RING + 5):
            recorded = only()
            assert recorded.under_way is not None
            assert (recorded.under_way.number, describe(*recorded.under_way.head)) == (number, "barrier()")
            assert recorded.since == recorded.under_way.began > 0
        group.end(number)
    recorded = only()
    assert recorded.under_way is None
    assert [call.number for call in recorded.ring] == list(range(11, r.RING + 11))
    assert {call.state for call in recorded.ring} == {"done"}
    assert all(0 < call.began <= call.ended + 8 for call in recorded.ring)


def test_the_end_of_a_call_and_its_waits_are_read(group: GroupRecorder) -> None:
    began = time.time_ns()
    group.begin(11, 0)
    group.waits(0, "barrier(), call 1 of group 'WORLD'", [0, 2], time.monotonic() - 100)
    group.waits(1, "recv from rank 2", [2], time.monotonic(), message=True)
    recorded = only()
    waits, message = recorded.waits
    assert (waits.number, waits.ranks, waits.many) == (1, (0, 2), 2)
    assert waits.doing.startswith("barrier()")
    assert began - 160e9 < waits.since < time.time_ns() - 40e9
    assert (message.number, message.ranks) == (0, (2,))
    group.waits_no_more(1)
    group.failed("rank 2 died", "PeerDiedError")
    recorded = only()
    assert (recorded.failure, recorded.under_way) == ("rank 2 died", None)
    assert [wait.ranks for wait in recorded.waits] == [(0, 2)]  # as it was then
    assert recorded.ring[-1].state == "failed"


def test_a_failure_before_a_call_is_published_is_a_call_that_failed(group: GroupRecorder) -> None:
    group.end(group.begin(11, 0))
    group.context[0], group.context[1] = 2, 1
    group.follow(calls=0, finished=1)
    group.broken_off("failed")
    recorded = only()
    calls = [(call.number, call.state, call.call) for call in recorded.ring]
    assert calls == [(1, "done", 11), (2, "failed", 0)]
    assert recorded.under_way is None


def test_several_groups_are_made_and_closed_and_leave_nothing() -> None:
    before = descriptors()
    assert own() is None
    made = [GroupRecorder(f"g{k}", members(2), 0, "tcp", words=1000) for k in range(5)]
    assert descriptors() == before + 1
    assert [group.name for group in own().groups] == [f"g{k}" for k in range(5)]
    for k in (1, 1, 3):
        made[k].close()
    made.append(GroupRecorder("late", members(2), 0, "tcp"))
    assert [group.name for group in own().groups] == ["g0", "g2", "g4", "late"]
    context = made[0].context
    for group in made:
        group.close()
    assert own() is None
    assert read(os.getpid()) is None
    assert descriptors() == before
    context[:] = 7  # whoever still has it may use it
    assert (context == 7).all()


def test_a_dump_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "dump.json").mkdir()
    with pytest.raises(dist.ResourceError, match="cannot be written"):
        dist.dump(tmp_path / "dump.json")
    assert os.listdir(tmp_path) == ["dump.json"]


@pytest.mark.long
@pytest.mark.ranks(1, init=False, fresh=True)  # a process that has not listened before
def test_traces_may_be_deleted_before_the_last_group_closes(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTCOLL_TRACE_DIR", str(tmp_path / "traces"))
    config.forget()
    try:
        dump.listen()
        shutil.rmtree(tmp_path / "traces")
        dump.listen_no_more()
    finally:
        config.forget()


def test_a_child_of_fork_has_private_memory(group: GroupRecorder) -> None:
    other = GroupRecorder("other", members(2), 0, "shm", words=100)
    other.context[:] = 5
    pid = os.fork()
    if pid == 0:
        good = descriptors() == 0 and own() is None and (other.context == 5).all()
        other.context[:] = 6
        group.begin(11, 0)
        made = GroupRecorder("child's", members(2), 0, "tcp")
        good = good and [each.name for each in own().groups] == ["child's"]
        made.close()
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (other.context == 5).all()
    assert all(recorded.calls == 0 for recorded in own().groups)
    other.close()


def test_other_files_are_no_record() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert read(child.pid) is None
    child.communicate(b"\n")
    assert read(child.pid) is None
    for data in (b"", bytes(8192), os.urandom(1 << 16)):
        assert r.parse(lambda n, at, data=data: data[at : at + n]) is None


def test_of_a_damaged_record_only_consistent_parts_are_read(group: GroupRecorder) -> None:
    group.begin(11, 0)
    data = os.pread(recorder._file.fd, 1 << 20, 0)
    random = np.random.default_rng(1)
    for _ in range(200):
        bad = bytearray(data)
        for offset in random.integers(64, len(bad), 20):
            bad[offset] = random.integers(256)
        for offset in r.BLOCKS + 8 * random.integers(0, 16, 3):
            bad[offset : offset + 8] = random.bytes(8)
        found = r.parse(lambda n, at, bad=bad: bytes(bad[max(at, 0) : max(at, 0) + max(n, 0)]))
        assert found is None or len(found.groups) <= 1


@pytest.mark.ranks(3)
def test_another_process_sees_who_is_late_while_a_rank_is_stopped() -> None:
    rank, pids = dist.get_rank(), [None] * 3
    dist.all_gather_object(pids, os.getpid())
    x = np.ones(4, np.float32)
    dist.all_reduce(x.copy())  # compiled here, not while the others are watched
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 2:  # which is late as well, but 0 waits for 1 first
        stopped, world = False, None
        try:
            while not (stopped and world.under_way and world.late == 1):
                stopped = status_of(pids[1])[0] == b"T"  # and then its record changes no more
                first, last = read(pids[0]), read(pids[1])
                (world,) = first.groups
                time.sleep(0.01)
            assert (first.rank, last.rank, first.job) == (0, 1, last.job)
            assert world.under_way.number == last.groups[0].calls + 1
            assert last.groups[0].under_way is None
        finally:
            os.kill(pids[1], signal.SIGCONT)
    dist.all_reduce(x)
    assert (x == 3).all()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_the_ring_has_the_last_calls_of_every_group_alike_on_all_ranks(backend: str) -> None:
    start, before = time.time_ns(), [each.name for each in own().groups]
    group = dist.new_group(backend=backend)
    pair = dist.new_group([0, 2], backend=backend)
    rank = dist.get_rank()
    x, large = np.ones(2, np.float32), np.ones(1 << 16, np.float64)
    for _ in range(r.RING + 100):
        dist.all_reduce(x, group=group)
    dist.all_reduce(large, group=group)
    for work in [dist.all_reduce(x, group=group, async_op=True) for _ in range(5)]:
        work.wait()
    dist.broadcast(x, 1, group=group)
    if rank != 1:
        dist.barrier(group=pair)
    found = {each.name: each for each in own().groups}
    mine = found[group.name]
    assert [call.number for call in mine.ring] == list(range(mine.calls - r.RING + 1, mine.calls + 1))
    assert (mine.under_way, mine.failure, mine.finished) == (None, "", mine.calls)
    assert {call.state for call in mine.ring} == {"done"}
    assert describe(*mine.ring[-1].head) == "broadcast(float32, 2 elements, root=1)"
    assert describe(*mine.ring[-7].head) == "all_reduce(float64, 65536 elements, op=SUM)"
    assert mine.ring[-7].ended > mine.ring[-7].began > start - 60e9  # a large call is timed
    timed = [call for call in mine.ring if call.ended]
    assert len(timed) >= (r.RING if backend == "tcp" else r.RING // 64)
    assert all(before.ended <= after.began for before, after in pairwise(timed))
    rings = [None] * 3
    dist.all_gather_object(rings, [(call.number, call.call, call.shape) for call in mine.ring])
    assert rings[0] == rings[1] == rings[2]
    if rank != 1:
        assert describe(*found[pair.name].ring[-1].head) == "barrier()"
        assert [peer.rank for peer in found[pair.name].members] == [0, 2]
        dist.destroy_process_group(pair)
    dist.destroy_process_group(group)
    assert [each.name for each in own().groups] == before


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_mismatch_is_in_the_ring_and_the_group_goes_on(backend: str) -> None:
    group = dist.new_group(backend=backend)
    x = np.ones(2 + dist.get_rank())
    with pytest.raises(dist.MismatchError):
        dist.all_reduce(x, group=group)
    (found,) = [each for each in own().groups if each.name == group.name]
    assert "mismatch" in [call.state for call in found.ring]
    dist.barrier(group=group)
    (found,) = [each for each in own().groups if each.name == group.name]
    assert (found.ring[-1].state, found.under_way, found.failure) == ("done", None, "")
    dist.destroy_process_group(group)
