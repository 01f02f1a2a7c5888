"""A rank's decisions from its control connections: notices, ends with and without one, and whom it blames."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages.worlds import tcp_pair

from fastcoll.core.monitor import FAILED, LEAVING, LEFT, Wait
from fastcoll.errors import AbortedError, CollectiveTimeoutError, PeerDiedError
from fastcoll.rendezvous import control as control_module
from fastcoll.rendezvous.control import (
    MOST_RANKS,
    NOTICE_SIZE,
    TEXT_BYTES,
    WAITING,
    Control,
    NetMonitor,
    Notice,
    NoticeError,
)
from fastcoll.system import processes
from fastcoll.system.processes import Member
from net.meshes import crew, elsewhere, nothing_left, until

FIRST_RANK = 10  # global ranks differ from group ranks


class Network:
    """n ranks, none of which can see another's process; `pairs` have control connections, or else every two."""

    def __init__(self, n: int, pairs: Iterable[tuple[int, int]] | None = None) -> None:
        self.members = [replace(elsewhere(each), rank=FIRST_RANK + each.rank) for each in crew(n)]
        self.controls = [Control(n) for _ in range(n)]
        self.monitors = [NetMonitor(self.members, rank, self.controls[rank]) for rank in range(n)]
        self.ends: dict[tuple[int, int], socket.socket] = {}
        for a, b in combinations(range(n), 2) if pairs is None else pairs:
            self.connect(a, b)

    def connect(self, a: int, b: int) -> None:
        for rank, peer, end in zip((a, b), (b, a), tcp_pair(), strict=True):
            end.setblocking(False)
            self.ends[rank, peer] = end
            self.controls[rank].add(peer, end)

    def kill(self, rank: int, how: str = "close") -> None:
        """End a process: its connections end without a notice."""
        for (mine, _), end in self.ends.items():
            if mine == rank and how == "half-close":
                end.shutdown(socket.SHUT_WR)
            elif mine == rank:
                if how == "reset":
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.close()

    def decide(self, rank: int, *needed: int) -> Any:
        """Return a rank's decision from what has arrived."""
        self.controls[rank].look(again=True)
        return self.monitors[rank].decide(needed, "all_reduce, call 7")

    def failure(self, rank: int, *needed: int) -> Any:
        """Return the failure that a rank finds."""
        return until(lambda: self.decide(rank, *needed))

    def death(self, rank: int, dead: int) -> str:
        """Return the text of the failure that a rank finds, which must be the death of another."""
        found = self.failure(rank)
        assert isinstance(found, PeerDiedError)
        assert found.ranks == (FIRST_RANK + dead,)
        assert re.search(rf"rank {FIRST_RANK + dead} \(pid \d+ on far\)", str(found))
        return str(found)

    def await_left(self, rank: int, peer: int) -> None:
        """Wait until a rank knows that another has left, which is no failure."""
        until(lambda: self.decide(rank) or self.monitors[rank].has_left(peer))
        assert self.decide(rank) is None

    def close(self) -> None:
        for end in self.ends.values():
            end.close()


@pytest.fixture
def network() -> Iterator[Network]:
    with nothing_left(), contextlib.closing(Network(3)) as made:
        yield made


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
def test_a_connection_that_ends_without_a_notice_is_a_death(network: Network, how: str) -> None:
    assert [network.decide(rank, 0, 1, 2) for rank in range(3)] == [None] * 3
    network.kill(2, how)
    for rank in (0, 1):
        text = network.death(rank, 2)
        assert "died or lost its connection" in text
        assert text.endswith("; all_reduce, call 7")


def test_a_rank_that_left_is_an_error_only_where_it_is_needed(network: Network) -> None:
    network.monitors[2].leave()
    network.controls[2].close()
    network.await_left(0, 2)
    assert network.decide(0, 1) is None
    assert not network.monitors[0].has_left(1)
    found = network.decide(0, 1, 2)
    assert isinstance(found, AbortedError)
    assert (found.ranks, "rank 12" in str(found), "left the group" in str(found)) == ((12,), True, True)


def test_leaving_while_notices_are_unread_is_no_reset(network: Network) -> None:
    """A socket that is closed with unread data resets its connection, and sent data may be lost."""
    network.monitors[0].leave()
    network.monitors[2].leave()
    network.controls[2].close()
    network.await_left(0, 2)
    until(lambda: network.decide(0) or network.controls[0].lost)
    assert network.controls[0].lost == {2: "it closed the connection"}


def test_an_abort_carries_its_reason(network: Network) -> None:
    network.monitors[1].fail(AbortedError("rank 11 aborted the group: no more money"))
    network.kill(1)
    for rank in (0, 2):
        found = network.failure(rank)
        assert isinstance(found, AbortedError)
        assert re.search(r"rank 11 \(pid \d+ on far\)", str(found))
        assert "no more money; all_reduce, call 7" in str(found)
        assert found.ranks == (11,)


