"""Signatures: they differ if calls differ, and the balances of sizes cancel exactly if all sizes agree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastcoll.core import signature
from fastcoll.core.reduce_op import ReduceOp

F8 = np.dtype("f8")


def described(operation: str, dtype: np.dtype, **more) -> str:
    return signature.describe(signature.encode(operation, dtype, **more), 40)


def test_coalesced_calls_and_their_sizes_are_described() -> None:
    for operation, op, text in (
        ("all_reduce", ReduceOp.SUM, "float64, 5 elements, op=SUM"),
        ("all_gather", None, "float64"),
    ):
        one, other = (described(operation, F8, op=op, parts=parts) for parts in ([2, 3], [3, 2]))
        assert one.startswith(f"{operation}_coalesced({text}, arrays of checksum 0x")
        assert one != other
    assert described("all_reduce", F8, op=ReduceOp.SUM) == "all_reduce(float64, 5 elements, op=SUM)"


def test_sizes_are_not_compared_only_if_all_ranks_may_differ_in_them() -> None:
    uneven, plain = signature.encode("all_gather", F8) | signature.UNEVEN, signature.encode("all_reduce", F8)
    assert signature.comparable([(uneven, 8), (uneven, 16)]) == [(uneven, 0), (uneven, 0)]
    assert signature.comparable([(uneven, 8), (plain, 16)]) == [(uneven, 8), (plain, 16)]


@pytest.mark.parametrize("parts", [(), (5,)])
def test_dtypes_without_a_name_differ(parts: tuple[int, ...]) -> None:
    dtypes = [np.dtype(f"M8[{unit}]") for unit in ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns")]
    assert len({described("broadcast", dtype, parts=parts) for dtype in dtypes}) == len(dtypes)
    assert all("another dtype (0x" in described("broadcast", dtype, parts=parts) for dtype in dtypes)


# ---- sizes ---------------------------------------------------------------------------------------------

WORD = 1 << 64
NBYTES = st.one_of(st.integers(-1, 9), st.integers(-1, 1 << 48))
TABLES = st.integers(2, 6).flatmap(
    lambda n: st.lists(st.lists(NBYTES, min_size=n, max_size=n), min_size=n, max_size=n)
)


def transposed(table: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*table, strict=True)]


def total(gives: list[list[int]], takes: list[list[int]]) -> int:
    """Return the sum of all ranks' balances; takes[rank] are the sizes that a rank expects."""
    rows = zip(gives, takes, strict=True)
    balances = [signature.balance(rank, *row) for rank, row in enumerate(rows)]
    assert all(-(1 << 63) <= balance < 1 << 63 for balance in balances)
    return sum(balances) % WORD


@settings(deadline=None)
@given(TABLES, st.data())
def test_sizes_cancel_only_if_they_agree(gives, data):
    """Not even differences that would cancel as numbers: one byte more here, one less there."""
    takes = transposed(gives)
    assert total(gives, takes) == 0
    pair = st.tuples(*[st.integers(0, len(gives) - 1)] * 2).filter(lambda p: p[0] != p[1])
    for src, dst in data.draw(st.lists(pair, min_size=1, max_size=4)):
        takes[dst][src] = max(-1, takes[dst][src] + data.draw(st.sampled_from([-1, 1])))
    assume(takes != transposed(gives))
    assert total(gives, takes) != 0


@pytest.mark.parametrize("size", [2, 3, 5])
def test_any_two_wrong_sizes_are_found(size: int) -> None:
    pairs = list(itertools.permutations(range(size), 2))
    right = [[8 * (1 + src + dst) for dst in range(size)] for src in range(size)]
    for (a, b), (c, d) in itertools.product(pairs, repeat=2):
        wrong = [row.copy() for row in right]
        wrong[a][b] += 4
        wrong[c][d] -= 4
        assert (total(right, transposed(wrong)) == 0) == (wrong == right)


def test_no_message_is_not_an_empty_one() -> None:
    assert signature.balance(0, [-1, -1], []) == 0 != signature.balance(0, [-1, 0], [])


@settings(deadline=None)
@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=9), st.data())
def test_shapes_differ_for_different_sizes(sizes, data):
    found = signature.shape_of(sizes)
    assert found == sum(sizes) if len(set(sizes)) == 1 else found < 0
    other = [*sizes]
    other[data.draw(st.integers(0, len(sizes) - 1))] += data.draw(st.integers(1, 1 << 20))
    assert signature.shape_of(other) != found


def test_a_call_word_of_no_operation_is_described() -> None:
    """A broken peer may send any word, and rank 0 may be that peer."""
    own = (signature.encode("barrier"), 0)
    text = signature.describe_mismatch([(0xF7, 8), own], [0, 1])
    assert "rank 0 called operation 247(" in text
    assert "rank 1 called barrier()" in text
