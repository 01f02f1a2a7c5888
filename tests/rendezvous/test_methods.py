"""Every init_method with real processes: env:// with and without launchers, tcp://, file://, multicast."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from rendezvous.observed import LIMIT

import fastcoll
from fastcoll.errors import ResourceError, StoreError, StoreTimeoutError, UsageError
from fastcoll.launch.nodes import free_port
from fastcoll.rendezvous import meet, multicast, register_rendezvous_handler, rendezvous
from fastcoll.rendezvous.multicast import MAX_DATAGRAM, Announcement, MulticastSocket, job_digest
from fastcoll.store import HashStore, tcp_store
from fastcoll.store.secret import job_secret
from fastcoll.system.processes import this_process

MEET = """
import os, sys
from fastcoll.errors import FastcollError
from fastcoll.rendezvous import meet
from fastcoll.rendezvous.join import join
url, rank, size, timeout, group = (sys.argv[1:] + ["env://", "-1", "-1", "60", ""][len(sys.argv) - 1:])
try:
    found = meet(url, int(rank), int(size), float(timeout), group)
    members = join(found.store, found.rank, found.world_size, "shm", float(timeout))
    pids = sorted(m.pid for m in members)
    # In one piece, which launchers keep together.
    os.write(1, f"{found.rank} {found.world_size} {type(found.store).__name__} {pids}\\n".encode())
    found.close(linger=60)
except FastcollError as error:
    print(type(error).__name__, error, flush=True)
"""


def assert_one_world(outputs: list[str], pids: list[int], store: str) -> None:
    """Check that all printed different ranks of one world of exactly these processes."""
    size = len(pids)
    assert sorted(outputs) == [f"{rank} {size} {store} {sorted(pids)}" for rank in range(size)]


# env://


@pytest.mark.parametrize("environ", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_a_world_of_one_needs_no_address(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = meet("env://", -1, -1, 5)
    assert (found.rank, found.world_size, found.host) == (0, 1, "127.0.0.1")
    assert isinstance(found.store, HashStore)
    found.close()
    found.close()


@pytest.mark.parametrize(("variable", "address"), [("RANK", {"MASTER_ADDR": "localhost"}), ("PMI_RANK", {})])
def test_ranks_meet_by_variables_and_arguments_and_under_mpi_rank_0_needs_no_address(
    processes, variable: str, address: dict[str, str]
) -> None:
    port, ranks = str(free_port()), []
    for rank, given in enumerate((address, {"MASTER_ADDR": "localhost", "WORLD_SIZE": "9"})):
        more = {"MASTER_PORT": port, variable: str(7 * rank)}
        ranks.append(processes.start(MEET, "env://", rank, 2, **given, **more))
    assert_one_world(processes.outputs(ranks), [rank.pid for rank in ranks], "TCPStore")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_ranks_meet_at_an_address(processes, host: str) -> None:
    url = f"tcp://{host}:{free_port()}?world_size=3&rank="
    ranks = [processes.start(MEET, f"{url}{rank}") for rank in range(3)]
    assert_one_world(processes.outputs(ranks), [rank.pid for rank in ranks], "TCPStore")


@pytest.mark.parametrize(
    ("environ", "rank", "message"),
    [
        ("RANK=1", -1, r"misses WORLD_SIZE \(set: RANK\)"),
        ("WORLD_SIZE=2", -1, r"misses RANK \(set: WORLD_SIZE\)"),
        ("MASTER_PORT=5", -1, r"misses RANK, WORLD_SIZE \(set: MASTER_PORT\)"),
        ("RANK=1 WORLD_SIZE=2", -1, r"misses MASTER_ADDR, MASTER_PORT \(set: RANK, WORLD_SIZE\)"),
        ("WORLD_SIZE=2 MASTER_ADDR=h", 1, r"misses MASTER_PORT \(set: WORLD_SIZE, MASTER_ADDR\)"),
        ("RANK=0 WORLD_SIZE=2", -1, r"misses MASTER_ADDR, MASTER_PORT \(set: RANK, WORLD_SIZE\)"),
        ("RANK=0 WORLD_SIZE=2 MASTER_PORT=5", -1, "misses MASTER_ADDR"),
        ("WORLD_SIZE=2 MASTER_PORT=5", 0, "misses MASTER_ADDR"),
        (
            "RANK=1 WORLD_SIZE=2 MASTER_ADDR= MASTER_PORT=5",
            -1,
            r"MASTER_ADDR \(set: RANK, WORLD_SIZE, MASTER_PORT\)",
        ),
        ("PMI_RANK=1 PMI_SIZE=2", -1, r"misses MASTER_ADDR, MASTER_PORT \(set: PMI_RANK, PMI_SIZE\)"),
        ("RANK=0 WORLD_SIZE=2 PMI_RANK=1", -1, "RANK=0, but PMI_RANK=1"),
    ],
)
def test_missing_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, environ: str, rank: int, message: str
) -> None:
    for each in environ.split():
        monkeypatch.setenv(*each.split("="))
    with pytest.raises(UsageError, match=message):
        meet("env://", rank, -1, 5)


LAUNCHER = """
import os, subprocess, sys
ranks = []
for rank in range(3):
    environ = dict(os.environ, PMI_RANK=str(rank), PMI_SIZE="3", MPI_LOCALRANKID=str(rank), MPI_LOCALNRANKS="3")
    command = [sys.executable, "-c", sys.argv[1]]
    if rank == 1:
        command = ["/bin/sh", "-c", '"$0" "$@"; true', *command]
    ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