def test_a_late_rank_is_blamed_and_not_the_rank_that_noticed(network: Network) -> None:
    network.monitors[0].fail(CollectiveTimeoutError("barrier: rank 12 did not arrive within 3 s", [12]))
    network.controls[0].close()
    # A timeout on all ranks except the late one.
    for rank, kind in ((1, CollectiveTimeoutError), (2, AbortedError)):
        found = network.failure(rank)
        assert type(found) is kind
        assert found.ranks == (12,)
        assert re.search(r"rank 10 \(pid \d+ on far\)", str(found))
        assert "rank 12 did not arrive within 3 s" in str(found)


def test_a_rank_that_is_taken_for_dead_does_not_name_itself(network: Network) -> None:
    """Packets are lost in one direction: the others declare this rank dead, and it reads their notice."""
    network.monitors[1].fail(PeerDiedError("rank 10 died", [10]))
    found = network.failure(0)
    assert type(found) is AbortedError
    assert re.search(r"rank 11 .* failed the group: rank 10 died", str(found))
    network.monitors[2].fail(PeerDiedError("rank 11 died", [11]))
    until(lambda: isinstance(network.decide(0), PeerDiedError))
    assert network.decide(0).ranks == (11,)


def test_a_survivor_that_leaves_first_hides_no_death(network: Network) -> None:
    """Rank 1 sees the death of 2, fails and leaves, before 0 looks, whose connection with 2 is still open."""
    network.ends[2, 1].close()
    network.monitors[1].fail(network.failure(1))
    network.controls[1].close()
    assert "rank 11" not in network.death(0, 2)
    network.kill(2)
    network.death(0, 2)


def test_a_death_and_an_abort_are_passed_on_to_ranks_that_cannot_see_them() -> None:
    """Each forwards the notice that it received, without wrapping it up."""
    with nothing_left(), contextlib.closing(Network(5, pairwise(range(5)))) as network:
        network.kill(4)
        for rank in (3, 2, 1, 0):
            assert len(network.death(rank, 4)) < 200
            network.monitors[rank].fail(network.decide(rank))
            network.controls[rank].close()
    with nothing_left(), contextlib.closing(Network(4, pairwise(range(4)))) as network:
        network.monitors[3].fail(AbortedError("enough", [13]))
        for rank in (2, 1, 0):
            found = network.failure(rank)
            assert isinstance(found, AbortedError)
            assert str(found) == f"{network.members[3]} failed the group: enough; all_reduce, call 7"
            network.monitors[rank].fail(found)


def test_a_late_connection_receives_earlier_notices() -> None:
    with nothing_left(), contextlib.closing(Network(2, [])) as network:
        network.monitors[0].fail(AbortedError("gone"))
        network.connect(0, 1)
        assert "gone" in str(network.failure(1))


def test_a_rank_that_is_leaving_may_still_leave_or_fail(network: Network) -> None:
    network.monitors[1].start_to_leave()
    network.monitors[2].start_to_leave()
    assert network.decide(0) is None
    network.monitors[1].leave()
    received = network.controls[0].received
    until(lambda: network.decide(0) or (1 in received and received[1].state == LEFT))
    network.monitors[2].fail(AbortedError("not in order"))
    assert "not in order" in str(network.failure(0))


def test_a_broken_data_connection_is_a_death_without_a_notice(network: Network) -> None:
    network.monitors[0].lost(2, "it closed the data connection")
    assert "it closed the data connection" in network.death(0, 2)
    network.monitors[2].leave()
    until(lambda: network.decide(0) is None)
    assert network.monitors[0].has_left(2)


def test_the_first_failure_stays(network: Network) -> None:
    first = AbortedError("first")
    network.monitors[0].fail(first)
    network.monitors[0].fail(AbortedError("second"))
    network.kill(2)
    until(lambda: network.decide(0) and network.controls[0].lost)
    assert network.decide(0) is first
    until(lambda: network.decide(1) and 0 in network.controls[1].received)
    assert network.controls[1].received[0].text == "first"


def test_a_notice_may_arrive_in_parts(network: Network) -> None:
    data = Notice(LEFT, 2).to_bytes()
    for offset in range(0, NOTICE_SIZE, 100):
        assert not network.monitors[0].has_left(2)
        network.ends[2, 0].send(data[offset : offset + 100])
        network.controls[0].look(again=True)
    network.await_left(0, 2)


def test_all_late_ranks_of_a_large_group_are_passed_on() -> None:
    notice = Notice(FAILED, 0, tuple(range(40)), late=True)
    assert Notice.from_bytes(notice.to_bytes(), 40).ranks == tuple(range(40))


def test_a_signal_handler_may_close_the_connections_during_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(data: bytes, size: int) -> Notice:
        control.close()
        raise NoticeError("the last one")

    monkeypatch.setattr(Notice, "from_bytes", interrupted)
    ours, theirs = socket.socketpair()
    control = Control(2)
    with ours, theirs:
        control.add(1, ours)
        theirs.send(bytes(NOTICE_SIZE))
        control.look(again=True)
    assert control.lost == {}


@pytest.mark.parametrize("data", [b"x" * NOTICE_SIZE, b"\xff" * 4000, Notice(FAILED, 0).to_bytes()[:-1]])
def test_an_invalid_notice_ends_the_connection(network: Network, data: bytes) -> None:
    network.ends[2, 0].send(data)
    network.ends[2, 0].close()
    network.death(0, 2)


