"""The processors of each rank, on machines that are described, and on this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastcoll.launch.binding import Processor, bound, shares, usable_processors

# Two sockets of two NUMA nodes of two cores of two processors; Linux numbers the second processors last.
SERVER = sorted(
    Processor(core // 4, core // 2, core % 4, core + 8 * second) for core in range(8) for second in (0, 1)
)
PROGRAM = (
    "import os; print(os.environ['RANK'], sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
)


@pytest.mark.parametrize(
    ("binding", "ranks", "processors", "threads"),
    [
        ("none", 2, [], []),
        ("cores", 8, [[n, n + 8] for n in range(8)], [1] * 8),
        ("cores", 3, [[0, 1, 8, 9], [2, 3, 4, 10, 11, 12], [5, 6, 7, 13, 14, 15]], [2, 3, 3]),
        ("numa", 2, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]], [4, 4]),
        ("numa", 4, [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]], [2] * 4),
        ("sockets", 1, [[*range(16)]], [8]),
        ("sockets", 3, [[0, 1, 2, 3, 8, 9, 10, 11]] * 2 + [[4, 5, 6, 7, 12, 13, 14, 15]], [2, 2, 4]),
    ],
)  # fmt: skip
def test_shares(binding: str, ranks: int, processors: list[list[int]], threads: list[int]) -> None:
    found = shares(binding, SERVER, ranks)
    assert [sorted(share.processors) for share in found] == processors
    assert [share.threads for share in found] == threads


def test_more_ranks_than_cores_are_refused() -> None:
    with pytest.raises(ValueError, match="9 ranks cannot be bound to 8 usable cores"):
        shares("cores", SERVER, 9)


def test_what_linux_describes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may hide everything; then each processor counts as a core of one socket."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5})
    for number, socket, core in ((0, 1, 7), (3, 0, 2)):
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{socket}\n")
        (topology / "core_id").write_text(f"{core}\n")
        (topology.parent / f"node{socket + 4}").mkdir()
    assert usable_processors(tmp_path) == [
        Processor(0, 0, 5, 5), Processor(0, 4, 2, 3), Processor(1, 5, 7, 0)
    ]  # fmt: skip


def test_only_what_starts_meanwhile_is_bound() -> None:
    usable = os.sched_getaffinity(0)
    first = shares("cores", usable_processors(), 1)[0]
    part = first._replace(processors=frozenset({min(usable)}))
    show = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
    with bound(part):
        assert subprocess.run(show, capture_output=True, text=True).stdout == f"{ {min(usable)} }\n"
    assert os.sched_getaffinity(0) == usable


def test_ranks_of_a_job_are_bound(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    ranks = min(2, len(os.sched_getaffinity(0)))
    expected = shares("cores", usable_processors(), ranks)
    launch = [sys.executable, "-m", "fastcoll.launch", "--no_prefix", "--cpu-bind", "cores", "-n", str(ranks)]
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([*launch, str(script)], env=variables, capture_output=True, text=True)
    lines = [f"{rank} {sorted(share.processors)} {share.threads}" for rank, share in enumerate(expected)]
    assert sorted(done.stdout.splitlines()) == lines, done.stderr


def test_an_unknown_binding_is_refused() -> None:
    command = [sys.executable, "-m", "fastcoll.launch", "x.py"]
    for words, variables in ((["--cpu_bind", "core"], {}), ([], {"PET_CPU_BIND": "core"})):
        done = subprocess.run(
            [*command[:3], *words, *command[3:]],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert "give none, cores, numa or sockets, not 'core'" in done.stderr
