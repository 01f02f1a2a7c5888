"""How much other processes use the cores of this machine, from two readings of /proc/stat: pure functions."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

_STAT = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = 3, 4  # the columns of a core that stand for no work: idle, iowait
_COLUMNS = 8  # user, nice, system, idle, iowait, irq, softirq, steal; guests' time is also in the first two

MUCH = 0.1
"""Cores that others use, from which on timings are unreliable."""


def read() -> str:
    """Return the text of /proc/stat; "" if it cannot be read."""
    try:
        return _STAT.read_text()
    except OSError:
        return ""


def busy_seconds(stat: str, cores: Collection[int]) -> float:
    """Return for how long the `cores` have worked since the start of the machine, all together."""
    ticks = 0
    for line in stat.splitlines():
        name, *counts = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
            ticks += sum(int(count) for column, count in enumerate(counts[:_COLUMNS]) if column not in _IDLE)
    return ticks / _TICKS


def used_by_others(before: str, after: str, cores: Collection[int], own: float, seconds: float) -> float:
    """Return how many of the `cores` other processes used, on average.

    Args:
        before, after: /proc/stat at the start and at the end.
        cores: the numbers of the cores that count.
        own: the CPU time between them, in seconds, of the processes that are no others.
        seconds: the time between them.
    """
    busy = busy_seconds(after, cores) - busy_seconds(before, cores)
    return min(max((busy - own) / seconds, 0.0), len(cores)) if seconds > 0 else 0.0


def describe(used: float, cores: int) -> str:
    """Describe the result of `used_by_others` in words."""
    return f"other processes use {used:.1f} of {cores} cores"
