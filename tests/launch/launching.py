"""Launchers under test, each on a small script; waits for them have no bound but LIMIT."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import programs

COMMAND = [sys.executable, "-m", "fastcoll.launch"]
LIMIT = 120  # s, which only ends a hang
HEAD = """
import os, signal, subprocess, sys, time
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def here(*words):
    os.write(1, f"here {os.getpid()} {' '.join(map(str, words))}\\n".encode())
def stay(path="go"):
    # A handler of a signal that comes just before one long sleep would run after it.
    while not os.path.exists(path): time.sleep(0.01)
def wait_for_end(pid):
    while os.path.exists(f"/proc/{pid}"): time.sleep(0.01)
"""

Script = Callable[..., None]
Started = subprocess.Popen[str]
Starter = Callable[..., Started]
Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def patched(*settings: str) -> list[str]:
    """Return the command of a launcher with other constants, such as `pauses._FIRST = 600`."""
    modules = "".join(f"from fastcoll.launch import {each.partition('.')[0]}\n{each}\n" for each in settings)
    code = f"import sys\n{modules}from fastcoll.launch.command import main\nsys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-c", code]


def end(process: Started) -> tuple[int, str, str]:
    """Wait for a launcher and return its exit code and the rest of its output."""
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def next_line(process: Started) -> list[str]:
    """Return the words of the next line that a rank has written with `here`; the second word is the pid."""
    assert process.stdout is not None
    words = process.stdout.readline().split()
    assert words, end(process)
    return words[1:]


def has_ended(pid: int | str) -> bool:
    """Wait until a process has ended; return whether it has within LIMIT."""
    try:
        pidfd = os.pidfd_open(int(pid))
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], LIMIT)[0])
    finally:
        os.close(pidfd)


until = partial(programs.until, seconds=LIMIT)


def wait_for(*names: str | Path) -> None:
    """Wait until files exist."""
    until(lambda: all(Path(name).exists() for name in names))