print("".join(rank.communicate()[0] for rank in ranks))
"""


def test_ranks_of_one_launcher_meet_without_an_address(processes) -> None:
    """As with MPICH's launcher, including a shell in between; two jobs at the same time do not interfere."""
    jobs = [processes.start(LAUNCHER, MEET) for _ in range(2)]
    lines = [output.splitlines() for output in processes.outputs(jobs)]
    for job in lines:
        assert [line.split()[:3] for line in job] == [[str(rank), "3", "FileStore"] for rank in range(3)]
        assert len({line.split("[")[1] for line in job}) == 1
    assert lines[0][0].split("[")[1] != lines[1][0].split("[")[1]
    assert not list(Path(tempfile.gettempdir()).glob(f"fastcoll-{os.geteuid()}-{jobs[0].pid}-*"))


TWO_JOBS = """
import os, subprocess, sys
ranks = []
for rank in range(2):
    for job in range(2):
        environ = dict(os.environ, PMIX_NAMESPACE=f"daemon@{job}")
        for name, value in (("RANK", rank), ("SIZE", 2), ("LOCAL_RANK", rank), ("LOCAL_SIZE", 2)):
            environ[f"OMPI_COMM_WORLD_{name}"] = str(value)
        command = [sys.executable, "-c", sys.argv[1]]
        ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
print("".join(rank.communicate()[0] for rank in ranks))
"""


def test_jobs_of_one_daemon_do_not_meet(processes) -> None:
    """Open MPI's daemon starts several jobs: those of MPI_Comm_spawn beside their parents', and those of prun."""
    lines = processes.outputs([processes.start(TWO_JOBS, MEET)])[0].split("\n")
    worlds = [line.split("[")[1] for line in lines if line]
    assert len(worlds) == 4
    assert worlds[:2] == worlds[2:]
    assert worlds[0] != worlds[1]


def test_under_a_real_mpiexec(processes) -> None:
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None:
        pytest.skip("there is no mpiexec on the PATH")
    root = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    job = processes.run([mpiexec, "-n", "3", sys.executable, "-c", MEET], **root)
    lines = processes.outputs([job])[0].splitlines()
    assert sorted(line.split()[:3] for line in lines) == [[str(rank), "3", "FileStore"] for rank in range(3)]
    assert len({line.split("[")[1] for line in lines}) == 1


# tcp://


