"""Acks that are deferred to the next message: when, and that no rank waits for them in vain."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from messages.worlds import DEADLINE, Rank, WireWorld, pattern, pipe_to, until

from fastcoll.errors import MismatchError
from fastcoll.net.tcp import mail_frames as words
from fastcoll.net.tcp import mail_kernels
from fastcoll.net.tcp.mail_frames import EAGER


@pytest.fixture
def pair() -> Iterator[WireWorld]:
    """A world whose ranks have their connection."""
    with closing(WireWorld(2)) as world:
        work = world.ranks[0].isend(np.ones(1), 1)
        world.ranks[1].recv(np.ones(1), 0)
        assert work.wait(DEADLINE)
        yield world


def table(me: Rank) -> np.ndarray:
    return pipe_to(me, 1 - me.rank)[0].table  # type: ignore[no-any-return]


def row(me: Rank) -> np.ndarray:
    return pipe_to(me, 1 - me.rank)[0].rows[1 - me.rank]  # type: ignore[no-any-return]


def defers_next(me: Rank) -> None:
    """Let a rank defer the next ack, as if it had seen many alternations."""
    row(me)[words.ALTERNATIONS] = 1 << 20
    table(me)[words.FLUSHER_RUNS] = 1


def send_until_deferred(world: WireWorld, x: np.ndarray, got: np.ndarray) -> threading.Thread:
    """Send x on a thread until its ack is deferred. A rank that loses its core for long gets its ack at once."""
    first, second = world.ranks
    for _ in range(500):
        sender = threading.Thread(target=first.send, args=(x, 1))
        sender.start()
        defers_next(second)
        second.recv(got, 0)
        if table(second)[words.DEFERRED] == 1:
            return sender
        sender.join(DEADLINE)
    pytest.fail("no answer was deferred")


@pytest.mark.parametrize("nbytes", [0, 8, 9000, EAGER])
def test_a_deferred_ack_travels_with_the_next_message(pair: WireWorld, nbytes: int) -> None:
    x, y = pattern(nbytes, 1), pattern(nbytes, 2)
    got = [np.zeros(nbytes, "u1") for _ in range(2)]
    sender = send_until_deferred(pair, x, got[1])
    assert sender.is_alive(), "a send was complete before its answer had been sent"
    pair.run(lambda me: (sender.join(DEADLINE), me.recv(got[0], 1)), lambda me: me.send(y, 0))
    assert (got[0] == y).all()
    assert (got[1] == x).all()


ELSE = {
    "a receive": lambda me: me.irecv(np.zeros(1), 0, 9),
    "a posted send": lambda me: me.isend(np.zeros(1), 0, 9),
    "a send to oneself": lambda me: me.send(np.zeros(1), 1, 9),
    "leaving": lambda me: me.mailbox.close(None),
    "nothing": lambda me: None,
}


@pytest.mark.parametrize("what", ELSE)
def test_any_other_use_of_messages_sends_the_ack(pair: WireWorld, what: str) -> None:
    second = pair.ranks[1]
    sender = send_until_deferred(pair, np.ones(3), np.zeros(3))
    pipe_to(second, 0)[0].start_ack_flusher()  # not earlier: the flusher would end after 20 ms
    ELSE[what](second)
    sender.join(DEADLINE)
    assert not sender.is_alive()
    if what == "nothing":
        assert row(second)[words.ALTERNATIONS_NEEDED] > 64, "the turns were taken for what they are not"


def test_a_blocking_receive_sends_the_ack_first(pair: WireWorld) -> None:
    got = np.zeros(3)

    def receive(me: Rank) -> None:
        defers_next(me)
        me.recv(got, 0)
        me.recv(got, 0)

    pair.run(lambda me: (me.send(np.ones(3), 1), me.send(np.full(3, 2.0), 1)), receive)
    assert (got == 2).all()
    assert table(pair.ranks[1])[words.DEFERRED] == 0


def test_a_posted_send_gets_its_ack_ahead_of_a_message(pair: WireWorld) -> None:
    """The engine reads the message while no receive is posted, and stores it for the next one."""
    first, second = pair.ranks
    posted = first.isend(np.ones(3), 1)
    defers_next(second)
    second.recv(np.zeros(3), 0)
    got = np.zeros(2)
    pair.run(lambda me: (posted.wait(DEADLINE), me.recv(got, 1)), lambda me: me.send(np.full(2, 5.0), 0))
    assert (got == 5).all()


def test_a_misfit_is_acknowledged_at_once(pair: WireWorld) -> None:
    first, second = pair.ranks
    work = first.isend(np.ones(3), 1)
    defers_next(second)
    with pytest.raises(MismatchError):
        second.recv(np.zeros(2), 0)
    with pytest.raises(MismatchError):
        work.wait(DEADLINE)


def test_alternating_for_long(pair: WireWorld) -> None:
    rounds = 600

    def serve(me: Rank) -> None:
        for n in range(rounds):
            me.send(np.array([n]), 1)
            got = np.zeros(1, int)
            me.recv(got, 1)
            assert got[0] == -n

    def reply(me: Rank) -> None:
        for n in range(rounds):
            got = np.zeros(1, int)
            if n % 3 == 0:
                defers_next(me)
            me.recv(got, 0)
            assert got[0] == n
            me.send(-got, 0)
        assert table(me)[words.DEFERRALS] > 0  # the times of a rank that keeps its core

    pair.run(serve, reply)
    assert all(table(me)[words.DEFERRED] == 0 for me in pair.ranks)


def test_the_ack_flusher_ends_by_itself(pair: WireWorld) -> None:
    me = pair.ranks[0]
    pipe_to(me, 1 - me.rank)[0].start_ack_flusher()
    until(lambda: not any(thread.name == "fastcoll-answers" for thread in threading.enumerate()))
    assert table(me)[words.FLUSHER_RUNS] == 0


def test_flushing_nothing_does_nothing(pair: WireWorld) -> None:
    assert mail_kernels.flush.call(pipe_to(pair.ranks[0], 1)[0].address) == 0
