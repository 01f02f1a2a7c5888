"""What headers tell of sizes: balances cancel exactly when all pairs of ranks agree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastcoll.net.tcp.sizes import Sizes

WORD = 1 << 64
MATRICES = st.integers(2, 20).flatmap(
    lambda n: st.lists(
        st.lists(st.integers(0, 1 << 40), min_size=n, max_size=n).map(tuple), min_size=n, max_size=n
    )
)


def total(gives: list[tuple[int, ...]], takes: list[tuple[int, ...]]) -> int:
    rows = zip(gives, takes, strict=True)
    return sum(Sizes(0, given, taken).balance(rank) for rank, (given, taken) in enumerate(rows)) % WORD


@given(MATRICES)
def test_sizes_that_agree_cancel(gives):
    assert total(gives, list(zip(*gives, strict=True))) == 0


@given(MATRICES, st.data())
def test_one_size_that_differs_does_not(gives, data):
    ranks = st.integers(0, len(gives) - 1)
    rank, peer = data.draw(ranks), data.draw(ranks)
    takes = [list(row) for row in zip(*gives, strict=True)]
    takes[rank][peer] += data.draw(st.integers(1, 1000))
    assert total(gives, [tuple(row) for row in takes]) != 0


@given(MATRICES)
def test_a_balance_fits_a_word(gives):
    for rank, row in enumerate(gives):
        assert -(1 << 63) <= Sizes(0, row, ()).balance(rank) < 1 << 63
