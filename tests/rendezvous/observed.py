"""Observations for tests of meetings: values of a store, other processes, and the descriptors of this one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import programs
import pytest

from fastcoll.rendezvous import assemble
from fastcoll.store import HashStore, Store, TCPStore, waiting
from fastcoll.store.table import Op, StoreRequest
from fastcoll.system.processes import Member, status_of

LIMIT = 100.0  # a limit that only ends a test that hangs, in seconds
IDLE = "import sys; print('up', flush=True); sys.stdin.read()"


until = partial(programs.until, seconds=LIMIT)


def await_value(store: Store, key: str, value: bytes) -> None:
    """Wait until `key` has the value `value`."""
    until(lambda: store.peek([key]) == [value])


def member_of(process: subprocess.Popen[str], **changes: object) -> Member:
    """Return the Member of a process that runs IDLE."""
    assert process.stdout is not None
    process.stdout.readline()
    started = int(status_of(process.pid)[19])
    me = {"pid": process.pid, "start_time": started, **changes}
    return dataclasses.replace(Member.here(1, 2, "shm"), **me)  # type: ignore[arg-type]


def store_messages(monkeypatch: pytest.MonkeyPatch) -> list[Op]:
    """Return the operations that this process asks of stores over TCP from now on; waits are not cut into slices."""
    asked: list[Op] = []
    ask = TCPStore._ask

    def counted(store: TCPStore, request: StoreRequest) -> Any:
        asked.append(request.op)
        return ask(store, request)

    monkeypatch.setattr(TCPStore, "_ask", counted)
    monkeypatch.setattr(waiting, "SLICE_SECONDS", LIMIT)
    monkeypatch.setattr(assemble, "_LOOK_SECONDS", LIMIT)
    return asked


def open_descriptors() -> dict[int, str]:
    """Return the target of each descriptor of this process."""
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor that listed the folder
            continue
    return found


def pidfds() -> int:
    """Return how many processes this one watches."""
    return sum("pidfd" in name for name in open_descriptors().values())


class FourOperations(Store):
    """A user-defined store with only the four required methods; it counts the calls."""

    def __init__(self) -> None:
        self._store = HashStore()
        self.asked: Counter[str] = Counter()

    def set(self, key: str, value: str | bytes) -> None:
        self.asked["set"] += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.asked["get"] += 1
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        self.asked["add"] += 1
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(keys)
