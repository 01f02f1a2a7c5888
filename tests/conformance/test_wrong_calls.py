"""Calls that do not match across ranks: refused on every rank, named, and the group stays usable."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
from interrupts import interrupted

import fastcoll as dist
from fastcoll import ArrayError, MismatchError, ReduceOp, UsageError


def f4(n):
    return np.ones(n, "f4")


def usable(rank, world_size):
    x = np.array([rank + 1.0])
    dist.all_reduce(x)
    assert x[0] == world_size * (world_size + 1) / 2


def may_run_ahead():
    return dist.group.WORLD.backend.name not in ("shm", "mpi")


def mismatch(call):
    """Return the error text of a call that does not match.

    Over TCP the call may return without waiting for peers; then it is the next call that raises.
    """
    if not may_run_ahead():
        with pytest.raises(MismatchError) as caught:
            call()
        dist.barrier()
        return str(caught.value)
    texts = []
    for each in (call, dist.barrier):
        try:
            each()
        except MismatchError as error:
            texts.append(str(error))
    assert len(texts) == 1, texts
    return texts[0]


def reducing(x, *op):
    return lambda: dist.all_reduce(x, *op)


def custom(function):
    return reducing(f4(2), ReduceOp.custom(function, "f"))


# name -> what the odd rank does, what the others do, what every message must show
MISMATCHES = {
    "operation": (lambda: dist.barrier(), reducing(f4(3)), ("barrier()", "all_reduce(float32, 3")),
    "dtype": (reducing(np.ones(3)), reducing(f4(6)), ("float64", "float32")),
    "count": (reducing(f4(4)), reducing(f4(5)), ("4 elements", "5 elements")),
    "large count": (reducing(f4(400_000)), reducing(f4(5)), ("400000 el", "5 el")),
    "root": (lambda: dist.broadcast(f4(2), 1), lambda: dist.broadcast(f4(2), 0), ("root=1", "root=0")),
    "reduce op": (reducing(f4(2), ReduceOp.MAX), reducing(f4(2), ReduceOp.MIN), ("op=MAX", "op=MIN")),
    # Functions of one name that differ in a constant; tests/core/test_reduce_op.py has more that differ.
    "custom": (custom(lambda a, b: a + 2 * b), custom(lambda a, b: a + 3 * b), ("op=custom",)),
    "names of fields": (
        lambda: dist.broadcast(np.zeros(2, [("f8", "i4")]), 0),
        lambda: dist.broadcast(np.zeros(2, [("f40", "i4")]), 0),
        ("another dtype",),
    ),
    "parts of a coalesced call": (
        lambda: dist.all_reduce_coalesced([f4(2), f4(3)]),
        lambda: dist.all_reduce_coalesced([f4(3), f4(2)]),
        ("all_reduce_coalesced(float32, 5 elements", "arrays of checksum 0x"),
    ),
    "broadcast size": (lambda: dist.broadcast(f4(2), 0), lambda: dist.broadcast(f4(3), 0), ("2 el", "3 el")),
    "reduce": (lambda: dist.reduce(f4(2), 0), lambda: dist.reduce(f4(2), 1), ("root=0", "root=1")),
    "barriers": (lambda: dist.monitored_barrier(), lambda: dist.barrier(), ("called monitored_barrier()",)),
    "scan": (lambda: dist.scan(f4(2)), lambda: dist.exscan(f4(2)), ("scan(", "exscan(")),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", MISMATCHES)
def test_both_calls_are_named_on_every_rank(rank, world_size, name):
    odd, usual, shown = MISMATCHES[name]
    for strange in range(world_size):
        text = mismatch(odd if rank == strange else usual)
        for part in (*shown, f"rank {strange} called"):
            assert part in text
    usable(rank, world_size)


@pytest.mark.ranks(3)
def test_ranks_of_a_group_are_named_by_their_global_ranks(rank, world_size):
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    outputs = [np.zeros(1), np.zeros(1)]
    wrong = {
        r"called broadcast\(float64, \d elements, root=2\); .*root=2\)": (dist.broadcast, np.zeros(rank), 2),
        r"must be None or empty on rank 2; only the root \(rank 1\) gives it": (
            dist.gather,
            np.zeros(1),
            outputs,
            1,
        ),
        r"gather_list is None on the root \(rank 1\)": (dist.gather, np.zeros(1), None, 1),
    }
    for text, (call, *arguments) in wrong.items():
        with pytest.raises(UsageError, match=text):
            both(call, dist.barrier, arguments, group)


def both(call, then, arguments, group):
    """Make two calls; over TCP, a call that does not match may return, and the next one raises."""
    call(*arguments, group=group)
    then(group)


@pytest.mark.ranks(2)
def test_equal_dtypes_of_records_match(rank, world_size):
    plain = np.dtype([("a", "f4"), ("b", "i4", (2,)), ("c", [("d", ">i2")])])
    same = [
        np.dtype((np.record, plain)),
        np.dtype([("a", np.dtype("f4", metadata={"unit": "m"})), ("b", "i4", (2,)), ("c", [("d", ">i2")])]),
        np.dtype(
            {"names": plain.names, "formats": ["f4", ("i4", (2,)), [("d", ">i2")]], "offsets": [0, 4, 12]}
        ),
    ]
    for dtype in same:
        assert dtype == plain
        x = np.zeros(3, plain if rank == 0 else dtype)
        x["a"] = 5 - rank
        dist.broadcast(x, 0)
        assert (x["a"] == 5).all()
    aligned = np.dtype([("a", "f4"), ("b", "i8")], align=True)
    assert "another dtype" in mismatch(
        lambda: dist.broadcast(np.zeros(1, aligned if rank else [("a", "f4"), ("b", "i8"), ("c", "i4")]), 0)
    )


@pytest.mark.ranks(2, 3)
def test_nothing_moves_before_a_mismatch_is_raised(rank, world_size):
    x = np.full(5, rank, "f4")
    with pytest.raises(MismatchError):
        dist.broadcast(x, 0 if rank == 0 else 1)
    np.testing.assert_array_equal(x, np.full(5, rank, "f4"))
    scaled = np.full(3 + rank, 2.0)
    with pytest.raises(MismatchError):
        dist.all_reduce(scaled, ReduceOp.PREMUL_SUM(10.0))
    assert (scaled == 2).all()


@pytest.mark.ranks(2, 3, 4)
def test_sizes_that_differ_are_named_by_pair_of_ranks(rank, world_size):
    outs = [np.zeros(r + 1 + (rank == 1 and r == 0), "f4") for r in range(world_size)]
    with pytest.raises(MismatchError, match="rank 0 sends 4 bytes to rank 1, which expects 8"):
        dist.all_gather(outs, np.zeros(rank + 1, "f4"))
    outs = [np.zeros(3, "f4") for _ in range(world_size)] if rank == 0 else None
    with pytest.raises(MismatchError, match="rank 1 sends 16 bytes to rank 0, which expects 12"):
        dist.gather(np.zeros(4 if rank == 1 else 3, "f4"), outs, 0)
    blocks = [np.zeros(2, "f4") for _ in range(world_size)]
    outs = [np.zeros(2 + (rank == 1 and r == 0), "f4") for r in range(world_size)]
    with pytest.raises(MismatchError, match="rank 0 sends 8 bytes to rank 1, which expects 12"):
        dist.all_to_all(outs, blocks)
    usable(rank, world_size)


@pytest.mark.ranks(2, 3, 4)
def test_ranks_that_cut_an_array_in_different_ways_are_named(rank, world_size):
    usual = [3, *[2] * (world_size - 1)]
    for other in ([2, 3], [1, 4]):
        sizes = [*other, *usual[2:]] if rank == 1 else usual
        kept = np.zeros(sizes[rank], "f4")
        with pytest.raises(MismatchError) as caught:
            dist.reduce_scatter_tensor(kept, f4(sum(usual)), input_split_sizes=sizes)
        expected = (
            f"reduce_scatter: rank 1 gives {4 * other[0]} bytes for rank 0, expected 12 as rank 0 gives; give blocks "
            "of the same sizes on all ranks"
        )
        assert expected in str(caught.value)
        assert not kept.any()
    even = [2] * world_size  # cut so by one rank alone
    sizes = even if rank else [1, 3, *even[2:]]
    with pytest.raises(MismatchError, match="rank 1 gives 8 bytes for rank 0, expected 4 as rank 0 gives"):
        dist.reduce_scatter_tensor(f4(sizes[rank]), f4(2 * world_size), input_split_sizes=sizes)
    usable(rank, world_size)


@pytest.mark.ranks(2)
def test_wrong_arguments_are_refused_before_the_call_is_published(rank, world_size):
    two, cut = [f4(2), f4(2)], dist.all_to_all_single

    def parted(out, x, sizes):
        dist.reduce_scatter_tensor(out, x, input_split_sizes=sizes)

    wrong = [
        (lambda: dist.all_reduce([1.0, 2.0]), ArrayError, "tensor[0] must be an array, got float"),
        (lambda: dist.all_reduce(None), ArrayError, "None"),
        (lambda: dist.all_reduce(np.array(["a"], object)), ArrayError, "object"),
        (lambda: dist.all_reduce(np.array(["a", "b"])), ArrayError, "U1"),
        (lambda: dist.all_reduce(np.ones(3, "c8"), ReduceOp.MIN), ArrayError, "complex64"),
        (lambda: dist.all_reduce(f4(3), ReduceOp.BAND), ArrayError, "float32"),
        *(
            (
                lambda op=op: dist.all_reduce(np.ones(2, "c8"), op),
                ArrayError,
                f"{op.name} is not defined for dtype c",
            )
            for op in (ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR)
        ),
        (lambda: dist.all_reduce(np.ones(3, ">f4")), ArrayError, "byte order"),
        (lambda: dist.all_reduce(np.ones(3, "i4"), ReduceOp.PREMUL_SUM(2)), ArrayError, "PREMUL_SUM"),
        (lambda: dist.all_reduce(f4(3), ReduceOp.PREMUL_SUM(1j)), UsageError, "give a real number"),
        (lambda: dist.all_reduce(f4(3), ReduceOp.PREMUL_SUM(10**400)), UsageError, "no number of float32"),
        (lambda: dist.all_reduce(np.ones(3, "M8[s]"), ReduceOp.PREMUL_SUM(2)), ArrayError, "PREMUL_SUM"),
        (lambda: dist.all_reduce(f4(3), "sum"), UsageError, "ReduceOp"),
        (lambda: dist.broadcast(f4(3), 2), UsageError, "src is 2; the group WORLD has ranks 0..1"),
        (lambda: dist.broadcast(f4(3), -1), UsageError, "src is -1"),
        (lambda: dist.reduce(f4(3), 2), UsageError, "dst is 2"),
        (lambda: dist.all_gather([f4(3)], f4(3)), UsageError, "tensor_list must have 2"),
        (lambda: dist.all_gather([f4(3), f4(4)][:: 1 - 2 * rank], f4(3 + 2)), UsageError, "same dtype"),
        (lambda: dist.all_gather_into_tensor(f4(5), f4(3)), UsageError, "output_tensor (float32"),
        (lambda: dist.all_to_all([f4(3)], two), UsageError, "output_tensor_list must have 2"),
        (lambda: dist.all_to_all(two, None), UsageError, "input_tensor_list must be a list"),
        (lambda: dist.reduce_scatter_tensor(f4(3), f4(7)), UsageError, "6 elements"),
        (lambda: dist.reduce_scatter(f4(3), two), UsageError, "same dtype"),
        (lambda: parted(f4(2), f4(4), [2, 3]), UsageError, "input_split_sizes is [2, 3]; expected 2 sizes"),
        (lambda: parted(f4(2), f4(4), [4]), UsageError, "input_split_sizes is [4]; expected 2 sizes"),
        (lambda: parted(f4(2), f4(4), [-1, 5]), UsageError, "add up to the 4 rows of input"),
        (lambda: parted(f4(2), f4(4), [2.0, 2.0]), UsageError, "input_split_sizes[0] is 2.0, a float"),
        (lambda: parted(f4(3), f4(4), [2, 2]), UsageError, "output (float32, shape (3,)) and input part"),
        (lambda: dist.reduce_scatter(f4(2), [f4(2), np.ones(2, "i4")][:: 1 - 2 * rank]), ArrayError, "int32"),
        (
            lambda: dist.all_gather_coalesced([two, [f4(3), f4(3)]], [f4(3), f4(2)]),
            UsageError,
            "same dtype and n",
        ),
        (lambda: dist.all_gather_coalesced(None, two), UsageError, "output_tensor_lists must be a list of 2"),
        (lambda: dist.all_gather_coalesced([two], f4(2)), UsageError, "input_tensor_list is of type"),
        (lambda: dist.all_reduce_coalesced(f4(3)), UsageError, "tensors is of type"),
        (lambda: dist.all_reduce_coalesced([]), UsageError, "tensors is empty"),
        (lambda: dist.broadcast(f4(2), 0.0), UsageError, "integer"),
        (lambda: dist.all_to_all_single(f4(3), f4(3)), UsageError, "split_sizes"),
        (lambda: dist.all_to_all_single(f4(4), f4(4), [1, 2], [2, 2]), UsageError, "add up to"),
        (lambda: cut(f4(4), f4(4), [2.9, 2.9], [2, 2]), UsageError, "output_split_sizes[0] is"),
        (lambda: cut(f4(4), f4(4), [2, 2], [2.0, 2.0]), UsageError, "input_split_sizes[0] is"),
        (lambda: cut(f4(4), f4(4), "ab"), UsageError, "output_split_sizes[0] is 'a'"),
        (lambda: cut(f4(4), f4(4), 5), UsageError, "output_split_sizes is 5"),
        (lambda: cut(f4(4), f4(4), [None, 4]), UsageError, "output_split_sizes[0] is None"),
        (lambda: dist.all_to_all_single(f4(4), np.ones(4)), ArrayError, "float64"),
        (lambda: dist.gather(f4(2), None if rank == 0 else two, 0), UsageError, "gather_list"),
        (lambda: dist.gather_single(f4(2), None if rank == 0 else f4(4)), UsageError, "gather_tensor"),
        (lambda: dist.gather_single(f4(2), f4(3 + rank)), UsageError, "gather_tensor"),
        (lambda: dist.scatter_single(f4(2), f4(3 + rank)), UsageError, "scatter_tensor"),
        (lambda: dist.scatter(f4(2), None if rank == 0 else two, 0), UsageError, "scatter_list"),
        (lambda: dist.send(f4(2), 5), UsageError, "0..1"),
        (lambda: dist.send(f4(2), 0, tag=-1), UsageError, "tag"),
        (lambda: dist.recv(f4(2), 1, tag="a"), UsageError, "integer"),
        (lambda: dist.send(f4(2), "1"), UsageError, "integer"),
    ]
    for number, (call, kind, text) in enumerate(wrong):
        with pytest.raises(kind) as caught:
            call()
        assert text in str(caught.value), (number, str(caught.value))
    if rank == 1:  # a refused message is no call of another rank's
        with pytest.raises(UsageError):
            dist.send(f4(2), 7)
    usable(rank, world_size)


@pytest.mark.ranks(3, 5)
def test_monitored_barrier_names_all_missing_ranks(rank, world_size):
    """All others are missing, because on a busy machine no rank is sure to arrive in time."""
    group = dist.new_group()
    dist.barrier(group)
    if rank == 1:
        with pytest.raises(dist.CollectiveTimeoutError, match=r"monitored_barrier\(\), call") as caught:
            dist.monitored_barrier(group, timeout=0.2)
        missing = {*range(world_size)} - {1}
        assert set(caught.value.ranks) == missing
        assert all(f"rank {other} (pid" in str(caught.value) for other in missing), caught.value
    dist.barrier()


# name -> arguments that are refused, right ones, and what all ranks must read
REFUSED = {
    "all_gather": (
        lambda n: ([f4(2)], f4(2)),
        lambda n: ([f4(2) for _ in range(n)], f4(2)),
        r"UsageError: tensor_list must have \d arrays",
    ),
    "all_reduce": (
        lambda n: ([1.0],),
        lambda n: (f4(1),),
        r"ArrayError: tensor\[0\] must be an array, got float",
    ),
    "broadcast": (lambda n: (f4(2), n), lambda n: (f4(2), 0), r"UsageError: src is \d; "),
    "gather": (
        lambda n: (f4(2), None, 0, None, False, 0),
        lambda n: (f4(2), None if dist.get_rank() else [f4(2) for _ in range(n)]),
        "UsageError: dst=0 and group_dst=0 are both given",
    ),
    "barrier": (lambda n: (None, False, [0]), lambda n: (), r"UsageError: device_ids is \[0\]"),
    "monitored_barrier": (lambda n: (None, -1), lambda n: (None, 60), "UsageError: timeout"),
    "all_reduce_coalesced": (
        lambda n: ([f4(2), np.ones(2)],),
        lambda n: ([f4(2), f4(2)],),
        r"ArrayError: tensors\[1\] is float64",
    ),
    "all_to_all_single": (
        lambda n: (f4(n), f4(n), [1.5] * n),
        lambda n: (f4(n), f4(n)),
        r"UsageError: output_split_sizes\[0\]",
    ),
    "broadcast_object_list": (lambda n: (("a",),), lambda n: (["a"],), "UsageError: object_list is a tuple"),
    "all_gather_object": (
        lambda n: ([], 1),
        lambda n: ([None] * n, 1),
        "UsageError: object_list is a list of 0",
    ),
}


@pytest.mark.long
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_one_rank_refuses_raises_on_all_ranks(rank, world_size, name):
    wrong, right, reason = REFUSED[name]
    call = getattr(dist, name)
    for odd in range(world_size):
        if rank == odd:
            with pytest.raises(UsageError, match="^" + reason.partition(": ")[2]):
                call(*wrong(world_size))
            dist.barrier()
        else:
            text = mismatch(lambda: call(*right(world_size)))
            assert re.match(f"rank {odd}'s {name} was refused: {reason}", text)
            assert "called" in text
        usable(rank, world_size)


@pytest.mark.ranks(2, 3)
def test_refused_calls_keep_their_place_among_asynchronous_ones(rank, world_size):
    xs = [np.full(1000, rank + 1.0) for _ in range(6)]
    works = []
    for number, x in enumerate(xs):
        if (number, rank) in ((2, 0), (3, 1)):
            with pytest.raises(UsageError, match="ReduceOp"):
                dist.all_reduce(x, "sum", async_op=True)
        else:
            works.append((number, dist.all_reduce(x, async_op=True)))
    for number, work in works:
        if number in (2, 3):
            with pytest.raises(MismatchError, match=f"^rank {number - 2}'s all_reduce was refused"):
                work.wait()
        else:
            work.wait()
            assert (xs[number] == world_size * (world_size + 1) / 2).all()
    usable(rank, world_size)


@pytest.mark.ranks(2)
def test_an_error_of_the_array_itself_raises_on_all_ranks(rank, world_size):
    class Broken:
        def __dlpack__(self, **_):
            raise RuntimeError("the lens is dirty")

        def __dlpack_device__(self):
            return (1, 0)

    if rank == 1:
        with pytest.raises(Exception, match="the lens is dirty"):
            dist.all_reduce(Broken())
    else:
        with pytest.raises(MismatchError, match=r"rank 1's all_reduce was refused: .*the lens is dirty"):
            dist.all_reduce(f4(2))
    usable(rank, world_size)


@pytest.mark.ranks(3)
def test_the_refusals_of_several_ranks_are_all_named(rank, world_size):
    if rank == 2:
        with pytest.raises(MismatchError) as caught:
            dist.all_reduce(f4(2))
        for text in (
            "rank 0's barrier was refused",
            "rank 1's scan was refused",
            "rank 2 called all_reduce(",
        ):
            assert text in str(caught.value)
    else:
        with pytest.raises(UsageError):
            dist.barrier(device_ids=[1]) if rank == 0 else dist.scan(None)
    usable(rank, world_size)


@pytest.mark.ranks(2)
def test_a_call_that_a_callback_may_not_make_raises_on_all_ranks(rank, world_size):
    ended = threading.Event()

    def back(work):
        dist.all_reduce(f4(1), async_op=True)  # so that something is ahead of the next one
        try:
            dist.all_reduce(f4(2))
        except UsageError:
            ended.set()

    if rank == 1:
        attached = threading.Event()  # on a Work that is complete by now it would be called here
        dist.group.WORLD.gate.queue.submit("holding what follows", attached.wait)
        dist.barrier(async_op=True).add_done_callback(back)
        attached.set()
        assert ended.wait(60)
    else:
        dist.barrier()
        dist.all_reduce(f4(1))
        with pytest.raises(MismatchError, match=r"rank 1's all_reduce was refused: UsageError: .*callback"):
            dist.all_reduce(f4(2))
    usable(rank, world_size)


@pytest.mark.ranks(2)
def test_every_layout_works_or_is_refused(rank, world_size):
    base = np.zeros((4, 6), "f4")
    base[:] = rank + 1
    for view in (base[::2], base[:, ::3], base.T, base[1:3, 1:4], np.asfortranarray(base), base[::-1]):
        before = base.copy()
        dist.all_reduce(view)
        assert (view == before.flat[0] * 0 + 3).all()
        base[:] = rank + 1
    canvas = np.zeros((2, 8), "i4")
    dist.all_gather([canvas[0, ::2], canvas[1, ::2]], np.full(4, rank + 1, "i4"))
    np.testing.assert_array_equal(canvas[:, ::2], [[1] * 4, [2] * 4])
    assert not canvas[:, 1::2].any()
    scalar = np.array(rank + 1.0)
    dist.all_reduce(scalar)
    assert scalar == 3
    dist.all_reduce(np.zeros((0, 3)))
    frozen = np.ones(3)
    frozen.flags.writeable = False
    with pytest.raises(ArrayError, match="read-only"):
        dist.all_reduce(frozen)
    dist.all_gather([np.zeros(3), np.zeros(3)], frozen)  # an input may be read-only
    with pytest.raises(ArrayError):
        dist.all_reduce(np.broadcast_to(np.ones(1), (4,)))
    usable(rank, world_size)


@pytest.mark.ranks(1, 2, 3)
def test_overlapping_arrays_give_the_right_result(rank, world_size):
    n = 100_000
    for _ in range(2):  # the first call prepares the second
        buffer = np.arange(world_size * n + 7, dtype="f8")
        dist.reduce_scatter_tensor(buffer[7 : 7 + n], buffer[: world_size * n])
        want = world_size * np.arange(rank * n, (rank + 1) * n)
        np.testing.assert_array_equal(buffer[7 : 7 + n], want)
        buffer = np.arange(world_size * n + 100, dtype="f8") + rank
        dist.all_gather_into_tensor(buffer[: world_size * n], buffer[100 : 100 + n])
        want = np.concatenate([np.arange(100, 100 + n) + r for r in range(world_size)])
        np.testing.assert_array_equal(buffer[: world_size * n], want)
        buffer = np.arange(world_size * n + 1, dtype="f8") + 0.25 * rank
        dist.all_to_all_single(buffer[1:], buffer[:-1])
        want = np.concatenate([np.arange(rank * n, (rank + 1) * n) + 0.25 * r for r in range(world_size)])
        np.testing.assert_array_equal(buffer[1:], want)


@pytest.mark.ranks(1, 2)
def test_a_closed_or_failed_group_raises_every_time(rank, world_size):
    x = np.ones(3)
    closed, failed = dist.new_group(), dist.new_group()
    for group in (closed, failed):
        dist.all_reduce(x, group=group)
    closed.close()
    failed.abort("tested")
    for _ in range(10):
        with pytest.raises(dist.NotInitializedError):
            closed.all_reduce(x)
        with pytest.raises(dist.AbortedError, match="tested"):
            failed.all_reduce(x)
    failed.close()
    failed.abort("closing twice, then aborting, is nothing")


@pytest.mark.ranks(2)
def test_a_long_call_returns_for_ctrl_c(rank, world_size):
    """The kernel computes for long: a custom operation that would take tens of seconds.

    Elements that are not reduced show that no rank has finished the call.
    """
    op = ReduceOp.custom(slow)
    dist.all_reduce(np.ones(8), op)
    group, x = dist.new_group(), np.ones(8_000_000)
    if rank == 0:
        with pytest.raises(KeyboardInterrupt), interrupted(group):
            group.all_reduce(x, op)
    else:
        with pytest.raises(dist.AbortedError):
            group.all_reduce(x, op)
    assert (x == 1).any()
    with pytest.raises(dist.AbortedError, match="KeyboardInterrupt"):
        group.barrier()
    group.close()


def slow(a, b):
    for _ in range(1000):
        a = a + b / (a + 1)
    return a


@pytest.mark.ranks(2, 3)
def test_outputs_that_share_memory_are_refused(rank, world_size):
    """Also elements of one array that share memory. Arrays whose elements only interleave are accepted."""
    n, x, root = world_size, np.full(2, rank + 1.0), world_size - 1
    y, wide = np.zeros(2), np.zeros(2 * world_size + 1)
    same = [y] * n
    shifted = [wide[2 * k : 2 * k + 3] for k in range(n)]
    strided = [wide[k : k + 4 : 2] for k in range(0, 2 * n, 2)]
    blocks = [x.copy() for _ in range(n)]
    others = [np.zeros(2) for _ in range(n)]
    first = r"tensor_list\[0\] and tensor_list\[1\] share memory"
    each = r"_lists\[0\]\[(\d)\] and .*_lists\[1\]\[\1\]"
    for text, call in (
        (first, lambda: dist.all_gather(same, x)),
        (first, lambda: dist.all_gather(shifted, np.ones(3))),
        (first, lambda: dist.all_gather(strided, x)),
        ("output_tensor_list.*share", lambda: dist.all_to_all(same, blocks)),
        (
            r"tensors\[1\] and tensors\[3\] share",
            lambda: dist.all_reduce_coalesced([x, wide[:2], x, wide[1:3]]),
        ),
        (each, lambda: dist.all_gather_coalesced([others] * 2, [x, x])),
        ("gather_list.*share", lambda: dist.gather(x, same if rank == root else None, root)),
    ):
        for _ in range(2):  # also as a call that was seen before
            refused_here = rank == root or not text.startswith("gather")
            with pytest.raises(ArrayError if refused_here else MismatchError, match=text):
                call()
    assert not y.any()
    assert not wide.any()
    columns = np.zeros((2, n))
    dist.all_gather([columns[:, k] for k in range(n)], x)
    assert (columns == np.arange(n) + 1.0).all()
    dist.all_gather([np.zeros(0)] * n, np.zeros(0))  # no element is shared
    woven = np.zeros(100)  # the second lies between the others
    with pytest.raises(ArrayError, match=r"tensors\[0\] and tensors\[2\] share"):
        dist.all_reduce_coalesced([woven[::2], woven[1::2], woven[40:44:2]])
    many = np.zeros((20, 3))
    dist.all_reduce_coalesced([many[k] for k in np.random.default_rng(1).permutation(20)])
    with pytest.raises(ArrayError, match=r"tensors\[4\] and tensors\[19\] share"):
        dist.all_reduce_coalesced([many[k] if k != 4 else many[19, 1:] for k in range(20)])
    dist.barrier()
