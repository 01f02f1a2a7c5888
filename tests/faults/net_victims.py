"""What ranks do in the tests of this folder that are about the network alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import fastcoll as dist
from fastcoll import GroupError
from fastcoll.core import processes

LARGE = 1 << 24  # float32: 64 MiB


def live_on_nodes(rank: int, share: int = 2) -> None:
    """Let `share` ranks at a time take themselves for a node: they see another /dev/shm than the others."""
    processes._shm_device = lambda: 1_000_000 + rank // share  # type: ignore[assignment]


def interrupt_on_nodes(rank: int, n: int, url: str) -> dict[str, Any]:
    """As `interrupt_large`, on several nodes."""
    live_on_nodes(rank)
    return interrupt_large(rank, n, url, "auto")


def interrupt_large(rank: int, n: int, url: str, backend: str) -> dict[str, Any]:
    """Rank 0 gets SIGINT in a call of 64 MiB, which the stopped rank 1 holds up; returns what each rank saw."""
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=n, timeout=30)
    x = np.ones(LARGE, "f4")
    dist.all_reduce(x)
    pids = np.zeros(n, "i8")
    dist.all_gather_into_tensor(pids, np.array([os.getpid()]))
    interrupted = threading.Event()
    if rank == 0:
        threading.Thread(target=_interrupt_held_up, args=(int(pids[1]), interrupted)).start()
    try:
        for _ in range(1000):
            dist.all_reduce(x)
    except KeyboardInterrupt:
        interrupted.set()
        return {"kind": "KeyboardInterrupt", "error": "", "ranks": ()}
    except GroupError as error:
        return {"kind": type(error).__name__, "error": str(error), "ranks": error.ranks}
    raise AssertionError("nobody was interrupted")


def _interrupt_held_up(other: int, interrupted: threading.Event) -> None:
    """Send this process SIGINT while another rank's process is stopped, so that no call can end meanwhile."""
    time.sleep(0.2)
    os.kill(other, signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)
    interrupted.wait(20)
    os.kill(other, signal.SIGCONT)


def await_all(paths: list[Path]) -> None:
    end = time.monotonic() + 20
    while not all(path.exists() for path in paths) and time.monotonic() < end:
        time.sleep(0.01)


def stop_for_good(rank: int, n: int, url: str, backend: str, count: int, timeout: float) -> dict[str, Any]:
    """The last rank is stopped in the middle of its calls, until the others have given up."""
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=n, timeout=20)
    group = dist.new_group(timeout=20)
    group.all_reduce(np.ones(count, "f4"))
    group.timeout = timeout  # only now, as to meet may take longer
    given_up = [Path(f"{url.removeprefix('file://')}-given-up-{other}") for other in range(n - 1)]
    pids = np.zeros(n, "i8")
    dist.all_gather_into_tensor(pids, np.array([os.getpid()]))
    last = int(pids[n - 1])
    if rank == 0:
        threading.Timer(0.2, os.kill, (last, signal.SIGSTOP)).start()
    try:
        for _ in range(1_000_000):
            group.all_reduce(np.ones(count, "f4"))
    except GroupError as error:
        if rank < n - 1:
            given_up[rank].touch()
        if rank == 0:
            await_all(given_up)
            os.kill(last, signal.SIGCONT)
        return {"kind": type(error).__name__, "error": str(error), "ranks": error.ranks}
    raise AssertionError("nobody was stopped")
