"""A crowd of real clients that start a job through one TCP store, and the messages that they send.

Rank 0 serves the store and takes part, in a process of its own as in a real job; the other ranks are threads
of a few processes, each with its own TCPStore and so its own connection over loopback. Each does what
`init_process_group` does through the store: connect, check for an earlier job, join, meet for the default
group, settle; after all have started, leave. Identities are invented, eight ranks per node, so that the list
of members is as long as that of a real job, and no rank can see the process of another.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from fastcoll.job.backends import parse_backend
from fastcoll.job.job import Job
from fastcoll.job.lease import StoreLease, times_settled
from fastcoll.rendezvous.assemble import GroupMeeting
from fastcoll.rendezvous.join import join
from fastcoll.store import PrefixStore, Store, TCPStore, tcp_store
from fastcoll.store.table import Op, StoreRequest
from fastcoll.system import processes as members_module
from fastcoll.system.processes import Member, ProcessId

RANKS_PER_NODE = 8
_DEADLINE_SECONDS = 300.0
_who = threading.local()


@dataclass
class Tally:
    """The counts of the clients of one process, or of all.

    Attributes:
        messages: requests by operation, "OPEN" for openings, "MISSING" for published names of missing ranks.
        joined: the ranks that have a default group.
        errors: error texts and their numbers.
    """

    messages: Counter[str] = field(default_factory=Counter)
    joined: list[int] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def merge(self, other: Tally) -> None:
        """Add the counts of another process."""
        self.messages += other.messages
        self.joined += other.joined
        self.errors += other.errors


_tally = Tally()
_tally_lock = threading.Lock()


class _CountedConnection(tcp_store.TCPConnection):
    """A connection that counts its requests."""

    def open(self, secret: bytes, deadline: float) -> None:
        with _tally_lock:
            _tally.messages["OPEN"] += 1
        super().open(secret, deadline)

    def ask(self, request: StoreRequest, deadline: float) -> Any:
        with _tally_lock:
            names_missing = request.op == Op.SET and request.keys[0].endswith(b"/missing")
            _tally.messages["MISSING" if names_missing else Op(request.op).name] += 1
        return super().ask(request, deadline)


def _identity() -> ProcessId:
    """Return the invented identity of this thread's rank: eight ranks per node, each node with its own boot id."""
    node = _who.rank // RANKS_PER_NODE
    return ProcessId(
        host=f"node{node:05d}",
        pid=10_000 + (_who.rank * 7919) % 50_000,
        start_time=4_000_000 + (_who.rank * 104_729) % 900_000,
        boot_id=str(uuid.uuid5(uuid.NAMESPACE_DNS, f"node{node}")),
        pid_namespace="pid:[4026531836]",
    )


def _prepare() -> None:
    members_module.this_process = _identity
    tcp_store.TCPConnection = _CountedConnection  # type: ignore[misc]


def _meet(store: Store, name: str, members: Sequence[Member], rank: int, timeout: float) -> Any:
    """Run the default group's meeting as the store sees it: rank 0 publishes terms, each rank its address, rank 0 the
    list of addresses, and all read it. No rank listens or dials."""
    node = rank // RANKS_PER_NODE
    address = f"10.{node // 65536}.{node // 256 % 256}.{node % 256}"
    with GroupMeeting(store, members, rank, timeout, "meeting") as meeting:
        if rank == 0:
            meeting.publish("terms", b"x" * 128)
        else:
            meeting.receive("terms")
        meeting.assemble([["eth0"], [address], [30_000 + (rank * 31) % 30_000]])


def _start(rank: int, size: int, store: TCPStore) -> StoreLease:
    view = PrefixStore("fastcoll", store)
    times_settled(view, rank)
    members = join(view, rank, size, "cpu:auto", _DEADLINE_SECONDS)
    assert len(members) == size
    lease = StoreLease(view, members, rank, lambda: store.close(0.0))
    job = Job(lease, parse_backend(None), _DEADLINE_SECONDS)
    with job.making(range(size), "making the default group"):
        _meet(PrefixStore("world", view), "WORLD", members, rank, _DEADLINE_SECONDS)
    return lease


def _serve(pipe: Connection, size: int) -> None:
    """Run rank 0's process."""
    _prepare()
    _who.rank = 0
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=_DEADLINE_SECONDS, wait_for_workers=False) as store:
        pipe.send(store.port)
        pipe.recv()
        lease = _start(0, size, store)
        _tally.joined.append(0)
        pipe.send(None)
        pipe.recv()
        pipe.send(_tally)
        pipe.recv()
        lease.leave(_DEADLINE_SECONDS)
        pipe.send(None)


def _client(rank: int, size: int, port: int, begin: threading.Event, leave: threading.Event) -> None:
    _who.rank = rank
    begin.wait()
    try:
        with TCPStore("127.0.0.1", port, timeout=_DEADLINE_SECONDS) as store:
            lease = _start(rank, size, store)
            with _tally_lock:
                _tally.joined.append(rank)
            leave.wait()
            lease.leave(0.0)
    except Exception as error:
        with _tally_lock:
            _tally.errors[str(error)[:200]] += 1


def _crowd(pipe: Connection, ranks: Sequence[int], size: int, port: int) -> None:
    """Run a process of clients, one thread for each."""
    _prepare()
    begin, leave = threading.Event(), threading.Event()
    threads = [threading.Thread(target=_client, args=(rank, size, port, begin, leave)) for rank in ranks]
    for thread in threads:
        thread.start()
    pipe.send(None)
    pipe.recv()
    begin.set()
    while len(_tally.joined) + sum(_tally.errors.values()) < len(ranks):
        time.sleep(0.02)
    pipe.send(None)
    pipe.recv()
    pipe.send(_tally)
    pipe.recv()
    leave.set()
    for thread in threads:
        thread.join()
    pipe.send(None)


def measure(size: int, processes: int = 4) -> Tally:
    """Start a job of `size` ranks, with clients in several processes, and let it leave; return the clients' counts.

    Raises:
        RuntimeError: a client failed.
    """
    with ExitStack() as crew:
        pipe = _worker(crew, _serve, size)
        port = pipe.recv()
        pipes = [pipe]
        for number in range(min(processes, size - 1)):
            pipes.append(_worker(crew, _crowd, range(1 + number, size, processes), size, port))
            pipes[-1].recv()
        _ask(pipes, "start")
        total = Tally()
        for part in _ask(pipes, "report"):
            total.merge(part)
        _ask(pipes, "leave")
    if total.errors:
        raise RuntimeError(f"clients failed: {dict(total.errors)}")
    return total


def _worker(crew: ExitStack, work: Callable[..., None], *arguments: object) -> Connection:
    """Start a process that runs `work(pipe, *arguments)` until `crew` closes; return the other end of the pipe."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=work, args=(theirs, *arguments))
    process.start()
    theirs.close()
    crew.callback(process.close)
    crew.callback(process.join)
    crew.callback(mine.close)
    return mine


def _ask(pipes: Sequence[Connection], command: object) -> list[Any]:
    for pipe in pipes:
        pipe.send(command)
    return [pipe.recv() for pipe in pipes]
