"""`status` on real jobs that hang: four ranks under the launcher, hangs of every kind, the culprit by its name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

BEGIN = """
import os, signal, sys, time
import numpy as np
import fastcoll as dist
dist.init_process_group(backend="auto", timeout=120)
rank = dist.get_rank()
x = np.ones(4, np.float32)
"""
SKIPPED = """
pair = dist.new_group([0, 2])
for step in range(10):
    if rank in (0, 2) and not (rank == 2 and step == 7):
        dist.all_reduce(x, group=pair)
    dist.barrier()
"""
IN_A_LOOP = """
for step in range(10):
    dist.all_reduce(x)
    while rank == 1 and step == 5:
        pass
"""
STOPPED = """
for step in range(10):
    if rank == 2 and step == 6:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(x)
"""
ASLEEP = """
import threading
for step in range(10):
    dist.broadcast(x, 0)
    if rank == 3 and step == 4:
        threading.Event().wait()
    dist.barrier()
"""
UNSENT = """
dist.barrier()
if rank == 0:
    dist.recv(x, 1)
while rank == 1:
    pass
dist.barrier()
"""
ON_ITS_OWN = """
dist.barrier()
if rank == 1:
    dist.destroy_process_group()
time.sleep(1000)
"""
DEADLINE = 60  # s until a hang is seen: the launcher starts, ranks meet, and a wait becomes long enough


def look(*words: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "fastcoll", "status", "--json", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    told = json.loads(done.stdout)
    assert done.returncode == (bool(words) and not told["jobs"] and not told["in_no_group"]), done.stderr
    assert not done.stderr
    return told


@contextmanager
def job(folder: Path, program: str) -> Iterator[Callable[[Callable], dict]]:
    """Four ranks that run a program; gives a function that waits until `look` shows a job of theirs that is so."""
    path = folder / "hangs.py"
    path.write_text(program)
    command = [sys.executable, "-m", "fastcoll", "launch", "-n", "4", "--grace", "1", str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as launcher:

        def until(so: Callable[[dict], bool]) -> dict:
            end, told = time.monotonic() + DEADLINE, {}
            while time.monotonic() < end and launcher.poll() is None:
                told = look("--job", str(launcher.pid))
                for each in told["jobs"]:
                    assert str(path) in each["command"]
                    if so(each):
                        return each
            launcher.kill()
            raise AssertionError(f"{told} {launcher.stderr.read()}")

        try:
            yield until
        finally:
            launcher.terminate()
            for each in look()["jobs"]:
                for rank in each["ranks"] if str(path) in each["command"] else ():
                    with suppress(ProcessLookupError):  # a stopped process takes no SIGTERM
                        os.kill(rank["pid"], signal.SIGCONT)
            launcher.communicate(timeout=60)


def has_verdict(found: dict) -> bool:
    """All ranks are there, and some have waited for long."""
    held = (" waited in for ", " waited for ", "wait for one another")
    texts = [verdict["text"] for verdict in found["verdicts"]]
    return (
        len(found["ranks"]) == 4 and bool(texts) and all(any(word in text for word in held) for text in texts)
    )


HANGS = {
    "a skipped call": (SKIPPED, [0, 2], ["ranks 0 and 2 wait for one another"], "call 8 of group "),
    "a loop of Python": (
        IN_A_LOOP,
        [1],
        ["rank 1 (pid ", " has not called all_reduce("],
        "; it runs its own code",
    ),
    "a stopped rank": (
        STOPPED,
        [2],
        ["rank 2 (pid ", " has not called all_reduce(", "ranks 0, 1 and 3 have waited in for "],
        "; it is stopped, by SIGSTOP",
    ),
    "a lock": (
        ASLEEP,
        [3],
        ["rank 3 (pid ", " has not called barrier(), call 10"],
        "; it sleeps in its own code",
    ),
    "a message": (UNSENT, [1], ["rank 1 (pid "], "; it runs its own code"),
}
LONG = ("a lock", "a message")


@pytest.mark.parametrize(
    "hang", [pytest.param(hang, marks=pytest.mark.long) if hang in LONG else hang for hang in HANGS]
)
def test_the_culprit_of_a_job_that_hangs_is_named(hang, tmp_path):
    program, culprits, texts, more = HANGS[hang]

    def is_told(found: dict) -> bool:
        """Of each rank that waits, as they came one after the other, and when the culprit is where it stays."""
        if not has_verdict(found):
            return False
        said = " ".join([found["verdicts"][0]["text"], *found["verdicts"][0]["more"]])
        return more in said and all(text in found["verdicts"][0]["text"] for text in texts)

    with job(tmp_path, BEGIN + program) as until:
        found = until(is_told)
    (verdict,) = found["verdicts"]
    assert verdict["ranks"] == culprits
    assert verdict["next"]
    if hang == "a stopped rank":
        (rank,) = (each for each in found["ranks"] if each["rank"] == 2)
        assert rank["state"] == "stopped"
        assert f"kill -CONT {rank['pid']}" in verdict["next"]


@pytest.mark.long
def test_the_culprit_over_tcp_is_named_too(tmp_path):
    program = BEGIN.replace("auto", "tcp") + STOPPED.replace(
        "dist.all_reduce(x)", "dist.all_reduce(np.ones(1 << 16))"
    )
    with job(tmp_path, program) as until:  # others come to the call one after the other
        found = until(lambda found: has_verdict(found) and "it is stopped" in found["verdicts"][0]["text"])
    (verdict,) = found["verdicts"]
    assert verdict["ranks"] == [2]


@pytest.mark.long
def test_a_stopped_job_is_shown_whole_and_goes_on(tmp_path):
    """All ranks stopped at once: nobody waits, none of them could say so."""
    with job(tmp_path, BEGIN + "for step in range(10**9): dist.all_reduce(x)") as until:
        found = until(lambda found: len(found["ranks"]) == 4 and not found["verdicts"])
        pids = [rank["pid"] for rank in found["ranks"]]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        found = until(lambda found: {rank["state"] for rank in found["ranks"]} == {"stopped"})
        blamed = {rank for verdict in found["verdicts"] for rank in verdict["ranks"]}
        assert blamed == {0, 1, 2, 3}
        calls = [rank["groups"][0]["calls"] for rank in found["ranks"]]
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        until(
            lambda found: all(r["groups"][0]["calls"] > n for r, n in zip(found["ranks"], calls, strict=True))
        )


@pytest.mark.long
def test_a_rank_that_has_left_is_not_taken_for_a_dead_one(tmp_path):
    with job(tmp_path, BEGIN + ON_ITS_OWN) as until:
        found = until(lambda found: len(found["ranks"]) == 3)
        assert [(each["rank"], each["where"]) for each in found["unseen"]] == [(1, "left")]
        assert found["unseen"][0]["pid"] in [each["pid"] for each in look()["in_no_group"]]


@pytest.mark.long
def test_ranks_that_have_not_met_yet_are_listed(tmp_path):
    """Rank 3 does not come, so no rank is in a group."""
    program = "import os\nif os.environ['RANK'] == '3':\n    while True: pass\n" + BEGIN
    with job(tmp_path, program):
        end, ours = time.monotonic() + DEADLINE, {}
        while time.monotonic() < end and ours != {"0": True, "1": True, "2": True, "3": False}:
            outside = [each for each in look()["in_no_group"] if str(tmp_path) in each["command"]]
            ours = {each["rank"]: each["joining_for"] is not None for each in outside}
    assert ours == {"0": True, "1": True, "2": True, "3": False}, outside


@pytest.mark.long
def test_a_rank_that_nobody_has_launched_is_listed_while_it_joins(tmp_path):
    path = tmp_path / "alone.py"
    path.write_text(
        "import sys\nimport fastcoll as dist\n"
        "dist.init_process_group('tcp', f'file://{sys.argv[1]}', 60, 2, int(sys.argv[2]))\nsys.stdin.readline()\n"
    )
    command = [sys.executable, str(path), str(tmp_path / "meet")]
    with subprocess.Popen([*command, "1"], stdin=subprocess.PIPE) as first:
        ours, end = [], time.monotonic() + DEADLINE
        while time.monotonic() < end and not ours:
            ours = [each for each in look()["in_no_group"] if each["pid"] == first.pid]
        with subprocess.Popen([*command, "0"], stdin=subprocess.PIPE) as other:
            joined = False
            while time.monotonic() < end and not joined:
                told = look()
                joined = first.pid in [rank["pid"] for job in told["jobs"] for rank in job["ranks"]]
            assert joined
            assert first.pid not in [each["pid"] for each in told["in_no_group"]]
            for rank in (first, other):
                rank.stdin.close()


@pytest.mark.long
def test_what_people_see(tmp_path):
    all_wait, stopped = "ranks 0, 1 and 3 have waited in for ", "it is stopped"

    def is_told(found: dict) -> bool:
        return has_verdict(found) and all(
            text in found["verdicts"][0]["text"] for text in (all_wait, stopped)
        )

    with job(tmp_path, BEGIN + STOPPED) as until:
        until(is_told)
        of_this = "--job", str(tmp_path / "hangs.py")  # others may run on this machine
        shown = subprocess.run(
            [sys.executable, "-m", "fastcoll", "status", *of_this], capture_output=True, text=True, timeout=60
        ).stdout
        found = look(*of_this)["jobs"]
        assert look("--job", found[0]["job"])["jobs"][0]["job"] == found[0]["job"]
        assert len(found) == 1
    lines = shown.splitlines()
    (first,) = (
        number for number, line in enumerate(lines) if "hangs.py" in line and line.startswith("4 ranks")
    )
    assert lines[first + 1].startswith("  rank 2 (pid ")
    assert "next: kill -CONT " in lines[first + 3]
    (row,) = (line.split("\t") for line in lines if line.startswith("-->"))
    assert (row[1], row[3], row[5], row[6]) == ("2", "stopped", "WORLD", "6")
    waiting = [line.split("\t") for line in lines if "\t2\tall_reduce(" in line]
    assert [row[1] for row in waiting] == ["0", "1", "3"]


def test_without_a_job_nothing_is_found():
    mine = [each for each in look()["jobs"] if str(os.getpid()) in each["job"]]
    assert mine == []
    assert look("--job", "none-of-that-name")["jobs"] == []
