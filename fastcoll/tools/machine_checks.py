"""The doctor's checks of the machine: memory, limits, permissions, cores."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .. import config
from ..errors import FastcollError, ResourceError
from ..shm import segment
from ..shm.autotune import DIRECT, allowed_algorithms
from ..shm.layout import plan
from ..shm.reach import let_peers_read
from ..system import load
from ..system.address import CURE, FOR_OTHERS
from .finding import Finding
from .printing import bytes_of, counted

_SHM = segment.DIRECTORY
_LARGER = "docker: --shm-size=1g; kubernetes: an emptyDir with medium: Memory; else: mount -o remount,size=1g /dev/shm"
# Bytes of address space that Numba's compiler and NumPy's threads need; a part is only reserved and never used.
_ADDRESS_SPACE = 8 << 30
_SECONDS = 20
_WINDOW_SECONDS = 0.25
_ASK_PEER = """
import sys
from fastcoll.shm.reach import descriptors_are_open, read_word
pid, address, word = map(int, sys.argv[1:])
print(descriptors_are_open(pid))
try:
    print("yes" if read_word(pid, address) == word else "it reads the memory of another process with the same pid")
except OSError as error:
    print(error.strerror)
"""


def shared_memory(ranks: int) -> Iterator[Finding]:
    """Check /dev/shm: a group gets at most half of its free bytes (`choose_layout` in shm/meeting.py)."""
    try:
        fd = segment.nameless()
    except FastcollError as error:
        yield Finding("problem", "shared memory", str(error), f"mount a tmpfs at {_SHM}; {_LARGER}")
        return
    kind = _file_system(_SHM)
    size, free = segment.all_bytes(), segment.free_bytes()
    wanted: int = config.get("FASTCOLL_SHM_BYTES_PER_RANK")
    has = f"{_SHM} has {bytes_of(size)}, {bytes_of(free)} free"
    try:
        os.posix_fallocate(fd, 0, 1 << 16)
        plan(ranks, min(wanted, free // 2 // ranks))
    except (OSError, ResourceError):
        text = f"{has}: too little for a group of {counted(ranks, 'rank')}"
        yield Finding("problem", "shared memory", text, f"free it, or make it larger ({_LARGER})")
    else:
        groups = free // (ranks * wanted)
        if free // 2 < ranks * wanted:
            less = bytes_of(ranks * wanted)
            text = f"{has}: a group of {counted(ranks, 'rank')} wants {less} and gets less, so it is slower"
            yield Finding("warning", "shared memory", text, f"make it larger ({_LARGER})")
        elif kind not in ("tmpfs", ""):
            text = f"{has}, but it is a {kind}, which may write it to a disk"
            yield Finding("warning", "shared memory", text, f"mount a tmpfs there; {_LARGER}")
        else:
            yield Finding(
                "ok", "shared memory", f"{has}: room for {groups} groups of {counted(ranks, 'rank')}"
            )
    finally:
        os.close(fd)
    if names := segment.stale():
        text = f"{len(names)} segments are left by jobs that were killed as they started"
        yield Finding("ok", "shared memory", f"{text}; your next job removes them")


def _file_system(path: str) -> str:
    """Return the type of the file system that is mounted at a path; empty: unknown."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    return next((words[2] for words in reversed(mounts) if words[1] == path), "")


def memory(ranks: int) -> Iterator[Finding]:
    """Check whether there is enough free memory for a group.

    Its pages in /dev/shm count against the memory limit of the process that touches them first.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    free: float = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    about = f"{bytes_of(free)} available"
    if limit := cgroup_limit("memory.max"):
        used = cgroup_limit("memory.current") or 0
        free = min(free, limit - used)
        about += f", and the cgroup's limit is {bytes_of(limit)}, of which {bytes_of(used)} are used"
    needed: int = ranks * config.get("FASTCOLL_SHM_BYTES_PER_RANK")
    if free < 2 * needed:
        text = f"{about}; a group of {counted(ranks, 'rank')} takes {bytes_of(needed)}"
        yield Finding(
            "warning", "memory", text, "raise the container's limit, or lower FASTCOLL_SHM_BYTES_PER_RANK"
        )
    else:
        yield Finding("ok", "memory", about)


def cgroup_limit(name: str) -> float | None:
    """Return the lowest of the limits in the files `name` of this process's cgroup and those above it; None: no limit.

    A file `*.current` has no limit but the present use of a cgroup; return the use of the nearest cgroup that has one.
    """
    lowest = None
    try:
        own = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
    except OSError:
        return None
    own_folder = Path("/sys/fs/cgroup") / own.lstrip("/")
    for folder in (own_folder, *own_folder.parents):
        try:
            words = (folder / name).read_text().split()
        except OSError:
            continue
        if words and words[0] != "max":
            # cpu.max has a quota and a period in microseconds; their ratio is a number of cores.
            value = int(words[0]) / (int(words[1]) if len(words) > 1 else 1)
            if name.endswith(".current"):
                return value
            lowest = value if lowest is None else min(lowest, value)
    return lowest


def limits(ranks: int) -> Iterator[Finding]:
    """Check this process's resource limits, because ranks that are started from here inherit them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "any number" if hard == resource.RLIM_INFINITY else str(hard)
    needed = 2 * ranks + FOR_OTHERS  # rank 0 has a connection and a pidfd for each rank
    about = f"a process may have {soft} open files; fastcoll may raise this limit to {most}"
    if hard != resource.RLIM_INFINITY and hard < needed:
        yield Finding("problem", "limits", f"{about}; {ranks} ranks need {needed}", CURE)
    else:
        yield Finding("ok", "limits", about)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY and space < _ADDRESS_SPACE:
        text = f"{bytes_of(space)} of address space, which may be too little for Numba and large groups"
        yield Finding("warning", "limits", text, "ulimit -v unlimited before the start")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield Finding("ok", "limits", "locked memory is unlimited")
    elif os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
        text = f"{bytes_of(locked)} of locked memory: MPI and NCCL need more for InfiniBand"
        yield Finding(
            "warning", "limits", text, "ulimit -l unlimited before the start (docker: --ulimit memlock=-1)"
        )
    else:
        yield Finding("ok", "limits", f"{bytes_of(locked)} of locked memory, of which fastcoll needs none")
    if (tasks := cgroup_limit("pids.max")) is not None:
        left = tasks - (cgroup_limit("pids.current") or 0)
        if left < 16 * ranks:
            text = f"the cgroup allows {left:.0f} more threads, and {ranks} ranks have up to 16 each"
            yield Finding("warning", "limits", text, "docker: --pids-limit; systemd: TasksMax=")


