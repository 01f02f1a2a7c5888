"""The life of a segment: how the members of a group meet in one, and how it ends. The only file that uses posix_ipc.

Rank 0 announces a random name before it makes the segment; all map it, and prove that by its nonce. The name is
unlinked as soon as all ranks have attached, by whichever sees that first or by any survivor when a rank dies meanwhile;
the memory itself goes with the last process that has it mapped. A name of which no living rank knows is swept: by the
survivors of rank 0, and after a job in which every rank was killed at once by the next job of the same user (`sweep`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import mmap
import operator
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import posix_ipc

from .. import config, failpoints
from ..errors import CollectiveTimeoutError, PeerDiedError, ResourceError
from ..rendezvous.assemble import GroupMeeting
from ..store import Store
from ..system.processes import Member, ProcessId, gone_among, has_ended, session, status_of
from . import learned
from .autotune import allowed_ways
from .known import Conditions, Times, one_shot_limit
from .layout import (
    ATTACHED,
    LINE,
    MAGIC,
    ONE_SHOT_LIMIT,
    QUOTA,
    REACH,
    REACH_WORDS,
    WAYS,
    Layout,
    plan,
)
from .reach import Reach

DIRECTORY = "/dev/shm"
_PREFAULT_BYTES = 32 << 20
_MADV_POPULATE_WRITE = 23  # linux/mman.h; Python has no name for it
_MASK_WORDS = LINE // 8 - 1  # 960 CPUs
_LOOK_SECONDS = 0.05
_MOUNT = f"mount a writable tmpfs there (mount -t tmpfs none {DIRECTORY})"
_DOING = "making a group in shared memory"
# Pids mean something in their own pid namespace only.
_PREFIX = f"fastcoll-{os.getuid()}-{os.stat('/proc/self/ns/pid').st_ino}-"


def new_name() -> str:
    """A fresh name that nobody can guess, with its maker's pid and start time for the sweeper."""
    return f"{_PREFIX}{os.getpid()}-{_start_time(os.getpid())}-{secrets.token_hex(8)}{session()}"


class Segment:
    """Shared memory of one group on one node, mapped into this process from `address` on."""

    def __init__(self, layout: Layout, mapping: mmap.mmap) -> None:
        self.layout = layout
        self._mapping = mapping
        self._closed = False
        self._export = ctypes.c_char.from_buffer(mapping)
        self.address = ctypes.addressof(self._export)
        self.words = np.frombuffer(mapping, np.int64)

    @classmethod
    def create(cls, name: str, layout: Layout) -> Segment:
        """Make the segment, mode 0600, all of it really there.

        Raises:
            ResourceError: /dev/shm is full, too small or missing; says how much is needed and the cure.
        """
        memory = _create(name)
        try:
            # ftruncate alone would let a full /dev/shm end in SIGBUS at the first write.
            os.posix_fallocate(memory.fd, 0, layout.nbytes)
            segment = cls(layout, mmap.mmap(memory.fd, layout.nbytes))
        except OSError as error:
            posix_ipc.unlink_shared_memory("/" + name)
            raise ResourceError(f"{shortage(layout.nbytes, layout.cure)} ({error})") from error
        finally:
            memory.close_fd()
        segment.words[:3] = MAGIC, secrets.randbits(62) + 1, layout.size
        return segment

    @classmethod
    def attach(cls, name: str, layout: Layout) -> Segment:
        """Map a segment that another rank has made.

        Raises:
            ResourceError: it is not there, or not what was announced.
        """
        try:
            memory = posix_ipc.SharedMemory("/" + name, 0)
        except (OSError, posix_ipc.Error) as error:
            raise ResourceError(f"cannot attach the shared memory {name}: {error}") from error
        try:
            if os.fstat(memory.fd).st_size != layout.nbytes:
                raise ResourceError(
                    f"the shared memory {name} has {os.fstat(memory.fd).st_size} bytes, expected {layout.nbytes}; "
                    "all ranks must use the same FASTCOLL_SHM_BYTES_PER_RANK"
                )
            segment = cls(layout, mmap.mmap(memory.fd, layout.nbytes))
        finally:
            memory.close_fd()
        if segment.words[0] != MAGIC or segment.words[2] != layout.size:
            segment.close()
            raise ResourceError(f"the shared memory {name} is not a segment of this version of fastcoll")
        return segment

    @property
    def nonce(self) -> int:
        """The number that tells this segment from every other."""
        return int(self.words[1])

    def word(self, rank: int, offset: int) -> int:
        """Index into `words` of the word at a byte offset of a rank's section."""
        return (self.layout.section(rank) + offset) // 8

    def reach(self, rank: int) -> np.ndarray:
        """What a rank says of its memory, see reach.py."""
        start = self.word(rank, REACH)
        return self.words[start : start + REACH_WORDS]

    def prefault(self, rank: int) -> None:
        """Enter the pages into this process's page table now, not one by one in the first large calls.

        All of a small segment, else this rank's own section. 8 MiB take 3.4 ms either way (2-core VM, Linux 6.18).
        """
        whole = self.layout.nbytes <= _PREFAULT_BYTES
        start, nbytes = (0, self.layout.nbytes) if whole else (self.layout.section(rank), self.layout.stride)
        with contextlib.suppress(OSError):  # before Linux 5.14
            self._mapping.madvise(_MADV_POPULATE_WRITE, start, nbytes)

    def say_attached(self, rank: int) -> None:
        """Tell the others that this rank has mapped the segment."""
        self.words[self.word(rank, ATTACHED)] = self.nonce

    def missing(self) -> list[int]:
        """The ranks that have not mapped the segment yet."""
        return [r for r in range(self.layout.size) if self.words[self.word(r, ATTACHED)] != self.nonce]

    def read(self, rank: int, offset: int, nbytes: int) -> bytes:
        """Bytes that a rank has written into its section."""
        start = self.layout.section(rank) + offset
        return bytes(self._mapping[start : start + nbytes])

    def write(self, rank: int, offset: int, data: bytes) -> None:
        """Write bytes into a rank's section."""
        start = self.layout.section(rank) + offset
        self._mapping[start : start + len(data)] = data

    def close(self) -> None:
        """Unmap. Nothing may use the address afterwards. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            del self.words, self._export
            with contextlib.suppress(BufferError):  # a traceback still has a view; the memory goes with it
                self._mapping.close()


def _create(name: str) -> posix_ipc.SharedMemory:
    try:
        return posix_ipc.SharedMemory("/" + name, posix_ipc.O_CREX, mode=0o600)
    except (OSError, posix_ipc.Error) as error:
        raise ResourceError(
            f"cannot create shared memory in {DIRECTORY}: {error}; {_MOUNT}, or choose backend='tcp'"
        ) from error


def nameless() -> int:
    """A descriptor of new, empty shared memory whose name is gone already; the caller closes it.

    Raises:
        ResourceError: there is no /dev/shm, or it is not writable.
    """
    name = new_name()
    memory = _create(name)
    unlink(name)
    return int(memory.fd)


def unlink(name: str) -> None:
    """Remove a segment's name if it is still there; mappings stay."""
    with contextlib.suppress(posix_ipc.ExistentialError, OSError):  # the second: read-only, so there is none
        posix_ipc.unlink_shared_memory("/" + name)


