"""Ranks as forked children of this process, which has loaded all modules: two ranks make a group in 0.1 s.

The parent has one thread and no group. Each child runs one function and sends its result; the parent signals, watches
and reaps children. The `End` of a child that failed includes its stderr, and its stacks if it hung. All processes share
a board of numbers (`times`, `turns`, `marks`), on which each child writes its own slots. Times are those of
time.monotonic(), which is one clock for all processes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import mmap
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from fastcoll.launch.lifeline import die_with_parent
from fastcoll.shm.segment import stale

PLACES = 64
_STDERR_BYTES = 6000


@dataclass
class End:
    """The end of a child.

    Attributes:
        result: the result of its function; None if it did not return.
        error: the traceback of its exception, and its stderr, with its stacks if it hung; empty if it did not fail.
        code: its exit code, negative for a signal.
        hung: whether it was killed because it had not ended in time.
    """

    result: Any
    error: str
    code: int
    hung: bool = False


@dataclass
class Child:
    """A running child; `end` is None until it has been reaped."""

    pid: int
    pipe: Connection[Any, Any]
    pidfd: int
    stderr: Path
    end: End | None = None

    def signal(self, number: int) -> None:
        """Send the child a signal, unless it has ended."""
        if self.end is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)


class Fleet:
    """Children with a common board and folder; leaving the context kills them all."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 3 * PLACES * 8)
        words = np.frombuffer(self._memory, "f8").reshape(3, PLACES)
        self.times, self.turns, self.marks = (
            words  # the time of a child's last step, the number of its steps, and other values
        )
        self.children: list[Child] = []

    def __enter__(self) -> Fleet:
        self._folder = tempfile.TemporaryDirectory(prefix="fastcoll-soak-")
        self.folder = Path(self._folder.name)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            child.signal(signal.SIGKILL)
        for child in self.children:
            self.reap(child, time.monotonic() + 5.0)
        self._folder.cleanup()

    def start(self, function: Callable[..., Any], *args: Any) -> Child:
        """Fork a child that calls `function(fleet, *args)`."""
        stderr = self.folder / f"stderr-{len(self.children)}"
        ours, theirs = multiprocessing.Pipe(duplex=False)
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            ours.close()
            self._be_child(parent, theirs, stderr, function, args)
        theirs.close()
        child = Child(pid, ours, os.pidfd_open(pid), stderr)
        self.children.append(child)
        return child

    def _be_child(
        self,
        parent: int,
        pipe: Connection[Any, Any],
        stderr: Path,
        function: Callable[..., Any],
        args: Sequence[Any],
    ) -> None:
        code = 1
        try:
            die_with_parent(parent)
            descriptor = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(descriptor, 2)
            os.close(descriptor)
            faulthandler.register(signal.SIGUSR1, 2, all_threads=True)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            for other in self.children:  # these descriptors are the parent's
                if other.end is None:
                    other.pipe.close()
                    os.close(other.pidfd)
            pipe.send((function(self, *args), ""))
            code = 0
        except BaseException:
            pipe.send((None, traceback.format_exc()))
        finally:
            sys.stdout.flush()
            os._exit(code)

    def reap(self, child: Child, deadline: float) -> End:
        """Wait for a child's end; at the deadline request its stacks and kill it."""
        if child.end is not None:
            return child.end
        result, error, hung = None, "", False
        if not wait([child.pipe], max(deadline - time.monotonic(), 0.0)):
            hung = True
            child.signal(signal.SIGCONT)
            child.signal(signal.SIGUSR1)
            time.sleep(0.5)
        else:
            with contextlib.suppress(EOFError):
                result, error = child.pipe.recv()
        if not wait([child.pidfd], max(deadline - time.monotonic(), 1.0)):
            hung = True
        if hung:
            child.signal(signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        if hung or error:
            error += "\n" + child.stderr.read_text(errors="replace")[-_STDERR_BYTES:]
        child.pipe.close()
        os.close(child.pidfd)
        child.end = End(result, error, code, hung)
        return child.end

    def ends(self, seconds: float) -> list[End]:
        """Return the ends of all children, within `seconds`."""
        deadline = time.monotonic() + seconds
        return [self.reap(child, deadline) for child in self.children]

    def await_turns(self, children: Sequence[int], least: int, seconds: float) -> bool:
        """Wait until each of `children` has written `least` turns on the board; return whether that was in time."""
        deadline = time.monotonic() + seconds
        while self.turns[list(children)].min() < least:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True

    def await_mark(self, place: int) -> int:
        """Wait until another process has set a mark, and return it."""
        while not self.marks[place]:
            time.sleep(0.005)
        return int(self.marks[place])


def load() -> None:
    """Import and load the modules and kernels of ranks, before they are forked."""
    import fastcoll.hybrid.backend
    import fastcoll.net.tcp.entries
    import fastcoll.rendezvous.methods
    import fastcoll.shm.backend
    import fastcoll.store.tcp_store
    from fastcoll import ReduceOp
    from fastcoll.kernels.reduce import reducer

    for entry in (*fastcoll.shm.backend.ENTRIES, *fastcoll.net.tcp.entries.ENTRIES):
        entry.compile()
    for dtype in ("f4", "f8"):
        reducer(ReduceOp.SUM, np.dtype(dtype))
    gc.collect()
    gc.freeze()  # so that garbage collections in the children do not touch, and so copy, these objects


def live_on_nodes(rank: int, share: int) -> None:
    """Let every `share` successive ranks appear to be on a node of their own.

    A node has its own /dev/shm.
    """
    from fastcoll.system import processes

    processes._shm_device = lambda: 1_000_000 + rank // share  # type: ignore[assignment]


def left_in_shm(before: set[str], seconds: float = 2.0) -> set[str]:
    """Return new names in /dev/shm whose makers have ended, and which still exist after `seconds`.

    Names of other jobs, such as tests beside this one, have makers that live, or are removed within that time.
    """
    end = time.monotonic() + seconds
    while (left := set(stale()) - before) and time.monotonic() < end:
        time.sleep(0.01)
    return left


def names_absent(text: str, rank: int, pid: int) -> bool:
    """Return whether an error of a start names a rank that died before it had joined: it is missing, or a process."""
    return bool(re.search(rf"(rank\(s\)|missing:) [^(]*\b{rank}\b|process {pid} on ", text))


def marked(mark: str) -> dict[int, str]:
    """Return the pids of living processes with a mark in their environment, and the beginnings of their commands."""
    found = dict[int, str]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if mark.encode() in (process / "environ").read_bytes():  # a zombie has no environment
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")[:60]
    return found


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, private and shared."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
