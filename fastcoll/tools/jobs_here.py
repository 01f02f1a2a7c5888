"""The jobs of this user on this machine, found from outside, even while they hang.

Each process of a job keeps a record of its groups in memory that other processes of the same user can read
(record/record.py). Everything else is from /proc. Reading neither disturbs the processes nor waits for them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..core.signature import describe
from ..record.record import MemberRecord, Record, joining_since, ranks_of, read
from ..system.processes import has_ended, living_thread, status_of
from .blame import ELSEWHERE, GONE, HAS_LEFT, LEFT, Diagnosis, Process, Rank, blocks, explain, waits_of
from .printing import counted, seconds_of
from .waits import RankWait, state_of

_LOOK_SECONDS = (
    0.2  # between two readings of a process's CPU time, which the kernel counts in units of 0.01 s
)
TICKS = os.sysconf("SC_CLK_TCK")
ABOUT_JOB = (
    "show one job only; JOB is its name as listed, the pid of one of its ranks or of their launcher, its "
    "--rdzv-id, Slurm's job id, or a word of its command line"
)
JOB_COLUMNS = "job", "ranks", "for", "command"
_MOST_COMMAND = 100  # characters
_NAMES_OF_JOBS = b"TORCHELASTIC_RUN_ID", b"SLURM_JOB_ID"
_LAUNCHERS = b"FASTCOLL_LAUNCHERS"
_OF_A_LAUNCHER = {b"RANK", b"WORLD_SIZE", b"MASTER_PORT"}


@dataclass(frozen=True)
class RunningJob:
    """A job: its ranks whose processes and records can be read here, by global rank."""

    name: str
    ranks: Mapping[int, Rank]

    @property
    def processes(self) -> list[Process]:
        """The processes of these ranks."""
        return [rank.process for rank in self.ranks.values()]

    @property
    def first(self) -> Rank:
        """The lowest rank that can be read here."""
        return self.ranks[min(self.ranks)]

    def title(self, now: float) -> str:
        """Return a line about the job."""
        first = self.first.record
        here = "" if len(self.ranks) == first.world_size else f", {len(self.ranks)} of them here"
        age, size = seconds_of(max(now - first.started, 0.0)), counted(first.world_size, "rank")
        return f"{size}{here}, for {age}, job {self.name}: {self.first.process.command}"

    def row(self, now: float) -> tuple[str, ...]:
        """Return a row for the list of jobs, under JOB_COLUMNS."""
        first = self.first.record
        age = seconds_of(max(now - first.started, 0.0))
        return self.name, str(first.world_size), age, self.first.process.command

    def whereabouts(self, peer: MemberRecord) -> str:
        """Return the state of a member that is not among `ranks` (`Whereabouts` in blame.py)."""
        if peer.host not in {rank.record.host for rank in self.ranks.values()}:
            return ELSEWHERE
        # Records have the pids of the ranks' own pid namespace. If that is another one, pids cannot be looked up here.
        if self.first.record.pid != self.first.process.pid:
            return GONE
        try:
            return GONE if has_ended(status_of(peer.pid)) else LEFT
        except OSError:
            return GONE

    def absence(self, peer: MemberRecord) -> str:
        """Describe where a member is that is not among `ranks`."""
        texts = {ELSEWHERE: f"on {peer.host}", GONE: "its process has ended", LEFT: HAS_LEFT}
        return texts[self.whereabouts(peer)]

    def diagnoses(self, now: float) -> list[Diagnosis]:
        """Return which ranks hold the job up."""
        return explain(self.ranks, self.whereabouts, now)

    def waits(self, now: float) -> list[RankWait]:
        """Return the waits of the job's ranks."""
        return waits_of(self.ranks, self.whereabouts, now)

    def unseen(self) -> list[MemberRecord]:
        """Return the members of the job's groups whose records cannot be read here."""
        groups = [group for rank in self.ranks.values() for group in rank.record.groups]
        peers = {peer.rank: peer for group in groups for peer in group.members}
        return [peers[rank] for rank in sorted(peers) if rank not in self.ranks]

    def as_dict(self, now: float) -> dict[str, Any]:
        """Return the job's JSON object."""
        first, waits = self.first, self.waits(now)
        unseen = [
            {"rank": p.rank, "host": p.host, "pid": p.pid, "where": self.whereabouts(p)}
            for p in self.unseen()
        ]
        return {
            "job": self.name,
            "world_size": first.record.world_size,
            "command": first.process.command,
            "started": first.record.started,
            "diagnoses": [diagnosis._asdict() for diagnosis in self.diagnoses(now)],
            "ranks": [_rank_as_dict(self.ranks[rank], waits) for rank in sorted(self.ranks)],
            "unseen": unseen,
        }