@pytest.mark.parametrize(
    ("url", "rank", "world_size", "message"),
    [
        ("tcp://127.0.0.1:5", -1, 2, "needs rank: pass rank="),
        ("tcp://127.0.0.1:5", 0, -1, "needs world_size"),
        ("tcp://127.0.0.1:5", -1, -1, "needs rank and world_size"),
        ("tcp://127.0.0.1:0", 0, 2, "port 0"),
        ("tcp://239.1.1.1:5", 0, -1, "needs the world size"),
        ("file:///tmp/x", 0, -1, "needs the world size"),
        ("file:///no/such/dir/x", 0, 2, "there is no directory /no/such/dir"),
    ],
)
def test_missing_arguments_of_a_method_are_named(url: str, rank: int, world_size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        meet(url, rank, world_size, 5)


# a user-defined one


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Register a handler for mine://; record its arguments, and when it is closed."""
    monkeypatch.setattr("fastcoll.rendezvous.init_method._handlers", {})
    calls: list[str] = []

    def find(url: str, timeout: timedelta) -> Iterator[tuple[HashStore, int, int]]:
        calls.append(f"{url} {timeout}")
        query = dict(parse_qsl(urlsplit(url).query))
        with HashStore() as store:
            yield store, int(query.get("rank", 0)), int(query.get("world_size", 1))
        calls.append("closed")

    register_rendezvous_handler("mine", find)
    return calls


def test_a_users_handler_finds_the_others(handlers: list[str]) -> None:
    store, rank, world_size = next(rendezvous("mine://there?x=1", 1, 2))
    assert (type(store), rank, world_size) == (HashStore, 1, 2)
    found = meet("mine://there", -1, -1, 7)
    assert (found.rank, found.world_size) == (0, 1)
    assert handlers[0] == "mine://there?x=1&rank=1&world_size=2 0:05:00"
    assert handlers[-1] == "mine://there 0:00:07"
    found.close()
    assert handlers[-1] == "mine://there 0:00:07"  # closed before its end
    with pytest.raises(StoreError, match="closed"):
        found.store.set("a", "1")
    fastcoll.init_process_group(init_method="mine://again")
    fastcoll.destroy_process_group()
    assert handlers[-1].startswith("mine://again 0:30:00")


def test_wrong_handlers_are_refused(handlers: list[str]) -> None:
    for scheme, handler, text in (
        ("mine", print, "mine:// has a rendezvous handler already"),
        ("tcp", print, "tcp:// has a rendezvous handler already"),
        ("a://", print, "scheme is 'a://'; give a word"),
        ("other", 5, "handler is 5; give a generator function"),
    ):
        with pytest.raises(UsageError, match=text):
            register_rendezvous_handler(scheme, handler)  # type: ignore[arg-type]
    answers = {"none": iter(()), "pair": iter([(HashStore(), 0)]), "plain": (HashStore(), 0, 1)}
    for scheme, answer in answers.items():
        register_rendezvous_handler(scheme, lambda url, timeout, answer=answer: answer)
        text = f"the handler of '{scheme}://' must yield store, rank and world size"
        with pytest.raises(UsageError, match=text):
            meet(f"{scheme}://", -1, -1, 5)
    register_rendezvous_handler("far", lambda url, timeout: iter([(HashStore(), 3, 2)]))
    with pytest.raises(UsageError, match="rank 3 is not in a world of 2"):
        meet("far://", -1, -1, 5)


# file://


def test_ranks_that_are_given_and_assigned_meet_in_a_file(tmp_path: Path, processes) -> None:
    ranks = [processes.start(MEET, f"file://{tmp_path}/meet", rank, 3) for rank in (2, -1, -1)]
    outputs = processes.outputs(ranks)
    assert_one_world(outputs, [rank.pid for rank in ranks], "FileStore")
    assert outputs[0].startswith("2 ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["file", "v4"])
def test_a_groups_name_and_for_multicast_a_secret_separate_jobs(
    tmp_path: Path, processes, where: str
) -> None:
    url = f"file://{tmp_path}/meet" if where == "file" else group_of(where)
    settings: list[tuple[str, dict[str, str]]] = [("a", {}), ("b", {})]
    settings += [("a", {"FASTCOLL_SECRET": "x"})] if where == "v4" else []
    jobs = [
        [processes.start(MEET, url, -1, 2, 60, name, **more) for _ in range(2)] for name, more in settings
    ]
    for ranks in jobs:
        pids = [rank.pid for rank in ranks]
        assert_one_world(processes.outputs(ranks), pids, "FileStore" if where == "file" else "TCPStore")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ((1, 2), (1, 2), "rank 1 is claimed by two processes"),
        ((-1, 3), (-1, 4), "disagree about the world size"),
    ],
)
@pytest.mark.parametrize("where", ["file", "v4", pytest.param("v6", marks=pytest.mark.long)])
def test_two_processes_that_do_not_fit_are_named_on_both(
    tmp_path: Path, processes, where: str, first: tuple[int, int], second: tuple[int, int], why: str
) -> None:
    url = f"file://{tmp_path}/meet" if where == "file" else group_of(where)
    ranks = [processes.start(MEET, url, *each) for each in (first, second)]
    for output in processes.outputs(ranks):
        assert output.startswith("UsageError ")
        assert why in output
        assert all(f"pid {rank.pid} on " in output for rank in ranks)
    assert not list(tmp_path.iterdir())


