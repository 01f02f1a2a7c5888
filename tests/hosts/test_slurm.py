"""Jobs of a real two-host Slurm: srun, sbatch with the launcher, MPI by PMI2, a killed task, scancel."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from mpi.environments import python_with

from hosts.nodes import SECRET, Node, await_line, output_of
from hosts.slurm import Cluster

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "several-machines.md"
SUM = """
import os, sys
import numpy as np, fastcoll as dist
dist.init_process_group(*sys.argv[1:], timeout=150)
x = np.array([2.0 ** dist.get_rank()])
dist.all_reduce(x)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {os.uname().nodename} has {x[0]:g}", flush=True)
dist.destroy_process_group()
"""
KILLED = """
import os, signal
import numpy as np, fastcoll as dist
dist.init_process_group(timeout=150)
dist.barrier()
if dist.get_rank() == 3:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(np.ones(1))
except dist.PeerDiedError as error:
    print(f"rank {dist.get_rank()}: {error}", flush=True)
"""
WAITS = """
import numpy as np, fastcoll as dist
dist.init_process_group(timeout=600)
dist.barrier()
print(f"rank {dist.get_rank()} is here", flush=True)
if dist.get_rank() != 3:
    dist.all_reduce(np.ones(1))
else:
    dist.recv(np.ones(1), src=0)
"""
Start = Callable[..., Node]


@pytest.fixture
def start(slurm: Cluster, tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts a command in a folder with a `train.py`; running jobs are cancelled at the end."""
    before = os.getcwd()
    os.chdir(tmp_path)
    with ExitStack() as stack:
        stack.callback(os.chdir, before)
        stack.callback(slurm.await_answer, "", "squeue", "--noheader")
        stack.callback(slurm.ask, "scancel", "--user=root")

        def begin(program: str, *words: str, env: dict[str, str] | None = None) -> Node:
            Path("train.py").write_text(program)
            node = slurm.start(*words, env=env)
            stack.callback(node.close)
            return node

        yield begin


def sums(placed: str) -> list[str]:
    """Return the output of a job's ranks, by the index of each rank's host."""
    size, total = len(placed), 2 ** len(placed) - 1
    return sorted(f"rank {rank} of {size} on host{host} has {total}" for rank, host in enumerate(placed))


def said_in(text: str) -> list[str]:
    """Return the ranks' lines in order, without a launcher's prefix."""
    return sorted(re.findall(r"^(?:\[\d+\] )?(rank .*)$", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("options", "env", "placed"),
    [
        pytest.param("-N2 -n4 --ntasks-per-node=2", SECRET, "0011", id="a secret in the environment"),
        pytest.param("-N2 -n3", {}, "001", id="uneven, with the secret of the user's home"),
        pytest.param("-N1 -n2", {}, "00", id="one host"),
    ],
)
def test_ranks_of_srun_meet(start: Start, options: str, env: dict[str, str], placed: str) -> None:
    node = start(SUM, "srun", *options.split(), "python", "train.py", env=env)
    assert node.wait_for_code() == 0, output_of([node])
    assert said_in(node.out) == sums(placed), output_of([node])


@pytest.mark.parametrize("which", [0, 1], ids=["srun alone", "a launcher on each host"])
@pytest.mark.usefixtures("start")
def test_the_scripts_of_the_page(slurm: Cluster, which: int) -> None:
    """The commands of docs/several-machines.md: eight ranks on two hosts."""
    script = re.findall(r"```sh\n(#!/bin/bash\n#SBATCH .*?)```", PAGE.read_text(), re.DOTALL)[which]
    Path("job.sh").write_text(script)
    Path("train.py").write_text(SUM)
    # `sbatch --wait` would poll after 2, 10 and 42 s.
    job = slurm.ask("sbatch", "--parsable", "--output=out", "job.sh").strip()
    slurm.await_answer("COMPLETED", "squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")
    # Launchers that meet at an endpoint take their ranks in the order in which they come.
    placed = ["00001111", "11110000"] if which else ["00001111"]
    assert said_in(Path("out").read_text()) in map(sums, placed)


def test_ranks_of_srun_meet_through_mpi(start: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    """MPICH by Slurm's PMI2. UCX treats hosts with one kernel as one host unless it is limited to TCP."""
    python = python_with("mpich", tmp_path_factory.mktemp("mpi"))
    only_tcp = {"UCX_TLS": "tcp,self", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    words = ["srun", "--mpi=pmi2", "-N2", "-n4", "--ntasks-per-node=2", str(python), "train.py", "mpi"]
    node = start(SUM, *words, env=only_tcp)
    assert node.wait_for_code() == 0, output_of([node])
    assert said_in(node.out) == sums("0011"), output_of([node])


def test_a_killed_task_is_named_on_both_hosts(start: Start) -> None:
    node = start(KILLED, "srun", "-N2", "-n4", "--ntasks-per-node=2", "python", "train.py")
    assert node.wait_for_code() not in (0, None), output_of([node])
    found = dict(re.findall(r"^(rank \d): .*?(rank 3 \(pid \d+ on host1\)).*$", node.out, re.MULTILINE))
    assert sorted(found) == ["rank 0", "rank 1", "rank 2"], output_of([node])


def test_scancel_ends_the_ranks_and_leaves_nothing(start: Start, slurm: Cluster) -> None:
    node = start(WAITS, "srun", "-N2", "-n4", "--ntasks-per-node=2", "python", "train.py")
    for rank in range(4):
        await_line(node, f"rank {rank} is here\n", [node])
    slurm.ask("scancel", "--user=root")
    assert node.wait_for_code() not in (0, None), output_of([node])
    slurm.await_answer("", "squeue", "--noheader")
    for host in slurm.hosts:
        assert not [name for name in os.listdir(f"{host.root}/dev/shm") if name.startswith("fastcoll")]
