"""all_reduce, reduce, reduce_scatter, scan and exscan: every dtype, operation and odd count against NumPy."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from oracle import assert_reduced, assert_same, cases, reduced, truths, values

import fastcoll as dist
from fastcoll import ReduceOp

WORLDS = (1, 2, 3, 4, 5, 8)
# More than one chunk of a slot, not a multiple of anything.
LARGE = 300_007


def everyone(world_size, count, dtype, salt=0):
    return [values(rank, count, dtype, salt) for rank in range(world_size)]


@pytest.mark.ranks(*WORLDS)
def test_all_reduce(rank, world_size):
    for dtype, op, count in cases(world_size):
        inputs = everyone(world_size, count, dtype)
        x = inputs[rank].copy()
        dist.all_reduce(x, op)
        assert_reduced(x, reduced(inputs, op), (dtype, op, count))


@pytest.mark.ranks(*WORLDS)
def test_reduce(rank, world_size):
    for number, (dtype, op, count) in enumerate(cases(world_size)):
        root = number % world_size
        inputs = everyone(world_size, count, dtype)
        x = inputs[rank].copy()
        dist.reduce(x, root, op)
        assert_reduced(x, reduced(inputs, op) if rank == root else inputs[rank], (dtype, op, count, root))


@pytest.mark.ranks(*WORLDS)
def test_scan_and_exscan(rank, world_size):
    for dtype, op, count in cases(world_size):
        inputs = everyone(world_size, count, dtype)
        x, y = inputs[rank].copy(), inputs[rank].copy()
        dist.scan(x, op)  # an average divides by the number of ranks up to this one
        assert_reduced(x, reduced(inputs[: rank + 1], op), (dtype, op, count))
        dist.exscan(y, op)
        assert_reduced(y, reduced(inputs[:rank], op) if rank else inputs[0], (dtype, op, count))


@pytest.mark.ranks(3)
def test_averages_up_to_each_rank_of_large_arrays(rank, world_size):
    inputs = everyone(world_size, LARGE, np.dtype("f4"))
    x, y = inputs[rank].copy(), inputs[rank].copy()
    dist.scan(x, ReduceOp.AVG)
    dist.exscan(y, ReduceOp.AVG)
    assert_reduced(x, reduced(inputs[: rank + 1], ReduceOp.AVG))
    assert_reduced(y, reduced(inputs[:rank], ReduceOp.AVG) if rank else inputs[0])


@pytest.mark.ranks(*WORLDS)
def test_truth_values(rank, world_size):
    """Every element but 0 is true; one rank's array alone is not changed."""
    for dtype in oracle.DTYPES:
        if dtype in oracle.COMPLEX:
            continue
        inputs = [truths(r, 13 * world_size, dtype) for r in range(world_size)]
        for op in oracle.LOGICAL:
            want = reduced(inputs, op)
            x, y, z, part = inputs[rank].copy(), inputs[rank].copy(), inputs[rank].copy(), np.zeros(13, dtype)
            dist.all_reduce(x, op)
            assert_same(x, want, (dtype, op))
            dist.reduce(y, 0, op)
            assert_same(y, inputs[rank] if rank else want, (dtype, op))
            dist.scan(z, op)
            assert_same(z, reduced(inputs[: rank + 1], op), (dtype, op))
            dist.reduce_scatter_single(part, inputs[rank], op)
            assert_same(part, want.reshape(world_size, 13)[rank], (dtype, op))


@pytest.mark.ranks(*WORLDS)
def test_reduce_scatter_single(rank, world_size):
    for dtype, op, count in cases(world_size):
        inputs = everyone(world_size, count * world_size, dtype)
        out = np.zeros(count, dtype)
        dist.reduce_scatter_single(out, inputs[rank], op)
        want = reduced(inputs, op).reshape(world_size, count)[rank]
        assert_reduced(out, want, (dtype, op, count))


def splits(n):
    """Sizes of parts for n ranks: primes, none between others, all on one rank, and none at all."""
    yield [2, 3, 5, 7, 11, 13, 17, 19][:n]
    yield [31 * (rank % 2) for rank in range(n)]
    for owner in {0, n - 1}:
        yield [97 if rank == owner else 0 for rank in range(n)]
    yield [0] * n