WAITING = """
import sys
from fastcoll.store import FileStore
FileStore(sys.argv[1]).wait(["arrivals/member/" + sys.argv[2]])
"""


def test_the_file_of_a_killed_job_is_recovered_from(tmp_path: Path, processes) -> None:
    path = tmp_path / "meet"
    killed = processes.start(MEET, f"file://{path}", -1, 3)
    assert processes.start(WAITING, path, 0).wait(LIMIT) == 0
    killed.kill()
    killed.wait()
    assert path.exists()
    ranks = [processes.start(MEET, f"file://{path}", -1, 3) for _ in range(3)]
    assert_one_world(processes.outputs(ranks), [rank.pid for rank in ranks], "FileStore")
    assert not path.exists()


def test_a_rank_killed_while_meeting_is_named(tmp_path: Path, processes) -> None:
    path = tmp_path / "meet"
    ranks = [processes.start(MEET, f"file://{path}", -1, 3) for _ in range(2)]
    assert processes.start(WAITING, path, 1).wait(LIMIT) == 0
    ranks[0].kill()
    (output,) = processes.outputs(ranks[1:])
    assert output.startswith("PeerDiedError ")
    assert f"process {ranks[0].pid} on {os.uname().nodename} died" in output
    assert not path.exists()


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1)])
def test_a_file_that_another_world_fills(tmp_path: Path, in_threads, before: int, after: int) -> None:
    url = f"file://{tmp_path}/meet"
    first = in_threads(*[partial(meet, url, -1, before, LIMIT)] * before)
    text = rf"belongs to another world, .*pid {os.getpid()} on \S+{'; .* world size: .*' * (before != after)}; choose"
    with pytest.raises(UsageError, match=text):
        meet(url, -1, after, 0.3)

    def close_soon() -> None:
        first[0].store.get("go")
        for each in first:
            each.close()

    def meet_again() -> int:
        first[0].store.set("go", "")
        second = meet(url, -1, after, LIMIT)
        second.close()
        return second.rank

    assert sorted(in_threads(*[meet_again] * after, close_soon)[:after]) == list(range(after))
    assert not list(tmp_path.iterdir())


def test_one_file_many_times(tmp_path: Path, processes) -> None:
    """The same processes repeat the meeting, synchronised only by the file itself."""
    source = """
import sys
from fastcoll.rendezvous import meet
from fastcoll.rendezvous.join import join
for _ in range(25):
    found = meet(sys.argv[1], int(sys.argv[2]), 3, 60.0)
    assert len(join(found.store, found.rank, 3, "shm", 60.0)) == 3
    found.close()
print("done")
"""
    ranks = [processes.start(source, f"file://{tmp_path}/meet", rank) for rank in range(3)]
    assert processes.outputs(ranks) == ["done"] * 3
    assert not list(tmp_path.iterdir())


