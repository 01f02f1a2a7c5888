"""Launchers under test: each is started on a small script, and what ends is waited for without a bound."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

COMMAND = [sys.executable, "-m", "fastcoll.launch"]
LIMIT = 120  # s, which only ends a hang
HEAD = """
import os, signal, subprocess, sys, time
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def here(*words):
    os.write(1, f"here {os.getpid()} {' '.join(map(str, words))}\\n".encode())
def stay(path="go"):
    while not os.path.exists(path): time.sleep(0.01)
def wait_for_end(pid):
    while os.path.exists(f"/proc/{pid}"): time.sleep(0.01)
"""

Script = Callable[[str], None]
Started = subprocess.Popen[str]
Starter = Callable[..., Started]


def patched(*settings: str) -> list[str]:
    """The command of a launcher with other constants, as `pauses._FIRST = 600`."""
    modules = "".join(f"from fastcoll.launch import {each.partition('.')[0]}\n{each}\n" for each in settings)
    code = f"import sys\n{modules}from fastcoll.launch.command import main\nsys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-c", code]


def end(process: Started) -> tuple[int, str, str]:
    """The exit code of a launcher, and the rest of what it has written."""
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def next_line(process: Started) -> list[str]:
    """The words of the next line that a rank has written by `here`, the pid second."""
    assert process.stdout is not None
    words = process.stdout.readline().split()
    assert words, end(process)
    return words[1:]


def has_ended(pid: int | str) -> bool:
    """Wait for the end of a process."""
    try:
        pidfd = os.pidfd_open(int(pid))
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], LIMIT)[0])
    finally:
        os.close(pidfd)


def wait_for(*names: str | Path) -> None:
    """Wait until files exist."""
    deadline = time.monotonic() + LIMIT
    while not all(Path(name).exists() for name in names):
        assert time.monotonic() < deadline, names
        time.sleep(0.01)
