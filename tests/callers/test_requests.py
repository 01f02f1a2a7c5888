"""isend, irecv and the waits for them in numba.njit, and their order with Python's messages."""

from __future__ import annotations

import ctypes
import gc
import threading

import numba
import numpy as np
import pytest
from numba.core.runtime import _nrt_python, rtsys
from oracle import assert_same

import fastcoll as dist
import fastcoll.callers.njit
from fastcoll.callers import descriptors, njit_arguments
from fastcoll.core.status import LATER
from fastcoll.kernels import c_entries as d
from fastcoll.p2p import handles
from fastcoll.shm.callers import native_call

SIZES = (1, 5000, 300_000)  # in one piece, perhaps read in place, and in many pieces


@numba.njit(cache=True)
def around(x, y, right, left, group, tag):
    """Send each rank's array to the next rank; return the sender three times."""
    taken = dist.irecv(y, left, group, tag)
    given = dist.isend(x, right, group, tag)
    taken.wait()
    given.wait()
    taken.wait()  # a second wait is allowed
    return taken.source_rank(), taken.source_rank(), given.source_rank()


@pytest.mark.ranks(2, 3)
def test_around_a_ring(rank, world_size):
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for count in SIZES:
        for dtype in (np.float64, np.int8):
            for _ in range(3):  # first by Python, then by a native call if there is one
                x, y = np.arange(count).astype(dtype) + dtype(rank), np.zeros(count, dtype)
                assert around(x, y, right, left, None, 7) == (left, left, -1)
                assert_same(y, np.arange(count).astype(dtype) + dtype(left), (count, dtype))


@numba.njit(cache=True)
def all_at_once(x, y, peer, group):
    """Send one message per row, with one list of requests; return the index of the first that completed."""
    works = [dist.irecv(y[k], peer, group, tag=k) for k in range(len(y) - 1, -1, -1)]
    works += [dist.isend(x[k][::-1], peer, group, tag=k) for k in range(len(x))]
    first = dist.waitany(works)
    completed = works[first].is_completed()
    dist.waitall(works)
    for work in works:
        completed &= work.is_completed()
    return first, completed


@pytest.mark.ranks(2)
def test_many_requests_of_one_peer_match_by_their_tags(rank, world_size):
    x = np.arange(10 * 40.0).reshape(40, 10) + 1000 * rank
    for _ in range(3):
        y = np.zeros_like(x)
        first, completed = all_at_once(x, y, 1 - rank, None)
        assert 0 <= first < 80
        assert completed
        assert_same(y, np.arange(10 * 40.0).reshape(40, 10)[:, ::-1] + 1000 * (1 - rank), "rows")


@numba.njit(cache=True)
def received(y, source, group):
    work = dist.irecv(y, group=group) if source < 0 else dist.irecv(y, group=group, group_src=source)
    return work.source_rank()


@numba.njit(cache=True)
def given(x, to, group, tag=0):
    return dist.isend(x, group=group, tag=tag, group_dst=to).wait()


@numba.njit(cache=True)
def of_any_tag(y, peer):
    """Receive messages with tags 3, 1 and 2, in this order."""
    second, first = dist.irecv(y[1], peer, tag=1), dist.irecv(y[0], peer, tag=dist.ANY_TAG)
    dist.recv(y[2], peer, tag=dist.ANY_TAG)
    dist.waitall([first, second])


@pytest.mark.ranks(2)
def test_a_receive_of_any_tag_takes_the_earliest_unmatched_message(rank, world_size):
    for _ in range(4):
        y = np.zeros((3, 2))
        if rank == 0:
            for tag in (3, 1, 2):
                x = np.full(2, float(tag))
                dist.send(x, 1, tag=tag) if tag == 1 else given(x, 1, None, tag)
        else:
            of_any_tag(y, 0)
            assert y[:, 0].tolist() == [3.0, 1.0, 2.0]


@numba.njit(cache=True)
def exchanged(x, y, peer):
    return dist.sendrecv(x, peer, y, peer, send_tag=3, recv_tag=3)


@numba.njit(cache=True)
def exchanged_with(x, peer, y, source, tag):
    return dist.sendrecv(x, peer, y, source, None, 3, tag)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("source", "tag", "error"),
    [(7, 3, "src is 7"), (0, -2, "tag is out of range"), (0, 1 << 40, "tag is out of range")],
)
def test_an_exchange_with_a_wrong_argument_sends_nothing(rank, source, tag, error):
    y = np.zeros(3)
    with pytest.raises(dist.UsageError, match=error):
        exchanged_with(np.ones(3), 0, y, source, tag)
    assert exchanged_with(np.full(3, 2.0), 0, y, 0, 3) == 0
    assert y[0] == 2


