"""Trees of arrays in one call, and all_gather of arrays of unknown sizes."""

from __future__ import annotations

import sys
from collections import namedtuple
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import fastcoll as dist
from fastcoll.core import trees

Pair = namedtuple("Pair", "x y")


class Alike:
    def __repr__(self) -> str:
        return "alike"


def tree(rank: int) -> Any:
    """Make a tree of several dtypes, nestings and layouts; dicts are in another order on each rank."""
    items = [
        ("w", np.full((3, 4), rank + 1.0, np.float32)),
        ("b", [np.full(5, rank, np.int64), (np.full(2, rank + 1j), None)]),
        (3, Pair(np.full((), rank + 1.0), np.full(70, rank + 1.0, np.float32))),
        ("strided", np.full((4, 4), rank + 1.0)[::2, ::2]),
        ("empty", np.empty((0, 3), np.int8)),
    ]
    return dict(items if rank % 2 else items[::-1])


def flat(x: Any) -> list[Any]:
    """Return the arrays of `tree`."""
    return [x["w"], x["b"][0], x["b"][1][0], x[3].x, x[3].y, x["strided"], x["empty"]]


def assert_same(x: Any, expected: list[Any]) -> None:
    for array, right in zip(flat(x), expected, strict=True):
        np.testing.assert_array_equal(array, right)
        assert array.dtype == right.dtype


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("large", [trees.LARGE, 64], ids=["packed", "apart"])
def test_a_tree_is_reduced_and_broadcast(
    rank: int, world_size: int, backend: str, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "LARGE", large)
    group = dist.new_group(backend=backend)
    trees_of_all = zip(*(flat(tree(r)) for r in range(world_size)), strict=True)
    total, last = [sum(arrays[1:], arrays[0]) for arrays in trees_of_all], world_size - 1
    for async_op in (False, True):
        x, y = tree(rank), tree(rank)
        works = [dist.all_reduce(x, group=group, async_op=async_op), dist.broadcast(y, last, group, async_op)]
        assert all(work.wait() if async_op else work is None for work in works)
        assert_same(x, total)
        assert_same(y, flat(tree(last)))
    assert len(works[0].outputs) == len(total)
    for op, right in (
        (dist.ReduceOp.AVG, [last / 2, last / 2 + 0.5]),
        (dist.ReduceOp.PREMUL_SUM(2.0), [2 * sum(range(world_size)), world_size**2]),
    ):
        floats = [np.full(40, rank, np.float16), [np.full(3, rank + 0.5)]]
        dist.all_reduce(floats, op, group)
        assert [floats[0][0], floats[1][0][0]] == right
    tied = np.ones(100)
    dist.all_reduce([tied, {"same": tied, "part": tied[:30]}], group=group)
    assert (tied == world_size).all(), "what is in the tree several times is reduced once"
    x, y = np.full(200, rank + 1.0), np.full(200, rank + 1.0)
    if rank % 2:
        y = x  # only on these ranks the leaves share memory
    dist.broadcast({"embed": x, "head": y}, 0, group)
    assert (x == 1).all()
    assert (y == 1).all()
    dist.all_reduce([x, y, x[:100]], group=group)
    assert (x == world_size).all()
    assert (y == world_size).all()
    dist.all_reduce({}, group=group)
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_different_trees_are_a_mismatch_on_all_ranks(rank: int) -> None:
    a, b = np.ones(3), np.ones(3)
    different: list[tuple[Any, Any]] = [
        ({"a": a}, {"b": a}),
        ([a, b], (a, b)),
        ([a, None], [a]),
        ([a.reshape(3, 1)], [a]),
        ({}, {"a": a}),
        ([a, b.astype(np.float32)], [a.astype(np.float32), b]),
    ]
    for call in (dist.all_reduce, lambda x: dist.broadcast(x, 0)):
        for pair in different:
            with pytest.raises(dist.MismatchError, match=r"do not match.*This rank gave"):
                call(pair[rank])
    with pytest.raises(
        dist.MismatchError, match=r"rank 0 called all_reduce_coalesced.*rank 1 called barrier"
    ):
        dist.barrier() if rank else dist.all_reduce({"a": a})
    assert (a == 1).all()
    dist.all_reduce([a, b])
    assert a[0] == b[0] == 2


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"a": [1.5]}, r"tensor\['a'\]\[0\] must be an array, got float; make one with numpy\.array"),
        ([np.ones(2), "x"], r"tensor\[1\] must be an array, got str"),
        ({Alike(): np.ones(1), Alike(): np.ones(1)}, "the keys alike, alike of a dict .* use other keys"),
    ],
)
def test_a_wrong_tree_is_refused_and_its_keys_are_named(wrong: Any, message: str) -> None:
    with pytest.raises(dist.UsageError, match=message):
        dist.all_reduce(wrong)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_arrays_of_unknown_sizes_are_gathered(
    rank: int, world_size: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = dist.new_group(backend=backend)
    right = [np.full((r, 2), r, np.int16) for r in range(world_size)]
    for async_op in (False, True):
        arrays = dist.all_gather(right[rank], group=group, async_op=async_op)
        arrays = arrays.result() if async_op else arrays
        for array, expected in zip(arrays, right, strict=True):
            np.testing.assert_array_equal(array, expected)
            assert (type(array), array.dtype) == (np.ndarray, expected.dtype)
    records = dist.all_gather(np.array((rank, 0.5), "i4,f8"), group=group)
    assert [record["f0"] for record in records] == [0, 1, 2]
    differ = r"rank 0 gave float64 of shape \(3,\).*rank 1 gave {}; rank 2 gave float64 of shape \(3,\)"
    for other, text in (
        (np.ones((3, 1)), r"float64 of shape \(3, 1\)"),
        (np.ones(3, "f4"), r"float32 of shape \(3,\)"),
    ):
        with pytest.raises(dist.MismatchError, match=differ.format(text)):
            dist.all_gather(other if rank == 1 else np.ones(3), group=group)
    with pytest.raises(dist.MismatchError, match=r"rank 1 called all_gather\(tensor\) without a list"):
        dist.all_gather(np.ones(3), group=group) if rank == 1 else dist.barrier(group)
    with monkeypatch.context() as patch:
        if rank == 1:
            patch.setattr(trees, "room_like", Mock(side_effect=MemoryError("too large")))
        text = "too large" if rank == 1 else "rank 1's all_gather was refused: MemoryError: too large"
        for async_op in (False, True):
            with pytest.raises(MemoryError if rank == 1 else dist.MismatchError, match=text):
                dist.all_gather(right[rank], group=group, async_op=async_op).result()
    with pytest.raises(dist.UsageError, match="got NoneType"):
        dist.all_gather([np.ones(1) for _ in range(world_size)], group=group)
    dist.destroy_process_group(group)


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore")
def test_torch_and_jax_arrays_give_results_of_their_own_kind(rank: int) -> None:
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    weight = torch.nn.Parameter(torch.full((2, 3), rank + 1.0))
    x = {"torch": weight, "jax": [jnp.full(3, rank + 1.0)], "numpy": np.full(2, rank + 1.0)}
    new = dist.all_reduce(x)
    assert (new["torch"] is weight, new["numpy"] is x["numpy"]) == (True, True)
    assert (weight == 3).all()
    assert type(new["jax"]) is list
    assert (new["jax"][0].tolist(), x["jax"][0].tolist()) == ([3] * 3, [rank + 1] * 3)
    assert dist.all_reduce({"torch": weight}) is None
    given = dist.all_reduce([jnp.ones(2)], async_op=True).result()
    assert given[0].tolist() == [2, 2]
    assert dist.broadcast((jnp.full(2, rank),), 1)[0].tolist() == [1, 1]
    tensors = dist.all_gather(torch.full((rank + 1,), 0.5, dtype=torch.bfloat16))
    assert [(t.tolist(), t.dtype) for t in tensors] == [([0.5] * n, torch.bfloat16) for n in (1, 2)]
    assert [y.sharding.num_devices and y.tolist() for y in dist.all_gather(jnp.ones(rank))] == [[], [1]]
    assert "jax" in sys.modules


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_torchs", [False, True])
def test_a_call_that_gpus_do_not_have_is_refused_on_all_ranks(
    rank: int, is_torchs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = dist.group.WORLD
    assert world is not None
    x = Mock(new_empty=None) if is_torchs else np.ones(3)
    if rank:
        with pytest.raises(
            dist.MismatchError, match="rank 0's all_gather was refused: UsageError: all_gather"
        ):
            dist.all_gather(np.ones(3))
    else:
        on_gpu = Mock(array=Mock(dtype=np.dtype("f8"), ndim=1, shape=(3,)))
        monkeypatch.setattr(world, "import_array", lambda *_, **__: on_gpu)
        with pytest.raises(dist.UsageError, match="only torch's tensors and no async_op"):
            dist.all_gather(x, async_op=is_torchs)
        monkeypatch.undo()
    dist.all_reduce(total := np.ones(1))
    assert total == 2
