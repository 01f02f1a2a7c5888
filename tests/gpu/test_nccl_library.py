"""The binding of NCCL: finding it, what its results mean, and what it can reduce."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
from together import together

from fastcoll import ReduceOp
from fastcoll.errors import AbortedError, UnavailableError
from fastcoll.gpu import nccl_library
from fastcoll.gpu.nccl_comm import Communicator
from fastcoll.gpu.nccl_library import Library, NcclError, reduction

from .fake_nccl import FakeNccl
from .fake_runtime import FakeRuntime


def fake(version: int = 22005) -> FakeNccl:
    return FakeNccl(FakeRuntime(), version)


def going_on(doing: str, waited: float) -> None:
    assert waited < 20, doing


def test_an_old_library_is_refused_with_the_cure() -> None:
    with pytest.raises(UnavailableError, match=r"NCCL 2.17.1; NCCL 2.18 or later is needed: pip install"):
        Library(fake(21701))
    assert Library(fake(22005)).name == "2.20.5"


def test_a_library_that_lacks_a_function_is_refused() -> None:
    old = fake()
    del old.ncclCommFinalize  # type: ignore[attr-defined]
    with pytest.raises(UnavailableError, match="no ncclCommFinalize"):
        Library(old)


def test_without_the_extra_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    nccl_library.library.cache_clear()
    with pytest.raises(
        UnavailableError, match=r"NCCL is not installed \(no such file\): pip install 'fastcoll"
    ):
        nccl_library.library()


def test_errors_have_ncclss_own_words() -> None:
    library = Library(fake())
    library.check(nccl_library.IN_PROGRESS, "waiting")
    with pytest.raises(NcclError, match=r"NCCL 2.20.5: flying failed with status 3: error 3; what it was"):
        library.check(3, "flying")


def test_what_nccl_reduces() -> None:
    """SUM, PRODUCT, AVG of numbers; MIN, MAX of integers; all but BXOR of bool; no bits, no int16."""
    native = {
        (op.name, dtype.name)
        for dtype in oracle.DTYPES
        for op in oracle.ops_for(dtype)
        if reduction(op, dtype) is not None
    }
    numbers = "int8 uint8 int32 uint32 int64 uint64 float16 bfloat16 float32 float64".split()
    want = {(op, name) for op in ("SUM", "PRODUCT", "AVG") for name in numbers}
    want |= {(op, name) for op in ("MIN", "MAX") for name in numbers[:6]}
    want |= {(op, f"complex{bits}") for op in ("SUM", "AVG") for bits in (64, 128)}
    want |= {(op, "bool") for op in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR")}
    assert native == want
    assert reduction(ReduceOp.SUM, np.dtype("c8")) == (7, 0, 2)
    assert reduction(ReduceOp.PREMUL_SUM(2), np.dtype(ml_dtypes.bfloat16)) == (9, 0, 1)
    assert reduction(ReduceOp.SUM, np.dtype(">f4")) is None
    assert reduction(ReduceOp.custom(max), np.dtype("f4")) is None


# ---- communicators -------------------------------------------------------------------------------------


def communicators(library: Library, size: int) -> list[Communicator]:
    identity = library.unique_id()
    made = together(
        *[lambda r=r: Communicator.make(library, size, r, identity, going_on) for r in range(size)]
    )
    assert all(isinstance(comm, Communicator) for comm in made), made
    return made


def test_after_the_end_nothing_of_nccl_is_called() -> None:
    nccl = fake()
    (comm,) = communicators(Library(nccl), 1)
    comm.abort()
    before = list(nccl.calls)
    comm.abort()
    comm.close()
    assert comm.trouble() is None
    with pytest.raises(AbortedError, match="aborted"), comm.group("anything"):
        pass
    assert nccl.calls == before


def test_what_look_raises_ends_a_communicator_that_is_being_made() -> None:
    nccl = fake()
    library = Library(nccl)
    identity = library.unique_id()

    def give_up(doing: str, waited: float) -> None:
        raise AbortedError(f"{doing} is in vain")

    with pytest.raises(AbortedError, match="making a communicator is in vain"):
        Communicator.make(library, 2, 0, identity, give_up)  # the other rank never comes
    assert nccl.calls[-1] == "ncclCommAbort"
