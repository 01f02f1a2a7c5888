"""Launchers that publish failures to each other, in one process over loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from launch.launching import LIMIT, patched, until

from fastcoll.errors import StoreTimeoutError
from fastcoll.launch import failures as job
from fastcoll.launch.failures import Failure, NodeFailures
from fastcoll.launch.nodes import default_port, free_port
from fastcoll.store import TCPStore, tcp_store
from fastcoll.store.store import StalledError

FIRST, SECOND = Failure(3, "rank 1 failed"), Failure(4, "rank 2 failed")


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[NodeFailures]]:
    """The launchers of three nodes; one that node 0 leaves behind stops trying to connect after 0.2 s."""
    monkeypatch.setattr(job, "_TRY_SECONDS", 0.2)
    for name in ("_FIRST_SECONDS", "_LAST_SECONDS"):
        monkeypatch.setattr(job, name, LIMIT)
    port = free_port()
    with ExitStack() as stack:
        yield [stack.enter_context(NodeFailures(3, rank, "127.0.0.1", port)) for rank in range(3)]


def known(node: NodeFailures) -> Failure | None:
    """Wait for a failure and return it."""
    until(node.failure)
    return node.failure()


@pytest.mark.parametrize("teller", [0, 1, 2])
def test_all_launchers_read_the_first_failure(joined: list[NodeFailures], teller: int) -> None:
    joined[teller].publish(FIRST)
    assert [known(node) for node in joined] == [FIRST] * 3
    joined[teller - 1].publish(SECOND)
    assert [node.failure() for node in joined] == [FIRST] * 3


def test_no_failure_is_published_when_all_end_well(joined: list[NodeFailures]) -> None:
    joined[0].__exit__()
    joined[1].__exit__()
    assert [node.failure() for node in joined] == [None] * 3


def test_joiners_wait_on_while_one_of_those_that_run_is_a_rank() -> None:
    """A joiner that was admitted goes on after all other ranks have left, and may admit those that wait."""

    def end_joining() -> bool:
        node.end_joining(["0.new1", "0.new2"])
        for thread in threading.enumerate():
            if thread.name == "fastcoll-joining":
                thread.join()
        return store.check(["elastic/over"])

    with NodeFailures(1, 0, "127.0.0.1", free_port()) as node:
        store = TCPStore("127.0.0.1", int(node.address.rpartition(":")[2]), timeout=LIMIT)
        store.set("elastic/start/joined/0.new2", "1")
        assert not end_joining()
        store.delete_key("elastic/start/joined/0.new2")
        assert end_joining()
        store.close()


def test_a_failure_reaches_a_node_that_starts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_FIRST_SECONDS", 0.0)
    port = free_port()
    with ExitStack() as stack:
        later = NodeFailures(2, 0, "127.0.0.1", port)
        first = stack.enter_context(NodeFailures(2, 1, "127.0.0.1", port))
        first.publish(FIRST)
        stack.enter_context(later)
        assert known(later) == known(first) == FIRST


def test_a_launcher_that_never_met_node_0_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_SECONDS", "_TRY_SECONDS", "_LAST_SECONDS"):
        monkeypatch.setattr(job, name, 0.1)
    before = set(threading.enumerate())
    with NodeFailures(2, 1, "127.0.0.1", free_port()) as node:
        node.publish(FIRST)
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT)
        assert not thread.is_alive()


class Clock:
    """A clock that replaces the module `time`; only `sleep` advances it."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_an_unreachable_node_delays_the_end_as_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 1 never reads the failure of node 0, whose launcher ends nevertheless."""
    with NodeFailures(2, 0, "127.0.0.1", free_port()) as node:
        node.publish(FIRST)
        assert known(node) == FIRST
        clock = Clock()
        monkeypatch.setattr(job, "time", clock)
        start = clock.now
    assert job._LAST_SECONDS <= clock.now - start < job._LAST_SECONDS + 2 * job._POLL_SECONDS


@pytest.mark.parametrize("why", ["the address is another machine's", "the port is in use by"])
def test_a_launcher_that_cannot_serve_warns_and_goes_on(capsys: pytest.CaptureFixture[str], why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = "192.0.2.1:1234" if "address" in why else f"127.0.0.1:{taken.getsockname()[1]}"
        host, port = place.split(":")
        with NodeFailures(2, 0, host, int(port)) as node:
            node.publish(FIRST)
            assert node.failure() is None
    text = capsys.readouterr().err
    begin = "fastcoll.launch: the nodes' launchers cannot meet, so a failure elsewhere does not end"
    assert text.startswith(begin)
    assert place in text
    assert "address" in why or why in text


LEADER = """
import sys
from fastcoll.launch.failures import Failure, NodeFailures
with NodeFailures(2, 0, "127.0.0.1", int(sys.argv[1])) as node:
    print("serves", flush=True)
    sys.stdin.readline()
    node.publish(Failure(3, "rank 1 failed"))
"""


def test_a_launcher_that_is_stopped_for_long_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-Z. The others repeat their requests until it continues, and none is lost."""
    monkeypatch.setattr(job, "_FIRST_SECONDS", LIMIT)
    monkeypatch.setattr(job, "_LOOK_SECONDS", 0.01)
    ends, fetch, port = list[type](), TCPStore.fetch, free_port()

    def noted(*arguments: object) -> list[bytes]:
        try:
            return fetch(*arguments)  # type: ignore[arg-type]
        except StoreTimeoutError as error:
            ends.append(type(error))
            raise

    def await_three(kind: type) -> None:
        before = len(ends)
        until(lambda: sum(issubclass(end, kind) for end in ends[before:]) >= 3)

    monkeypatch.setattr(TCPStore, "fetch", noted)
    with subprocess.Popen(
        [sys.executable, "-c", LEADER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as leader:
        assert leader.stdin is not None
        assert leader.stdout is not None
        assert leader.stdout.readline() == "serves\n"
        with NodeFailures(2, 1, "127.0.0.1", port) as node:
            with monkeypatch.context() as hasty:
                hasty.setattr(tcp_store, "GRACE_SECONDS", 0.01)
                await_three(StoreTimeoutError)
                leader.send_signal(signal.SIGSTOP)
                await_three(StalledError)
                assert node.failure() is None
            leader.send_signal(signal.SIGCONT)
            leader.stdin.write("\n")
            leader.stdin.flush()
            assert known(node) == FIRST
    assert leader.returncode == 0


def test_a_launcher_killed_after_its_ranks_started_is_noticed() -> None:
    """The launcher registers its will late, and its ranks start only after that."""
    port = free_port()
    # The limit of two seconds is raised, because a loaded machine may need longer to connect.
    command = patched("failures._FIRST_SECONDS = 60.0")
    where = ["--nnodes=2", "--node_rank=1", "--master_addr=127.0.0.1", f"--nodes_port={port}"]
    env = {**os.environ, "FASTCOLL_FAILPOINT": "launch.before_will:delay=1, launch.after_start:kill"}
    with NodeFailures(2, 0, "127.0.0.1", port) as node:
        killed = subprocess.run([*command, *where, "--no-python", "sleep", "600"], env=env, timeout=LIMIT)
        assert killed.returncode == -signal.SIGKILL
        failure = known(node)
    assert failure is not None
    assert "the launcher of node 1 (pid" in failure.text
    assert "ended unexpectedly" in failure.text


def test_default_ports_of_consecutive_master_ports_differ() -> None:
    assert {default_port(port) for port in (29500, 29501)} == {19500, 19501}
    assert all(1024 <= default_port(port) <= 65535 for port in range(1024, 65536))
