"""Joining: who is named when ranks clash, differ, die or do not come."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import pytest

from fastcoll import config
from fastcoll.core.processes import Member
from fastcoll.errors import PeerDiedError, StoreError, StoreTimeoutError, UsageError
from fastcoll.rendezvous import FileStore, HashStore, PrefixStore, Store, TCPStore, serving, waiting
from fastcoll.rendezvous.join import join
from fastcoll.rendezvous.store import StalledError
from fastcoll.rendezvous.table import Missing, Request
from fastcoll.rendezvous.waiting import fetch_for

WHERE = rf"pid \d+ on {os.uname().nodename}"

JOIN = """
import sys
from fastcoll.errors import FastcollError
from fastcoll.rendezvous import TCPStore
from fastcoll.rendezvous.join import join
port, rank, size = map(int, sys.argv[1:4])
with TCPStore("127.0.0.1", port) as store:
    print("joining", flush=True)
    try:
        members = join(store, rank, size, sys.argv[4], 20.0)
        print("joined", [member.rank for member in members], flush=True)
    except FastcollError as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
def test_everyone_learns_of_everyone(world_size: int, in_threads) -> None:
    with HashStore() as store:
        results = in_threads(
            *(partial(join, store, rank, world_size, "shm", 20) for rank in range(world_size))
        )
    for members in results:
        assert [member.rank for member in members] == list(range(world_size))
        assert {member.pid for member in members} == {os.getpid()}


class FourOperations(Store):
    """What a user's store has to have, and a count of what is asked of it."""

    def __init__(self) -> None:
        self._store = HashStore()
        self.asked: Counter[str] = Counter()

    def set(self, key: str, value: str | bytes) -> None:
        self.asked["set"] += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.asked["get"] += 1
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        self.asked["add"] += 1
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(keys)


def test_a_users_store_will_do(in_threads) -> None:
    """Each rank reads the terms and the list, and rank 0 everyone: not everyone reads everyone."""
    store, size = FourOperations(), 20
    results = in_threads(*(partial(join, store, rank, size, "shm", 20) for rank in range(size)))
    assert all([member.rank for member in members] == list(range(size)) for members in results), results
    assert store.asked["set"] <= 2 * size + 2
    assert store.asked["add"] == 2 * size + 1
    assert store.asked["get"] <= 5 * size


def test_processes_meet_in_a_file(tmp_path, processes) -> None:
    source = """
import sys
from fastcoll.rendezvous import FileStore
from fastcoll.rendezvous.join import join
with FileStore(sys.argv[1]) as store:
    print([member.pid for member in join(store, int(sys.argv[2]), 3, "shm", 20)])
"""
    ranks = [processes.start(source, tmp_path / "store", rank) for rank in range(3)]
    assert processes.outputs(ranks) == [str([rank.pid for rank in ranks])] * 3


def test_a_store_serves_several_joins_through_prefixes(in_threads) -> None:
    with HashStore() as store:
        for number in range(2):
            view = PrefixStore(f"group {number}", store)
            results = in_threads(*(partial(join, view, rank, 2, "shm", 20) for rank in range(2)))
            assert all(len(members) == 2 for members in results)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0), (0, -1)])
def test_a_rank_out_of_range_is_refused_before_anything(rank: int, world_size: int) -> None:
    with HashStore() as store:
        with pytest.raises(UsageError):
            join(store, rank, world_size, "shm", 1)
        assert store.num_keys() == 0


def test_a_rank_claimed_twice_names_both_on_all(processes) -> None:
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        started = time.monotonic()
        ranks = [processes.start(JOIN, store.port, rank, 3, "shm") for rank in (0, 1, 1)]
        outputs = processes.outputs(ranks)
        took = time.monotonic() - started
    for output in outputs:
        assert "UsageError rank 1 is claimed by two processes" in output
        assert f"pid {ranks[1].pid} on " in output
        assert f"pid {ranks[2].pid} on " in output
    assert took < 20  # with three interpreters' start; in vain they would wait for 20 s more


def test_a_second_try_of_one_process_is_called_so() -> None:
    with HashStore() as store:
        with pytest.raises(StoreTimeoutError):
            join(store, 1, 2, "shm", 0.1)
        with pytest.raises(UsageError, match=rf"rank 1 \({WHERE}\) joins for the second time"):
            join(store, 1, 2, "shm", 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [(0, 2, "shm"), (1, 3, "shm"), (2, 3, "shm")],
            "disagree about the world size: .* has ..*, .* has .",
        ),
        ([(0, 3, "shm"), (1, 2, "shm")], "disagree about the world size"),
        ([(1, 4, "shm"), (2, 5, "shm")], "disagree about the world size"),
        ([(0, 2, "shm"), (1, 2, "tcp")], r"disagree about the backend: rank . \(.*\) has \w+, rank"),
    ],
)
def test_terms_that_differ_name_both_on_all(arguments, message: str, in_threads) -> None:
    started = time.monotonic()
    with HashStore() as store:
        results = in_threads(*(partial(join, store, *each, 20) for each in arguments))
    assert time.monotonic() - started < 5
    for error in results:
        assert isinstance(error, UsageError), error
        with pytest.raises(UsageError, match=message):
            raise error


