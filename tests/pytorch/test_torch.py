"""The torch.distributed backend. Two programs run most checks, since ranks that import torch take seconds to start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from apart import environment
from programs import torchrun

from fastcoll.launch.nodes import free_port

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch: pip install torch==2.13.0"),
    pytest.mark.limit(1000),  # above DEADLINE
]

HERE = Path(__file__).parent
DEADLINE = 600.0
LAUNCH = ("-m", "fastcoll.launch", "-n", "2")  # the launcher does not import torch
SUMS = "FastcollProcessGroup FastcollProcessGroup [6.0, 6.0, 6.0]"
MPIEXEC = "import os, sys; os.execv(sys.argv[1], ['mpiexec', '-n', '2', sys.executable, *sys.argv[2:]])"
GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1) + dist.get_rank()
dist.all_reduce(x)
dist.destroy_process_group()
print(x.item())
"""


def start(*command: str | Path, **variables: str) -> subprocess.Popen[str]:
    """Start a program in a process group of its own, which finds the tests' modules and the package under test."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environment(OMP_NUM_THREADS="1", **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(program: subprocess.Popen[str]) -> tuple[int, str]:
    """How the program ended, and what it said; one that doesn't is killed with all that it started."""
    try:
        output, _ = program.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        output, _ = program.communicate()
    return program.returncode, output


def check(results: Path, ranks: int, least: int, output: str) -> None:
    """Every check that a rank of the program has run must have ended well."""
    for rank in range(ranks):
        file = Path(f"{results}-{rank}.json")
        assert file.exists(), output
        outcome = json.loads(file.read_text())
        failed = "\n".join(f"rank {rank}: {name}:\n{text}" for name, text in outcome.items() if text)
        assert not failed, failed
        assert len(outcome) >= least, f"rank {rank} ended after {list(outcome)[-1]}\n{output}"


@pytest.mark.long
def test_every_operation_has_the_results_of_gloo(tmp_path: Path) -> None:
    """With torchrun, and without destroy_process_group."""
    code, output = end(start(*torchrun("--nproc-per-node=3"), HERE / "three_ranks.py", tmp_path / "results"))
    check(tmp_path / "results", 3, 27, output)
    assert code == 0, output


def test_models_train_as_over_gloo_and_faults_raise(tmp_path: Path) -> None:
    ranks = [start(HERE / "two_ranks.py", tmp_path / "results", str(rank)) for rank in range(2)]
    ends = [end(rank) for rank in ranks]
    output = "\n".join(text for _, text in ends)
    check(tmp_path / "results", 2, 24, output)
    assert [code for code, _ in ends] == [0, -signal.SIGKILL], output


@pytest.mark.long
def test_gloo_and_fastcoll_meet_at_one_address() -> None:
    """In either order, by env:// and tcp://, and again at the same port."""
    code, output = end(start(*LAUNCH, HERE / "one_program.py"))
    assert code == 0, output
    assert output.count("met 4 times") == 2, output


@pytest.mark.long  # the test above also has two jobs at one port, one after the other
def test_torchrun_restarts_ranks() -> None:
    """torchrun's store has the keys of the previous ranks, and its agent listens at MASTER_PORT."""
    code, output = end(start(*torchrun("--nproc-per-node=2", "--max-restarts=1"), HERE / "started_anew.py"))
    assert code == 0, output
    assert output.count("after a restart: [2.0, 2.0] [2.0, 2.0]") == 2, output


@pytest.mark.long
def test_programs_that_import_only_torch_have_the_backend() -> None:
    """The installed package's entry point registers it; `get_backend` returns the requested name."""
    programs = [
        (name, start(*launcher, HERE / "by_default.py", *named, FASTCOLL_TORCH_DEFAULT=default))
        for launcher, default, named, name in (
            (LAUNCH, "", ["fastcoll"], "fastcoll"),
            (LAUNCH, "1", [], "undefined"),
            (LAUNCH, "gloo", ["gloo"], "gloo"),
            (torchrun("--nproc-per-node=2"), "gloo", [], "undefined"),
        )
    ]
    for name, (code, output) in [(name, end(program)) for name, program in programs]:
        assert code == 0, output
        assert output.count(f"{name} {SUMS}") == 2, output


@pytest.mark.long
def test_ranks_of_mpiexec_and_srun_join_by_env() -> None:
    """The variables that torch reads are missing; also over Gloo."""
    if (mpiexec := shutil.which("mpiexec")) is None:
        pytest.skip("there is no mpiexec on the PATH")
    command = ("-c", MPIEXEC, mpiexec, HERE / "by_default.py", "fastcoll")
    code, output = end(start(*command, FASTCOLL_TORCH_DEFAULT=""))
    assert code == 0, output
    assert output.count(f"fastcoll {SUMS}") == 2, output
    tasks = {"SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "1", "SLURM_LOCALID": "0"}
    tasks["FASTCOLL_TORCH_DEFAULT"] = ""
    ranks = [start("-c", GLOO, **tasks, SLURM_PROCID=str(rank)) for rank in range(2)]
    for code, output in map(end, ranks):
        assert code == 0, output
        assert output.endswith("3.0\n")


@pytest.mark.long
def test_importing_torch_survives_a_wrong_setting() -> None:
    program = start("-c", "import torch; print(torch.ones(1).item())", FASTCOLL_TORCH_DEFAULT="nccl")
    code, output = end(program)
    assert code == 0, output
    assert "torch has no backend fastcoll: UsageError: FASTCOLL_TORCH_DEFAULT='nccl'" in output
    assert output.endswith("1.0\n")


@pytest.mark.long  # parts.py has the sizes that are not warned of
def test_a_world_of_one_under_a_launcher_of_several_ranks_is_warned_of() -> None:
    program = "import torch.distributed as d; d.init_process_group('fastcoll'); d.destroy_process_group()"
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables |= {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    code, output = end(start("-c", program, **variables))
    assert code == 0, output
    assert "one rank, but OMPI_COMM_WORLD_SIZE=4" in output


@pytest.mark.long
def test_functions_of_fastcoll_are_compiled_without_a_graph_break() -> None:
    code, output = end(start(*LAUNCH, HERE / "compiled_ranks.py"))
    assert code == 0, output
