"""Connections between ranks: made by either side when needed, and ended by anything that can happen to them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import combinations
from typing import Any

import pytest
from together import together

from fastcoll import config
from fastcoll.core import monitor
from fastcoll.errors import AbortedError, CollectiveTimeoutError, PeerDiedError, RendezvousError, UsageError
from fastcoll.net.tcp import mesh as mesh_module
from fastcoll.net.tcp.mesh import Mesh, control_peers
from fastcoll.rendezvous import listener as listening
from fastcoll.rendezvous.dials import Dial, dial_all
from fastcoll.store import HashStore
from fastcoll.store.opening import ConnectionKind, Endpoint
from fastcoll.system import processes
from fastcoll.system.interfaces import Interface, interfaces_here
from net.meshes import (
    Clock,
    ProxiedStore,
    alarm,
    crew,
    default_settings,
    died_of,
    elsewhere,
    make_all,
    meshes,
    nothing_left,
    until,
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with default_settings(monkeypatch), nothing_left():
        yield


def talk(one: int, other: int) -> None:
    """Send bytes in both directions between two descriptors."""
    for source, sink in ((one, other), (other, one)):
        os.write(source, b"hello")
        assert select.select([sink], [], [], 60)[0]
        assert os.read(sink, 10) == b"hello"


def options(fd: int) -> list[bool]:
    with socket.socket(fileno=os.dup(fd)) as copy:
        names = ((socket.IPPROTO_TCP, socket.TCP_NODELAY), (socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        return [*(copy.getsockopt(*name) > 0 for name in names), not os.get_blocking(fd)]


@pytest.mark.parametrize("n", [2, 5])
def test_every_two_ranks_have_a_connection_for_data(n: int) -> None:
    with meshes(n) as made:
        for a, b in combinations(range(n), 2):
            one, other = together(lambda: made[a].data(b), lambda: made[b].data(a))  # noqa: B023
            talk(one, other)
            assert made[a].data(b) == one
            assert options(one) == options(other) == [True] * 3


def test_different_numbers_of_interfaces_name_both_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    lo = [each for each in interfaces_here() if each.address == "127.0.0.1"]
    calls = iter([1, 2, 1])

    def choose(store: Any, members: Any, family: int | None) -> Any:
        return lo * (1 if family is None else next(calls))

    monkeypatch.setattr(listening, "choose_here", choose)
    errors = make_all(3)
    for error in errors:
        assert isinstance(error, UsageError)
        assert "rank 0 (" in str(error)
        assert "has 1 (lo), rank" in str(error)
        assert "has 2 (lo, lo)" in str(error)


def test_large_groups_watch_some_peers_and_meet_the_others_when_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh_module, "ALL_CONTROL", 4)
    with meshes(12) as made:
        assert made[0]._control.peers == set(control_peers(0, 12)) == {1, 2, 4, 8, 10, 11}
        talk(*together(lambda: made[0].data(6), lambda: made[6].data(0)))
        assert 6 in made[0]._control.peers
        made[9].mail(3)
        assert 3 in made[9]._control.peers


def test_large_groups_watch_the_ranks_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_module, "ALL_CONTROL", 4)
    store, known, nodes = HashStore(), crew(12), [range(6), range(6, 12)]
    made = together(
        *(lambda r=r: Mesh.make(store, "WORLD", known, r, 60.0, nodes[r // 6]) for r in range(12))
    )
    assert made[0]._control.peers == {1, 2, 3, 4, 5, 8, 10, 11}
    assert not made[0].monitor.hears_all
    for mesh in made:
        mesh.monitor.leave()
        mesh.close()


@pytest.mark.parametrize("size", [33, 40, 64, 100, 1000])
def test_watching_is_mutual_and_connects_all_ranks(size: int) -> None:
    peers = [set(control_peers(rank, size)) for rank in range(size)]
    assert all(rank in peers[peer] for rank in range(size) for peer in peers[rank])
    assert all(len(each) <= 2 * size.bit_length() for each in peers)
    reached = {0}
    for _ in range(size.bit_length()):
        reached |= {peer for rank in reached for peer in peers[rank]}
    assert len(reached) == size


def test_mail_goes_both_ways_and_early_connections_are_kept() -> None:
    with meshes(3) as made:
        got: list[tuple[int, socket.socket]] = []
        sent = made[0].mail(2)
        assert made[0].mail(2) is sent
        sent.send(b"early")
        until(lambda: (ConnectionKind.MAIL, 0, 0) in made[2]._made)
        back = made[2].mail(0)
        made[2].on_mail(lambda peer, connection: got.append((peer, connection)))
        later = made[1].mail(2)
        until(lambda: len(got) == 2)
        assert [peer for peer, _ in got] == [0, 1]
        assert got[0][1] is back
        talk(later.fileno(), got[1][1].fileno())
        assert back.recv(10) == b"early"
        talk(sent.fileno(), back.fileno())


def test_a_rank_that_seeks_another_before_that_one_answers_is_answered_later() -> None:
    with meshes(2) as made:
        got: list[socket.socket] = []
        for count in (1, 2):
            made[1].seek(0, time.monotonic() + 60)
            until(lambda count=count: len(made[0]._seekers) == count)
            if count == 1:
                made[0].on_seek(got.append)
        until(lambda: got == made[0]._seekers)


@pytest.mark.parametrize("first", [(), (0,), (1,)])
def test_there_is_one_connection_for_messages_whoever_dials_it(first: tuple[int, ...]) -> None:
    for _ in range(3):
        with meshes(2) as made:
            for rank in first:
                made[rank].mail(1 - rank)
            talk(*together(lambda: made[0].mail(1).fileno(), lambda: made[1].mail(0).fileno()))
            assert [sum(kind is ConnectionKind.MAIL for kind, _, _ in each._made) for each in made] == [1, 1]


def test_secrets_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = iter([b"one", b"two"])
    monkeypatch.setattr(listening, "job_secret", lambda: next(secrets))
    for error in make_all(2):
        assert type(error) is RendezvousError
        assert re.search(
            r"rank 1 .* has another secret than rank 0 .*; give every rank .* FASTCOLL_SECRET", str(error)
        )


def test_a_missing_rank_is_named() -> None:
    with pytest.raises(RendezvousError, match=r"rank 1 \("):
        Mesh.make(HashStore(), "WORLD", crew(2), 0, 0.5)


class Misleading(HashStore):
    """A store that gives all ranks an address of rank 1 at which no process listens: the port of another program."""

    def __init__(self) -> None:
        super().__init__()
        self._taken = socket.socket()
        self._taken.bind(("127.0.0.1", 0))

    def set(self, key: str, value: str | bytes) -> None:
        if key == "group/member/1":
            value = json.dumps({**json.loads(value), "ports": [self._taken.getsockname()[1]]})
        super().set(key, value)

    def close(self) -> None:
        super().close()
        self._taken.close()


def test_an_address_without_a_listener_is_named(caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall that rejects: retried until the deadline, with a warning; then the error has the reason."""
    clock = Clock()
    monkeypatch.setattr(monitor, "time", clock)
    monkeypatch.setattr(mesh_module, "_REFUSED_SECONDS", 1000.0)
    monkeypatch.setenv("FASTCOLL_WARN_AFTER", "0.01")
    config.forget()

    def put_forward() -> None:
        reason = "connecting the ranks of .* has waited .* rank 1 .*from 127.0.0.1 .lo.: Connection refused"
        until(lambda: re.search(reason, caplog.text))
        clock.ahead = 100.0

    with closing(Misleading()) as store:
        (first, second), _ = together(lambda: make_all(2, store, timeout=60.0), put_forward)
    assert isinstance(first, CollectiveTimeoutError)
    for part in ("rank 1 (", "at 127.0.0.1:", "from 127.0.0.1 (lo): Connection refused"):
        assert part in str(first)
    assert isinstance(second, CollectiveTimeoutError | AbortedError)


