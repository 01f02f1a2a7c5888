"""The binding of NCCL: finding the library, its results, and its reductions."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest

from fastcoll import ReduceOp
from fastcoll.core.reduce_op import AVG, MAX, MIN, PRODUCT, SUM
from fastcoll.errors import AbortedError, UnavailableError
from fastcoll.gpu.nccl import bindings
from fastcoll.gpu.nccl.bindings import NcclError, NcclLibrary, reduction
from fastcoll.gpu.nccl.communicator import Communicator

from .fake_nccl import FakeNccl
from .fake_runtime import FakeRuntime


def fake(version: int = 22605) -> FakeNccl:
    return FakeNccl(FakeRuntime(), version)


def test_an_old_library_is_refused_with_the_cure() -> None:
    with pytest.raises(UnavailableError, match=r"NCCL 2.25.1; NCCL 2.26 or later is needed: pip install"):
        NcclLibrary(fake(22501))
    assert NcclLibrary(fake(22605)).name == "2.26.5"


def test_a_library_that_lacks_a_function_is_refused() -> None:
    old = fake()
    del old.ncclCommFinalize  # type: ignore[attr-defined]
    with pytest.raises(UnavailableError, match="no ncclCommFinalize"):
        NcclLibrary(old)


def test_without_the_extra_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    bindings.library.cache_clear()
    with pytest.raises(UnavailableError, match=r"NCCL is not installed \(no such file\): pip install '\."):
        bindings.library()


def test_errors_contain_nccls_text() -> None:
    library = NcclLibrary(fake())
    library.check(bindings.IN_PROGRESS, "waiting")
    with pytest.raises(NcclError, match=r"NCCL 2.26.5: flying failed with status 3: error 3; what it was"):
        library.check(3, "flying")


def test_reductions_that_nccl_does() -> None:
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


# ---- the real library, without a GPU ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> Iterator[NcclLibrary]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_SOCKET_IFNAME", "lo")  # an id is the address of a socket
        bindings.library.cache_clear()
        try:
            yield bindings.library()
        except UnavailableError as error:
            pytest.skip(str(error))


@pytest.fixture(scope="module")
def header() -> str:
    """Return the wheel's nccl.h, without comments."""
    library = bindings._in_wheel()
    if library is None:
        pytest.skip("NCCL is not installed as a wheel, which brings nccl.h")
    text = Path(library).parents[1].joinpath("include", "nccl.h").read_text()
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def in_c(declared: str) -> Any:
    """Return ctypes' type of a parameter or result, such as `const void* sendbuff`."""
    if declared.startswith("const char*"):
        return ctypes.c_char_p
    kind = declared.split()[0]
    if "*" in declared or kind in ("ncclComm_t", "cudaStream_t"):
        return ctypes.c_void_p
    others = {"int": ctypes.c_int, "size_t": ctypes.c_size_t, "ncclUniqueId": bindings.UniqueId}
    enums = ("ncclResult_t", "ncclDataType_t", "ncclRedOp_t", "ncclScalarResidence_t")
    return (others | dict.fromkeys(enums, ctypes.c_int))[kind]


def test_every_signature_is_that_of_the_header(real: NcclLibrary, header: str) -> None:
    prototypes = re.findall(r"^(ncclResult_t|const char\*)\s+(nccl\w+)\(([^)]*)\);", header, re.MULTILINE)
    declared = {name: (result, parameters) for result, name, parameters in prototypes}
    for name in bindings._SIGNATURES | bindings._TEXTS:
        result, parameters = declared[name]
        function = getattr(real.calls, name)
        kinds = [in_c(each.strip()) for each in parameters.split(",") if each.strip() not in ("", "void")]
        assert list(function.argtypes) == kinds, name
        assert function.restype is in_c(result), name


def test_every_number_is_that_of_the_header(header: str) -> None:
    numbers = {name: int(value) for name, value in re.findall(r"\bnccl(\w+)\s*=\s*(\d+)", header)}
    assert (numbers["Success"], numbers["InProgress"]) == (bindings.SUCCESS, bindings.IN_PROGRESS)
    assert {name: numbers[name.capitalize()] for name in bindings._DTYPES} == bindings._DTYPES
    names = {SUM: "Sum", PRODUCT: "Prod", MAX: "Max", MIN: "Min", AVG: "Avg"}
    assert {op: numbers[name] for op, name in names.items()} == bindings._OPS
    defined = dict(re.findall(r"#define (NCCL_\w+) (\w+)", header))
    assert int(defined["NCCL_UNIQUE_ID_BYTES"]) == bindings.UNIQUE_ID_BYTES
    config = bindings.Config.non_blocking()
    assert int(defined["NCCL_API_MAGIC"], 16) == config.magic
    (fields,) = re.findall(r"struct ncclConfig_v\d+ \{(.*?)\}", header, re.DOTALL)
    declared = re.findall(r"([\w ]+) (\w+);", fields)[: len(config._fields_)]
    assert [(name, kind.split()) for kind, name in declared] == [
        ("size", ["size_t"]),
        ("magic", ["unsigned", "int"]),
        ("version", ["unsigned", "int"]),
        ("blocking", ["int"]),
    ]
    assert [name for _, name in declared] == [name for name, *_ in config._fields_]