def sweep(gone: Iterable[ProcessId] = ()) -> list[str]:
    """Unlink this user's segments whose maker is dead; returns their names.

    A name lives for milliseconds while a group is made, so a name whose maker (pid and start time) is
    gone belongs to a job that was killed in that moment. A session of tests leaves other sessions' alone.

    Args:
        gone: who has ended as far as others have seen, and may be on its way to it still: a process that was killed
            closes its connections first.
    """
    swept = []
    for name in stale(gone):
        with contextlib.suppress(posix_ipc.Error):  # another user's, with a name like ours
            unlink(name)
            swept.append(name)
    return swept


def stale(gone: Iterable[ProcessId] = ()) -> list[str]:
    """The names that `sweep` would remove."""
    found, ended = [], {(str(process.pid), str(process.start_time)) for process in gone}
    for name in os.listdir(DIRECTORY) if os.path.isdir(DIRECTORY) else ():
        pid, _, start = name.removeprefix(_PREFIX).rpartition("-")[0].partition("-")
        ours = name.startswith(_PREFIX) and name.endswith(session())
        if ours and pid.isdigit() and ((pid, start) in ended or _start_time(int(pid)) != start):
            found.append(name)
    return found


def free_bytes() -> int:
    """Bytes that shared memory can still give."""
    status = os.statvfs(DIRECTORY)
    return status.f_bavail * status.f_frsize


def all_bytes() -> int:
    """Bytes that shared memory has, free or not."""
    status = os.statvfs(DIRECTORY)
    return status.f_blocks * status.f_frsize


