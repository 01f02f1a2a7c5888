"""The oracle of collectives: inputs that any rank can compute for any other, and NumPy's result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
from typing import Any

import ml_dtypes
import numpy as np

import fastcoll as dist
from fastcoll import ReduceOp

Array = np.ndarray[Any, Any]

INTEGERS = [np.dtype(f"{sign}int{bits}") for bits in (8, 16, 32, 64) for sign in ("", "u")]
HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
FLOATS = [np.dtype(np.float32), np.dtype(np.float64)]
COMPLEX = [np.dtype(np.complex64), np.dtype(np.complex128)]
BOOL = np.dtype(bool)
DTYPES = [*INTEGERS, BOOL, *HALVES, *FLOATS, *COMPLEX]
RECORD = np.dtype([("value", "f4"), ("index", "i8"), ("tag", "S3")])
MOVABLE = [*DTYPES, RECORD, np.dtype("M8[ns]"), np.dtype("U5"), np.dtype(">f4"), np.dtype(np.longdouble)]

ARITHMETIC = [ReduceOp.SUM, ReduceOp.PRODUCT]
ORDER = [ReduceOp.MIN, ReduceOp.MAX]
BITS = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
LOGICAL = [ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR]

_BOOL_AS = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}
_FUNCTIONS = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
    "LAND": lambda a, b: np.logical_and(a, b).astype(a.dtype),
    "LOR": lambda a, b: np.logical_or(a, b).astype(a.dtype),
    "LXOR": lambda a, b: np.logical_xor(a, b).astype(a.dtype),
}


def ops_for(dtype: np.dtype[Any]) -> list[ReduceOp]:
    """Return the predefined operations of a dtype."""
    if dtype == BOOL:
        return [*ARITHMETIC, *ORDER, *BITS]
    if dtype in COMPLEX:
        return [*ARITHMETIC, ReduceOp.AVG]
    return [*ARITHMETIC, ReduceOp.AVG, *ORDER, *(BITS if dtype in INTEGERS else [])]


def counts(world_size: int) -> list[int]:
    """Return unusual numbers of elements: 0, 1, around the world's size, primes, just over a cache line's payload."""
    return sorted({0, 1, 2, world_size - 1, world_size, world_size + 1, 7, 31, 97, 1009})


def values(rank: int, count: int, dtype: np.dtype[Any], salt: int = 0) -> Array:
    """Return the input of `rank`: any bytes for operations that move data, moderate numbers for reductions."""
    return _values(rank, count, dtype, salt).copy()


@lru_cache(maxsize=20_000)
def _values(rank: int, count: int, dtype: np.dtype[Any], salt: int) -> Array:
    random = np.random.default_rng([rank, count, salt])
    if dtype == BOOL:
        return random.integers(0, 2, count).astype(bool)
    if dtype in INTEGERS:
        low = 0 if dtype.kind == "u" else -100
        return random.integers(low, 100, count).astype(dtype)
    if dtype in COMPLEX:
        return (random.normal(size=count) + 1j * random.normal(size=count)).astype(dtype)
    if dtype in HALVES or dtype in FLOATS:
        return random.normal(size=count).astype(dtype)
    if dtype.kind == "U":
        return np.array([f"{n:05d}" for n in random.integers(0, 99999, count)], dtype)
    if dtype == np.longdouble:
        return random.normal(size=count).astype(dtype)
    return np.frombuffer(random.bytes(count * dtype.itemsize), dtype)


def truths(rank: int, count: int, dtype: np.dtype[Any]) -> Array:
    """Return the input of `rank` for logical reductions: half of the elements are 0; floats have NaN and -0, too."""
    x = values(rank, count, dtype, 1)
    x[np.random.default_rng([rank, count]).random(count) < 0.5] = 0
    if dtype in HALVES or dtype in FLOATS:
        x[rank::7], x[rank + 1 :: 7] = -0.0, np.nan
    return x


def reduced(inputs: Sequence[Array], op: ReduceOp) -> Array:
    """Return the reduction of all inputs in rank order, rounded as the library promises."""
    dtype = inputs[0].dtype
    name = _BOOL_AS.get(op.name, op.name) if dtype == BOOL else op.name
    wide = [x.astype(np.float32) for x in inputs] if dtype in HALVES else list(inputs)
    with np.errstate(all="ignore"):
        total = reduce(_FUNCTIONS[name], wide)
        if op.name == "AVG":
            total = _average(total, len(inputs))
        return np.asarray(total).astype(dtype)


def _average(total: Array, n: int) -> Array:
    if total.dtype.kind in "iu":
        whole = np.abs(total.astype(object)) // n * np.sign(total.astype(object))
        return whole.astype(total.dtype)
    return (total / total.real.dtype.type(n)).astype(total.dtype)


def assert_same(got: Array, want: Array, what: object = "") -> None:
    """Check equality bit for bit; complex products and averages may differ, as NumPy uses fused operations for them."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.tobytes() == want.tobytes():  # a tenth of the time of a comparison that shows where arrays differ
        return
    if got.dtype == np.longdouble:  # its padding bytes mean nothing
        np.testing.assert_array_equal(got, want, str(what))
    elif got.dtype in COMPLEX:
        np.testing.assert_allclose(
            got, want, rtol=2e-5 if got.dtype == np.complex64 else 1e-12, err_msg=str(what)
        )
    else:
        np.testing.assert_array_equal(
            got.reshape(-1).view(np.uint8), want.reshape(-1).view(np.uint8), str(what)
        )


def assert_reduced(got: Array, want: Array, what: object = "") -> None:
    """As `assert_same`; where ranks are reduced node by node, floats may differ by the rounding of partial sums."""
    if dist.get_backend() != "auto" or got.dtype.kind in "biu" or got.dtype == RECORD:
        assert_same(got, want, what)
        return
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    rounding = 4 * float(ml_dtypes.finfo(got.dtype).eps)
    wide = (np.complex128 if got.dtype in COMPLEX else np.float64,)
    got, want = got.astype(*wide), want.astype(*wide)
    scale = float(np.abs(want).max(initial=1.0))
    np.testing.assert_allclose(got, want, rtol=rounding, atol=rounding * scale, err_msg=str(what))


def cases(world_size: int) -> Iterator[tuple[np.dtype[Any], ReduceOp, int]]:
    """Every dtype with each of its operations, every dtype with every count, and every operation with every count.

    A count says how elements are divided, and an operation how two of them combine: an operation of a dtype has every
    third count, and the dtype's next two operations the others.
    """
    for first, dtype in enumerate(DTYPES):
        for second, op in enumerate(ops_for(dtype)):
            yield from ((dtype, op, count) for count in counts(world_size)[(first + second) % 3 :: 3])


def moves(world_size: int) -> Iterator[tuple[np.dtype[Any], int]]:
    """Every dtype that can be moved with every third count, and every count with elements of 1 to 16 bytes."""
    for number, dtype in enumerate(MOVABLE):
        yield from ((dtype, count) for count in counts(world_size)[number % 3 :: 3])
