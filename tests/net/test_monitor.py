"""What a rank makes of its control connections: notices, ends with and without one, and who is to blame."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fastcoll.core import processes
from fastcoll.core.monitor import FAILED, LEFT, Wait
from fastcoll.core.processes import Member
from fastcoll.errors import AbortedError, CollectiveTimeoutError, PeerDiedError
from fastcoll.net.tcp import control as control_module
from fastcoll.net.tcp.control import NOTICE_SIZE, Control, NetMonitor, Notice
from net.meshes import crew, elsewhere, nothing_left

FIRST_RANK = 10  # global ranks differ from group ranks


class Network:
    """n ranks of which every two have a control connection; none can see another's process."""

    def __init__(self, n: int) -> None:
        members = [replace(elsewhere(each), rank=FIRST_RANK + each.rank) for each in crew(n)]
        self.controls = [Control(n) for _ in range(n)]
        self.monitors = [NetMonitor(members, rank, self.controls[rank]) for rank in range(n)]
        self.ends: dict[tuple[int, int], socket.socket] = {}
        for a in range(n):
            for b in range(a):
                self.connect(a, b)

    def connect(self, a: int, b: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            mine = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        for rank, peer, end in ((a, b, mine), (b, a, theirs)):
            end.setblocking(False)
            self.ends[rank, peer] = end
            self.controls[rank].add(peer, end)

    def kill(self, rank: int, reset: bool = False) -> None:
        """The end of a process: its connections close without a word."""
        for (mine, _), end in self.ends.items():
            if mine == rank:
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.close()

    def verdict(self, rank: int, needed: tuple[int, ...] = ()):  # type: ignore[no-untyped-def]
        self.controls[rank].look(again=True)
        return self.monitors[rank].verdict(needed, "all_reduce, call 7")

    def close(self) -> None:
        for end in self.ends.values():
            end.close()


@pytest.fixture
def network() -> Iterator[Network]:
    with nothing_left(), contextlib.closing(Network(3)) as made:
        yield made


def test_nothing_is_wrong_at_first(network: Network) -> None:
    assert [network.verdict(rank, (0, 1, 2)) for rank in range(3)] == [None] * 3


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_ends_without_a_word_is_a_death(network: Network, reset: bool) -> None:
    network.kill(2, reset)
    for rank in (0, 1):
        found = network.verdict(rank)
        assert isinstance(found, PeerDiedError)
        assert found.ranks == (FIRST_RANK + 2,)
        assert re.search(r"rank 12 \(pid \d+ on far\)", str(found))
        assert "died or lost its connection" in str(found)
        assert str(found).endswith("; all_reduce, call 7")


def test_a_half_closed_connection_is_one_too(network: Network) -> None:
    network.ends[2, 0].shutdown(socket.SHUT_WR)
    assert isinstance(network.verdict(0), PeerDiedError)
    assert network.verdict(1) is None


def test_who_left_in_order_is_missed_only_where_needed(network: Network) -> None:
    network.monitors[2].leave()
    network.controls[2].close()
    assert network.verdict(0, (1,)) is None
    assert network.monitors[0].has_left(2)
    assert not network.monitors[0].has_left(1)
    found = network.verdict(0, (1, 2))
    assert isinstance(found, AbortedError)
    assert (found.ranks, "rank 12" in str(found), "left the group" in str(found)) == ((12,), True, True)


def test_leaving_while_notices_are_unread_is_no_reset(network: Network) -> None:
    """A socket that is closed with unread data resets its connection, and what it sent may be lost."""
    network.monitors[0].leave()
    network.monitors[2].leave()
    network.controls[2].close()
    assert network.verdict(0) is None
    assert network.monitors[0].has_left(2)
    assert network.controls[0].lost == {2: "it closed the connection"}


def test_an_abort_is_told_with_its_reason(network: Network) -> None:
    network.monitors[1].fail(AbortedError("rank 11 aborted the group: no more money"))
    network.kill(1)
    for rank in (0, 2):
        found = network.verdict(rank)
        assert isinstance(found, AbortedError)
        assert re.search(r"rank 11 \(pid \d+ on far\)", str(found))
        assert "no more money; all_reduce, call 7" in str(found)
        assert found.ranks == (11,)


def test_a_rank_that_came_too_late_is_blamed_and_not_who_noticed(network: Network) -> None:
    network.monitors[0].fail(CollectiveTimeoutError("barrier: rank 12 did not arrive within 3 s", [12]))
    network.controls[0].close()
    for rank, kind in ((1, CollectiveTimeoutError), (2, AbortedError)):  # a timeout for all but the late
        found = network.verdict(rank)
        assert type(found) is kind
        assert found.ranks == (12,)
        assert re.search(r"rank 10 \(pid \d+ on far\)", str(found))
        assert "rank 12 did not arrive within 3 s" in str(found)


def test_survivors_that_are_gone_first_hide_nobody(network: Network) -> None:
    """Rank 1 sees the death of 2, fails and goes, before 0 looks, whose connection with 2 still stands."""
    network.ends[2, 1].close()
    seen = network.verdict(1)
    network.monitors[1].fail(seen)
    network.controls[1].close()
    found = network.verdict(0)
    assert isinstance(found, PeerDiedError)
    assert found.ranks == (12,)
    assert re.search(r"rank 12 \(pid \d+ on far\)", str(found))
    assert "rank 11" not in str(found)
    network.kill(2)
    assert network.verdict(0).ranks == (12,)


def test_a_death_is_told_on_to_ranks_that_cannot_see_it() -> None:
    with nothing_left(), contextlib.closing(Network(0)) as network:
        network.__init__(0)  # type: ignore[misc]
        members = [replace(elsewhere(each), rank=FIRST_RANK + each.rank) for each in crew(5)]
        network.controls = [Control(5) for _ in range(5)]
        network.monitors = [NetMonitor(members, rank, network.controls[rank]) for rank in range(5)]
        for rank in range(4):  # a line
            network.connect(rank, rank + 1)
        network.kill(4)
        texts = []
        for rank in (3, 2, 1, 0):
            found = network.verdict(rank)
            assert isinstance(found, PeerDiedError), rank
            assert found.ranks == (14,)
            texts.append(str(found))
            network.monitors[rank].fail(found)
            network.controls[rank].close()
        assert max(map(len, texts)) < 200, "each passes on what it heard, without wrapping it up"


def test_an_abort_is_told_on_as_it_was() -> None:
    with nothing_left():
        members = [replace(elsewhere(each), rank=FIRST_RANK + each.rank) for each in crew(4)]
        network = Network(0)
        network.controls = [Control(4) for _ in range(4)]
        network.monitors = [NetMonitor(members, rank, network.controls[rank]) for rank in range(4)]
        for rank in range(3):
            network.connect(rank, rank + 1)
        network.monitors[3].fail(AbortedError("enough", [13]))
        for rank in (2, 1, 0):
            found = network.verdict(rank)
            assert isinstance(found, AbortedError)
            assert str(found) == f"{members[3]} failed the group: enough; all_reduce, call 7"
            network.monitors[rank].fail(found)
        network.close()


def test_who_connects_late_hears_what_was_said(network: Network) -> None:
    with nothing_left():
        late = Network(0)
        late.controls = [Control(2), Control(2)]
        members = [elsewhere(each) for each in crew(2)]
        late.monitors = [NetMonitor(members, rank, late.controls[rank]) for rank in range(2)]
        late.monitors[0].fail(AbortedError("gone"))
        late.connect(0, 1)
        assert "gone" in str(late.verdict(1))
        late.close()


def test_a_broken_data_connection_counts_unless_the_rank_says_why(network: Network) -> None:
    network.monitors[0].lost(2, "it closed the data connection")
    assert isinstance(network.verdict(0), PeerDiedError)
    assert "it closed the data connection" in str(network.verdict(0))
    network.monitors[2].leave()
    network.controls[0].look(again=True)
    assert network.verdict(0) is None
    assert network.monitors[0].has_left(2)


def test_the_first_failure_stays(network: Network) -> None:
    first = AbortedError("first")
    network.monitors[0].fail(first)
    network.monitors[0].fail(AbortedError("second"))
    network.kill(2)
    assert network.verdict(0) is first
    network.controls[1].look(again=True)
    assert network.controls[1].heard[0].text == "first"


def test_a_notice_may_come_in_pieces(network: Network) -> None:
    data = Notice(LEFT, 2).to_bytes()
    for place in range(0, NOTICE_SIZE, 100):
        assert not network.monitors[0].has_left(2)
        network.ends[2, 0].send(data[place : place + 100])
        network.controls[0].look(again=True)
    assert network.monitors[0].has_left(2)


@pytest.mark.parametrize("data", [b"x" * NOTICE_SIZE, b"\xff" * 4000, Notice(FAILED, 0).to_bytes()[:-1]])
def test_what_is_no_notice_ends_the_connection(network: Network, data: bytes) -> None:
    network.ends[2, 0].send(data)
    network.ends[2, 0].close()
    assert isinstance(network.verdict(0), PeerDiedError)


def test_looks_are_rare_unless_asked_for(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "_LOOK_AGAIN_SECONDS", 60.0)
    network.controls[0].look(again=True)
    network.monitors[2].leave()
    assert not network.monitors[0].has_left(2)
    network.controls[0].look(again=True)
    assert network.monitors[0].has_left(2)


def test_a_look_in_the_middle_of_another_does_no_harm(network: Network) -> None:
    """As from a signal handler, or another thread: it returns and finds what is known."""
    control = network.controls[0]
    control._looking = True
    network.monitors[2].leave()
    control.look(again=True)
    assert not network.monitors[0].has_left(2)
    control._looking = False
    with control._lock:
        thread = threading.Thread(target=control.look, args=(True,))
        thread.start()
        thread.join(10)
        assert not thread.is_alive()


def test_a_process_in_sight_that_was_killed() -> None:
    """It is dead, whatever its connection says, and named so."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        me = Member.here(0, 2, "tcp")
        other = replace(me, rank=1, pid=child.pid, start_time=int(processes.status_of(child.pid)[19]))
        monitor = NetMonitor([me, other], 0, Control(2))
        assert monitor.verdict([1], "testing") is None
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        found = monitor.verdict([1], "testing")
        assert isinstance(found, PeerDiedError)
        assert str(found) == f"{other} died; testing"
        processes.forget([me, other])
    finally:
        child.kill()
        child.communicate()


def test_a_process_in_sight_that_left_before_it_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    me = Member.here(0, 2, "tcp")
    other = replace(me, rank=1, pid=child.pid, start_time=int(processes.status_of(child.pid)[19]))
    control = Control(2)
    monitor = NetMonitor([me, other], 0, control)
    assert monitor.verdict([], "testing") is None
    child.communicate(b"\n")
    control.heard[1] = Notice(LEFT, 1)
    assert monitor.verdict([], "testing") is None
    assert isinstance(monitor.verdict([1], "testing"), AbortedError)
    processes.forget([me, other])


def test_a_wait_raises_what_the_monitor_finds(network: Network) -> None:
    wait = Wait(network.monitors[0], "barrier", lambda: [1, 2], 30.0)
    wait.look()
    network.kill(2)
    network.controls[0].look(again=True)
    wait.look()  # once more for what was sent before
    with pytest.raises(PeerDiedError, match=r"rank 12 .* barrier, waiting for rank 11"):
        wait.look()
