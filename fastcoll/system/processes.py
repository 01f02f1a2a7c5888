"""The ranks of a group and their processes: identifies processes and nodes, and proves that a process is dead.

A process is identified by its pid and the clock tick at which it started, within a boot and a pid namespace. So if the
kernel reuses the pid of a dead peer, the new process is not taken for the peer. Death is detected with a pidfd, which
becomes readable when the process has ended (a zombie has ended). The pidfds are kept in one table, because groups check
every few milliseconds while they wait. Processes on other machines or in other containers are *out of sight*: this
process cannot check them. Instead, a *witness*, an object that has connections with such processes, reports those whose
connection is lost.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import select
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Protocol, TypeVar

from .._version import __version__
from ..errors import StoreError
from .forks import at_fork

_log = logging.getLogger("fastcoll")
P = TypeVar("P", bound="ProcessId")
_MAX_BYTES = 4096

SESSION = "PYTEST_FASTCOLL_SESSION"
"""The environment variable with which a pytest session marks its processes and their names in shared memory."""


def session() -> str:
    """Return the suffix of names in shared memory; empty outside of tests."""
    return os.environ.get(SESSION, "")


@dataclass(frozen=True, kw_only=True)
class ProcessId:
    """The identity of one process, unique until the machine reboots."""

    called: ClassVar[str] = "a process"  # what error texts call an object of this class

    host: str  # the node's name, for messages only
    pid: int  # its number inside `pid_namespace`
    start_time: int  # clock ticks after boot, field 22 of /proc/PID/stat
    boot_id: str  # the kernel's random id of this boot; equal means the same machine
    pid_namespace: str  # the name of the namespace of `pid`

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def where(self) -> str:
        """The process, as messages show it."""
        return f"pid {self.pid} on {self.host}"

    def is_process(self, process: ProcessId) -> bool:
        """Return whether this object and `process` identify the same process."""
        return all(getattr(self, name) == getattr(process, name) for name in types_of(ProcessId))

    def to_bytes(self) -> bytes:
        """Return all fields as JSON, for a store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls: type[P], data: bytes) -> P:
        """Parse the result of `to_bytes`.

        Raises:
            StoreError: the data is malformed (all fields are checked, because data of peers is not trusted).
        """
        try:
            if len(data) > _MAX_BYTES:
                raise ValueError(f"{len(data)} bytes, at most {_MAX_BYTES}")
            record, types = json.loads(data), types_of(cls)
            if not isinstance(record, dict) or set(record) != set(types):
                raise ValueError(f"expected the fields {', '.join(types)}")
            for name, value in record.items():
                if type(value) is not types[name]:
                    raise ValueError(f"{name} must be {types[name].__name__}, got {value!r}")
            return cls(**record)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{cls.called} cannot be read ({error}): {data[:80]!r}") from error

    def alive(self) -> bool | None:
        """Return whether the process runs; None if that cannot be determined from here."""
        if not in_sight(self):
            return None
        return not dead_among([self])


def types_of(kind: type[ProcessId]) -> dict[str, type]:
    # `from __future__ import annotations` makes the declared types texts.
    known = {"int": int, "str": str, "float": float, "bool": bool}
    return {field.name: known[str(field.type)] for field in fields(kind)}


def this_process() -> ProcessId:
    return ProcessId(
        host=os.uname().nodename,
        pid=os.getpid(),
        start_time=int(status_of(os.getpid())[19]),
        boot_id=_boot_id(),
        pid_namespace=_pid_namespace(),
    )


def network_here() -> str:
    """Return an identifier of this process's network namespace that is unique across machines."""
    return f"{_boot_id()} {os.readlink('/proc/self/ns/net')}"


def in_sight(process: ProcessId) -> bool:
    """Return whether this process can determine if `process` lives: same boot, same pid namespace."""
    return process.boot_id == _boot_id() and process.pid_namespace == _pid_namespace()


def cores_of(processes: Iterable[ProcessId]) -> set[int]:
    """Return all CPUs on which at least one living process of `processes` may run.

    Processes that are out of sight are ignored.
    """
    cores: set[int] = set()
    for process in processes:
        if in_sight(process):
            with suppress(ProcessLookupError):
                cores |= os.sched_getaffinity(process.pid)
    return cores