def test_the_real_library_answers_without_a_gpu(real: NcclLibrary) -> None:
    assert real.version >= bindings.OLDEST
    first, second = real.unique_id(), real.unique_id()
    assert len(first) == len(second) == bindings.UNIQUE_ID_BYTES
    assert first != second
    with pytest.raises(NcclError, match=rf"NCCL {real.name}: flying failed with status 5: invalid usage"):
        real.check(5, "flying")


def test_every_function_of_the_real_library_can_be_called_without_a_gpu(real: NcclLibrary) -> None:
    """Each function rejects a missing communicator or a wrong rank before it looks for a GPU, or finds none."""
    word, sum_of_floats = ctypes.c_uint64(), (7, 0)
    identity = bindings.UniqueId.from_buffer_copy(real.unique_id())
    config = bindings.Config.non_blocking()
    none = no_stream = None
    no_array = (none, 1)
    refused: dict[str, tuple[Any, ...]] = {
        "ncclCommInitRankConfig": (ctypes.byref(word), 1, identity, 5, ctypes.byref(config)),
        "ncclCommSplit": (none, 0, 0, ctypes.byref(word), none),
        "ncclCommGetAsyncError": (none, ctypes.byref(word)),
        "ncclRedOpCreatePreMulSum": (ctypes.byref(word), ctypes.byref(word), 7, 0, none),
        "ncclRedOpDestroy": (5, none),
        "ncclAllReduce": (none, *no_array, *sum_of_floats, none, no_stream),
        "ncclReduce": (none, *no_array, *sum_of_floats, 0, none, no_stream),
        "ncclReduceScatter": (none, *no_array, *sum_of_floats, none, no_stream),
        "ncclBroadcast": (none, *no_array, 7, 0, none, no_stream),
        "ncclAllGather": (none, *no_array, 7, none, no_stream),
        "ncclSend": (*no_array, 7, 0, none, no_stream),
        "ncclRecv": (*no_array, 7, 0, none, no_stream),
    }
    accepted: dict[str, tuple[Any, ...]] = {
        "ncclGetVersion": (ctypes.byref(word),),
        "ncclGetUniqueId": (ctypes.byref(identity),),
        "ncclCommFinalize": (none,),
        "ncclCommDestroy": (none,),
        "ncclCommAbort": (none,),
        "ncclGroupStart": (),
        "ncclGroupEnd": (),
    }
    assert set(refused | accepted) == set(bindings._SIGNATURES)
    for name, arguments in refused.items():
        status = getattr(real.calls, name)(*arguments)
        with pytest.raises(NcclError, match=f"NCCL {real.name}: {name} failed with status {status}: [a-z]"):
            real.check(status, name)
    for name, arguments in accepted.items():
        real.check(getattr(real.calls, name)(*arguments), name)


# ---- communicators -------------------------------------------------------------------------------------


def test_no_nccl_function_is_called_after_the_end() -> None:
    nccl = fake()
    library = NcclLibrary(nccl)
    comm = Communicator.make(library, 1, 0, library.unique_id(), lambda doing, waited: None)
    comm.abort()
    before = list(nccl.calls)
    comm.abort()
    comm.close()
    assert comm.trouble() is None
    with pytest.raises(AbortedError, match="aborted"), comm.group("anything"):
        pass
    assert nccl.calls == before


def test_an_error_of_look_aborts_a_communicator_during_creation() -> None:
    nccl = fake()
    library = NcclLibrary(nccl)
    identity = library.unique_id()

    def give_up(doing: str, waited: float) -> None:
        raise AbortedError(f"{doing} is in vain")

    with pytest.raises(AbortedError, match="creating a communicator is in vain"):
        Communicator.make(library, 2, 0, identity, give_up)  # the other rank never joins
    assert nccl.calls[-1] == "ncclCommAbort"
