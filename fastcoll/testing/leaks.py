"""What a piece of code leaves behind: threads, file descriptors, child processes, shared memory.

A Footprint is taken before and after. Whatever is new gets half a second to go away by itself, since
threads and children end a moment after they were told to.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..launch.lifeline import children_of

_SHM = Path("/dev/shm")
_PATIENCE = 0.5
_INTERVAL = 0.02


@dataclass(frozen=True)
class Footprint:
    """What this process holds: thread names by ident, descriptors' targets, children's commands by pid."""

    threads: dict[int, str]
    files: dict[int, str]
    children: dict[int, str]

    @staticmethod
    def now() -> Footprint:
        """The footprint of the calling process."""
        threads = {thread.ident or 0: thread.name for thread in threading.enumerate()}
        return Footprint(threads, _open_files(), {pid: _command(pid) for pid in children_of(os.getpid())})

    def growth(self) -> list[str]:
        """What the process holds now and did not hold then, one line each; empty when nothing."""
        now = Footprint.now()
        lines = [f"thread {name!r}" for ident, name in now.threads.items() if ident not in self.threads]
        lines += [f"descriptor {fd} ({to})" for fd, to in now.files.items() if self.files.get(fd) != to]
        lines += [f"child {pid} ({name})" for pid, name in now.children.items() if pid not in self.children]
        return lines


def lasting(look: Callable[[], list[str]]) -> list[str]:
    """What `look` still finds after garbage collection and half a second."""
    found = look()
    if found:
        gc.collect()
    end = time.monotonic() + _PATIENCE
    while (found := look()) and time.monotonic() < end:
        time.sleep(_INTERVAL)
    return found


def shm_names(folder: Path = _SHM) -> set[str]:
    """The names of fastcoll's segments that belong to this user, in a place where /dev/shm is seen."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return set()
    return {entry.name for entry in entries if entry.name.startswith("fastcoll") and _is_mine(entry)}


def _is_mine(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.stat(follow_symlinks=False).st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _open_files() -> dict[int, str]:
    files = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            files[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor that listed the directory
            continue
    return files


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "ended, not waited for"
