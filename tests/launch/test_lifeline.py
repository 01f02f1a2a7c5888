"""Tying a process to its parent, and describing how a process ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from launch.launching import LIMIT

from fastcoll.launch import lifeline


def test_describe_exit() -> None:
    names = {0: "exit code 0", 3: "exit code 3", -9: "signal SIGKILL (9)", -40: "signal 40"}
    assert {code: lifeline.describe_exit(code) for code in names} == names


def tethered(parent: int, *program: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", lifeline.__file__, str(parent), *program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_program_takes_the_place_of_the_tether() -> None:
    with tethered(os.getpid(), "sh", "-c", "echo $$; exit 5") as process:
        out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, int(out), err) == (5, process.pid, "")


def test_a_parent_that_is_gone_already() -> None:
    # The given parent is another child of the real one. Pid 1 would be the real parent if pytest were process 1.
    with subprocess.Popen(["true"]) as gone, tethered(gone.pid, "true") as process:
        assert process.wait(LIMIT) == 128 + signal.SIGKILL


def test_signalling_a_group_that_is_gone_is_no_error() -> None:
    with subprocess.Popen(["true"], start_new_session=True) as child:
        child.wait()
    lifeline.signal_group(child.pid, signal.SIGTERM)