def test_a_rank_that_stopped_listening_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an invisible rank that died before it had connections: the first rank that notices fails the group."""
    monkeypatch.setattr(mesh_module, "_REFUSED_SECONDS", 0.1)
    with closing(Misleading()) as store:
        errors = make_all(2, store)
    for error in errors:
        assert isinstance(error, PeerDiedError)
        assert error.ranks == (1,)
        assert "nothing listens at 127.0.0.1:" in str(error)


def test_a_dial_is_refused_as_long_as_nothing_else_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other failure shows only that the host is out of reach; the rank may live."""
    tried, errors = [], [errno.ECONNREFUSED, errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ECONNREFUSED]

    def fail(*_: object) -> Any:
        tried.append(dial.refused_since)
        raise OSError(errors[min(len(tried), len(errors)) - 1], "as planned")

    monkeypatch.setattr(Dial, "_try", fail)
    endpoint, here = Endpoint(bytes(16), 0, 2, b"", False), Interface("lo", "127.0.0.1")
    dial = Dial(endpoint, 1, "rank 1", ConnectionKind.DATA, 0, here, (here.address, 1))
    until(lambda: dial.step() or len(tried) == 5)
    assert tried[0] is None
    assert tried[1] == tried[2] is not None
    assert tried[3] is None
    assert tried[4] > tried[2]


