"""Actions around a fork: they run in a fixed order, even if one of them raises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastcoll
from fastcoll.system import forks

PROGRAM = """
import os
from fastcoll.system import forks

forks.ORDER = "first", "second", "third"
forks._registered.clear()
note = lambda text: lambda: os.write(1, f"{text}\\n".encode())  # parent and child write at the same time
forks.at_fork("third", note("child 3"), before=note("before 3"), in_parent=note("parent 3"))
forks.at_fork("second", lambda: 1 / 0)
forks.at_fork("first", note("child 1"), before=note("before 1"))
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
"""


def test_actions_follow_the_order_and_one_that_raises_is_reported() -> None:
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.split("\n")
    assert lines[:2] == ["before 3", "before 1"]
    assert [line for line in lines if line.startswith("child")] == ["child 1", "child 3"]
    assert "parent 3" in lines
    assert "ZeroDivisionError" in done.stderr


def test_every_name_has_one_module_and_every_module_a_name() -> None:
    files = Path(fastcoll.__file__).parent.rglob("*.py")
    names = [name for file in files for name in re.findall(r'^ *at_fork\("([^"]+)"', file.read_text(), re.M)]
    assert sorted(names) == sorted(forks.ORDER)


def test_an_action_that_is_not_in_the_order_is_refused() -> None:
    with pytest.raises(AssertionError):
        forks.at_fork("nothing", lambda: None)