def memory_of_peers(ranks: int) -> Iterator[Finding]:
    """Check whether another process of this user may read this process's memory, because ranks read their peers'.

    The other process is a child of this one, because an ancestor may have more rights than another rank has.
    """
    if not allowed_algorithms() >> DIRECT & 1:
        yield Finding(
            "none", "peers' memory", "FASTCOLL_SHM_ALGORITHMS keeps ranks from reading it; they copy twice"
        )
        return
    let_peers_read()
    word = ctypes.c_int64(int.from_bytes(os.urandom(7), "little"))
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_PEER, str(os.getpid()), str(ctypes.addressof(word)), str(word.value)],
            capture_output=True, text=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        text = f"another process has not answered within {_SECONDS} s, so it is not known whether ranks may read it"
        yield Finding("warning", "peers' memory", text, "try again when the machine is less busy")
        return
    answers = asked.stdout.split("\n")
    opens, reads = (*answers, "", "")[:2]
    if asked.returncode or reads != "yes":
        why = reads or (asked.stderr.strip().splitlines() or [""])[-1]
        cure = "docker: --cap-add=SYS_PTRACE, or a seccomp profile that allows process_vm_readv; "
        cure += "sysctl kernel.yama.ptrace_scope below 2"
        text = f"process_vm_readv: {why}; ranks copy arrays of 32 KiB and more twice, instead of once"
        yield Finding("warning", "peers' memory", text, cure)
    else:
        yield Finding(
            "ok", "peers' memory", "ranks read it by process_vm_readv, so large arrays are copied once"
        )
    if opens == "False":
        text = (
            "descriptors of other processes cannot be opened in /proc, so ranks read no arrays in place, and "
            "`fastcoll status` sees no jobs"
        )
        yield Finding(
            "warning",
            "peers' memory",
            text,
            "run the ranks as one user, in one user namespace, without PR_SET_DUMPABLE 0",
        )


def kernel(ranks: int) -> Iterator[Finding]:
    """Check the system calls that sandboxes may forbid."""
    release = os.uname().release
    missing = []
    calls: dict[str, Callable[[], int]] = {
        "pidfd_open": lambda: os.pidfd_open(os.getpid()),
        "memfd_create": lambda: os.memfd_create("probe"),
    }
    for name, call in calls.items():
        try:
            os.close(call())
        except OSError as error:
            missing.append(f"{name} ({error.strerror})")
    if missing:
        text = f"Linux {release} refuses {', '.join(missing)}; dead ranks are noticed later, and status may see no jobs"
        yield Finding("warning", "kernel", text, "a newer kernel, or a seccomp profile that allows them")
    else:
        yield Finding("ok", "kernel", f"Linux {release}, {os.uname().machine}")


def cores(ranks: int) -> Iterator[Finding]:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = cgroup_limit("cpu.max")
    about = f"{usable} of {there} usable" + (
        f", and the cgroup allows the CPU time of {quota:.3g} cores" if quota else ""
    )
    if min(usable, quota or usable) < ranks:
        text = f"{about}: fewer than {counted(ranks, 'rank')}, so ranks take turns, and small calls take much longer"
        yield Finding(
            "warning",
            "cores",
            text,
            "start fewer ranks, or give the container more (docker: --cpus, --cpuset-cpus; Slurm: --cpus-per-task)",
        )
    else:
        yield Finding("ok", "cores", about)


def other_processes(ranks: int) -> Iterator[Finding]:
    """Report how much other processes use the cores, in a short window in which this process sleeps."""
    usable = os.sched_getaffinity(0)
    before, began, own = load.read(), time.monotonic(), time.process_time()
    time.sleep(_WINDOW_SECONDS)
    after, seconds = load.read(), time.monotonic() - began
    if not after:
        yield Finding("none", "load", "not known, because /proc/stat cannot be read")
        return
    used = load.used_by_others(before, after, usable, time.process_time() - own, seconds)
    text = load.describe(used, len(usable))
    if used >= load.MUCH:
        cure = "end them, or start fewer ranks; timings need a quiet machine"
        yield Finding("warning", "load", f"{text} now; ranks that share a core take turns", cure)
    else:
        yield Finding("ok", "load", text)


def huge_pages(ranks: int) -> Iterator[Finding]:
    """Report the settings of huge pages, which change timings; fastcoll asks for no huge pages."""
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    chosen = {}
    for name in ("enabled", "shmem_enabled"):
        try:
            chosen[name] = (folder / name).read_text().partition("[")[2].partition("]")[0]
        except OSError:
            chosen[name] = "unknown"
    text = f"for ordinary memory: {chosen['enabled']}; for shared memory: {chosen['shmem_enabled']}"
    yield Finding("ok", "huge pages", f"{text} (fastcoll asks for none)")


CHECKS = (shared_memory, memory, limits, memory_of_peers, kernel, cores, other_processes, huge_pages)
