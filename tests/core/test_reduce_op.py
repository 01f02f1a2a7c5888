"""How a ReduceOp is made: PREMUL_SUM's factor, and the parts of a function that ranks compare."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from fastcoll import ReduceOp
from fastcoll.core.operands import divide
from fastcoll.errors import UsageError


@pytest.mark.parametrize(
    "factor", [None, "x", "2", [2.0], (1, 2), np.ones(3), np.ones(0), np.datetime64("2026")]
)
def test_a_factor_that_is_no_number_is_refused(factor: Any) -> None:
    with pytest.raises(UsageError, match=r"PREMUL_SUM's factor is .* give one number"):
        ReduceOp.PREMUL_SUM(factor)


def test_a_number_is_kept_as_it_is_and_an_array_of_one_element_is_a_number() -> None:
    for factor in (2, 2.0, True, 2j, Fraction(1, 2), np.float32(2), np.int8(2), np.complex64(2)):
        assert ReduceOp.PREMUL_SUM(factor).factor is factor
    for array in (np.array(2.5), np.array([2.5]), np.array([[2.5]], "f4")):
        assert ReduceOp.PREMUL_SUM(array).factor == 2.5


def twice_the_larger(a: float, b: float) -> float:
    return a if a > b else b


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
@pytest.mark.parametrize(
    "op", [ReduceOp.SUM, ReduceOp.BXOR, ReduceOp.PREMUL_SUM(2.5), ReduceOp.custom(twice_the_larger)], ids=repr
)
def test_a_copy_is_equal_to_what_it_copies(op: ReduceOp, again: Any) -> None:
    assert again(op) == op
    assert {op: 1}[again(op)] == 1
    assert again(op) not in (ReduceOp.MIN, ReduceOp.PREMUL_SUM(3), ReduceOp.custom(lambda a, b: a), "SUM")


def test_a_function_may_refer_to_a_name_that_is_bound_later() -> None:
    def scaled(a, b):
        return a + factor * b

    early = ReduceOp.custom(scaled)
    factor = 3
    late = ReduceOp.custom(scaled)
    assert late.code != early.code  # numbers are compared by value


def test_values_around_a_function_are_compared() -> None:
    def made(factor: Any, default: Any = 1) -> ReduceOp:
        def f(a, b, c=default):
            return a + factor * b * c

        return ReduceOp.custom(f)

    assert made(2).code == made(2).code
    assert made(2).code != made(3).code
    assert made(2).code != made(2, 4).code
    for one, other in (
        (np.float32(2), np.float32(3)), (np.int64(2), np.int64(3)), (np.True_, np.False_), ((1, 2), (1, 3)),
        (frozenset({1, "a"}), frozenset({2, "a"})),
    ):  # fmt: skip
        assert made(one).code != made(other).code
        assert made(one).code == made(copy.deepcopy(one)).code
    among = [
        ReduceOp.custom(f)
        for f in (lambda a, b: a if a in (1, 2) else b, lambda a, b: a if a in (1, 3) else b)
    ]
    assert among[0].code != among[1].code


def test_a_callable_without_a_hash_is_refused() -> None:
    @dataclass
    class Scaled:
        factor: float

        def __call__(self, a: Any, b: Any) -> Any:
            return a + self.factor * b

    with pytest.raises(UsageError, match="a Scaled, which has no hash"):
        ReduceOp.custom(Scaled(2.0))


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
@pytest.mark.parametrize("n", [3, 200, 40_000])
def test_an_average_is_truncated_for_any_number_of_ranks(dtype: str, n: int) -> None:
    limits = np.iinfo(dtype)
    values = [limits.min, limits.min // 2, limits.max // 2, limits.max, 0, 1, n % 100]
    x = np.array(values, dtype)
    divide(x, n)
    assert x.tolist() == [int(Fraction(value, n)) for value in values]
