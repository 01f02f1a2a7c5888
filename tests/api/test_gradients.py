"""GradientReducer: every rank gets the averages, for all buckets, orders and transmitted dtypes."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

import fastcoll as dist
from fastcoll import GradientReducer
from fastcoll.api import gradients
from fastcoll.api.gradients import _Bucket

SHAPES = {"w1": (7, 5), "b1": (5,), "empty": (0,), "w2": (5, 3), "one": (), "b2": (3,)}


def gradient(rank: int, step: int, name: str, dtype: str = "f4") -> np.ndarray:
    seed = [rank, step, list(SHAPES).index(name)]
    return np.random.default_rng(seed).standard_normal(SHAPES[name]).astype(dtype)


def averages(ranks: list[int], step: int, name: str) -> np.ndarray:
    return np.mean([gradient(rank, step, name) for rank in ranks], axis=0)


def check_averages(found: dict, ranks: list[int], step: int) -> None:
    for name in SHAPES:
        np.testing.assert_allclose(found[name], averages(ranks, step, name), rtol=1e-5, atol=1e-6)


def params(dtype: str = "f4") -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}


def step(reducer: GradientReducer, values: dict) -> None:
    """Make a step of training, with these gradients."""
    for name, value in values.items():
        reducer.grads[name][...] = value
        reducer.ready(name)
    reducer.wait()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_averages_in_any_order(rank: int, world_size: int, bucket_bytes: int) -> None:
    reducer = GradientReducer(params(), bucket_bytes=bucket_bytes)
    for turn in range(4):
        # The order of gradients may differ between ranks; that of the buckets is the same.
        names = np.random.default_rng([turn, rank]).permutation(list(SHAPES)).tolist()
        step(reducer, {name: gradient(rank, turn, name) for name in names})
        check_averages(reducer.grads, list(range(world_size)), turn)


@pytest.mark.ranks(2)
def test_a_list_of_parameters_and_sums_in_a_group(rank: int) -> None:
    alone = [dist.new_group([one]) for one in range(2)][rank]
    both = GradientReducer([np.zeros(3), np.zeros((2, 2), "f4")], average=False)
    mine = GradientReducer([np.zeros(3)], group=alone)
    for reducer in (both, mine):
        step(reducer, dict.fromkeys(range(len(reducer.grads)), rank + 1))
    assert (both.grads[0] == 3).all()
    assert (both.grads[1] == 3).all()
    assert both.grads[1].shape == (2, 2)
    assert (mine.grads[0] == rank + 1).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("travel", "precision"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_gradients_that_travel_as_halves(
    rank: int, world_size: int, travel: str, precision: float, dtype: str
) -> None:
    reducer, turns = GradientReducer(params(dtype), travel=travel), 5
    for _ in range(turns):
        step(reducer, {name: gradient(rank, 0, name, dtype) for name in SHAPES})
        # Two roundings: of each rank's gradient plus its earlier rounding error, and of the average.
        for name in SHAPES:
            mean = averages(list(range(world_size)), 0, name)
            bound = 8 * precision * (np.abs(mean).max(initial=0) + 1)
            assert np.abs(reducer.grads[name] - mean).max(initial=0) < bound
    gathered: list = [None] * world_size
    dist.all_gather_object(gathered, b"".join(one.tobytes() for one in reducer.grads.values()))
    assert len(set(gathered)) == 1, "every rank has the same bits"
    assert reducer.bytes_sent == turns * 2 * sum(int(np.prod(shape)) for shape in SHAPES.values())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("travel", "bits"), [("float16", 10), ("bfloat16", 7)])
def test_a_systematic_rounding_error_is_sent_later(rank: int, travel: str, bits: int) -> None:
    """Each gradient exceeds 1 by a quarter of a unit in the last place, which rounding to nearest always drops."""
    unit, steps, total = 2.0**-bits, 40, 0.0
    reducer = GradientReducer([np.zeros(3, "f4")], travel=travel)
    for _ in range(steps):
        step(reducer, {0: 1 + unit / 4})
        total += float(reducer.grads[0][1])
    assert abs(total - steps * (1 + unit / 4)) <= unit


@pytest.mark.ranks(3)
def test_sums_while_ranks_with_fewer_batches_join(rank: int, world_size: int) -> None:
    reducer = GradientReducer([np.zeros(3)], average=False)
    with reducer.join():
        for turn in range(rank + 1):
            step(reducer, {0: 10 + rank})
            assert (reducer.grads[0] == sum(10 + other for other in range(turn, world_size))).all()


@pytest.mark.ranks(2)
def test_a_wait_after_ctrl_c_completes_the_step(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reducer = GradientReducer([np.zeros(3), np.zeros(2, "f4"), np.zeros(4)], find_unused=True)
    for key in (1, 2) if rank else (2,):
        reducer.grads[key][...] = 10 * key + rank
        reducer.ready(key)
    finish = _Bucket.finish

    def interrupted(bucket: _Bucket, divisor: int) -> None:
        if 1 in bucket.views and not interruptions:
            interruptions.append(bucket)
            raise KeyboardInterrupt
        finish(bucket, divisor)

    interruptions: list[_Bucket] = []
    monkeypatch.setattr(_Bucket, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reducer.wait()
    reducer.wait()
    assert [grad[0] for grad in reducer.grads] == [0, 5.5, 20.5]
    assert reducer.unused == [0]
    step(reducer, dict.fromkeys(range(3), rank))
    assert [grad[0] for grad in reducer.grads] == [0.5] * 3


@pytest.mark.ranks(2)
def test_accumulation_over_steps(rank: int) -> None:
    reducer = GradientReducer(params())
    for turn in range(6):
        if turn % 3 == 0:
            reducer.zero()
        with nullcontext() if turn % 3 == 2 else reducer.no_sync():
            step(reducer, {name: reducer.grads[name] + gradient(rank, turn, name) for name in SHAPES})
        if turn % 3 == 2:
            expected = sum(averages([0, 1], s, "w1") for s in range(turn - 2, turn + 1))
            np.testing.assert_allclose(reducer.grads["w1"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(3)
def test_unused_gradients_count_as_zeros(rank: int) -> None:
    reducer = GradientReducer(params(), find_unused=True, bucket_bytes=64)
    for _ in range(2):
        for grad in reducer.grads.values():
            grad[...] = 7  # of an earlier step
        step(reducer, dict.fromkeys(["w1", "b1"] if rank else ["w1", "w2"], 3))
        for name, value in {"w1": 3, "b1": 2, "w2": 1, "b2": 0}.items():
            assert (reducer.grads[name] == value).all(), name
        assert sorted(reducer.unused) == ["b2", "empty", "one"]


@pytest.mark.ranks(2)
def test_accumulated_gradients_are_not_unused(rank: int) -> None:
    reducer = GradientReducer({name: np.zeros(2) for name in "abc"}, find_unused=True)
    for _ in range(2):
        reducer.zero()
        with reducer.no_sync():
            step(reducer, {"a": 1, "b": 2} if rank else {"a": 1})
        step(reducer, {"a": reducer.grads["a"] + 3})
        assert [reducer.grads[name][0] for name in "abc"] == [4, 1, 0]
        assert reducer.unused == ["c"]
    step(reducer, {"a": 5})  # gradients of reduced steps are not added
    assert [reducer.grads[name][0] for name in "abc"] == [5, 0, 0]
    assert set(reducer.unused) == {"b", "c"}


@pytest.mark.ranks(2)
def test_ranks_without_batches_have_no_gradients(rank: int) -> None:
    reducer = GradientReducer({"a": np.zeros(2), "b": np.zeros(2)}, find_unused=True)
    with reducer.join():
        for _ in range(rank + 1):
            step(reducer, {"a": 1})
            assert reducer.unused == ["b"]


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("find_unused", [False, True])
def test_ranks_with_fewer_batches_join(rank: int, world_size: int, find_unused: bool) -> None:
    batches = [2, 5, 0, 3]
    reducer = GradientReducer(params(), bucket_bytes=64, find_unused=find_unused)
    for _ in range(2):
        with reducer.join():
            for turn in range(batches[rank]):
                step(reducer, {name: gradient(rank, turn, name) for name in reversed(SHAPES)})
                check_averages(reducer.grads, [r for r in range(world_size) if turn < batches[r]], turn)
    dist.barrier()


@pytest.mark.ranks(2)
def test_reduce_returns_new_arrays_of_the_same_kind(rank: int) -> None:
    jax = pytest.importorskip("jax")
    values = {name: jax.numpy.asarray(gradient(rank, 0, name)) for name in SHAPES}
    reducer = GradientReducer(values)
    for _ in range(2):
        found = reducer.reduce(values)
        assert all(isinstance(each, jax.Array) for each in found.values())
        check_averages(found, [0, 1], 0)
    mutable = GradientReducer([np.zeros(3), np.zeros(2)])
    first = mutable.reduce([np.full(3, rank), np.full(2, rank)])
    second = mutable.reduce([np.full(3, rank + 1.0), np.full(2, rank)])
    assert (first[0] == 0.5).all(), "the second call does not write into it"
    assert (second[0] == 1.5).all()
    with pytest.raises(dist.UsageError, match="params had"):
        mutable.reduce([np.zeros(3)])


@pytest.mark.ranks(2)
def test_reduce_adds_up_the_gradients_of_steps_without_a_reduction(rank: int) -> None:
    reducer = GradientReducer([np.zeros(3), np.zeros(())])
    for _ in range(2):
        with reducer.no_sync():
            reducer.reduce([np.full(3, 1.0), np.float64(10)])
            sums = reducer.reduce([np.full(3, 1.0 + rank), np.float64(10)])
        assert sums[0].tolist() == [2 + rank] * 3, "nothing is reduced"
        assert reducer.reduce([np.full(3, 1.0), np.float64(10)])[0].tolist() == [3.5] * 3
        assert reducer.grads[1] == 30
    assert reducer.reduce([np.full(3, 1.0), np.float64(10)])[0].tolist() == [1] * 3


@pytest.mark.ranks(1)
@pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros(()), np.zeros((1, 3)), np.zeros((2, 3, 1))])
def test_reduce_refuses_other_shapes(wrong: np.ndarray) -> None:
    reducer = GradientReducer([np.zeros((2, 3)), np.zeros(1)])
    with pytest.raises(dist.UsageError, match=r"gradients\[0\] has shape .*params\[0\] had \(2, 3\)"):
        reducer.reduce([wrong, np.zeros(1)])
    assert reducer.reduce([np.ones((2, 3)), np.zeros(1)])[0].tolist() == [[1] * 3] * 2


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (np.ones(2) * 1j, r"gradients\['a'\] is of complex128; params\['a'\] was of float32"),
        (None, r"gradients\['a'\] must be an array, got NoneType"),
        (["b", "c"], r"gradients\['a'\] must be an array, got list"),
    ],
)
def test_a_reducer_works_after_a_gradient_that_is_refused(wrong: object, text: str) -> None:
    reducer = GradientReducer({"a": np.zeros(2, "f4"), "b": np.zeros(2, "f4")}, bucket_bytes=1)
    with pytest.raises(dist.UsageError, match=text):
        reducer.reduce({"a": wrong, "b": np.ones(2)})
    assert reducer.reduce({"a": np.ones(2), "b": np.ones(2)})["a"].tolist() == [1, 1]


@pytest.mark.ranks(1)
def test_a_reducer_works_after_a_gradient_whose_computation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Computed:
        """An array that is computed when NumPy reads it, as those of JAX."""

        __module__ = "jaxlib"
        shape, dtype = (2,), np.dtype("f4")

        def __array__(self, *_: object, **__: object) -> np.ndarray:
            raise FloatingPointError("computed in vain")

    reducer = GradientReducer([np.zeros(2, "f4"), np.zeros(2, "f4")], bucket_bytes=1)
    with pytest.raises(FloatingPointError):
        reducer.reduce([Computed(), np.ones(2)])
    assert [x.tolist() for x in reducer.reduce([np.ones(2), np.ones(2)])] == [[1, 1]] * 2


@pytest.mark.ranks(1)
def test_gradients_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="pip install torch")
    reducer = GradientReducer([np.zeros(2, "f4")])
    for given in (torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.bfloat16)):
        (average,) = reducer.reduce([given])
        assert type(average) is torch.Tensor
        assert average.tolist() == [1, 1]
    with pytest.raises(
        dist.UsageError, match=r"params\[1\] is a tensor of torch; use .*DistributedDataParallel"
    ):
        GradientReducer(torch.nn.Linear(2, 2).parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("find_unused", [False, True])
def test_a_reducer_works_after_an_error_that_leaves_the_group_usable(rank: int, find_unused: bool) -> None:
    reducer, other = (
        GradientReducer([np.zeros(2), np.zeros(count)], bucket_bytes=1, find_unused=find_unused)
        for count in (3, 5)
    )
    for joins in (False, True):
        with reducer.join() if joins else nullcontext(), other.join() if joins else nullcontext():
            for _ in range(2):
                with pytest.raises(dist.MismatchError):  # of the first bucket; the second one is reduced
                    step(other if rank else reducer, {1: 1, 0: 1})
                for each in (reducer, other):
                    step(each, {1: rank, 0: 1})
                    assert (each.grads[1] == 0.5).all()
                    assert (each.grads[0] == 1).all()


@pytest.mark.ranks(1)
def test_no_bucket_is_larger_than_bucket_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except that a bucket has at least one array. The first bucket has a quarter of the size, to start early."""
    sent, all_reduce = [], gradients.all_reduce
    spy = lambda x, *args, **how: sent.append(x.nbytes) or all_reduce(x, *args, **how)  # noqa: E731
    monkeypatch.setattr(gradients, "all_reduce", spy)
    reducer = GradientReducer([np.zeros(10, "f4")] * 6, bucket_bytes=100)
    reducer.ready(*range(6))
    reducer.wait()
    assert sent == [40, 80, 80, 40]


