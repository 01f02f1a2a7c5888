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
    job = "JOB_ID=77 STEP_ID=0 JOB_NAME=train STEP_NODELIST=host[0-1] JOB_NUM_NODES=2 STEP_NUM_NODES=2"
    task = f"PROCID={rank} LOCALID={rank % 2} NTASKS=4 STEP_NUM_TASKS=4"
    return {f"SLURM_{name}": value for name, value in (each.split("=") for each in f"{job} {task}".split())}


def test_ranks_of_srun_meet(join_hosts: Callable[..., Network]) -> None:
    one, two = join_hosts(2, own_pids=True)
    with ranks_on([one, one, two, two], ["-c", PROGRAM], slurm) as ranks:
        finish(ranks)
        found = [(each.code, each.out) for each in ranks]
        assert found == [(0, f"{rank} 15.0\n") for rank in range(4)], output_of(ranks)
