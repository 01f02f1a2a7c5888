"""Dask's workers as ranks, and threads of one worker, which cannot be ranks."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from distributed import Client, LocalCluster

import fastcoll
from fastcoll.errors import UsageError
from fastcoll.launch.nodes import free_port


def total(rank: int, port: int) -> float:
    fastcoll.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=100)
    try:
        x = np.full(1000, rank + 1.0)
        fastcoll.all_reduce(x)
        return float(x[0])
    finally:
        fastcoll.destroy_process_group()


ELSEWHERE = (
    "import sys, fastcoll as f; f.init_process_group(init_method=sys.argv[1], world_size=2); f.barrier()"
)


def one_of_two(method: str) -> str:
    """Join on two threads of one process: the later one is refused, and starts a process that joins instead."""
    try:
        fastcoll.init_process_group(init_method=method, world_size=2, timeout=100)
    except UsageError as error:
        subprocess.run([sys.executable, "-c", ELSEWHERE, method], check=True)
        return str(error)
    fastcoll.barrier()
    fastcoll.destroy_process_group()
    return "met"


if __name__ == "__main__":
    quiet = {"dashboard_address": None}
    with LocalCluster(n_workers=2, threads_per_worker=1, **quiet) as cluster, Client(cluster) as client:
        workers = list(client.scheduler_info()["workers"])
        port = free_port()
        for _ in range(2):
            calls = [
                client.submit(total, n, port, workers=[each], pure=False) for n, each in enumerate(workers)
            ]
            assert client.gather(calls) == [3, 3]
    with LocalCluster(1, 2, processes=False, **quiet) as cluster, Client(cluster) as client:
        method = f"file://{sys.argv[1]}/meeting"
        said = client.gather([client.submit(one_of_two, method, pure=False) for _ in range(2)])
    assert "met" in said, said
    assert any("LocalCluster(processes=True)" in each for each in said), said
    sys.stdout.write("Dask did it\n")
