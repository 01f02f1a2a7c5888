"""Users' reductions: any dtype, any order of arguments, records, and errors that name the function."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import reduce as fold

import ml_dtypes
import numba
import numpy as np
import pytest

from fastcoll.core.reduce_op import ReduceOp
from fastcoll.errors import ArrayError, UsageError
from fastcoll.kernels.reduce import reducer

PAIR = np.dtype([("value", "f8"), ("index", "i8")])
PACKED = np.dtype([("index", "i4"), ("tag", "S3"), ("value", "f4")])


def first_nonzero(a, b):
    """Associative but not commutative."""
    return a if a else b


def larger(a, b):
    """The pair with the larger value; of equal values, the one with the smaller index."""
    if a.value > b.value or (a.value == b.value and a.index < b.index):
        return a
    return b


def writes_into_its_argument(a, b):
    a.index = a.index + b.index
    return a


FIRST = ReduceOp.custom(first_nonzero)
LARGER = ReduceOp.custom(larger)
DTYPES = ["?", "i1", "u8", "f4", "c8", "f2", ml_dtypes.bfloat16]


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_in_rank_order_into_any_destination(reduce, dtype):
    random = np.random.default_rng(2)
    for n in (1, 2, 5):
        sources = (random.random((n, 2050)) < 0.3) * random.integers(1, 100, (n, 2050))
        sources = sources.astype(dtype)
        want = fold(lambda a, b: np.where(a.astype(bool), a, b), sources)
        for into in (None, 0, n - 1):
            assert reduce(FIRST, sources, into).tobytes() == want.tobytes()


@pytest.mark.parametrize(
    "dtype", [PAIR, PACKED, np.dtype(PACKED, align=True)], ids=["pair", "packed", "aligned"]
)
def test_records_for_argmax(reduce, dtype):
    random = np.random.default_rng(4)
    for n in (1, 2, 3, 5):
        sources = np.zeros((n, 1100), dtype)
        sources["value"] = random.integers(0, 3, sources.shape)
        sources["index"] = random.permutation(sources.size).reshape(sources.shape)
        key = [[(-x["value"], x["index"], rank) for rank, x in enumerate(column)] for column in sources.T]
        winners = [min(column)[2] for column in key]
        want = sources[winners, np.arange(sources.shape[1])]
        for into in (None, 0, n - 1):
            result = reduce(LARGER, sources, into)
            assert (result["value"] == want["value"]).all()
            assert (result["index"] == want["index"]).all()


def test_a_record_function_may_write_into_its_arguments(reduce):
    op = ReduceOp.custom(writes_into_its_argument)
    for n in (2, 3):
        sources = np.zeros((n, 40), PAIR)
        sources["index"] = np.arange(n * 40).reshape(n, 40)
        for into in (None, 0, 1):  # `reduce` checks that no source changes
            assert (reduce(op, sources, into)["index"] == sources["index"].sum(axis=0)).all()


def test_records_without_fields_have_nothing_to_reduce(reduce):
    assert reduce(ReduceOp.custom(lambda a, b: a), np.zeros((2, 3), [])).size == 3


def test_halves_are_computed_in_float32(reduce):
    op = ReduceOp.custom(lambda a, b: a * 4096 + b * 4096 - a * 4095 - b * 4095, "sum")
    sources = np.array([[30000], [20000]], np.float16)
    assert reduce(op, sources) == np.float16(50000)


def test_jitted_functions_ufuncs_and_builtins(reduce):
    sources = np.array([[3.0, 5.0], [4.0, 12.0]])
    scale = 2.0
    assert reduce(ReduceOp.custom(numba.njit(lambda a, b: a + b)), sources).tolist() == [7, 17]
    assert reduce(ReduceOp.custom(np.hypot), sources).tolist() == [5, 13]
    assert reduce(ReduceOp.custom(max), sources).tolist() == [4, 12]
    assert reduce(ReduceOp.custom(lambda a, b: scale * a + b), sources).tolist() == [10, 22]


def test_each_operation_is_compiled_once_a_dtype():
    single = reducer(FIRST, np.dtype("f4"))
    assert reducer(FIRST, np.dtype("f4")) is single
    assert reducer(FIRST, np.dtype("f8")).address != single.address
    assert single.code == FIRST.code


def not_compilable(a, b):
    return a.no_such_attribute + b


@pytest.mark.parametrize(
    "function", [not_compilable, lambda a: a, lambda a, b: None, lambda a, b: (a, b), lambda a, b: a + 1j * b]
)
def test_uncompilable_functions_are_refused_by_name(function):
    with pytest.raises(
        UsageError, match=rf"'{function.__name__}' for elements of dtype float32.* Numba says: \w"
    ):
        reducer(ReduceOp.custom(function), np.dtype("f4"))


@pytest.mark.parametrize("dtype", [">f4", [("a", ">i2")], "O", "U3", [("a", "O")], "M8[s]"], ids=str)
def test_dtypes_without_a_compiled_type_are_refused(dtype):
    with pytest.raises(ArrayError, match="dtype"):
        reducer(ReduceOp.custom(first_nonzero), np.dtype(dtype))


AGAIN_AND_AGAIN = """
import ctypes
import signal
import numpy as np
from fastcoll.core.reduce_op import ReduceOp
from fastcoll.kernels.reduce import reducer

def until_done(work):
    times, seconds = 0, 0.02
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            work()
            signal.setitimer(signal.ITIMER_REAL, 0)
            return times
        except KeyboardInterrupt:
            times, seconds = times + 1, 1.2 * seconds

signal.signal(signal.SIGALRM, signal.default_int_handler)
larger = ReduceOp.custom(lambda a, b: a if a > b else b, "larger")
for op, dtype in ((larger, "f4"), (ReduceOp.SUM, "i2")):
    assert until_done(lambda: reducer(op, np.dtype(dtype))) > 0
x, y = np.arange(9.0, dtype="f4"), np.arange(9.0, dtype="f4")[::-1].copy()
found = reducer(larger, np.dtype("f4"))
srcs = np.array([x.ctypes.data, y.ctypes.data])
word = ctypes.c_int64
ctypes.CFUNCTYPE(None, *[word] * 5)(found.address)(0, x.ctypes.data, srcs.ctypes.data, 2, 9)
print(x.tolist())
"""


@pytest.mark.long
def test_ctrl_c_again_and_again_does_not_spoil_compilations(tmp_path):
    """From Numba's first import on, after 20 ms and a little later each time."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", AGAIN_AND_AGAIN], capture_output=True, text=True, env=environment, timeout=600
    )
    assert (done.returncode, done.stdout) == (0, "[8.0, 7.0, 6.0, 5.0, 4.0, 5.0, 6.0, 7.0, 8.0]\n"), done
