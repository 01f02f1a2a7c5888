"""Dumps: files with a rank's record, the reasons for the dumps, and the stacks of all threads of the rank.

A *record* (record.py) has a rank's groups, with the last calls in each. Each rank has one file in the folder
FASTCOLL_TRACE_DIR, `rank-R-of-N.HOST.PID.json`. A rank writes it when a group fails, when calls do not match, when an
exception makes the rank leave, on SIGQUIT, and in `fastcoll.dump()`; each dump replaces the file atomically. If
FASTCOLL_TRACE_DIR is not set, only `dump(path)` writes a file. A rank that is blamed for a failure may be stopped or
stuck, and then cannot dump. So a rank whose group failed adds the records of blamed ranks on the same machine to its
own file. On SIGQUIT Python's faulthandler also writes the stacks to a second file, which works even if the interpreter
is stuck. `python -m fastcoll trace` reads these files.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from .. import config
from ..errors import ResourceError, UsageError
from ..system.forks import at_fork
from ..system.own_files import open_own
from ..system.processes import living_thread, status_of
from . import recorder
from .recorder import Record

_log = logging.getLogger("fastcoll")
_E = TypeVar("_E", bound=BaseException)
FORMAT = 1
SUFFIX, STACKS_SUFFIX = ".json", ".stacks"
_MOST_SEEN = 16  # how many blamed ranks' records are added
_MOST_REASONS = 8  # how many reasons a file has: those of the first dumps, and that of the last dump
_STUCK_SECONDS = 0.5  # a process that has run or slept this long without a dump is stuck; a dump takes 0.01 s
_LONGEST_SECONDS = 10.0  # the longest wait for all dumps, even if the machine is overloaded
_LOOK_SECONDS = 0.01
_TICKS = os.sysconf("SC_CLK_TCK")
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_numbers = itertools.count()
_reasons: list[dict[str, Any]] = []


def dump(path: str | os.PathLike[str] | None = None) -> str:
    """Write this process's calls and the stacks of its threads, for `python -m fastcoll trace`; return the path.

    This function does not wait for other ranks. Any thread or signal handler may call it.

    Args:
        path: the file; None: this rank's file in FASTCOLL_TRACE_DIR.

    Raises:
        UsageError: there is no path, and FASTCOLL_TRACE_DIR is not set.
        ResourceError: the file cannot be written.
    """
    if path is None and not config.get("FASTCOLL_TRACE_DIR"):
        raise UsageError("dump() has no path; give one, or set FASTCOLL_TRACE_DIR")
    try:
        return _write("dump() was called", path)
    except OSError as error:
        raise ResourceError(f"the dump cannot be written: {error}") from error


def after(error: _E) -> _E:
    """Dump because of an error of the package, if FASTCOLL_TRACE_DIR is set; return the error."""
    because(f"{type(error).__name__}: {error}", getattr(error, "ranks", ()))
    return error


def because(why: str, blamed: Sequence[int] = ()) -> None:
    """Dump for a reason, if FASTCOLL_TRACE_DIR is set; add the records of the ranks that are blamed for it."""
    if config.get("FASTCOLL_TRACE_DIR"):
        try:
            _write(why, blamed=blamed)
        except Exception as failure:  # the failure must not replace the error
            _log.warning("the dump cannot be written: %s", failure)


def _write(why: str, path: str | os.PathLike[str] | None = None, blamed: Sequence[int] = ()) -> str:
    place = _path(SUFFIX) if path is None else os.fspath(path)
    _reasons.append({"time": time.time(), "why": why, "stacks": _stacks()})
    del _reasons[_MOST_REASONS - 1 : -1]
    found = recorder.own()
    names = {str(thread.ident): thread.name for thread in threading.enumerate()}
    content = {
        "format": FORMAT,
        "pid": os.getpid(),
        "time": time.time(),
        "reasons": list(_reasons),
        "threads": names,
        "record": None if found is None else found.as_dict(),
        "seen": [] if found is None else _seen(found, blamed),
    }
    # Another thread may be in `_write` too, or this call may be in a signal handler that has interrupted `_write`. So
    # each call writes a draft file of its own.
    draft = f"{place}.{os.getpid()}.{next(_numbers)}.part"
    with os.fdopen(os.open(draft, _FLAGS, 0o600), "w") as file:
        try:
            json.dump(content, file)
            file.flush()
            os.replace(draft, place)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
    return place


def _seen(mine: Record, blamed: Sequence[int]) -> list[dict[str, Any]]:
    """Return the records of blamed ranks that can be read on this machine, and their process states."""
    peers = {peer.rank: peer for group in mine.groups for peer in group.members}
    found = []
    for peer in (peers[rank] for rank in blamed[:_MOST_SEEN] if rank in peers and rank != mine.rank):
        try:
            # The pid is from the peer's own pid namespace, and in this namespace it may belong to another process. So
            # the record that is found must have the peer's job and rank.
            if peer.host != mine.host or (theirs := recorder.read(peer.pid)) is None:
                continue
            if (theirs.job, theirs.rank) == (mine.job, peer.rank):
                state = status_of(living_thread(peer.pid))[0].decode()
                found.append({"state": state, "time": time.time(), "record": theirs.as_dict()})
        except OSError:
            continue
    return found


def _path(suffix: str) -> str:
    """Return the path of this rank's file in FASTCOLL_TRACE_DIR; make that folder if it does not exist."""
    folder = config.get("FASTCOLL_TRACE_DIR")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = recorder.own()
    rank = "no-rank" if found is None else f"rank-{found.rank}-of-{found.world_size}"
    return os.path.join(folder, f"{rank}.{os.uname().nodename}.{os.getpid()}{suffix}")


