"""Broken frames on a group's connections for collectives and for messages.

A broken frame ends its group, so each frame has a group of its own.
"""

from __future__ import annotations

import os
import random
import select
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

import fastcoll as dist
from fastcoll.net.tcp import engine_layout as words
from fastcoll.net.tcp import mail_frames
from fastcoll.p2p.pipe import GO, MISFIT, TAKEN
from fastcoll.p2p.transfers import kind_of

from .fleet import Fleet
from .frames_rpc import joined
from .mutations import mutated
from .watching import ATTACKER, OVER, VICTIM, Seen

_TIMEOUT = 2.0  # of a group
_WAIT_SECONDS = 0.2  # how long the attacker keeps its connection while the victim's call waits
_COUNT = 8  # elements of an array
_F8 = np.dtype("f8")


def reduce(fleet: Fleet, seen: Seen, count: int) -> None:
    """Make a collective call in each of `count` groups."""
    _be_victim(fleet, seen, count, lambda group, number: dist.all_reduce(np.ones(_COUNT), group=group))


def attack_collectives(fleet: Fleet, count: int, seed: int) -> None:
    """Answer the call with a broken header and broken data."""
    dice = random.Random(seed)

    def attack(group: Any, number: int) -> None:
        _send(fleet, group.backend._mesh.data(0), lambda theirs: _mutated_words(dice, _reply(theirs)), number)

    _be_attacker(fleet, count, attack)


def exchange(fleet: Fleet, seen: Seen, count: int) -> None:
    """Receive or send a message in each of `count` groups."""

    def call(group: Any, number: int) -> None:
        if number % 2:
            dist.recv(np.zeros(_COUNT), 1, group=group)
        else:
            dist.send(np.zeros(_COUNT), 1, group=group)

    _be_victim(fleet, seen, count, call)


def attack_messages(fleet: Fleet, count: int, seed: int) -> None:
    """Send a broken message, or a broken answer to one."""
    dice = random.Random(seed)

    def attack(group: Any, number: int) -> None:
        frame = _message() if number % 2 else _ack(dice)
        fd = group.backend._mesh.mail(0).fileno()
        _send(fleet, fd, lambda _: _mutated_words(dice, frame), number, answers=number % 2 == 0)

    _be_attacker(fleet, count, attack)


def _reply(theirs: bytes) -> bytes:
    """Return the frame with which a rank of two answers the other's frame of an all_reduce."""
    frame = np.frombuffer(theirs, np.int64).copy()
    frame[words.HEAD_BALANCE] *= -1  # the sum over all ranks is 0 if their sizes match
    return frame.tobytes()


def _message() -> bytes:
    nbytes = _COUNT * _F8.itemsize
    header = (mail_frames.MESSAGE | 1 << mail_frames.TYPE_BITS, kind_of(0, _F8), nbytes, nbytes)
    return np.array(header, np.int64).tobytes() + np.ones(_COUNT).tobytes()


def _ack(dice: random.Random) -> bytes:
    decision = dice.choice((TAKEN, MISFIT, GO))
    header = (decision | 1 << mail_frames.TYPE_BITS, kind_of(0, _F8), _COUNT * _F8.itemsize, 0)
    return np.array(header, np.int64).tobytes()


def _mutated_words(dice: random.Random, frame: bytes) -> bytes:
    """Change a frame whose header is words; a frame of messages has four."""
    return mutated(dice, frame, tuple((at, 8) for at in range(0, mail_frames.FRAME, 8)))[1]


def _be_victim(fleet: Fleet, seen: Seen, count: int, call: Any) -> None:
    with joined(fleet, 0):
        for number in range(1, count + 1):
            group: Any = dist.new_group(timeout=_TIMEOUT, backend="tcp")
            seen.attempt(lambda: call(group, number), "rank 1")  # noqa: B023
            fleet.turns[VICTIM] = number
            dist.destroy_process_group(group)
        fleet.await_mark(OVER)


def _be_attacker(fleet: Fleet, count: int, attack: Any) -> None:
    with joined(fleet, 1):
        for number in range(1, count + 1):
            group = dist.new_group(timeout=_TIMEOUT, backend="tcp")
            attack(group, number)
            fleet.turns[ATTACKER] = number
            dist.destroy_process_group(group)


def _send(fleet: Fleet, fd: int, make: Callable[[bytes], bytes], number: int, answers: bool = True) -> None:
    """Send the frame that `make` returns for the victim's frame; if not `answers`, the victim has not sent any.

    Then wait until the victim's call has ended, or waits for more.
    """
    theirs = b""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    with suppress(OSError):
        if answers and poller.poll(1000 * _TIMEOUT):
            theirs = os.read(fd, 1 << 16)  # a close with unread bytes would reset the connection
        os.write(fd, make(theirs))
    fleet.await_turns([VICTIM], number, _WAIT_SECONDS)
