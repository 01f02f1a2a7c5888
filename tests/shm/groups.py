"""Functions for tests of groups on shared memory: the tuning table, other threads, and what the process holds."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import fastcoll as dist
from fastcoll.shm import arena, autotune
from fastcoll.shm import context_layout as at
from fastcoll.shm.segment import Segment
from fastcoll.testing.worker import Footprint


def rows_of(group: Any) -> np.ndarray:
    """Return the rows of a rank's tuning table."""
    words = group.backend.context.words[at.CHOOSING + autotune.ROWS : at.MEMO]
    return words.reshape(-1, autotune.ROW_WORDS)


def algorithm_of(group: Any) -> int:
    """Return the algorithm of the last call."""
    return int(group.backend.context[at.CHOOSING + autotune.ALGORITHM])


def assert_same_everywhere(group: Any, values: np.ndarray) -> None:
    gathered = [None] * group.size
    dist.all_gather_object(gathered, values.tolist())
    assert all(each == gathered[0] for each in gathered)


def once_busy(group: Any, act: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that calls `act` as soon as another thread is inside a call of the group."""

    def wait() -> Any:
        while not group.gate.is_busy():
            time.sleep(1e-3)
        return act()

    return wait


def mappings() -> list[int]:
    """Return the sizes of this process's mappings of segments, without its arena, which is there until it ends."""
    found = []
    own_arena = os.readlink(f"/proc/self/fd/{arena.descriptor()}") if arena.exists() else "none"
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/fastcoll-" in line and own_arena not in line:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            found.append(end - start)
    return found


def holdings(files: str = "") -> dict[str, int]:
    """Return the number of system resources that this process holds.

    Args:
        files: the beginning of the files that count. Pidfds, which the first long wait for a peer opens, do not count.
    """
    gc.collect()
    opened = Footprint.now().files.values()
    return {
        "descriptors": sum("pidfd" not in file and file.startswith(files) for file in opened),
        "mappings": len(mappings()),
        "names": sum(f"-{os.getpid()}-" in name for name in os.listdir("/dev/shm")),
    }


def allocated_pages(segment: Segment) -> set[int]:
    """Return the numbers of the segment's pages that are allocated and have been accessed or populated."""
    pages = (ctypes.c_ubyte * (segment.layout.nbytes // mmap.PAGESIZE))()
    address, nbytes = ctypes.c_void_p(segment.address), ctypes.c_size_t(segment.layout.nbytes)
    assert ctypes.CDLL(None).mincore(address, nbytes, pages) == 0
    return {number for number, page in enumerate(pages) if page & 1}


def pages_of(*parts: tuple[int, int]) -> set[int]:
    """Return the numbers of the pages of some parts of a segment, each with its offset and bytes."""
    return {page // mmap.PAGESIZE for at, nbytes in parts for page in range(at, at + nbytes, mmap.PAGESIZE)}


def allocated(group: Any) -> int:
    """Return how many bytes of this rank's slots are allocated."""
    segment = group.backend._segment
    slots = pages_of(segment.layout.slots_of(group.rank))
    return len(slots & allocated_pages(segment)) * mmap.PAGESIZE
