"""Each operation of README's table, in a small and a large call; the table has the results of such runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import fastcoll as dist

Row = Callable[[int, int, int], None]


def numbers(rank: int, count: int) -> np.ndarray:
    """Return small integers, so that sums are exact in any order."""
    return (np.arange(count) % 13 + rank + 1).astype("f4")


def equal(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got, want, strict=True)


def all_reduce(rank: int, n: int, count: int) -> None:
    total = sum(numbers(r, count) for r in range(n))
    x = numbers(rank, count)
    dist.all_reduce(x)
    equal(x, total)
    x = numbers(rank, count)
    dist.all_reduce(x, async_op=True).wait()
    equal(x, total)
    x, y = numbers(rank, count), numbers(rank, 3)
    dist.all_reduce_coalesced([x, y])
    equal(x, total)
    equal(y, sum(numbers(r, 3) for r in range(n)))


def reduce_and_scan(rank: int, n: int, count: int) -> None:
    x = numbers(rank, count)
    dist.reduce(x, n - 1)
    equal(x, sum(numbers(r, count) for r in range(n)) if rank == n - 1 else numbers(rank, count))
    x = numbers(rank, count)
    dist.scan(x)
    equal(x, sum(numbers(r, count) for r in range(rank + 1)))
    x = numbers(rank, count)
    dist.exscan(x)
    equal(x, sum(numbers(r, count) for r in range(rank)) if rank else numbers(0, count))


def reduce_scatter(rank: int, n: int, count: int) -> None:
    out = np.zeros(count, "f4")
    dist.reduce_scatter_tensor(out, np.concatenate([numbers(rank + part, count) for part in range(n)]))
    equal(out, sum(numbers(r + rank, count) for r in range(n)))
    sizes = [count + part for part in range(n)]
    parts = [numbers(rank + part, size) for part, size in enumerate(sizes)]
    total = sum(numbers(r + rank, count + rank) for r in range(n))
    one_by_one, together = np.zeros(count + rank, "f4"), np.zeros(count + rank, "f4")
    dist.reduce_scatter(one_by_one, parts)
    equal(one_by_one, total)
    dist.reduce_scatter_tensor(together, np.concatenate(parts), input_split_sizes=sizes)
    equal(together, total)


def broadcast(rank: int, n: int, count: int) -> None:
    x = numbers(rank, count)
    dist.broadcast(x, np.int32(n - 1))  # a root may be any integer
    equal(x, numbers(n - 1, count))


def all_gather(rank: int, n: int, count: int) -> None:
    outs = [np.zeros(count + r, "f4") for r in range(n)]
    dist.all_gather(outs, numbers(rank, count + rank))
    for r, out in enumerate(outs):
        equal(out, numbers(r, count + r))
    out = np.zeros(n * count, "f4")
    dist.all_gather_into_tensor(out, numbers(rank, count))
    equal(out, np.concatenate([numbers(r, count) for r in range(n)]))
    lists = [[np.zeros(size, "f4") for _ in range(n)] for size in (count, 3)]
    dist.all_gather_coalesced(lists, [numbers(rank, count), numbers(rank, 3)])
    for r in range(n):
        equal(lists[0][r], numbers(r, count))
        equal(lists[1][r], numbers(r, 3))


def gather_and_scatter(rank: int, n: int, count: int) -> None:
    parts = [numbers(r, count + r) for r in range(n)]
    outs = [np.zeros(count + r, "f4") for r in range(n)]
    dist.gather(parts[rank], outs if rank == 0 else None, 0)
    for out, part in zip(outs, parts, strict=True):
        equal(out, part if rank == 0 else np.zeros_like(part))
    out = np.zeros(count + rank, "f4")
    dist.scatter(out, parts if rank == n - 1 else None, n - 1)
    equal(out, parts[rank])
    want = np.concatenate([numbers(r, count) for r in range(n)])
    joined = np.zeros(n * count, "f4")
    dist.gather_single(numbers(rank, count), joined if rank == 0 else None, 0)
    equal(joined, want if rank == 0 else np.zeros(n * count, "f4"))
    out = np.zeros(count, "f4")
    dist.scatter_single(out, want if rank == n - 1 else None, n - 1)
    equal(out, numbers(rank, count))


def all_to_all(rank: int, n: int, count: int) -> None:
    outs = [np.zeros(count + rank, "f4") for _ in range(n)]
    dist.all_to_all(outs, [numbers(rank + to, count + to) for to in range(n)])
    for source, out in enumerate(outs):
        equal(out, numbers(source + rank, count + rank))
    out = np.zeros(n * count, "f4")
    dist.all_to_all_single(out, np.concatenate([numbers(rank + to, count) for to in range(n)]))
    equal(out, np.concatenate([numbers(source + rank, count) for source in range(n)]))


def messages(rank: int, n: int, count: int) -> None:
    right, left = (rank + 1) % n, (rank - 1) % n
    got = np.zeros(count, "f4")
    receive = dist.irecv(got, left, tag=1)
    dist.isend(numbers(rank, count), right, tag=1).wait()
    receive.wait()
    equal(got, numbers(left, count))
    if rank == 0:
        dist.send(numbers(9, count), 1)
    if rank == 1:
        assert dist.recv(got) == 0
        equal(got, numbers(9, count))


ROWS: dict[str, Row] = {
    "all_reduce, all_reduce_coalesced": all_reduce,
    "reduce, scan, exscan": reduce_and_scan,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
    "all_gather, all_gather_coalesced": all_gather,
    "gather, scatter": gather_and_scatter,
    "all_to_all": all_to_all,
    "send, recv, isend, irecv": messages,
}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("row", ROWS)
def test_every_operation(rank: int, world_size: int, row: str) -> None:
    for count in (5, 300_007):  # the latter is more than one chunk of a slot
        ROWS[row](rank, world_size, count)
