"""The words of a call: what ranks called differently can be told apart by what is said of it."""

from __future__ import annotations

import numpy as np
import pytest

from fastcoll.core import calls
from fastcoll.core.reduce_op import ReduceOp

F8 = np.dtype("f8")


def said(operation: str, dtype: np.dtype, **more) -> str:
    return calls.describe(calls.encode(operation, dtype, **more), 40)


def test_coalesced_calls_say_so_and_that_their_sizes_differ() -> None:
    one, other = (said("all_reduce", F8, op=ReduceOp.SUM, parts=parts) for parts in ([2, 3], [3, 2]))
    assert one.startswith("all_reduce_coalesced(float64, 5 elements, op=SUM, arrays of checksum 0x")
    assert one != other
    assert said("all_reduce", F8, op=ReduceOp.SUM) == "all_reduce(float64, 5 elements, op=SUM)"
    one, other = (said("all_gather", F8, parts=parts) for parts in ([2, 3], [3, 2]))
    assert one.startswith("all_gather_coalesced(float64, arrays of checksum 0x")
    assert one != other


@pytest.mark.parametrize("parts", [(), (5,)])
def test_dtypes_without_a_name_are_told_apart(parts: tuple[int, ...]) -> None:
    dtypes = [np.dtype(f"M8[{unit}]") for unit in ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns")]
    assert len({said("broadcast", dtype, parts=parts) for dtype in dtypes}) == len(dtypes)
    assert all("another dtype (0x" in said("broadcast", dtype, parts=parts) for dtype in dtypes)
