"""Failpoints: how the setting is parsed, and the effect of each action in Python."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import fastcoll
from fastcoll import config, failpoints
from fastcoll.compiler import jit

PACKAGE = Path(fastcoll.__file__).parent
ENTER = "shm.all_reduce.enter"


@pytest.fixture(autouse=True)
def nothing_armed() -> Iterator[None]:
    yield
    failpoints.arm(())


def test_the_setting_is_parsed() -> None:
    (kill, delay) = failpoints.parse(f"{ENTER}:kill@2#1, shm.barrier.*:delay=0.5")
    assert kill == ((failpoints.number_of(ENTER),), failpoints.KILL, 0.0, 2, 1)
    assert len(delay.numbers) == sum(name.startswith("shm.OPERATION.") for name in failpoints.PLACES)
    assert delay[1:] == (failpoints.DELAY, 0.5, 0, None)
    assert failpoints.parse("") == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("shm.all_reduce.afterpublish:kill", r"no failpoint 'shm.all.*'; near it are .*after_publish"),
        ("nowhere:kill", "no failpoint 'nowhere'"),
        (ENTER, "names no action: kill, exit"),
        (f"{ENTER}:murder", "names no action"),
        (f"{ENTER}:delay", "lacks the seconds"),
        (f"{ENTER}:kill@0", "counts from 1"),
        (f"{ENTER}:kill@x", "invalid literal"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_when_a_job_starts(
    text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTCOLL_FAILPOINT", text)
    config.forget()
    try:
        with pytest.raises(fastcoll.UsageError, match=says):
            fastcoll.init_process_group()
    finally:
        monkeypatch.undo()
        config.forget()


def test_only_the_given_hit_and_rank_trigger() -> None:
    points = failpoints.parse(f"{ENTER}:raise@2#1")
    failpoints.arm(points, 0)
    for _ in range(3):
        failpoints.reach(ENTER)
    failpoints.arm(points, 1)
    failpoints.reach(ENTER)
    with pytest.raises(failpoints.FailpointError, match=ENTER):
        failpoints.reach(ENTER)
    failpoints.reach(ENTER)


SCRIPT = """
import sys
from fastcoll import failpoints
failpoints.arm(failpoints.parse(sys.argv[1]))
failpoints.reach("shm.all_reduce.enter")
print("went on")
"""


@pytest.mark.parametrize(
    ("action", "code"), [("kill", -signal.SIGKILL), ("exit", 1), ("exit=7", 7), ("stop", 0)]
)
def test_ends_of_a_process(action: str, code: int) -> None:
    """A stopped process can go on."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, f"{ENTER}:{action}"], stdout=subprocess.PIPE)
    if action == "stop":
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        process.send_signal(signal.SIGCONT)
    said = process.communicate(timeout=100)[0]
    assert (process.returncode, said) == (code, b"" if code else b"went on\n")


def test_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("fastcoll.failpoints.time", SimpleNamespace(sleep=slept.append))
    failpoints.arm(failpoints.parse(f"{ENTER}:delay=0.05"), 0)
    failpoints.reach(ENTER)
    assert slept == [0.05]


def test_every_name_is_used_and_every_use_has_a_name() -> None:
    texts = [
        path.read_text() for path in PACKAGE.rglob("*.py") if path.name not in ("failpoints.py", "failing.py")
    ]
    used = {name for text in texts for name in re.findall(r"\b(?:number_of|reach)\(\s*\"([^\"]+)\"", text)}
    assert used == set(failpoints.PLACES)


def test_entries_have_no_failpoints_without_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not jit.has_failpoints()
    monkeypatch.setitem(config._read, "FASTCOLL_FAILPOINT", failpoints.parse(f"{ENTER}:kill"))
    assert jit.has_failpoints()


def test_the_page_lists_every_failpoint_and_every_action() -> None:
    page = (Path(__file__).parent.parent / "docs" / "failpoints.md").read_text()
    assert dict(re.findall(r"^\| `(\w+\.[\w.]+)` \| (.*?) \|$", page, re.MULTILINE)) == failpoints.PLACES
    assert set(failpoints.ACTIONS) <= set(re.findall(r"`(\w+)", page))
