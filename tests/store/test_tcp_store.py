"""The TCP store over real sockets: strangers, crowds, deaths and forks."""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import NoReturn

import pytest
from net.dialing import is_dropped, proof_of, receive
from rendezvous.observed import LIMIT, until

from fastcoll import config
from fastcoll.errors import ResourceError, StoreError, StoreTimeoutError, UsageError
from fastcoll.launch.nodes import free_port
from fastcoll.store import TCPStore, serving, store_protocol, tcp_server, tcp_store, waiting
from fastcoll.store.frames import HEADER, encode_request
from fastcoll.store.opening import (
    OPENING_SIZE,
    PROOF_SIZE,
    ConnectionKind,
    Dialing,
    Endpoint,
    Opening,
    OpeningResult,
    Role,
    prove,
)
from fastcoll.store.secret import job_secret
from fastcoll.store.table import MAX_VALUE, Op, StoreRequest
from fastcoll.store.waiting import fetch_for
from fastcoll.system.address import listen, place_of, port_holder

SERVE = """
import sys
from fastcoll.store import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True)
print(store.port, flush=True)
sys.stdin.readline()
store.close()
"""


def serve(processes, port: int = 0, source: str = SERVE):
    """Start a process that serves a store; return it and the store's port."""
    server = processes.start(source, port)
    return server, int(server.stdout.readline())


@pytest.fixture
def master() -> Iterator[TCPStore]:
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        yield store


def raw(master: TCPStore) -> socket.socket:
    return socket.create_connection(("127.0.0.1", master.port), timeout=60)


def greet(connection: socket.socket) -> None:
    place = place_of(*connection.getpeername())
    dialing = Dialing(Endpoint(bytes(16), 1, 2, job_secret(), True), 0, ConnectionKind.STORE, 0, place)
    connection.sendall(proof_of(dialing, connection))


@pytest.mark.parametrize(
    ("name", "bound"), [("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1")]
)
def test_the_server_listens_on_its_host_only(name: str, bound: str) -> None:
    with TCPStore(name, 0, is_master=True) as store, TCPStore(name, store.port) as client:
        assert (client.host, client.add("n", 1), store.add("n", 1)) == (name, 1, 2)
        assert store._server._sockets[0].getsockname()[0] == bound


