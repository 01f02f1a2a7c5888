"""The requests of compiled callers that Python carries out, by their numbers.

Compiled code has a number, where Python has a Work. A request is here from its beginning in Python, or from its being
taken over (`Pipe.take_posted`), until compiled code has waited for it. A number that is not here has been waited for.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.work import Work

OWN = 1 << 61
"""What numbers of requests begin with that were posted by Python."""

_MOST_KNOWN = 4096

_lock = threading.RLock()  # a signal's handler may call compiled code, too
_works: dict[int, Work] = {}
_sources: OrderedDict[int, int] = OrderedDict()
_numbers = count(OWN)
_release: Callable[[int], None] | None = None
release_address = 0
"""Of the C function that releases what owns the array of a compiled caller; 0: no code that was compiled is here."""


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # who had it is not in this process


os.register_at_fork(after_in_child=_after_fork)


def release_by(address: int) -> None:
    """Say which C function takes an owner and releases it."""
    global release_address, _release
    _release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    release_address = address


def release(owner: int) -> None:
    """Release what owns an array, and was held for a request; 0: nothing."""
    if owner and _release is not None:
        _release(owner)


def memory(address: int, nbytes: int, owner: int) -> NDArray[np.uint8]:
    """The bytes of a caller's array, which release what owns them when nobody has them any more."""
    buffer = (ctypes.c_char * nbytes).from_address(address) if nbytes else (ctypes.c_char * 1)()
    if owner:
        weakref.finalize(buffer, release, owner).atexit = False
    return np.frombuffer(memoryview(buffer), np.uint8, nbytes)


def post(work: Work) -> int:
    """Know an operation that Python has posted; its number."""
    with _lock:
        number = next(_numbers)
        _works[number] = work
    return number


def put(number: int, work: Work) -> None:
    """Know an operation that was taken over."""
    with _lock:
        _works[number] = work


def find(number: int) -> Work | None:
    """The operation with a number; None: nobody knows it here."""
    return _works.get(number)


def end(number: int, work: Any) -> int:
    """An operation was waited for; the rank that it received from, or 0."""
    source = work.source_rank() or 0
    with _lock:
        _works.pop(number, None)
        _sources[number] = source
        if len(_sources) > _MOST_KNOWN:
            _sources.popitem(last=False)
    return int(source)


def source_of(number: int) -> int:
    """What `end` returned for one of the last numbers; else 0."""
    return _sources.get(number, 0)
