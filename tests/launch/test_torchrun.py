"""One program under torchrun and under fastcoll's launcher: both start it anew, and set the same variables."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch: pip install torch==2.13.0")

PROGRAM = """
import json, os, signal, sys
import numpy as np
import fastcoll as dist
dist.init_process_group(timeout=100)
x = np.ones(2)
dist.all_reduce(x)
restarts, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
os.write(1, f"restart {restarts} rank {rank}: {x.tolist()}\\n".encode())
dist.barrier()
if (restarts, rank) == (0, 1):
    raise ValueError("no data")
if (restarts, rank) == (1, 0):
    os.kill(os.getpid(), signal.SIGKILL)
if (restarts, rank) == (2, 1):
    os._exit(3)
dist.all_reduce(x)  # which fails, but the last time
if restarts == int(sys.argv[1]):
    os.write(1, f"said {json.dumps(sorted(os.environ))}\\n".encode())
dist.destroy_process_group()
"""
RUNS = {
    "torchrun": ["torch.distributed.run", "--standalone"],
    "fastcoll": ["fastcoll.launch", "--standalone", "--no-prefix"],
}


def run(launcher: str, path: Path, restarts: int, good: int) -> subprocess.CompletedProcess[str]:
    (path / "program.py").write_text(PROGRAM)
    words = [*RUNS[launcher], "--nproc-per-node=2", f"--max-restarts={restarts}", "program.py", str(good)]
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=path, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    return {launcher: run(launcher, tmp_path_factory.mktemp(launcher), 3, 3) for launcher in RUNS}


@pytest.mark.long
@pytest.mark.parametrize("launcher", RUNS)
def test_a_program_whose_ranks_fail_in_three_ways_ends_well(
    ends: dict[str, subprocess.CompletedProcess[str]], launcher: str
) -> None:
    done = ends[launcher]
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("restart"))
    assert said == [f"restart {restart} rank {rank}: [2.0, 2.0]" for restart in range(4) for rank in range(2)]


def test_the_variables_of_torchrun_are_set(ends: dict[str, subprocess.CompletedProcess[str]]) -> None:
    theirs, ours = (
        {name for said in re.findall("^said (.*)$", done.stdout, re.M) for name in json.loads(said)}
        for done in (ends[launcher] for launcher in RUNS)
    )
    assert "TORCHELASTIC_RUN_ID" in theirs
    assert theirs - ours <= {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}  # which importing torch sets


@pytest.mark.long
@pytest.mark.parametrize("launcher", RUNS)
def test_without_a_restart_left_the_job_fails(tmp_path: Path, launcher: str) -> None:
    done = run(launcher, tmp_path, 0, 3)
    assert done.returncode == 1, done.stderr
    assert re.findall("restart .", done.stdout) == ["restart 0"] * 2
