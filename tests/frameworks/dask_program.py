"""Dask's workers as ranks, and threads of one worker, which cannot be ranks."""

from __future__ import annotations

import sys
import time
from pathlib import Path

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


def one_of_two(rank: int, path: str) -> str:
    """Join on two threads of one process: one is refused, and the other times out."""
    Path(f"{path}-{rank}").touch()
    while not Path(f"{path}-{1 - rank}").exists():
        time.sleep(0.01)
    try:
        fastcoll.init_process_group(init_method=f"file://{path}", world_size=2, timeout=2)
    except UsageError as error:
        return str(error)
    except fastcoll.errors.RendezvousError:
        return "nobody came"
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
        said = client.gather(client.map(one_of_two, range(2), path=f"{sys.argv[1]}/meeting"))
    assert "nobody came" in said, said
    assert any("LocalCluster(processes=True)" in each for each in said), said
    sys.stdout.write("Dask did it\n")
