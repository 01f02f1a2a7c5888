"""The programs of ranks in those tests of this folder that concern the network or nodes."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from interrupts import interrupted

import fastcoll as dist
from fastcoll import GroupError, config
from fastcoll.hybrid import backend as hybrid
from fastcoll.net.tcp import entries as net
from fastcoll.shm import backend as shm
from fastcoll.system import processes
from faults.victims import pid_of, report_of

LARGE = 1 << 24  # float32: 64 MiB


def arm(failpoint: str) -> None:
    """Arm a failpoint in this process, which has inherited kernels without failpoints from the fork server."""
    os.environ["FASTCOLL_FAILPOINT"] = failpoint
    config.forget()
    for entry in (*shm.ENTRIES, *net.ENTRIES):
        entry.call = entry._first_call  # loads the code with failpoints


def live_on_nodes(rank: int, share: int = 2) -> None:
    """Have each `share` ranks pretend to be on one node, with another /dev/shm than the others."""
    processes._shm_device = lambda: 1_000_000 + rank // share  # type: ignore[assignment]


def live_apart(rank: int, share: int = 2) -> None:
    """Have each `share` ranks pretend to be on one node, from which the processes of other nodes are out of sight."""
    live_on_nodes(rank, share)
    processes._pid_namespace = lambda: f"of node {rank // share}"  # type: ignore[assignment]


def meet_by_nodes(rank: int) -> None:
    """Live on nodes of two ranks, and meet by nodes as the ranks of a larger group do."""
    live_apart(rank)
    hybrid.FLAT = 0


def live_on_large_nodes(rank: int) -> None:
    """Live on nodes of six ranks, three of which are enough to meet by nodes."""
    live_apart(rank, 6)


def interrupt_large(rank: int, n: int, url: str, backend: str) -> dict[str, Any]:
    """Send rank 0 Ctrl-C in a call of 64 MiB that cannot end, because rank 1 is stopped; return what this rank saw."""
    if backend == "nodes":
        live_on_nodes(rank)
    dist.init_process_group(
        "auto" if backend == "nodes" else backend, init_method=url, rank=rank, world_size=n, timeout=60
    )
    x = np.ones(LARGE, "f4")
    dist.all_reduce(x)
    world = dist.GroupMember.WORLD
    assert isinstance(world, dist.ProcessGroup)
    try:
        if rank == 0:
            stop(pid_of(1))
        with interrupted(world) if rank == 0 else nullcontext():
            for _ in range(1000):
                dist.all_reduce(x)
    except KeyboardInterrupt:
        os.kill(pid_of(1), signal.SIGCONT)
        return {"kind": "KeyboardInterrupt"}
    except GroupError as error:
        return report_of(error)
    raise AssertionError("nobody was interrupted")


def stop(pid: int) -> None:
    """Stop a process, and return once it is stopped."""
    os.kill(pid, signal.SIGSTOP)
    while processes.status_of(pid)[0] != b"T":
        time.sleep(0.001)


def await_all(paths: list[Path]) -> None:
    """Wait until all these files exist; the deadline of the run ends a hang."""
    while not all(path.exists() for path in paths):
        time.sleep(0.01)


def stop_for_good(rank: int, n: int, url: str, timeout: float) -> dict[str, Any]:
    """Stop the last rank in the middle of a call, until the others have given up."""
    if rank == n - 1:
        arm("tcp.all_reduce.mid_chunk:stop@2000")  # not in the first call, whose timeout is long
    dist.init_process_group("tcp", init_method=url, rank=rank, world_size=n, timeout=60)
    given_up = [Path(f"{url.removeprefix('file://')}-given-up-{other}") for other in range(n - 1)]
    x = np.ones(1_000_003, "f4")
    try:
        for _ in range(1000):
            dist.all_reduce(x)
            dist.GroupMember.WORLD.timeout = timeout  # type: ignore[union-attr]  # what is compiled is there by now
    except GroupError as error:
        if rank < n - 1:
            given_up[rank].touch()
        if rank == 0:
            await_all(given_up)
            os.kill(pid_of(n - 1), signal.SIGCONT)
        return report_of(error)
    raise AssertionError("nobody was stopped")
