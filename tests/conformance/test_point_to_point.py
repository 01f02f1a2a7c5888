"""send, recv, isend, irecv and batches, on every world: tags, order, any source, the own rank, wrong sizes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from oracle import assert_same, moves, values

import fastcoll as dist
from fastcoll import MismatchError, UsageError

WORLDS = (1, 2, 3, 4, 5, 8)


@pytest.mark.ranks(*WORLDS)
def test_ring_of_every_dtype(rank, world_size):
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for dtype, count in (*moves(world_size), (np.dtype("f4"), 100_003)):
        x, got = values(rank, count, dtype), np.zeros(count, dtype)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, got, left)])
        assert all(work.wait() for work in works)
        assert_same(got, values(left, count, dtype), (dtype, count))


@pytest.mark.ranks(2, 3)
def test_sendrecv_sends_nothing_if_the_output_is_wrong(rank, world_size):
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    wrong = {"output": ([0.0], left, 0), "src": (np.zeros(1), world_size, 0), "tag": (np.zeros(1), left, -5)}
    for number, (output, src, tag) in enumerate(wrong.values()):
        if rank == 0:
            with pytest.raises(UsageError):
                dist.sendrecv(np.full(1, -1.0), right, output, src, recv_tag=tag)
        for group in (None, dist.group.WORLD):
            got = np.zeros((1, 2))[:, :1]
            assert dist.sendrecv(np.full((1, 1), number + 10.0 * rank), right, got, left, group) == left
            assert got[0, 0] == number + 10 * left


@pytest.mark.ranks(3)
def test_sendrecv_on_a_group_sends_nothing_if_the_source_is_no_member(rank, world_size):
    group, other = dist.new_group([0, 2]), 2 - rank
    if rank == 1:
        return
    if rank == 0:
        with pytest.raises(UsageError, match="1"):
            dist.sendrecv(np.zeros(1), 2, np.zeros(1), 1, group)
    got = np.zeros(1)
    assert dist.sendrecv(np.full(1, rank + 5.0), other, got, other, group) == other
    assert got[0] == other + 5


@pytest.mark.ranks(2, 3)
def test_blocking_calls_of_every_length(rank, world_size):
    for count in (0, 1, 5, 11, 1000, 70_000, 1_000_003):
        x = np.full(count, rank + 1, "i4")
        if rank == 0:
            dist.send(x, 1)
            assert dist.recv(x, 1, tag=4) == 1
            assert (x == 2).all()
        elif rank == 1:
            got = np.zeros(count, "i4")
            assert dist.recv(got, 0) == 0
            assert (got == 1).all()
            dist.send(x, 0, tag=4)


@pytest.mark.ranks(2)
def test_tags_are_matched_and_one_tag_never_overtakes(rank, world_size):
    n = 30
    if rank == 0:
        works = [dist.isend(np.array([tag, i]), 1, tag=tag) for i in range(n) for tag in (0, 1, 2)]
        for work in works:
            work.wait()
    else:
        for tag in (2, 0, 1):
            for i in range(n):
                got = np.zeros(2, int)
                dist.recv(got, 0, tag=tag)
                assert got.tolist() == [tag, i]


@pytest.mark.ranks(2, 4)
def test_any_tag_takes_messages_of_a_rank_in_their_order(rank, world_size):
    tags = (5, 0, 2**31 - 1, 5)
    if rank:
        works = [dist.isend(np.array([rank, n]), 0, tag=tag) for n, tag in enumerate(tags)]
        assert all(work.wait() for work in works)
        return
    seen = dict.fromkeys(range(1, world_size), 0)
    for turn in range(len(tags) * (world_size - 1)):
        got = np.zeros(2, int)
        source = dist.recv(got, tag=dist.ANY_TAG) if turn % 2 else dist.irecv(got, tag=-1).result()
        assert got.tolist() == [source, seen[source]]
        seen[source] += 1


@pytest.mark.ranks(1, 2, 3)
def test_requests_are_started_again_and_again(rank, world_size):
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    sent, got, status = np.zeros(3, "f4"), np.zeros(5, "f4"), dist.Status()
    requests = [
        dist.recv_init(got, left, tag=dist.ANY_TAG, status=status),
        dist.send_init(sent, right, tag=4),
    ]
    assert all(request.is_completed() and request.wait() for request in requests)
    for turn in range(4):
        sent[:] = 10 * turn + rank
        if turn % 2:
            dist.startall(requests)
        else:
            for request in requests:
                request.start()
        assert [request.result() for request in requests] == [left, None]
        assert all(request.is_completed() for request in requests)
        assert got.tolist() == [10 * turn + left] * 3 + [0] * 2
        assert (status.source, status.tag, status.count) == (left, 4, 3)


@pytest.mark.ranks(2)
def test_requests_that_are_under_way_or_wrong_are_refused(rank, world_size):
    receive, other = dist.recv_init(np.zeros(2), 1 - rank), dist.recv_init(np.zeros(2), 1 - rank, tag=1)
    receive.start()
    with pytest.raises(dist.UsageError, match=r"recv from rank .* was started and is not complete"):
        receive.start()
    for wrong in ([other, receive], [other, other], [other, None]):
        with pytest.raises(dist.UsageError):
            dist.startall(wrong)
    assert other.work is None
    assert not receive.is_completed()
    dist.barrier()
    dist.send(np.ones(2), 1 - rank)
    assert receive.wait()
    for call in (dist.send_init, dist.recv_init):
        for array, peer, tag in (([1.0], 0, 0), (np.zeros(1), 2, 0), (np.zeros(1), 0, -2)):
            with pytest.raises(dist.UsageError):
                call(array, peer, tag=tag)


@pytest.mark.ranks(2, 4)
def test_a_probe_and_a_status_have_source_tag_and_size(rank, world_size):
    if rank:
        works = [dist.isend(np.full(n, rank, "f4"), 0, tag=n) for n in (3, 0, 50_000)]
        assert all(work.wait() for work in works)
        return
    with pytest.raises(dist.UsageError):
        dist.iprobe(tag=-2)
    for source in reversed(range(1, world_size)):
        for tag in (50_000, None, None):
            status = dist.probe(source) if tag is None else dist.probe(source, tag=tag)
            found = status.source, status.tag, status.count, status.nbytes
            assert found == (source, status.tag, status.tag, 4 * status.tag)
            assert repr(dist.iprobe(source, tag=status.tag)) == repr(status)
            x, received = np.full(60_000, -1, "f4"), dist.Status()  # an array may be larger than its message
            assert dist.recv(x, status.source, tag=status.tag, status=received) == source
            assert repr(received) == repr(status)
            assert (x[: status.count] == source).all()
            assert (x[status.count :] == -1).all()
    assert dist.iprobe() is None


@pytest.mark.ranks(4)
def test_calls_on_a_group_return_global_ranks(rank, world_size):
    group, status, x = dist.new_group([1, 3]), dist.Status(), np.zeros(2)
    if rank == 3:
        request = dist.send_init(np.full(2, 3.0), 1, group=group)
        for _ in range(6):
            request.start()
            request.wait()
        with pytest.raises(MismatchError):
            group.send(np.zeros(3), 0)
        dist.send(np.ones(2), group=group, group_dst=0, tag=1)
    elif rank == 1:
        for wrong in ([1], 4, dist.Status):
            for receive in (dist.recv, dist.irecv):
                with pytest.raises(dist.UsageError, match="status is of type"):
                    receive(x, 3, group=group, status=wrong)
        assert dist.probe(group=group).source == dist.probe(3, group=group).source == 3
        assert dist.iprobe(group=group, group_src=1).source == 3
        assert group.probe().source == 1
        assert dist.recv(np.zeros(3), group=group, status=status) == status.source == 3
        assert dist.irecv(np.zeros(3), 3, group=group, status=status).result() == status.source == 3
        assert group.recv(np.zeros(3), status=status) == status.source == 1
        assert dist.recv(x, group=group) == 3
        assert (x == 3).all()
        request = dist.recv_init(x, group=group)
        for _ in range(2):
            request.start()
            assert request.result() == 3
        request.start()
        with pytest.raises(MismatchError):
            request.wait()
        assert dist.irecv(x, src=3, group=group, tag=1).result() == 3
    else:
        for call, answer in (
            (dist.recv, -1),
            (lambda x, group: dist.send_init(x, 1, group=group), None),
            (dist.recv_init, None),
            (lambda x, group: dist.probe(group=group).source, -1),
            (lambda x, group: dist.iprobe(group=group), None),
        ):
            with pytest.warns(UserWarning, match=r"on rank \d, which is not in the given group"):
                assert call(x, group=group) == answer


@pytest.mark.ranks(2, 3, 5)
def test_any_source_returns_the_sender(rank, world_size):
    if rank:
        for turn in range(5):
            dist.send(np.array([rank, turn]), 0)
        return
    seen = {r: 0 for r in range(1, world_size)}
    for turn in range(5 * (world_size - 1)):
        got = np.zeros(2, int)
        source = dist.recv(got) if turn % 2 else dist.irecv(got).source_rank()
        assert got.tolist() == [source, seen[source]]
        seen[source] += 1


@pytest.mark.ranks(1, 2)
def test_messages_to_the_own_rank(rank, world_size):
    x, got = np.arange(5.0) + rank, np.zeros(5)
    dist.send(x, rank)
    x[:] = -1
    assert dist.recv(got, rank) == rank
    assert (got == np.arange(5.0) + rank).all()
    work = dist.irecv(got, rank, tag=3)
    dist.isend(x, rank, tag=3).wait()
    assert work.result() == rank
    assert (got == -1).all()
    works = [dist.isend(x, rank), dist.isend(np.zeros(9), rank, tag=4)]
    assert all(work.wait() for work in works)
    x[:] = 5
    assert dist.recv(got, rank) == rank
    assert (got == -1).all()
    with pytest.raises(MismatchError):
        dist.recv(got, rank, tag=4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", [9, 500_000])
def test_a_message_that_does_not_fit_is_an_error_on_both_sides(rank, world_size, count):
    for dtype, length in (("f4", count - 2), ("f4", count + 2), ("i4", count)):
        sent, wanted = np.zeros(count, "f4"), np.zeros(length, dtype)
        with pytest.raises(MismatchError) as caught:
            _ = dist.send(sent, 1, tag=7) if rank == 0 else dist.recv(wanted, 0, tag=7)
        for text in ("rank 0", "rank 1", f"{count} elements"):
            assert text in str(caught.value)
    x = np.array([rank])
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
        assert x[0] == 0


@pytest.mark.ranks(2)
def test_sendrecv_has_sent_its_input_if_the_output_does_not_fit(rank, world_size):
    x, got = np.full(1 << 18, rank + 1.0), np.zeros(1 << 18)
    if rank == 0:
        with pytest.raises(MismatchError):
            dist.sendrecv(x, 1, np.zeros(2), 1)
        x[:] = 99
    else:
        with pytest.raises(MismatchError):
            dist.send(np.zeros(3), 0)
        dist.recv(got, 0)
        assert (got == 1).all()


@pytest.mark.ranks(2, 4)
def test_all_ranks_exchange_messages_beside_collectives(rank, world_size):
    sizes = (1, 3000, 400_000)
    inbox = {(p, n): np.zeros(n, "i4") for p in range(world_size) for n in sizes}
    works = [dist.irecv(got, p, tag=n) for (p, n), got in inbox.items()]
    for n in reversed(sizes):
        works += [dist.isend(np.full(n, rank, "i4"), p, tag=n) for p in range(world_size)]
    x = np.ones(1000)
    for _ in range(10):
        dist.all_reduce(x)
    assert (x == world_size**10).all()
    for work in works:
        work.wait()
    assert all((got == p).all() for (p, n), got in inbox.items())


@pytest.mark.ranks(2)
def test_strided_arrays(rank, world_size):
    canvas = np.zeros((4, 6), "f8")
    if rank == 0:
        canvas[:, ::2] = np.arange(12).reshape(4, 3)
        dist.send(canvas[:, ::2], 1)
    else:
        dist.recv(canvas[:, ::2], 0)
        assert (canvas[:, ::2] == np.arange(12).reshape(4, 3)).all()
        assert not canvas[:, 1::2].any()


@pytest.mark.ranks(1, 2)
def test_a_batch_with_a_wrong_operation_posts_none(rank, world_size):
    """A receive that an earlier operation had posted would match the message of the next batch."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    sent, received, lost = np.full(2, float(rank)), np.zeros(2), np.zeros(2)
    receive = dist.P2POp(dist.irecv, lost, left)
    for array, peer, tag in (([1.0, 2.0], right, 0), (sent, world_size, 0), (sent, right, -1)):
        with pytest.raises(dist.UsageError):
            dist.batch_isend_irecv([receive, dist.P2POp(dist.isend, array, peer, tag=tag)])
    ops = [dist.P2POp(dist.irecv, received, left), dist.P2POp(dist.isend, sent, right)]
    assert all(work.wait() for work in dist.batch_isend_irecv(ops))
    assert received.tolist() == [left] * 2
    assert not lost.any()