def test_a_rank_is_converted_while_another_thread_ends_the_group(monkeypatch):
    words = {(1000, d.SIZE): [2], (1000, d.RANKS): [2000, 0], (2000, 1): [5]}
    monkeypatch.setattr(njit_arguments, "word", lambda address, index: words[address, index].pop(0))
    assert njit_arguments.to_global_rank(1000, 1) == 5


@numba.njit(cache=True)
def polled(y, peer):
    work, turns = dist.irecv(y, peer), 0
    while not work.is_completed():
        turns += 1
    return work.wait(), turns


@pytest.mark.long
@pytest.mark.ranks(2)
def test_exchanges_tests_and_messages_to_oneself(rank, world_size):
    x, y = np.full((4, 6), rank + 1.0), np.zeros((4, 6))
    for _ in range(3):
        assert exchanged(x[:, 1::2], y[:, ::2], 1 - rank) == 1 - rank
        assert_same(y[:, ::2], np.full((4, 3), 2.0 - rank), "strided")
        assert exchanged(x, y, rank) == rank
        if rank == 0:
            given(x, 1, None)
        else:
            assert polled(y, 0)[0]
            assert_same(y, np.ones((4, 6)), "polled")


@numba.njit(cache=True)
def _posted(count, value, peer):
    return dist.isend(np.full(count, value), peer)


@numba.njit(cache=True)
def forgotten(count, value, peer):
    """Send arrays without other references; other arrays are allocated before the messages are read."""
    first, second = _posted(count, value, peer), _posted(count, value + 1, peer)
    total = np.full(count, -1.0).sum() + np.full(count, -2.0).sum()
    second.wait()
    first.wait()
    return total


@pytest.mark.ranks(2)
def test_a_request_keeps_its_array_alive_until_the_wait(rank, world_size):
    _nrt_python.memsys_enable_stats()
    for count in SIZES:
        for turn in range(4):
            dist.barrier()
            if rank == 0:
                before = rtsys.get_allocation_stats()
                assert forgotten(count, 5.0, 1) == -3 * count
                made, freed = 1, 0
                while made > freed:  # until Python's threads have released the arrays that they held
                    gc.collect()
                    after = rtsys.get_allocation_stats()
                    made, freed = after.mi_alloc - before.mi_alloc, after.mi_free - before.mi_free
                assert made == freed, (count, turn)
            else:
                for value in (5.0, 6.0):
                    y = np.zeros(count)
                    received(y, 0, None)
                    assert_same(y, np.full(count, value), (count, turn))


@pytest.mark.ranks(2)
def test_a_message_that_does_not_fit_raises_on_both_sides_and_the_group_stays_usable(rank, world_size):
    for _ in range(3):
        call, count = (received, 4) if rank else (given, 3)
        with pytest.raises(dist.MismatchError, match=r"3 elements.*4 elements|4 elements.*3 elements"):
            call(np.ones(count), 1 - rank, None)
        y = np.zeros(2)
        assert around(np.ones(2), y, 1 - rank, 1 - rank, None, 0) == (1 - rank, 1 - rank, -1)


@numba.njit(cache=True)
def any_of_one(y, peer):
    return dist.waitany([dist.irecv(y, peer)])


@pytest.mark.ranks(2)
def test_a_completed_request_among_others_is_released(rank, world_size):
    for _ in range(3):
        if rank == 0:
            given(np.ones(2), 1, None)
        else:
            before = dict(handles._works)
            assert any_of_one(np.zeros(2), 0) == 0
            assert handles._works == before


@numba.njit(cache=True)
def begun(x, y, peer):
    return dist.irecv(y, peer), dist.isend(x, peer)


@numba.njit(cache=True)
def around_a_barrier(x, y, peer):
    taken, sent = begun(x, y, peer)
    dist.barrier()
    dist.waitall((taken, sent))


@pytest.mark.ranks(2)
def test_posted_messages_progress_while_their_rank_computes(rank, world_size):
    x = np.full(300_000, rank + 1.0)
    for _ in range(4):
        y = np.zeros_like(x)
        if rank == 0:
            around_a_barrier(x, y, 1)
        else:
            dist.send(x, 0)  # rank 0 must receive it before this rank enters the barrier
            dist.recv(y, 0)
            dist.barrier()
        assert_same(y, np.full(300_000, 2.0 - rank), "beside a barrier")


@numba.njit
def two_ways(x, y, peer, left):
    """Post requests, which calls of Python then progress; `left` is never waited for."""
    taken, sent = begun(x, y, peer)
    with numba.objmode():
        other = np.zeros(1)
        work = dist.irecv(other, peer, tag=9)
        dist.send(np.ones(1), peer, tag=9) if peer else None
        work.wait()
        dist.send(np.ones(1), peer, tag=9) if not peer else None
        dist.barrier()
    dist.waitall((taken, sent))
    dist.isend(left, peer, tag=4)


