"""Lanes: large calls that several threads of a rank share give what undivided ones give, and fail as they do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from unittest.mock import Mock

import numpy as np
import oracle
import pytest
import rows
from together import together

import fastcoll as dist
from fastcoll import MismatchError, ReduceOp, config
from fastcoll.core import signature
from fastcoll.shm import autotune, lanes, layout, rounds
from fastcoll.shm import context_layout as at
from fastcoll.shm.layout import lanes_for

EDGE = rounds.SMALLEST_DIVIDED // 4  # float32 of the smallest call that is divided
LARGE = 3 * EDGE + 1009
TURNS = 2 * 3  # calls in which each of three ways is tried, plain and divided
MANY_TURNS = 2 * (autotune.WAYS - 1)
LAYOUT = layout.plan(2, 4 << 20)


@contextmanager
def group_of(lanes: int, timeout: float | None = None) -> Iterator[dist.ProcessGroup]:
    """A group of all ranks with so many lanes, whose calls all go through the slots."""
    before = os.environ.get("FASTCOLL_LANES")
    os.environ["FASTCOLL_LANES"] = str(lanes)
    config.forget()
    try:
        group = dist.new_group() if timeout is None else dist.new_group(timeout=timeout)
    finally:
        del os.environ["FASTCOLL_LANES"]
        if before is not None:
            os.environ["FASTCOLL_LANES"] = before
        config.forget()
    assert group.backend.context[at.LANES] == lanes
    group.backend.context.words[at.DIRECT_FROM] = autotune.NEVER
    try:
        yield group
    finally:
        group.close()


def divided(group):
    """How many calls of the group were divided so far."""
    return group.backend.context[at.CALLS_DIVIDED]


def divide_next(group, operation, nbytes=4 * LARGE):
    """Have the next calls of this operation and size be divided; on all ranks between the same two calls."""
    row = signature.code_of(operation) * autotune.CLASSES + autotune._class_of.py_func(nbytes)
    go(group, 1, slice(row, row + 1))


def go(group, turn, rows=slice(None)):
    """Have the next calls go another way each turn, plain and divided; on all ranks between the same two calls."""
    start = at.CHOOSING + autotune.ROWS
    known = group.backend.context.words[start : at.MEMO].reshape(-1, autotune.ROW_WORDS)[rows]
    way = turn // 2 + turn % 2 * autotune.WAYS
    known[:] = 1 << 40
    known[:, autotune.CALLS], known[:, autotune.BEST], known[:, autotune.TIMES + way] = 4, way, 1


def helpers():
    return [thread for thread in threading.enumerate() if "-lane-" in thread.name]


def inputs(world_size, count, dtype=np.float32, salt=0):
    return [oracle.values(rank, count, np.dtype(dtype), salt) for rank in range(world_size)]


# ---- results -------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(("lanes", "count"), [(2, EDGE), (3, EDGE + 1009)])
def test_every_collective(rank, world_size, lanes, count):
    with group_of(lanes) as group:
        for turn in range(1, TURNS, 2):
            go(group, turn)
            before = divided(group)
            rows.run(rank, world_size, count, lambda name, function: partial(function, group=group))
            assert divided(group) - before >= 8


@pytest.mark.long
@pytest.mark.ranks(2)
def test_every_way_of_the_largest_moves(rank, world_size):
    every = oracle.values(0, autotune.LARGE // 4 + 1009, np.dtype("f4"))
    ways = autotune.staged_ways.py_func(every.nbytes, LAYOUT.slot, True).bit_count()
    with group_of(2) as group:
        for turn in range(1, 2 * ways, 2):
            go(group, turn)
            x = every + turn if rank == 1 else np.zeros_like(every)
            group.fast.broadcast(x, 1)
            oracle.assert_same(x, every + turn)
            outs = [np.zeros_like(every) for _ in range(2)]
            group.fast.all_gather(outs, every + rank)
            oracle.assert_same(outs[1 - rank], every + (1 - rank))
        assert divided(group) == 2 * ways


@pytest.mark.long
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", ["i1", "f2", "c16"])
def test_elements_of_other_sizes(rank, world_size, dtype):
    dtype = np.dtype(dtype)
    xs = inputs(world_size, (rounds.SMALLEST_DIVIDED + 999 * dtype.itemsize) // dtype.itemsize, dtype)
    with group_of(3) as group:
        for turn in range(TURNS):
            go(group, turn)
            x = xs[rank].copy()
            group.fast.all_reduce(x)
            oracle.assert_same(x, oracle.reduced(xs, ReduceOp.SUM))
        assert divided(group) == TURNS // 2


@pytest.mark.ranks(2, 3)
def test_records_of_an_odd_size_and_huge_ones(rank, world_size):
    xs = inputs(world_size, 200_003, oracle.RECORD)
    large = np.dtype((np.void, rounds.LARGEST_ITEM + 8))
    assert oracle.RECORD.itemsize % 8
    with group_of(3) as group:
        for turn in range(TURNS):
            go(group, turn)
            x = xs[rank].copy()
            group.fast.broadcast(x, turn % world_size)
            oracle.assert_same(x, xs[turn % world_size])
        assert divided(group) == TURNS // 2
        x = np.zeros(1200, large)
        for turn in range(TURNS):
            go(group, turn)
            x[:] = bytes([turn]) * large.itemsize if rank == 0 else b"\xff" * large.itemsize
            group.fast.broadcast(x, 0)
            assert (x.view(np.uint8) == turn).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT])
def test_lanes_do_not_change_a_bit(rank, world_size, op):
    xs = inputs(world_size, LARGE)
    results = []
    for number in (1, 2, 3):
        with group_of(number) as group:
            for turn in range(TURNS):
                go(group, turn)
                x = xs[rank].copy()
                group.fast.all_reduce(x, op)
                results.append(x.tobytes())
            assert (divided(group) > 0) == (number > 1)
    assert len(set(results)) == 1


@pytest.mark.ranks(2, 3)
def test_one_shot_and_two_shot(rank, world_size):
    xs = inputs(world_size, LARGE)
    total = oracle.reduced(xs, ReduceOp.SUM)
    with group_of(2) as group:
        for limit in (0, 1 << 40):
            group.fast.barrier()
            group.backend.context.go_one_shot(limit)
            divide_next(group, "all_reduce")
            for _ in range(3):
                x = xs[rank].copy()
                group.fast.all_reduce(x)
                oracle.assert_same(x, total)
        assert divided(group) == 6


@pytest.mark.long
@pytest.mark.ranks(2, 3)
def test_packed_arrays_and_calls_of_the_progress_thread(rank, world_size):
    xs = inputs(world_size, 2 * LARGE)
    total = oracle.reduced([x[::2] for x in xs], ReduceOp.SUM)
    with group_of(2) as group:
        group.fast.barrier()
        divide_next(group, "all_reduce")
        mine = [xs[rank].copy() for _ in range(2 * TURNS)]
        group.fast.all_reduce(mine[0][::2])
        assert divided(group) == 1
        works = [group.fast.all_reduce(x[::2], async_op=True) for x in mine[1:]]
        small = np.ones(3)
        group.fast.all_reduce(small)
        assert all(work.wait(60) for work in works)
        assert (small == world_size).all()
        for x in mine:
            oracle.assert_same(x[::2].copy(), total)
        assert divided(group) > 1


@pytest.mark.long
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sizes", [(LARGE, 5, 70), (EDGE, EDGE // 2 + 1, 1), (9 * EDGE, EDGE, 0)])
def test_ranks_that_differ_in_whether_to_divide(rank, world_size, sizes):
    """Each goes by the size that it gives; when they differ, the call is made anew, undivided."""
    xs = [oracle.values(r, sizes[r], np.dtype("f4")) for r in range(world_size)]
    with group_of(2) as group:
        for turn in range(MANY_TURNS):
            go(group, turn)
            outs = [np.zeros_like(x) for x in xs]
            group.fast.all_gather(outs, xs[rank])
            for got, want in zip(outs, xs, strict=True):
                oracle.assert_same(got, want)
        even = np.full(LARGE, rank + 1, "f4")
        divide_next(group, "all_reduce")
        group.fast.all_reduce(even)
        assert (even == world_size * (world_size + 1) / 2).all()
        assert divided(group) >= 1


@pytest.mark.ranks(2, 3)
def test_uneven_lists_over_lanes(rank, world_size):
    """Blocks of nothing, of less than a lane's share, and large ones, in one divided call."""
    sizes = [(0, LARGE, 5)[(2 * src + dst) % 3] for src in range(world_size) for dst in range(world_size)]
    table = np.array(sizes).reshape(world_size, world_size)
    data = [[oracle.values(10 * s + d, int(table[s, d]), np.dtype("f4")) for d in range(world_size)]
            for s in range(world_size)]  # fmt: skip
    with group_of(3) as group:
        group.fast.barrier()
        divide_next(group, "all_to_all", 4 * LARGE * world_size)
        for turn in range(3):
            outs = [np.zeros_like(data[src][rank]) for src in range(world_size)]
            group.fast.all_to_all(outs, data[rank])
            for src, got in enumerate(outs):
                oracle.assert_same(got, data[src][rank])
            assert divided(group) == turn + 1


