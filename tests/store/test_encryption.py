"""Encrypted connections: bytes in both directions, every kind of end, and what a man in the middle can do."""

from __future__ import annotations

import os
import select
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import programs
import pytest
from soak.proxy import Proxy
from together import together

from fastcoll import StoreError, UnavailableError, UsageError, config
from fastcoll.store import TCPStore, encryption
from fastcoll.store.encryption import carrier, check_nodes, encrypt, encrypts, failure, holds_bytes
from fastcoll.store.opening import SEED_SIZE, Role
from fastcoll.system import tunnels
from fastcoll.system.processes import Member

LIMIT = 60.0  # seconds, which only end a test that hangs
SEED = bytes(range(SEED_SIZE))
until = partial(programs.until, seconds=LIMIT)

# A program that connects to a port, encrypts, and then does what is appended.
DIALS = """
import multiprocessing, os, signal, socket, sys
from fastcoll.store.encryption import encrypt
from fastcoll.store.opening import SEED_SIZE, Role

def dial(then=lambda dialed: None):
    dialed = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    encrypt(dialed, bytes(range(SEED_SIZE)), Role.DIALS)
    dialed.sendall(b"last")
    then(dialed)

def be_killed(dialed):
    dialed.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)

def fork(dialed):
    if not os.fork():
        dialed.close()
        os.read(0, 1)  # until the test has seen the end of the connection
        os._exit(0)
    be_killed(dialed)

"""


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Encrypt with a secret; return a function that changes settings. Afterwards no tunnel is left."""

    def change(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"FASTCOLL_{name}", value)
        config.forget()

    change(SECRET="of this job", ENCRYPT="1")
    yield change
    until(lambda: "fastcoll-encryption" not in [thread.name for thread in threading.enumerate()])


@contextmanager
def connected(
    change: Callable[[int, bytes], bytes] | None = None, seed: bytes = SEED
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return both ends of an encrypted connection: dialed with `seed`, perhaps through a proxy, and answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = Proxy(listener.getsockname(), change=change) if change else None
        port = proxy.port if proxy else listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), LIMIT) as dialed, listener.accept()[0] as answered:
            answered.settimeout(LIMIT)
            encrypt(dialed, seed, Role.DIALS)
            encrypt(answered, SEED, Role.ANSWERS)
            yield dialed, answered
        if proxy:
            proxy.close()


def receive(connection: socket.socket) -> bytes:
    """Return all bytes until the end of the connection."""
    parts = []
    with suppress(ConnectionResetError):
        while data := connection.recv(1 << 20):
            parts.append(data)
    return b"".join(parts)


def is_idle() -> bool:
    """Return whether the tunnels' thread has nothing to do; if it waited busily, it would always have."""
    pump = tunnels._pump
    # Often, because no event is seen at the moment in which the thread takes it.
    return pump is None or pump._epoll.closed or not any(pump._epoll.poll(0) for _ in range(1000))


def fill(connection: socket.socket, reader: socket.socket) -> int:
    """Send until nothing takes another byte, with small and fixed buffers of TCP; return how many bytes were sent."""
    connection.setblocking(False)
    carrier(connection).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    carrier(reader).setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    sent = 0
    while True:
        try:
            sent += connection.send(bytes(1 << 20))
        except BlockingIOError:
            if is_idle() and not select.select([], [connection], [], 0)[1]:
                return sent


def test_large_data_passes_both_ways_at_once() -> None:
    there, back = os.urandom(9_000_001), os.urandom(12_000_003)
    with connected() as (dialed, answered):

        def send(connection: socket.socket, data: bytes) -> None:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)

        *_, got_back, got_there = together(
            partial(send, dialed, there),
            partial(send, answered, back),
            partial(receive, dialed),
            partial(receive, answered),
        )
    assert got_there == there
    assert got_back == back


def test_each_direction_ends_for_itself() -> None:
    with connected() as (dialed, answered):
        dialed.sendall(b"all")
        dialed.shutdown(socket.SHUT_WR)
        assert receive(answered) == b"all"
        until(is_idle)
        answered.sendall(b"later")
        assert dialed.recv(10) == b"later"
        answered.close()
        assert receive(dialed) == b""


def test_descriptor_object_and_timeout_stay_and_tcp_is_the_carrier() -> None:
    with connected() as (dialed, answered):
        fd = dialed.fileno()
        assert carrier(dialed).fileno() != fd
        assert carrier(dialed).family is socket.AF_INET
        assert carrier(dialed).getpeername() == carrier(answered).getsockname()
        assert not os.get_inheritable(fd)
        dialed.settimeout(0.001)
        with pytest.raises(TimeoutError):
            dialed.recv(1)
        dialed.setblocking(False)
        with pytest.raises(BlockingIOError):
            dialed.recv(1)
    plain = socket.socket()
    with closing(plain):
        encrypt(plain, b"", Role.DIALS)
        assert carrier(plain) is plain


def test_a_reader_that_does_not_read_stops_the_sender_and_gets_all_later() -> None:
    with connected() as (dialed, answered):
        sent = fill(dialed, answered)
        assert sent < 4 << 20
        assert holds_bytes(dialed)
        until(is_idle)
        dialed.close()
        until(is_idle)
        assert len(receive(answered)) == sent


