"""Access to NumPy's memory handlers (NEP 49) from Python.

A handler has the C functions that allocate and free array memory. NumPy keeps the current handler in a context
variable: each thread and each asyncio task has its own, and a new thread starts with the default handler. An array
keeps the handler that it was made with. The default handler is a struct of addresses in NumPy's data, so a change of
this struct affects every thread that has set no other handler.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Sequence
from typing import Any

try:
    _numpy = importlib.import_module("numpy._core._multiarray_umath")
except ImportError:  # NumPy 1.26
    _numpy = importlib.import_module("numpy.core._multiarray_umath")

# Indices in NumPy's C table (numpy/__multiarray_api.h), which never change.
_SET_HANDLER, _DEFAULT_HANDLER = 304, 306
_CAPSULE = b"mem_handler"


class Handler(ctypes.Structure):
    """NumPy's PyDataMem_Handler."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("context", ctypes.c_void_p),
        ("malloc", ctypes.c_void_p),
        ("calloc", ctypes.c_void_p),
        ("realloc", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
    )

    @property
    def functions(self) -> tuple[int, ...]:
        """Addresses of malloc, calloc, realloc and free."""
        return self.malloc, self.calloc, self.realloc, self.free


def capsule_of(name: bytes, context: int, functions: Sequence[int]) -> Any:
    """Return a new handler for `set_handler`.

    Its struct is never freed, because arrays may live until the process ends.
    """
    handler = Handler(name, 1, context, *functions)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(handler), _CAPSULE, None)


def set_handler(capsule: Any) -> Any:
    """Make new arrays of this thread or task use a handler; return the previous one."""
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)
    return kind(_table()[_SET_HANDLER])(capsule)


def default_handler() -> Handler:
    """Return NumPy's default handler, which a thread uses until it sets another."""
    capsule = ctypes.py_object.from_address(_table()[_DEFAULT_HANDLER]).value
    return Handler.from_address(_pointer(capsule, _CAPSULE))


def _pointer(capsule: Any, name: bytes | None) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return int(get(capsule, name))


@functools.cache
def _table() -> Any:
    return ctypes.cast(_pointer(_numpy._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
