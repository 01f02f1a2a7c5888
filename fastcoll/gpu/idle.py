"""The calls of CUDA that may wait for all work on a GPU, and when this process makes them.

Queued collectives wait on the GPU for other ranks. Another rank may be waiting for this rank's host, for example for a
message. So the host should not block inside CUDA behind a collective: that wait knows no timeout, and other threads may
block behind it. CUDA may wait for all work on a GPU when it loads a kernel, frees memory, or unmaps a peer's memory. So
fastcoll first waits in Python before it loads a kernel (`await_idle`), and frees when nothing is outstanding
(`when_idle`). CUDA's own lists are in its programming guide ("Lazy Loading") and in the reference of cudaFree.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..core.work import is_progressing
from ..kernels.cuda.driver import before_loading

_LONGEST = 5.0
"""Seconds that `await_idle` waits at most. Then CUDA decides whether the host has to wait: a collective may be waiting
for a rank that waits for this thread."""
_NAP = 0.0005

_watchers: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()
_later: deque[Callable[[], object]] = deque()


def watch(watcher: Any) -> None:
    """Count the works of a Watcher, as long as it lives."""
    with _lock:
        _watchers.add(watcher)


def is_idle() -> bool:
    """Return whether no collective of this process is outstanding on a GPU."""
    with _lock:
        return not any(watcher.outstanding for watcher in _watchers)


def await_idle() -> None:
    """Block until `is_idle`, but not for long; never block a progress thread or a watcher's thread."""
    end = time.monotonic() + _LONGEST
    while not is_idle() and not is_progressing() and time.monotonic() < end:
        time.sleep(_NAP)


def when_idle(free: Callable[[], object]) -> None:
    """Call `free` in a later call of `free_unused`. Any thread may call this, also the garbage collector's."""
    _later.append(free)


def free_unused() -> None:
    """Do what `when_idle` was given, if no collective is outstanding."""
    while _later and is_idle():
        with suppress(IndexError):  # another thread was faster
            _later.popleft()()


before_loading.append(await_idle)
