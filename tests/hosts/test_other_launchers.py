"""Ranks on several hosts with only the environment variables of Slurm, mpirun or Kubernetes.

Their secret is the user's own, in a home that the hosts share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from hosts.network import Network
from hosts.nodes import finish, output_of, ranks_on

PROGRAM = """
import numpy as np, fastcoll as dist
dist.init_process_group(timeout=200)
x = np.array([2.0 ** dist.get_rank()])
dist.all_reduce(x)
print(dist.get_rank(), x[0])
dist.destroy_process_group()
"""


def slurm(rank: int) -> dict[str, str]:
    """Return srun's variables for a rank, with two ranks on each of two nodes."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NAME": "train",
        "SLURM_STEP_NODELIST": "host[0-1]",
    }


def open_mpi(rank: int) -> dict[str, str]:
    """Return the variables of Open MPI's mpirun, and the address passed by `-x MASTER_ADDR`."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-host0-4711@1",
        "MASTER_ADDR": "host0",
    }


def hydra(rank: int) -> dict[str, str]:
    """Return the variables of MPICH's mpiexec, and those passed by `-genv`."""
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": "4",
        "MPI_LOCALRANKID": str(rank % 2),
        "MPI_LOCALNRANKS": "2",
        "MASTER_ADDR": "host0",
        "MASTER_PORT": "29500",
    }


def by_hand(rank: int) -> dict[str, str]:
    """Return the variables of a loop over ssh, or of the manifest of an Indexed Job."""
    return {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}


# tests/rendezvous/test_detect.py has the variables of each launcher.
@pytest.mark.parametrize(
    "variables", [slurm, *(pytest.param(one, marks=pytest.mark.long) for one in (open_mpi, hydra, by_hand))]
)
def test_ranks_meet(
    join_hosts: Callable[..., Network], variables: Callable[[int], Mapping[str, str]]
) -> None:
    one, two = join_hosts(2, own_pids=True)
    with ranks_on([one, one, two, two], ["-c", PROGRAM], variables) as ranks:
        finish(ranks)
        assert [(each.code, each.out) for each in ranks] == [(0, f"{r} 15.0\n") for r in range(4)], output_of(
            ranks
        )
