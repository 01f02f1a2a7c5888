"""Users' reductions: any dtype, any order of arguments, records, and errors that name the function."""

from __future__ import annotations

import os
import subprocess
import sys

import numba
import numpy as np
import pytest
from kernels import checks
from kernels.checks import FIRST

from fastcoll.core.reduce_op import ReduceOp
from fastcoll.errors import ArrayError, UsageError
from fastcoll.kernels.reduce import reducer

RECORDS = checks.RECORDS | {"with a text": np.dtype([("index", "i4"), ("tag", "S3"), ("value", "f4")])}


@pytest.mark.long
@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
def test_any_dtype_in_rank_order_into_any_destination(reduce, dtype):
    checks.check_rank_order(reduce, dtype, 2050)


@pytest.mark.parametrize("name", RECORDS)
def test_records_for_argmax(reduce, name):
    checks.check_argmax(reduce, RECORDS[name], 1100)


def test_records_without_fields_have_nothing_to_reduce(reduce):
    assert reduce(ReduceOp.custom(lambda a, b: a), np.zeros((2, 3), [])).size == 3


@pytest.mark.parametrize("op", [FIRST, ReduceOp.SUM], ids=["custom", "SUM"])
def test_each_operation_is_compiled_once_a_dtype(op):
    single = reducer(op, np.dtype("f4"))
    assert reducer(op, np.dtype("float32")) is single
    assert reducer(op, np.dtype("f8")).address != single.address
    assert single.code == op.code
    assert (reducer(ReduceOp.MAX, np.dtype("f4")).address == single.address) == (op == ReduceOp.SUM)


@pytest.mark.parametrize("function", checks.NOT_COMPILABLE)
def test_uncompilable_functions_are_refused_by_name(function):
    refused = rf"'{function.__name__}' for elements of dtype float32.* Numba says: \w"
    with pytest.raises(UsageError, match=refused):
        reducer(ReduceOp.custom(function), np.dtype("f4"))


def test_a_function_compiles_while_numba_leaves_functions_alone(monkeypatch):
    """As with NUMBA_DISABLE_JIT=1, for coverage or a debugger."""
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert reducer(ReduceOp.custom(lambda a, b: a if a > b else b), np.dtype("f4")).address


@pytest.mark.limit(60)
def test_long_records_compile_in_seconds():
    dtype = np.dtype([("m", "f8", (2048,))])

    def first(a, b):
        return a

    assert reducer(ReduceOp.custom(first), dtype).address


def test_a_function_that_returns_nothing_on_a_path_is_refused():
    def larger(a, b):
        if a >= b:
            return a  # and None otherwise

    with pytest.raises(UsageError, match="ends without a `return`"):
        reducer(ReduceOp.custom(larger), np.dtype("i8"))


@pytest.mark.parametrize("dtype", [">f4", [("a", ">i2")], "O", "U3", [("a", "O")], "M8[s]"], ids=str)
def test_dtypes_without_a_compiled_type_are_refused(dtype):
    with pytest.raises(ArrayError, match="dtype"):
        reducer(FIRST, np.dtype(dtype))


AGAIN_AND_AGAIN = """
import ctypes
import signal
import numba
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
            times, seconds = times + 1, 1.5 * seconds

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
    command, environment = (
        [sys.executable, "-c", AGAIN_AND_AGAIN],
        {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
    )
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert (done.returncode, done.stdout) == (0, "[8.0, 7.0, 6.0, 5.0, 4.0, 5.0, 6.0, 7.0, 8.0]\n"), done