def neighbours_of(members: Sequence[ProcessId], crowd: Iterable[ProcessId], ranks: int = 0) -> int:
    """Count the processes of `crowd` that are not among `members`, but may run on one of their cores.

    Args:
        ranks: number of processes of the job. Those that are in neither of the two count, too.
    """
    cores = cores_of(members)
    own, known = (
        {(each.boot_id, each.pid_namespace, each.pid): each for each in some} for some in (members, crowd)
    )
    near = (known[key] for key in known.keys() - own.keys())
    unknown = max(0, ranks - len(own.keys() | known.keys()))
    return unknown + sum(not cores.isdisjoint(cores_of([each])) for each in near)


def have_own_cores(members: Sequence[ProcessId], crowd: Iterable[ProcessId] = ()) -> bool:
    """Return whether each process of one host, and each of `crowd` on the same cores, can have a core of its own."""
    return len(members) + neighbours_of(members, crowd) <= len(cores_of(members))


def dead_among(processes: Iterable[P]) -> list[P]:
    """Return the processes that are proven dead; a process that is out of sight counts as alive.

    This is one poll(2) without waiting, cheap enough to run every 50 ms. It never blocks.
    """
    with _lock:
        watched = [(process, _watch(process)) for process in processes if in_sight(process)]
        # Not a shared object, because a signal handler that runs during its `poll` could not use it.
        poller = select.poll()
        for _, state in watched:
            if state is not None and state != _UNWATCHABLE:
                poller.register(state, select.POLLIN)
        # A handler may also have closed some of these descriptors, which poll reports as POLLNVAL.
        ended = {fd for fd, events in poller.poll(0) if events & select.POLLIN}
        return [
            process
            for process, state in watched
            if state is None or state in ended or (state == _UNWATCHABLE and _recycled(process))
        ]


class Witness(Protocol):
    """An object that has connections with processes, also with those that are out of sight."""

    def lost_processes(self) -> Mapping[Any, str]:
        """Return {process: how its connection ended} for those that had not left or failed. Never blocks."""


witnesses: set[Witness] = set()
"""The witnesses that `gone_among` asks; an object is in this set as long as it has connections."""


def gone_among(processes: Iterable[P]) -> dict[P, str | None]:
    """Return the processes that are proven dead (None), or lost (how the connection ended). Never blocks."""
    asked = list(processes)
    gone: dict[ProcessId, str | None] = {}
    for witness in list(witnesses):
        gone.update(witness.lost_processes())
    gone.update(dict.fromkeys(dead_among(asked)))
    return {process: gone[process] for process in asked if process in gone}


def describe_gone(gone: Mapping[P, str | None]) -> str:
    """Say for error texts who is gone and how, as `gone_among` returns it; an empty text means that it is unknown."""
    names = ", ".join(map(str, gone))
    if all(how is None for how in gone.values()):
        return f"{names} died"
    how = ", ".join(dict.fromkeys(filter(None, gone.values())))
    return f"{names} died or lost its connection{f' ({how})' if how else ''}"


def forget(processes: Iterable[ProcessId]) -> None:
    """Close the pidfds of `processes`; a later check opens them anew."""
    with _lock:
        for process in processes:
            state = _watched.pop((process.pid, process.start_time), None)
            if state is not None and state >= 0:
                os.close(state)


_UNWATCHABLE = -1
_lock = threading.RLock()  # reentrant, because a signal handler may leave a group
# (pid, start time) -> the process's pidfd; None: it is dead; _UNWATCHABLE: it has no pidfd, so /proc is read instead.
_watched: dict[tuple[int, int], int | None] = {}


def _drop_inherited() -> None:
    """In a forked child: replace the lock, which a thread of the parent may have held, and close the pidfds."""
    global _lock
    _lock = threading.RLock()
    for state in _watched.values():
        if state is not None and state != _UNWATCHABLE:
            os.close(state)
    _watched.clear()
    witnesses.clear()


at_fork("processes", _drop_inherited)


def _watch(process: ProcessId) -> int | None:
    """Return the entry of a process in `_watched`; make it if there is none."""
    key = process.pid, process.start_time
    if key not in _watched:
        _watched[key] = _open(process)
    return _watched[key]


def _open(process: ProcessId) -> int | None:
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    except OSError:  # out of descriptors, or a kernel or sandbox without pidfds
        return _UNWATCHABLE
    # Check after opening: from here on the pidfd refers to this process.
    if _recycled(process):
        os.close(fd)
        return None
    return fd


