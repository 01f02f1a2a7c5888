"""Ranks die, and the ranks that are left go on in a new group, with their processes and memory."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import python

import fastcoll as dist
from faults import crew, recovery_victims

ON_A_NODE, BETWEEN_HOSTS = 1.0, 3.0
"""Seconds from an error to the new group; what the rank itself waits for a core does not count."""
BOTH = pytest.mark.parametrize("backend", ["shm", "tcp"])


def timed(*case: object) -> Any:
    return pytest.param(*case, marks=pytest.mark.timed)


def long(*case: object) -> Any:
    return pytest.param(*case, marks=pytest.mark.long)


KILLED = [(backend, n, 1, math.inf) for backend, n in (("shm", 8), ("shm", 3), ("tcp", 4), ("auto", 5))]
KILLED += [long(backend, n, 2, math.inf) for backend, n in (("shm", 8), ("shm", 3), ("tcp", 8), ("auto", 5))]
KILLED += [timed(backend, n, 1, BETWEEN_HOSTS) for backend, n in (("tcp", 4), ("auto", 5))]
KILLED += [timed("shm", 8, 1, ON_A_NODE)]
KILLED += [("by nodes", 5, 1, math.inf), long("by nodes", 5, 2, math.inf)]


@pytest.mark.parametrize(("backend", "n", "seed", "within"), KILLED)
def test_killed_until_one_is_left(backend: str, n: int, seed: int, within: float) -> None:
    order = random.Random(seed).sample(range(n), n - 1)
    with crew.nothing_left():
        outcomes = crew.run(recovery_victims.kill_until_one_is_left, n, backend, order)
    (last,) = set(range(n)) - set(order)
    errors = [outcome.error for outcome in outcomes]
    assert [outcomes[victim].exitcode for victim in order] == [-9] * (n - 1), errors
    (result,) = crew.results([outcomes[last]])
    assert result["kept"] == [last] * 3
    assert max(result["took"]) < within


@pytest.mark.long
def test_a_group_that_meets_by_nodes_shrinks_to_one_that_does_not() -> None:
    n, order = 18, [6, 17]
    with crew.nothing_left():
        outcomes = crew.run(recovery_victims.kill_until_one_is_left, n, "large nodes", order, deadline=250.0)
    assert [outcomes[victim].exitcode for victim in order] == [-9] * len(order)
    assert len(crew.results(each for each in outcomes if each.rank not in order)) == n - len(order)


@BOTH
@pytest.mark.parametrize("dying", [{0: 0.0}, {0: 0.003}, {0: 0.01, 1: 0.02}, {2: 0.005}, {1: 0.001, 0: 0.03}])
def test_ranks_that_die_while_others_shrink(backend: str, dying: dict[int, float]) -> None:
    n = 5
    with crew.nothing_left():
        outcomes = crew.run(recovery_victims.die_while_shrinking, n, backend, dying)
    left = [outcome for outcome in outcomes if outcome.rank not in (*dying, n - 1)]
    assert crew.results(left) == [{"sum": sum(2.0**each.rank for each in left)}] * len(left)


def test_a_death_while_the_new_group_is_made_restarts_shrink() -> None:
    with crew.nothing_left():
        outcomes = crew.run(recovery_victims.shrink_once_while_one_dies, 4, "shm")
    assert outcomes[2].exitcode == outcomes[3].exitcode == -9
    assert crew.results(outcomes[:2]) == [{"sum": 2}] * 2


@pytest.mark.long
@pytest.mark.parametrize("backend", ["shm", "tcp", "auto"])
def test_one_group_shrinks_and_others_are_not_affected(backend: str) -> None:
    ends = crew.run(recovery_victims.shrink_a_part, 6, backend)
    wanted = [{"sum": (6, 8)[rank % 2], "world": (1,)} for rank in (0, 2, 3, 4, 5)]
    assert crew.survivors(ends, 1) == wanted


@BOTH
def test_a_group_that_has_not_failed_is_aborted_first(backend: str) -> None:
    for rank, saw in enumerate(crew.results(crew.run(recovery_victims.shrink_without_a_death, 3, backend))):
        assert saw["sum"] == 3
        assert not rank or "shrink() was called" in saw["said"]


@BOTH
def test_a_rank_that_has_left_is_not_waited_for(backend: str) -> None:
    ends = crew.run(recovery_victims.shrink_without_one_that_left, 3, backend)
    assert crew.results(ends) == [{"sum": 2}, {"sum": 2}, {}]


@BOTH
@pytest.mark.parametrize("within", [long(math.inf), timed(1.0)])
def test_a_rank_that_neither_dies_nor_arrives_is_named(backend: str, within: float) -> None:
    outcomes = crew.run(recovery_victims.shrink_beside_a_stopped_rank, 3, backend)
    for limit, saw in zip((3, 2), crew.survivors(outcomes, 2), strict=True):
        assert 2 in saw["ranks"], saw  # another rank may be late, too
        assert "neither died nor came in time" in saw["said"]
        took, at_work = saw["took"]
        assert limit <= took
        assert at_work < limit + within


@BOTH
@pytest.mark.parametrize("within", [long(math.inf), timed(crew.SOON)])
def test_ctrl_c_ends_shrink(backend: str, within: float) -> None:
    interrupted, _ = crew.results(crew.run(recovery_victims.interrupt_shrinking, 2, backend))
    assert interrupted["after"] < within


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


@pytest.mark.long
def test_the_program_of_the_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "elastic.md").read_text().partition("\n## Shrink\n")[2]
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    command, *shown = re.findall(r"^(?:\$ .*|\[\d\] .*)$", page, re.MULTILINE)
    (tmp_path / "program.py").write_text(block)
    done = python(*command.removeprefix("$ python ").split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(shown)
    assert re.search(r"rank 2 \(pid \d+\) failed: signal SIGKILL \(9\); 3 go on here", done.stderr)


TOO_FEW = """
import os, pathlib, time

rank = os.environ["RANK"]
while rank == "2" and "go on here" not in pathlib.Path("log").read_text():
    time.sleep(0.01)
os.kill(os.getpid(), 9) if rank > "0" else time.sleep(1000)
"""


def test_too_few_are_left(tmp_path: Path) -> None:
    """Rank 2 dies after the launcher has published rank 1's death."""
    log = tmp_path / "log"
    (tmp_path / "program.py").write_text(TOO_FEW)
    words = "-m fastcoll.launch -n 3 --min_ranks 2 program.py".split()
    with log.open("w") as stderr:
        done = subprocess.run([sys.executable, *words], stderr=stderr, timeout=240, cwd=tmp_path)
    assert done.returncode == 128 + 9
    assert "2 go on here" in log.read_text()
    assert "failed first: signal SIGKILL" in log.read_text()
