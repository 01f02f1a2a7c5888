"""Tie a process to its parent, end a process with its descendants, and describe how a process ended.

A process that is tied to its parent is killed when the parent ends.

This file uses the standard library only, because the launcher also runs it as a script: `lifeline.py PARENT PROGRAM
ARGS...` ties itself to the process PARENT and then executes PROGRAM. The tie survives execve (prctl(2)). The launcher
passes no `preexec_fn` to Popen for this, because that may deadlock in a process with several threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CANNOT_RUN = 127  # the shell's exit code for a program that cannot be started


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the parent's thread that started this process ends.

    If the parent has ended already, this process exits.

    Args:
        parent: the parent's pid.

    Raises:
        OSError: the kernel refused.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, "PR_SET_PDEATHSIG")
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(128 + signal.SIGKILL)


def reap_orphans() -> None:
    """Become the parent of each descendant whose own parent ends, so that this process can end it later.

    Raises:
        OSError: the kernel refused.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER")


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's children, including zombies."""
    threads = os.listdir(f"/proc/{pid}/task")
    return [child for thread in threads for child in children_of_thread(pid, int(thread))]


def children_of_thread(pid: int, thread: int) -> list[int]:
    """Return the pids of the children, including zombies, that one thread of a process has started or adopted.

    A subreaper's main thread adopts the orphans.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
        return [*map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())]
    return []


def signal_group(leader: int, number: int) -> None:
    """Send a signal to the process group of `leader`, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> number - 1 & 1)


def describe_exit(code: int) -> str:
    """Return how a process ended, from its return code: `exit code 3`, `signal SIGKILL (9)`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name} ({-code})"
    except ValueError:  # real-time signals have no name
        return f"signal {-code}"


def _prctl(option: int, value: int, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, int(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({name}) failed")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as problem:
        sys.stderr.write(f"{sys.argv[2]!r} cannot be run: {problem.strerror}\n")
        sys.exit(_CANNOT_RUN)