def test_a_sender_learns_that_its_peer_has_closed() -> None:
    with connected() as (dialed, answered):
        fill(dialed, answered)
        answered.close()

        def breaks() -> bool:
            try:
                dialed.send(bytes(1 << 20))
            except BlockingIOError:
                return False
            except ConnectionError:
                return True
            return False

        until(breaks)
        assert not holds_bytes(dialed)


def test_sent_bytes_are_held_until_tcp_has_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialed = socket.create_connection(listener.getsockname(), LIMIT)
        answered, _ = listener.accept()
    with dialed, answered:
        encrypt(dialed, SEED, Role.DIALS)
        dialed.sendall(b"early")
        assert holds_bytes(dialed)  # until the other side takes part in TLS's handshake
        encrypt(answered, SEED, Role.ANSWERS)
        until(lambda: not holds_bytes(dialed))
        assert answered.recv(10) == b"early"


@pytest.mark.parametrize(
    ("does", "answers"),
    [
        ("dial()", True),  # exits at once, while TLS's handshake is under way
        ("p = multiprocessing.get_context('fork').Process(target=dial); p.start(); p.join()", True),
        ("dial(be_killed)", False),
        ("dial(fork)", False),
    ],
)
def test_what_a_process_has_sent_arrives_and_then_its_end(does: str, answers: bool, processes: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT)
        process = processes.start(DIALS + does, listener.getsockname()[1])
        with listener.accept()[0] as answered:
            answered.settimeout(LIMIT)
            encrypt(answered, SEED, Role.ANSWERS)
            assert answered.recv(4) == b"last"
            if not answers:
                answered.sendall(b"!")
            assert receive(answered) == b"", process.communicate()


@pytest.mark.parametrize("at", [40, 1500, 9000])
def test_a_flipped_bit_ends_the_connection_and_is_named(at: int, caplog: pytest.LogCaptureFixture) -> None:
    def flip(begin: int, data: bytes) -> bytes:
        here = at - begin
        is_here = 0 <= here < len(data)
        return data[:here] + bytes([data[here] ^ 4]) + data[here + 1 :] if is_here else data

    with connected(flip) as (dialed, answered):
        with suppress(ConnectionError):
            dialed.sendall(bytes(100_000))
        with suppress(ConnectionError):
            answered.sendall(bytes(100_000))
        assert set(receive(answered)) <= {0}
        assert set(receive(dialed)) <= {0}
        assert isinstance(failure(answered) or failure(dialed), ssl.SSLError)
    assert "bytes were changed on their way" in caplog.text


def test_a_side_with_another_seed_is_refused() -> None:
    with connected(seed=SEED[::-1]) as (dialed, answered):
        with suppress(ConnectionError):
            dialed.sendall(b"a payload")
        assert receive(answered) == receive(dialed) == b""
        assert isinstance(failure(answered), ssl.SSLError)


# ---- settings, and stores ------------------------------------------------------------------------------------


def test_there_is_no_encryption_without_a_secret(settings: Callable[..., None]) -> None:
    settings(SECRET="", INSECURE="1")
    with pytest.raises(UsageError, match=r"FASTCOLL_ENCRYPT=1 needs a secret.*FASTCOLL_SECRET_FILE"):
        TCPStore("127.0.0.1", 0, is_master=True)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    encryption._check_packages.cache_clear()
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UnavailableError, match=r"pip install '\.\[encrypt\]'"):
        encrypts()


def test_other_transports_between_nodes_are_refused(settings: Callable[..., None]) -> None:
    here = [Member.here(rank, 2, "mpi") for rank in range(2)]
    far = [here[0], replace(here[1], boot_id="another")]
    check_nodes("MPI", here)
    with pytest.raises(UsageError, match="FASTCOLL_ENCRYPT=1: MPI does not encrypt, and rank 1"):
        check_nodes("MPI", far)
    settings(ENCRYPT="0")
    check_nodes("MPI", far)


@pytest.mark.parametrize("server", ["0", "1"])
def test_a_store_refuses_a_client_with_another_setting(server: str, settings: Callable[..., None]) -> None:
    settings(ENCRYPT=server)
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        settings(ENCRYPT="10"[int(server)])
        does = "encrypts" if server == "1" else "does not encrypt"
        with pytest.raises(StoreError, match=f"{does} its connections, and this process .*FASTCOLL_ENCRYPT"):
            TCPStore("127.0.0.1", store.port)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_man_in_the_middle_reads_a_store_only_if_it_is_not_encrypted(
    encrypted: bool, settings: Callable[..., None]
) -> None:
    key, value, seen = "a key of the job", b"a value of the job" * 20_000, bytearray()

    def record(at: int, data: bytes) -> bytes:
        seen.extend(data)
        return data

    settings(ENCRYPT=str(int(encrypted)))
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        with closing(Proxy(("127.0.0.1", store.port), change=record)) as proxy:
            with TCPStore("127.0.0.1", proxy.port) as client:
                client.set(key, value)
                assert store.get(key) == client.get(key) == value
            assert len(seen) > 2 * len(value)
        assert (key.encode() in seen) is (b"value of the job" in seen) is not encrypted