def _start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot; "gone" when there is none, or a zombie."""
    try:
        status = status_of(pid)
    except OSError:
        return "gone"
    return "gone" if has_ended(status) else status[19].decode()


def shortage(need: int, cure: str = Layout.cure) -> str:
    """What /dev/shm has, what is needed, and the cure."""
    return (
        f"{DIRECTORY} has {free_bytes() >> 10} KiB free, {need >> 10} KiB are needed; make it larger "
        "(docker: --shm-size=1g; kubernetes: an emptyDir with medium: Memory; mount -o remount,size=1g /dev/shm), "
        f"or {cure}"
    )


# ---- how the members meet in one ---------------------------------------------------------------------------


class Met(NamedTuple):
    """What a meeting has agreed on, the same for all members."""

    segment: Segment
    cores: int  # that the members share
    share: int  # cores for each rank of the job
    conditions: Conditions
    known: tuple[Times, float]  # what was known of ways under these conditions before this group (learned.py)
    reach: int  # how they can read one another's memory (reach.py)


def meet(store: Store, members: Sequence[Member], rank: int, timeout: float, neighbours: int) -> Met:
    """The group's segment, mapped by all members, and what concerns all of them.

    Args:
        neighbours: ranks of the job on this node, members or not.
    """
    name = ""
    with GroupMeeting(store, members, rank, timeout, _DOING) as meeting:
        try:
            if rank == 0:
                sweep()
                layout = _choose(len(members))
                name = new_name()
                known = learned.told(len(members), layout.slot)
                meeting.say("segment", json.dumps({"name": name, "known": known, **vars(layout)}).encode())
                segment = Segment.create(name, layout)
                segment.words[ONE_SHOT_LIMIT] = one_shot_limit(len(members))
                segment.words[WAYS] = allowed_ways()
                meeting.say("created")
                failpoints.reach("shm.meeting.after_create")
            else:
                announced = json.loads(meeting.hear("segment"))
                name, known = announced.pop("name"), announced.pop("known")
                meeting.hear("created")
                try:
                    segment = Segment.attach(name, Layout(**announced))
                except ResourceError:
                    if name not in os.listdir(DIRECTORY):  # removed by one that has seen the meeting fail
                        meeting.hear_why()
                    raise
                failpoints.reach("shm.meeting.after_attach")
            try:
                _tell_of_cores(segment, rank)
                reach = Reach(segment, members, rank)
                segment.say_attached(rank)
                failpoints.reach("shm.meeting.after_proof")
                segment.prefault(rank)
                _await_all(segment.missing, "attach", members, meeting, timeout)
                reach.probe()
                _await_all(reach.unsure, "look at the others' memory", members, meeting, timeout)
                cores = _count_cores(segment)
            except BaseException:
                segment.close()
                raise
        except BaseException:
            # Rank 0 may have died with the store in which it had announced the name.
            sweep(
                member
                for member in gone_among(members)
                if member.pid_namespace == members[rank].pid_namespace
            )
            raise
        finally:
            if name:
                unlink(name)
    share = cores // max(neighbours, len(members))
    conditions = Conditions(len(members), "own" if share else "shared", segment.layout.slot)
    return Met(segment, cores, share, conditions, learned.heard(known, conditions), reach.of_all())


def _choose(size: int) -> Layout:
    """Sizes that fit into half of what /dev/shm has left, since others need some as well."""
    wanted: int = config.get("FASTCOLL_SHM_BYTES_PER_RANK")
    try:
        free = free_bytes() // 2 // size
    except FileNotFoundError as error:
        raise ResourceError(f"there is no {DIRECTORY}; {_MOUNT}, or choose backend='tcp'") from error
    if wanted <= free:
        return plan(size, wanted)
    try:
        return plan(size, free)
    except ResourceError as error:
        raise ResourceError(shortage(size * wanted, "free what fills it")) from error


def _await_all(
    late: Callable[[], list[int]], do: str, members: Sequence[Member], meeting: GroupMeeting, timeout: float
) -> None:
    """Wait until no rank is `late` to do something, and from time to time look for trouble.

    A death counts only if ranks are late still: what the dead did before may be all that this one has waited for.
    """
    next_look, dead = time.monotonic() + _LOOK_SECONDS, list[Member]()
    while missing := [members[r].rank for r in late()]:
        if dead:
            raise PeerDiedError(f"{', '.join(map(str, dead))} died while {_DOING}", [m.rank for m in dead])
        time.sleep(0.0002)
        if time.monotonic() < next_look:
            continue
        next_look = time.monotonic() + _LOOK_SECONDS
        meeting.look()
        dead = gone_among(members)
        if not meeting.left():
            who = f"rank {', '.join(map(str, missing))} did not {do} within {timeout:g} s"
            raise CollectiveTimeoutError(f"{_DOING}: {who}", missing)


def _tell_of_cores(segment: Segment, rank: int) -> None:
    """Write which CPUs this process may use, and how many its cgroup allows."""
    mask = sum(1 << cpu for cpu in os.sched_getaffinity(0) if cpu < 64 * _MASK_WORDS)
    quota = 1 << 30  # none
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as file:
        share, period = map(int, file.read().split())
        quota = max(1, share // period)
    segment.write(rank, ATTACHED + 8, mask.to_bytes(8 * _MASK_WORDS, "little"))
    segment.words[segment.word(rank, QUOTA)] = quota


def _count_cores(segment: Segment) -> int:
    """How many CPUs the members may use together; the same on all of them."""
    ranks = range(segment.layout.size)
    masks = [int.from_bytes(segment.read(r, ATTACHED + 8, 8 * _MASK_WORDS), "little") for r in ranks]
    quotas = [int(segment.words[segment.word(r, QUOTA)]) for r in ranks]
    return min(functools.reduce(operator.or_, masks).bit_count(), *quotas)