@pytest.mark.ranks(1)
def test_wrong_use() -> None:
    reducer = GradientReducer({"a": np.zeros(2), "b": np.zeros(2)})
    with pytest.raises(dist.UsageError, match=r"no gradient 'c'.*'b', 'a'"):
        reducer.ready("c")
    reducer.ready("a")
    with pytest.raises(dist.UsageError, match="'a' was ready before"):
        reducer.ready("a")
    with pytest.raises(dist.UsageError, match="there is no gradient for 'b'"):
        reducer.wait()
    reducer.ready("b")
    reducer.wait()
    with pytest.raises(dist.UsageError, match="empty"):
        GradientReducer([])
    with pytest.raises(dist.UsageError, match="floats"):
        GradientReducer([np.zeros(3, int)])
    with pytest.raises(dist.UsageError, match="give an array"):
        GradientReducer([3.0])
    with pytest.raises(dist.UsageError, match="'int8' needs gradients of float32"):
        GradientReducer([np.zeros(3)], travel="int8")
    with pytest.raises(dist.UsageError, match="travel is 'int4'"):
        GradientReducer([np.zeros(3)], travel="int4")
    with pytest.raises(dist.UsageError, match="bucket_bytes"):
        GradientReducer([np.zeros(3)], bucket_bytes=0)
