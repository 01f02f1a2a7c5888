"""Frameworks run unchanged: their losses are Gloo's, and actors get an error when another one ends.

Each framework takes seconds to import, so few programs run many checks. .ci/run has an environment for them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from fastcoll.launch.nodes import free_port

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "frameworks.md"
DEADLINE = 280.0
pytestmark = pytest.mark.limit(900)  # several programs with long imports


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"frameworks are not installed: {', '.join(missing)}")


def start(environment: Mapping[str, str], *command: str | Path) -> subprocess.Popen[str]:
    """Start a Python program in a process group of its own."""
    return begin({"ACCELERATE_USE_CPU": "1", **environment}, sys.executable, *map(str, command))


def begin(environment: Mapping[str, str], *command: str) -> subprocess.Popen[str]:
    """Start a command in a process group of its own."""
    common = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command,
        env={**os.environ, **common, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(program: subprocess.Popen[str]) -> str:
    """Return the output of a program, which must succeed; if it does not end, kill its process group."""
    try:
        output, _ = program.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        output, _ = program.communicate()
    assert program.returncode == 0, output
    return output


@needs("accelerate", "deepspeed", "lightning", "torchmetrics", "transformers")
def test_frameworks_have_the_losses_of_gloo(tmp_path: Path) -> None:
    """torch.distributed.checkpoint, torchmetrics, Accelerate, transformers' Trainer, Lightning, DeepSpeed ZeRO 0-3.

    And models that transformers and DeepSpeed split over the ranks.
    """
    results: dict[str, list[dict[str, dict[str, object]]]] = {}
    for default in ("", "gloo"):
        ports = [str(free_port()) for _ in range(8)]
        ranks = []
        for rank in ("0", "1"):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            place |= {"MASTER_ADDR": "127.0.0.1", "NODE_RANK": "0", "FASTCOLL_TORCH_DEFAULT": default}
            ranks.append(start(place, HERE / "two_ranks.py", tmp_path / f"{default}-{rank}.json", *ports))
        for each in ranks:
            end(each)
        results[default] = [json.loads((tmp_path / f"{default}-{rank}.json").read_text()) for rank in (0, 1)]
    for ours, gloo in zip(results["gloo"], results[""], strict=True):
        assert len(ours) == 8
        for name, (one, other) in {name: (ours[name], gloo[name]) for name in ours}.items():
            assert (one["group"], other["group"]) == ("FastcollProcessGroup", "ProcessGroup"), name
            assert one["values"] == pytest.approx(other["values"], rel=1e-6), name


# For each command on the page, its train.py and the last output of each of two ranks.
ON_THE_PAGE = {
    "FASTCOLL_TORCH_DEFAULT=gloo torchrun --nproc-per-node 2 train.py": (
        "typed.py", ["torchmetrics", "trainer", "deepspeed"], "deepspeed: rank {} of 2, FastcollProcessGroup, 16 values"
    ),
    "FASTCOLL_TORCH_DEFAULT=gloo python train.py": (
        "typed.py", ["lightning"], "lightning: rank {} of 2, FastcollProcessGroup, 9 values"
    ),
    "FASTCOLL_TORCH_DEFAULT=gloo ACCELERATE_USE_CPU=1 torchrun --nproc-per-node 2 train.py": (
        "accelerated.py", [], "{} of 2: FastcollProcessGroup, 2 losses"
    ),
}  # fmt: skip


def test_each_command_of_the_page_is_known() -> None:
    commands = re.findall(r"^\$ (?!pip )(.*)$", PAGE.read_text().partition("\n## Inference")[0], re.MULTILINE)
    assert sorted(commands) == sorted(ON_THE_PAGE)


@needs("accelerate", "deepspeed", "lightning", "torchmetrics", "transformers")
@pytest.mark.parametrize("command", ON_THE_PAGE)
def test_commands_of_the_page_as_typed(tmp_path: Path, command: str) -> None:
    program, arguments, line = ON_THE_PAGE[command]
    output = typed(tmp_path, program, f"{command} {' '.join(arguments)}")
    assert all(line.format(rank) in output for rank in range(2)), output


@needs("accelerate")
def test_accelerate_that_starts_one_process_instead_of_two_is_warned_of(tmp_path: Path) -> None:
    launch = "FASTCOLL_TORCH_DEFAULT=gloo accelerate launch --cpu --num_processes 2 train.py"
    output = typed(tmp_path, "accelerated.py", launch)
    assert "0 of 1: no group" in output, output
    assert "accelerate launch has started this process alone" in output, output


@needs("accelerate")
def test_accelerate_that_starts_all_processes_is_not_warned_of() -> None:
    from fastcoll.torch.registration import is_alone_under_accelerate

    one, meeting = {"ACCELERATE_MIXED_PRECISION": "no"}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert is_alone_under_accelerate({**one, **meeting})
    assert not is_alone_under_accelerate(one)
    assert not is_alone_under_accelerate({**one, **meeting, "RANK": "0"})
    assert not is_alone_under_accelerate({**one, **meeting, "PMI_RANK": "0"})


def typed(folder: Path, program: str, command: str) -> str:
    """Return the output of a command in a shell that has the program as `train.py`, and this Python's commands.

    The torchrun on the PATH may belong to a parent environment, and would start the parent's Python.
    """
    shutil.copy(HERE / program, folder / "train.py")
    torchrun = folder / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o700)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    shell = {"PATH": path, "PYTHONPATH": str(HERE.parent)}
    return end(begin(shell, "sh", "-c", f"cd {folder} && {command}"))


@needs("ray")
def test_ray_actors_and_ray_train(tmp_path: Path) -> None:
    output = end(start({}, HERE / "ray_program.py", tmp_path))
    assert "actors did it" in output, output
    assert "trainers did it" in output, output


@needs("torchft")
def test_torchft_makes_a_group_for_each_quorum() -> None:
    assert "quorums did it" in end(start({}, HERE / "quorums.py"))


@needs("distributed")
def test_dask_workers_are_ranks_and_their_threads_are_not(tmp_path: Path) -> None:
    assert "Dask did it" in end(start({}, HERE / "dask_program.py", tmp_path))


@needs("ipykernel", "jupyter_client")
def test_a_notebook_starts_ranks() -> None:
    output = end(start({}, HERE / "notebook_program.py"))
    assert "[3.0, 3.0]" in output, output


@pytest.mark.long
@needs("xdist")
def test_pytest_xdist_runs_tests_that_have_ranks(tmp_path: Path) -> None:
    (tmp_path / "test_sums.py").write_text(
        "import numpy as np, pytest, fastcoll\n"
        "from pathlib import Path\n"
        "from fastcoll.system.processes import session\n"
        "@pytest.mark.ranks(2)\n"
        "@pytest.mark.parametrize('n', range(4))\n"
        "def test_sum(rank, n):\n"
        f"    (Path({str(tmp_path)!r}) / f'session-{{session()}}').touch()\n"
        "    x = np.full(n, rank + 1.0)\n"
        "    fastcoll.all_reduce(x)\n"
        "    assert (x == 3).all()\n"
    )
    output = end(start({}, "-m", "pytest", "-n", "2", "-q", "--rootdir", tmp_path, tmp_path))
    assert re.search(r"\b4 passed", output), output
    # Otherwise a segment of the other worker's test would count as left behind.
    assert len(list(tmp_path.glob("session-*"))) == 2
