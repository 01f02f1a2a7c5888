"""Tying a process to its parent, and describing how a process ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

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


def test_children_belong_to_the_thread_that_started_them() -> None:
    started, stop = threading.Event(), threading.Event()

    def start() -> None:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
            pids.append(child.pid)
            started.set()
            assert stop.wait(LIMIT)

    pids = list[int]()
    thread = threading.Thread(target=start)
    thread.start()
    assert started.wait(LIMIT)
    assert pids[0] in lifeline.children_of(os.getpid())
    assert thread.native_id is not None
    assert lifeline.children_of_thread(os.getpid(), thread.native_id) == pids
    assert pids[0] not in lifeline.children_of_thread(os.getpid(), os.getpid())
    stop.set()
    thread.join(LIMIT)
