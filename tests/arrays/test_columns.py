"""Columns of pandas, Arrow and polars: read in place, or rejected with the cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fastcoll.arrays.arrays import import_array
from fastcoll.errors import ArrayError

Make = Callable[[Any], Any]


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"pip install {name}")


def series(values: Any, dtype: str | None = None) -> Make:
    return lambda pd: pd.Series(values, dtype=dtype)


def arrow(values: Any, kind: str | None = None) -> Make:
    return lambda pa: pa.array(values, None if kind is None else getattr(pa, kind)())


TIMES = np.array(["2026-01-01", "2026-01-02"], "M8[ns]")

READ: list[tuple[str, str, Make, Any, str]] = [
    ("pandas", "float", series([1.5, np.nan]), [1.5, np.nan], "float64"),
    ("pandas", "int8", series([1, 2], "int8"), [1, 2], "int8"),
    ("pandas", "bool", series([True, False]), [True, False], "bool"),
    ("pandas", "times", series(TIMES), TIMES, "datetime64[ns]"),
    ("pandas", "slice", lambda pd: pd.Series([1, 2, 3, 4])[::2], [1, 3], "int64"),
    ("pandas", "a frame's column", lambda pd: pd.DataFrame({"a": [1, 2], "b": [3, 4]})["b"], [3, 4], "int64"),
    ("pandas", "index", lambda pd: pd.Index([1, 2]), [1, 2], "int64"),
    ("pandas", "nullable", series([1, 2], "Int64"), [1, 2], "int64"),
    ("pandas", "nullable array", lambda pd: pd.array([1, 2], "UInt8"), [1, 2], "uint8"),
    ("pandas", "nullable bool", series([True, False], "boolean"), [True, False], "bool"),
    ("pandas", "nullable float", series([1, 2], "Float32"), [1, 2], "float32"),
    ("pandas", "numpy's own", lambda pd: pd.Series([1.0, np.nan]).array, [1, np.nan], "float64"),
    ("pandas", "no rows", series([], "float32"), [], "float32"),
    ("pyarrow", "ints", arrow([1, 2, 3]), [1, 2, 3], "int64"),
    ("pyarrow", "slice", lambda pa: pa.array([1, 2, 3, 4])[1:3], [2, 3], "int64"),
    ("pyarrow", "half", lambda pa: pa.array(np.ones(2, np.float16)), [1, 1], "float16"),
    ("pyarrow", "times", lambda pa: pa.array(TIMES), TIMES, "datetime64[ns]"),
    ("pyarrow", "one chunk", lambda pa: pa.chunked_array([[1, 2]]), [1, 2], "int64"),
    ("pyarrow", "no chunks", lambda pa: pa.chunked_array([], pa.int16()), [], "int16"),
    ("pyarrow", "a table's column", lambda pa: pa.table({"a": [1.0, 2.0]})["a"], [1, 2], "float64"),
    ("pyarrow", "tensor", lambda pa: pa.Tensor.from_numpy(np.eye(2)), np.eye(2), "float64"),
    ("pyarrow", "buffer", lambda pa: pa.py_buffer(b"ab"), [97, 98], "int8"),
    ("pyarrow", "in pandas", lambda pa: library("pandas").Series([1, 2], dtype="int32[pyarrow]"), [1, 2], "int32"),
    ("polars", "floats", lambda pl: pl.Series([1.5, 2.5]), [1.5, 2.5], "float64"),
    ("polars", "slice", lambda pl: pl.Series([1, 2, 3])[1:], [2, 3], "int64"),
    ("polars", "fixed-size lists", lambda pl: pl.Series([[1, 2]], dtype=pl.Array(pl.Int64, 2)), [[1, 2]], "int64"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "make", "values", "dtype"), READ, ids=[f"{r[0]} {r[1]}" for r in READ]
)
def test_columns_are_read(name, kind, make, values, dtype):
    array = import_array(make(library(name)), writable=False).array
    assert type(array) is np.ndarray
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, values)


SHARED: list[tuple[str, Make, Callable[[Any], np.ndarray]]] = [
    ("pandas", series([1.0, 2.0]), lambda x: x.to_numpy(copy=False)),
    ("pandas", series([1, 2], "Int64"), lambda x: x.array.to_numpy(copy=False)),
    ("pyarrow", lambda pa: pa.array([1, 2, 3])[1:], lambda x: np.frombuffer(x.buffers()[1], "i8")[1:]),
    ("polars", lambda pl: pl.Series([1, 2]), lambda x: x.to_numpy(allow_copy=False)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "memory"), SHARED)
def test_columns_are_not_copied(name, make, memory):
    x = make(library(name))
    assert np.shares_memory(import_array(x, writable=False).array, memory(x))


REFUSED: list[tuple[str, str, Make, str]] = [
    ("pandas", "frame", lambda pd: pd.DataFrame({"a": [1]}), "DataFrame; give its columns one by one"),
    ("pandas", "missing", series([1, None], "Int64"), r"Int64 with missing values; give x\.fillna\(value\)"),
    ("pandas", "categories", series(["a", "b"], "category"), r"category, .*; give x\.cat\.codes"),
    ("pandas", "sparse", series([0, 1], "Sparse[int]"), r"Sparse.*; give x\.sparse\.to_dense\(\)"),
    ("pandas", "zone", series(TIMES, "datetime64[ns, UTC]"), r"UTC\], .*; give x\.dt\.tz_convert\(None\)"),
    ("pandas", "a categorical", lambda pd: pd.Categorical(["a"]), r"give x\.codes"),
    ("pandas", "a sparse array", lambda pd: pd.arrays.SparseArray([0, 1]), r"give x\.to_dense\(\)"),
    ("pandas", "an index", lambda pd: pd.DatetimeIndex(TIMES, tz="UTC"), r"give x\.tz_convert\(None\)"),
    ("pandas", "text", series(["a"], "string"), "object collectives"),
    ("pandas", "bits", series([True], "bool[pyarrow]"), r"packed into bits; give x\.astype\('uint8'\)"),
    ("pandas", "chunks", lambda pd: pd.concat([pd.Series([n], dtype="int64[pyarrow]") for n in (1, 2)]),
     r"in 2 chunks; give x\.to_numpy\(\)"),
    ("pandas", "objects", series([1, "a"], "object"), "object collectives"),
    ("pandas", "periods", lambda pd: pd.period_range("2026", periods=2, freq="D"), r"give x\.to_numpy\(dtype="),
    ("pyarrow", "nulls", arrow([1, None]), r"int64 with nulls; give x\.fill_null\(value\)"),
    ("pyarrow", "bits", arrow([True]), r"packed into bits; give x\.cast\(pyarrow\.uint8\(\)\)"),
    ("pyarrow", "chunks", lambda pa: pa.chunked_array([[1], [2]]), r"in 2 chunks; give x\.combine_chunks\(\)"),
    ("pyarrow", "text", arrow(["a"]), "of string, whose elements NumPy cannot view; .*object collectives"),
    ("pyarrow", "dates", arrow([1], "date32"), r"of date32.*; give x\.cast to a number"),
    ("pyarrow", "dictionary", lambda pa: pa.array(["a"]).dictionary_encode(), r"dictionary.*x\.indices"),
    ("pyarrow", "lists", lambda pa: pa.array([[1, 2]], pa.list_(pa.int64(), 2)), r"list.*x\.flatten\(\)"),
    ("pyarrow", "table", lambda pa: pa.table({"a": [1]}), "Table; give its columns one by one"),
    ("polars", "nulls", lambda pl: pl.Series([1, None]), r"Int64 with nulls; give x\.fill_null\(value\)"),
    ("polars", "bits", lambda pl: pl.Series([True]), r"Boolean, .*polars\.UInt8"),
    ("polars", "text", lambda pl: pl.Series(["a"]), "of String, whose elements NumPy cannot view"),
    ("polars", "frame", lambda pl: pl.DataFrame({"a": [1]}), "DataFrame; give its columns one by one"),
    ("polars", "chunks", lambda pl: pl.concat([pl.Series([1]), pl.Series([2])], rechunk=False),
     r"in 2 chunks; give x\.rechunk\(\)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "make", "message"), REFUSED, ids=[f"{r[0]} {r[1]}" for r in REFUSED]
)
def test_columns_that_numpy_cannot_view_are_refused_with_the_cure(name, kind, make, message):
    x = make(library(name))
    for writable in (False, True) if name == "pandas" else (False,):
        with pytest.raises(ArrayError, match=message):
            import_array(x, writable=writable)


@pytest.mark.parametrize(
    ("name", "make", "cure"),
    [
        ("pandas", series([1, 2], "Int64"), r"pandas Series, .*; give array = x\.to_numpy\(copy=True\)"),
        ("pandas", lambda pd: pd.array([1], "Int8"), r"pandas IntegerArray, .*x\.to_numpy\(copy=True\)"),
        ("pyarrow", arrow([1, 2]), r"an Arrow Int64Array, which is immutable.*pyarrow\.array\(output\)"),
        ("pyarrow", lambda pa: pa.py_buffer(b"ab"), "read-only"),
        (
            "polars",
            lambda pl: pl.Series([1]),
            r"a polars Series, which is immutable.*polars\.Series\(output\)",
        ),
    ],
)
def test_columns_that_cannot_be_written_to_are_refused_as_outputs(name, make, cure):
    with pytest.raises(ArrayError, match=cure):
        import_array(make(library(name)), writable=True, what="output")


def test_a_column_of_pandas_is_written_to_where_pandas_allows_it():
    pd = library("pandas")
    x = pd.DataFrame({"a": [1.0, 2.0]})["a"]
    if x.to_numpy().flags.writeable:
        import_array(x, writable=True).array[...] = 5
        assert x.tolist() == [5, 5]
    else:
        with pytest.raises(ArrayError, match=r"may not be written to.*x\.to_numpy\(copy=True\)"):
            import_array(x, writable=True)
    own = x.array.copy()
    import_array(own, writable=True).array[...] = 7
    assert own.tolist() == [7, 7]
