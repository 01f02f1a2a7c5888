"""all_reduce of float32 that travels in a narrow type: the bits, the bound of the error, feedback, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from together import together

from fastcoll.core.group import ProcessGroup
from fastcoll.core.reduce_op import ReduceOp
from fastcoll.core.travel import checked
from fastcoll.errors import ArrayError, MismatchError, UnavailableError, UsageError
from fastcoll.net.tcp.plans.narrowed import SEGMENT
from net.groups import everybody, groups
from net.meshes import default_settings, nothing_left

HALVES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
BLOCK = 256
SIZES = [1, 2, 3, 5, 8]
COUNTS = [0, 1, 255, 256, 1000, 80_001]  # the last one has several segments of each type


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with default_settings(monkeypatch), nothing_left():
        yield


def numbers(rank: int, count: int) -> np.ndarray:
    """Return numbers of very different magnitudes."""
    rng = np.random.default_rng([rank, count])
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype("f4")


def rounded(x: np.ndarray, travel: str) -> np.ndarray:
    return x.astype(HALVES[travel]).astype("f4")


def steps(x: np.ndarray) -> np.ndarray:
    """Return the step of int8 at each element: the largest magnitude of its block, divided by 127."""
    blocks = np.zeros(-(-x.size // BLOCK) * BLOCK, "f4")
    blocks[: x.size] = np.abs(x)
    return np.repeat(blocks.reshape(-1, BLOCK).max(1, initial=0) / 127, BLOCK)[: x.size]


def reduced(made: list[ProcessGroup], arrays: list[np.ndarray], op: ReduceOp, travel: str) -> np.ndarray:
    """Reduce copies of the arrays on all ranks; check that results have the same bits, and return the result."""
    results = [array.copy() for array in arrays]
    for error in everybody(made, lambda g: g.all_reduce_narrow(results[g.rank], op, False, travel, None)):
        assert error is None, error
    assert len({result.tobytes() for result in results}) == 1
    return results[0]


@pytest.mark.parametrize("value", [np.finfo("f4").max, -np.finfo("f4").max, np.float32(3.4e38)])
def test_the_largest_numbers_stay_finite_as_int8(value: np.float32) -> None:
    """A step of the largest number divided by 127 could be rounded up, and 127 steps be infinite."""
    x, nothing = np.zeros(300, "f4"), np.zeros(300, "f4")
    x[5] = value
    with groups(2) as made:
        result = reduced(made, [x, nothing], ReduceOp.SUM, "int8")
    assert abs(result[5] / value - 1) < 1 / 127
    assert not np.delete(result, 5).any()


@pytest.mark.parametrize("size", SIZES)
def test_the_sum_is_computed_in_float32_and_rounded_once(size: int) -> None:
    with groups(size) as made:
        for count in COUNTS:
            arrays = [numbers(rank, count) for rank in range(size)]
            for travel in HALVES:
                sent = [rounded(array, travel) for array in arrays]
                total = sent[0].copy()
                for each in sent[1:]:
                    total += each
                result = reduced(made, arrays, ReduceOp.SUM, travel)
                np.testing.assert_array_equal(result, rounded(total, travel))
                u, tiny = {"bfloat16": (2.0**-8, 0), "float16": (2.0**-11, 2.0**-25)}[travel]
                exact, magnitudes = sum(x.astype("f8") for x in arrays), sum(map(np.abs, arrays))
                bound = (2 * u + u * u + size * 2.0**-23) * magnitudes + (size + 1) * tiny
                assert (np.abs(result - exact) <= bound).all()
                average = reduced(made, arrays, ReduceOp.AVG, travel)
                np.testing.assert_array_equal(average, rounded(total / np.float32(size), travel))


@pytest.mark.parametrize("size", SIZES)
def test_int8_is_within_half_a_step_of_each_operand_and_of_the_result(size: int) -> None:
    with groups(size) as made:
        for count in COUNTS:
            arrays = [numbers(rank, count) for rank in range(size)]
            exact = sum(array.astype("f8") for array in arrays)
            for op, divisor in ((ReduceOp.SUM, 1), (ReduceOp.AVG, size)):
                result = reduced(made, arrays, op, "int8")
                bound = 0.502 * (sum(map(steps, arrays)) / divisor + steps(result))
                assert (np.abs(result - exact / divisor) <= bound).all()


def test_more_ranks_than_exchange_headers_directly() -> None:
    with groups(17) as made:
        arrays = [numbers(rank, 5000) for rank in range(17)]
        exact = sum(array.astype("f8") for array in arrays) / 17
        result = reduced(made, arrays, ReduceOp.AVG, "int8")
        assert (np.abs(result - exact) <= 0.502 * (sum(map(steps, arrays)) / 17 + steps(result))).all()


def test_a_block_with_infinity_or_nan_becomes_nan_and_no_other_block() -> None:
    arrays = [np.ones(4 * BLOCK, "f4"), np.ones(4 * BLOCK, "f4")]
    arrays[0][0], arrays[1][BLOCK] = np.inf, np.nan
    arrays[0][2 * BLOCK : 3 * BLOCK] = arrays[1][2 * BLOCK : 3 * BLOCK] = 2.0**-120
    with groups(2) as made:
        result = reduced(made, arrays, ReduceOp.SUM, "int8").reshape(4, BLOCK)
    assert np.isnan(result[:2]).all()
    assert (result[2] == 0).all()
    assert (result[3] == 2).all()


@pytest.mark.parametrize("travel", [*HALVES, "int8"])
def test_feedback_keeps_the_sum_of_what_is_lost_below_one_step(travel: str) -> None:
    """Both ranks have the same array, so that the average loses nothing more than each rank does."""
    x, turns = np.linspace(0.5, 1.0, 1000, dtype="f4"), 1000
    step = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 1 / 127}[travel]

    def drift(group: ProcessGroup, feedback: bool) -> float:
        lost, total = np.zeros_like(x) if feedback else None, np.zeros(x.size)
        for _ in range(turns):
            y = x.copy()
            group.all_reduce_narrow(y, ReduceOp.AVG, False, travel, lost)
            total += y
        return float(np.abs(total - turns * x.astype("f8")).max())

    with groups(2) as made:
        assert max(everybody(made, lambda g: drift(g, True))) < step
        assert min(everybody(made, lambda g: drift(g, False))) > 100 * step


@pytest.mark.parametrize("travel", [*HALVES, "int8"])
def test_lost_is_what_the_items_do_not_represent(travel: str) -> None:
    """The result of a group of one rank has exactly what the rank has sent."""
    for count in COUNTS:
        x, lost = numbers(0, count), np.full(count, 2.0**-9, "f4")
        given, before = x.copy(), lost.copy()
        with groups(1) as (group,):
            group.all_reduce_narrow(x, ReduceOp.SUM, False, travel, lost)
        np.testing.assert_array_equal(lost, (given + before) - x)
        assert count < 2 or lost.any()


def test_halves_keep_infinities_and_nan_and_lost_has_neither() -> None:
    odd = np.array([np.inf, -np.inf, np.nan, 3e38, -0.0, 1e-44, 6e-8, 65504, 65520, 1e9] * 30, "f4")
    with groups(2) as made, np.errstate(over="ignore", invalid="ignore"):
        for travel in HALVES:
            results, lost = [odd.copy() for _ in made], [np.zeros_like(odd) for _ in made]

            calls = [
                partial(group.all_reduce_narrow, result, ReduceOp.AVG, False, travel, each)
                for group, result, each in zip(made, results, lost, strict=True)
            ]
            assert together(*calls) == [None, None]
            sent = rounded(odd, travel)
            average = (sent + sent) / np.float32(2)  # 3e38 + 3e38 is infinite in float32
            np.testing.assert_array_equal(results[0], rounded(average, travel))
            np.testing.assert_array_equal(results[0], results[1])
            rest = odd - sent
            np.testing.assert_array_equal(lost[0], np.where(np.isfinite(rest), rest, 0))


def test_huge_numbers_and_blocks_of_zeros_in_int8() -> None:
    x = np.zeros(3 * BLOCK, "f4")
    x[:BLOCK], x[2 * BLOCK :] = 1.5e38, -1e-44
    with groups(2) as made:
        result = reduced(made, [x, x], ReduceOp.SUM, "int8").reshape(3, BLOCK)
    np.testing.assert_allclose(result[0], 3e38, rtol=1e-6)
    assert (result[1:] == 0).all()


def test_lengths_are_compared_although_they_have_as_many_blocks() -> None:
    with groups(2) as made:
        arrays = [np.full(300 + 10 * rank, 0.1, "f4") for rank in range(2)]
        for error in everybody(
            made, lambda g: g.all_reduce_narrow(arrays[g.rank], ReduceOp.SUM, False, "int8", None)
        ):
            assert isinstance(error, MismatchError)
            assert "int8, 300 elements" in str(error)
            assert "int8, 310 elements" in str(error)
        assert all((array == np.float32(0.1)).all() for array in arrays)


def test_strided_arrays_and_asynchronous_calls() -> None:
    with groups(2) as made:
        whole = [np.full((50, 20), rank + 1, "f4") for rank in range(2)]

        def call(group: ProcessGroup) -> None:
            x = whole[group.rank]
            works = [
                group.all_reduce_narrow(part, ReduceOp.SUM, True, travel, None)
                for part, travel in ((x[:, ::2], "bfloat16"), (x[:, 1::2], "int8"))
            ]
            for work in works:
                work.wait()

        assert everybody(made, call) == [None, None]
        for x in whole:
            np.testing.assert_allclose(x, 3, rtol=1e-6)


def test_scratch_memory_has_the_items_of_one_segment_only() -> None:
    arrays = [numbers(rank, 3_000_001) for rank in range(2)]
    with groups(2) as made:
        for travel in (*HALVES, "int8"):
            reduced(made, arrays, ReduceOp.SUM, travel)
        assert all(group.backend.context._scratch.nbytes <= 10 * SEGMENT for group in made)


def test_arrays_that_are_not_in_host_memory_are_refused() -> None:
    on_gpu = SimpleNamespace(dtype=np.dtype("f4"), size=4)
    with pytest.raises(ArrayError, match="float32 in host memory, got SimpleNamespace"):
        checked("int8", on_gpu, ReduceOp.SUM, None)


@pytest.mark.parametrize("travel", [*HALVES, "int8"])
def test_feedback_over_a_thousand_gradients_loses_one_rounding(travel: str) -> None:
    """The result of a group of one rank is what the rank has sent."""
    rng, lost = np.random.default_rng(7), np.zeros(600, "f4")
    given, sent, largest = np.zeros(600), np.zeros(600), 0.0
    relative = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "int8": 0.502 / 127}[travel]
    with groups(1) as (group,):
        for _ in range(1000):
            x = (1 + rng.standard_normal(600)).astype("f4")
            given += x
            largest = max(largest, float(np.abs(x + lost).max()))
            group.all_reduce_narrow(x, ReduceOp.SUM, False, travel, lost)
            sent += x
    in_float32 = 1000 * 2.0**-24 * largest  # x + lost is rounded to float32 in each call
    assert np.abs(given - sent).max() <= 2 * relative * largest + in_float32


def test_ranks_that_differ_in_the_type_are_named_and_nothing_is_changed() -> None:
    names = ["bfloat16", "float16", "int8"]
    with groups(3) as made:
        arrays, lost = ([np.full(300, rank + 0.1, "f4") for rank in range(3)] for _ in range(2))
        before = [array.copy() for array in (*arrays, *lost)]

        def call(group: ProcessGroup) -> None:
            rank = group.rank
            group.all_reduce_narrow(arrays[rank], ReduceOp.SUM, False, names[rank], lost[rank])

        for error in everybody(made, call):
            assert isinstance(error, MismatchError)
            for rank, name in enumerate(names):
                assert f"rank {rank} called all_reduce(float32 that travels as {name}" in str(error)
        for array, old in zip((*arrays, *lost), before, strict=True):
            np.testing.assert_array_equal(array, old)
        reduced(made, arrays, ReduceOp.SUM, "int8")  # the group stays usable


def test_wrong_arguments_are_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, other = np.zeros(4, "f4"), np.zeros(5, "f4")
    wrong = [
        (UsageError, "travel is 'int4'", (x, ReduceOp.SUM, False, "int4", None)),
        (UsageError, "lost is given without travel", (x, ReduceOp.SUM, False, None, x.copy())),
        (UsageError, "SUM or ReduceOp.AVG", (x, ReduceOp.MAX, False, "int8", None)),
        (ArrayError, "int32", (np.zeros(4, "i4"), ReduceOp.SUM, False, "int8", None)),
        (ArrayError, "contiguous", (x, ReduceOp.SUM, False, "int8", np.zeros((4, 2), "f4")[:, 0])),
        (ArrayError, "dict", ({"a": x}, ReduceOp.SUM, False, "int8", None)),
        (ArrayError, "float64", (np.zeros(4), ReduceOp.SUM, False, "int8", None)),
        (ArrayError, "of 4 elements", (x, ReduceOp.SUM, False, "int8", other)),
        (ArrayError, "another", (x, ReduceOp.SUM, False, "int8", x)),
    ]
    with groups(2) as made:
        for error, text, arguments in wrong:
            for found in everybody(made, lambda g, a=arguments: g.all_reduce_narrow(*a)):
                assert isinstance(found, error)
                assert text in str(found)
        for group in made:
            monkeypatch.setattr(group.backend, "narrows", False)
        for found in everybody(made, lambda g: g.all_reduce_narrow(x, ReduceOp.SUM, False, "int8", None)):
            assert isinstance(found, UnavailableError | MismatchError)
            assert "not available" in str(found)
