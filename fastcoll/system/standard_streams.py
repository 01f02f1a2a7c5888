"""The standard streams of a command that are closed: before it starts, or by the reader while it writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

PIPE_IS_CLOSED = 141
"""A shell's exit code for a program that SIGPIPE has ended."""


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command; return its exit code, or PIPE_IS_CLOSED if the reader of its output goes away.

    For a stream that is closed from the start, Python has None; the command gets the null device instead.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    try:
        try:
            code = command() or 0
        finally:  # also after `sys.exit`, as for --help
            sys.stdout.flush()
    except BrokenPipeError:  # as in `python -m fastcoll env | head -1`
        # Replace stdout, because Python flushes it at exit, and that would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_IS_CLOSED
    return code
