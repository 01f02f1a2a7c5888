"""Named failpoints: places where a rank kills itself, ends, raises, stops or waits, because FASTCOLL_FAILPOINT says so.

    FASTCOLL_FAILPOINT=NAME:ACTION[=VALUE][@N][#RANK],...

    shm.all_reduce.after_publish:kill@2        the second time that this process comes there
    shm.*.enter:delay=0.01#1                   rank 1 alone, every time; the last of several for one place counts

For tests, which need no clock then to hit a rank in the middle of a call. Python comes by in `reach`, compiled code in
kernels/failing.py; both count and look in one table. Where the setting is empty the kernels have no failpoints at all:
those with them are other files in the cache (kernels/jit.py).

    word of a row   meaning
    ACTION          what to do, 0: nothing
    COUNT           how often this process has come by
    WHICH           which time is meant, 0: every time
    VALUE           the exit code, nanoseconds, or the address of the exception's class
    NAP, NAP + 1    seconds and nanoseconds, for compiled code
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from collections.abc import Iterable
from typing import NamedTuple

_log = logging.getLogger("fastcoll")

COLLECTIVES = (
    "none all_reduce reduce scan exscan reduce_scatter broadcast all_gather gather scatter all_to_all barrier "
    "message symmetric_empty symmetric_all_reduce refused"
).split()
"""By their numbers in core/signature.py; "none" and "message" are never reached."""

PLACES = {
    "shm.OPERATION.enter": "the call's arguments are in order, and nothing of it is published",
    "shm.OPERATION.after_publish": "the call line is published, with the first chunk",
    "shm.OPERATION.mid_chunk": "a later chunk is written, and not published; @N: chunk N + 1",
    "shm.OPERATION.after_meeting": "every rank has begun the call",
    "shm.OPERATION.before_done": "all is read and written, which the peers do not know yet",
    "shm.OPERATION.after_done": "the call is complete on this rank, and has not returned",
}
"""Every failpoint, and where it is; OPERATION stands for each of COLLECTIVES."""

NAMES = [
    name.replace("OPERATION", operation)
    for name in PLACES
    for operation in (COLLECTIVES if "OPERATION" in name else [""])
]
_NUMBERS = {name: number for number, name in enumerate(NAMES)}

ACTIONS = {
    "kill": "SIGKILL to itself",
    "exit": "os._exit, with the code VALUE or 1",
    "raise": "a FailpointError; out of compiled code as a signal's handler would, once Python runs again",
    "stop": "SIGSTOP to itself",
    "delay": "sleep for VALUE seconds",
    "jitter": "sleep for up to VALUE seconds, by chance",
}
KILL, EXIT, RAISE, STOP, DELAY, JITTER = range(1, 7)
_BY_NAME = {name: number for number, name in enumerate(ACTIONS, 1)}

ACTION, COUNT, WHICH, VALUE, NAP = range(5)
ROW_WORDS = 6
_words = (ctypes.c_int64 * (ROW_WORDS * len(NAMES)))()
TABLE = ctypes.addressof(_words)
"""The address of row 0; it is the same in forked processes, each with a table of its own."""


class FailpointError(Exception):
    """What the action `raise` raises: no error of fastcoll's, as a bug or a user's code would."""


class Point(NamedTuple):
    """A part of FASTCOLL_FAILPOINT."""

    numbers: tuple[int, ...]  # the places that it names
    action: int
    value: float
    which: int  # 0: every time
    rank: int | None  # None: all of them


def number_of(name: str) -> int:
    """A place's number; of one with OPERATION that of the operation 0."""
    return _NUMBERS[name.replace("OPERATION", COLLECTIVES[0])]


def parse(text: str) -> tuple[Point, ...]:
    """FASTCOLL_FAILPOINT as data; ValueError says what is wrong with it."""
    return tuple(_parse_one(part.strip()) for part in text.split(",") if part.strip())


def _parse_one(text: str) -> Point:
    from difflib import get_close_matches
    from fnmatch import fnmatchcase

    name, _, rest = text.partition(":")
    rest, _, rank = rest.partition("#")
    rest, _, which = rest.partition("@")
    action, _, value = rest.partition("=")
    numbers = tuple(number for number, known in enumerate(NAMES) if fnmatchcase(known, name))
    if not numbers:
        near = get_close_matches(name, NAMES, 3, 0.5)
        raise ValueError(f"there is no failpoint {name!r}; near it are {', '.join(near or PLACES)}")
    if action not in _BY_NAME:
        raise ValueError(f"{text!r} does not say what to do there: {', '.join(ACTIONS)}")
    if action in ("delay", "jitter") and not value:
        raise ValueError(f"{text!r} does not say for how many seconds, as in {name}:{action}=0.1")
    if which and int(which) < 1:
        raise ValueError(f"{text!r} counts from 1")
    default = 1.0 if action == "exit" else 0.0
    return Point(
        numbers,
        _BY_NAME[action],
        float(value or default),
        int(which or 0),
        int(rank) if rank else None,
    )


def arm(points: Iterable[Point], rank: int | None = None) -> None:
    """Begin to count, and act as these say; `rank`: this process's, None while it is unknown."""
    ctypes.memset(TABLE, 0, ctypes.sizeof(_words))
    mine = [point for point in points if point.rank in (None, rank)]
    for point in mine:
        nanoseconds = round(point.value * 1e9)
        value = {EXIT: int(point.value), RAISE: id(FailpointError)}.get(point.action, nanoseconds)
        for number in point.numbers:
            row = (point.action, 0, point.which, value, *divmod(nanoseconds, 1_000_000_000))
            for word, content in enumerate(row, number * ROW_WORDS):
                _words[word] = content
    if mine and rank is not None:
        _log.warning("rank %d has failpoints: FASTCOLL_FAILPOINT is set", rank)


def reach(name: str) -> None:
    """Python comes by the place of this name."""
    row = _NUMBERS[name] * ROW_WORDS
    if not (action := _words[row + ACTION]):
        return
    _words[row + COUNT] += 1
    if _words[row + WHICH] not in (0, _words[row + COUNT]):
        return
    value = _words[row + VALUE]
    if action in (KILL, STOP):
        os.kill(os.getpid(), signal.SIGKILL if action == KILL else signal.SIGSTOP)
    elif action == EXIT:
        os._exit(value)
    elif action == RAISE:
        raise FailpointError(f"failpoint {name}")
    else:
        import random

        time.sleep(value / 1e9 * (random.random() if action == JITTER else 1.0))
