"""This process's listeners: groups that use the same addresses share one, which the last of them closes."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence

from .interfaces import Interface
from .listener import Listener

_lock = threading.Lock()
_listeners: dict[tuple[Interface, ...], tuple[Listener, int]] = {}


def acquire(interfaces: Sequence[Interface]) -> Listener:
    """This process's listener on these addresses, for as long as somebody has it.

    Raises:
        ResourceError: it cannot listen there.
    """
    _watch_forks()
    key = tuple(interfaces)
    with _lock:
        listener, users = _listeners[key] if key in _listeners else (Listener(key), 0)
        _listeners[key] = (listener, users + 1)
        return listener


def release(listener: Listener) -> None:
    """End one use of a listener; the last one closes it."""
    with _lock:
        for key, (each, users) in list(_listeners.items()):
            if each is listener and users > 1:
                _listeners[key] = (each, users - 1)
                return
            if each is listener:
                del _listeners[key]
    listener.close()


@functools.cache
def _watch_forks() -> None:
    """Let children of fork drop what they inherit: the thread is not theirs. Once a process."""
    os.register_at_fork(after_in_child=_drop_inherited)


def _drop_inherited() -> None:
    global _lock
    _lock = threading.Lock()
    for listener, _ in _listeners.values():
        listener.close_inherited()
    _listeners.clear()
