"""Messages over both kinds of channels: receives from any rank, and both kinds in use at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from messages.worlds import DEADLINE, RING, NodeWorld, Rank, pattern, until

from fastcoll.errors import CollectiveTimeoutError, MismatchError
from fastcoll.net.tcp.mail_frames import EAGER

# Ranks 0 and 1 share a node, 2 and 3 another.
NEAR, FAR = 1, 2
SIZES = [8, RING + 1, EAGER + 5]


@pytest.fixture
def world() -> Iterator[NodeWorld]:
    made = NodeWorld(4, timeout=60.0)
    yield made
    made.close()


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("sender", [NEAR, FAR])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("posted", [False, True])
def test_from_any_rank(world: NodeWorld, sender: int, nbytes: int, waits: bool, posted: bool) -> None:
    me, other = world.ranks[0], world.ranks[sender]
    got = np.zeros(nbytes, "u1")

    def send() -> None:
        if waits:
            until(me.is_blocked)
        other.send(pattern(nbytes), 0, 5)

    thread = threading.Thread(target=send)
    thread.start()
    if not waits:
        until(lambda: other.has_begun(0))
    assert (me.irecv(got, None, 5).result() if posted else me.recv(got, None, 5)) == sender
    thread.join()
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


def test_blocking_calls_of_both_kinds_at_once(world: NodeWorld) -> None:
    """Each thread has its own channels and does not wait for the other thread's peer."""
    me = world.ranks[0]
    got = {peer: np.zeros(4) for peer in (NEAR, FAR)}
    threads = {peer: threading.Thread(target=me.recv, args=(got[peer], peer)) for peer in got}
    for thread in threads.values():
        thread.start()
    until(lambda: all(me.busy_pipes()))
    for peer in (FAR, NEAR):
        world.ranks[peer].send(np.full(4, float(peer)), 0)
        threads[peer].join(DEADLINE)
        assert (got[peer] == peer).all()


def test_blocking_calls_of_both_kinds_are_taken_over_for_posted_ones(world: NodeWorld) -> None:
    """Both are handed over to the engine and continue."""
    me = world.ranks[0]
    got = {peer: np.zeros(4) for peer in (NEAR, FAR)}
    threads = [threading.Thread(target=me.recv, args=(got[peer], peer, 1)) for peer in got]
    for thread in threads:
        thread.start()
    until(lambda: all(me.busy_pipes()))
    early = [me.irecv(np.zeros(4), peer, 2) for peer in (NEAR, FAR, None)]
    for peer in (3, FAR, NEAR):
        world.ranks[peer].send(np.full(4, float(peer)), 0, 2)
    assert sorted(work.result() for work in early) == [NEAR, FAR, 3]
    for peer in got:
        world.ranks[peer].send(np.full(4, float(peer)), 0, 1)
    for thread in threads:
        thread.join(DEADLINE)
    assert all((array == peer).all() for peer, array in got.items())


def test_neither_kind_starves_the_other(world: NodeWorld) -> None:
    """Rank 0 receives from any rank while two ranks send continuously; both make progress."""
    count, done = 200, threading.Event()

    def keep_sending(me: Rank) -> None:
        while not done.is_set():
            me.isend(np.array([me.rank]), 0).wait(DEADLINE)

    threads = [threading.Thread(target=keep_sending, args=(world.ranks[peer],)) for peer in (NEAR, FAR)]
    for thread in threads:
        thread.start()
    for _ in range(50):  # a sender may have no core for some rounds
        seen = [world.ranks[0].recv(np.zeros(1, int)) for _ in range(count)]
        if (fewest := min(seen.count(NEAR), seen.count(FAR))) > count // 20:
            break
    done.set()
    rest = [world.ranks[0].irecv(np.zeros(1, int), peer) for peer in (NEAR, FAR)]
    for thread in threads:
        thread.join(DEADLINE)
    world.ranks[NEAR].isend(np.array([0]), 0)
    world.ranks[FAR].isend(np.array([0]), 0)
    assert all(work.wait(DEADLINE) for work in rest)
    assert fewest > count // 20


def test_one_source_keeps_its_order_among_all(world: NodeWorld) -> None:
    count = 50
    works = [world.ranks[peer].isend(np.array([peer, n]), 0) for n in range(count) for peer in (NEAR, FAR)]
    last = {NEAR: -1, FAR: -1}
    for n in range(2 * count):
        got = np.zeros(2, int)
        source = world.ranks[0].recv(got) if n % 3 else world.ranks[0].irecv(got).result()
        assert got.tolist() == [source, last[source] + 1]
        last[source] += 1
    assert all(work.wait(DEADLINE) for work in works)


@pytest.mark.long
def test_a_receive_from_any_rank_sleeps_until_its_deadline() -> None:
    world = NodeWorld(3, timeout=1.5)
    before, started = time.thread_time(), time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match="recv from any rank"):
        world.ranks[0].recv(np.zeros(1))
    assert time.thread_time() - before < 0.5 * (time.monotonic() - started)
    world.close()