@pytest.mark.ranks(2)
def test_undivided_calls_between_divided_ones(rank, world_size):
    """They use the same slots."""
    with group_of(2) as group:
        for turn in range(40):
            divide_next(group, "all_reduce")
            large, small = np.full(LARGE, rank + turn, "f4"), np.full(EDGE - 1, rank - turn, "f4")
            group.fast.all_reduce(large)
            group.fast.broadcast(small, turn % 2)
            assert (large == 2 * turn + 1).all()
            assert (small == turn % 2 - turn).all()
        assert divided(group) == 40


# ---- what is wrong ---------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
def test_a_mismatch_is_found_before_any_lane_hears_of_it(rank, world_size):
    wrong: list[Callable[[dist.ProcessGroup], object]] = [
        lambda group: group.fast.all_reduce(np.ones(LARGE if rank else 3, "f4")),
        lambda group: group.fast.all_reduce(np.ones(LARGE if rank else EDGE - 1, "f4")),
        lambda group: group.fast.all_reduce(np.ones(LARGE + rank, "f4")),
        lambda group: group.fast.all_reduce(np.ones(LARGE, "f4" if rank else "i4")),
        lambda group: group.fast.all_reduce(np.ones(LARGE, "f4"), ReduceOp.SUM if rank else ReduceOp.MAX),
        lambda group: group.fast.broadcast(np.ones(LARGE, "f4"), rank % 2),
        lambda group: group.fast.broadcast(np.ones(LARGE, "f4"), 0) if rank else group.fast.barrier(),
        lambda group: group.fast.all_gather(
            [np.zeros(LARGE + (rank == 0 < k), "f4") for k in range(world_size)], np.ones(LARGE, "f4")
        ),
    ]
    with group_of(2) as group:
        for call in wrong * 2:
            before = divided(group)
            for operation in ("all_reduce", "broadcast"):
                divide_next(group, operation)
            divide_next(group, "all_gather", 4 * LARGE * world_size)
            with pytest.raises(MismatchError):
                call(group)
            assert divided(group) == before
            x = np.full(LARGE, rank + 1.0, "f4")
            group.fast.all_reduce(x)
            assert (x == world_size * (world_size + 1) / 2).all()
            assert divided(group) == before + 1