@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket")  # its connection was not closed
def test_a_dropped_master_stops_serving(capfd: pytest.CaptureFixture[str]) -> None:
    """In its own process; a child of fork that drops its copy does not stop the server."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    port = store.port
    with TCPStore("127.0.0.1", port) as client:
        child = os.fork()
        if child == 0:
            del store
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        assert capfd.readouterr().err == ""
        client.set("k", "v")
        del store
        gc.collect()
        with pytest.raises(StoreError, match="is gone"):
            client.get("k")
    with TCPStore("127.0.0.1", port, is_master=True):
        pass


def test_a_port_in_use_names_its_holder(processes) -> None:
    holder, port = serve(processes)
    with pytest.raises(
        ResourceError, match=rf"127.0.0.1:{port}.*in use by pid {holder.pid} \(.*python.*MASTER_PORT"
    ):
        TCPStore("127.0.0.1", port, is_master=True)
    assert f"pid {holder.pid} " in port_holder(port)
    holder.kill()
    holder.wait()
    assert port_holder(port) is None


def test_a_name_may_also_have_addresses_of_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [(socket.AF_INET, (each, 0)) for each in ("203.0.113.7", "127.0.0.1")]
    monkeypatch.setattr("fastcoll.system.address.resolve", lambda host, port: here)
    with listen("several.example", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_name_may_also_have_addresses_of_a_family_without_support(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a localhost that is also ::1, on a machine without IPv6."""
    port = free_port()
    there = [(socket.AF_INET, ("127.0.0.1", port)), (socket.AF_ASH, ("::1", port, 0, 0))]
    monkeypatch.setattr(tcp_store, "resolve", lambda host, port: there)
    monkeypatch.setattr("fastcoll.system.address.resolve", lambda host, port: there[::-1])
    with pytest.raises(tcp_store.LostError, match=r"localhost:\d+ \(rank 0\) is gone \(Connection refused\)"):
        tcp_store.connect("localhost", port, b"", LIMIT, was_there=True)
    with listen("localhost", port) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    del there[0]
    with pytest.raises(UsageError, match="no address of this machine"):
        listen("localhost", port)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"port": -1}, "0 to 65535"),
        ({"port": 0}, "for the master only"),
        ({"port": 0, "is_master": True, "host_name": "203.0.113.7"}, "no address of this machine"),
        ({"port": 0, "is_master": True, "host_name": "no-such-host.invalid"}, "has no address"),
        ({"port": 5, "host_name": "ä..b"}, "'ä..b' is no name of a host"),
        ({"port": 5, "world_size": 0}, "world_size"),
        ({"port": 5, "timeout": "3"}, "timeout"),
        ({"port": 5.0}, "port is 5.0, a float"),
        ({"port": 5, "world_size": "2"}, "world_size is '2', a str"),
        ({"port": 5, "host_name": None}, "host_name is None"),
    ],
)
def test_wrong_arguments_of_a_tcp_store(arguments: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TCPStore(**({"host_name": "127.0.0.1"} | arguments))


def test_an_unresolvable_name_causes_a_warning(caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int) -> NoReturn:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(tcp_store, "resolve", resolve)
    monkeypatch.setenv("FASTCOLL_WARN_AFTER", "0.001")
    why = "the name node0 does not resolve: Temporary failure in name resolution"
    with pytest.raises(StoreTimeoutError, match=rf"no store at node0:5000 within 0.1 s \(last: {why}\)"):
        TCPStore("node0", 5000, timeout=0.1)
    assert f"for rank 0, which serves it ({why})" in caplog.text


def test_a_port_that_does_not_answer_causes_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Warned(Exception):
        """Ends the attempt, which would last 10 s."""

    def warn(text: str, *args: object) -> NoReturn:
        raise Warned(text % args)

    monkeypatch.setenv("FASTCOLL_WARN_AFTER", "0.001")
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as crowd:
        for _ in range(2):  # the kernel drops connects to a full queue
            other = crowd.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        with pytest.raises(StoreTimeoutError, match="Connection timed out"):
            TCPStore(*full.getsockname(), timeout=0.1)
        monkeypatch.setattr(waiting.logger, "warning", warn)
        with pytest.raises(Warned, match="no answer; a firewall may drop the packets"):
            TCPStore(*full.getsockname())


def test_a_client_may_start_before_its_server(in_threads) -> None:
    port, connecting = free_port(), threading.Event()

    def client() -> bytes:
        connecting.set()
        with TCPStore("127.0.0.1", port) as store:
            store.set("from client", "1")
            return store.get("from master")

    def server() -> bytes:
        connecting.wait()
        with TCPStore("127.0.0.1", port, is_master=True) as store:
            store.set("from master", "2")
            value = store.get("from client")
            store.close(linger=300)  # until the client has left
            return value

    assert in_threads(client, server) == [b"2", b"1"]


def test_another_program_listens(in_threads) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet_wrongly() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"220 mail.example.com ESMTP ready, and more to fill up 64 bytes...")

        def client() -> None:
            TCPStore("127.0.0.1", other.getsockname()[1])

        error = in_threads(client, greet_wrongly)[0]
    assert isinstance(error, StoreError)
    assert "is not a fastcoll store" in str(error)


def test_strangers_are_dropped_and_cost_nothing(master: TCPStore) -> None:
    """test_store_protocol.py has the bytes that they may send; this test is about sockets."""
    for garbage in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"FASTMESH" + b"\xff" * 104, b"\xff" * 100_000):
        with raw(master) as connection:
            connection.sendall(garbage)
            assert is_dropped(connection)
    with raw(master) as connection:
        greet(connection)
        connection.sendall(struct.pack("!BxHId", Op.SET, 1, (1 << 32) - 1, 1.0))
        assert is_dropped(connection)
    for _ in range(200):
        raw(master).close()
    assert master.add("alive", 1) == 1
    assert len(master._server._links) <= 201