# tcp:// with a multicast address


@pytest.fixture(params=["v4", pytest.param("v6", marks=pytest.mark.long)])
def group(request: pytest.FixtureRequest) -> str:
    """Return the URL of a new multicast group that this process can join."""
    return group_of(request.param)


def group_of(version: str) -> str:
    port = 20_000 + secrets.randbelow(10_000)
    host = f"239.255.{secrets.randbelow(256)}.{secrets.randbelow(256)}"
    if version == "v6":
        host = f"ff15::{secrets.randbelow(1 << 16):x}:{secrets.randbelow(1 << 16):x}"
    try:
        with MulticastSocket(host, port) as joined:
            joined.send(b"")
    except ResourceError as error:
        pytest.skip(f"no multicast here: {error}")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def test_multicast_assigns_ranks(group: str, processes) -> None:
    ranks = [processes.start(MEET, group, rank, 4) for rank in (2, -1, 0, -1)]
    outputs = processes.outputs(ranks)
    assert_one_world(outputs, [rank.pid for rank in ranks], "TCPStore")
    assert (outputs[0][0], outputs[2][0]) == ("2", "0")


def member_of(group: str) -> MulticastSocket:
    address, _, port = group.removeprefix("tcp://").rpartition(":")
    return MulticastSocket(address.strip("[]"), int(port))


def test_multicast_works_in_a_process_with_many_open_files() -> None:
    """select(2) takes no descriptor above 1023."""
    group = group_of("v4")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2200), hard))
    try:
        with member_of(group) as member:
            with member._receiver as low:
                high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1100)
                member._receiver = socket.socket(fileno=high)
            member.send(b"here")
            assert next(member.receive(LIMIT, MAX_DATAGRAM)) == b"here"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("whose", ["strangers", pytest.param("the dead", marks=pytest.mark.long)])
def test_multicast_ignores(processes, whose: str) -> None:
    """Strangers' datagrams, and recorded announcements of dead candidates. One of each has the lowest nonce.

    The former would lead, with a store of its own; the latter one offers a store that is gone.
    """
    group, end = group_of("v4"), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as store:
        lead = Announcement(
            job_digest(""),
            "0" * 32,
            time.time(),
            2,
            "127.0.0.1",
            store.getsockname()[1],
            **vars(this_process()),
        )
        if whose == "strangers":
            sent = [one.seal(key) for one in (lead, replace(lead, world_size=3)) for key in (b"wrong", b"")]
            sent += [sent[0][:-32] + bytes(32), os.urandom(MAX_DATAGRAM), os.urandom(60_000), b""]
        else:
            gone = replace(lead, time=0.0, host="gone", pid=1, start_time=1, boot_id="other")
            others = replace(gone, address="", port=0), replace(gone, nonce="0" * 31 + "1", port=free_port())
            sent = [one.seal(job_secret()) for one in others]

        def flood() -> None:
            with member_of(group) as sender:
                while not end.wait(0.005):
                    for data in sent:
                        sender.send(data)

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            ranks = [processes.start(MEET, group, -1, 2) for _ in range(2)]
            assert_one_world(processes.outputs(ranks), [rank.pid for rank in ranks], "TCPStore")
        finally:
            end.set()
            thread.join()
        store.setblocking(False)
        with pytest.raises(BlockingIOError):
            store.accept()


