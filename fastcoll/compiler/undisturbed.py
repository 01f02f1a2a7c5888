"""Work that Ctrl-C must not cut in two: Numba's import, and its compilations, which keep what they have begun.

A module that is half imported stays so, and half of what it registers is registered twice at the next try; a registry
that was being read has lost its rest. Handlers of signals run on the main thread alone, so the work has another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def undisturbed(work: Callable[[], T]) -> T:
    """What `work` returns, or raises; if a signal's handler raises, that comes out at once, and the work goes on.

    The process waits for it at its end: LLVM must not be at work then.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="fastcoll-undisturbed", daemon=False)
    thread.start()
    thread.join()
    if failed:
        raise failed.pop()
    return done[0]
