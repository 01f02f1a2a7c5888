"""Messages interrupted between any two steps of their Python code by an exception, as Ctrl-C does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from typing import Any

import numpy as np
import pytest
from shm.stepping import Between

from fastcoll.core.work import Work
from fastcoll.errors import AbortedError, GroupError
from fastcoll.net.tcp import pipe as tcp_pipe
from fastcoll.p2p import checks, engine, events, exchange, lock, progress, thread
from fastcoll.shm import pipe

from .worlds import DEADLINE, RING, Rank, RingWorld, WireWorld, World, pattern, until

MODULES = (checks, engine, events, exchange, lock, progress, thread, pipe, tcp_pipe)
FILES = {module.__file__ for module in MODULES}
LARGE = 3 * RING


def interrupt() -> None:
    raise KeyboardInterrupt


def is_without_threads() -> bool:
    return not any(each.name == "fastcoll-messages" for each in threading.enumerate())


def answer(me: Rank, nbytes: int) -> None:
    """Send an array to rank 0, and receive one from it, unless the group fails."""
    try:
        works = [me.isend(pattern(nbytes), 0), me.irecv(np.zeros(nbytes, np.uint8), 0)]
        for work in works:
            work.wait()
    except GroupError:
        pass


def at_every_step(make: type[World], nbytes: int, stride: int) -> Iterator[tuple[World, list[Work], Any]]:
    """Exchange messages in a new world, and interrupt rank 0 at its first step; again with the second step, and so on.

    Yields the world, the Works that rank 0 has got by then, and the array into which it receives.
    """
    for step in count(1):
        with closing(make(2)) as world:
            me, peer = world.ranks
            got, works = np.zeros((nbytes, stride), np.uint8)[:, 0], list[Work]()
            posts: list[Callable[[], Work]] = [
                lambda me=me: me.isend(pattern(nbytes), 1),
                lambda me=me, to=got: me.irecv(to, None),
            ]
            other = threading.Thread(target=answer, args=(peer, nbytes))
            other.start()
            interrupted = False
            try:
                with Between(FILES, step, interrupt) as between:
                    for post in posts:
                        works.append(post())
                    for work in works:
                        work.wait()
            except KeyboardInterrupt:
                interrupted = True
            yield world, works, got
            peer.monitor.fail(AbortedError("the test is over"))
            peer.mailbox.abort()
            other.join()
            for rank in world.ranks:
                rank.mailbox.close(None)
            until(is_without_threads)  # a thread whose start was interrupted ends by itself
        if not interrupted and between.steps < step:
            break
    assert step > 100


@pytest.mark.parametrize(
    ("make", "nbytes", "stride"), [(RingWorld, LARGE, 1), (RingWorld, 8, 2), (WireWorld, 8, 1)]
)
def test_an_exception_at_any_step_leaves_the_lock_free(make: type[World], nbytes: int, stride: int) -> None:
    """Afterwards each operation can be waited for, and completes, or the group has failed."""
    for world, works, got in at_every_step(make, nbytes, stride):
        me = world.ranks[0]
        assert not me.mailbox.has_lock()
        try:
            for work in works:
                work.wait(DEADLINE)
        except GroupError:
            assert me.monitor.failure is not None
        if me.monitor.failure is None and len(works) == 2:
            assert (got == pattern(nbytes)).all()
