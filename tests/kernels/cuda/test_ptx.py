"""NVVM's code for the kernels, without a GPU: 16-byte vectors, no calls, no local memory, no fusing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
from kernels.checks import LARGER, NOT_COMPILABLE
from kernels.cuda.fake_driver import HOPPER, Library

from fastcoll.core.reduce_op import ReduceOp
from fastcoll.errors import ArrayError, UnavailableError, UsageError
from fastcoll.kernels.cuda.driver import CudaDriver

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Library], None]:
    """Make kernels load and launch through a library that only records; no code is on disk."""
    from fastcoll.kernels.cuda import kernel

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return lambda library: monkeypatch.setattr(kernel, "driver", lambda: CudaDriver(library))


def reducer(op: ReduceOp, dtype: Any) -> Any:
    from fastcoll.kernels.cuda.reducers import CudaReducer

    return CudaReducer(op, np.dtype(dtype))


def ptx(op: ReduceOp, dtype: Any, n: int) -> str:
    from fastcoll.kernels.cuda.kernel import compile_ptx

    text, name = compile_ptx(reducer(op, dtype).kernel(n), 4, (n,), HOPPER)
    assert f".entry {name}(" in text
    return text


@pytest.mark.parametrize(
    ("op", "dtype", "n", "loads", "stores", "words"),
    [
        (ReduceOp.SUM, "f4", 1, 5, 5, "v4.u32"),  # four packs at a time, and one
        (ReduceOp.SUM, "f4", 2, 6, 3, "v4.u32"),  # two, and one
        (ReduceOp.MAX, "i1", 8, None, None, "v4.u32"),  # one, whose loop NVVM may unroll
        (ReduceOp.SUM, "f2", 2, 6, 3, "v4.u32"),
        (ReduceOp.SUM, ml_dtypes.bfloat16, 2, 6, 3, "v4.u32"),
        (ReduceOp.BXOR, "?", 2, 6, 3, "v4.u32"),
        (ReduceOp.AVG, "f8", 2, 6, 3, "v2.u64"),
        (ReduceOp.SUM, "c16", 2, 6, 3, "v2.u64"),
        (ReduceOp.custom(lambda a, b: a if a else b, "first"), "u2", 2, 6, 3, "v4.u32"),
    ],
    ids=str,
)
def test_packs_are_single_accesses_and_stay_in_registers(op, dtype, n, loads, stores, words) -> None:
    text = ptx(op, dtype, n)
    for access, count in (("ld", loads), ("st", stores)):
        found = text.count(f"{access}.global.{words}")
        assert found == count if count else found % (n if access == "ld" else 1) == 0 < found
    assert ".local" not in text
    assert "call" not in text


@pytest.mark.parametrize("dtype", ["c8", "c16"])
def test_complex_products_are_not_fused(dtype: str) -> None:
    text = ptx(ReduceOp.PRODUCT, dtype, 2)
    assert "fma" not in text
    assert "mul.rn" in text


@pytest.mark.parametrize(
    "dtype",
    [
        [("value", "f8"), ("index", "i8")],
        [("index", "i4"), ("tag", "S3"), ("value", "f4")],
        [("tag", "i1"), ("value", "f8"), ("index", "i4"), ("inner", [("small", "i2"), ("large", "f8")])],
    ],
    ids=str,
)
def test_records_compile_also_unaligned_ones(dtype: Any) -> None:
    assert ".entry" in ptx(LARGER, dtype, 3)


@pytest.mark.parametrize("packing", [True, False])
def test_packing_moves_16_bytes_at_once(packing: bool) -> None:
    from fastcoll.kernels.cuda.kernel import compile_ptx
    from fastcoll.kernels.cuda.packing import mover

    text, _ = compile_ptx(mover(16, 3, packing), 3, (3, 3), HOPPER)
    assert text.count("ld.global.v2.u64") == text.count("st.global.v2.u64") > 0


def test_a_launch_passes_all_words_in_order(use: Callable[[Library], None]) -> None:
    use(library := Library([HOPPER]))
    add = reducer(ReduceOp.SUM, "f4")
    add.launch(0x10000, [0x20000, 0x30000], 1003, 77)
    add.launch(0x10000, [0x20000, 0x30004], 1003)
    add.launch(0x10008, [0x20008, 0x30008], 1003)
    assert [code[:4] for code in library.loaded] == [b"\x7fELF"], "one cubin"
    assert [(launched[1], launched[2], launched[3]) for launched in library.launches] == [
        ((1, 1, 1, 256, 1, 1, 0), 77, [0x10000, 0, 250, 1003, 0x20000, 0x30000]),
        ((4, 1, 1, 256, 1, 1, 0), 0, [0x10000, 1003, 0, 1003, 0x20000, 0x30004]),
        ((1, 1, 1, 256, 1, 1, 0), 0, [0x10008, 2, 250, 1003, 0x20008, 0x30008]),
    ]
    add.launch(0x10000, [0x20000, 0x30000], 1 << 30)
    assert library.launches[-1][1][0] == 132 * 8, "no more blocks than fit"
    with pytest.raises(ArrayError, match="aligned to 4 bytes"):
        add.launch(0x10000, [0x20000, 0x30002], 5)


@pytest.mark.parametrize("dtype", [*oracle.FLOATS, *oracle.HALVES, *oracle.COMPLEX], ids=str)
def test_a_factor_goes_with_the_launch(dtype: np.dtype[Any], use: Callable[[Library], None]) -> None:
    from fastcoll.kernels.cuda import packing

    use(library := Library([HOPPER]))
    packing._scaler.cache_clear()
    packing.scale(0x1000, 0x2000, 5, dtype, -1.5, 7)
    packing._scaler.cache_clear()  # the one of this library
    (launched,) = library.launches
    assert launched[3][:3] == [0x1000, 0x2000, 5]
    lane = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    bits = np.array(launched[3][3:], f"i{lane}").tobytes()
    assert np.frombuffer(bits, dtype).tolist() == [-1.5]


def test_a_failing_compiler_raises_unavailable_error(
    use: Callable[[Library], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastcoll.kernels.cuda import kernel

    def fail(*args: Any) -> Any:
        raise AttributeError("module 'numpy' has no attribute 'row_stack'")

    use(Library())
    monkeypatch.setattr(kernel, "compile_ptx", fail)
    with pytest.raises(UnavailableError, match=r"\(AttributeError: .*row_stack.*\): pip install") as caught:
        reducer(ReduceOp.SUM, "f4").launch(16, [16, 32], 4)
    assert isinstance(caught.value.__cause__, AttributeError)
    with pytest.raises(UsageError, match=r"cannot compile the function 'larger'.*says: module 'numpy'"):
        reducer(LARGER, [("value", "f8")]).launch(16, [16, 32], 4)


def test_each_kind_of_device_has_code_of_its_own(use: Callable[[Library], None]) -> None:
    use(library := Library([HOPPER, (8, 6)]))
    copy = reducer(ReduceOp.SUM, "f4")
    for device in (0, 1, 0):
        library.current = device
        copy.launch(0x10000, [0x20000], 3)
    assert [code[:4] for code in library.loaded] == [b"\x7fELF"] * 2
    assert library.loaded[0] != library.loaded[1]
    assert [launched[0] for launched in library.launches] == [9, 10, 9]


def test_other_processes_do_not_compile_again(
    use: Callable[[Library], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastcoll.kernels.cuda import kernel

    use(library := Library([HOPPER, HOPPER]))
    reducer(ReduceOp.SUM, "f4").prepare(2)

    def fail(*args: Any) -> Any:
        raise AssertionError("it is compiled again")

    monkeypatch.setattr(kernel, "compile_ptx", fail)
    again = reducer(ReduceOp.SUM, "f4")
    again.prepare(2)
    assert library.loaded[0] == library.loaded[1]
    for other, n in ((again, 3), (reducer(ReduceOp.MAX, "f4"), 2), (reducer(ReduceOp.SUM, "f8"), 2)):
        with pytest.raises(UnavailableError, match="it is compiled again"):
            other.prepare(n)
    library.current = 1  # of the same kind
    again.prepare(2)
    assert len(library.loaded) == 3


def test_the_versions_of_the_compilers_are_known() -> None:
    from fastcoll.kernels.cuda.kernel import _versions

    assert all(name in _versions() for name in ("numba-cuda", "cuda-bindings", "nvidia-nvvm", "nvjitlink"))


@pytest.mark.parametrize("function", NOT_COMPILABLE)
def test_uncompilable_functions_are_refused_by_name(function: Any, use: Callable[[Library], None]) -> None:
    use(Library())
    with pytest.raises(UsageError, match=r"'odd' for CUDA and elements of dtype float32.* Numba says: \w"):
        reducer(ReduceOp.custom(function, "odd"), "f4").launch(16, [16, 32], 4)