def test_a_poll_soon_after_another_or_within_it_is_harmless(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within it as from a signal handler, or another thread: it returns, and sees the notices read so far."""
    monkeypatch.setattr(control_module, "_LOOK_AGAIN_SECONDS", 1e9)
    control = network.controls[0]
    control.look(again=True)
    network.monitors[2].leave()
    assert not network.monitors[0].has_left(2)  # asked without `again`, it does not read
    control._looking = True
    control.look(again=True)
    assert not network.monitors[0].has_left(2)
    control._looking = False
    with control._lock:
        thread = threading.Thread(target=control.look, args=(True,))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    network.await_left(0, 2)


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[bytes], list[Member]]]:
    """A visible process, and two members, of which it is the second."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    me, born = Member.here(0, 2, "tcp"), int(processes.status_of(process.pid)[19])
    members = [me, replace(me, rank=1, pid=process.pid, start_time=born)]
    yield process, members
    process.kill()
    process.communicate()
    processes.forget(members)


def test_a_visible_process_that_was_killed(child: tuple[subprocess.Popen[bytes], list[Member]]) -> None:
    """It is dead, whatever its connection shows, and named so."""
    process, members = child
    monitor = NetMonitor(members, 0, Control(2))
    assert monitor.decide([1], "testing") is None
    process.kill()
    process.wait()
    found = monitor.decide([1], "testing")
    assert isinstance(found, PeerDiedError)
    assert str(found) == f"{members[1]} died; testing"


def test_a_visible_process_that_cannot_say_that_it_left_is_not_taken_for_dead(
    child: tuple[subprocess.Popen[bytes], list[Member]],
) -> None:
    """In large groups, only some peers have a control connection with this rank."""
    process, members = child
    control = Control(2)
    monitor = NetMonitor(members, 0, control)
    monitor.hears_all = False
    process.communicate(b"\n")
    assert monitor.decide([1], "testing") is None
    control.peers.add(1)
    assert isinstance(monitor.decide([1], "testing"), PeerDiedError)


def test_a_visible_process_that_left_before_it_ended(
    child: tuple[subprocess.Popen[bytes], list[Member]],
) -> None:
    process, members = child
    control = Control(2)
    monitor = NetMonitor(members, 0, control)
    assert monitor.decide([], "testing") is None
    process.communicate(b"\n")
    control.received[1] = Notice(LEFT, 1)
    assert monitor.decide([], "testing") is None
    assert isinstance(monitor.decide([1], "testing"), AbortedError)


def test_a_wait_raises_the_decision_of_the_monitor(network: Network) -> None:
    wait = Wait(network.monitors[0], "barrier", lambda: [1, 2], 30.0)
    wait.look()
    network.kill(2)
    network.death(0, 2)
    wait.look()  # a second time, for data that was sent before
    with pytest.raises(PeerDiedError, match=r"rank 12 .* barrier, waiting for rank 11"):
        wait.look()


# ---- notices as bytes ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.sampled_from([LEFT, FAILED, LEAVING]),
    st.integers(0, 7),
    st.lists(st.integers(0, 2**32 - 1), max_size=MOST_RANKS),
    st.sampled_from([(False, False), (True, False), (False, True)]),
    st.text(
        "a\n\0é€𝄞", max_size=200
    ),  # of one to four bytes; Hypothesis takes seconds to list all characters
)
def test_notices_survive_encoding(
    state: int, origin: int, ranks: list[int], what: tuple[bool, bool], text: str
) -> None:
    notice = Notice(state, origin, tuple(ranks), *what, text)
    data = notice.to_bytes()
    assert len(data) == NOTICE_SIZE
    assert Notice.from_bytes(data, 8) == notice


def test_a_notice_that_a_rank_waits_survives_encoding() -> None:
    notice = Notice(WAITING, 3, number=1 << 60)
    assert Notice.from_bytes(notice.to_bytes(), 8) == notice


def test_long_texts_and_many_ranks_are_cut() -> None:
    notice = Notice.from_bytes(Notice(FAILED, 0, tuple(range(99)), text="é" * 2000).to_bytes(), 8)
    assert notice.ranks == tuple(range(MOST_RANKS))
    assert notice.text == "é" * (TEXT_BYTES // 2)


@settings(deadline=None)
@given(st.binary(min_size=NOTICE_SIZE, max_size=NOTICE_SIZE))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(NoticeError):
        Notice.from_bytes(data, 8)


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (8, b"\0"),
        (8, b"\4"),  # without a number
        (8, b"\5"),
        (9, b"\3"),
        (10, b"\0\x41"),
        (12, b"\0\0\0\x08"),
        (16, b"\xff\xff\xff\xff"),
        (20, b"\1"),
        (28, b"\1"),
    ],
)
def test_every_field_has_its_bounds(offset: int, value: bytes) -> None:
    data = Notice(FAILED, 1, (1,), text="x").to_bytes()
    with pytest.raises(NoticeError, match="not a notice"):
        Notice.from_bytes(data[:offset] + value + data[offset + len(value) :], 8)
