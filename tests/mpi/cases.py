"""Behaviour of MPI alone, run inside MPI jobs by rank.py: algorithms that move data, the ends of groups, waiting."""

from __future__ import annotations

import os
from contextlib import nullcontext
from itertools import repeat

import numpy as np
import pytest
from interrupts import interrupted
from together import together

import fastcoll as dist
from fastcoll import ReduceOp, failpoints
from fastcoll.net.mpi import agreement, execution
from fastcoll.net.mpi.membership import retired

SIZES = (2, 4)
pytestmark = pytest.mark.ranks(*SIZES)


def usable(group=None):
    x = np.ones(2)
    dist.all_reduce(x, group=group)
    assert (x == dist.get_world_size(group)).all()


@pytest.fixture
def group():
    """A group after whose end the ranks can still use the world."""
    group = dist.new_group()
    yield group
    group.close()
    usable()


@pytest.fixture
def small_rows(monkeypatch):
    """Limit rows of new groups to 88 bytes, so that small arrays move like large ones."""
    monkeypatch.setattr(agreement, "ROOMS", (88,))


def all_moves(rank, world_size, count, group, on=lambda x: x):
    """Do every operation that moves blocks of different sizes; all blocks differ in the results.

    Args:
        on: makes the argument for each array.
    """

    def each(xs):
        return [on(x) for x in xs]

    sizes = [count + 3 * r for r in range(world_size)]
    blocks = [np.full(sizes[rank], 10 * rank + r, "i4") for r in range(world_size)]
    outs, mine = [np.zeros(size, "i4") for size in sizes], np.zeros(sizes[rank], "i4")
    dist.all_to_all(each(outs), each(blocks), group=group)
    assert all((out == 10 * r + rank).all() for r, out in enumerate(outs))
    dist.all_gather(each(outs), on(blocks[0]), group=group)
    assert all((out == 10 * r).all() for r, out in enumerate(outs))
    dist.gather(on(blocks[1]), each(outs) if rank == 1 else None, 1, group=group)
    assert rank != 1 or all((out == 10 * r + 1).all() for r, out in enumerate(outs))
    given = [np.full(size, 7 * r, "i4") for r, size in enumerate(sizes)]
    dist.scatter(on(mine), each(given) if rank == 0 else None, 0, group=group)
    assert (mine == 7 * rank).all()
    everywhere = np.full(count, rank, "i4")
    dist.broadcast(on(everywhere), 1, group=group)
    assert (everywhere == 1).all()
    dist.reduce_scatter(on(mine), each(given), group=group)
    assert (mine == 7 * rank * world_size).all()


@pytest.mark.parametrize("reach", [execution.REACH, -1], ids=["collectives", "messages"])
@pytest.mark.parametrize("count", [1, 1009, 100_003])
@pytest.mark.usefixtures("small_rows")
def test_collectives_and_messages_move_the_same_data(rank, world_size, reach, count, monkeypatch):
    """Arrays beyond the reach of MPI's counts move in messages of limited size; here with limits other than 2 GiB."""
    monkeypatch.setattr(execution, "REACH", reach)
    if reach < 0:
        monkeypatch.setattr(execution, "LARGEST", 4096)
    all_moves(rank, world_size, count, dist.new_group())


@pytest.mark.usefixtures("small_rows")
def test_one_rank_with_distant_blocks_makes_all_use_messages(rank, world_size, monkeypatch):
    monkeypatch.setattr(execution, "REACH", -1 if rank == 1 else execution.REACH)
    all_moves(rank, world_size, 1009, dist.new_group())


def test_messages_and_broadcasts_are_divided(rank, world_size, monkeypatch):
    monkeypatch.setattr(execution, "LARGEST", 10_000)
    x = np.arange(100_003) * (rank == 0)
    dist.broadcast(x, 0)
    assert (x == np.arange(x.size)).all()
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        y = np.zeros_like(x)
        dist.recv(y, 0)
        assert (y == x).all()


