"""Each operation with inputs that change from call to call, and a check of every element of its result.

A call is a generator `call(rank, n, count, turn)`: it makes its arrays and yields; when it is resumed it calls the
operation, checks the result, and yields whether it is right. Element i of rank r's input in turn t is
(i % 97 + 1) * (r + 1 + t % 5). These are integers whose sums over up to 64 ranks are exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

import fastcoll as dist

READY = True  # yielded before the call
Steps = Iterator[bool]
Call = Callable[[int, int, int, int], Steps]


def _given(rank: int, count: int, turn: int) -> np.ndarray:
    return _grain(count) * np.float32(rank + 1 + turn % 5)


def _grain(count: int) -> np.ndarray:
    return (np.arange(count) % 97 + 1).astype("f4")


def _sum(ranks: int, count: int, turn: int) -> np.ndarray:
    """Return the sum of the inputs of ranks 0..ranks-1."""
    return _grain(count) * np.float32(sum(rank + 1 + turn % 5 for rank in range(ranks)))


def _blocks(rank: int, n: int, count: int, turn: int) -> list[np.ndarray]:
    """Return the blocks that `rank` has for each of n ranks; they all differ."""
    return [_given(rank, count, turn) + np.float32(1000 * to) for to in range(n)]


def _empty(n: int, count: int) -> list[np.ndarray]:
    return [np.zeros(count, "f4") for _ in range(n)]


def _same(got: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.array_equal(got, wanted))


def _all_same(got: list[np.ndarray], wanted: list[np.ndarray]) -> bool:
    return all(map(_same, got, wanted))


def all_reduce(rank: int, n: int, count: int, turn: int) -> Steps:
    x = _given(rank, count, turn)
    yield READY
    dist.all_reduce(x)
    yield _same(x, _sum(n, count, turn))


def all_reduce_posted(rank: int, n: int, count: int, turn: int) -> Steps:
    """Run two asynchronous all_reduces at once."""
    pair = [_given(rank, count, turn + more) for more in range(2)]
    yield READY
    for work in [dist.all_reduce(x, async_op=True) for x in pair]:
        work.wait()
    yield _all_same(pair, [_sum(n, count, turn + more) for more in range(2)])


def reduce(rank: int, n: int, count: int, turn: int) -> Steps:
    x, root = _given(rank, count, turn), turn % n
    yield READY
    dist.reduce(x, root)
    yield rank != root or _same(x, _sum(n, count, turn))


def scan(rank: int, n: int, count: int, turn: int) -> Steps:
    x = _given(rank, count, turn)
    yield READY
    dist.scan(x)
    yield _same(x, _sum(rank + 1, count, turn))


def reduce_scatter(rank: int, n: int, count: int, turn: int) -> Steps:
    x, blocks = np.zeros(count, "f4"), _blocks(rank, n, count, turn)
    yield READY
    dist.reduce_scatter(x, blocks)
    yield _same(x, _sum(n, count, turn) + np.float32(1000 * n * rank))


def broadcast(rank: int, n: int, count: int, turn: int) -> Steps:
    root = turn % n
    x = _given(rank, count, turn)
    yield READY
    dist.broadcast(x, root)
    yield _same(x, _given(root, count, turn))


def all_gather(rank: int, n: int, count: int, turn: int) -> Steps:
    parts, x = _empty(n, count), _given(rank, count, turn)
    yield READY
    dist.all_gather(parts, x)
    yield _all_same(parts, [_given(other, count, turn) for other in range(n)])


def gather(rank: int, n: int, count: int, turn: int) -> Steps:
    root = turn % n
    parts, x = _empty(n, count) if rank == root else None, _given(rank, count, turn)
    yield READY
    dist.gather(x, parts, root)
    yield parts is None or _all_same(parts, [_given(other, count, turn) for other in range(n)])


def scatter(rank: int, n: int, count: int, turn: int) -> Steps:
    root, x = turn % n, np.zeros(count, "f4")
    blocks = _blocks(root, n, count, turn) if rank == root else None
    yield READY
    dist.scatter(x, blocks, root)
    yield _same(x, _given(root, count, turn) + np.float32(1000 * rank))


def all_to_all(rank: int, n: int, count: int, turn: int) -> Steps:
    parts, blocks = _empty(n, count), _blocks(rank, n, count, turn)
    yield READY
    dist.all_to_all(parts, blocks)
    yield _all_same(parts, [_given(other, count, turn) + np.float32(1000 * rank) for other in range(n)])


def barrier(rank: int, n: int, count: int, turn: int) -> Steps:
    yield READY
    dist.barrier()
    yield True


def exchange(rank: int, n: int, count: int, turn: int) -> Steps:
    """Post a send to the next rank and a receive from the previous one."""
    x, y, before = _given(rank, count, turn), np.zeros(count, "f4"), (rank - 1) % n
    yield READY
    pair = [dist.P2POp(dist.isend, x, (rank + 1) % n), dist.P2POp(dist.irecv, y, before)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    yield _same(y, _given(before, count, turn))


def pass_on(rank: int, n: int, count: int, turn: int) -> Steps:
    """Pass rank 0's array from rank to rank and back to rank 0, by send and recv."""
    x = _given(0, count, turn) if rank == 0 else np.zeros(count, "f4")
    yield READY
    if rank:
        dist.recv(x, rank - 1)
    dist.send(x, (rank + 1) % n)
    if not rank:
        x[:] = 0
        dist.recv(x, n - 1)
    yield _same(x, _given(0, count, turn))


def put(rank: int, n: int, count: int, turn: int) -> Steps:
    """Put into the next rank's symmetric array."""
    before, after = (rank - 1) % n, (rank + 1) % n
    given = _given(rank, count, turn)
    yield READY
    x = dist.symmetric.zeros(count, "f4")
    dist.symmetric.put(x, given, after)
    dist.symmetric.signal(x, after)
    dist.symmetric.wait(x, before)
    yield _same(x, _given(before, count, turn))


def objects(rank: int, n: int, count: int, turn: int) -> Steps:
    gathered: list[object] = [None] * n
    yield READY
    dist.all_gather_object(gathered, {"rank": rank, "turn": turn})
    yield gathered == [{"rank": other, "turn": turn} for other in range(n)]


def new_group(rank: int, n: int, count: int, turn: int) -> Steps:
    """Make a group of all ranks, use it and destroy it."""
    x = _given(rank, count, turn)
    yield READY
    group = dist.new_group(list(range(n)))
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    yield _same(x, _sum(n, count, turn))


CALLS: dict[str, Call] = {
    call.__name__: call
    for call in (
        all_reduce, all_reduce_posted, reduce, scan, reduce_scatter, broadcast, all_gather, gather, scatter, all_to_all,
        barrier, exchange, pass_on, put, objects, new_group,
    )
}  # fmt: skip
ONE_NODE = frozenset({"put"})
"""The calls that need all ranks on one node, over shared memory."""
