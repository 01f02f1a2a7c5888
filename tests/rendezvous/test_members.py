import dataclasses
import gc
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import NoReturn

import pytest
from rendezvous.observed import IDLE, member_of, pidfds, until

from fastcoll.errors import StoreError
from fastcoll.system import processes as processes_module
from fastcoll.system.processes import Member, ProcessId, dead_among, forget, status_of, this_process

WITHOUT_FIRST_THREAD = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
print("up", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
ME = Member.here(0, 1, "shm")


def refuse(_: int) -> NoReturn:
    raise OSError(24, "Too many open files")


def test_a_member_survives_its_serialisation() -> None:
    me = Member.here(3, 5, "shm")
    assert Member.from_bytes(me.to_bytes()) == me
    assert (me.rank, me.world_size, me.backend, me.pid) == (3, 5, "shm", os.getpid())
    assert str(me) == f"rank 3 (pid {me.pid} on {me.host})"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"null",
        b"[" * 3000,
        b" " * 5000,
        ME.to_bytes().replace(b'"rank": 0', b'"rank": "0"'),
        ME.to_bytes().replace(b'"rank": 0', b'"rank": true'),
        ME.to_bytes().replace(b'"rank"', b'"crank"'),
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match="registration"):
        Member.from_bytes(data)


@pytest.fixture(params=["pidfds", "no pidfds"])
def watching(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch processes by pidfds, or by /proc where none can be opened."""
    if request.param == "no pidfds":
        monkeypatch.setattr(os, "pidfd_open", refuse)


@pytest.mark.usefixtures("watching")
def test_a_killed_process_is_dead_while_still_a_zombie(processes) -> None:
    process = processes.start(IDLE)
    member = member_of(process)
    assert dead_among([member]) == []
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert dead_among([Member.here(0, 2, "shm"), member]) == [member]
    process.wait()
    assert dead_among([member]) == [member]
    forget([member])
    assert member.alive() is False
    forget([member, Member.here(0, 2, "shm")])


@pytest.mark.usefixtures("watching")
def test_a_process_lives_whose_first_thread_alone_has_ended(processes) -> None:
    process = processes.start(WITHOUT_FIRST_THREAD)
    member = member_of(process)
    until(lambda: status_of(process.pid)[0] == b"Z")
    assert dead_among([member]) == []
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert dead_among([member]) == [member]
    forget([member])


def test_nothing_is_proven_by_a_process_without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    me = Member.here(0, 2, "shm")
    forget([me])
    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(processes_module, "status_of", refuse)
    assert dead_among([me]) == []
    forget([me])


def test_a_recycled_pid_is_not_the_member() -> None:
    other = dataclasses.replace(Member.here(0, 1, "shm"), start_time=1)
    assert dead_among([other]) == [other]
    forget([other])


@pytest.mark.parametrize("field", ["boot_id", "pid_namespace"])
def test_a_process_out_of_sight_counts_as_alive(field: str) -> None:
    far = dataclasses.replace(Member.here(0, 1, "shm"), pid=1 << 22, **{field: "elsewhere"})
    assert far.alive() is None
    assert dead_among([far]) == []


def test_forget_closes_the_pidfds(processes) -> None:
    member = member_of(processes.start(IDLE))
    gc.collect()  # what earlier tests have left in cycles does not count
    before = pidfds()
    assert member.alive() is True
    assert member.alive() is True
    assert pidfds() == before + 1
    forget([member])
    forget([member])
    assert pidfds() == before


def test_a_name_with_parentheses_does_not_hide_the_start_time(tmp_path) -> None:
    script = tmp_path / "a) Z 0 (b"
    script.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(script), "60"])
    try:
        status = status_of(process.pid)
        assert status[0] in (b"R", b"S", b"D")
        assert int(status[19]) >= int(status_of(os.getpid())[19])
    finally:
        process.kill()
        process.wait()


def test_a_forked_child_opens_its_own_pidfds() -> None:
    """Even when another thread held the table's lock at the fork."""
    me = this_process()
    assert not dead_among([me])
    with ThreadPoolExecutor(1) as other:
        other.submit(processes_module._lock.acquire).result()
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # ends a child that hangs on the lock
            os._exit(7 if not processes_module._watched and not dead_among([me]) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        other.submit(processes_module._lock.release).result()
    assert not dead_among([me])
    forget([me])


def test_a_signal_handler_may_check_and_forget_processes_during_a_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    me, found = this_process(), []
    watch = processes_module._watch

    def interrupted(process: ProcessId) -> int | None:
        state = watch(process)
        with monkeypatch.context() as original:
            original.setattr(processes_module, "_watch", watch)
            found.append(dead_among([me]))
            forget([])
        return state

    monkeypatch.setattr(processes_module, "_watch", interrupted)
    check = Thread(target=lambda: found.append(dead_among([me])), daemon=True)
    check.start()
    check.join(60)
    assert found == [[], []]
    forget([me])