def test_versions_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    with HashStore() as store:
        store.add("join/first", 1)
        store.set("join/terms", dataclasses.replace(Member.here(1, 2, "shm"), version="0.0.1").to_bytes())
        with pytest.raises(UsageError, match=r"disagree about the version: rank 1 \(.*\) has 0.0.1, rank 0"):
            join(store, 0, 2, "shm", 20)


def test_who_does_not_come_is_warned_of_and_named(
    in_threads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FASTCOLL_WARN_AFTER", "0.3")
    config.forget()
    with HashStore() as store, caplog.at_level(logging.WARNING, "fastcoll"):
        results = in_threads(*(partial(join, store, rank, 5, "shm", 1.0) for rank in (0, 1, 3)))
    for error in results:
        assert isinstance(error, StoreTimeoutError)
        with pytest.raises(StoreTimeoutError, match="not all of 5 ranks came within 1 s; missing: 2, 4"):
            raise error
    warned = [record.message for record in caplog.records if "has waited" in record.message]
    assert len(warned) == 3
    assert all("2, 4" in message for message in warned), warned


def test_without_rank_0_it_is_rank_0_that_is_missing() -> None:
    with HashStore() as store, pytest.raises(StoreTimeoutError, match="missing: 0"):
        join(store, 1, 3, "shm", 0.3)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_registered_rank_that_is_killed_is_named(processes, in_threads, victim: int) -> None:
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        others = [rank for rank in range(3) if rank != victim]
        dying = processes.start(JOIN, store.port, victim, 4, "shm")
        waiting = [processes.start(JOIN, store.port, rank, 4, "shm") for rank in others]
        store.wait([f"join/member/{rank}" for rank in range(3)])
        dying.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        outputs = processes.outputs(waiting)
        assert time.monotonic() - killed < 8  # they would wait for 20 s
    for output in outputs:
        assert "PeerDiedError" in output
        assert f"rank {victim} (pid {dying.pid} on {os.uname().nodename}) died" in output


def test_a_failed_join_keeps_no_eye_on_those_that_had_come(processes) -> None:
    before = pidfds()
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        processes.start(JOIN, store.port, 1, 3, "shm")
        store.wait(["join/member/1"])
        with pytest.raises(StoreTimeoutError, match="missing: 2"):
            join(store, 0, 3, "shm", 0.6)
        assert pidfds() == before


def pidfds() -> int:
    """How many this process has open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor that listed the directory
            count += "pidfd" in os.readlink(f"/proc/self/fd/{name}")
    return count


def test_garbage_under_our_keys_is_an_error() -> None:
    with HashStore() as store:
        store.set("join/end", "F{}")
        with pytest.raises(StoreError, match="why the meeting failed cannot be read"):
            join(store, 0, 2, "shm", 5)
    with HashStore() as store:
        store.set("join/member/1", "nonsense")
        with pytest.raises(StoreError, match="registration cannot be read"):
            join(store, 0, 2, "shm", 5)
    with HashStore() as store:
        store.set("join/end", "Lnonsense")
        with pytest.raises(StoreError, match="cannot be read"):
            join(store, 1, 2, "shm", 5)


def test_fetch_for_returns_once_the_keys_are_set() -> None:
    with HashStore() as store:
        setter = threading.Timer(0.05, store.multi_set, (["a", "b"], ["", ""]))
        setter.start()
        assert fetch_for(store, ["a", "b"], [Member.here(0, 1, "shm")], 20, "testing") == [b"", b""]
        setter.join()


class Never(HashStore):
    """A store in which nothing is ever set, for a while; it notes how long it was asked to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def fetch(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> list[bytes]:
        assert isinstance(timeout, timedelta)
        self.waits.append(timeout.total_seconds())
        if len(self.waits) < 3:
            raise StoreTimeoutError("not yet")
        return []


@pytest.mark.parametrize(("crowd", "slices"), [(1, 0.25), (250, 0.25), (1000, 1.0), (10_000, 10.0)])
def test_the_more_wait_the_less_often_they_look(crowd: int, slices: float) -> None:
    store = Never()
    looks: list[int] = []
    fetch_for(store, ["k"], [], 1000, "testing", lambda: looks.append(1), crowd=crowd)
    assert store.waits == [slices] * 3
    assert len(looks) == 2


class Stalled(HashStore):
    """A store whose server does not answer the first `requests` requests."""

    def __init__(self, requests: float) -> None:
        super().__init__()
        self.left = requests

    def _ask(self, request: Request) -> list[bytes] | Missing:
        if self.left > 0:
            self.left -= 1
            raise StalledError("no answer")
        return super()._ask(request)


def test_fetch_for_endures_a_store_that_stands_still() -> None:
    store = Stalled(3)
    looks: list[object] = []

    def look() -> None:
        looks.append(store.peek(["other"], 0))
        if len(looks) == 1:
            store.left = 3  # it stalls again, during `look`
        else:
            store.set("k", b"v")

    assert fetch_for(store, ["k"], [], 60, "testing", look) == [b"v"]
    assert len(looks) == 2


def test_fetch_for_says_that_the_store_stands_still_at_the_end() -> None:
    with pytest.raises(StalledError, match=r"testing: .*no answer"):
        fetch_for(Stalled(math.inf), ["k"], [], 0.0, "testing")


def test_fetch_for_says_what_it_was_doing() -> None:
    with HashStore() as store:
        store.set("a", "")
        with pytest.raises(StoreTimeoutError, match=r"making group 3: 'b' did not come within 0.1 s"):
            fetch_for(store, ["a", "b"], [], 0.1, "making group 3")


def test_fetch_for_sees_a_member_die(processes) -> None:
    process = processes.start("import sys; print('up', flush=True); sys.stdin.read()")
    process.stdout.readline()
    member = dataclasses.replace(
        Member.here(2, 3, "shm"), pid=process.pid, start_time=start_time(process.pid)
    )
    killer = threading.Timer(0.1, process.kill)
    killer.start()
    with HashStore() as store:
        started = time.monotonic()
        with pytest.raises(
            PeerDiedError, match=rf"making a group: rank 2 \(pid {process.pid} on .*\) died"
        ) as caught:
            fetch_for(store, ["never"], [Member.here(0, 3, "shm"), member], 20, "making a group")
    assert time.monotonic() - started < 8
    assert caught.value.ranks == (2,)
    killer.join()


def test_fetch_for_has_what_a_member_did_before_it_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """As this process waited for a core, or else for the store."""
    member = Member.here(1, 2, "shm")
    monkeypatch.setattr(waiting, "SLICE_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "gone_among", lambda _: [member])
    with HashStore() as store:
        got = fetch_for(store, ["a"], [member], 20, "testing", lambda: store.set("a", "last"))
    assert got == [b"last"]


def start_time(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def test_fetch_for_blames_the_dead_for_a_lost_store(processes) -> None:
    source = """
import sys
from fastcoll.core.processes import Member
from fastcoll.rendezvous import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True)
store.set("server", Member.here(0, 2, "shm").to_bytes())
print(store.port, flush=True)
sys.stdin.readline()
"""
    server = processes.start(source)
    with TCPStore("127.0.0.1", int(server.stdout.readline())) as store:
        member = Member.from_bytes(store.get("server"))
        killer = threading.Timer(0.1, server.kill)
        killer.start()
        with pytest.raises(PeerDiedError, match="rank 0") as caught:
            fetch_for(store, ["never"], [member], 20, "making a group")
        assert isinstance(caught.value.__cause__, StoreError)
        with pytest.raises(StoreError, match="is gone"):
            fetch_for(store, ["never"], [], 20, "making a group")
        killer.join()


def test_a_file_store_may_be_joined_by_a_users_subclass(tmp_path, in_threads) -> None:
    class Counting(FileStore):
        def add(self, key: str, amount: int) -> int:
            return super().add(key, amount)

    with Counting(tmp_path / "store") as one, Counting(tmp_path / "store") as two:
        results = in_threads(partial(join, one, 0, 2, "shm", 20), partial(join, two, 1, 2, "shm", 20))
    assert all(len(members) == 2 for members in results)


def test_who_has_another_secret_is_told_of_with_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCOLL_SECRET", "one")
    config.forget()
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        monkeypatch.setenv("FASTCOLL_SECRET", "another")
        config.forget()
        with pytest.raises(StoreError, match="another secret"):
            TCPStore("127.0.0.1", store.port)
        end = time.monotonic() + 20
        while not serving.turned_away() and time.monotonic() < end:  # the server's thread has seen it
            time.sleep(0.01)
        told = r"missing: 1 \(turned away: from 127.0.0.1: it refused .* secret is another .* FASTCOLL_SECRET"
        with pytest.raises(StoreTimeoutError, match=told):
            join(store, 0, 2, "tcp", 0.3)
    assert not serving.turned_away()
    config.forget()
