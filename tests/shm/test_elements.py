"""Elements as large as a slot: those of a user's dtype."""

from __future__ import annotations

import numpy as np
import pytest

import fastcoll as dist
from fastcoll import ArrayError, ReduceOp


@pytest.mark.ranks(2, backend="shm")
def test_an_element_must_fit_into_a_slot(rank, world_size):
    huge = np.dtype([("x", "f8", 40_000)])
    op = ReduceOp.custom(first)
    with pytest.raises(ArrayError, match="320000 bytes"):
        dist.reduce_scatter(np.zeros(1, huge), [np.zeros(1, huge)] * 2, op)
    x = np.array([rank + 1.0])
    dist.all_reduce(x)
    assert x[0] == 3


def first(a, b):
    return a