@pytest.mark.ranks(1, 2)
def test_a_batch_may_name_the_default_group_or_omit_it(rank, world_size):
    peer, x, got = world_size - 1 - rank, np.full(2, rank + 1.0), np.zeros(2)
    for one, other in ((None, dist.group.WORLD), (dist.group.WORLD, None)):
        ops = [dist.P2POp(dist.isend, x, peer, group=one), dist.P2POp(dist.irecv, got, peer, group=other)]
        assert all(work.wait() for work in dist.batch_isend_irecv(ops))
    assert got.tolist() == [peer + 1.0] * 2
    ops[0].group = dist.new_group()
    with pytest.raises(UsageError, match="must be on one group"):
        dist.batch_isend_irecv(ops)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_timeout_that_is_set_later_applies_to_messages(rank, world_size, backend):
    try:
        group = dist.new_group(backend=backend)
    except dist.UnavailableError:  # the ranks are on several hosts
        group = dist.new_group()
    dist.barrier(group)
    group.timeout = 0.3
    if rank == 0:
        with pytest.raises(dist.CollectiveTimeoutError, match=r"0\.3 s"):
            dist.recv(np.zeros(2), 1, group=group)
    dist.barrier()
    group.close()


BOTH_IN_SEND = r"a message of rank 1 .*: if both ranks wait in send, neither"


def group_whose_rank_1_has_sent(rank):
    """Return a new group, whose timeout on rank 0 is short from the moment that the message of rank 1 is there."""
    group = dist.new_group()
    if rank == 0:
        dist.probe(1, group=group)
        group.timeout = 0.2
    return group


@pytest.mark.ranks(2)
def test_the_timeout_of_two_ranks_in_send_names_the_cause(rank, world_size):
    group = group_whose_rank_1_has_sent(rank)
    with pytest.raises(dist.GroupError, match=BOTH_IN_SEND):
        dist.send(np.ones(3), 1 - rank, group=group)
    dist.barrier()


@pytest.mark.ranks(2)
def test_the_timeout_of_a_send_after_a_pending_isend_names_the_cause(rank, world_size):
    """The isend is older, so its deadline ends the group."""
    group = group_whose_rank_1_has_sent(rank)
    works = [dist.isend(np.ones(3), 1, group=group)] if rank == 0 else []
    calls = [*(work.wait for work in works), partial(dist.send, np.ones(3), 1 - rank, group=group)]
    for call in reversed(calls):
        with pytest.raises(dist.GroupError, match=BOTH_IN_SEND):
            call()
    dist.barrier()