def _recycled(process: ProcessId) -> bool:
    """Return whether the pid is no longer that of the living process: it is free, a zombie's or another process's."""
    try:
        status = status_of(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # no descriptor is free: nothing is proven
        return False
    return has_ended(status) or int(status[19]) != process.start_time


def has_ended(status: list[bytes]) -> bool:
    """Return whether a process with this status is a zombie: all threads have ended, not only the first one."""
    return status[0] in (b"Z", b"X") and int(status[17]) <= 1


def status_of(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the command.

    The state is at 0, the number of threads at 17, the start time at 19.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()  # the command may contain spaces and parentheses


def living_thread(pid: int) -> int:
    """Return the pid, or the id of another living thread if only the process's first thread has ended.

    Once the first thread has ended, /proc/PID no longer shows the process's files, command, environment and state, but
    /proc/ID of another thread does. OSError: /proc/PID cannot be read.
    """
    status = status_of(pid)
    if status[0] in (b"Z", b"X") and not has_ended(status):
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            with suppress(OSError):  # it has ended meanwhile
                if status_of(thread)[0] not in (b"Z", b"X"):
                    return thread
    return pid


@functools.cache
def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


@functools.cache
def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


# ---- ranks -------------------------------------------------------------------------------------------------

_speaker = ""


@dataclass(frozen=True, kw_only=True)
class Member(ProcessId):
    """One rank and its process."""

    called: ClassVar[str] = "a rank's registration"

    rank: int
    world_size: int
    backend: str  # the backend that the rank was asked to use
    # The device number of /dev/shm (0: there is none): ranks that can share memory see the same number.
    shm_device: int
    network: str
    version: str  # version of this library

    @classmethod
    def here(cls, rank: int, world_size: int, backend: str) -> Member:
        return cls(
            **vars(this_process()),
            rank=rank,
            world_size=world_size,
            backend=backend,
            shm_device=_shm_device(),
            network=os.readlink("/proc/self/ns/net"),
            version=__version__,
        )

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.where})"

    @property
    def node(self) -> tuple[str, int]:
        """A key that is equal for ranks that can share memory, because they have the same boot and /dev/shm."""
        return self.boot_id, self.shm_device

    def same_node(self, other: Member) -> bool:
        """Return whether two ranks can share memory."""
        return self.node == other.node

    def same_network(self, other: Member) -> bool:
        """Return whether both ranks have the same network interfaces, loopback included.

        They have the same interfaces if they are in one network namespace of one boot.
        """
        return (self.boot_id, self.network) == (other.boot_id, other.network)


def set_process_rank(rank: int) -> None:
    """Prefix this process's log lines with its global rank from now on."""
    global _speaker
    _speaker = f"rank {rank}: "
    _log.addFilter(_name_speaker)


def _name_speaker(record: logging.LogRecord) -> bool:
    record.msg = f"{_speaker}{record.msg}"
    return True


def _shm_device() -> int:
    try:
        return os.stat("/dev/shm").st_dev
    except FileNotFoundError:
        return 0


class Topology:
    """The nodes of a group, as seen by one of its ranks."""

    def __init__(self, members: Sequence[Member], rank: int) -> None:
        by_node: dict[tuple[str, int], list[int]] = {}
        for number, member in enumerate(members):
            by_node.setdefault(member.node, []).append(number)
        nodes = [*by_node.values()]
        # Group ranks, ascending; nodes in the order of their lowest rank.
        self.nodes = tuple(map(tuple, nodes))
        self._homes = {
            rank: (number, place) for number, node in enumerate(nodes) for place, rank in enumerate(node)
        }
        self.node, place = self._homes[rank]
        self.local, self.local_rank = self.nodes[self.node], place
        self.rails = min(map(len, nodes))  # how many ranks of each node communicate with other nodes
        # The ranks, one per node and this rank included, that exchange data between nodes with this rank; None if this
        # rank exchanges no data with other nodes, because its node has more ranks than `rails`.
        self.rail = tuple(node[place] for node in nodes) if place < self.rails else None
        self.even = len(set(map(len, nodes))) == 1
        # Whether the ranks of all nodes, listed node by node, are 0..n-1.
        self.in_order = [rank for node in nodes for rank in node] == list(range(len(members)))

    def home_of(self, rank: int) -> tuple[int, int]:
        """Return the number of a rank's node, and its local rank there."""
        if rank not in self._homes:
            raise ValueError(f"no rank {rank}")
        return self._homes[rank]
