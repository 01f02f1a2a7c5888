"""How a rank leaves groups: what is under way is completed first, and what cannot be completed is said.

The other ranks have their parts in what this one has started, so its collectives and sends are completed, each within
its group's timeout. A receive is in vain once nobody is left who could send: a rank that has only receives left says so
to its peers (core/monitor.py), and waits for a message until the same is true of them, but not for long. Where an
exception ends the rank nothing is waited for, and the peers learn of it at once.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from ..core.group import ProcessGroup
from ..core.monitor import describe_exit
from ..errors import AbortedError, GroupError

_log = logging.getLogger("fastcoll")
_POLL_SECONDS = 0.005
# How long ranks that do something else, and never leave, are waited for; no program waits for these receives.
_RECEIVE_SECONDS = 30.0
_MOST_NAMED = 8


def leave(
    groups: Sequence[ProcessGroup], error: BaseException | None, let_go: Callable[[], None] | None = None
) -> GroupError | None:
    """Leave groups, the oldest of which comes first, and release what they hold.

    Args:
        error: what is being handled, or has ended this process: then nothing is completed.
        let_go: closes the groups, by `close` below.

    Returns:
        What says which operations were lost, of which nobody has asked how they ended; None where there are none.
    """
    in_order = error is None or (isinstance(error, SystemExit) and not error.code)
    waiting = [group for group in groups if in_order and group.may_wait()]
    try:
        for each in waiting:
            if each.before_leaving is not None:
                each.before_leaving()
        _complete(waiting)
    finally:
        close(groups, describe_exit(error)) if let_go is None else let_go()
    lost = [(group.name, what, error) for group in waiting for what, error in group.gate.unobserved.lost()]
    if not lost:
        return None
    named = "; ".join(f"{what} of the group {name} ({error})" for name, what, error in lost[:_MOST_NAMED])
    more = f"; and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
    cause = next((error for _, _, error in lost if isinstance(error, GroupError)), None)
    kind = AbortedError if cause is None else type(cause)
    return kind(
        f"this rank has lost what it started and did not wait for: {named}{more}; call wait() of what isend, irecv and "
        "async_op=True return",
        cause.ranks if cause else (),
    )


def close(groups: Sequence[ProcessGroup], exit_reason: str = "") -> None:
    """Close groups, newest first, with what the peers read of it; whatever fails, the rest is done."""
    with ExitStack() as steps:
        for group in groups:
            steps.callback(group.close, exit_reason)


def _complete(groups: Sequence[ProcessGroup]) -> None:
    """Wait for all that is under way, as long as that makes sense."""
    started = time.monotonic()
    for group in groups:
        group.messages.poll()  # so that the group takes over the requests of compiled callers
        while works := [work for work in group.gate.unobserved.under_way() if not work.needs_message]:
            left = started + group.timeout - time.monotonic()
            if left <= 0:
                break
            works[0].end_event.wait(left)
    receiving = [group for group in groups if group.gate.unobserved.under_way()]
    for group in receiving:
        group.monitor.start_to_leave()
    grace = time.monotonic() + _RECEIVE_SECONDS
    for group in receiving:
        end = min(started + group.timeout, grace)
        while time.monotonic() < end and (
            hopeful := [
                work for work in group.gate.unobserved.under_way() if not group.messages.is_in_vain(work)
            ]
        ):
            hopeful[0].end_event.wait(_POLL_SECONDS)


class ExitHook:
    """Leaves at exit, unless it is taken back: in children of multiprocessing too, which run its own hooks alone."""

    def __init__(self, leave: Callable[[BaseException | None], GroupError | None]) -> None:
        self._leave = leave
        self._finalizer: Any = None

    def set(self) -> None:
        """From now on. Hooks run newest first."""
        atexit.register(self._run)
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            self._finalizer = util.Finalize(None, self._run, exitpriority=0)

    def take_back(self) -> None:
        """No more. Twice is fine."""
        atexit.unregister(self._run)
        if self._finalizer is not None:
            self._finalizer.cancel()
            self._finalizer = None

    def _run(self) -> None:
        self.take_back()
        try:
            # In children of multiprocessing the exception is on its way; elsewhere Python keeps what it has printed.
            interactive = sys.flags.interactive or hasattr(
                sys, "ps1"
            )  # where the last error has ended nothing
            error = sys.exc_info()[1] or (None if interactive else getattr(sys, "last_value", None))
            lost = self._leave(error)
        except BaseException:
            _fail_exit()
            raise
        if lost is not None:
            _log.error("at exit: %s", lost)
            _fail_exit()


def _fail_exit() -> None:
    """Have this process end with exit code 1, after all else: Python takes no exit code from what runs at exit."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        sys.modules["multiprocessing.util"].Finalize(None, sys.exit, (1,), exitpriority=-1000)
    else:
        libc = ctypes.CDLL(None)
        libc.fflush(None)
        libc.__cxa_atexit(libc._exit, ctypes.c_void_p(1), None)
