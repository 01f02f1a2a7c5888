"""The victims' work with arrays that their peers read in place."""

from __future__ import annotations

from typing import Any

import fastcoll as dist
from faults import victims


def work_on_shared_arrays_until_death(
    rank: int, n: int, url: str, op: str, count: int, victim: int
) -> dict[str, Any]:
    """As `work_until_death`, the victim killed inside a call, and every large array shared."""
    dist.shared_arrays.enable()
    return victims.work_until_death(rank, n, url, op, count, True, victim, "shm")
