"""Profile the groups of this process: time each call that Python makes, and log it (record/call_log.py).

While a profile is on, each function of `group.fast` is replaced with one that reads the clock before and after the
call. The group's flight record has the call's number and signature, so nothing is computed a second time. While no
profile is on, no function is replaced, and calls do nothing for profiles.

The flight record also has calls that no such function has made: asynchronous calls, the parts of composed calls, and
calls of compiled callers. They are copied from the record's ring when the next call ends. The record is a ring, so
calls that it has overwritten by then are counted as dropped.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

from .. import config
from ..record import call_log as log
from ..record.call_log import CallLog
from ..record.record import RING
from ..system.forks import at_fork
from ..system.processes import this_process
from .operands import ANY_TAG
from .operations import KINDS, METHODS
from .signature import code_of
from .work import Work

ProcessGroup: TypeAlias = Any  # that of group.py, which imports this file
_log = logging.getLogger("fastcoll")
_INTERNAL = re.compile(
    r"/(node|rail)\d+$"
)  # the groups of hybrid/backend.py, whose calls are parts of other calls
_MESSAGES = {"send": log.SEND, "recv": log.RECV, "isend": log.ISEND, "irecv": log.IRECV}

_lock = threading.RLock()
_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
_watched: dict[int, _Watched] = {}  # by the id of the group
_logs: list[CallLog] = []
_wait = Work.wait
_of_process: list[CallLog] = []  # the log in FASTCOLL_PROFILE_DIR, if there is one


def note(group: ProcessGroup) -> None:
    """Note a new group; profile it if a profile is on."""
    if group.monitor.record is None or _INTERNAL.search(group.name):
        return
    with _lock:
        _groups.add(group)
        if config.get("FASTCOLL_PROFILE_DIR") and not _of_process:
            start_process(group)
        if _logs:
            _watch(group)


def start(call_log: CallLog) -> None:
    """Log the calls of all groups of this process from now on."""
    with _lock:
        _logs.append(call_log)
        Work.wait = _timed_wait  # type: ignore[assignment, method-assign]
        for group in list(_groups):
            if not group.gate.closed:
                _watch(group)


def stop(call_log: CallLog) -> None:
    """Log no more calls, and end the log. A second call has no effect."""
    with _lock:
        if call_log in _logs:
            for watched in list(_watched.values()):
                watched.leave(call_log)
            _logs.remove(call_log)
        if not _logs:
            Work.wait = _wait  # type: ignore[method-assign]
            for watched in list(_watched.values()):
                watched.end()
        call_log.end()


def facts(rank: int, world_size: int) -> dict[str, Any]:
    """Return the facts about this process that a log has."""
    me = this_process()
    return {"rank": rank, "world_size": world_size, "host": me.host, "machine": me.boot_id, "pid": me.pid}


def start_process(group: ProcessGroup) -> None:
    """Start the log in FASTCOLL_PROFILE_DIR, with the rank of the process in its first group."""
    rank, size = group.ranks[group.rank], max(group.ranks) + 1
    folder = config.get("FASTCOLL_PROFILE_DIR")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = os.path.join(folder, f"rank-{rank}.{os.uname().nodename}.{os.getpid()}")
        started = CallLog(facts(rank, size), path)
    except OSError as error:
        _log.warning("this rank has no profile: %s", error)
        return
    _of_process.append(started)
    atexit.register(stop, started)
    start(started)


def _watch(group: ProcessGroup) -> None:
    watched = _watched.get(id(group))
    if watched is None:
        watched = _watched[id(group)] = _Watched(group)
    for each in _logs:
        watched.join(each)


class _Watched:
    """A group whose calls are logged."""

    def __init__(self, group: ProcessGroup) -> None:
        assert group.monitor.record is not None
        self._record, self._fast, self._id = group.monitor.record, group.fast, id(group)
        self._name, self._ranks, self._rank = group.name, group.ranks, group.rank
        self._call_logs: list[CallLog] = []
        self._logs: tuple[tuple[Callable[..., None], int], ...] = ()  # `add` and the GROUP word of each
        self._last = self._record.last_call()[0]  # the number of the last call that is logged
        self._sequences: Counter[tuple[int, int, bool]] = Counter()
        self._lock = threading.RLock()
        self._plain = {name: getattr(group.fast, name) for name in (*METHODS, *_MESSAGES)}
        for name, call in self._plain.items():
            timed = (
                self.timed_message(call, _MESSAGES[name])
                if name in _MESSAGES
                else self.timed_collective(call, name)
            )
            setattr(group.fast, name, timed)
        group.at_the_end.append(self.end)

    def join(self, call_log: CallLog) -> None:
        if call_log not in self._call_logs:
            self._catch_up()
            self._call_logs.append(call_log)
            self._logs += ((call_log.add, call_log.add_group(self._name, self._ranks, self._rank)),)

    def leave(self, call_log: CallLog) -> None:
        self._catch_up()
        place = self._call_logs.index(call_log)
        del self._call_logs[place]
        self._logs = self._logs[:place] + self._logs[place + 1 :]

    def end(self) -> None:
        """Give the group its plain functions back."""
        with _lock:
            self._catch_up()
            self.forget()
            for name, call in self._plain.items():
                setattr(self._fast, name, call)
            _watched.pop(self._id, None)

    def forget(self) -> None:
        """Log nothing more."""
        self._logs = ()
        self._call_logs.clear()

    def add(self, *row: int) -> None:
        for add, index in self._logs:
            add(index, *row)

    def timed_collective(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        kind = METHODS[name]
        code, clock, ended_call = code_of(KINDS[kind].made_of or kind), time.monotonic_ns, self._ended

        def timed(*args: Any, **options: Any) -> Any:
            began = clock()
            try:
                result = call(*args, **options)
            except BaseException:
                ended_call(code, began, clock(), args)
                raise
            if result is not None and isinstance(result, Work):
                result.profiled = self, log.BLOCKED, code, _nbytes(args), -1
                return result
            ended_call(code, began, clock(), args)
            return result

        return timed

    def _ended(self, code: int, began: int, ended: int, args: tuple[Any, ...]) -> None:
        with self._lock:
            number, call, shape = self._record.last_call()
            last, self._last = self._last, number
            if number != last + 1:
                if (
                    number == last
                ):  # calls on GPUs, in groups of one rank, and those that were refused at once
                    number, call, shape = 0, code, _nbytes(args)
                else:
                    self._copy(last + 1, number - 1)
            for add, index in self._logs:
                add(index, log.SYNC, number, call or code, shape, began, ended, -1)

    def _catch_up(self) -> None:
        with self._lock:
            last, self._last = self._last, self._record.last_call()[0]
            self._copy(last + 1, self._last)

    def _copy(self, first: int, last: int) -> None:
        """Copy the calls from `first` to `last` from the flight record."""
        oldest = max(first, last - RING + 2)  # the next call may be overwriting the oldest row
        if oldest > first:
            for each in self._call_logs:
                each.drop(oldest - first)
        for number in range(oldest, last + 1):
            call, shape, began, ended = self._record.entry(number)
            self.add(log.BESIDE, number, call, shape, began, ended, -1)

    def timed_message(self, call: Callable[..., Any], flavour: int) -> Callable[..., Any]:
        clock, sends = time.monotonic_ns, flavour in (log.SEND, log.ISEND)

        def timed(tensor: Any, peer: int | None = None, tag: int = 0, *args: Any, **options: Any) -> Any:
            if "src" in options or "dst" in options:
                peer = options.pop("dst" if sends else "src")
            nbytes, began = _nbytes((tensor,)), clock()
            result = call(tensor, peer, tag, *args, **options)
            ended = clock()
            if flavour == log.RECV:
                peer = result
            number = 0
            if isinstance(peer, int) and isinstance(tag, int) and tag != ANY_TAG:
                key = peer, tag, sends
                self._sequences[key] = number = self._sequences[key] + 1
            other = peer if isinstance(peer, int) else -1
            tag = tag if isinstance(tag, int) else ANY_TAG
            self.add(flavour, number, tag, nbytes, began, ended, other)
            if flavour in (log.ISEND, log.IRECV):
                result.profiled = self, log.BLOCKED_MESSAGE, int(not sends), nbytes, other
            return result

        return timed


def _nbytes(args: tuple[Any, ...]) -> int:
    """Return the bytes of the first argument that has an `nbytes`; 0 if there is none."""
    for x in args:
        if (nbytes := getattr(x, "nbytes", None)) is not None:
            return int(nbytes)
    return 0


def _timed_wait(work: Work, timeout: Any = None) -> bool:
    """Replace Work.wait while a profile is on."""
    if work.profiled is None:
        return _wait(work, timeout)
    watched, flavour, code, nbytes, peer = work.profiled
    began = time.monotonic_ns()
    try:
        return _wait(work, timeout)
    finally:
        watched.add(flavour, 0, code, nbytes, began, time.monotonic_ns(), peer)


def _after_fork() -> None:
    """In a child process made by fork: profile nothing, because the parent's log belongs to the parent."""
    global _lock
    _lock = threading.RLock()
    for call_log in _logs:
        call_log.disown()
    for watched in _watched.values():
        watched.forget()
    for collection in (_logs, _watched, _of_process):
        collection.clear()
    Work.wait = _wait  # type: ignore[method-assign]


at_fork("profile", _after_fork)
