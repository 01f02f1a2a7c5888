"""Requests of compiled callers that Python carries out, by number.

Compiled code holds a number where Python code holds a Work. This file has the Work of each number, from the time when
Python posts the request, or takes it over (`Pipe.take_posted`), until compiled code has waited for it.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.work import Work
from ..system.forks import at_fork

OWN = 1 << 61
"""The lowest number of a request that Python has posted; the numbers of compiled callers are below."""

_MOST_SOURCES = 4096

_lock = threading.RLock()  # reentrant: a signal handler may call compiled code
_works: dict[int, Work] = {}
_sources: OrderedDict[int, int] = OrderedDict()
_numbers = count(OWN)
_release: Callable[[int], None] | None = None
release_address = 0
"""Address of the C function that releases an array's owner; 0: no compiled caller was loaded."""


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # the thread that held it does not exist in the child


at_fork("requests", _after_fork)


def release_by(address: int) -> None:
    """Set the C function that releases an owner."""
    global release_address, _release
    _release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    release_address = address


def release(owner: int) -> None:
    """Release the object that owns an array; a request has kept it alive. An `owner` of 0 means that there is none."""
    if owner and _release is not None:
        _release(owner)


def memory(address: int, nbytes: int, owner: int) -> NDArray[np.uint8]:
    """Return the bytes of a caller's array as an ndarray. Its last reference releases `owner`."""
    buffer = (ctypes.c_char * nbytes).from_address(address) if nbytes else (ctypes.c_char * 1)()
    if owner:
        weakref.finalize(buffer, release, owner).atexit = False
    return np.frombuffer(memoryview(buffer), np.uint8, nbytes)


def post(work: Work) -> int:
    """Register an operation that Python has posted; return its number."""
    with _lock:
        number = next(_numbers)
        _works[number] = work
    return number


def put(number: int, work: Work) -> None:
    """Register an operation that the engine has taken over, under its request's number."""
    with _lock:
        _works[number] = work


def find(number: int) -> Work | None:
    """Return the operation with a number, or None."""
    return _works.get(number)


def end(number: int, work: Any) -> int:
    """Wait for an operation and remove it; return the sender's rank for a receive, else 0."""
    source = work.source_rank() or 0
    with _lock:
        _works.pop(number, None)
        _sources[number] = source
        if len(_sources) > _MOST_SOURCES:
            _sources.popitem(last=False)
    return int(source)


def source_of(number: int) -> int:
    """Return what `end` has returned for this number if the number is among its last 4096; else 0."""
    return _sources.get(number, 0)
