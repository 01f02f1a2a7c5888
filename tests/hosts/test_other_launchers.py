"""Ranks on two hosts with only the variables of Slurm's srun, which name no port.

Their secret is the user's own, in a home that the hosts share. rendezvous/test_detect.py has the variables of others.
"""

from __future__ import annotations

from collections.abc import Callable

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


def test_ranks_of_srun_meet(join_hosts: Callable[..., Network]) -> None:
    one, two = join_hosts(2, own_pids=True)
    with ranks_on([one, one, two, two], ["-c", PROGRAM], slurm) as ranks:
        finish(ranks)
        found = [(each.code, each.out) for each in ranks]
        assert found == [(0, f"{rank} 15.0\n") for rank in range(4)], output_of(ranks)