def test_a_connected_group_names_the_lost_rank() -> None:
    """Only its connections show the death of an invisible process, also to ranks that wait for something else."""
    members = [elsewhere(each) for each in crew(3)]
    made = make_all(3, members=members)
    assert processes.gone_among(members) == {}
    made[1].close()
    made[2].monitor.leave()
    made[2].close()
    assert isinstance(died_of(made[0]), PeerDiedError)
    gone = processes.gone_among(members)
    assert gone == {members[1]: "it closed the connection"}
    assert (
        processes.describe_gone(gone)
        == f"{members[1]} died or lost its connection (it closed the connection)"
    )
    made[0].close()
    assert processes.gone_among(members) == {}


@pytest.mark.parametrize("text", ["null", "[]", "[1]", '{"names": []}', "[" * 5000, '[{"names": 3}, {}]'])
def test_values_in_the_store_are_not_trusted(text: str) -> None:
    store = HashStore()
    store.set("group/terms", text)
    with pytest.raises(RendezvousError, match="cannot be read"):
        Mesh.make(store, "WORLD", crew(2), 1, 1.0)


def test_a_peer_without_a_data_connection_in_time_is_named() -> None:
    late = r"data connection with rank 0 .* within the timeout of 0\.2 s"
    with meshes(2) as (_, b), pytest.raises(CollectiveTimeoutError, match=late):
        b.data(0, timeout=0.2)


def test_a_second_connection_for_the_same_stream_is_closed() -> None:
    with meshes(2) as (a, b):
        one, other = together(lambda: a.data(1), lambda: b.data(0))
        again = a._new_dial(1, ConnectionKind.DATA, 0)
        dial_all([again], lambda: None)
        again.connection.settimeout(60)
        assert again.connection.recv(1) == b""
        again.close()
        talk(one, other)


@pytest.mark.parametrize("fault", ["reset", "half_close"])
def test_a_network_that_breaks_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastcoll.rendezvous.control.dead_among", lambda _: [])
    with ProxiedStore() as store, meshes(2, store) as (a, b):
        getattr(store.proxies[1], fault)()
        found = died_of(a)
        assert isinstance(found, PeerDiedError)
        assert found.ranks == (1,)
        if fault == "reset":
            assert isinstance(died_of(b), PeerDiedError)


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_wait_for_a_connection_ends_with_the_group(leaver: int) -> None:
    with meshes(2) as made:

        def leave() -> None:
            until(lambda: made[1]._changed._waiters)  # type: ignore[attr-defined]
            made[leaver].monitor.leave()
            made[leaver].close()
            made[leaver].close()

        found, _ = together(lambda: made[1].data(0), leave)
        assert isinstance(found, AbortedError)
        assert ("left the group", "destroyed")[leaver] in str(found)


def test_ctrl_c_ends_a_wait_for_a_connection() -> None:
    with meshes(2) as (_, b):
        waits = lambda: bool(b._changed._waiters)  # type: ignore[attr-defined]  # noqa: E731
        with alarm(signal.default_int_handler, waits), pytest.raises(KeyboardInterrupt):
            b.data(0)


def test_a_forked_child_does_not_hide_its_parents_death() -> None:
    """It has copies of all connections, until it disowns them."""
    made = make_all(2, members=[elsewhere(each) for each in crew(2)])
    disowned, wrote = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        made[1].disown()
        made[1].disown()
        os.write(wrote, b"!")
        signal.pause()
    try:
        assert os.read(disowned, 1) == b"!"
        made[1].close()
        assert isinstance(died_of(made[0]), PeerDiedError)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for each in (disowned, wrote):
            os.close(each)
        made[0].close()


@pytest.mark.parametrize("reads", [True, False])
def test_a_leaving_rank_waits_until_its_data_has_arrived(
    monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """On another host, where the notice that it left may overtake the data; unless the peer is gone."""
    monkeypatch.setattr(mesh_module, "_ARRIVE_SECONDS", 600.0)
    looks, has_unacknowledged = [], mesh_module._has_unacknowledged
    monkeypatch.setattr(
        mesh_module, "_has_unacknowledged", lambda each: looks.append(each) or has_unacknowledged(each)
    )
    here, there = crew(2)
    a, b = make_all(2, members=[here, elsewhere(there)])
    one, other = together(lambda: a.data(1), lambda: b.data(0))
    with contextlib.suppress(BlockingIOError):
        while os.write(one, bytes(1 << 16)):
            pass
    leaving = threading.Thread(target=a.monitor.leave)
    leaving.start()
    until(lambda: len(looks) > 10)  # many more looks than connections
    assert leaving.is_alive()
    assert not b.monitor.has_left(0)
    if not reads:
        b.monitor.fail(AbortedError("enough"))
        leaving.join(60)
        assert not leaving.is_alive()
    while leaving.is_alive():
        with contextlib.suppress(BlockingIOError):
            os.read(other, 1 << 20)
        leaving.join(0.001)
    until(lambda: b.monitor.has_left(0))
    for mesh in (b, a):
        mesh.monitor.leave()
        mesh.close()
