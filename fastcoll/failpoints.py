"""Named failpoints, at which a rank kills itself, exits, raises, stops or waits if FASTCOLL_FAILPOINT names them.

    FASTCOLL_FAILPOINT=NAME:ACTION[=VALUE][@N][#RANK],...

    shm.all_reduce.after_publish:kill@2        the second time that this process hits the failpoint
    shm.*.enter:delay=0.01#1                   rank 1 only, every time

If several items name one failpoint, the last of them counts.

Failpoints let tests make a rank fail in the middle of a call, without a clock. Python code hits a failpoint in `reach`,
compiled code in kernels/failing.py. If the setting is empty, the kernels contain no failpoints; the cache keeps kernels
with failpoints in separate files (compiler/jit.py). Python and compiled code share one table, which has a row of 64-bit
words for each failpoint:

    word of a row   meaning
    ACTION          what to do, 0: nothing
    COUNT           how often this process has hit the failpoint
    WHICH           at which hit to act, 0: at every hit
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

from .core.operations import OPERATIONS

_log = logging.getLogger("fastcoll")

COLLECTIVES = [name.replace(".", "_").replace(":", "_") for name in OPERATIONS]
"""The kinds of operations, in the order of their numbers. No code hits the failpoints of "none" and "message"."""

PLACES = {
    "shm.OPERATION.enter": "the call's arguments are checked, and nothing is published",
    "shm.OPERATION.after_publish": "the call line is published, with the first chunk",
    "shm.OPERATION.mid_chunk": "a chunk after the first is written, and not published; @N: this is chunk N + 1",
    "shm.OPERATION.after_meeting": "every rank has begun the call",
    "shm.OPERATION.before_done": "all data is read and written, and this rank has not published that yet",
    "shm.OPERATION.after_done": "the call is complete on this rank, and has not returned",
    "shm.single_copy.piece_read": "a block of a peer's array is read in place",
    "shm.single_copy.pushing": "this rank has announced that it stores into a peer's array, and is about to do so",
    "shm.symmetric.after_segment": "the segment of a symmetric array is made, or mapped",
    "shm.symmetric.piece_stored": "a block of a symmetric array is reduced and stored into all ranks' arrays",
    "shm.symmetric.after_put": "a put is done, and no signal is sent",
    "shm.symmetric.before_signal": "a signal is about to be sent",
    "shm.arena.after_create": "this process's arena of shared arrays is made",
    "shm.arena.before_mapping": "a peer's call has named an arena that is not mapped here yet",
    "shm.arena.after_mapping": "the peer's arena is mapped",
    "shm.arena.before_withdraw": "the group has failed, and a peer may still write into a shared array here",
    "shm.arena.after_copy": "before a fork, the shared arrays are copied for the child",
    "shm.send.enter": "a blocking send is about to begin; in a group of several nodes, to a rank of this node",
    "shm.send.after_done": "the message is taken, and the call has not returned",
    "shm.recv.enter": "a blocking receive is about to begin",
    "shm.recv.after_done": "the message has arrived and is acknowledged, and the call has not returned",
    "shm.isend.after_post": "a small message is put into the ring at once",
    "shm.irecv.after_post": "a receive is posted, and its message has not arrived",
    "shm.message.piece_sent": "a block of a message is in the ring; for every kind of send",
    "shm.message.piece_read": "a block is copied from the ring or the sender's array, and this is not published yet",
    "shm.message.before_ack": "a message has arrived, and is not acknowledged",
    "shm.meeting.after_create": "rank 0 has made a group's segment, and not published its name",
    "shm.meeting.after_attach": "a rank has mapped the segment",
    "shm.meeting.after_proof": "a rank has published that it has mapped the segment",
    "tcp.OPERATION.enter": "the call's connections are established, and nothing is sent",
    "tcp.OPERATION.after_publish": "a peer's header is sent, at least in part",
    "tcp.OPERATION.after_meeting": "every rank that this one waits for has begun the call",
    "tcp.OPERATION.mid_chunk": "some bytes of the data behind the headers are sent or received",
    "tcp.OPERATION.before_done": "all data is sent and received",
    "tcp.OPERATION.after_done": "the call is complete on this rank, and has not returned",
    "tcp.send.enter": "a blocking send is about to begin",
    "tcp.send.after_done": "the message is taken, and the call has not returned",
    "tcp.recv.enter": "a blocking receive is about to begin",
    "tcp.recv.after_done": "the message has arrived and is acknowledged, and the call has not returned",
    "tcp.isend.after_post": "a first part of a small message is sent",
    "tcp.irecv.after_post": "a receive is posted, and its message has not arrived",
    "tcp.message.piece_sent": "some bytes of a message are sent; for every kind of send",
    "tcp.message.piece_read": "some bytes of a message are received, besides those that arrived with its header",
    "tcp.message.before_ack": "a message has arrived, and is not acknowledged",
    "tcp.meeting.after_listen": "a group is being made: every member listens, and its address is known",
    "tcp.meeting.after_connect": "the group has its first connections",
    "tcp.connection.enter": "a connection for data or messages is being made, at its first use",
    "hybrid.OPERATION.after_meeting": "all ranks have begun a call whose data moves by nodes, and no data has moved",
    "hybrid.OPERATION.before_done": "the call's data has moved, and the call has not returned",
    "mpi.OPERATION.enter": "a call that is the first of its kind on this rank, or large, is about to begin",
    "mpi.OPERATION.after_meeting": "all ranks have begun such a call (see the row above), and no data has moved",
    "mpi.OPERATION.before_done": "the call's data has moved, and the call has not returned",
    "launch.before_will": "a launcher has connected to the launcher of node 0, which would not notice its death yet",
    "launch.after_start": "the launcher has started its ranks; `#RANK` does not apply to failpoints of launchers",
    "launch.before_end": "the launcher is about to kill those of its ranks that still run, and to exit",
    "start.enter": "`init_process_group` has checked its arguments; no rank is known, so `#RANK` does not apply",
    "start.after_rendezvous": "the store is connected, and the rank is known",
    "start.after_join": "every rank has registered",
    "start.after_world": "the default group is made",
    "new_group.enter": "`new_group` has checked its arguments",
    "new_group.after_request": "this rank has published which group it asks for",
    "new_group.after_made": "the group is made, and `new_group` has not returned",
    "destroy.enter": "`destroy_process_group`, or the exit of the program, is about to leave the job",
    "destroy.after_groups": "all groups are closed, and the store is open",
    "destroy.after_store": "the store is closed",
}
"""Every failpoint, and the state of the process that hits it. OPERATION stands for each of COLLECTIVES.

