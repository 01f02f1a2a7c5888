"""Messages over both kinds of channels: receives from any rank, and both kinds in use at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from messages.worlds import DEADLINE, RING, NodeWorld, pattern, until
from together import together

from fastcoll.errors import CollectiveTimeoutError, MismatchError
from fastcoll.net.tcp.mail_frames import EAGER

# Ranks 0 and 1 share a node, 2 and 3 another.
NEAR, FAR = 1, 2
SIZES = [8, RING + 1, EAGER + 5]


@pytest.fixture
def world() -> Iterator[NodeWorld]:
    with closing(NodeWorld(4)) as made:
        yield made


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("sender", [NEAR, FAR])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("posted", [False, True])
def test_from_any_rank(world: NodeWorld, sender: int, nbytes: int, waits: bool, posted: bool) -> None:
    me, other, got = world.ranks[0], world.ranks[sender], np.zeros(nbytes, "u1")

    def send() -> None:
        until(lambda: not waits or me.is_blocked())
        other.send(pattern(nbytes), 0, 5)

    def receive() -> int | None:
        until(lambda: waits or other.has_begun(0))
        return me.irecv(got, None, 5).result() if posted else me.recv(got, None, 5)

    assert together(receive, send) == [sender, None]
    assert (got == pattern(nbytes)).all()
    assert not me.is_blocked() or posted


@pytest.mark.parametrize("sender", [NEAR, FAR])
def test_a_misfit_from_any_rank(world: NodeWorld, sender: int) -> None:
    work = world.ranks[sender].isend(np.zeros(3), 0)
    with pytest.raises(MismatchError, match=r"recv from any rank.*3 elements"):
        world.ranks[0].recv(np.zeros(2))
    with pytest.raises(MismatchError):
        work.wait(DEADLINE)
    world.ranks[sender].isend(np.ones(2), 0)
    assert world.ranks[0].recv(np.zeros(2)) == sender


@pytest.mark.parametrize("posts", [False, True])
def test_blocking_calls_of_both_kinds_at_once(world: NodeWorld, posts: bool) -> None:
    """Each thread has its own channels. Posted calls take over both, and the blocking calls continue."""
    me = world.ranks[0]
    got = {peer: np.zeros(4) for peer in (NEAR, FAR)}
    threads = {peer: threading.Thread(target=me.recv, args=(got[peer], peer, 1)) for peer in got}
    for thread in threads.values():
        thread.start()
    until(lambda: all(me.busy_pipes()))
    if posts:
        early = [me.irecv(np.zeros(4), peer, 2) for peer in (NEAR, FAR, None)]
        for peer in (3, FAR, NEAR):
            world.ranks[peer].send(np.full(4, float(peer)), 0, 2)
        assert sorted(work.result() for work in early) == [NEAR, FAR, 3]
    for peer in (FAR, NEAR):
        world.ranks[peer].send(np.full(4, float(peer)), 0, 1)
        threads[peer].join(DEADLINE)
        assert (got[peer] == peer).all()


@pytest.mark.long
def test_a_receive_from_any_rank_sleeps_until_its_deadline() -> None:
    with closing(NodeWorld(3, timeout=1.5)) as world:
        before, started = time.thread_time(), time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="recv from any rank"):
            world.ranks[0].recv(np.zeros(1))
        assert time.thread_time() - before < 0.5 * (time.monotonic() - started)
