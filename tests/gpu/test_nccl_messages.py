"""Messages between GPUs by a fake NCCL: ranks are threads with a fake GPU each, and real mailboxes."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
from messages.worlds import fields

from fastcoll.core.message import Status
from fastcoll.core.operands import ANY_TAG
from fastcoll.errors import CollectiveTimeoutError, MismatchError, UsageError
from fastcoll.gpu.nccl.communicator import RankInfo
from fastcoll.gpu.nccl.messages import STAGED, ControlMessage

from .nccl_world import NcclRanks, world

Array = np.ndarray[Any, Any]
F4 = np.dtype(np.float32)


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[NcclRanks]:
    with world(request.param) as made:
        yield made


@pytest.fixture
def pair() -> Iterator[NcclRanks]:
    with world(2) as made:
        yield made


def filled(value: float, count: int = 5, dtype: Any = F4) -> Array:
    return np.full(count, value, dtype)


def made(ranks: NcclRanks) -> int:
    """Return the number of ends of communicators."""
    return ranks.nccl.calls.count("ncclCommInitRankConfig")


def wait_for(works: Any) -> None:
    for work in works:
        assert work.wait()


# ---- results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*oracle.MOVABLE[-3:], np.dtype(ml_dtypes.bfloat16)], ids=str)
def test_every_dtype_is_moved(pair: NcclRanks, dtype: np.dtype) -> None:
    sent, got = oracle.values(0, 9, dtype), np.zeros(9, dtype)
    pair.run(
        lambda rank, group: group.recv(pair.array(1, got), 0) if rank else group.send(pair.array(0, sent), 1)
    )
    oracle.assert_same(got, sent)


def test_ranks_that_all_send_first(ranks: NcclRanks) -> None:
    """Each rank sends several messages to all others; they are received by tags in another order."""
    tags = (4, 0, 9)
    got = {(*pair, tag): filled(-1) for pair in itertools.permutations(range(ranks.size), 2) for tag in tags}

    def does(rank: int, group: Any) -> None:
        peers = [peer for peer in range(ranks.size) if peer != rank]
        sends = [
            group.isend(ranks.array(rank, filled(100 * rank + 10 * peer + tag)), peer, tag)
            for tag, peer in itertools.product(tags, peers)
        ]
        receives = [
            group.irecv(ranks.array(rank, got[peer, rank, tag]), peer, tag)
            for tag, peer in itertools.product(tags[::-1], peers)
        ]
        wait_for(receives + sends)

    ranks.run(does)
    for (source, rank, tag), host in got.items():
        assert host.tolist() == [100 * source + 10 * rank + tag] * 5


def test_each_direction_has_one_communicator_and_messages_keep_their_order(pair: NcclRanks) -> None:
    got = [filled(0) for _ in range(20)]

    def does(rank: int, group: Any) -> None:
        if rank == 0:
            works = [group.isend(pair.array(0, filled(k)), 1, 7) for k in range(20)]
        else:
            works = [group.irecv(pair.array(1, x), 0, 7) for x in got]
        wait_for(works)

    pair.run(does)
    before = made(pair)
    pair.run(does)
    assert [x[0] for x in got] == list(range(20))
    assert made(pair) == before <= 4


def test_any_source_returns_the_sender(ranks: NcclRanks) -> None:
    got = [filled(-1) for _ in range(ranks.size - 1)]
    sources = []

    def does(rank: int, group: Any) -> None:
        if rank:
            group.send(ranks.array(rank, filled(rank)), 0, 1)
            return
        works = [group.irecv(ranks.array(0, host), None, 1) for host in got]
        sources.extend(work.source_rank() for work in works)

    ranks.run(does)
    assert sorted(sources) == list(range(1, ranks.size))
    assert [host[0] for host in got] == sources


def test_strided_and_empty_arrays(pair: NcclRanks) -> None:
    sent, got = oracle.values(0, 12, F4).reshape(4, 3), np.zeros((4, 3), F4)

    def does(rank: int, group: Any) -> None:
        base = (sent, got)[rank]
        column, empty = pair.array(rank, base[:, 1]), pair.array(rank, np.zeros(0, F4))
        if rank == 0:
            group.send(column, 1)
            group.send(empty, 1)
        else:
            assert group.recv(column, 0) == 0
            assert group.recv(empty, None) == 0

    pair.run(does)
    oracle.assert_same(got[:, 1].copy(), sent[:, 1].copy())
    assert not got[:, ::2].any()


def test_messages_and_collectives_at_the_same_time(ranks: NcclRanks) -> None:
    sums, got = [filled(1) for _ in range(ranks.size)], [filled(0) for _ in range(ranks.size)]

    def does(rank: int, group: Any) -> None:
        right, left = (rank + 1) % ranks.size, (rank - 1) % ranks.size
        works = [
            group.isend(ranks.array(rank, filled(rank)), right),
            group.all_reduce(ranks.array(rank, sums[rank]), async_op=True),
            group.irecv(ranks.array(rank, got[rank]), left),
        ]
        wait_for(works)

    ranks.run(does)
    assert [int(host[0]) for host in got] == [(rank - 1) % ranks.size for rank in range(ranks.size)]
    assert all((host == ranks.size).all() for host in sums)


# ---- to oneself ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 1], ids=["NCCL", "through the host"])
def test_shorter_messages_and_any_tag(devices: int) -> None:
    """Receive such messages between two ranks, by any transport, and from this rank itself."""
    got, own = [np.full(9, -1, F4), np.full(9, -1, F4)], np.full(9, -1, F4)
    found, of_own = [Status(), Status()], Status()

    def does(rank: int, group: Any) -> None:
        if rank:
            group.send(ranks.array(1, np.full(5, 3, F4)), 0, 7)
            with pytest.raises(MismatchError, match=r"float32, 10 elements.*float32, 9 elements"):
                group.send(ranks.array(1, np.zeros(10, F4)), 0, 8)
            group.send(ranks.array(1, np.full(4, 4, F4)), 0, 9)
            return
        assert group.recv(ranks.array(0, got[0]), 1, ANY_TAG, found[0]) == 1
        with pytest.raises(MismatchError, match=r"any tag.*float32, 9 elements.*float32, 10 elements"):
            group.recv(ranks.array(0, np.zeros(9, F4)), 1, ANY_TAG, Status())
        assert group.irecv(ranks.array(0, got[1]), 1, 9, found[1]).source_rank() == 1
        group.send(ranks.array(0, np.full(2, 5, F4)), 0, 6)
        assert group.recv(ranks.array(0, own), 0, ANY_TAG, of_own) == 0

    with world(2, devices=devices) as ranks:
        ranks.run(does)
        assert (made(ranks) == 0) == (devices == 1)
    expected = [(1, 7, 5, 20), (1, 9, 4, 16), (0, 6, 2, 8)]
    assert [fields(status) for status in (*found, of_own)] == expected
    assert got[0].tolist() == [3] * 5 + [-1] * 4
    assert got[1].tolist() == [4] * 4 + [-1] * 5
    assert own.tolist() == [5] * 2 + [-1] * 7


def test_a_probe_does_not_return_the_size_of_a_gpu_array(pair: NcclRanks) -> None:
    found = []

    def does(rank: int, group: Any) -> None:
        if rank:
            group.send(pair.array(1, filled(1)), 0, 7)
            return
        found.append(fields(group.probe()))
        group.recv(pair.array(0, filled(0)), 1, 7)

    pair.run(does)
    assert found == [(1, 7, -1, -1)]


def test_to_oneself(pair: NcclRanks) -> None:
    base, copied, got, last = np.arange(9, dtype=F4), filled(3), filled(0), filled(0)

    def does(rank: int, group: Any) -> None:
        if rank:
            return
        x = pair.array(0, copied)
        group.send(x, 0, 5)  # sends a copy
        group.send(pair.array(0, np.zeros(0, F4)), 0, 6)
        pair.gpu.settle()
        copied[:] = 9
        assert group.recv(pair.array(0, got), None, 5) == 0
        assert group.recv(pair.array(0, np.zeros(0, F4)), 0, 6) == 0
        receive = group.irecv(pair.array(0, base[1:6]), 0)
        send = group.isend(pair.array(0, base[0:5]), 0)
        assert send.wait(timeout=60)
        assert receive.source_rank() == 0
        last[:] = base[1:6]

    before = made(pair)
    pair.run(does)
    assert (got == 3).all()
    assert last.tolist() == [0, 1, 2, 3, 4]  # the two arrays overlap
    assert made(pair) == before


def test_to_oneself_of_another_size(pair: NcclRanks) -> None:
    group = pair.groups[0]
    with pair.gpu.on(0):
        send = group.isend(pair.array(0, filled(1, 4)), 0)
        with pytest.raises(MismatchError, match=r"the array on rank 0.* holds \(float32, 5 elements\)"):
            group.recv(pair.array(0, filled(1, 5)), 0)
        with pytest.raises(MismatchError, match=r"the message from rank 0.* holds \(float32, 4 elements\)"):
            send.wait()


# ---- streams ---------------------------------------------------------------------------------------------


def test_a_message_waits_for_the_arrays_streams_and_later_work_for_it(pair: NcclRanks) -> None:
    gates, checked = [threading.Event(), threading.Event()], threading.Barrier(2)
    hosts, seen = [filled(1), filled(0)], filled(-1)

    def does(rank: int, group: Any) -> None:
        gpu = pair.gpu
        stream = gpu.new_stream(rank)
        x = pair.array(rank, hosts[rank], stream)

        def gated() -> None:
            assert gates[rank].wait(60)
            hosts[rank][:] = 10 + rank

        gpu.queue("kernel", stream, gated)
        work = group.isend(x, 1) if rank == 0 else group.irecv(x, 0)
        work.wait()  # only streams wait, because the gates are still shut
        with pytest.raises(CollectiveTimeoutError, match=r"not complete after 0\.01 s"):
            work.wait(timeout=0.01)
        assert not work.is_completed()
        later = (lambda: hosts[0].fill(77)) if rank == 0 else (lambda: seen.__setitem__(..., hosts[1]))
        gpu.queue("kernel", stream, later)
        checked.wait(60)
        if rank == 0:
            gates[0].set()
            with pytest.raises(CollectiveTimeoutError):  # the receiver's gate is still shut
                work.wait(timeout=0.01)
            gates[1].set()
        assert work.wait(timeout=60)
        assert work.is_success()
        gpu.end_stream(stream)

    pair.run(does)
    assert (seen == 10).all()
    assert (hosts[0] == 77).all()


def test_works_call_back_and_can_be_awaited(pair: NcclRanks) -> None:
    got, seen = filled(0), []

    async def awaited(work: Any) -> Any:
        return await work

    def does(rank: int, group: Any) -> None:
        if rank == 0:
            work = group.isend(pair.array(0, filled(4)), 1)
            work.add_done_callback(lambda done: seen.append(done.is_success()))
            assert asyncio.run(awaited(work)) is None
        else:
            assert asyncio.run(awaited(group.irecv(pair.array(1, got), None))) == 0
            assert (got == 4).all()

    pair.run(does)
    assert seen == [True]


def test_a_callback_may_not_wait_for_messages_but_post_them(pair: NcclRanks) -> None:
    got, posted = filled(0), []
    listening, done = threading.Event(), threading.Event()

    def again(_: Any) -> None:
        group = pair.groups[1]
        with pytest.raises(UsageError, match="a Work's callback may not wait"):
            group.recv(pair.array(1, got), 0)
        posted.append(group.irecv(pair.array(1, got), 0, 3))
        with pytest.raises(UsageError, match=r"waiting for recv from rank 0 .*, tag 3.*may not wait"):
            posted[0].wait()
        done.set()

    def does(rank: int, group: Any) -> None:
        if rank == 0:
            assert listening.wait(60)  # a callback of a Work that has ended runs at once, where it may wait
            group.send(pair.array(0, filled(0)), 1)
            assert done.wait(60)
            group.send(pair.array(0, filled(1)), 1, 3)
        else:
            group.irecv(pair.array(1, filled(0)), 0).add_done_callback(again)
            listening.set()
            assert done.wait(60)
            posted[0].wait(timeout=60)

    pair.run(does)
    assert (got == 1).all()


# ---- mismatches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other", [filled(0, 6), filled(0, 5, "i4"), np.zeros(0, F4)], ids=["size", "dtype", "empty"]
)
def test_a_message_that_does_not_fit_raises_on_both_sides_and_the_group_goes_on(
    pair: NcclRanks, other: Array
) -> None:
    def does(rank: int, group: Any) -> str:
        start = (
            r"^recv from rank 0 .*: the array on rank 1"
            if rank
            else r"^send to rank 1 .*: the message from rank 0"
        )
        with pytest.raises(MismatchError, match=start) as caught:
            transfer(group, pair.array(rank, other.copy() if rank else filled(1)))
        transfer(group, pair.array(rank, got if rank else filled(2)))
        return str(caught.value)

    got = filled(0)
    for text in pair.run(does):
        assert "holds (float32, 5 elements)" in text
        assert f"({other.dtype}, {other.size} elements)" in text
        assert "both must have the same dtype and number of elements. The message was dropped" in text
    assert (got == 2).all()


def transfer(group: Any, x: Any) -> None:
    """Send an array from rank 0 to rank 1."""
    group.recv(x, 0, 8) if group.rank else group.send(x, 1, 8)


@pytest.mark.parametrize("on_gpu", [0, 1])
def test_arrays_on_the_host_and_on_a_gpu_do_not_fit(pair: NcclRanks, on_gpu: int) -> None:
    def does(rank: int, group: Any) -> str:
        with pytest.raises(MismatchError) as caught:
            transfer(group, pair.array(rank, filled(rank)) if rank == on_gpu else filled(rank))
        transfer(group, pair.array(rank, filled(rank)))
        return str(caught.value)

    for text in pair.run(does):
        assert "holds an array on a GPU" in text
        assert "holds (float32, 5 elements)" in text
        assert "both must be on GPUs, or both in host memory" in text


# ---- through the host ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_each_pair_of_ranks_decides_for_itself(size: int) -> None:
    """Ranks 0 and 1 share a GPU, so their messages go through the host; rank 2 has its own."""
    got = {pair: filled(-1) for pair in itertools.permutations(range(size), 2)}

    def does(rank: int, group: Any) -> None:
        peers = [peer for peer in range(size) if peer != rank]
        works = [group.isend(ranks.array(rank, filled(10 * rank + peer)), peer) for peer in peers]
        works += [group.irecv(ranks.array(rank, got[peer, rank]), peer) for peer in peers]
        wait_for(works)
        assert size > 2 or all(work.is_completed() for work in works)

    with world(size) as ranks:
        uuid = ranks.gpu.uuid
        ranks.gpu.uuid = lambda device: uuid(max(device, 1))  # type: ignore[method-assign]
        ranks.run(does)
        assert made(ranks) == (8 if size == 3 else 0)  # four directions
    assert all((host == 10 * a + b).all() for (a, b), host in got.items())


def test_the_mailbox_goes_on_while_a_message_waits_for_a_stream() -> None:
    """Staged receives wait for the array's stream on another thread."""
    gate = threading.Event()
    got = [filled(0), filled(0)]

    def does(rank: int, group: Any) -> None:
        if rank == 0:
            for tag in (1, 2):
                group.isend(ranks.array(0, filled(tag)), 1, tag)
            group.recv(ranks.array(0, filled(0)), 1, 3)
            return
        stream = ranks.gpu.new_stream(0)
        ranks.gpu.queue("kernel", stream, lambda: [gate.wait(60)][:0])
        late = group.irecv(ranks.array(1, got[0], stream), 0, 1)
        group.isend(filled(0), 1, 4)  # through the same mailbox
        group.recv(filled(0), 1, 4)
        assert not late.is_completed()
        gate.set()
        group.recv(ranks.array(1, got[1]), 0, 2)
        late.wait()
        group.send(ranks.array(1, filled(0)), 0, 3)
        ranks.gpu.end_stream(stream)

    with world(2, devices=1) as ranks:
        ranks.run(does)
    assert [host[0] for host in got] == [1, 2]


def test_control_messages() -> None:
    info = RankInfo(b"g" * 16, b"h" * 8, 22005, True, b"\1" * 128)
    control = ControlMessage(3, 5 << 22 | 12, 1 << 40, info, STAGED)
    assert ControlMessage.from_array(control.to_array()) == control
