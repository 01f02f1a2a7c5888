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
from .operations import IN_PLACE, KINDS, LIST_IN_PLACE, METHODS, NO_ARRAY, ONE_TO_BLOCKS, ONE_TO_ONE
from .signature import COALESCED, code_of
from .work import Work

ProcessGroup: TypeAlias = Any  # that of group.py, which imports this file
_log = logging.getLogger("fastcoll")
_INTERNAL = re.compile(
    r"/(node|rail)\d+$"
)  # the groups of hybrid/backend.py, whose calls are parts of other calls
_MESSAGES = {"send": log.SEND, "recv": log.RECV, "isend": log.ISEND, "irecv": log.IRECV}

_lock = threading.RLock()
_groups: weakref.WeakKeyDictionary[ProcessGroup, None] = weakref.WeakKeyDictionary()  # oldest first
_watched: dict[int, _Watched] = {}  # by the id of the group
_logs: list[CallLog] = []
_waits: dict[type[Work], Callable[..., bool]] = {}  # the plain `wait` of each class whose `wait` is replaced
_of_process: list[CallLog] = []  # the log in FASTCOLL_PROFILE_DIR, if there is one


def note(group: ProcessGroup) -> None:
    """Note a new group; profile it if a profile is on."""
    if group.monitor.record is None or _INTERNAL.search(group.name):
        return
    with _lock:
        _groups[group] = None
        if config.get("FASTCOLL_PROFILE_DIR") and not _of_process:
            start_process(group)
        if _logs:
            _watch(group)


def start(call_log: CallLog) -> None:
    """Log the calls of all groups of this process from now on."""
    with _lock:
        _logs.append(call_log)
        _time_waits(Work)
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
            _restore_waits()
            for watched in list(_watched.values()):
                watched.end()
        call_log.end()


def widest_group() -> ProcessGroup | None:
    """Return this process's open group with most members, of several the oldest; None if there is none."""
    with _lock:
        return max(
            (group for group in _groups if not group.gate.closed), key=lambda group: group.size, default=None
        )


def later_wait(work: Work) -> Callable[[], None]:
    """Return a function that begins a wait for `work`, which is logged when `work` ends; `work.wait` no longer is.

    It is for a wait that no code of Python makes. Such waits of one group are in the order of the group's calls, so
    each begins at the end of the one before. The wait is logged before callbacks run that are added to `work` later,
    so one of these may let the waiting thread continue.
    """
    watched, flavour, code, nbytes, peer = work.profiled
    work.profiled = None
    began: list[int] = []

    def ended(_: Work) -> None:
        if began:
            watched.waited(began[0], flavour, code, nbytes, peer)

    work.add_done_callback(ended)
    return lambda: began.append(time.monotonic_ns())


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
        self._waited_until = 0
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

    def waited(self, began: int, flavour: int, code: int, nbytes: int, peer: int) -> None:
        """Log a wait that ends now."""
        began, self._waited_until = max(began, self._waited_until), time.monotonic_ns()
        self.add(flavour, 0, code, nbytes, began, self._waited_until, peer)

    def timed_collective(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        kind = METHODS[name]
        # A call on a list of arrays is logged under its own name, as the flight record has it.
        code = code_of(KINDS[kind].made_of or kind) | (COALESCED if KINDS[kind].made_of else 0)
        clock, ended_call = time.monotonic_ns, self._ended
        form, root = KINDS[kind].form, KINDS[kind].root
        # This rank contributes its input. With blocks the output comes first, except in a gather.
        is_first = form in (IN_PLACE, ONE_TO_ONE, LIST_IN_PLACE) or (form == ONE_TO_BLOCKS and root)
        place = 0 if is_first else 1

        def size_of(args: tuple[Any, ...]) -> int:
            return _nbytes(args[place]) if len(args) > place and form != NO_ARRAY else 0

        def timed(*args: Any, **options: Any) -> Any:
            began = clock()
            try:
                result = call(*args, **options)
            except BaseException:
                ended_call(code, began, clock(), size_of(args))
                raise
            if result is not None and isinstance(result, Work):
                result.profiled = self, log.BLOCKED, code, size_of(args), -1
                _time_waits(type(result))
                return result
            ended_call(code, began, clock(), size_of(args))
            return result

        return timed

    def _ended(self, code: int, began: int, ended: int, nbytes: int) -> None:
        with self._lock:
            number, call, shape = self._record.last_call()
            last, self._last = self._last, number
            if number != last + 1:
                # Calls on GPUs, in groups of one rank, and those that were refused at once.
                if number == last:
                    number, call, shape = 0, code, nbytes
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
            nbytes, began = _nbytes(tensor), clock()
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
                _time_waits(type(result))
            return result

        return timed


def _nbytes(x: Any) -> int:
    """Return the bytes of an array, or of a list of arrays; 0 if `x` is neither."""
    if isinstance(x, list | tuple):
        return sum(map(_nbytes, x))
    return int(getattr(x, "nbytes", 0))


def _time_waits(kind: type[Work]) -> None:
    """Replace the `wait` that Works of a class have while a profile is on; it may be that of a class above."""
    owner: type[Work] = next(each for each in kind.__mro__ if "wait" in vars(each))
    if owner in _waits:
        return
    plain = owner.wait

    def timed(work: Work, timeout: Any = None) -> bool:
        profiled = work.profiled
        if profiled is None:
            return plain(work, timeout)
        watched, flavour, code, nbytes, peer = profiled
        # The `wait` of a class may call that of the class above it, which must not log the same wait.
        work.profiled, began = None, time.monotonic_ns()
        try:
            return plain(work, timeout)
        finally:
            work.profiled = profiled
            watched.add(flavour, 0, code, nbytes, began, time.monotonic_ns(), peer)

    with _lock:
        if _logs and owner not in _waits:
            _waits[owner] = plain
            owner.wait = timed  # type: ignore[method-assign, assignment]


def _restore_waits() -> None:
    for owner, plain in _waits.items():
        owner.wait = plain  # type: ignore[method-assign]
    _waits.clear()


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
    _restore_waits()


at_fork("profile", _after_fork)