def _stacks() -> str:
    with os.fdopen(os.memfd_create("fastcoll-stacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


# ---- SIGQUIT ---------------------------------------------------------------------------------------------

_stacks_file: Any = None


def listen() -> None:
    """Install a handler that dumps on SIGQUIT, if FASTCOLL_TRACE_DIR is set and SIGQUIT has no handler yet.

    Does nothing outside the main thread, because in Python only the main thread can install a signal handler.
    """
    global _stacks_file
    if not config.get("FASTCOLL_TRACE_DIR") or _stacks_file is not None:
        return
    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(signal.SIGQUIT) is not signal.SIG_DFL:
        _log.debug(
            "SIGQUIT does not dump: %s", "it is handled already" if on_main else "not on the main thread"
        )
        return
    try:
        flags = os.O_WRONLY | os.O_APPEND
        _stacks_file = os.fdopen(open_own(_path(STACKS_SUFFIX), flags, 0o600), "w")
    except OSError as error:
        _log.warning("SIGQUIT will not dump: %s", error)
        return
    signal.signal(signal.SIGQUIT, _on_quit)
    # faulthandler writes in the C signal handler, even if the interpreter is stuck; Python's handler runs later.
    faulthandler.register(signal.SIGQUIT, _stacks_file, all_threads=True, chain=True)


def listen_no_more() -> None:
    """Undo `listen` when no groups are left; remove the file of stacks if it is empty."""
    global _stacks_file
    if _stacks_file is None or recorder.has_groups():
        return
    faulthandler.unregister(signal.SIGQUIT)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGQUIT) is _on_quit:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    file, _stacks_file = _stacks_file, None
    with file:
        if os.fstat(file.fileno()).st_size == 0:
            with contextlib.suppress(OSError):  # the folder may be deleted meanwhile
                for name in os.listdir(config.get("FASTCOLL_TRACE_DIR")):
                    if name.endswith(f".{os.uname().nodename}.{os.getpid()}{STACKS_SUFFIX}"):
                        os.unlink(os.path.join(config.get("FASTCOLL_TRACE_DIR"), name))


def ask(pids: Sequence[int]) -> None:
    """Make processes of this machine dump, by SIGQUIT, and wait until each has dumped, has ended, or is stuck.

    The processes must have called `listen`. A process counts as stuck if it has slept or computed for half a second
    without dumping; the time for which it waits for a core does not count. After 10 s `ask` returns in any case.
    """
    before, asked = _files(), {pid: Asked(pid) for pid in pids}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGQUIT)
    end = time.monotonic() + _LONGEST_SECONDS
    while asked and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
        stuck = {pid for pid, process in asked.items() if process.seconds() >= _STUCK_SECONDS}
        files = _files()
        asked = {
            pid: process
            for pid, process in asked.items()
            if pid not in stuck and files.get(pid) == before.get(pid)
        }


class Asked:
    """Measures for how long a process could have handled a signal: the time since the signal, less waits for a core."""

    def __init__(self, pid: int) -> None:
        self._pid, self._seconds = pid, 0.0
        self._at, self._computed = time.monotonic(), self._look()[1]

    def seconds(self) -> float:
        """Return for how long the process could have handled the signal; inf if the process has ended.

        Call this method often: it assumes that the process has been in its present state since the last call.
        """
        (state, computed), now = self._look(), time.monotonic()
        # A thread in state "R" is running or waits for a core. Only while it runs, the process's CPU time grows.
        self._seconds += computed - self._computed if state == b"R" else now - self._at
        self._at, self._computed = now, computed
        return math.inf if state in b"ZX" else self._seconds

    def _look(self) -> tuple[bytes, float]:
        """Return the state of the main thread, which runs Python's handlers, and the process's CPU time."""
        try:
            fields = status_of(self._pid)
        except (FileNotFoundError, ProcessLookupError):
            return b"X", 0.0
        return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS


def _files() -> dict[int, tuple[int, int]]:
    """Return {pid: (inode, mtime) of its dump file} for this machine; each dump changes inode and mtime."""
    found = {}
    # A job goes on without a folder, or with one that cannot be read; its ranks warn when they write their dumps.
    with contextlib.suppress(OSError), os.scandir(config.get("FASTCOLL_TRACE_DIR")) as entries:
        for entry in entries:
            name, _, pid = entry.name.removesuffix(SUFFIX).rpartition(".")
            if entry.name.endswith(SUFFIX) and name.endswith(f".{os.uname().nodename}") and pid.isdigit():
                found[int(pid)] = entry.inode(), entry.stat().st_mtime_ns
    return found


def _on_quit(number: int, frame: Any) -> None:
    try:
        _write("SIGQUIT")
    except OSError as error:
        _log.warning("the dump cannot be written: %s", error)


def _after_fork() -> None:
    """In a child process made by fork: forget the parent's dumps, and let SIGQUIT end the process again."""
    global _stacks_file
    _reasons.clear()
    if _stacks_file is not None:
        faulthandler.unregister(signal.SIGQUIT)
        if signal.getsignal(signal.SIGQUIT) is _on_quit:
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        _stacks_file.close()
        _stacks_file = None


at_fork("dump", _after_fork)
