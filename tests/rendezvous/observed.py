"""What tests of meetings look at: values of a store, other processes, and the descriptors of this one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from collections.abc import Callable

from fastcoll.core.processes import Member, status_of
from fastcoll.rendezvous import Store

LIMIT = 60.0  # seconds, which only end a test that hangs
IDLE = "import sys; print('up', flush=True); sys.stdin.read()"


def until(is_so: Callable[[], object]) -> None:
    """Wait for what other threads and processes do."""
    end = time.monotonic() + LIMIT
    while not is_so():
        assert time.monotonic() < end, "it did not come so far in time"
        time.sleep(0.005)


def await_value(store: Store, key: str, value: bytes) -> None:
    """Wait until somebody has set `key` to `value`."""
    until(lambda: store.peek([key]) == [value])


def member_of(process: subprocess.Popen[str], **changes: object) -> Member:
    """The rank that a process is, which runs IDLE."""
    assert process.stdout is not None
    process.stdout.readline()
    started = int(status_of(process.pid)[19])
    me = {"pid": process.pid, "start_time": started, **changes}
    return dataclasses.replace(Member.here(1, 2, "shm"), **me)  # type: ignore[arg-type]


def open_descriptors() -> dict[int, str]:
    """What each descriptor of this process leads to."""
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the one that listed the folder
            continue
    return found


def pidfds() -> int:
    """How many processes this one watches."""
    return sum("pidfd" in name for name in open_descriptors().values())
