"""Where the threads of a rank run: one rule for every side of every comparison.

The calling thread is pinned to its rank's core before the library starts, because a library may choose by the cores
that it finds how its ranks wait. The threads that a library starts may use all of the ranks' cores: with Gloo's threads
pinned to one core, small messages took up to three times as long.

If no cores are given, no thread is pinned. This module needs only the standard library.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from threading import get_native_id


def pin(cores: Sequence[int], rank: int) -> None:
    """Pin the calling thread and its later children to the rank's core; called before the library starts."""
    if cores:
        os.sched_setaffinity(0, {_core(cores, rank)})


def place_threads(cores: Sequence[int], rank: int) -> dict[str, list[int]]:
    """Give all other threads of this process all of the ranks' cores, and check the placement of all threads.

    Returns:
        the cores of the calling thread (`caller`), and those of all other threads together (`others`).

    Raises:
        RuntimeError: a thread may run elsewhere, because the library has moved it.
    """
    others = [int(thread) for thread in os.listdir("/proc/self/task") if int(thread) != get_native_id()]
    found: set[int] = set()
    for thread in others:
        with suppress(ProcessLookupError):  # the thread has ended meanwhile
            if cores:
                os.sched_setaffinity(thread, set(cores))
            found |= os.sched_getaffinity(thread)
    placed = {"caller": sorted(os.sched_getaffinity(0)), "others": sorted(found)}
    if cores and (placed["caller"] != [_core(cores, rank)] or not found <= set(cores)):
        wanted = f"its calling thread belongs on core {_core(cores, rank)}, others on {sorted(set(cores))}"
        raise RuntimeError(f"rank {rank} is not pinned as the others are: {wanted}, but {placed}")
    return placed


def _core(cores: Sequence[int], rank: int) -> int:
    return cores[rank % len(cores)]
