"""`spawn`: run a function in several processes, with the API of torch.multiprocessing.spawn.

If `spawn` is called on the parent's main thread, the kernel kills the children when the parent ends, except with the
start method `forkserver`. If a rank fails, the parent ends the others and raises an error with the rank's traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from ..errors import FastcollError, UsageError, follows, shorten
from .lifeline import GRACE_SECONDS, describe_exit, die_with_parent
from .supervisor import CAUSE_SECONDS

_TEXT_BYTES = 48 << 10  # less than a pipe's 64 KiB, so that a failing child never waits for the parent


class ProcessRaisedError(FastcollError):
    """The function raised in one of the processes.

    Attributes:
        rank: the index of the process.
        pid: its process id.
    """

    def __init__(self, rank: int, pid: int, text: str) -> None:
        super().__init__(f"rank {rank} (pid {pid}) raised:\n\n{text}")
        self.rank, self.pid = rank, pid


class ProcessExitedError(FastcollError):
    """One of the processes ended without success and without an exception.

    Attributes:
        rank: the index of the process.
        pid: its process id.
        exit_code: its exit code; -n if signal n ended it.
    """

    def __init__(self, rank: int, pid: int, exit_code: int) -> None:
        super().__init__(f"rank {rank} (pid {pid}) ended with {describe_exit(exit_code)}")
        self.rank, self.pid, self.exit_code = rank, pid, exit_code


class SpawnContext:
    """The processes of one `spawn`, and the pipes into which they write why they failed."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.errors: list[Connection[Any, Any]] = []
        self._texts: dict[int, bytes] = {}  # received errors, by rank; b"": none will arrive

    def pids(self) -> list[int]:
        """Return the process ids, by rank."""
        return [process.pid or 0 for process in self.processes]

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all processes have succeeded.

        Args:
            timeout: seconds; None: no limit.

        Returns:
            True if all have succeeded; False if some still run after `timeout`.

        Raises:
            ProcessRaisedError, ProcessExitedError: a rank failed; the others were ended.
        """
        end = None if timeout is None else time.monotonic() + timeout
        try:
            while running := [process.sentinel for process in self.processes if process.exitcode is None]:
                self._raise_failure()
                if not wait(running, None if end is None else max(0.0, end - time.monotonic())):
                    return False
            self._raise_failure()
        except BaseException:
            self.end()
            raise
        self.end()  # which closes the pipes
        return True

    def end(self, grace: float = GRACE_SECONDS) -> None:
        """End the processes that still run: SIGTERM, and SIGKILL after `grace` seconds. May be called twice."""
        for process in self.processes:
            process.terminate()
        end = time.monotonic() + grace
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        for process in self.processes:
            process.kill()
            process.join()
        for errors in self.errors:
            errors.close()

    def _raise_failure(self) -> None:
        if not any(process.exitcode for process in self.processes):
            return
        first = self._rank_at_fault()
        process, text = self.processes[first], self._text(first)[1:].decode(errors="replace")
        if text:
            raise ProcessRaisedError(first, process.pid or 0, text)
        raise ProcessExitedError(first, process.pid or 0, process.exitcode or 0)

    def _rank_at_fault(self) -> int:
        """Return the rank to name in the error: the lowest one whose failure follows from no other, if there is one.

        If all failures so far follow from that of another rank (`follows`), wait for up to 1 s for a failure of another
        kind. A rank that has raised but not exited yet counts as failed.
        """
        end = time.monotonic() + CAUSE_SECONDS
        while True:
            codes = [process.exitcode for process in self.processes]
            # The texts of processes that have exited are complete, because the codes were read first.
            texts = [self._text(rank) for rank in range(len(codes))]
            failed = [rank for rank, code in enumerate(codes) if code or texts[rank]]
            first = min(failed, key=lambda rank: (texts[rank][:1] == b"F", rank))
            silent = [rank for rank, code in enumerate(codes) if code is None and not texts[rank]]
            left = end - time.monotonic()
            if texts[first][:1] != b"F" or not silent or left <= 0:
                return first
            ends: list[Any] = [self.processes[rank].sentinel for rank in silent]
            wait(ends + [self.errors[rank] for rank in silent if rank not in self._texts], left)

    def _text(self, rank: int) -> bytes:
        """Return what `_child` has sent: b"F" for an error that `follows` or b"E" for another one, then the traceback.

        The result is empty if the rank has sent nothing yet, or has ended without sending.
        """
        try:
            if rank not in self._texts and self.errors[rank].poll():
                self._texts[rank] = self.errors[rank].recv_bytes()
        except (EOFError, OSError):  # the rank sent nothing, or was killed while it sent
            self._texts[rank] = b""
        return self._texts.get(rank, b"")


def spawn(
    fn: Callable[..., object],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None:
    """Run `fn(i, *args)` in `nprocs` processes, i being 0 .. nprocs-1.

    Args:
        fn: a function that a fresh interpreter can import from a module; any function if `start_method` is "fork".
        args: further arguments, which must be picklable.
        join: wait for the processes and return None; otherwise return at once.
        daemon: whether the children are ended when the parent exits normally.
        start_method: "spawn", "fork" or "forkserver", see `multiprocessing`.

    Returns:
        None if `join` is True; otherwise the context, which has `join(timeout)`, `pids()` and `processes`.

    Raises:
        UsageError: an argument is wrong.
        ProcessRaisedError: `fn` raised in a process; the message has its traceback.
        ProcessExitedError: a signal ended a process, or it exited with a code other than 0.

    Examples:
        >>> def main(rank, size): ...
        >>> spawn(main, args=(4,), nprocs=4)
    """
    _check(fn, args, nprocs, start_method)
    # The kernel ties a child to the thread that forked it, so this must be the main thread. With "forkserver", the
    # parent of the children is the fork server, not this process.
    is_main = threading.current_thread() is threading.main_thread()
    tied_to = os.getpid() if is_main and start_method != "forkserver" else None
    context: Any = multiprocessing.get_context(start_method)
    children = SpawnContext()
    try:
        for rank in range(nprocs):
            ours, theirs = context.Pipe(duplex=False)
            with theirs:
                arguments = fn, rank, tuple(args), theirs, tied_to
                process = context.Process(target=_child, args=arguments, name=f"rank-{rank}", daemon=daemon)
                process.start()
            children.processes.append(process)
            children.errors.append(ours)
    except BaseException:
        children.end()
        raise
    if not join:
        return children
    children.join()
    return None


def check_call(caller: str, args: Any) -> None:
    """Refuse arguments of a function that are not in a tuple or list, and a caller that ignores SIGCHLD."""
    if not isinstance(args, list | tuple):
        raise UsageError(
            f"{caller}: args must be a tuple or list of arguments, got {type(args).__name__}; give (x,)"
        )
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        raise UsageError(
            f"{caller}: this process ignores SIGCHLD, so it cannot read how ranks end; call "
            "signal.signal(signal.SIGCHLD, signal.SIG_DFL) before"
        )


def _check(fn: Callable[..., object], args: Any, nprocs: int, start_method: str) -> None:
    if not callable(fn):
        raise UsageError(f"spawn: fn must be a function fn(rank, *args), got {type(fn).__name__}")
    if type(nprocs) is not int or nprocs < 1:
        raise UsageError(f"spawn: nprocs must be an int from 1 up, got {nprocs!r}")
    check_call("spawn", args)
    known = multiprocessing.get_all_start_methods()
    if start_method not in known:
        raise UsageError(f"spawn: start_method must be one of {', '.join(known)}, got {start_method!r}")
    name = getattr(fn, "__qualname__", "")
    if start_method != "fork" and ("<locals>" in name or name == "<lambda>"):
        raise UsageError(
            f"spawn: {name} cannot be imported by a fresh interpreter; define it at the top level of its "
            "module, or give start_method='fork'"
        )
    module = getattr(fn, "__module__", "")
    if start_method != "fork" and module == "__main__" and not hasattr(sys.modules[module], "__file__"):
        raise UsageError(
            f"spawn: {name} is of a notebook or an interactive session, which a fresh interpreter cannot import; use "
            "fastcoll.run, which takes functions by value, or put it into a module and import it from there"
        )


def _child(
    fn: Callable[..., object],
    rank: int,
    args: tuple[Any, ...],
    errors: Connection[Any, Any],
    tied_to: int | None,
) -> None:
    if tied_to is not None:
        die_with_parent(tied_to)
    try:
        fn(rank, *args)
    except KeyboardInterrupt:
        sys.exit(130)  # the parent gets Ctrl-C too, and reports it
    except Exception as error:
        kind = b"F" if follows(error) else b"E"
        shorten(error)
        errors.send_bytes(kind + traceback.format_exc().encode(errors="replace")[-_TEXT_BYTES:])
        sys.exit(1)
