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

from fastcoll.launch.nodes import free_port

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch: pip install torch==2.13.0")

HERE = Path(__file__).parent
DEADLINE = 600.0
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
        said, _ = program.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        said, _ = program.communicate()
    return program.returncode, said


def check(results: Path, ranks: int, least: int, said: str) -> None:
    """Every check that a rank of the program has run must have ended well."""
    for rank in range(ranks):
        file = Path(f"{results}-{rank}.json")
        assert file.exists(), said
        outcome = json.loads(file.read_text())
        failed = "\n".join(f"rank {rank}: {name}:\n{text}" for name, text in outcome.items() if text)
        assert not failed, failed
        assert len(outcome) >= least, f"rank {rank} ended after {list(outcome)[-1]}\n{said}"


@pytest.mark.long
def test_every_operation_has_the_results_of_gloo(tmp_path: Path) -> None:
    """With torchrun, and without destroy_process_group."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    code, said = end(start(*torchrun, HERE / "three_ranks.py", tmp_path / "results"))
    check(tmp_path / "results", 3, 32, said)
    assert code == 0, said


def test_models_train_as_over_gloo_and_faults_raise(tmp_path: Path) -> None:
    ranks = [start(HERE / "two_ranks.py", tmp_path / "results", str(rank)) for rank in range(2)]
    ends = [end(rank) for rank in ranks]
    said = "\n".join(text for _, text in ends)
    check(tmp_path / "results", 2, 24, said)
    assert [code for code, _ in ends] == [0, -signal.SIGKILL], said


# What of it is the same for spawned ranks as for launched ones is in tests/launch/test_spawn.py.
@pytest.mark.long
@pytest.mark.parametrize("how", ["launched", pytest.param("fastcoll.spawn", marks=pytest.mark.long)])
def test_gloo_and_fastcoll_meet_at_one_address(how: str) -> None:
    """Whichever comes first, by env:// and tcp://, and again at the same port."""
    launcher = ("-m", "fastcoll.launch", "-n", "2") if how == "launched" else ()
    code, said = end(start(*launcher, HERE / "one_program.py", how))
    assert code == 0, said
    assert said.count("met 4 times") == 2, said


@pytest.mark.long  # that two jobs meet at one port, one after the other, is also tested above
def test_torchrun_restarts_ranks() -> None:
    """Its store has the keys of the ranks before, and its agent listens at MASTER_PORT."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    code, said = end(start(*torchrun, HERE / "started_anew.py"))
    assert code == 0, said
    assert said.count("after a restart: [2.0, 2.0] [2.0, 2.0]") == 2, said


@pytest.mark.long
def test_programs_that_import_only_torch_have_the_backend() -> None:
    """By the entry point of the installed package; `get_backend` says what was asked for. All at once, to save time."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    launch = ("-m", "fastcoll.launch", "-n", "2")  # without a torch of its own
    programs = []
    for launcher, default, named, told in (
        (launch, "", "fastcoll", "fastcoll"),
        (launch, "1", "", "undefined"),
        (launch, "gloo", "gloo", "gloo"),
        (torchrun, "gloo", "", "undefined"),
    ):
        program = start(
            *launcher, HERE / "by_default.py", *filter(None, [named]), FASTCOLL_TORCH_DEFAULT=default
        )
        programs.append((program, told))
    for (code, said), told in [(end(program), told) for program, told in programs]:
        assert code == 0, said
        assert said.count(f"{told} FastcollProcessGroup FastcollProcessGroup [6.0, 6.0, 6.0]") == 2, said


@pytest.mark.long
def test_ranks_of_mpiexec_and_srun_join_by_env() -> None:
    """Where the variables that torch reads are missing, also over Gloo."""
    if (mpiexec := shutil.which("mpiexec")) is None:
        pytest.skip("there is no mpiexec on the PATH")
    command = ("-c", MPIEXEC, mpiexec, HERE / "by_default.py", "fastcoll")
    code, said = end(start(*command, FASTCOLL_TORCH_DEFAULT=""))
    assert code == 0, said
    assert said.count("fastcoll FastcollProcessGroup FastcollProcessGroup [6.0, 6.0, 6.0]") == 2, said
    tasks = {"SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "1", "SLURM_LOCALID": "0"}
    tasks["FASTCOLL_TORCH_DEFAULT"] = ""
    ranks = [start("-c", GLOO, **tasks, SLURM_PROCID=str(rank)) for rank in range(2)]
    for code, said in map(end, ranks):
        assert code == 0, said
        assert said.endswith("3.0\n")


@pytest.mark.long
def test_importing_torch_survives_a_wrong_setting() -> None:
    program = start("-c", "import torch; print(torch.ones(1).item())", FASTCOLL_TORCH_DEFAULT="nccl")
    code, said = end(program)
    assert code == 0, said
    assert "torch has no backend fastcoll: UsageError: FASTCOLL_TORCH_DEFAULT='nccl'" in said
    assert said.endswith("1.0\n")


@pytest.mark.long
@pytest.mark.parametrize("launched", ["1", "4"])
def test_a_world_of_one_under_a_launcher_of_several_ranks_is_warned_of(launched: str) -> None:
    program = "import torch.distributed as d; d.init_process_group('fastcoll'); d.destroy_process_group()"
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables |= {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": launched}
    code, said = end(start("-c", program, **variables))
    assert code == 0, said
    assert ("one rank, but OMPI_COMM_WORLD_SIZE=4" in said) == (launched == "4")


@pytest.mark.long
def test_functions_of_fastcoll_are_compiled_without_a_graph_break() -> None:
    code, said = end(start("-m", "fastcoll.launch", "-n", "2", HERE / "compiled_ranks.py"))
    assert code == 0, said
