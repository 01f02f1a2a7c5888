"""The launcher's console: the signals that it receives, and its writes to stdout and stderr.

A write waits until the reader of the stream takes the output, so a slow reader slows the job down. As soon as the
launcher has a signal or a failure to handle, the write waits for at most one second more.
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
_LOOK_MILLISECONDS = 100  # between checks for a signal or failure, while the reader is slow
_STANDSTILL_SECONDS = 1.0  # how long a write waits for the reader once there is a signal or failure to handle


class Console:
    """Collects signals and writes output.

    In a `with` block, the console appends received signals to `signals`, and replaces `sys.stderr`, so that it also
    writes text that other code prints there, such as warnings. If the reader or the terminal is gone, or a write fails
    for another reason, such as a full disk, the console appends SIGPIPE to `signals`. While there is a signal or
    failure to handle, a write waits for the reader for at most one second. After that the console drops this output,
    and all later output until the reader reads again. SIGCHLD is not ignored in the block.

    Args:
        handled: the signals to collect.

    Attributes:
        signals: signals that were received, in order; the launcher removes each signal as it handles it.
    """

    def __init__(self, handled: Sequence[signal.Signals] = HANDLED) -> None:
        self._handled = handled
        self.signals: list[int] = []
        self._still: set[int] = set()  # descriptors whose reader has stopped reading
        self._is_full = False  # whether a write has failed for another reason than a reader that is gone
        self._leaving = contextlib.ExitStack()

    def __enter__(self) -> Console:
        for number in self._handled:
            before = signal.getsignal(number)
            if before != signal.SIG_IGN:  # an ignored signal stays ignored, such as SIGHUP under nohup
                signal.signal(number, lambda got, _: self.signals.append(got))
                self._leaving.callback(signal.signal, number, before)
        # While SIGCHLD is ignored, as it may be since before this program, no exit code of a child can be read.
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._leaving.callback(signal.signal, signal.SIGCHLD, before)
        self._leaving.enter_context(contextlib.redirect_stderr(_Stderr(self)))
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.close()

    def say(self, text: str, has_to_act: Callable[[], bool] = lambda: False) -> None:
        """Write a log line to stderr.

        Args:
            has_to_act: returns whether the caller has something other than a signal to handle, such as a failure.
        """
        self.write(sys.__stderr__, f"fastcoll.launch: {text}\n".encode(errors="replace"), has_to_act)

    def write(
        self, stream: TextIO | None, data: bytes, has_to_act: Callable[[], bool] = lambda: False
    ) -> None:
        """Write to the stdout or stderr of this process, unbuffered.

        With a buffer, the process could block at exit: Python then flushes the buffer, and the reader may not read.
        """
        descriptor = -1 if stream is None else stream.fileno()  # None: the stream was closed
        while data and descriptor >= 0 and self._may_write(descriptor, has_to_act):
            try:
                # A pipe that poll() reports as writable takes PIPE_BUF bytes without blocking. A longer write could
                # block, also after a signal, because Python then resumes the write.
                data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]
            except BlockingIOError:  # another program has set the terminal to nonblocking
                pass
            except OSError as error:
                is_gone = error.errno in (errno.EPIPE, errno.EIO)  # EIO: the terminal is gone
                if not is_gone and not self._is_full:
                    self._is_full = True  # before the next write, which may fail as well
                    self.say(f"the output cannot be written: {error.strerror}")
                if signal.SIGPIPE not in self.signals:
                    self.signals.append(signal.SIGPIPE)
                return

    def _may_write(self, descriptor: int, has_to_act: Callable[[], bool]) -> bool:
        """Wait until the descriptor is writable; return False if the reader takes too long."""
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
    """A replacement for `sys.stderr` that writes to the console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        self._console.write(sys.__stderr__, text.encode(errors="replace"))
        return len(text)


def is_ready(descriptor: int, event: int, milliseconds: int) -> bool:
    """Return whether a descriptor can be read (POLLIN) or written (POLLOUT) within some milliseconds."""
    poll = select.poll()  # select() refuses descriptors above 1023
    poll.register(descriptor, event)
    return bool(poll.poll(milliseconds))
