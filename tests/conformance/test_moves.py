"""broadcast, all_gather, gather, scatter, all_to_all and barrier: every dtype that has a fixed size."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import assert_same, moves, values

import fastcoll as dist

WORLDS = (1, 2, 3, 4, 5, 8)
LARGE = 300_007


def empty(count, dtype):
    return np.zeros(count, dtype)


@pytest.mark.ranks(*WORLDS)
def test_broadcast(rank, world_size):
    for dtype, count in moves(world_size):
        for root in {0, count % world_size, world_size - 1}:
            want = values(root, count, dtype)
            x = want.copy() if rank == root else empty(count, dtype)
            dist.broadcast(x, root)
            assert_same(x, want, (dtype, count, root))


@pytest.mark.ranks(*WORLDS)
def test_all_gather(rank, world_size):
    for dtype, count in moves(world_size):
        inputs = [values(r, count, dtype) for r in range(world_size)]
        outs = [empty(count, dtype) for _ in range(world_size)]
        dist.all_gather(outs, inputs[rank])
        for got, want in zip(outs, inputs, strict=True):
            assert_same(got, want, (dtype, count))
        flat = empty(count * world_size, dtype)
        dist.all_gather_into_tensor(flat, inputs[rank])
        assert_same(flat, np.concatenate(inputs).astype(dtype), (dtype, count))


@pytest.mark.ranks(*WORLDS)
@pytest.mark.parametrize("uneven", [0, 1])
def test_gathers_and_scatter(rank, world_size, uneven):
    for number, (dtype, count) in enumerate(moves(world_size)):
        root = number % world_size
        inputs = [values(r, count + uneven * r, dtype) for r in range(world_size)]
        outs, everywhere = ([empty(x.size, dtype) for x in inputs] for _ in range(2))
        dist.gather(inputs[rank], outs if rank == root else None, root)
        dist.all_gather(everywhere, inputs[rank])
        for got, want in zip([*everywhere, *(outs if rank == root else ())], inputs * 2, strict=False):
            assert_same(got, want, (dtype, count, root))
        out = empty(count + uneven * rank, dtype)
        dist.scatter(out, inputs if rank == root else None, root)
        assert_same(out, inputs[rank], (dtype, count, root))


@pytest.mark.ranks(*WORLDS)
def test_gather_and_scatter_of_one_array(rank, world_size):
    for number, (dtype, count) in enumerate(moves(world_size)):
        root = number % world_size
        inputs = [values(r, count, dtype) for r in range(world_size)]
        want = np.concatenate(inputs).astype(dtype)
        joined = empty(count * world_size, dtype) if rank == root else None
        dist.gather_single(inputs[rank], joined, root)
        if rank == root:
            assert_same(joined, want, (dtype, count, root))
        out = empty(count, dtype)
        dist.scatter_single(out, want if rank == root else None, root)
        assert_same(out, inputs[rank], (dtype, count, root))


@pytest.mark.ranks(2, 3)
def test_gather_and_scatter_of_one_array_match_those_of_lists(rank, world_size):
    """They are the same operations; a part of the single array may be the source or destination."""
    x, joined = np.full(3, float(rank)), np.zeros((world_size, 3))
    if rank == 0:
        dist.gather_single(joined[0], joined)
        assert (joined == np.arange(world_size)[:, None]).all()
        dist.scatter_single(joined[0], joined)
    else:
        dist.gather(x, dst=0)
        out = np.zeros(3)
        dist.scatter(out, src=0)
        assert (out == rank).all()


@pytest.mark.ranks(*WORLDS)
@pytest.mark.parametrize("uneven", [0, 1])
def test_all_to_all(rank, world_size, uneven):
    def block(src, dst, count, dtype):
        return values(src, count + uneven * (src + 2 * dst), dtype, dst)

    for dtype, count in moves(world_size):
        blocks = [block(rank, p, count, dtype) for p in range(world_size)]
        wants = [block(p, rank, count, dtype) for p in range(world_size)]
        outs = [np.zeros_like(want) for want in wants]
        dist.all_to_all(outs, blocks)
        for got, want in zip(outs, wants, strict=True):
            assert_same(got, want, (dtype, count))


@pytest.mark.ranks(*WORLDS)
def test_all_to_all_single_with_splits(rank, world_size):
    gives = [rank + p for p in range(world_size)]
    takes = [p + rank for p in range(world_size)]
    x = np.concatenate([np.full((n, 3), 100 * rank + p, "i4") for p, n in enumerate(gives)])
    out = np.zeros((sum(takes), 3), "i4")
    dist.all_to_all_single(out, x, takes, gives)
    want = np.concatenate([np.full((n, 3), 100 * p + rank, "i4") for p, n in enumerate(takes)])
    np.testing.assert_array_equal(out, want)
    even = np.arange(4 * world_size, dtype="f4") + 1000 * rank
    got = np.zeros_like(even)
    want = np.concatenate([np.arange(4 * rank, 4 * rank + 4) + 1000 * p for p in range(world_size)])
    for splits in ((), ([], []), (None, ())):
        got[:] = 0
        dist.all_to_all_single(got, even, *splits)
        np.testing.assert_array_equal(got, want.astype("f4"))
    dist.all_to_all_single(even, even)  # in place
    np.testing.assert_array_equal(even, got)


@pytest.mark.ranks(2, 3, 4)
def test_in_place_all_gather(rank, world_size):
    for count in (3, LARGE):
        out = np.zeros((world_size, count), "i4")
        out[rank] = rank + 1
        dist.all_gather_into_tensor(out, out[rank])
        np.testing.assert_array_equal(out, np.arange(1, world_size + 1)[:, None].repeat(count, 1))


@pytest.mark.ranks(*WORLDS)
def test_barrier_orders_what_ranks_do(rank, world_size, tmp_path):
    for turn in range(20):
        (tmp_path / f"{turn}-{rank}").touch()
        dist.barrier()
        assert all((tmp_path / f"{turn}-{r}").exists() for r in range(world_size))


@pytest.mark.ranks(2, 3, 4)
def test_mixed_calls_back_to_back(rank, world_size):
    """Short and long calls with changing roots, without a call in between that would delay a fast rank."""
    random = np.random.default_rng(3)
    for turn in range(400):
        kind, root = random.integers(0, 6), int(random.integers(0, world_size))
        count = int(random.choice([0, 1, 20, 3000, 200_000], p=[0.1, 0.3, 0.3, 0.2, 0.1]))
        x, total = np.full(count, rank + turn, "i4"), world_size * turn + sum(range(world_size))
        if kind == 0:
            dist.all_reduce(x)
            want = total
        elif kind == 1:
            dist.broadcast(x, root)
            want = root + turn
        elif kind == 2:
            dist.reduce(x, root)
            want = total if rank == root else rank + turn
        elif kind == 3:
            outs = [np.zeros_like(x) for _ in range(world_size)] if rank == root else None
            dist.gather(x, outs, root)
            for r, out in enumerate(outs or []):
                assert (out == r + turn).all()
            continue
        elif kind == 4:
            dist.scatter(x, [x + r for r in range(world_size)] if rank == root else None, root)
            want = root + turn + rank
        else:
            dist.barrier()
            continue
        assert (x == want).all(), (turn, kind, root, count)