def _rank_as_dict(rank: Rank, waits: Sequence[RankWait]) -> dict[str, Any]:
    groups = []
    for group in rank.record.groups:
        own = [wait for wait in waits if wait.rank == rank.rank and wait.group is group]
        groups.append(
            {
                "name": group.name,
                "backend": group.backend,
                "members": ranks_of(group.members),
                "calls": group.calls,
                "finished": group.finished,
                "pending": group.pending,
                "last": describe(*group.ring[-1].head, ranks_of(group.members)) if group.ring else None,
                "failure": group.failure or None,
                "in": [
                    {
                        "call": w.number or None,
                        "what": w.what,
                        "seconds": w.seconds,
                        "waits_for": sorted(w.late),
                        "is_waiting": blocks(rank, w, waits),
                    }
                    for w in own
                ],
            }
        )
    return {"rank": rank.rank, **_process_as_dict(rank.process), "groups": groups}


def _process_as_dict(process: Process) -> dict[str, Any]:
    return {
        "pid": process.pid, "state": state_of(process.state).name, "kernel_function": process.kernel_function or None,
        "cores": process.cores, "command": process.command,
    }  # fmt: skip


@dataclass(frozen=True)
class Outside:
    """A process that is in no group; it is joining a job, or a launcher has started it as a rank."""

    rank: str  # RANK in the environment of the process
    since: float | None  # when the process began to join, in seconds since 1970; None: it is not joining
    process: Process

    def row(self, now: float) -> tuple[str, ...]:
        """Return a row for a table."""
        process, since = self.process, "" if self.since is None else seconds_of(max(now - self.since, 0.0))
        about = (self.rank, str(process.pid), state_of(process.state).name, f"{process.cores:.2f}")
        return (*about, since, process.kernel_function, process.command)

    def as_dict(self, now: float) -> dict[str, Any]:
        """Return the process's JSON object."""
        seconds = None if self.since is None else max(now - self.since, 0.0)
        return {"rank": self.rank, "joining_for": seconds, **_process_as_dict(self.process)}


def pids_here() -> Iterator[int]:
    """Yield the pids of this user's processes."""
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError):  # the process has ended
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
                yield pid


def find_jobs() -> tuple[list[RunningJob], list[Outside]]:
    """Return this user's jobs, oldest first, and this user's processes that are in no group (`Outside`)."""
    records: dict[int, Record] = {}
    outside: dict[int, tuple[str, float | None]] = {}
    for pid in pids_here():
        with suppress(OSError):  # the process has ended, or may not be read
            if (record := read(pid)) is not None:
                records[pid] = record
            elif (since := joining_since(pid)) is not None:
                outside[pid] = _environ(pid).get(b"RANK", b"").decode(errors="replace"), since
            elif (rank := _launched(pid)) is not None:
                outside[pid] = rank, None
    seen = {process.pid: process for process in processes([*records, *outside])}
    jobs: dict[str, dict[int, Rank]] = {}
    for pid, record in records.items():
        if pid in seen:
            with suppress(OSError):
                if (again := read(pid)) is not None:
                    jobs.setdefault(again.job, {})[again.rank] = Rank(again, seen[pid], record)
    found = [RunningJob(name, ranks) for name, ranks in jobs.items()]
    alone = [Outside(rank, since, seen[pid]) for pid, (rank, since) in outside.items() if pid in seen]
    alone.sort(key=lambda each: (each.rank.zfill(10), each.process.pid))
    return sorted(found, key=lambda job: job.first.record.started), alone


def look(name: str | None) -> tuple[list[RunningJob], list[Outside]]:
    """Return what `find_jobs` returns, or only what belongs to the job with this name."""
    jobs, alone = find_jobs()
    if name is not None:
        jobs = [job for job in jobs if job.name == name or any(map(_named(name), job.processes))]
        alone = [each for each in alone if _named(name)(each.process)]
    return jobs, alone


def no_job(name: str | None) -> str:
    """Return the text for a user for whom `look` has found nothing."""
    if name is not None:
        return f"there is no job {name!r} of yours on this machine; without a name all are listed"
    return "no process of yours on this machine is in a group of fastcoll"


def _named(text: str) -> Callable[[Process], bool]:
    """Return a predicate: whether a process belongs to the job that `text` names."""

    def is_named(process: Process) -> bool:
        if text.isdecimal():
            # All processes descend from process 1, which only in a container may be a launcher.
            if int(text) in _line(process.pid) and (text != "1" or "fastcoll" in _command(1)):
                return True
        elif text in (words := _words(process.pid)) or text in map(os.path.basename, words):
            return True
        with suppress(OSError):
            environ = _environ(process.pid)
            return text.encode() in {environ.get(name) for name in _NAMES_OF_JOBS}
        return False

    return is_named


