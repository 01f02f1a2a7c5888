"""Connections to a listener other than the group's: they are dropped, logged once, and keep no rank out."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from net.dialing import is_dropped, proof_of
from net.meshes import nothing_left, until

from fastcoll import config
from fastcoll.errors import ResourceError, UsageError
from fastcoll.rendezvous import listener as listening
from fastcoll.rendezvous.dials import Dial, dial_all
from fastcoll.rendezvous.listener import Listener, acquire, release
from fastcoll.store.opening import (
    OPENING_SIZE,
    ConnectionKind,
    Dialing,
    Endpoint,
    Opening,
    OpeningResult,
    Role,
)
from fastcoll.system.interfaces import Interface

LO = Interface("lo", "127.0.0.1")
KEY = b"k" * 32
SEATS = [Endpoint(b"g" * 16, rank, 2, KEY, False) for rank in range(2)]


@pytest.fixture
def arrived() -> list[tuple[Opening, socket.socket]]:
    return []


@pytest.fixture
def listener(arrived: list[tuple[Opening, socket.socket]]) -> Iterator[Listener]:
    """Return a listener on which rank 1 waits for rank 0."""
    with nothing_left():
        made = acquire([LO])
        made.join(SEATS[1], lambda opening, connection: arrived.append((opening, connection)), 300)
        yield made
        release(made)
        for _, connection in arrived:
            connection.close()


def comes_through(listener: Listener, arrived: list[tuple[Opening, socket.socket]]) -> None:
    """Check that a rank of the group can connect, whatever else happens."""
    before = len(arrived)
    one = dialed(listener)
    until(lambda: len(arrived) > before)
    arrived[-1][1].send(b"x")
    one.connection.settimeout(60)
    assert one.connection.recv(1) == b"x"
    one.close()


def dialed(listener: Listener, endpoint: Endpoint = SEATS[0]) -> Dial:
    """Return an open connection, with a limit that only ends a hang."""
    one = Dial(endpoint, 1, "rank 1", ConnectionKind.DATA, 0, LO, (LO.address, listener.ports[0]))
    end = time.monotonic() + 60

    def look() -> None:
        assert time.monotonic() < end, "no connection in time"

    dial_all([one], look)
    return one


def opening(kind: ConnectionKind = ConnectionKind.DATA) -> Dialing:
    """Return the dialing side of a connection of rank 0."""
    return Dialing(SEATS[0], 1, kind, 0)


def connect(listener: Listener) -> socket.socket:
    return socket.create_connection((LO.address, listener.ports[0]), 60)


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_rank_of_the_group_connects(listener, arrived) -> None:
    comes_through(listener, arrived)
    (theirs, connection) = arrived[0]
    assert (theirs.rank, theirs.kind, theirs.stream) == (0, ConnectionKind.DATA, 0)
    assert connection.gettimeout() == 0
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "length": b"\x7f" + b"\xff" * 7 + bytes(200),
    "store": b"FASTCOLL" + bytes(56),
    "zeros": bytes(4096),
    "magic alone": b"FASTMESH" + b"\xff" * (OPENING_SIZE - 8),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_dropped_and_logged_once(listener, arrived, caplog, garbage: bytes) -> None:
    for _ in range(3):
        with connect(listener) as stranger:
            stranger.sendall(garbage)
            assert is_dropped(stranger)
    comes_through(listener, arrived)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.startswith("dropped a connection from 127.0.0.1")


def test_a_store_opening_gets_no_proof_from_a_rank(listener, arrived) -> None:
    with connect(listener) as stranger:
        stranger.sendall(opening(ConnectionKind.STORE).opening)
        assert is_dropped(stranger)
    assert not arrived
    comes_through(listener, arrived)


def test_another_version_gets_the_reason_from_a_listener(listener) -> None:
    with connect(listener) as stranger:
        mine = bytearray(opening().opening)
        mine[12:28] = b"99.0".ljust(16, b"\0")
        stranger.sendall(mine)
        answer = Opening.from_bytes(stranger.recv(OPENING_SIZE, socket.MSG_WAITALL), Role.ANSWERS)
        assert answer.result is OpeningResult.VERSION
        assert is_dropped(stranger)


def test_idle_connections_keep_no_rank_out(listener, arrived, many_descriptors) -> None:
    idle = [connect(listener) for _ in range(500)]
    comes_through(listener, arrived)
    assert len(listener._pending) <= listening.MOST_OPENINGS
    for each in idle:
        each.close()
    until(lambda: not listener._pending)


def test_answered_connections_are_kept_before_silent_ones(listener, arrived, many_descriptors) -> None:
    """A rank regards its connection as established once it has sent its proof: a drop would look like a death."""
    with contextlib.ExitStack() as opened:
        rank = opened.enter_context(connect(listener))
        proof = proof_of(opening(), rank)
        for _ in range(2 * listening.MOST_OPENINGS):
            opened.enter_context(connect(listener))
        comes_through(listener, arrived)  # by then the listener has read all of those
        rank.sendall(proof)
        until(lambda: len(arrived) == 2)


def test_slow_openings_are_dropped(monkeypatch, listener) -> None:
    monkeypatch.setattr(listening, "OPENING_SECONDS", 0.2)
    with connect(listener) as slow:
        slow.sendall(b"FAST")
        assert is_dropped(slow)
        assert not listener._pending


def test_a_proof_that_came_while_the_listener_was_starved_is_in_time(monkeypatch, listener, arrived) -> None:
    """The sender regards the connection as established: a drop would look like a death."""
    asleep, sent = threading.Event(), threading.Event()

    def starve(connection: socket.socket, host: str) -> None:
        asleep.set()
        assert sent.wait(60)
        (pending,) = listener._pending.values()
        pending.deadline = time.monotonic()  # it has slept past the deadline
        connection.close()

    with connect(listener) as late:
        proof = proof_of(opening(), late)
        monkeypatch.setattr(listener, "accepted", starve)
        with connect(listener):
            assert asleep.wait(60)
            late.sendall(proof)
            sent.set()
            until(lambda: arrived)


@pytest.mark.parametrize(("timeout", "stopped_for"), [(300.0, listening.OPENING_SECONDS + 1), (0.5, 2.0)])
def test_a_rank_stopped_before_its_proof_has_its_groups_timeout(
    listener, arrived, timeout, stopped_for
) -> None:
    """Or 10 s. When it continues, it regards the connection as established: a drop would look like a death."""
    listener.join(SEATS[1], lambda opening, connection: arrived.append((opening, connection)), timeout)
    with connect(listener) as stopped, connect(listener) as silent:
        proof = proof_of(opening(), stopped)
        until(lambda: len(listener._pending) == 2)
        listener.expire(time.monotonic() + stopped_for)
        assert stopped_for < listening.OPENING_SECONDS or is_dropped(silent)
        stopped.sendall(proof)
        until(lambda: arrived)


def test_bytes_after_the_proof_belong_to_the_group(listener, arrived) -> None:
    one = dialed(listener)
    one.connection.sendall(b"the first bytes")
    until(lambda: arrived)
    arrived[0][1].settimeout(60)
    assert arrived[0][1].recv(100) == b"the first bytes"
    one.close()


def test_an_opening_for_a_closed_group_gets_no_answer(listener) -> None:
    listener.leave(SEATS[1])
    with connect(listener) as late:
        late.sendall(opening().opening)
        assert is_dropped(late)


def test_a_failing_group_does_not_affect_other_groups(listener, arrived, caplog) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no room")

    other = [Endpoint(b"h" * 16, rank, 2, KEY, False) for rank in range(2)]
    listener.join(other[1], fail, 300)
    one = dialed(listener, other[0])
    assert is_dropped(one.connection)
    one.close()
    comes_through(listener, arrived)
    assert "no room" in caplog.text


def test_the_listener_works_after_a_lack_of_descriptors(listener, arrived, caplog, monkeypatch) -> None:
    monkeypatch.setattr(listening, "raise_limit", lambda what: False)
    accept = socket.socket.accept
    refusals = [OSError(errno.EMFILE, "Too many open files")] * 2

    def refuse(self: socket.socket) -> tuple[socket.socket, object]:
        if refusals:
            raise refusals.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", refuse)
    comes_through(listener, arrived)
    assert not refusals
    assert any("ulimit -n" in record.getMessage() for record in caplog.records)


def test_a_long_lack_of_descriptors_is_an_error(listener, arrived, monkeypatch) -> None:
    assert listener.lack() is None
    monkeypatch.setattr(listening, "raise_limit", lambda what: False)
    monkeypatch.setattr(listener, "pause", lambda: None)
    now = [100.0]
    monkeypatch.setattr(listening, "time", SimpleNamespace(monotonic=lambda: now[0]))
    refused = OSError(errno.EMFILE, "Too many open files")
    listener.refuse(listener._sockets[0], refused)
    now[0] += 0.5  # one failure, as when the last free descriptor was just used
    assert listener.lack() is None
    for _ in range(10):
        listener.refuse(listener._sockets[0], refused)
        now[0] += 0.3
    assert "no file descriptor is left to process" in str(listener.lack())
    now[0] += 10  # descriptors are free again, or no connection waits
    assert listener.lack() is None


def test_groups_share_a_listener_until_the_last_one_leaves() -> None:
    with nothing_left():
        one, two = acquire([LO]), acquire([LO])
        assert one is two
        release(one)
        connect(two).close()
        release(two)
        with pytest.raises(ConnectionRefusedError):
            connect(two)


def test_ports_of_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left(), socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        first = min(port, 65535 - 20)
        monkeypatch.setenv("FASTCOLL_PORT_RANGE", f"{first}-{first + 20}")
        made = Listener([LO])
        assert made.ports[0] in {*range(first, first + 21)} - {port}
        made.close()
        made.close()
        config.forget()
        monkeypatch.setenv("FASTCOLL_PORT_RANGE", str(port))
        in_use = f"ports {port}-{port} of 127.0.0.1 .lo.: Address already in use"
        with pytest.raises(ResourceError, match=in_use):
            Listener([LO])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FASTCOLL_PORT_RANGE", "some"),
        ("FASTCOLL_PORT_RANGE", "0-5"),
        ("FASTCOLL_PORT_RANGE", "9-8"),
        ("FASTCOLL_PORT_RANGE", "65000-65536"),
        ("FASTCOLL_TCP_STREAMS", "0"),
        ("FASTCOLL_TCP_STREAMS", "65"),
    ],
)
def test_wrong_settings_of_a_listener(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=f"{name}='{text}' cannot be used"):
        config.get(name)


def test_an_address_of_another_machine_is_refused() -> None:
    with nothing_left(), pytest.raises(ResourceError, match=r"cannot listen on 192\.0\.2\.77 .eth9.*IFNAME"):
        Listener([LO, Interface("eth9", "192.0.2.77")])


def test_a_forked_child_does_not_use_its_parents_listener(listener, arrived) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that hangs on the lock
        left = any(each.fileno() != -1 for each in listener._sockets)
        fresh = acquire([LO])
        release(fresh)
        os._exit(1 if left or fresh is listener else 7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    comes_through(listener, arrived)
