"""The values that ranks send are exact in every dtype, and wrong values are found."""

import numpy as np
import pytest

from fastcoll.arrays.dtypes import parse_dtype
from fastcoll.bench.cases import REDOPS
from fastcoll.bench.measuring import PERIOD, count_wrong, fill, moved, reduced_input, reduced_output

FOLDS = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64"]


PAIRS = [
    (redop, dtype)
    for redop in FOLDS
    for dtype in ["bool", "int8", "uint8", "int64", *FLOATS]
    if dtype not in FLOATS or not redop.startswith("b")  # floats have no bits to combine
]


@pytest.mark.parametrize(("redop", "dtype"), PAIRS)
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_reduction_in_the_dtype_itself_is_exact(redop, dtype, ranks):
    kind = parse_dtype(dtype)
    total = reduced_input(redop, 0, ranks, kind)
    for rank in range(1, ranks):
        total = FOLDS[redop](total, reduced_input(redop, rank, ranks, kind))
    np.testing.assert_array_equal(total, reduced_output(redop, ranks, kind))


@pytest.mark.parametrize("dtype", ["int8", *FLOATS])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_average_is_exact(dtype, ranks):
    kind = parse_dtype(dtype)
    total = sum(reduced_input("avg", rank, ranks, kind).astype(np.complex128) for rank in range(ranks))
    np.testing.assert_array_equal(total / ranks, reduced_output("avg", ranks, kind).astype(np.complex128))


@pytest.mark.parametrize("count", [0, 1, PERIOD - 1, PERIOD, 2 * PERIOD + 17])
@pytest.mark.parametrize("start", [0, 1, PERIOD + 3])
def test_filled_arrays_are_right(count, start):
    x = np.zeros(count, np.int32)
    tile = moved(3, x.dtype)
    fill(x, tile, start)
    assert count_wrong(x, tile, start) == 0
    np.testing.assert_array_equal(x, tile[(start + np.arange(count)) % PERIOD])


def test_a_wrong_element_is_found_wherever_it_is():
    tile = moved(0, np.dtype("float32"))
    for place in (0, PERIOD - 1, PERIOD, 3 * PERIOD + 4):
        x = np.empty(3 * PERIOD + 5, np.float32)
        fill(x, tile)
        x[place] += 1
        assert count_wrong(x, tile) == 1
    x[:] = np.nan
    assert count_wrong(x, tile) == x.size


def test_swapped_chunks_and_blocks_are_found():
    x = np.empty(1 << 18, np.float32)
    tile = moved(1, x.dtype)
    fill(x, tile)
    chunks = x.reshape(4, -1)
    assert count_wrong(chunks[[0, 2, 1, 3]].reshape(-1), tile) > 10_000
    assert count_wrong(x, moved(2, x.dtype)) > 200_000


def test_stale_zeros_are_found():
    assert all((moved(source, np.dtype("int8")) != 0).all() for source in range(64))
    assert all(
        (reduced_output(op, 4, np.dtype("int32")) != 0).all() for op in REDOPS if op not in ("band", "bxor")
    )
