"""The end of a job whose store does not answer, or in which ranks have died out of sight."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest

from fastcoll.api import job as jobs
from fastcoll.api.job import Job
from fastcoll.core.processes import Member
from fastcoll.rendezvous import HashStore, Store, TCPStore, tcp_store

SERVE = """
from fastcoll.rendezvous import TCPStore
with TCPStore("127.0.0.1", 0, is_master=True) as store:
    print(store.port, flush=True)
    input()
"""


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    """A process that serves a store, and prints its port."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def job_of(store: Store, rank: int) -> Job:
    """A job of two, of whom the other is out of sight."""
    members = [replace(Member.here(each, 2, "tcp"), boot_id=str(each), host="far") for each in range(2)]
    return Job(store, members, rank, None, None, 60.0, store.close)  # type: ignore[arg-type]


def test_a_store_whose_process_is_stopped_holds_nobody_up(
    server: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_store, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(jobs, "_LAST_WORD_SECONDS", 0.1)
    assert server.stdout is not None
    store = TCPStore("127.0.0.1", int(server.stdout.readline()), timeout=3000)
    os.kill(server.pid, signal.SIGSTOP)
    job_of(store, 1).leave(3000)
    assert store.timeout == timedelta(seconds=3000)


def test_rank_0_does_not_wait_for_those_that_are_known_to_be_gone() -> None:
    job = job_of(HashStore(), 0)
    job.settle()  # a group that the other has not made
    job.leave(3000, job.members[1:])
