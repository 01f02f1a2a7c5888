"""kernels/primitives.py computes what core/signature.py and core/partition.py compute."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastcoll.compiler.jit import entry
from fastcoll.core import partition, signature
from fastcoll.kernels import primitives
from fastcoll.kernels.primitives import address_of
from fastcoll.kernels.pyobjects import Index, integer

NBYTES = st.one_of(st.integers(-1, 9), st.integers(-1, 1 << 48))
WORDS = st.lists(NBYTES, min_size=1, max_size=9)


@entry
def balance(rank: Index, size: Index, gives: Index, takes: Index) -> int:
    return primitives.balance(integer(rank), integer(size), integer(gives), integer(takes))


@entry
def shape_of(sizes: Index, size: Index) -> int:
    return primitives.shape_of(integer(sizes), integer(size))


@entry
def start_of(total: Index, parts: Index, k: Index, unit: Index) -> int:
    return primitives.start_of(integer(total), integer(parts), integer(k), integer(unit))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_balances(data):
    size = data.draw(st.integers(1, 9))
    rows = st.lists(NBYTES, min_size=size, max_size=size)
    gives, takes, rank = data.draw(rows), data.draw(rows), data.draw(st.integers(0, size - 1))
    tables = np.array([gives, takes], np.int64)
    found = balance.call(rank, size, address_of(tables[0]), address_of(tables[1]))
    assert found == signature.balance(rank, gives, takes)


@settings(max_examples=100, deadline=None)
@given(WORDS)
@example([8, 8, 8])
def test_shapes(sizes):
    assert shape_of.call(address_of(np.array(sizes, np.int64)), len(sizes)) == signature.shape_of(sizes)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 40), st.integers(1, 64), st.integers(1, 4096), st.data())
def test_starts_of_parts(total, parts, unit, data):
    k = data.draw(st.integers(0, parts))
    assert start_of.call(total, parts, k, unit) == partition.start_of(total, parts, k, unit)
