"""Tying a process to its parent, and naming how one ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from launch.launching import LIMIT

from fastcoll.launch import lifeline


@pytest.mark.parametrize(
    ("code", "name"),
    [(0, "exit code 0"), (3, "exit code 3"), (-9, "signal SIGKILL (9)"), (-40, "signal 40")],
)
def test_describe_exit(code: int, name: str) -> None:
    assert lifeline.describe_exit(code) == name


def tethered(parent: int, *program: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", lifeline.__file__, str(parent), *program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_program_takes_the_place_of_the_tether() -> None:
    with tethered(os.getpid(), "sh", "-c", "echo $$; exit 5") as process:
        out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, int(out), err) == (5, process.pid, "")


def test_a_program_that_does_not_exist() -> None:
    with tethered(os.getpid(), "/no/such/program") as process:
        _, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err) == (127, "'/no/such/program' cannot be run: No such file or directory\n")


def test_a_parent_that_is_gone_already() -> None:
    # The parent that the tether is told of is a child of its real one: 1 would be real where pytest is process 1.
    with subprocess.Popen(["true"]) as gone, tethered(gone.pid, "true") as process:
        assert process.wait(LIMIT) == 128 + signal.SIGKILL


@pytest.fixture
def tied() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process, and the pidfd of its child that is tied to it."""
    script = (
        "import os, subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-I', '-S', sys.argv[1], str(os.getpid())"
        " , 'sh', '-c', 'echo $$; exec sleep 1000']);"
        "child.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, lifeline.__file__], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        yield parent, pidfd
        os.close(pidfd)
        parent.kill()


def test_the_child_dies_with_its_parent(tied: tuple[subprocess.Popen[bytes], int]) -> None:
    parent, child = tied
    assert not select.select([child], [], [], 0)[0]
    parent.kill()
    assert select.select([child], [], [], LIMIT)[0]


def test_children_of() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        assert child.pid in lifeline.children_of(os.getpid())
        child.kill()
    assert child.pid not in lifeline.children_of(os.getpid())


def test_a_group_that_is_gone_is_fine() -> None:
    with subprocess.Popen(["true"], start_new_session=True) as child:
        child.wait()
    lifeline.signal_group(child.pid, signal.SIGTERM)