def test_a_client_is_not_read_before_it_has_read_its_answer(master: TCPStore) -> None:
    """Otherwise a few bytes of requests would fill the server's memory with answers."""
    master.set("k", bytes(MAX_VALUE))
    ask = encode_request(StoreRequest(Op.GET, (b"k",), timeout=300.0))

    def behind() -> list[int]:
        return [len(link.out) for link in list(master._server._links.values()) if link.is_behind]

    with raw(master) as slow:
        greet(slow)
        slow.sendall(ask)
        until(behind)
        slow.sendall(ask)
        for _ in range(3):  # each turn of the server polls all connections
            master.add("turns", 1)
        assert sum(behind()) < MAX_VALUE
        for _ in range(2):
            assert receive(slow, HEADER.size + 4 + MAX_VALUE).endswith(bytes(MAX_VALUE))


def test_slow_openings_delay_no_client(clock, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (serving, tcp_server):
        monkeypatch.setattr(module, "time", clock)
    with TCPStore("127.0.0.1", 0, is_master=True) as master:
        slow = [raw(master) for _ in range(50)]
        for connection in slow:
            connection.sendall(b"F")
        assert master.add("alive", 1) == 1
        clock.ahead = store_protocol.OPENING_SECONDS
        master.add("alive", 1)  # one more turn of the server, at that time
        assert all(map(is_dropped, slow))
        for connection in slow:
            connection.close()


def test_a_thousand_clients(master: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_protocol, "OPENING_SECONDS", 300)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2200:
        pytest.skip(f"1,000 connections to oneself need 2,200 descriptors, the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2200), hard))
    clients = [raw(master) for _ in range(1000)]
    try:
        for client in clients:
            greet(client)
            client.sendall(encode_request(StoreRequest(Op.GET, (b"go",), timeout=300.0)))
        master.set("go", "yes")
        for client in clients:
            assert receive(client, HEADER.size + 7).endswith(b"yes")
    finally:
        for client in clients:
            client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_free_descriptors_the_store_works(processes) -> None:
    source = SERVE.replace(
        "import sys", "import sys, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))"
    )
    _, port = serve(processes, source=source)
    with TCPStore("127.0.0.1", port) as early:
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        assert early.add("n", 1) == 1
        for connection in crowd:
            connection.close()
        with TCPStore("127.0.0.1", port) as late:
            assert late.add("n", 1) == 2


def test_a_waiting_get_detects_a_killed_server_although_its_forked_child_lives(processes, in_threads) -> None:
    source = SERVE.replace("sys.stdin", "import os; os.fork() or sys.stdin.read(); sys.stdin")
    server, port = serve(processes, source=source)
    with TCPStore("127.0.0.1", port, timeout=60) as client, TCPStore("127.0.0.1", port) as other:

        def kill() -> None:
            other.wait(["waiting"])
            server.kill()

        def get() -> None:
            client.set("waiting", "1")
            client.get("never")

        gone = in_threads(get, kill)[0]
        assert isinstance(gone, StoreError)
        assert f"process that holds the store at 127.0.0.1:{port} (rank 0) is gone" in str(gone)
        with pytest.raises(StoreError, match="is gone"):
            client.set("a", "1")


def test_a_later_server_does_not_replace_the_lost_one(processes) -> None:
    first, port = serve(processes)
    with TCPStore("127.0.0.1", port) as client:
        first.kill()
        first.wait()
        serve(processes, port)
        for _ in range(2):
            with pytest.raises(StoreError, match="is gone"):
                client.add("n", 1)


def test_a_stopped_server_is_a_timeout_and_may_continue(processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "GRACE_SECONDS", 0.2)
    server, port = serve(processes)
    with TCPStore("127.0.0.1", port) as client:
        processes.stop(server)
        for _ in range(2):
            with pytest.raises(StoreTimeoutError):
                client.wait(["k"], 0.1)
        server.send_signal(signal.SIGCONT)
        client.set("k", "1")
        client.wait(["k"])


@pytest.mark.parametrize("idle", [True, False])
def test_a_wait_continues_with_its_stopped_server(
    processes, in_threads, monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    """On its idle connection, on which an answer is still outstanding, or on a new one."""
    monkeypatch.setattr(tcp_store, "GRACE_SECONDS", 0.1)
    monkeypatch.setenv("FASTCOLL_WARN_AFTER", "0.05")
    server, port = serve(processes)
    warned = threading.Event()

    def warn(text: str, *args: object) -> None:
        if (said := text % args).startswith("testing: has waited"):
            assert "the process that holds it (rank 0) is stopped" in said
            warned.set()

    monkeypatch.setattr(waiting.logger, "warning", warn)
    with TCPStore("127.0.0.1", port) as client:
        if not idle:
            client._idle.pop().close()
        processes.stop(server)

        def go_on() -> None:
            assert warned.wait(100)
            server.send_signal(signal.SIGCONT)
            with TCPStore("127.0.0.1", port) as other:
                other.set("k", "v")

        look = partial(client.peek, ["other"], 0)
        assert in_threads(partial(fetch_for, client, ["k"], [], 60, "testing", look), go_on)[0] == [b"v"]
        assert len(client._idle) == 1


@pytest.mark.parametrize(("server", "client"), [("one", "two"), ("one", None), (None, "two"), (None, "")])
def test_secrets_must_match(monkeypatch: pytest.MonkeyPatch, server: str | None, client: str | None) -> None:
    set_secret(monkeypatch, server)
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        set_secret(monkeypatch, client)
        with pytest.raises(
            StoreError, match=r"another secret, and this process has .*; give every rank .* FASTCOLL_SECRET"
        ):
            TCPStore("127.0.0.1", store.port)
        set_secret(monkeypatch, server)
        with TCPStore("127.0.0.1", store.port) as good:
            assert good.add("n", 1) == 1


def test_a_false_server_learns_nothing(in_threads) -> None:
    """A process that takes the store's port first gets each rank's challenge, and no request."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as false:

        def serve() -> None:
            with false.accept()[0] as connection:
                mine = Opening.from_bytes(receive(connection, OPENING_SIZE), Role.DIALS)
                me = Endpoint(mine.group, 0, 2, b"wrong", True)
                answer = mine.answer(me, OpeningResult.WELCOME).to_bytes()
                connection.sendall(answer + prove(b"wrong", Role.ANSWERS, mine.to_bytes(), answer))
                while data := connection.recv(4096):
                    heard.extend(data)

        client = in_threads(serve, lambda: TCPStore("127.0.0.1", false.getsockname()[1]))[1]
    assert isinstance(client, StoreError)
    assert "has another secret" in str(client)
    assert heard == bytes(PROOF_SIZE)  # zeros, which reject its proof


def set_secret(monkeypatch: pytest.MonkeyPatch, secret: str | None) -> None:
    """Set this process's secret; None: the user's own; "": none, with FASTCOLL_INSECURE=1."""
    config.forget()
    monkeypatch.setenv("FASTCOLL_SECRET", secret or "")
    monkeypatch.setenv("FASTCOLL_INSECURE", str(int(secret == "")))


def test_the_master_waits_for_its_workers(in_threads) -> None:
    port, known = free_port(), threading.Event()

    def master() -> int:
        known.set()
        with TCPStore("127.0.0.1", port, 3, True) as store:
            return store.add("fastcoll/workers", 0)

    def worker() -> None:
        known.wait()
        TCPStore("127.0.0.1", port, 3).close()

    assert in_threads(master, worker, worker) == [3, None, None]


@pytest.mark.parametrize("seconds", [30 * 24 * 3600.0, config.MOST_SECONDS])
def test_a_wait_of_many_days_disturbs_nobody(master: TCPStore, in_threads, seconds: float) -> None:
    with TCPStore("127.0.0.1", master.port) as waiting, TCPStore("127.0.0.1", master.port) as other:

        def set_when_waited_for() -> None:
            until(lambda: any(server._core._parked for server in serving._users))
            other.set("x", b"1")

        assert in_threads(partial(waiting.fetch, ["x"], seconds), set_when_waited_for) == [[b"1"], None]


def test_the_timeout_counts_missing_workers() -> None:
    with pytest.raises(StoreTimeoutError, match="1 of 3 processes opened the store"):
        TCPStore("127.0.0.1", 0, 3, True, timeout=0.1)


def test_stores_of_one_process_may_share_a_server(master: TCPStore) -> None:
    with TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True) as one:
        with TCPStore("127.0.0.1", one.port, is_master=True, multi_tenant=True) as two:
            two.set("k", "v")
        assert one.get("k") == b"v"
    with pytest.raises(ResourceError, match="in use"):
        TCPStore("127.0.0.1", master.port, is_master=True, multi_tenant=True)


def test_a_master_serves_on_a_given_socket() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=listener.detach()) as store:
        assert store.port == port
        with store.clone() as client:
            client.set("k", "v")
        assert store.get("k") == b"v"
    with socket.create_server(("127.0.0.1", port)), socket.socket() as other:  # the store has closed it
        no_listener = "no TCP socket that listens"
        for wrong, text in ((other.fileno(), no_listener), (-1, "no socket"), ("5", "no socket")):
            with pytest.raises(UsageError, match=rf"master_listen_fd is .*{text}"):
                TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=wrong)


def test_a_signal_handler_may_close_the_store_while_its_thread_takes_a_connection(
    master: TCPStore, in_threads
) -> None:
    class Interrupted(list):
        def pop(self) -> tcp_store.TCPConnection:
            connection = super().pop()
            master.close()
            return connection

    master._idle = Interrupted(master._idle)
    (found,) = in_threads(lambda: master.set("k", "v"))
    assert isinstance(found, StoreError)
    assert "was closed while" in str(found)


def test_a_socket_gets_no_timeout_of_more_milliseconds_than_poll_takes(master: TCPStore) -> None:
    with raw(master) as connected:
        connection = tcp_store.TCPConnection(connected, "127.0.0.1", master.port)
        for days in (1, 50, 10_000):
            connection.send(b"", time.monotonic() + days * 24 * 3600)
            assert 1000 * (connected.gettimeout() or 0) < 1 << 31


def test_a_forked_child_does_not_share_its_parents_server() -> None:
    """No thread serves that server in the child; this holds even if the table of servers was locked at the fork."""
    with TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True) as store, serving._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # ends a child that hangs on the lock
            try:
                TCPStore("127.0.0.1", store.port, is_master=True, multi_tenant=True)
            except ResourceError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_linger_ends_when_the_others_have_left(in_threads) -> None:
    """The linger is 300 s, and the threads have 60 s."""
    with TCPStore("127.0.0.1", 0, is_master=True) as master, master.clone() as client:
        closing = threading.Event()

        def close_master() -> None:
            closing.set()
            master.close(linger=300)

        def use_and_leave() -> bytes:
            closing.wait()
            client.set("k", "v")
            value = client.get("k")
            client.close()
            return value

        assert in_threads(close_master, use_and_leave) == [None, b"v"]


def test_linger_is_bounded(master: TCPStore) -> None:
    with master.clone():
        master.close(linger=0.1)


def test_ctrl_c_ends_a_waiting_get(processes) -> None:
    source = """
import sys
from fastcoll.store import TCPStore
with TCPStore("127.0.0.1", 0, is_master=True) as store:
    try:
        print("up", flush=True)
        store.get("never")
    except KeyboardInterrupt:
        print("interrupted", store.add("n", 1))
"""
    process = processes.start(source)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=100)[0] == "interrupted 1\n"