def test_multicast_names_the_processes_that_came(
    group: str, in_threads, clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers, both_received = set[str](), threading.Event()

    class Recording(multicast.Election):
        def record(self, announcement: Announcement, now: float) -> None:
            super().record(announcement, now)
            if announcement.nonce != self.nonce:
                receivers.add(self.nonce)
            if len(receivers) == 2:
                both_received.set()

    def call() -> None:
        meet(group, -1, 3, 600)

    def end() -> None:
        assert both_received.wait(LIMIT)
        clock.ahead += 1000

    monkeypatch.setattr(multicast, "Election", Recording)
    monkeypatch.setattr(multicast, "FRESH_SECONDS", 2000)
    for error in in_threads(call, call, end)[:2]:
        assert isinstance(error, StoreTimeoutError)
        assert f"heard pid {os.getpid()} on {os.uname().nodename}" in str(error)


def test_multicast_one_too_many_is_left_over(in_threads, clock) -> None:
    group, met = group_of("v4"), threading.Semaphore(0)

    def take_part() -> int:
        found = meet(group, -1, 2, 600)
        found.store.barrier("both", 2, LIMIT)
        met.release()
        found.close(linger=LIMIT)
        return found.rank

    def end() -> None:
        assert all(met.acquire(timeout=LIMIT) for _ in range(2))
        clock.ahead += 1000

    *results, _ = in_threads(take_part, take_part, take_part, end)
    assert sorted(result for result in results if isinstance(result, int)) == [0, 1], results
    assert [type(result) for result in results if not isinstance(result, int)] == [StoreTimeoutError]


def test_multicast_a_killed_candidate_is_named(group: str, processes) -> None:
    ranks = [processes.start(MEET, group, -1, 3) for _ in range(2)]
    announced: set[int] = set()
    with member_of(group) as socket_:
        # The second candidate has announced itself while the first one listened.
        for data in socket_.receive(LIMIT, MAX_DATAGRAM):
            announcement = Announcement.unseal(data, job_secret())
            assert announcement is not None
            announced.add(announcement.pid)
            if len(announced) == 2:
                break
    killed = announcement.pid
    survivor = next(rank for rank in ranks if rank.pid != killed)
    os.kill(killed, signal.SIGKILL)
    (output,) = processes.outputs([survivor])
    assert output.startswith("PeerDiedError ")
    assert f"process {killed} on {os.uname().nodename} died" in output


# Warnings


@pytest.mark.parametrize(
    ("where", "rank", "size", "missing"),
    [
        ("tcp", 1, 2, "rank 0, which serves it (Connection refused); port"),
        ("file", 1, 3, "rank(s) 0, 2 (here: {me})"),
        ("file", -1, 3, "2 more (here: {me})"),
        ("v4", -1, 2, "2 processes to meet; heard nobody"),
        ("v6", -1, 2, "2 processes to meet; heard nobody"),
    ],
)
def test_a_late_rank_is_named_in_a_warning(
    tmp_path: Path, in_threads, clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    where: str, rank: int, size: int, missing: str,
) -> None:  # fmt: skip
    # Without a limit: on a busy machine a connect may exceed it before it is refused.
    monkeypatch.setattr(
        tcp_store, "_connected", lambda host, port, *_: socket.create_connection((host, port))
    )
    monkeypatch.setenv("FASTCOLL_WARN_AFTER", "300")
    missing = missing.format(me=f"pid {os.getpid()} on {os.uname().nodename}")
    places = {"tcp": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{tmp_path}/meet"}
    url = places.get(where) or group_of(where)

    def wait() -> None:
        meet(url, rank, size, 600)

    error, (warned,) = in_threads(wait, partial(clock.warnings_after, 400, caplog, 1, 400))
    assert re.search(rf"has waited 40\d\.\d s for {re.escape(missing)}", warned)
    if where == "tcp":
        assert re.search(
            r"; port \d+ is the store's, beside \d+ of init_method .*: firewalls must let both", warned
        )
        assert re.search(r"\(\d+ is the store's port beside \d+, from init_method", str(error))
    assert isinstance(error, StoreTimeoutError)
    lost = "within 600 s (last: Connection refused); is rank 0 running there"
    named = {"tcp": lost, "file": f"meets 3 processes: {missing} did not come within 600 s"}
    assert named.get(where, "fewer than 2 processes met") in str(error)
