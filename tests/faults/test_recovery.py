"""Ranks die, and those that are left go on in a new group, in their processes and with their memory."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastcoll as dist
from faults import crew, recovery_victims

ON_A_NODE, BETWEEN_HOSTS = 1.0, 3.0
"""Seconds from an error to the new group; what the rank itself waits for a core does not count."""
BACKENDS = {"shm": ON_A_NODE, "tcp": BETWEEN_HOSTS, "auto": BETWEEN_HOSTS}


@pytest.mark.parametrize(
    ("backend", "n"),
    [("shm", 8), ("shm", 3), ("tcp", 4), ("auto", 5), pytest.param("tcp", 8, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_killed_until_one_is_left(backend: str, n: int, seed: int) -> None:
    order = random.Random(seed).sample(range(n), n - 1)
    slowest = []
    for _ in range(3):  # what the other ranks wait for a core makes it slow, too
        slowest.append(kill_until_one_is_left(backend, n, order))
        if slowest[-1] < BACKENDS[backend]:
            return
    raise AssertionError(f"shrinking took {slowest} s")


def kill_until_one_is_left(backend: str, n: int, order: list[int]) -> float:
    """Seconds that the slowest `shrink` took."""
    with crew.nothing_left():
        outcomes = crew.run(recovery_victims.kill_until_one_is_left, n, backend, order, deadline=60)
    (last,) = set(range(n)) - set(order)
    said = [outcome.error for outcome in outcomes]
    assert [outcomes[victim].exitcode for victim in order] == [-9] * (n - 1), said
    result = outcomes[last].result
    assert result is not None, outcomes[last].error
    assert result["kept"] == [last] * 3
    return float(max(result["took"]))


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize(
    "victims", [{0: 0.0}, {0: 0.003}, {0: 0.01, 1: 0.02}, {2: 0.005}, {1: 0.001, 0: 0.03}]
)
def test_ranks_that_die_while_others_shrink(backend: str, victims: dict[int, float]) -> None:
    n = 5
    with crew.nothing_left():
        outcomes = crew.run(recovery_victims.die_while_shrinking, n, backend, victims, deadline=60)
    left = [outcome for outcome in outcomes if outcome.rank not in (*victims, n - 1)]
    for outcome in left:
        assert outcome.result == {"sum": sum(2.0**each.rank for each in left)}, outcome.error


@pytest.mark.long
@pytest.mark.parametrize("backend", ["shm", "tcp", "auto"])
def test_a_part_shrinks_and_others_do_not_notice(backend: str) -> None:
    outcomes = crew.run(recovery_victims.shrink_a_part, 6, backend)
    for outcome in outcomes:
        if outcome.rank == 1:
            continue
        assert outcome.result == {"sum": (6, 8)[outcome.rank % 2], "world": (1,)}, outcome.error


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_group_that_has_not_failed_is_aborted_first(backend: str) -> None:
    outcomes = crew.run(recovery_victims.shrink_without_a_death, 3, backend)
    for outcome in outcomes:
        assert outcome.result is not None, outcome.error
        assert outcome.result["sum"] == 3
        assert not outcome.rank or "shrink() was called" in outcome.result["said"]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_rank_that_neither_dies_nor_comes_is_named(backend: str) -> None:
    outcomes = crew.run(recovery_victims.shrink_beside_a_stopped_rank, 3, backend)
    for outcome in outcomes[:2]:
        assert outcome.result is not None, outcome.error
        assert outcome.result["ranks"] == (2,), outcome.result
        assert "neither died nor came in time" in outcome.result["said"]
        limit, (took, at_work) = (3, 2)[outcome.rank], outcome.result["took"]
        assert limit <= took
        assert at_work < limit + 1


@pytest.mark.long
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_ctrl_c(backend: str) -> None:
    outcomes = crew.run(recovery_victims.interrupt_shrinking, 2, backend)
    assert outcomes[0].result is not None, outcomes[0].error
    assert outcomes[0].result["after"] < crew.SOON


def test_a_world_of_one() -> None:
    with dist.world() as before:
        after = dist.shrink()
        assert after is dist.group.WORLD
        assert after is not before
        assert after.size == 1
        dist.barrier()


def test_wrong_arguments() -> None:
    with pytest.raises(dist.NotInitializedError):
        dist.shrink()
    with pytest.raises(dist.NotInitializedError):
        dist.abort()
    with dist.world():
        with pytest.raises(dist.UsageError, match="timeout"):
            dist.shrink(timeout=-1)
        with pytest.raises(dist.UsageError, match="not in the group"):
            dist.shrink(dist.GroupMember.NON_GROUP_MEMBER)


def test_the_program_of_the_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "recovery.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    command, *shown = re.findall(r"^(?:\$ .*|\[\d\] .*)$", page, re.MULTILINE)
    (tmp_path / "program.py").write_text(block)
    words = command.removeprefix("$ python ").split()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(shown)
    assert re.search(r"rank 2 \(pid \d+\) failed: signal SIGKILL \(9\); 3 go on here", done.stderr)


TOO_FEW = """
import os, pathlib, time

rank = os.environ["RANK"]
while rank == "2" and "go on here" not in pathlib.Path("said").read_text():
    time.sleep(0.01)
os.kill(os.getpid(), 9) if rank > "0" else time.sleep(60)
"""


def test_too_few_are_left(tmp_path: Path) -> None:
    """Rank 2 dies when the launcher has told of rank 1's death."""
    said = tmp_path / "said"
    (tmp_path / "program.py").write_text(TOO_FEW)
    words = "-m fastcoll.launch -n 3 --min_ranks 2 program.py".split()
    with said.open("w") as stderr:
        done = subprocess.run([sys.executable, *words], stderr=stderr, timeout=30, cwd=tmp_path)
    assert done.returncode == 128 + 9
    assert "2 go on here" in said.read_text()
    assert "failed first: signal SIGKILL" in said.read_text()
