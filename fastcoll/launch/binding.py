"""The processors that each rank of a node may use, for `--cpu_bind`.

If a rank may use any processor, Linux sometimes runs two ranks on one core while another core idles, and moves a rank
away from the socket whose memory holds its data. `shares` gives each rank processors of its own. The launcher starts a
rank's process with them, and all threads of the rank inherit them.

A *processor* is what Linux numbers, a hardware thread. A core may have two of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

BINDINGS = ("none", "cores", "numa", "sockets")
_SYSTEM = Path("/sys/devices/system/cpu")


class Processor(NamedTuple):
    """A processor and where it is; the order of the fields brings near processors together."""

    socket: int
    node: int  # of NUMA, whose memory is nearest
    core: int  # within the socket
    number: int


class Share(NamedTuple):
    """The processors of one rank, and how many threads the rank should compute with."""

    processors: frozenset[int]
    threads: int


def usable_processors(system: Path = _SYSTEM) -> list[Processor]:
    """Return the processors that this process may use, near ones together.

    If Linux does not describe them, as in some containers, each counts as a core of one socket.
    """
    found = []
    for number in os.sched_getaffinity(0):
        folder = system / f"cpu{number}"
        socket = _read(folder / "topology" / "physical_package_id", 0)
        core = _read(folder / "topology" / "core_id", number)
        nodes = [int(path.name[4:]) for path in folder.glob("node[0-9]*")]
        found.append(Processor(socket, min(nodes, default=0), core, number))
    return sorted(found)


def _read(path: Path, default: int) -> int:
    """Return the number in a file; `default` if there is none, or if it is negative, which means unknown."""
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return default
    return number if number >= 0 else default


def shares(binding: str, processors: Sequence[Processor], ranks: int) -> list[Share]:
    """Return the share of each local rank.

    Args:
        binding: "cores": each rank gets an equal part of the cores, and no other rank uses them. "numa", "sockets":
            each rank gets a whole NUMA node or socket, which ranks share if there are more of them, or an equal part of
            the nodes or sockets if there are fewer. "none": no rank is bound, and the list is empty.
        processors: the usable ones, near ones together.

    Raises:
        ValueError: there are fewer cores than ranks.
    """
    if binding == "none":
        return []
    width = {"cores": 3, "numa": 2, "sockets": 1}[binding]
    parts = [list(part) for _, part in groupby(processors, lambda processor: processor[:width])]
    cores = len({processor[:3] for processor in processors})
    if cores < ranks:
        raise ValueError(f"{ranks} ranks cannot be bound to {cores} usable cores; give --cpu_bind none")
    found = []
    for rank in range(ranks):
        first = rank * len(parts) // ranks
        end = max(first + 1, (rank + 1) * len(parts) // ranks)
        mine = [processor for part in parts[first:end] for processor in part]
        sharing = sum(other * len(parts) // ranks == first for other in range(ranks))
        threads = len({processor[:3] for processor in mine}) // sharing
        found.append(Share(frozenset(processor.number for processor in mine), max(1, threads)))
    return found


@contextmanager
def bound(share: Share | None) -> Iterator[None]:
    """Bind this thread, and so the processes that it starts meanwhile, to a share's processors; None: do not."""
    if share is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, share.processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
