"""The standard streams of a command: closed, full, or of an encoding that lacks characters; and its Ctrl-C."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable

PIPE_IS_CLOSED = 141
"""A shell's exit code for a program that SIGPIPE has ended."""
INTERRUPTED = 130
"""The same for SIGINT."""


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command as `run_with_streams` does; if Ctrl-C ends it, say so and return INTERRUPTED."""
    try:
        return run_with_streams(command)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def run_with_streams(command: Callable[[], int | None]) -> int:
    """Run a command, or a rank of one; return its exit code, PIPE_IS_CLOSED, or 1 if its output's disk is full.

    For a stream that is closed from the start, Python has None; the command gets the null device instead. Characters
    that the output's encoding lacks are written as `\\xe9`.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            code = command() or 0
        finally:  # also after `sys.exit`, as for --help
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Replace stdout, because Python flushes it at exit, and that would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # as in `python -m fastcoll env | head -1`
            return PIPE_IS_CLOSED
        print(f"the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return code
