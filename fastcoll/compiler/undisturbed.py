"""Work that Ctrl-C must not interrupt: Numba's import and its compilations.

A module whose import was interrupted stays half imported, and the next attempt repeats some registrations. If Numba is
interrupted while it reads one of its registries, the registry's remaining entries are lost. Python runs signal handlers
on the main thread only, so the work runs on another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def undisturbed(work: Callable[[], T]) -> T:
    """Run `work` on a thread that signals cannot interrupt; return its result or raise its error.

    If a signal handler raises while this function waits, the exception is raised here at once, and the work continues
    on its thread. At exit the process waits for the work, because LLVM must not run while the process ends.
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
