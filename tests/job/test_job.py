"""The end of a job whose store does not answer, or whose ranks have died on other machines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from fastcoll.job import lease as leases
from fastcoll.job.backends import parse_backend
from fastcoll.job.job import Job
from fastcoll.job.lease import StoreLease
from fastcoll.store import HashStore, Store, TCPStore, tcp_store
from fastcoll.system.processes import Member

SERVE = """
from fastcoll.store import TCPStore
with TCPStore("127.0.0.1", 0, is_master=True) as store:
    print(store.port, flush=True)
    input()
"""


def job_of(store: Store, rank: int, size: int = 2, close: bool = True) -> Job:
    """Return a job of two or more ranks; the processes of the others cannot be checked from here."""
    here = Member.here(0, size, "tcp")
    members = [replace(here, rank=each, boot_id=str(each), host="far") for each in range(size)]
    lease = StoreLease(store, members, rank, store.close if close else lambda: None)
    return Job(lease, parse_backend(None), 60.0)


def test_a_stopped_store_does_not_delay_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(leases, "_PUBLISH_SECONDS", 0.1)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVE], **pipes) as server:
        try:
            store = TCPStore("127.0.0.1", int(server.stdout.readline()), timeout=3000)
            os.kill(server.pid, signal.SIGSTOP)
            job_of(store, 1).lease.leave(3000)
            assert store.timeout == timedelta(seconds=3000)
        finally:
            server.kill()


class Leaving:
    """Rank 0 of a job of two, which has made one group more; rank 1 is this process or another one."""

    def __init__(self, **rank_1: Any) -> None:
        here, self.closed = Member.here(0, 2, "tcp"), list[str]()
        members = [here, replace(here, rank=1, **rank_1)]
        self.store = HashStore()
        self.lease = StoreLease(self.store, members, 0, lambda: self.closed.append("store"))
        self.lease.settle()

    def leave(self, grace: float = 60.0, *gone: Member) -> None:
        self.lease.leave(grace, gone)
        assert self.closed == ["store"]


def test_rank_0_does_not_wait_for_the_dead(caplog: pytest.LogCaptureFixture) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    Leaving(pid=ended.pid).leave()
    rank_0 = Leaving(boot_id="far")
    rank_0.leave(60.0, *rank_0.lease.members[1:])  # as its process is known to be dead
    assert not caplog.records


def test_rank_0_waits_no_longer_than_its_grace(caplog: pytest.LogCaptureFixture) -> None:
    Leaving().leave(0.05)
    assert "though rank 1" in caplog.text


def test_rank_0_does_not_wait_for_ranks_that_have_left(caplog: pytest.LogCaptureFixture) -> None:
    """A rank that has left makes no more groups, however long its process lives."""
    rank_0 = Leaving()
    job_of(rank_0.store, 1, close=False).lease.leave(0.0)
    rank_0.leave()
    assert not caplog.records


def test_rank_0_does_not_wait_long_after_ctrl_c(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_INTERRUPTED_SECONDS", 0.1)
    rank_0 = Leaving()
    job = Job(rank_0.lease, parse_backend(None), 1.0)
    with pytest.raises(KeyboardInterrupt), job.making([0, 1], "new_group([0, 1])"):
        raise KeyboardInterrupt
    rank_0.leave(3000)
    assert "though rank 1" in caplog.text


def test_rank_0_leaves_when_the_store_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    rank_0 = Leaving()
    rank_0.store.close()
    rank_0.leave()
    assert not caplog.records
