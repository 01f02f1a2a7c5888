"""Broken remote calls, and broken results of remote calls.

A member's pickle is trusted, because it may run any code (docs/security.md). So the exception that a changed pickle
raises at the caller is not judged, and results are changed in their headers only.
"""

from __future__ import annotations

import operator
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

import fastcoll as dist
from fastcoll import PrefixStore, TCPStore, rpc
from fastcoll.rpc import pickling, wire
from fastcoll.rpc.agent import current_agent
from fastcoll.rpc.calls import USER_CALL
from fastcoll.rpc.wire import MessageType, RpcMessage

from .fleet import Fleet
from .frames_store import HERE
from .mutations import HEADER_ONLY, mutated
from .watching import ATTACKER, OVER, PORT, VICTIM, Seen

HEADER = ((0, 8), (8, 8), (16, 8), (24, 4), (28, 4), (32, 1), (33, 1), (34, 1))
_TOGETHER = 5  # at most so many frames on one connection
_CHECK_EVERY = 50  # connections
_CALL_SECONDS = 0.3  # timeout of the calls whose results are broken
_PATIENCE = 10.0
_VICTIM, _ATTACKER = "worker0", "worker1"


@contextmanager
def joined(fleet: Fleet, rank: int) -> Iterator[None]:
    """Be in a job of two ranks over TCP, of which rank 0 serves the store."""
    port = 0 if rank == 0 else fleet.await_mark(PORT)
    with TCPStore(HERE, port, is_master=rank == 0, wait_for_workers=False, timeout=3 * _PATIENCE) as store:
        fleet.marks[PORT] = store.port
        dist.init_process_group("tcp", None, 3 * _PATIENCE, 2, rank, PrefixStore("job", store))
        yield
        dist.destroy_process_group()


def be_called(fleet: Fleet, seen: Seen, count: int) -> None:
    """Be a worker until the attack is over."""
    with joined(fleet, 0):
        rpc.init_rpc(_VICTIM)
        fleet.await_mark(OVER)
        rpc.shutdown(graceful=False)


def attack_worker(fleet: Fleet, count: int, seed: int) -> None:
    """Send broken messages; between them honest calls must be answered."""
    dice, sent, connections = random.Random(seed), 0, 0
    with joined(fleet, 1):
        rpc.init_rpc(_ATTACKER)
        agent = current_agent()
        while sent < count:
            connection: socket.socket = agent._dial(0, time.monotonic() + _PATIENCE)
            connection.settimeout(_PATIENCE)
            with suppress(ConnectionError), connection:  # the victim has dropped it
                for _ in range(dice.randrange(1, _TOGETHER + 1)):
                    sent += 1
                    connection.sendall(_without_large_memo(*mutated(dice, _message(dice), HEADER)))
            connections += 1
            fleet.turns[ATTACKER] = sent
            if connections % _CHECK_EVERY == 0:
                assert rpc.rpc_sync(_VICTIM, operator.neg, (sent,), timeout=_PATIENCE) == -sent
        rpc.shutdown(graceful=False)


def _message(dice: random.Random) -> bytes:
    """Return a message of any type; calls and notifications have arguments of several sizes."""
    to, type = current_agent().workers[0], dice.choice(list(MessageType))
    if type in (MessageType.GOODBYE, MessageType.RING):
        return wire.encode(RpcMessage(type, 0, dice.randrange(2), dice.randbytes(20)))[0]
    items = dice.choice((0, 10, 1000, 3000))  # the last ones are sent behind the body
    value = (operator.neg, (np.arange(items),), {}) if items else (operator.neg, (1,), {})
    pickled, buffers = pickling.dumps(value, to)
    message = RpcMessage(type, USER_CALL, dice.randrange(1, 100), pickled, buffers)
    start, large = wire.encode(message, by_ring=dice.random() < 0.1)
    return b"".join([start, *large])


def _without_large_memo(name: str, frame: bytes) -> bytes:
    """Replace an opcode by which changed bytes of a pickle could take gigabytes: r, LONG_BINPUT, of any index."""
    at = wire.HEADER.size
    return frame if name == "whole" else frame[:at] + frame[at:].replace(b"r", b"q")


def call(fleet: Fleet, seen: Seen, count: int) -> None:
    """Call a worker that answers badly, each time as a new worker, because a worker gives up on a broken one."""
    with joined(fleet, 0):
        for number in range(1, count + 1):
            rpc.init_rpc(_VICTIM)
            _await_turn(fleet, ATTACKER, number)
            seen.attempt(
                lambda: rpc.rpc_sync(_ATTACKER, operator.neg, (np.arange(10),), timeout=_CALL_SECONDS),
                _ATTACKER,
            )
            fleet.turns[VICTIM] = number
            rpc.shutdown(graceful=False)
        fleet.await_mark(OVER)


def answer_badly(fleet: Fleet, count: int, seed: int) -> None:
    """Answer one call of each of `count` workers."""
    dice = random.Random(seed)
    with joined(fleet, 1):
        for number in range(1, count + 1):
            rpc.init_rpc(_ATTACKER)
            answering = _Answering(dice)
            current_agent().take_over = answering.take_over  # type: ignore[method-assign]
            fleet.turns[ATTACKER] = number
            _await_turn(fleet, VICTIM, number)
            answering.close()
            rpc.shutdown(graceful=False)


class _Answering:
    """Answers the first bytes of each connection with a broken result."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def take_over(self, connection: socket.socket, rank: int) -> None:
        self._connections.append(connection)
        thread = threading.Thread(target=self._answer, args=(connection,))
        thread.start()
        self._threads.append(thread)  # `close` may not join it before it has started

    def _answer(self, connection: socket.socket) -> None:
        pickled, buffers = pickling.dumps(np.arange(10), current_agent().workers[0])
        type = self._dice.choice((MessageType.RESULT, MessageType.RAISED))
        frame = wire.encode(RpcMessage(type, 0, 1, pickled, buffers))[0]
        connection.settimeout(_PATIENCE)
        with suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(mutated(self._dice, frame, HEADER, HEADER_ONLY)[1])

    def close(self) -> None:
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for connection in self._connections:
            connection.close()


def _await_turn(fleet: Fleet, place: int, number: int) -> None:
    assert fleet.await_turns([place], number, 3 * _PATIENCE), "the other process has ended"
