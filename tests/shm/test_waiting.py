"""A rank that waits for long leaves its core to others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

import fastcoll as dist

X = np.ones(5, np.float32)
WAITS = {
    "barrier": dist.barrier,
    "all_reduce": lambda: dist.all_reduce(X.copy()),
    "recv": lambda: dist.recv(X.copy(), 0),
    "recv from any": lambda: dist.recv(X.copy()),
    "irecv": lambda: dist.irecv(X.copy(), 0).wait(),
    "Work.wait": lambda: dist.all_reduce(X.copy(), async_op=True).wait(),
}


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("what", WAITS)
def test_under_a_fifth_of_a_core_after_one_second(rank: int, world_size: int, what: str) -> None:
    pids = np.zeros(2, np.int64)
    dist.all_gather_into_tensor(pids, np.array([os.getpid()]))
    wait = WAITS[what]
    if rank == 1:
        wait()
        return
    time.sleep(1.0)  # not to meet the other rank, but to be late
    began, used = time.monotonic(), cpu_seconds(int(pids[1]))
    time.sleep(0.5)
    used = cpu_seconds(int(pids[1])) - used
    share = used / (time.monotonic() - began)
    dist.send(X, 1) if "recv" in what else wait()
    assert share < 0.2, f"{share:.0%} of a core"
