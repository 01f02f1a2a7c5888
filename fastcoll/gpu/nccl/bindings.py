"""NCCL's library, libnccl.so.2, through ctypes.

This file finds the library, and declares its functions and result codes. CuPy's binding and nccl4py lack calls that are
needed here (a scaled sum, the text of the last error, the end of a communicator in two steps), and change from version
to version. nccl.h has kept the signatures below since NCCL 2.18, the oldest that was compared.

https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import cache
from typing import Any

import numpy as np

from ...core.reduce_op import AVG, BAND, BOR, MAX, MIN, PRODUCT, SUM, ReduceOp
from ...errors import FastcollError, UnavailableError
from ...kernels.cuda import INSTALL
from ..runtime import cupy

OLDEST = 22600
"""NCCL_VERSION_CODE of 2.26. Up to 2.25, a communicator keeps a pointer to a thread's own memory after that thread's
last call, and the next call uses it, even if the thread has ended (`groupJob` in NCCL's sources)."""
_TOO_OLD = f"NCCL 2.26 or later is needed: {INSTALL}"

SUCCESS, IN_PROGRESS = 0, 7
"""ncclResult_t."""
BYTES = 1
"""ncclDataType_t ncclUint8: data that NCCL only moves is sent as bytes."""

_DTYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
_OPS = {SUM: 0, PRODUCT: 1, MAX: 2, MIN: 3, AVG: 4}
_OPS_OF_BOOL = {SUM: 2, MAX: 2, BOR: 2, PRODUCT: 3, MIN: 3, BAND: 3}  # the elements are bytes of 0 or 1

UNIQUE_ID_BYTES = 128
_SONAME = "libnccl.so.2"


class UniqueId(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_ = [("internal", ctypes.c_char * UNIQUE_ID_BYTES)]


class Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.14; later versions accept it and use defaults for their newer fields."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]

    @classmethod
    def non_blocking(cls) -> Config:
        """Return the configuration of communicators whose calls return at once, and are then polled."""
        return cls(ctypes.sizeof(cls), 0xCAFEBEEF, 21400, 0)


_pointer, _int, _count = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetVersion": [_pointer],
    "ncclGetUniqueId": [_pointer],
    "ncclCommInitRankConfig": [_pointer, _int, UniqueId, _int, _pointer],
    "ncclCommSplit": [_pointer, _int, _int, _pointer, _pointer],
    "ncclCommFinalize": [_pointer],
    "ncclCommDestroy": [_pointer],
    "ncclCommAbort": [_pointer],
    "ncclCommGetAsyncError": [_pointer, _pointer],
    "ncclRedOpCreatePreMulSum": [_pointer, _pointer, _int, _int, _pointer],
    "ncclRedOpDestroy": [_int, _pointer],
    "ncclAllReduce": [_pointer, _pointer, _count, _int, _int, _pointer, _pointer],
    "ncclReduce": [_pointer, _pointer, _count, _int, _int, _int, _pointer, _pointer],
    "ncclReduceScatter": [_pointer, _pointer, _count, _int, _int, _pointer, _pointer],
    "ncclBroadcast": [_pointer, _pointer, _count, _int, _int, _pointer, _pointer],
    "ncclAllGather": [_pointer, _pointer, _count, _int, _pointer, _pointer],
    "ncclSend": [_pointer, _count, _int, _int, _pointer, _pointer],
    "ncclRecv": [_pointer, _count, _int, _int, _pointer, _pointer],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
}
_OPERATIONS = {
    "all_reduce": "ncclAllReduce", "reduce": "ncclReduce", "reduce_scatter": "ncclReduceScatter",
    "broadcast": "ncclBroadcast", "all_gather": "ncclAllGather", "send": "ncclSend", "recv": "ncclRecv",
}  # fmt: skip
_TEXTS: dict[str, list[Any]] = {"ncclGetErrorString": [_int], "ncclGetLastError": [_pointer]}


class NcclError(FastcollError):
    """NCCL has refused a call, or reports a failure of communication."""


class NcclLibrary:
    """The functions of a loaded NCCL.

    Attributes:
        version: NCCL_VERSION_CODE: 22605 is 2.26.5.
        calls: the library; each of its functions returns an ncclResult_t, which `check` takes.
        operations: the functions that move data, by name.

    Raises:
        UnavailableError: the library is too old.
    """

    def __init__(self, library: Any) -> None:
        for signatures, result in ((_SIGNATURES, _int), (_TEXTS, ctypes.c_char_p)):
            for name, parameters in signatures.items():
                function = getattr(library, name, None)
                if function is None:
                    raise UnavailableError(f"this NCCL has no {name}; {_TOO_OLD}")
                function.argtypes, function.restype = parameters, result
        self.calls = library
        self.operations = {name: getattr(library, function) for name, function in _OPERATIONS.items()}
        version = ctypes.c_int()
        self.check(library.ncclGetVersion(ctypes.byref(version)), "querying its version")
        self.version = version.value
        if self.version < OLDEST:
            raise UnavailableError(f"this is NCCL {self.name}; {_TOO_OLD}")

    @property
    def name(self) -> str:
        """The version, for example 2.26.5."""
        return f"{self.version // 10000}.{self.version // 100 % 100}.{self.version % 100}"

    def unique_id(self) -> bytes:
        """Return a new communicator's id. One rank makes it, and all ranks use it."""
        made = UniqueId()
        self.check(self.calls.ncclGetUniqueId(ctypes.byref(made)), "creating a communicator's id")
        return ctypes.string_at(ctypes.addressof(made), UNIQUE_ID_BYTES)

    def check(self, status: int, doing: str, handle: Any = None) -> None:
        """Raise an NcclError for an ncclResult_t other than success or in progress."""
        if status in (SUCCESS, IN_PROGRESS):
            return
        texts = (self.calls.ncclGetErrorString(status), self.calls.ncclGetLastError(handle))
        text = "; ".join(dict.fromkeys(text.decode(errors="replace") for text in texts if text))
        raise NcclError(
            f"NCCL {getattr(self, 'version', 0) and self.name}: {doing} failed with status {status}: {text} "
            "(NCCL_DEBUG=INFO logs more)"
        )


def dtype_code(dtype: np.dtype[Any]) -> int | None:
    """Return the ncclDataType_t of a dtype that NCCL reduces; None for any other."""
    return _DTYPES.get(dtype.name) if dtype.isnative else None


def reduction(op: ReduceOp, dtype: np.dtype[Any]) -> tuple[int, int, int] | None:
    """Return NCCL's datatype and operation for a reduction, and how many numbers an element has.

    None if NCCL cannot do the reduction. NCCL's MIN and MAX of floats are not used, because they ignore a NaN that
    numpy.minimum would return (fminf in NCCL's reduce_kernel.h). For PREMUL_SUM, the operation is that of SUM.
    """
    if op.function is not None:
        return None
    if dtype.kind == "b":
        code = _OPS_OF_BOOL.get(op.code)
        return None if code is None else (BYTES, code, 1)
    parts = 2 if dtype.kind == "c" else 1
    number = dtype_code(np.dtype(f"f{dtype.itemsize // 2}") if parts == 2 and dtype.isnative else dtype)
    code = _OPS.get(SUM if op.factor is not None else op.code)
    if number is None or code is None or (parts == 2 and op.code == PRODUCT):
        return None
    return None if op.code in (MIN, MAX) and number > 5 else (number, code, parts)


@cache
def library() -> NcclLibrary:
    """Return this process's NCCL.

    Raises:
        UnavailableError: there is none, or it is too old.
    """
    failures = []
    # A library that torch or CuPy has loaded must be reused, because a process must not have two copies of NCCL.
    for name, mode in ((_SONAME, os.RTLD_NOLOAD), (_in_wheel(), 0), (_SONAME, 0)):
        if name is not None:
            try:
                return NcclLibrary(ctypes.CDLL(name, mode=mode | os.RTLD_NOW))
            except OSError as error:
                failures.append(str(error))
    raise UnavailableError(f"NCCL is not installed ({failures[-1]}): {INSTALL}")


def _in_wheel() -> str | None:
    """Return the path of the library in the wheel nvidia-nccl-cu12 or nvidia-nccl-cu13, or None."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    return os.path.join(folders[0], "lib", _SONAME) if folders else None


def why_unavailable() -> str | None:
    """Return why NCCL cannot be used here, and the cure; None if it can be used."""
    try:
        library()
        cupy()
    except UnavailableError as error:
        return str(error)
    return None