@pytest.mark.long
@pytest.mark.ranks(2, fresh=True)
def test_python_completes_requests_that_compiled_code_has_posted(rank, world_size):
    y, left = np.zeros(3), np.zeros(1)
    for turn in range(4):
        two_ways(np.full(3, rank + 1.0), y, 1 - rank, np.full(1, turn + 1.0))
        assert y.tolist() == [2.0 - rank] * 3
        dist.recv(left, 1 - rank, tag=4)
        assert left[0] == turn + 1


@pytest.mark.long
@pytest.mark.ranks(2, fresh=True, backend="shm")
def test_a_request_is_handed_to_python_or_collected_but_not_both(rank, world_size):
    group = dist.group.WORLD
    x, y, peer = np.full(3, rank + 1.0), np.zeros(3), 1 - rank
    for _ in range(3):  # first by Python, then by native calls
        around(x, y, peer, peer, None, 7)
    taken_over = []
    group.messages.adopts = lambda number, transfer: taken_over.append(number)
    group.backend.native_calls.take_over()
    assert taken_over == []  # all were waited for
    mailbox, kind = group.backend.native_calls.mailbox, descriptors.message_word(3, np.dtype(np.float64))
    group.backend.pipe.stay_awake()
    number = -1 - native_call(d.POST_RECV).call(mailbox, y.ctypes.data, 0, 24, kind, peer)
    assert native_call(d.POST_SEND).call(mailbox, x.ctypes.data, 0, 24, kind, peer) < 0
    group.backend.native_calls.take_over()
    assert number in taken_over
    assert native_call(d.WAIT).call(mailbox, number, 0, 0, 0, 0) == LATER  # it is Python's


@numba.njit(cache=True, nogil=True)
def from_a_thread(x, y, peer, tag, times):
    for k in range(times):
        x[0] = k
        taken, given = dist.irecv(y, peer, tag=tag), dist.isend(x, peer, tag=tag)
        given.wait()
        taken.wait()
        if y[0] != k:
            return k
    return -1


@pytest.mark.ranks(2)
def test_threads_share_the_rings(rank, world_size):
    found = []

    def run(tag):
        found.append(from_a_thread(np.zeros(1), np.zeros(1), 1 - rank, tag, 100))

    threads = [threading.Thread(target=run, args=(tag,)) for tag in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [-1, -1, -1]


@pytest.mark.ranks(2, fresh=True, backend="shm")
def test_the_usual_case_is_one_compiled_call_each(rank, world_size):
    group = dist.group.WORLD
    mailbox, kind = group.backend.native_calls.mailbox, descriptors.message_word(3, np.dtype(np.float64))
    group.backend.pipe.stay_awake()  # as the engine's thread does, which would take over pending requests
    x, y = np.full(4, rank + 1.0), np.zeros(4)
    peer = 1 - rank
    group.backend.pipe.prepare(peer)  # as the first message to the peer does
    taken = -1 - native_call(d.POST_RECV).call(mailbox, y.ctypes.data, 0, 32, kind, peer)
    sent = -1 - native_call(d.POST_SEND).call(mailbox, x.ctypes.data, 0, 32, kind, peer)
    assert 0 < taken < sent
    dist.barrier()  # the message has arrived
    numbers = (ctypes.c_int64 * 2)(taken, taken)
    assert native_call(d.WAIT_ANY).call(mailbox, ctypes.addressof(numbers), 0, 2, 0, 0) == -1
    assert y.tolist() == [2.0 - rank] * 4
    assert native_call(d.WAIT).call(mailbox, taken, 0, 0, 0, 0) == -1 - peer
    dist.barrier()  # the ack has arrived
    assert native_call(d.TEST).call(mailbox, sent, 0, 0, 0, 0) == -2
    assert native_call(d.TEST).call(mailbox, sent, 0, 0, 0, 0) == -2
    assert not group.backend.pipe.has_posted()
    # Requests without a record are left to Python, and so are messages to this rank.
    assert native_call(d.WAIT).call(mailbox, sent + 1, 0, 0, 0, 0) == LATER
    assert native_call(d.POST_RECV).call(mailbox, y.ctypes.data, 0, 32, kind, rank) == LATER
    # A blocking call while a request is pending; then the engine takes over the pending request.
    taken = -1 - native_call(d.POST_RECV).call(mailbox, y.ctypes.data, 0, 32, kind, peer)
    native_call(d.POST_SEND).call(mailbox, x.ctypes.data, 0, 32, kind + (1 << 40), peer)
    dist.barrier()
    assert native_call(d.RECV).call(mailbox, x.ctypes.data, 0, 32, kind + (1 << 40), peer) == -1 - peer
    assert group.backend.pipe.has_posted()
    group.messages.poll()
    assert not group.backend.pipe.has_posted()
    work = dist.isend(np.full(4, 9.0), peer, tag=3)
    assert native_call(d.WAIT).call(mailbox, taken, 0, 0, 0, 0) == LATER
    work.wait()
    handles.find(taken).wait()
    assert y.tolist() == [9.0] * 4
