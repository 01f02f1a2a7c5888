"""The engine over each kind of pipe: rings in shared memory, TCP connections, and both in one."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from net.meshes import Clock, alarm
from together import together

from fastcoll.arrays.imported import ImportedArray
from fastcoll.core import monitor, signature
from fastcoll.core.message import Status
from fastcoll.core.operands import ANY_TAG
from fastcoll.core.status import AGAIN
from fastcoll.core.work import Work
from fastcoll.errors import (
    AbortedError,
    CollectiveTimeoutError,
    MismatchError,
    NotInitializedError,
    PeerDiedError,
    UsageError,
)
from fastcoll.p2p.progress import Progress
from fastcoll.shm.pipe import RingPipe
from fastcoll.system import processes
from fastcoll.system.processes import Member

from .worlds import (
    DEADLINE,
    RING,
    NodeWorld,
    Rank,
    RingWorld,
    WireWorld,
    World,
    fields,
    pattern,
    pipe_to,
    taken,
    until,
)

SIZES = [0, 1, 47, 48, 49, 8191, 8192, 8193, 65535, 65536, 65537, 1_000_003]  # around those of frames
SIZES += [RING // 4, RING - 17, RING - 16, RING - 1, RING, RING + 1, 3 * RING + 5]


@pytest.fixture(params=[RingWorld, WireWorld, NodeWorld], ids=["rings", "connections", "nodes"])
def worlds(request: pytest.FixtureRequest) -> Iterator[Callable[..., World]]:
    with ExitStack() as made:
        yield lambda size, **options: made.enter_context(closing(request.param(size, **options)))


def test_blocking_both_ways_and_at_every_offset(worlds) -> None:
    """The sizes around those of frames and rings, and many small ones, with which frames wrap anywhere."""
    sizes = [*SIZES, *((37 * n) % 1500 for n in range(200))]

    def program(me: Rank) -> None:
        peer = 1 - me.rank
        for n, nbytes in enumerate(sizes):
            if me.rank == n % 2:
                me.send(pattern(nbytes, n), peer, n % 2)
            else:
                assert (taken(me, nbytes, peer, n % 2) == pattern(nbytes, n)).all(), nbytes

    worlds(2).run(program, program)


@pytest.mark.parametrize("nbytes", [8, 1000, RING + 1])
def test_many_sends_received_in_reverse(worlds, nbytes: int) -> None:
    count = 100

    def first(me: Rank) -> None:
        works = [me.isend(pattern(nbytes, tag), 1, tag) for tag in range(count)]
        assert all(work.wait(DEADLINE) for work in works)

    def second(me: Rank) -> None:
        for tag in reversed(range(count)):
            assert (taken(me, nbytes, 0, tag) == pattern(nbytes, tag)).all(), tag

    worlds(2).run(first, second)


def without_a_name(unit: str) -> tuple[np.ndarray, str]:
    """Return an array whose dtype has no name in errors, and what errors of collectives show for it."""
    x = np.zeros(4, f"M8[{unit}]")
    shown = signature.describe(signature.encode("all_reduce", x.dtype), x.nbytes)
    return x, re.escape(shown.removeprefix("all_reduce"))


(SECONDS, SHOWN), (HOURS, OTHER_SHOWN) = without_a_name("s"), without_a_name("h")
REFUSALS = {
    "size": (np.zeros(4, "f4"), np.zeros(5, "f4"), "float32, 4 elements", "float32, 5 elements"),
    "dtype": (np.zeros(4, "f4"), np.zeros(4, "i4"), "float32, 4 elements", "int32, 4 elements"),
    "dtype without a name": (SECONDS, HOURS, SHOWN, OTHER_SHOWN),
    "large": (np.zeros(5 * RING, "u1"), np.zeros(1, "u1"), "20480 elements", "1 elements"),
}


@pytest.mark.parametrize("how", ["blocking", "posted", "stored", "any tag"])
@pytest.mark.parametrize("what", REFUSALS)
def test_misfits_raise_on_both_sides_and_the_group_stays_usable(worlds, what: str, how: str) -> None:
    sent, wanted, held, other = REFUSALS[what]
    before, tag = wanted.copy(), ANY_TAG if how == "any tag" else 9

    def first(me: Rank) -> None:
        work = me.isend(sent, 1, 9) if how in ("posted", "stored") else None
        if how == "stored":
            me.send(np.zeros(1), 1, 2)
        with pytest.raises(MismatchError, match=f"rank 1.*tag 9.*{held}.*{other}"):
            work.wait(DEADLINE) if work else me.send(sent, 1, 9)
        me.send(np.arange(3), 1, 9)

    def second(me: Rank) -> None:
        if how == "stored":
            me.recv(np.zeros(1), 0, 2)
        wanted_tag = "any tag" if tag < 0 else "tag 9"
        with pytest.raises(MismatchError, match=f"rank 0.*{wanted_tag}.*{other}.*{held}") as caught:
            me.irecv(wanted, 0, tag).wait(DEADLINE) if how == "posted" else me.recv(wanted, 0, tag)
        assert ("a receive with status=Status() takes shorter" in str(caught.value)) == (what == "size")
        assert (wanted == before).all()
        assert (taken(me, 3, 0, 9, int) == np.arange(3)).all()
        assert me.monitor.failure is None

    worlds(2).run(first, second)


def test_a_receive_that_has_matched_is_not_in_vain(worlds) -> None:
    """Also while its message is copied, perhaps by another thread than the one that wants to leave."""
    (me,) = worlds(1).ranks
    found = []

    class Asking(ImportedArray):
        def put(self, address: int, nbytes: int) -> None:
            found.append(me.mailbox.is_in_vain(work))
            super().put(address, nbytes)

    got = np.zeros(5)
    work = me.mailbox.irecv(Asking(got), 0, 1)
    unsent = me.irecv(np.zeros(1), 0, 2)
    me.send(np.full(5, 4.0), 0, 1)
    assert work.wait(DEADLINE)
    assert found == [False]
    assert (got == 4).all()
    assert me.mailbox.is_in_vain(unsent)


def test_a_receive_from_any_is_in_vain_when_all_peers_have_left(worlds) -> None:
    me, *peers = worlds(3).ranks
    work = me.irecv(np.zeros(1), None, 1)
    for peer in peers:
        assert not me.mailbox.is_in_vain(work)
        peer.monitor.leave()
    until(lambda: me.mailbox.is_in_vain(work))


def test_an_armed_receive_leaves_other_tags_to_a_later_receive_of_any_tag(worlds) -> None:
    peer, me = worlds(2).ranks
    armed, later = np.zeros(1, int), np.zeros(1, int)
    receives = [me.irecv(armed, 0, 7), me.irecv(later, None, ANY_TAG)]
    works = [peer.isend(np.array([tag]), 1, tag) for tag in (3, 7)]
    assert all(work.wait(DEADLINE) for work in [*receives, *works])
    assert (armed[0], later[0]) == (7, 3)


# ---- shorter messages


@pytest.mark.parametrize("count", [0, 1, 3 * RING, 100_003])
@pytest.mark.parametrize("stored", [False, True])
def test_with_a_status_a_message_may_be_shorter_than_the_array(worlds, count: int, stored: bool) -> None:
    """The message may arrive before or after the receive; elements behind it keep their values."""

    def first(me: Rank) -> None:
        works = [me.isend(np.full(count, n, "i4"), 1, n) for n in (5, 6, 7)]
        me.send(np.zeros(1), 1, 8)
        assert all(work.wait(DEADLINE) for work in works)

    def second(me: Rank) -> None:
        found = [Status() for _ in range(3)]
        arrays = [np.full(count + n, -1, "i4") for n in (2, 0, 70_000)]
        if stored:
            me.recv(np.zeros(1), 0, 8)
        works = [me.irecv(arrays[n], 0, 5 + n, found[n]) for n in (0, 1)]
        assert [work.result() for work in works] == [0, 0]
        assert me.recv(arrays[2], None, ANY_TAG, found[2]) == 0
        if not stored:
            me.recv(np.zeros(1), 0, 8)
        for n in range(3):
            assert fields(found[n]) == (0, 5 + n, count, 4 * count)
            assert (arrays[n][:count] == 5 + n).all()
            assert (arrays[n][count:] == -1).all()

    worlds(2).run(first, second)


def test_a_packed_array_keeps_the_elements_behind_a_shorter_message(worlds) -> None:
    (me,) = worlds(1).ranks
    target, status = np.full((3, 2), -1.0), Status()
    me.send(np.arange(2.0), 0)
    me.recv(target[:, 1], 0, 0, status)
    assert fields(status) == (0, 0, 2, 16)
    assert target.tolist() == [[-1, 0], [-1, 1], [-1, -1]]


def test_a_longer_message_and_another_dtype_are_refused_with_a_status_too(worlds) -> None:
    def first(me: Rank) -> None:
        for sent in (np.zeros(5, "f4"), np.zeros(2, "i4")):
            with pytest.raises(MismatchError, match="float32, 4 elements"):
                me.send(sent, 1)

    def second(me: Rank) -> None:
        status = Status()
        for text in ("float32, 5 elements", "int32, 2 elements"):
            with pytest.raises(MismatchError, match=f"float32, 4 elements.*{text}.*number of elements. The"):
                me.recv(np.ones(4, "f4"), 0, 0, status)
        assert fields(status) == (-1, -1, -1, -1)

    worlds(2).run(first, second)


# ---- probes


@pytest.mark.parametrize("count", [0, 3, 100_003])
def test_a_probe_finds_the_message_that_the_next_receive_takes(worlds, count: int) -> None:
    peer, me = worlds(2).ranks
    assert me.iprobe() is None
    works = [peer.isend(np.full(n, n, "f4"), 1, tag) for n, tag in ((count, 5), (2, 6))]
    first, second = (0, 5, count, 4 * count), (0, 6, 2, 8)
    assert me.probe() == me.probe(0, 5) == me.iprobe(0) == first
    assert me.probe(None, 6) == second
    assert me.iprobe(1) is me.iprobe(0, 7) is None
    assert (taken(me, count, 0, ANY_TAG, "f4") == count).all()
    assert me.iprobe() == second
    assert (taken(me, 2, 0, 6, "f4") == 2).all()
    assert me.iprobe() is None
    assert all(each.interest == 0 for each in me.mailbox._exchange.peers), "nothing more is wanted of a peer"
    assert all(work.wait(DEADLINE) for work in works)


def test_one_message_ends_all_probes_for_it(worlds) -> None:
    """A receive that was posted before takes an earlier message, which ends no probe."""
    peer, me = worlds(2).ranks
    got = np.zeros(1)
    posted = me.irecv(got, None, 5)

    def send() -> None:
        until(lambda: len(me.mailbox._exchange._probes) == 2)
        peer.send(np.full(1, 4.0), 1, 5)
        peer.isend(np.zeros(3), 1, 5)

    found = together(lambda: me.probe(0, 5), lambda: me.probe(), send)
    assert found[:2] == [(0, 5, 3, 24)] * 2
    assert posted.wait(DEADLINE)
    assert got[0] == 4


def test_a_probe_finds_a_message_to_oneself_and_of_every_dtype(worlds) -> None:
    (me,) = worlds(1).ranks
    me.send(np.zeros(3, [("a", "i2"), ("b", "f8")]), 0, 1)
    assert me.probe() == me.iprobe(0, 1) == (0, 1, -1, 30)


def test_iprobe_beside_a_thread_that_waits(worlds) -> None:
    """The other thread drives, and finds the probe's message."""
    peer, me = worlds(2).ranks

    def probe() -> None:
        until(me.is_blocked)
        assert me.iprobe(0, 2) is None
        work = peer.isend(np.zeros(4), 1, 2)
        until(lambda: me.iprobe(0, 2) == (0, 2, 4, 32))
        me.recv(np.zeros(4), 0, 2)
        peer.send(np.ones(3), 1, 1)
        assert work.wait(DEADLINE)

    assert together(lambda: me.recv(np.zeros(3), 0, 1), probe) == [0, None]