@pytest.mark.ranks(*WORLDS)
def test_reduce_scatter_into_parts_of_the_given_sizes(rank, world_size):
    several = list(splits(world_size))
    for first, dtype in enumerate(oracle.DTYPES):
        for second, op in enumerate(oracle.ops_for(dtype)):
            for sizes in several[(first + second) % 3 :: 3]:
                inputs = everyone(world_size, sum(sizes), dtype)
                out = np.zeros(sizes[rank], dtype)
                dist.reduce_scatter_single(out, inputs[rank], op, input_split_sizes=tuple(sizes))
                start = sum(sizes[:rank])
                want = reduced(inputs, op)[start : start + sizes[rank]]
                assert_reduced(out, want, (dtype, op, sizes))


@pytest.mark.ranks(2, 3)
def test_parts_are_rows_of_an_array_of_any_layout(rank, world_size):
    sizes = np.arange(world_size) + 1
    inputs = [x.reshape(-1, 4) for x in everyone(world_size, 4 * int(sizes.sum()), np.dtype("f4"))]
    want = np.split(reduced(inputs, ReduceOp.SUM), np.cumsum(sizes))[rank]
    for x in (inputs[rank], np.asfortranarray(inputs[rank])):
        for asynchronous in (False, True):
            out = np.zeros((len(want), 8), "f4")[:, ::2]
            work = dist.reduce_scatter_tensor(out, x, async_op=asynchronous, input_split_sizes=list(sizes))
            if work is not None:
                work.wait()
            assert_reduced(np.ascontiguousarray(out), want)


@pytest.mark.ranks(2, 3, 4)
def test_parts_larger_than_a_chunk(rank, world_size):
    for sizes in ([LARGE] + [1] * (world_size - 1), [LARGE + 1000 * r for r in range(world_size)]):
        inputs = everyone(world_size, sum(sizes), np.dtype("f4"))
        want = np.split(reduced(inputs, ReduceOp.SUM), np.cumsum(sizes))[rank]
        results = [np.zeros(sizes[rank], "f4") for _ in range(3)]
        for out in results:
            dist.reduce_scatter_tensor(out, inputs[rank], input_split_sizes=sizes)
            assert_reduced(out, want, sizes)
        assert {out.tobytes() for out in results} == {results[0].tobytes()}
        own = inputs[rank][sum(sizes[:rank]) :][
            : sizes[rank]
        ]  # the output may be this rank's part of the input
        dist.reduce_scatter_tensor(own, inputs[rank], input_split_sizes=sizes)
        assert_reduced(own, want, sizes)


@pytest.mark.ranks(*WORLDS)
@pytest.mark.parametrize(
    ("name", "count"), [("bfloat16", LARGE), ("complex128", LARGE + 1), ("int8", 8 * LARGE)]
)  # test_every_operation has float32
def test_larger_than_a_chunk(rank, world_size, name, count):
    dtype = next(d for d in oracle.DTYPES if d.name == name)
    inputs = everyone(world_size, count, dtype)
    want = reduced(inputs, ReduceOp.SUM)
    x = inputs[rank].copy()
    dist.all_reduce(x)
    assert_reduced(x, want)
    y = inputs[rank].copy()
    dist.reduce(y, world_size - 1)
    assert_reduced(y, want if rank == world_size - 1 else inputs[rank])
    z = inputs[rank].copy()
    dist.scan(z)
    assert_reduced(z, reduced(inputs[: rank + 1], ReduceOp.SUM))
    part = count // world_size
    out = np.zeros(part, dtype)
    dist.reduce_scatter_tensor(out, inputs[rank][: part * world_size])
    assert_reduced(out, want[rank * part : (rank + 1) * part])


@pytest.mark.ranks(1, 2, 3, 5)
def test_premul_sum_scales_by_each_ranks_own_factor(rank, world_size):
    for dtype in [*oracle.FLOATS, *oracle.COMPLEX, *oracle.HALVES]:
        factors = [dtype.type(0.5 * (r + 1)) for r in range(world_size)]
        inputs = everyone(world_size, 33, dtype)
        want = reduced([(x * f).astype(dtype) for x, f in zip(inputs, factors, strict=True)], ReduceOp.SUM)
        op = ReduceOp.PREMUL_SUM(factors[rank])
        x = inputs[rank].copy()
        dist.all_reduce(x, op)
        assert_reduced(x, want, dtype)
        y = inputs[rank].copy()
        dist.reduce(y, 0, op)
        assert_reduced(y, want if rank == 0 else inputs[rank], dtype)
        for shape in ((3, 11), (33, 1)):
            z = inputs[rank].reshape(shape).copy()
            dist.all_reduce(z, op)
            assert_reduced(z.reshape(-1), want, dtype)
        scalar = inputs[rank][:1].copy().reshape(())
        dist.all_reduce(scalar, op)
        assert_reduced(scalar.reshape(1), want[:1], dtype)


