"""Joining: which processes errors name when ranks conflict, differ, die or do not come."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import re
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from rendezvous.observed import IDLE, LIMIT, FourOperations, await_value, member_of, pidfds, until

from fastcoll import config
from fastcoll.errors import PeerDiedError, StoreError, StoreTimeoutError, UsageError
from fastcoll.rendezvous import assemble
from fastcoll.rendezvous.assemble import GroupMeeting
from fastcoll.rendezvous.join import join
from fastcoll.store import HashStore, Store, TCPStore, serving, tcp_store, waiting
from fastcoll.store.store import StalledError
from fastcoll.store.table import Missing, StoreRequest
from fastcoll.store.waiting import fetch_for
from fastcoll.system.processes import Member

WHERE = rf"pid \d+ on {os.uname().nodename}"

JOIN = """
import sys
from fastcoll.errors import FastcollError
from fastcoll.store import TCPStore
from fastcoll.rendezvous.join import join
port, rank, size = map(int, sys.argv[1:4])
with TCPStore("127.0.0.1", port) as store:
    print("joining", flush=True)
    try:
        members = join(store, rank, size, sys.argv[4], 60.0)
        print("joined", [member.rank for member in members], flush=True)
    except FastcollError as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.mark.parametrize("size", [1, 2, 20])
def test_each_rank_sends_a_users_store_a_fixed_number_of_requests(
    in_threads, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """It joins, and meets for the default group. Only rank 0 reads every rank's record. No wait lasts until a poll."""
    monkeypatch.setattr(waiting, "SLICE_SECONDS", LIMIT)
    monkeypatch.setattr(assemble, "_LOOK_SECONDS", LIMIT)
    store = FourOperations()

    def start(rank: int) -> list[Member]:
        members = join(store, rank, size, "shm", LIMIT)
        with GroupMeeting(store, members, rank, LIMIT, "meeting") as meeting:
            assert meeting.assemble(rank) == list(range(size))
        return members

    for members in in_threads(*(partial(start, rank) for rank in range(size))):
        assert [(member.rank, member.pid) for member in members] == [
            (rank, os.getpid()) for rank in range(size)
        ]
    assert store.asked == {"set": 2 * size + 3, "add": 2 * size + 2, "get": 5 * size - 3}


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0), (0, -1)])
def test_a_rank_out_of_range_is_refused_before_anything(store: HashStore, rank: int, world_size: int) -> None:
    with pytest.raises(UsageError):
        join(store, rank, world_size, "shm", 1)
    assert store.num_keys() == 0


def test_a_rank_claimed_twice_names_both_on_all(processes) -> None:
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        ranks = [processes.start(JOIN, store.port, rank, 3, "shm") for rank in (0, 1, 1)]
        outputs = processes.outputs(ranks)
    for output in outputs:
        assert "UsageError rank 1 is claimed by two processes" in output
        assert all(f"pid {rank.pid} on " in output for rank in ranks[1:])


def test_a_second_join_of_one_process_is_named(store: HashStore) -> None:
    with pytest.raises(StoreTimeoutError):
        join(store, 1, 2, "shm", 0.1)
    with pytest.raises(UsageError, match=rf"rank 1 \({WHERE}\) joins for the second time"):
        join(store, 1, 2, "shm", 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([(0, 2, "shm"), (1, 3, "shm"), (2, 3, "shm")], "disagree about the world size: .* has .*, .* has ."),
        ([(0, 3, "shm"), (1, 2, "shm")], "disagree about the world size"),
        ([(1, 4, "shm"), (2, 5, "shm")], "disagree about the world size"),
        ([(0, 2, "shm"), (1, 2, "tcp")], r"disagree about the backend: rank . \(.*\) has \w+, rank"),
    ],
)
def test_terms_that_differ_name_both_on_all(store: HashStore, arguments, message: str, in_threads) -> None:
    results = in_threads(*(partial(join, store, *each, LIMIT) for each in arguments))
    for error in results:
        assert isinstance(error, UsageError), error
        assert re.search(message, str(error))


def test_rank_0_finds_a_registered_rank_that_differs(store: HashStore) -> None:
    """That rank has not published yet that it differs."""
    first, other = Member.here(2, 3, "shm"), Member.here(1, 3, "tcp")
    store.multi_set(["join/terms", "join/member/2"], [first.to_bytes()] * 2)
    store.set("join/member/1", other.to_bytes())
    with pytest.raises(UsageError, match=r"backend: rank 2 \(.*\) has shm, rank 1 \(.*\) has tcp"):
        join(store, 0, 3, "shm", LIMIT)


