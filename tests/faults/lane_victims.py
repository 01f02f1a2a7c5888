"""The victims' work with calls that are divided among lanes."""

from __future__ import annotations

import os
from typing import Any

import fastcoll as dist
from faults import victims


def work_over_lanes_until_death(
    rank: int, n: int, url: str, op: str, count: int, victim: int
) -> dict[str, Any]:
    """As `work_until_death`, the victim killed inside a call, and at first all calls are divided."""
    os.environ["FASTCOLL_LANES"] = "2"
    step, turns = victims.STEPS[op], [0]

    def divided_step(count: int, rank: int, n: int) -> None:
        if turns[0] == 1:  # the first call compiles
            _prefer_lanes()
        turns[0] += 1
        step(count, rank, n)

    victims.STEPS[op] = divided_step
    try:
        return victims.work_until_death(rank, n, url, op, count, True, victim, "shm")
    finally:
        victims.STEPS[op] = step


def _prefer_lanes() -> None:
    from fastcoll.shm import autotune
    from fastcoll.shm import context_layout as at

    context = dist.GroupMember.WORLD.backend.context.words
    assert context[at.LANES] == 2
    rows = context[at.CHOOSING + autotune.ROWS : at.MEMO].reshape(-1, autotune.ROW_WORDS)
    rows[:] = 1 << 40
    rows[:, autotune.CALLS], rows[:, autotune.BEST] = 4, autotune.WAYS
    rows[:, autotune.TIMES + autotune.WAYS] = 1
