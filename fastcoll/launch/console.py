"""What the launcher hears and says: the signals that come to it, and all that this process writes to stdout and stderr.

A write waits for its reader, so that a job is as slow as what shows it, and ends when there is something to act on.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LOOK_MILLISECONDS = 100  # between looks for something to act on, while nobody reads
_STANDSTILL_SECONDS = 1.0


class Console:
    """As a context manager it takes this process's signals, and what other code writes to `sys.stderr`, as warnings.

    A reader that has gone, or a terminal, counts as the signal SIGPIPE. While there is something to act on, a
    write waits for one second: what a reader that stands still has not taken by then is lost, and so is what follows
    until it reads again.

    Args:
        handled: the signals that it takes.

    Attributes:
        signals: those received and not yet acted on, added to as they come.
    """

    def __init__(self, handled: Sequence[signal.Signals] = HANDLED) -> None:
        self._handled = handled
        self.signals: list[int] = []
        self._still: set[int] = set()  # descriptors whose reader has stood still
        self._leaving = contextlib.ExitStack()

    def __enter__(self) -> Console:
        for number in self._handled:
            before = signal.getsignal(number)
            if before != signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda got, _: self.signals.append(got))
                self._leaving.callback(signal.signal, number, before)
        self._leaving.enter_context(contextlib.redirect_stderr(_Stderr(self)))
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.close()

    def say(self, text: str, has_to_act: Callable[[], bool] = lambda: False) -> None:
        """Write a line of the launcher's own to stderr; `has_to_act`: whether there is more than a signal to act on."""
        self.write(sys.__stderr__, f"fastcoll.launch: {text}\n".encode(errors="replace"), has_to_act)

    def write(
        self, stream: TextIO | None, data: bytes, has_to_act: Callable[[], bool] = lambda: False
    ) -> None:
        """Write to stdout or stderr as they were given to this process. Not by a buffer: that would still hold what
        nobody reads when the process ends.
        """
        descriptor = -1 if stream is None else stream.fileno()  # None: it was closed
        while data and descriptor >= 0 and self._may_write(descriptor, has_to_act):
            try:
                # A pipe that can be written to takes so much at once: a longer write would wait, and no signal end it.
                data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]
            except BlockingIOError:  # another program has made the terminal nonblocking
                pass
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EIO):  # EIO: the terminal has gone
                    raise
                if signal.SIGPIPE not in self.signals:
                    self.signals.append(signal.SIGPIPE)
                return

    def _may_write(self, descriptor: int, has_to_act: Callable[[], bool]) -> bool:
        """Wait for the reader; False: for too long."""
        end = math.inf
        while not is_ready(
            descriptor, select.POLLOUT, 0 if descriptor in self._still else _LOOK_MILLISECONDS
        ):
            if not (self.signals or has_to_act()):
                end = math.inf
                self._still.discard(descriptor)
                continue
            end = min(end, time.monotonic() + _STANDSTILL_SECONDS)
            if descriptor in self._still or time.monotonic() >= end:
                self._still.add(descriptor)
                return False
        self._still.discard(descriptor)
        return True


class _Stderr(io.TextIOBase):
    """What stands in the place of `sys.stderr`."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        self._console.write(sys.__stderr__, text.encode(errors="replace"))
        return len(text)


def is_ready(descriptor: int, event: int, milliseconds: int) -> bool:
    """Whether a descriptor can be read (POLLIN) or written to (POLLOUT) before so long."""
    poll = select.poll()  # select() refuses descriptors above 1023
    poll.register(descriptor, event)
    return bool(poll.poll(milliseconds))