A call line is the place in shared memory where a rank publishes its call.
"""

NAMES = [
    name.replace("OPERATION", operation)
    for name in PLACES
    for operation in (COLLECTIVES if "OPERATION" in name else [""])
]
_NUMBERS = {name: number for number, name in enumerate(NAMES)}

ACTIONS = {
    "kill": "SIGKILL to itself",
    "exit": "os._exit with the code VALUE, or 1",
    "raise": "a FailpointError; in compiled code it is raised as if by a signal handler, once Python runs again",
    "stop": "SIGSTOP to itself",
    "delay": "sleep for VALUE seconds",
    "jitter": "sleep for a random time of up to VALUE seconds",
}
KILL, EXIT, RAISE, STOP, DELAY, JITTER = range(1, 7)
_BY_NAME = {name: number for number, name in enumerate(ACTIONS, 1)}

ACTION, COUNT, WHICH, VALUE, NAP = range(5)
ROW_WORDS = 6
_words = (ctypes.c_int64 * (ROW_WORDS * len(NAMES)))()
TABLE = ctypes.addressof(_words)
"""The address of row 0. It is the same in forked processes, each of which has its own table."""


class FailpointError(Exception):
    """The error of the action `raise`. Like an error of the user's code or of a bug, it is not a FastcollError."""


class Point(NamedTuple):
    """One item of FASTCOLL_FAILPOINT."""

    numbers: tuple[int, ...]  # the numbers of the failpoints that the item names
    action: int
    value: float
    which: int  # the hit at which to act, counted from 1; 0: every hit
    rank: int | None  # None: all ranks


def number_of(name: str) -> int:
    """Return the number of a failpoint; if the name contains OPERATION, the number for operation 0."""
    return _NUMBERS[name.replace("OPERATION", COLLECTIVES[0])]


def parse(text: str) -> tuple[Point, ...]:
    """Parse the value of FASTCOLL_FAILPOINT; raise ValueError if it is malformed."""
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
        raise ValueError(f"{text!r} names no action: {', '.join(ACTIONS)}")
    if action in ("delay", "jitter") and not value:
        raise ValueError(f"{text!r} lacks the seconds, as in {name}:{action}=0.1")
    if which and int(which) < 1:
        raise ValueError(f"{text!r}: @N counts from 1")
    default = 1.0 if action == "exit" else 0.0
    return Point(
        numbers,
        _BY_NAME[action],
        float(value or default),
        int(which or 0),
        int(rank) if rank else None,
    )


def arm(points: Iterable[Point], rank: int | None = None) -> None:
    """Reset all counts and set the actions of `points`; `rank` is this process's rank, None while it is unknown."""
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
        _log.warning("FASTCOLL_FAILPOINT is set: this process fails on purpose")


def reach(name: str, operation: str = "") -> None:
    """Hit a failpoint from Python code; `operation` replaces OPERATION in its name."""
    name = name.replace("OPERATION", operation)
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