def test_versions_that_differ(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.set("join/terms", dataclasses.replace(Member.here(1, 2, "shm"), version="0.0.1").to_bytes())
    with pytest.raises(UsageError, match=r"disagree about the version: rank 1 \(.*\) has 0.0.1, rank 0"):
        join(store, 0, 2, "shm", LIMIT)


def test_a_missing_rank_is_named_in_a_warning_and_the_error(
    store: HashStore, in_threads, clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FASTCOLL_WARN_AFTER", "300")
    joins = [partial(join, store, rank, 5, "shm", 600) for rank in (0, 1, 3)]

    def let_time_pass() -> list[str]:
        await_value(store, "join/missing", b"2, 4")
        return clock.warnings_after(400, caplog, len(joins), 400)

    *errors, warned = in_threads(*joins, let_time_pass)
    for error in errors:
        assert isinstance(error, StoreTimeoutError)
        assert "not all of 5 ranks came within 600 s; missing: 2, 4" in str(error)
    assert len(warned) == 3
    assert all("2, 4" in message for message in warned), warned


@pytest.mark.parametrize(("came", "warn"), [([0, 1, 2], [0]), ([1, 2], [1, 2])])
def test_of_many_ranks_only_rank_0_warns_once_it_has_come(
    store: HashStore,
    in_threads,
    clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    came: list[int],
    warn: list[int],
) -> None:
    monkeypatch.setenv("FASTCOLL_WARN_AFTER", "300")
    joins = [partial(join, store, rank, 33, "shm", 600) for rank in came]

    def let_time_pass() -> list[str]:
        if came[0] == 0:
            store.wait(["join/missing"])
        return clock.warnings_after(400, caplog, len(joins), 400, len(warn))

    *errors, warned = in_threads(*joins, let_time_pass)
    assert all(isinstance(error, StoreTimeoutError) for error in errors), errors
    said = sorted({each.message for each in caplog.records if "has waited" in each.message} | set(warned))
    assert [each.partition(" (pid")[0] for each in said] == [f"joining as rank {rank}" for rank in warn]


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_registered_rank_that_is_killed_is_named(processes, in_threads, victim: int) -> None:
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        others = [rank for rank in range(3) if rank != victim]
        dying = processes.start(JOIN, store.port, victim, 4, "shm")
        store.wait([f"join/member/{victim}"])  # so it has written the terms
        waiting = [processes.start(JOIN, store.port, rank, 4, "shm") for rank in others]
        store.wait([f"join/member/{rank}" for rank in others])
        dying.kill()
        outputs = processes.outputs(waiting)
    for output in outputs:
        assert "PeerDiedError" in output
        assert output.endswith(f": rank {victim} (pid {dying.pid} on {os.uname().nodename}) died")


def test_a_death_that_may_follow_from_the_loss_of_the_store_is_told_with_it(processes) -> None:
    source = "from fastcoll.system.processes import Member\nprint(Member.here(1, 4, 'shm').to_bytes().hex())"
    first = processes.start(source)
    terms = bytes.fromhex(first.stdout.readline())
    first.wait()

    class Lost(HashStore):
        def fetch(self, keys: Any, timeout: Any = None) -> list[bytes]:
            raise StoreError("the store at a:1 is gone")

    store = Lost()
    store.set("join/terms", terms)
    said = r"^joining as rank 2 .*: rank 1 \(pid .*\) died; the store is lost, too: the store at a:1 is gone$"
    with pytest.raises(PeerDiedError, match=said):
        join(store, 2, 4, "shm", LIMIT)


@pytest.fixture
def join_clock(clock, monkeypatch: pytest.MonkeyPatch):
    """Return a clock whose steps do not make a request late that the store answers meanwhile."""
    monkeypatch.setattr(tcp_store, "GRACE_SECONDS", 1e6)
    return clock


def time_out(store: Store, missing: bytes, clock) -> None:
    """Let the time of a join pass, once rank 0 has published which ranks are missing."""
    await_value(store, "join/missing", missing)
    clock.ahead += 1000


def test_a_failed_join_releases_the_pidfds(processes, in_threads, join_clock) -> None:
    gc.collect()  # what earlier tests have left in cycles does not count
    before = pidfds()
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        processes.start(JOIN, store.port, 1, 3, "shm")
        store.wait(["join/member/1"])
        error, _ = in_threads(
            partial(join, store, 0, 3, "shm", 600), partial(time_out, store, b"2", join_clock)
        )
        assert isinstance(error, StoreTimeoutError)
        assert "missing: 2" in str(error)
        assert pidfds() == before


def test_garbage_under_our_keys_is_an_error() -> None:
    for rank, key, value, what in (
        (0, "join/end", "F{}", "the error of the failed meeting"),
        (0, "join/member/1", "nonsense", "registration"),
        (1, "join/end", "Lnonsense", ""),
    ):
        with HashStore() as store:
            store.set(key, value)
            with pytest.raises(StoreError, match=f"{what} cannot be read"):
                join(store, rank, 2, "shm", 5)


@pytest.mark.parametrize(("crowd", "slices"), [(1, 0.25), (250, 0.25), (1000, 1.0), (10_000, 10.0)])
def test_more_waiting_ranks_poll_less_often(crowd: int, slices: float) -> None:
    """The key is set once the rank has polled twice."""
    waits, looks = list[float](), list[int]()

    class Late(HashStore):
        def fetch(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> list[bytes]:
            assert isinstance(timeout, timedelta)
            waits.append(timeout.total_seconds())
            if len(waits) < 3:
                raise StoreTimeoutError("not yet")
            return []

    fetch_for(Late(), ["k"], [], 1000, "testing", lambda: looks.append(1), crowd=crowd)
    assert waits == [slices] * 3
    assert len(looks) == 2


class Stalled(HashStore):
    """A store whose server does not answer the first `requests` requests."""

    def __init__(self, requests: float) -> None:
        super().__init__()
        self.left = requests

    def _ask(self, request: StoreRequest) -> list[bytes] | Missing:
        if self.left > 0:
            self.left -= 1
            raise StalledError("no answer")
        return super()._ask(request)


def test_fetch_for_retries_while_the_store_is_stopped() -> None:
    store = Stalled(3)
    looks: list[object] = []

    def look() -> None:
        looks.append(store.peek(["other"], 0))
        if len(looks) == 1:
            store.left = 3  # it stops again, during `look`
        else:
            store.set("k", b"v")

    assert fetch_for(store, ["k"], [], 60, "testing", look) == [b"v"]
    assert len(looks) == 2


def test_fetch_for_names_its_purpose_and_what_is_missing_or_that_the_store_is_stopped(
    store: HashStore,
) -> None:
    with pytest.raises(StalledError, match=r"testing: .*no answer"):
        fetch_for(Stalled(math.inf), ["k"], [], 0.0, "testing")
    store.set("a", "")
    with pytest.raises(StoreTimeoutError, match=r"making group 3: 'b' did not come within 0 s"):
        fetch_for(store, ["a", "b"], [], 0.0, "making group 3")


def test_fetch_for_detects_a_members_death(processes) -> None:
    process = processes.start(IDLE)
    member = member_of(process, rank=2, world_size=3)
    died = rf"making a group: rank 2 \(pid {process.pid} on .*\) died"
    with HashStore() as store, pytest.raises(PeerDiedError, match=died) as caught:
        fetch_for(store, ["never"], [Member.here(0, 3, "shm"), member], 60, "making a group", process.kill)
    assert caught.value.ranks == (2,)


def test_fetch_for_returns_keys_that_a_member_set_before_it_died(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process did not see them earlier, as it waited for a core or for the store."""
    member = Member.here(1, 2, "shm")
    monkeypatch.setattr(waiting, "SLICE_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "gone_among", lambda _: {member: None})
    got = fetch_for(store, ["a"], [member], LIMIT, "testing", lambda: store.set("a", "last"))
    assert got == [b"last"]


def test_fetch_for_names_dead_members_for_a_lost_store(processes, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
import sys
from fastcoll.system.processes import Member
from fastcoll.store import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True)
store.set("server", Member.here(0, 2, "shm").to_bytes())
print(store.port, flush=True)
sys.stdin.readline()
"""
    server = processes.start(source)
    with TCPStore("127.0.0.1", int(server.stdout.readline())) as store:
        member = Member.from_bytes(store.get("server"))
        monkeypatch.setattr(waiting, "_DYING_SECONDS", 60.0)
        with pytest.raises(PeerDiedError, match="rank 0") as caught:
            fetch_for(store, ["never"], [member], 60, "making a group", server.kill)
        assert isinstance(caught.value.__cause__, StoreError)
        monkeypatch.setattr(waiting, "_DYING_SECONDS", 0.0)
        with pytest.raises(StoreError, match="is gone"):
            fetch_for(store, ["never"], [], 60, "making a group")


def test_hosts_with_another_secret_are_named(in_threads, join_clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCOLL_SECRET", "one")
    config.forget()
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        monkeypatch.setenv("FASTCOLL_SECRET", "another")
        config.forget()
        with pytest.raises(StoreError, match="another secret"):
            TCPStore("127.0.0.1", store.port)
        until(serving.turned_away)  # the server's thread has seen it
        error, _ = in_threads(
            partial(join, store, 0, 2, "tcp", 600), partial(time_out, store, b"1", join_clock)
        )
    assert isinstance(error, StoreTimeoutError)
    text = r"missing: 1 \(turned away: from 127.0.0.1: it refused .* secret differs.* FASTCOLL_SECRET"
    assert re.search(text, str(error))
    assert not serving.turned_away()
    config.forget()