def _line(pid: int) -> Iterator[int]:
    """Yield the pid of a process, of its parent, and so on."""
    with suppress(OSError):  # one of these processes has ended
        while pid > 0:
            yield pid
            pid = int(status_of(pid)[1])


def _launched(pid: int) -> str | None:
    """Return RANK of a process that fastcoll's launcher has started; None for others, such as a rank's children.

    Raises:
        OSError: the process's environment cannot be read.
    """
    environ = _environ(pid)
    if not environ.keys() >= _OF_A_LAUNCHER:
        return None
    parent = int(status_of(pid)[1])
    if environ.keys() & {b"RANK"} & _environ(parent).keys():  # a child of a rank
        return None
    ours = b"FASTCOLL_SECRET" in environ or "fastcoll" in _command(parent)
    return environ[b"RANK"].decode(errors="replace") if ours else None


def launchers_of(pid: int) -> tuple[str, dict[bytes, bytes]] | None:
    """Return where the launchers of a rank's job meet, HOST:PORT, and the environment of the rank's launcher.

    None: the ranks have no launchers on several nodes, or these processes may not be read.
    """
    with suppress(OSError):
        address = b""
        for each in _line(pid):
            environ = _environ(each)
            if _LAUNCHERS not in environ:
                return (os.fsdecode(address), environ) if address else None
            address = environ[_LAUNCHERS]
    return None


def _environ(pid: int) -> dict[bytes, bytes]:
    entries = Path(f"/proc/{living_thread(pid)}/environ").read_bytes().split(b"\0")
    return {name: value for name, _, value in (entry.partition(b"=") for entry in entries)}


def processes(pids: Iterable[int]) -> list[Process]:
    """Return processes as the kernel shows them; leave out those that end while their CPU time is measured."""
    before = {pid: ticks for pid in pids if (ticks := ticks_of(pid)) is not None}
    began = time.monotonic()
    if before:
        time.sleep(_LOOK_SECONDS)
    took = time.monotonic() - began
    found = []
    for pid, used in before.items():
        with suppress(OSError):
            found.append(process_of(pid, ((ticks_of(pid) or used) - used) / TICKS / took))
    return found


def process_of(pid: int, cores: float) -> Process:
    """Return a process, which uses this number of cores, as the kernel shows it. OSError: it has ended."""
    thread = living_thread(pid)
    return glance(pid)._replace(cores=round(cores, 2), command=_command(pid), dumps=_dumps(thread))


def glance(pid: int) -> Process:
    """Return a process with its state and kernel function only, which takes 0.1 ms. OSError: it has ended."""
    thread = living_thread(pid)
    return Process(pid, status_of(thread)[0].decode(), _kernel_function(thread))


def ticks_of(pid: int) -> int | None:
    """Return a process's CPU time in ticks, of all threads together; None: it has ended."""
    try:
        status = status_of(pid)
    except OSError:
        return None
    return int(status[11]) + int(status[12])


class ProcessMemory(NamedTuple):
    """The memory of a process in bytes: all that is resident, and the part of it that is shared memory."""

    resident: int
    shared: int


def memory_of(pid: int) -> ProcessMemory | None:
    """Return the memory of a process; None: it has ended."""
    with suppress(OSError, KeyError):
        lines = Path(f"/proc/{living_thread(pid)}/status").read_text().splitlines()
        sizes = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        resident, shared = (1024 * int(sizes[name][0]) for name in ("VmRSS", "RssShmem"))
        return ProcessMemory(resident, shared)
    return None


def start_time_of(pid: int) -> int | None:
    """Return when a process started, in clock ticks after boot; None: it has ended."""
    with suppress(OSError):
        status = status_of(pid)
        return None if has_ended(status) else int(status[19])
    return None


def _kernel_function(pid: int) -> str:
    """Return the kernel function in which a thread sleeps; empty: it does not sleep, or the function is hidden."""
    with suppress(OSError):
        function = Path(f"/proc/{pid}/wchan").read_text()
        return "" if function == "0" else function
    return ""


def _dumps(pid: int) -> bool:
    """Return whether a process handles SIGQUIT, and so writes its stacks."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGQUIT - 1) & 1)
    return False


def _command(pid: int) -> str:
    """Return the start of the command line of a process."""
    return " ".join(_words(pid))[:_MOST_COMMAND]


def _words(pid: int) -> list[str]:
    """Return the words of the command line of a process, without the folder of the program; none: it has ended."""
    with suppress(OSError):
        line = Path(f"/proc/{living_thread(pid)}/cmdline").read_bytes().decode(errors="replace")
        program, *words = line.split("\0")
        return " ".join([os.path.basename(program), *words]).split()
    return []