def larger_magnitude(a, b):
    return a if abs(a) >= abs(b) else b


def first(a, b):
    return a


def best(a, b):
    if b.value > a.value or (b.value == a.value and b.index < a.index):
        return b
    return a


# Made once, since each new one is compiled anew.
LARGER_MAGNITUDE, FIRST, BEST = map(ReduceOp.custom, (larger_magnitude, first, best))


@pytest.mark.ranks(2, 3)
def test_custom_operations(rank, world_size):
    inputs = everyone(world_size, 77, np.dtype("f4"))  # tests/kernels/test_custom.py has more types
    x = inputs[rank].copy()
    dist.all_reduce(x, LARGER_MAGNITUDE)
    assert_same(np.abs(x), np.abs(np.stack(inputs)).max(axis=0))


@pytest.mark.ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("count", [3, 100_003])
def test_custom_operations_need_not_commute(rank, world_size, count):
    x = np.full(count, rank + 1.0)
    dist.all_reduce(x, FIRST)
    assert (x == 1).all()
    sizes = [count * (r % 2 + 1) for r in range(world_size)]
    out = np.zeros(sizes[rank])
    dist.reduce_scatter_tensor(out, np.full(sum(sizes), rank + 1.0), FIRST, input_split_sizes=sizes)
    assert (out == 1).all()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("count", [1, 5, 50_001])
def test_custom_operations_on_pairs(rank, world_size, count):
    pair = np.dtype([("value", "f8"), ("index", "i8")])
    everybody = np.random.default_rng(7).integers(0, 50, (world_size, count)).astype(float)
    x = np.zeros(count, pair)
    x["value"] = everybody[rank]
    x["index"] = rank
    dist.all_reduce(x, BEST)
    np.testing.assert_array_equal(x["value"], everybody.max(axis=0))
    np.testing.assert_array_equal(x["index"], everybody.argmax(axis=0))


@pytest.mark.ranks(2, 3, 4)
def test_every_rank_gets_the_same_bits_every_time(rank, world_size):
    for count in (5, 3001, LARGE):
        results = []
        for _ in range(3):
            x = values(rank, count, np.dtype("f4"))
            dist.all_reduce(x)
            results.append(x)
        assert all(np.array_equal(x, results[0]) for x in results)
        everybody = [np.zeros_like(x) for _ in range(world_size)]
        dist.all_gather(everybody, results[0])
        assert all(np.array_equal(x, everybody[0]) for x in everybody)


@pytest.mark.ranks(1, 2, 3)
def test_coalesced(rank, world_size):
    shapes = [(3,), (2, 5), (), (0, 4), (7, 1)]
    inputs = [
        [values(r, int(np.prod(s)), np.dtype("f4"), k).reshape(s) for k, s in enumerate(shapes)]
        for r in range(world_size)
    ]
    xs = [x.copy() for x in inputs[rank]]
    dist.all_reduce_coalesced(xs)
    for k, x in enumerate(xs):
        assert_reduced(x, reduced([inputs[r][k] for r in range(world_size)], ReduceOp.SUM))
    outs = [[np.zeros(s, "f4") for _ in range(world_size)] for s in shapes]
    dist.all_gather_coalesced(outs, inputs[rank])
    for k, per_rank in enumerate(outs):
        for r, got in enumerate(per_rank):
            assert_same(got, inputs[r][k])
    swapped = [[np.zeros(3, ">i2") for _ in range(world_size)]]
    dist.all_gather_coalesced(swapped, [np.full(3, rank, ">i2")])
    assert [x[0] for x in swapped[0]] == list(range(world_size))


@pytest.mark.ranks(1, 2)
def test_an_array_that_a_coalesced_call_has_twice_is_reduced_once(world_size):
    """The same results as torch.distributed over Gloo."""
    x, y, strided, empty = np.ones(3), np.ones(2), np.ones((2, 4))[:, ::2], np.ones(0)
    for asynchronous in (False, True):
        work = dist.all_reduce_coalesced(
            [x, strided, y, x, x.reshape(3, 1), empty, strided, empty], async_op=asynchronous
        )
        if work is not None:
            work.wait()
    assert {*x, *y, *strided.ravel()} == {world_size**2}
