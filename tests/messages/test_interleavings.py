"""Schedules of the engine's threads: callers and progress threads switch between any two steps of p2p/ and the pipes.

Planted faults show which errors it finds.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
import warnings
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
from apart import ELSEWHERE, environment
from interleaved import shaken
from together import together

from fastcoll.net.tcp import mail_kernels
from fastcoll.net.tcp import pipe as tcp_pipe
from fastcoll.net.tcp.pipe import TcpPipe
from fastcoll.p2p import checks, engine, events, exchange, lock, progress, thread
from fastcoll.p2p.pipe import NOT_MINE
from fastcoll.shm import pipe

from .worlds import Rank, RingWorld, WireWorld, World

ENGINE = (checks, engine, events, exchange, lock, progress, thread, pipe, tcp_pipe)
FILES = {*(module.__file__ for module in ENGINE), __file__}
ROUNDS = 40


def exchanges(me: Rank, tag: int) -> None:
    """Send and receive at once, posted and waited for in any order."""
    peer, order = 1 - me.rank, random.Random(tag * 2 + me.rank)
    for number in range(ROUNDS):
        got = np.full(3, -1)
        posts = [lambda n=number: me.isend(np.full(3, n), peer, tag), lambda to=got: me.irecv(to, peer, tag)]
        order.shuffle(posts)
        works = [post() for post in posts]
        order.shuffle(works)
        for work in works:
            work.wait()
        assert got.tolist() == [number] * 3


def one_way(me: Rank, tag: int) -> None:
    """Send several messages one way; both ranks wait in any order."""
    peer, order = 1 - me.rank, random.Random(tag * 2 + me.rank)
    for number in range(ROUNDS // 4):
        sent = [np.full(2, number + n) for n in range(4)]
        arrays = [np.full(2, -1) for _ in sent] if me.rank else sent
        works = [(me.irecv if me.rank else me.isend)(x, peer, tag) for x in arrays]
        order.shuffle(works)
        for work in works:
            work.wait()
        assert np.array_equal(arrays, sent)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile what the schedules run, as that takes much longer within one."""
    for make in (RingWorld, WireWorld):
        with closing(make(2)) as world:
            world.run(*[partial(exchanges, tag=0)] * 2)


def run(make: type[World], seed: int, *programs: Any, timeout: float = 100) -> None:
    """Run two ranks, each with a thread and a tag for each program."""
    with closing(make(2, timeout=timeout)) as world:
        calls = [partial(each, me, tag) for me in world.ranks for tag, each in enumerate(programs)]
        with shaken(FILES, seed, 2 * timeout):  # a planted fault may make threads run for ever
            errors = [each for each in together(*calls, deadline=2.5 * timeout) if each is not None]
    if errors:
        raise errors[0]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "programs",
    [[exchanges], [exchanges, exchanges], [exchanges, one_way], [one_way, one_way, exchanges]],
    ids=lambda programs: "-".join(program.__name__ for program in programs),
)
@pytest.mark.parametrize("make", [RingWorld, WireWorld])
def test_messages_are_right_whenever_threads_switch(
    make: type[World], programs: list[Any], seed: int
) -> None:
    run(make, seed, *programs)


def reports_an_event_twice(self: TcpPipe, handled: int, peer: int, number: int) -> int:
    """Return an event once more to a thread whose count of events is out of date."""
    time.sleep(5e-4)
    if not self.seize():
        return NOT_MINE
    return mail_kernels.advance.call(self.address, handled, True)


def releases_the_pipe_too_early(self: TcpPipe, array: Any, peer: int, kind: int) -> tuple[int, bool] | None:
    """Release a pipe before the Exchange has recorded the message."""
    code = mail_kernels.post_send.call(self.address, peer, array, array.nbytes, kind)
    if code < 0:
        return None
    self.let_go()
    time.sleep(1e-4)
    return code >> 1, code & 1 != 0


FAULTS = {
    "twice": ("complete", reports_an_event_twice),
    "early": ("post_send", releases_the_pipe_too_early),
}


def is_found(fault: str) -> bool:
    """Return whether a schedule finds a fault; the process must end afterwards, because its memory may be corrupt."""
    warnings.simplefilter("ignore")
    setattr(TcpPipe, *FAULTS[fault])
    for seed in range(20):
        try:
            run(WireWorld, seed, exchanges, one_way, timeout=5)  # some faults end by it
        except Exception:
            return True
    return False


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str) -> None:
    """In a process of its own: a fault may let a thread write to memory that has been freed, and so end the process."""
    program = f"import os; from messages import test_interleavings as t; os._exit(not t.is_found({fault!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), cwd=ELSEWHERE, capture_output=True, text=True
    )
    assert done.returncode in (0, -signal.SIGABRT, -signal.SIGSEGV), done.stderr
