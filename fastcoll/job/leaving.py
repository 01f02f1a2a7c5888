"""How a rank leaves groups: it completes the operations under way, and reports those that it cannot complete.

A leaving rank first completes its collectives and sends, within the timeout of their group, because other ranks take
part in them. A receive cannot complete once no rank is left that could send. So a rank that has only receives left
publishes this to its peers (core/monitor.py), and waits for messages until all peers have only receives left too, but
at most 30 s. If an exception ends the rank, the rank waits for nothing, and the peers get an error at once.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from ..core.group import ProcessGroup
from ..core.monitor import describe_error, describe_exit, uncaught
from ..errors import AbortedError, GroupError, MismatchError
from ..record import dump

_log = logging.getLogger("fastcoll")
_POLL_SECONDS = 0.005
# How long a leaving rank waits for its pending receives, for which the program has not waited, if peers neither send
# nor leave.
_RECEIVE_SECONDS = 30.0
_MOST_NAMED = 8


def leave(
    groups: Sequence[ProcessGroup], error: BaseException | None, let_go: Callable[[], None] | None = None
) -> GroupError | None:
    """Leave groups, given oldest first, and release their resources.

    Args:
        error: the exception that is being handled or has ended this process; None: there is none. After an exception
            other than SystemExit with code 0 or None, `leave` does not wait for operations.
        let_go: a function that closes the groups by `close` below; None: `leave` calls `close` itself.

    Returns:
        An error that names the operations that failed or were never completed, if the program never asked for their
        results. None if there are no such operations.
    """
    in_order = error is None or (isinstance(error, SystemExit) and not error.code)
    waiting = [group for group in groups if in_order and group.may_wait()]
    reason = uncaught(error)
    # Those of groups and of calls that do not match have been dumped where they were raised.
    if groups and reason is not None and not isinstance(reason, GroupError | MismatchError):
        dump.because(describe_error(reason))
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
        f"this rank has lost operations that it did not wait for: {named}{more}; call wait() on the Works of "
        "isend, irecv and async_op=True",
        cause.ranks if cause else (),
    )


def close(groups: Sequence[ProcessGroup], exit_reason: str = "") -> None:
    """Close groups, newest first, even if some fail; the peers' errors contain `exit_reason`."""
    with ExitStack() as steps:
        for group in groups:
            steps.callback(group.close, exit_reason)


def _complete(groups: Sequence[ProcessGroup]) -> None:
    """Wait for the operations under way, as long as they can still complete."""
    started = time.monotonic()
    for group in groups:
        group.messages.take_over_pending()
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
    """Calls `leave` at exit, also in children of multiprocessing, which run only the hooks of multiprocessing."""

    def __init__(self, leave: Callable[[BaseException | None], GroupError | None]) -> None:
        self._leave = leave
        self._finalizer: Any = None
        self._pid = 0  # the process that has called `set_once`

    def set_once(self) -> None:
        """Register the hook, unless this process has done so. A child made by fork must do so again."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self.take_back()
            self.set()

    def set(self) -> None:
        """Register the hook. Hooks run newest first."""
        atexit.register(self._run)
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            self._finalizer = util.Finalize(None, self._run, exitpriority=0)

    def take_back(self) -> None:
        """Unregister the hook. Calling it twice is fine."""
        atexit.unregister(self._run)
        if self._finalizer is not None:
            self._finalizer.cancel()
            self._finalizer = None

    def _run(self) -> None:
        self.take_back()
        try:
            # In children of multiprocessing, the exception that ended the program is still being handled. In other
            # processes, Python keeps the exception that it has printed (`last_value`). In an interactive session, that
            # exception has not ended the program, so it is ignored.
            interactive = sys.flags.interactive or hasattr(sys, "ps1")
            error = sys.exc_info()[1] or (None if interactive else getattr(sys, "last_value", None))
            lost = self._leave(error)
        except BaseException:
            _fail_exit()
            raise
        if lost is not None:
            _log.error("at exit: %s", lost)
            _fail_exit()


def _fail_exit() -> None:
    """Make this process end with exit code 1, after all other hooks, because Python ignores SystemExit in hooks."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        sys.modules["multiprocessing.util"].Finalize(None, sys.exit, (1,), exitpriority=-1000)
    else:
        libc = ctypes.CDLL(None)
        libc.fflush(None)
        libc.__cxa_atexit(libc._exit, ctypes.c_void_p(1), None)
