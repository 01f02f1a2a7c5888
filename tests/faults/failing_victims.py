"""Ranks of which one fails at a failpoint: they work until that happens, and say how it ended."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

import fastcoll as dist
from fastcoll import GroupError, config
from fastcoll.net.tcp import entries as net
from fastcoll.shm import backend as shm
from faults import victims


def arm(failpoint: str) -> None:
    """Have this process, which has kernels without failpoints from the fork server, fail there."""
    os.environ["FASTCOLL_FAILPOINT"] = failpoint
    config.forget()
    for entry in (*shm.ENTRIES, *net.ENTRIES):
        entry.call = entry._first_call  # loads the other code


def work_until_failpoint(
    rank: int, n: int, url: str, op: str, count: int, failpoint: str, victim: int, backend: str = "auto"
) -> dict[str, Any]:
    """Repeat `op`, on a group that has no other calls; returns what the survivor saw, and when."""
    if rank == victim:
        arm(failpoint)
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=n, timeout=30)
    others = dist.new_group([r for r in range(n) if r != victim])
    try:
        for _ in range(10_000):
            victims.STEPS[op](count, rank, n)
    except GroupError as error:
        raised = time.monotonic()
        return {"raised": raised, **survived(error, op, count, rank, n, others)}
    raise AssertionError("the victim did not die")


def survived(error: GroupError, op: str, count: int, rank: int, n: int, others: Any) -> dict[str, Any]:
    """What is left: the group stays failed in the same way, at once, and groups of the living work."""
    again, began = "", time.monotonic()
    try:
        victims.STEPS[op](count, rank, n)
    except GroupError as second:
        again = str(second)
    took = time.monotonic() - began
    x = np.full(3, rank + 1.0)
    dist.all_reduce(x, group=others)
    dist.destroy_process_group()
    return {
        "error": str(error),
        "kind": type(error).__name__,
        "ranks": error.ranks,
        "again": again,
        "again_after": took,
        "others": x[0],
    }