def test_only_a_probe_that_waits_fails_if_the_rank_has_left(worlds) -> None:
    peer, me = worlds(2).ranks
    peer.monitor.leave()
    assert me.iprobe(0) is None
    with pytest.raises(AbortedError, match=r"rank 0 .*left the group; probe of rank 0 .*any tag"):
        me.probe(0)


def test_a_receive_from_any_serves_ranks_round_robin(worlds) -> None:
    world, count = worlds(3), 10  # a ring takes more only when the sender's thread has read the first acks
    me, *others = world.ranks
    works = [other.isend(np.array([other.rank, n]), 0) for other in others for n in range(count)]
    for other in others:
        other.await_on_the_way(0, count)
    got = np.zeros(2, int)
    sources = []
    for n in range(2 * count):
        sources.append(me.recv(got))
        assert got.tolist() == [sources[-1], n // 2]
    assert sources in ([1, 2] * count, [2, 1] * count)
    assert all(work.wait(DEADLINE) for work in works)


# ---- threads


@pytest.mark.parametrize("half_sent", [False, True])
def test_a_blocked_call_lets_other_threads_use_the_pipe(worlds, half_sent: bool) -> None:
    """Also if a part of a send has gone out, which the other thread continues."""
    me, peer = worlds(2).ranks
    large, got = pattern(3 * RING), np.zeros(3 * RING, "u1")
    call, *args = (me.send, large, 1, 1) if half_sent else (me.recv, got, 1, 1)
    blocked = threading.Thread(target=call, args=args)
    blocked.start()
    until(lambda: me.is_blocked() and (not half_sent or me.has_begun(1)))
    work = me.isend(np.ones(1), 1, 2)
    assert taken(peer, 1, 0, 2, float)[0] == 1
    assert work.wait(DEADLINE)
    assert blocked.is_alive()
    peer.recv(got, 0, 1) if half_sent else peer.send(large, 0, 1)
    blocked.join(DEADLINE)
    assert (got == large).all()


def test_sys_exit_in_a_callback_does_not_end_the_progress_thread(worlds) -> None:
    me, peer = worlds(2).ranks
    called = threading.Event()
    me.irecv(np.zeros(1), 1, 1).add_done_callback(lambda _: sys.exit("gone"))
    me.irecv(np.zeros(1), 1, 2).add_done_callback(lambda _: called.set())
    for tag in (1, 2):
        peer.isend(np.ones(1), 0, tag).wait()
    assert called.wait(DEADLINE)


def test_a_callback_may_post_but_not_wait(worlds) -> None:
    me, peer = worlds(2).ranks
    me.irecv(np.zeros(1), 1, 5)  # so that a send would have to wait
    seen: list[Any] = []

    def callback(_: Work) -> None:
        seen.append(me.isend(np.ones(1), 1, 6))
        with pytest.raises(UsageError, match="callback"):
            me.send(np.ones(1), 1, 7)
        seen.append("refused")

    received = me.irecv(np.zeros(1), 1, 4)
    received.add_done_callback(callback)
    peer.send(np.zeros(1), 0, 4)
    peer.recv(np.zeros(1), 0, 6)
    until(lambda: len(seen) == 2)
    assert seen[0].wait(DEADLINE)


# ---- failures


def recorded(me: Rank) -> tuple[set[int], set[int]]:
    """Give a rank a record; return its slots of waits, and the threads that wrote them."""
    slots: set[int] = set()
    drivers: set[int] = set()

    def waits(slot: int, *_: object, **__: object) -> None:
        slots.add(slot)
        drivers.add(threading.get_ident())

    me.monitor.record = cast(Any, SimpleNamespace(waits=waits, waits_no_more=slots.discard))
    return slots, drivers


def test_the_record_has_waiting_messages_until_they_end(worlds) -> None:
    peer, me = worlds(2).ranks
    slots, drivers = recorded(me)
    works = [me.irecv(np.zeros(1), 0, tag) for tag in (1, 2)]
    waiter = threading.get_ident()

    def send() -> None:
        for tag in (2, 1):
            until(lambda: waiter in drivers and slots == set(range(1, tag + 1)))  # noqa: B023
            peer.send(np.zeros(1), 1, tag)

    thread = threading.Thread(target=send)
    thread.start()
    assert all(work.wait() for work in works)
    thread.join()
    assert not slots


def test_a_receive_that_begins_late_and_ends_at_once_calls_its_callback(
    worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread has the lock while it is posted, and has released it just after."""
    me, _ = worlds(2).ranks
    me.isend(np.arange(3.0), 0)
    lock, refusals, called = me.mailbox._lock, [True], threading.Event()
    acquire = lock.acquire
    monkeypatch.setattr(lock, "acquire", lambda: not (refusals and refusals.pop()) and acquire())
    got = np.zeros(6)[::2]
    me.irecv(got, 0).add_done_callback(lambda _: called.set())
    assert called.wait(DEADLINE)
    assert got.tolist() == [0, 1, 2]


@pytest.mark.parametrize("polls", [False, True])
def test_no_wait_stays_in_the_record_when_no_thread_waits_for_the_last_operation(worlds, polls) -> None:
    peer, me = worlds(2).ranks
    slots, _ = recorded(me)
    work = me.irecv(np.zeros(1), 0, 1)
    until(lambda: bool(slots))  # the progress thread has written it
    peer.send(np.zeros(1), 1, 1)
    until(work.is_completed if polls else lambda: work.ended)
    until(lambda: not slots)


@pytest.mark.timed
def test_a_ready_pipe_does_not_wait_for_the_other_one(worlds) -> None:
    (me,) = worlds(1).ranks
    unmatched = me.irecv(np.zeros(1), 0, 1)
    took = []
    for n in range(100):
        began = time.monotonic()
        me.send(np.array([n]), 0, 2)
        me.recv(np.zeros(1, int), 0, 2)
        took.append(time.monotonic() - began)
    assert sorted(took)[50] < 0.025  # it would take 0.05 if each pipe waited for its budget
    me.send(np.zeros(1), 0, 1)
    assert unmatched.wait(DEADLINE)


def test_a_posted_send_does_not_overtake_one_that_has_not_begun(worlds) -> None:
    """As after an interrupt between the end of one message and the start of the next."""

    def first(me: Rank) -> None:
        # The first message makes the connection; then a send is admitted and not begun.
        me.send(np.full(4, 9, np.uint8), 1, 5)
        engine: Any = me.mailbox
        begin, engine._exchange._begin_next = engine._exchange._begin_next, lambda peer: None
        works = [me.isend(pattern(70_000, 1), 1, 5)]
        engine._exchange._begin_next = begin
        works += [me.isend(np.full(8, k, np.uint8), 1, 5) for k in range(3)]
        for work in works:
            work.wait(DEADLINE)

    def second(me: Rank) -> None:
        taken(me, 4, 0, 5)
        assert (taken(me, 70_000, 0, 5) == pattern(70_000, 1)).all()
        for k in range(3):
            assert (taken(me, 8, 0, 5) == k).all()

    worlds(2).run(first, second)


def test_messages_of_a_rank_that_has_left_can_be_received(worlds) -> None:
    me, peer = worlds(2).ranks
    peer.isend(np.array([3.0]), 0)
    peer.await_on_the_way(0, 1)
    peer.monitor.leave()
    assert taken(me, 1, 1, dtype=float)[0] == 3
    with pytest.raises(AbortedError, match=r"rank 1 .*left the group"):
        me.recv(np.zeros(1), 1)


def test_a_receive_from_any_continues_while_a_peer_is_left(worlds) -> None:
    me, gone, there = worlds(3).ranks
    gone.monitor.leave()
    got = np.zeros(1)
    work = me.irecv(got, None, 1)
    until(lambda: me.mailbox.progress.checks.next > 0)
    there.send(np.ones(1), 0, 1)
    assert work.result() == 2
    there.monitor.leave()
    with pytest.raises(AbortedError, match=r"rank 1 .*rank 2 .*left the group"):
        me.recv(got)


@pytest.mark.parametrize("pending", [False, True])
def test_an_interrupt_ends_a_blocked_call(worlds, pending: bool) -> None:
    me, _ = worlds(2).ranks
    if pending:
        me.irecv(np.zeros(1), 1, 1)

    def waits() -> bool:
        return len(me.mailbox._exchange.live) == 2 if pending else me.is_blocked()

    with alarm(signal.default_int_handler, waits), pytest.raises(KeyboardInterrupt):
        me.recv(np.zeros(1), 1)
    assert "interrupted" in str(me.monitor.failure)


def test_a_thread_that_waits_ends_if_ctrl_c_interrupts_the_closing(
    worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    me, _ = worlds(2).ranks
    ended = list[BaseException]()

    def wait() -> None:
        try:
            me.irecv(np.zeros(1), 1).wait(DEADLINE)
        except AbortedError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: len(me.mailbox._exchange.live) == 1)
    with monkeypatch.context() as patch:
        patch.setattr(me.mailbox.progress.thread, "join", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            me.mailbox.close(None)
    waiting.join()
    assert "destroyed" in str(ended[0])
    me.mailbox.progress.thread.join(DEADLINE)


def test_a_signal_handler_does_not_get_the_message_of_the_receive_that_it_interrupts(
    worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler runs when the receive's compiled call returns after 50 ms without a message."""
    me, peer = worlds(2).ranks
    kind, got, own = type(pipe_to(me, 1)[0]), np.zeros(1), np.zeros(1)
    receive, works = kind.receive, list[Work]()

    def interrupted(*args: Any) -> int:
        code: int = receive(*args)
        if code == AGAIN and not works:
            works.append(me.irecv(own, 1))
            works.extend(peer.isend(np.full(1, number), 0) for number in (1.0, 2.0))
            with pytest.raises(UsageError, match="a signal handler may not wait"):
                works[0].wait()
        return code

    monkeypatch.setattr(kind, "receive", interrupted)
    me.recv(got, 1)
    for work in works:
        work.wait()
    assert (got[0], own[0]) == (1, 2)


def test_a_wait_can_be_repeated_after_an_interrupt_of_the_copy_back(
    worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Progress, "drive_unattended", lambda _: False)  # the waiting thread copies
    me, peer = worlds(2).ranks
    interrupts = [KeyboardInterrupt, KeyboardInterrupt]

    class Interrupted(ImportedArray):
        def finish(self) -> None:
            if interrupts:
                raise interrupts.pop()
            super().finish()

    got = np.zeros(3)
    work = me.mailbox.irecv(Interrupted(np.zeros(3), got), 1, 0)
    peer.isend(np.arange(3.0), 0)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            work.wait(DEADLINE)
        assert not work.ended
    assert work.wait(DEADLINE)
    assert got.tolist() == [0, 1, 2]


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_wait_can_be_repeated_after_a_handler_has_raised(
    monkeypatch: pytest.MonkeyPatch, lost: int, reuse: bool
) -> None:
    """A signal handler raises just after a wait's call of the pipe has returned.

    Args:
        lost: which call.
        reuse: whether another request gets the record of the one that was lost before the wait is repeated.
    """
    entry, calls = RingPipe.waits, []

    def interrupted(address: int, number: int) -> int:
        calls.append(entry.call(address, number))
        if len(calls) == lost:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(RingPipe, "waits", SimpleNamespace(call=interrupted))
    with closing(RingWorld(2)) as world:
        number, (first, second) = 0, world.ranks
        while number < 3 or len(calls) < lost:
            number += 1
            got = [np.zeros(8, np.uint8) for _ in world.ranks]
            works = [first.isend(pattern(8, number), 1), second.isend(pattern(8, number + 1), 0)]
            works += [first.irecv(got[0], 1), second.irecv(got[1], 0)]
            while not all(work.ended for work in works):
                try:
                    for work in works:
                        work.wait()
                except KeyboardInterrupt:
                    if reuse:
                        other = first.isend(np.zeros(1), 1, 9)
                        second.irecv(np.zeros(1), 0, 9).wait()
                        other.wait()
            assert (got[0] == pattern(8, number + 1)).all()
            assert (got[1] == pattern(8, number)).all()


def test_a_request_is_not_complete_after_an_interrupt_while_the_engine_took_it_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interrupt has failed the group, and no message has come."""
    monkeypatch.setattr(Progress, "drive_unattended", lambda _: False)  # the waiting thread takes it over
    with closing(RingWorld(2)) as world:
        me, _ = world.ranks
        me.stay_awake()
        work = me.irecv(np.zeros(1), 1)
        assert cast(Any, work).request
        with monkeypatch.context() as patch:
            patch.setattr(RingPipe, "_posted", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                work.wait()
        with pytest.raises(AbortedError, match="interrupted by KeyboardInterrupt"):
            work.wait()


@pytest.mark.parametrize("call", ["recv", "recv from any", "isend", "irecv"])
def test_a_silent_peer_ends_a_call_by_timeout(worlds, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    clock, over = Clock(), threading.Event()
    monkeypatch.setattr(monitor, "time", clock)
    me, peer = worlds(2, timeout=30.0).ranks
    waits = {
        "recv": lambda: me.recv(np.zeros(1), 1, 3),
        "recv from any": lambda: me.recv(np.zeros(1), None, 3),
        "isend": lambda: me.isend(np.zeros(3 * RING), 1, 3).wait(DEADLINE),
        "irecv": lambda: me.irecv(np.zeros(1), 1, 3).wait(DEADLINE),
    }

    def put_forward() -> None:
        until(lambda: me.is_blocked() or len(me.mailbox._exchange.live) > 0)
        while not over.wait(0.01):  # whenever its time begins
            clock.ahead += 40.0

    def wait() -> None:
        try:
            waits[call]()
        finally:
            over.set()

    error, _ = together(wait, put_forward)
    assert isinstance(error, CollectiveTimeoutError)
    doing = "send to rank 1" if call == "isend" else "recv from"
    assert re.search(rf"{doing} .*tag 3.*rank 1 .*within the timeout of 30 s", str(error))
    assert me.monitor.failure is error
    with pytest.raises(CollectiveTimeoutError):
        me.irecv(np.zeros(1), 1, 4)
    with pytest.raises((AbortedError, CollectiveTimeoutError)):
        peer.recv(np.zeros(1), 0, 9)


@pytest.fixture
def doomed() -> Iterator[tuple[subprocess.Popen[bytes], list[Member]]]:
    """A process to kill, and the members of a world of two ranks whose rank 1 is this process."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        born = int(processes.status_of(child.pid)[19])
        mine = Member.here(0, 2, "shm")
        yield child, [mine, replace(mine, rank=1, pid=child.pid, start_time=born)]
        child.kill()


def test_a_dead_peer_is_named(worlds, doomed) -> None:
    child, members = doomed
    me, peer = worlds(2, members=members).ranks
    peer.isend(np.array([6.0]), 0)
    peer.await_on_the_way(0, 1)
    posted = me.irecv(np.zeros(1), 1, 8)
    until(lambda: me.mailbox.progress.checks.next > 0)
    child.kill()
    with pytest.raises(PeerDiedError, match=f"rank 1 .*{child.pid}.*died.*recv from rank 1.*tag 8"):
        posted.wait(DEADLINE)


def test_a_rank_that_polls_a_work_learns_that_a_peer_is_dead(worlds, doomed) -> None:
    child, members = doomed
    me, _ = worlds(2, members=members).ranks
    me.stay_awake()
    work = me.irecv(np.zeros(1), 1, 8)
    child.kill()
    until(work.is_completed)
    assert isinstance(work.exception(), PeerDiedError)


def test_a_rank_that_probes_learns_that_a_peer_is_dead_after_its_messages(worlds, doomed) -> None:
    child, members = doomed
    me, peer = worlds(2, members=members).ranks
    assert me.iprobe(1) is None
    peer.isend(np.zeros(3, "f4"), 0, 7)
    peer.await_on_the_way(0, 1)
    child.kill()
    child.wait()
    assert until(lambda: me.iprobe(1)) == (1, 7, 3, 12)
    me.recv(np.zeros(3, "f4"), 1, 7)
    with pytest.raises(PeerDiedError, match=f"rank 1 .*{child.pid}.*died; probe of rank 1"):
        until(lambda: me.iprobe(1))
    assert isinstance(me.monitor.failure, PeerDiedError)


def test_a_rank_that_polls_a_work_learns_of_its_timeout(worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(monitor, "time", clock)
    me, _ = worlds(2, timeout=30.0).ranks
    me.stay_awake()
    work = me.irecv(np.zeros(1), 1, 8)

    def is_late() -> bool:
        clock.ahead += 40.0  # whenever its time begins
        return work.is_completed()

    until(is_late)
    assert isinstance(work.exception(), CollectiveTimeoutError)


ENDS = {
    "a peer fails": (lambda me, peer: peer.monitor.fail(AbortedError("out of luck")), "rank 1 .*out of luck"),
    "abort": (lambda me, _: (me.monitor.fail(AbortedError("enough")), me.mailbox.abort()), "enough"),
    "close": (lambda me, _: (me.mailbox.close(None), me.mailbox.close(None)), "destroyed"),
}


@pytest.mark.parametrize("posted", [False, True])
@pytest.mark.parametrize("what", ENDS)
def test_a_failure_of_the_group_ends_a_call_under_way(worlds, what: str, posted: bool) -> None:
    me, peer = worlds(2).ranks
    end, text = ENDS[what]
    work = me.irecv(np.zeros(1), 1) if posted else None

    def then_end() -> None:
        until(lambda: posted or me.is_blocked())
        end(me, peer)

    error, _ = together(lambda: work.wait(DEADLINE) if work else me.recv(np.zeros(1), 1), then_end)
    assert isinstance(error, AbortedError)
    assert re.search(text, str(error))
    with pytest.raises(NotInitializedError if what == "close" and posted else AbortedError):
        me.isend(np.zeros(1), 1)
    peer.mailbox.close(AbortedError("over"))
