"""Groups and remote calls over encrypted connections (FASTCOLL_ENCRYPT=1): the same results, and the same errors."""

from __future__ import annotations

import os
import select
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from conformance.test_every_operation import ROWS
from together import together

import fastcoll as dist
from fastcoll import PeerDiedError, RendezvousError, config, rpc
from fastcoll.rendezvous import listener as listening
from fastcoll.rpc.agent import current_agent
from fastcoll.store import encryption
from fastcoll.store.encryption import carrier, failure
from fastcoll.store.opening import ConnectionKind
from net.meshes import ProxiedStore, default_settings, make_all, meshes, nothing_left, until

PAYLOAD = b"an array of the job"


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with default_settings(monkeypatch), nothing_left():
        monkeypatch.setenv("FASTCOLL_ENCRYPT", "1")
        yield


@contextmanager
def encrypted(backend: str) -> Iterator[None]:
    """Be a rank of an encrypted job."""
    os.environ["FASTCOLL_ENCRYPT"] = "1"  # the plugin takes it back
    config.forget()
    dist.init_process_group(backend)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("encrypts", [False, True])
def test_a_man_in_the_middle_reads_data_only_if_it_is_not_encrypted(
    monkeypatch: pytest.MonkeyPatch, encrypts: bool
) -> None:
    monkeypatch.setenv("FASTCOLL_ENCRYPT", str(int(encrypts)))
    seen = bytearray()

    def record(at: int, data: bytes) -> bytes:
        seen.extend(data)
        return data

    with closing(ProxiedStore(change=record)) as store, meshes(2, store) as made:
        one, other = together(lambda: made[0].data(1), lambda: made[1].data(0))
        os.write(one, PAYLOAD)
        assert select.select([other], [], [], 60)[0]
        assert os.read(other, 100) == PAYLOAD
        made[0].mail(1).sendall(PAYLOAD)
        until(lambda: (ConnectionKind.MAIL, 0, 0) in made[1]._made)
        connection = made[1].mail(0)
        assert select.select([connection], [], [], 60)[0]
        assert connection.recv(100) == PAYLOAD
    assert seen.count(PAYLOAD) == (0 if encrypts else 2)


@pytest.mark.usefixtures("clean")
def test_options_are_those_of_tcp_below() -> None:
    with meshes(2) as made:
        control = next(connection for _, connection, _ in made[0]._control._links.values())
        mail = made[0].mail(1)
        for connection, limit in ((control, 8000), (mail, 0)):
            tcp = carrier(connection)
            assert tcp is not connection
            assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == limit


@pytest.mark.usefixtures("clean")
def test_ranks_with_and_without_encryption_name_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they have met in a store that is not fastcoll's own."""
    settings = iter([True, False])
    monkeypatch.setattr(listening, "encrypts", lambda: next(settings))
    for error in make_all(2):
        assert isinstance(error, RendezvousError)
        assert "encrypts its connections, " in str(error)
        assert "the same FASTCOLL_ENCRYPT" in str(error)


@pytest.mark.usefixtures("clean")
def test_a_changed_notice_is_named_by_the_monitor() -> None:
    begun = threading.Event()

    def flip(at: int, data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if begun.is_set() else data

    with closing(ProxiedStore(change=flip)) as store, meshes(2, store) as made:
        connection = next(connection for _, connection, _ in made[0]._control._links.values())
        begun.set()
        made[1].monitor.leave()
        until(lambda: made[0]._control.look(again=True) or made[0]._control.lost)
        assert isinstance(failure(connection), ssl.SSLError)
        assert "SSL" in made[0]._control.lost[1]


@pytest.mark.ranks(2, 3, init=False)
@pytest.mark.parametrize("backend", ["tcp", "auto"])
def test_every_operation(rank: int, world_size: int, backend: str) -> None:
    with encrypted(backend):
        for row in ROWS.values():
            for count in (2, 1009, 50_003):
                row(rank, world_size, count)
        if backend == "tcp":
            peers = world_size - 1  # each with a control and a data connection, besides the store's
            assert len(encryption._tunnels) > 2 * peers


@pytest.mark.ranks(2, init=False)
def test_remote_calls(rank: int, world_size: int) -> None:
    with encrypted("auto"):
        rpc.init_rpc(f"w{rank}")
        x = np.arange(100_000.0)
        np.testing.assert_array_equal(rpc.rpc_sync(f"w{1 - rank}", np.add, args=(x, 1.0)), x + 1.0)
        link = current_agent()._out[1 - rank]
        assert carrier(link._socket) is not link._socket
        assert not link.is_unreachable()
        rpc.shutdown()


@pytest.mark.long
@pytest.mark.ranks(2, init=False, fresh=True, may_die=[1])
def test_a_killed_rank_is_named(rank: int, tmp_path: Path) -> None:
    with encrypted("tcp"):
        dist.all_reduce(np.ones(1000))
        if rank == 1:
            # A killed process loses what it has not encrypted yet.
            until((tmp_path / "rank 0 has its result").exists)
            os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / "rank 0 has its result").touch()
        with pytest.raises(PeerDiedError, match="rank 1"):
            dist.all_reduce(np.ones(1000))
        assert "fastcoll-encryption" in [thread.name for thread in threading.enumerate()]