@pytest.fixture
def dividing():
    """A group whose next all_reduce of LARGE elements is divided, and an array for it, which is left alone then."""
    with group_of(2) as group:
        group.fast.barrier()
        divide_next(group, "all_reduce")
        x = np.ones(LARGE, "f4")
        yield group, x
        assert_is_left_alone(x)


@contextmanager
def stalled(monkeypatch, then: Callable[[], object]) -> Iterator[None]:
    """This rank meets the others in a divided call, and then does something else before its lanes begin."""
    run = lanes.Lanes.run

    def late(self, *args):
        then()
        run(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(lanes.Lanes, "run", late)
        yield


def assert_is_left_alone(x):
    x[:] = 77
    time.sleep(0.2)  # nobody is waited for: whoever still wrote would have been seen
    assert (x == 77).all()


def until_there(path):
    while not path.exists():
        time.sleep(5e-3)


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_in_a_divided_call_is_named_at_the_deadline(
    rank, world_size, monkeypatch, tmp_path, dividing, late
):
    group, x = dividing
    if rank != late:
        group.timeout = 1.0  # only now, as to meet may take longer
    named = tmp_path / "named"
    error, text = (dist.AbortedError, "") if rank == late else (dist.CollectiveTimeoutError, "all_reduce.*")
    with (
        stalled(monkeypatch, lambda: until_there(named) if rank == late else None),
        pytest.raises(error, match=f"{text}rank {1 - rank}") as caught,
    ):
        group.fast.all_reduce(x)
    named.touch()
    assert rank == late or list(caught.value.ranks) == [late]


@pytest.mark.ranks(2)
def test_an_abort_ends_a_divided_call(rank, world_size, monkeypatch, tmp_path, dividing):
    group, x = dividing
    raised = tmp_path / "raised"

    def abort():
        thread = threading.Thread(target=group.abort, args=("tested",))
        thread.start()
        thread.join()
        until_there(raised)

    with (
        stalled(monkeypatch, abort if rank == 1 else lambda: None),
        pytest.raises(dist.AbortedError, match="tested"),
    ):
        group.fast.all_reduce(x)
    raised.touch()


@pytest.mark.ranks(2)
def test_closing_the_group_ends_a_divided_call_of_another_thread(
    rank, world_size, monkeypatch, tmp_path, dividing
):
    group, x = dividing
    closed = tmp_path / "closed"

    def close():
        while divided(group) == 0:
            time.sleep(1e-3)
        group.close()
        closed.touch()

    with stalled(monkeypatch, lambda: until_there(closed) if rank == 1 else None):
        error, _ = together(lambda: group.fast.all_reduce(x), close if rank == 0 else lambda: None)
    assert type(error) is dist.AbortedError
    assert rank == 1 or not helpers()


@pytest.mark.long
@pytest.mark.ranks(2, fresh=True)
def test_ctrl_c_in_a_divided_call(rank, world_size, monkeypatch, tmp_path, dividing):
    group, x = dividing
    interrupted = tmp_path / "interrupted"
    if rank == 1:
        with (
            stalled(monkeypatch, lambda: until_there(interrupted)),
            pytest.raises(dist.AbortedError, match="KeyboardInterrupt"),
        ):
            group.fast.all_reduce(x)
    else:

        def interrupt():
            while divided(group) == 0:
                time.sleep(1e-3)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            group.fast.all_reduce(x)
        interrupted.touch()
        thread.join()


def test_a_thread_that_begins_as_ctrl_c_comes_ends_with_its_group(monkeypatch):
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        raise KeyboardInterrupt

    helper = lanes._Helper("a-lane-1", None, None, None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            helper.start(None, ())
    assert helper.close(60)
    assert not helpers()


def test_a_thread_that_ctrl_c_has_kept_from_beginning_is_not_waited_for(monkeypatch):
    helper = lanes._Helper("a-lane-1", None, None, None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            helper.start(None, ())
    assert helper.close(60)


@pytest.mark.ranks(2)
def test_a_lane_whose_thread_fails_fails_the_group(rank, world_size, monkeypatch, dividing):
    group, x = dividing
    drive = lanes.drive

    def fail_in_a_lane(*args):
        if "-lane-" in threading.current_thread().name:
            raise MemoryError("tested")
        drive(*args)

    if rank == 1:
        monkeypatch.setattr(lanes, "drive", fail_in_a_lane)
    with pytest.raises(dist.AbortedError, match=r"MemoryError.*tested"):
        group.fast.all_reduce(x)


# ---- threads and numbers ---------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_threads_begin_with_the_first_divided_call_sleep_and_end_with_the_group(rank, world_size):
    assert not helpers()
    with group_of(3) as group:
        group.fast.all_reduce(np.ones(EDGE - 1, "f4"))
        group.fast.barrier()
        assert not helpers()
        divide_next(group, "all_reduce")
        group.fast.all_reduce(np.ones(LARGE, "f4"))
        assert len(helpers()) == 2
        assert all(thread.daemon for thread in helpers())
        before = sum(time.clock_gettime(time.pthread_getcpuclockid(t.ident)) for t in helpers())
        time.sleep(0.3)
        after = sum(time.clock_gettime(time.pthread_getcpuclockid(t.ident)) for t in helpers())
        assert after - before < 0.1
    assert not helpers()


@pytest.mark.ranks(2, fresh=True)
def test_a_child_of_fork_has_no_lanes_and_the_parent_keeps_its_own(rank, world_size, dividing):
    group, x = dividing
    group.fast.all_reduce(x)
    child = os.fork()
    if child == 0:
        try:
            group.fast.all_reduce(x)
        except dist.FastcollError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    group.fast.all_reduce(x)
    assert (x == 4).all()
    assert divided(group) == 2


@pytest.mark.ranks(2)
def test_without_cores_for_them_there_are_none(rank, world_size):
    one = sorted(os.sched_getaffinity(0))[:1]
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, one)
    try:
        group = dist.new_group()
    finally:
        os.sched_setaffinity(0, before)
    assert group.backend.context[at.LANES] == 1
    group.close()


@pytest.mark.parametrize(
    ("masks", "wanted", "share", "lanes"),
    [
        ([0xFF, 0xFF], [0, 0], 4, 4),
        ([0xFF, 0xFF], [0, 0], 3, 3),
        ([0xFFFF, 0xFFFF], [0, 0], 8, 4),
        ([0b11, 0b11], [0, 0], 1, 1),
        ([0b0011, 0b1100], [0, 0], 2, 2),
        ([0b0011, 0b0011], [0, 0], 2, 1),  # others have more, these two have one each
        ([0b1, 0b1111_1110], [0, 0], 4, 1),
        ([0b0011, 0b1111], [0, 0], 2, 2),
        ([0b11, 0b11], [2, 2], 1, 2),
        ([0b11, 0b11], [3, 0], 1, 1),
        ([0xFF, 0xFF], [1, 0], 4, 1),
        ([0xFF, 0xFF], [3, 0], 4, 3),
    ],
)
def test_how_many_lanes_there_are(masks, wanted, share, lanes):
    assert lanes_for(LAYOUT, masks, wanted, share) == lanes


def test_a_single_rank_and_slots_that_are_too_small_have_no_lanes():
    assert lanes_for(layout.plan(1, 4 << 20), [0xFF], [0], 8) == 1
    assert lanes_for(layout.plan(2, 1 << 17), [0xFF] * 2, [4, 4], 4) == 1
    assert lanes_for(layout.plan(8, 4 << 20), [0xFFFF] * 8, [0] * 8, 2) == 2
    assert lanes_for(layout.plan(64, 4 << 20), [0xFFFF] * 64, [4] * 64, 2) == 1


@pytest.mark.parametrize("size", [1, 2, 8, 9, 17])
@pytest.mark.parametrize("lanes", range(2, layout.MAX_LANES + 1))
def test_lanes_have_their_own_control_words_and_slots(size, lanes):
    plan = layout.plan(size, 4 << 20)
    assert layout.LANES >= layout.REASON + layout.REASON_BYTES
    assert layout.LANES + layout.MAX_LANES * layout.LANE_CONTROL <= layout.CONTROL
    assert layout.CONSUMED + layout.LINE <= layout.LANE_CONTROL
    starts = [plan.lane_slots_at(lane, lanes) for lane in range(lanes)]
    nbytes = layout.SLOTS * plan.lane_slot(lanes)
    assert starts[0] == layout.CONTROL
    assert all(b - a >= nbytes for a, b in pairwise(starts))
    assert starts[-1] + nbytes <= plan.rings_at
    assert plan.lane_slot(lanes) % 64 == 0


@pytest.mark.parametrize("text", ["5", "-1", "two"])
def test_a_number_of_lanes_that_cannot_be_is_refused(monkeypatch, text):
    monkeypatch.setenv("FASTCOLL_LANES", text)
    config.forget()
    with pytest.raises(dist.UsageError, match="FASTCOLL_LANES"):
        config.get("FASTCOLL_LANES")
    config.forget()