@pytest.mark.parametrize("segment", [4, 416])
@pytest.mark.usefixtures("small_rows")
def test_segments_give_the_same_bits(rank, world_size, segment, monkeypatch):
    """The same bits as in rows."""
    group = dist.new_group()
    rng, count = np.random.default_rng(rank), 203 if segment > 4 else 29
    x = rng.standard_normal(count).astype("f4")
    blocks = [rng.standard_normal(count // 4 + 7 * r) for r in range(world_size)]
    calls = [dist.all_reduce, dist.scan, dist.exscan, lambda y, group: dist.reduce(y, 1, group=group)]
    results = []
    for g in (None, group, group):
        if results[1:]:
            monkeypatch.setattr(execution, "SEGMENT", segment)
            monkeypatch.setattr(execution, "GATHERED", 0)
        ys, out = [x.copy() for _ in calls], np.zeros_like(blocks[rank])
        for call, y in zip(calls, ys, strict=True):
            call(y, group=g)
        dist.reduce_scatter(out, blocks, ReduceOp.MAX, group=g)
        results.append([*ys, out])
    for in_rows, at_once, in_segments in zip(*results, strict=True):
        np.testing.assert_array_equal(in_rows, at_once)
        np.testing.assert_array_equal(in_rows, in_segments)


def test_every_size_around_those_of_rows(rank, world_size):
    """Twice each, since only prepared calls take the compiled path; and ranks need not take the same path."""
    for room in agreement.row_sizes(world_size):
        for count in {max(0, room // 4 + extra) for extra in (-12, -11, -10, -9, 0, 1)}:
            for round_number in range(3):
                x = np.arange(count, dtype="f4") + rank
                if round_number == 2 and rank == 1:
                    dist.all_reduce(x, async_op=True).wait()
                else:
                    dist.all_reduce(x)
                want = np.arange(count, dtype="f4") * world_size + sum(range(world_size))
                np.testing.assert_array_equal(x, want)
                out = np.zeros((world_size, count), "i4")
                dist.all_gather_single(out, np.full(count, 10 * round_number + rank, "i4"))
                assert all((out[r] == 10 * round_number + r).all() for r in range(world_size))
                y = np.full(count, rank * (round_number + 1), "i4")
                dist.broadcast(y, 1)
                assert (y == round_number + 1).all()


def test_the_compiled_path_names_what_each_rank_called(rank, world_size):
    x, y = np.ones(3), np.ones(3)
    for _ in range(2):
        dist.all_reduce(x)
        dist.all_reduce(x, ReduceOp.MAX)
        dist.barrier()
    for wrong in (lambda: dist.all_reduce(y, ReduceOp.MAX), dist.barrier):
        with pytest.raises(dist.MismatchError, match="all_reduce"):
            wrong() if rank == 1 else dist.all_reduce(y)
    assert (y == 1).all()
    usable()


def test_communicators_are_freed(rank, world_size):
    for _ in range(30):
        group = dist.new_group()
        usable(group)
        if rank == 0:
            dist.send(np.ones(3), 1, group=group)
        elif rank == 1:
            dist.recv(np.ones(3), 0, group=group)
        dist.destroy_process_group(group)
    assert len(retired) < 5


def test_a_communicator_with_an_unread_message_is_not_used_again(rank, world_size):
    for round_number in range(3):
        group = dist.new_group()
        if rank == 0:
            dist.isend(np.full(3, round_number), 1, group=group)
        usable(group)
        lost = r"has lost operations that it did not wait for.*send to rank 1"
        with pytest.raises(dist.AbortedError, match=lost) if rank == 0 else nullcontext():
            dist.destroy_process_group(group)
        got = np.zeros(3, int)
        group = dist.new_group()
        if rank == 0:
            dist.send(np.full(3, 100 + round_number), 1, group=group)
        elif rank == 1:
            dist.recv(got, 0, group=group)
            assert (got == 100 + round_number).all()
        dist.destroy_process_group(group)


def test_narrow_types_are_refused(rank, world_size, group):
    x, lost = np.full(300, 0.1, "f4"), np.full(300, 0.3, "f4")
    with pytest.raises(dist.UnavailableError, match="not available; leave travel out"):
        dist.all_reduce(x, group=group, travel="int8", lost=lost)
    assert (x == np.float32(0.1)).all()
    assert (lost == np.float32(0.3)).all()


@pytest.mark.parametrize("count", [2, 50_000])  # a call that was prepared before takes the compiled path
def test_a_missing_rank_is_named(rank, world_size, count, group):
    x = np.ones(count)
    if count == 2:
        dist.all_reduce(x, group=group)
    group.timeout = 0.3  # only now, because making the group may take longer
    if rank != 1:
        with pytest.raises(dist.GroupError, match=r"rank 1 \("):
            dist.all_reduce(x, group=group)
    dist.barrier()
    if count > 2:  # on rank 1, too, which receives the rows that the others sent before they gave up
        with pytest.raises(dist.GroupError):
            dist.all_reduce(x, group=group)


def test_a_rank_that_leaves_is_named(rank, world_size, group):
    if rank == 1:
        dist.destroy_process_group(group)
    else:
        with pytest.raises(dist.AbortedError, match=r"rank 1 \(.*left"):
            dist.barrier(group=group)
    dist.barrier()


@pytest.mark.parametrize("call", ["barrier", "recv", "irecv"])
def test_abort_ends_waiting_on_all_ranks(rank, world_size, call, group):
    wait = {
        "barrier": lambda: group.barrier(),
        "recv": lambda: group.recv(np.zeros(3), 0),
        "irecv": lambda: group.irecv(np.zeros(3)).wait(),
    }[call]
    if rank == 0:
        dist.barrier()
        group.abort("enough")
    else:
        waiting, _ = together(wait, dist.barrier)
        assert isinstance(waiting, dist.AbortedError)
        assert "enough" in str(waiting)


def test_ctrl_c_ends_waiting_on_all_ranks(rank, world_size, group):
    if rank == 0:
        with pytest.raises(KeyboardInterrupt), interrupted(group):
            group.recv(np.zeros(3), 1)
    else:
        with pytest.raises(dist.AbortedError, match="KeyboardInterrupt"):
            group.barrier()


@pytest.mark.parametrize("phase", ["after_meeting", "before_done"])
def test_a_rank_that_fails_within_a_call_is_named(rank, world_size, phase, group):
    failpoints.arm(failpoints.parse(f"mpi.all_reduce.{phase}:raise#1"), rank)
    x = np.ones(5000)
    called = repeat(x, 3)  # rank 1 may have completed the first call
    failed = failpoints.FailpointError if rank == 1 else dist.AbortedError
    with pytest.raises(failed, match=None if rank == 1 else r"rank 1 \(.* FailpointError"):
        list(map(group.all_reduce, called))
    failpoints.arm(())


def test_two_threads_may_make_groups_of_one_name(rank, world_size):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if rank == 0 else None
    port = [store and store.port]
    dist.broadcast_object_list(port, 0)
    store = store or dist.TCPStore("127.0.0.1", port[0])

    def make(thread):
        for round_number in range(10):
            part = dist.PrefixStore(f"{thread}/{round_number}", store)
            group = dist.group_from_store(part, rank, world_size, backend="mpi")
            usable(group)
            dist.destroy_process_group(group)

    assert together(lambda: make(0), lambda: make(1)) == [None, None]
    if rank > 0:
        store.close()
    dist.barrier()
    store.close()


@pytest.mark.ranks(*SIZES, init=False)
def test_ranks_and_sizes_other_than_mpis_are_refused(rank, world_size):
    with pytest.raises(dist.UsageError, match=f"MPI started this process with {world_size}"):
        dist.init_process_group("mpi", world_size=world_size + 1)
    with pytest.raises(dist.UsageError, match=f"MPI started this process with {rank}"):
        dist.init_process_group("mpi", rank=(rank + 1) % world_size, world_size=world_size)


@pytest.mark.ranks(*SIZES, init=False)
def test_ranks_may_be_in_another_order_than_mpis(rank, world_size, tmp_path):
    other = world_size - 1 - rank
    url = f"file://{tmp_path}/store"
    dist.init_process_group("mpi", init_method=url, rank=other, world_size=world_size)
    x = np.array([other])
    dist.broadcast(x, world_size - 1)
    assert x[0] == world_size - 1
    usable()


def test_a_forked_child_may_not_use_mpi(rank, world_size):
    child = os.fork()
    if child == 0:
        try:
            dist.barrier()
        except dist.AbortedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    usable()
