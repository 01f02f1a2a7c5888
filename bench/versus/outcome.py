"""The times of all sides, and what follows from them: medians, ratios, the share of the limit."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from .limits import LIMIT_FROM, LIMIT_OF

Key = tuple[str, int]
"""An operation (or a limit) and its size in bytes."""

OURS, LIMIT = "fastcoll", "limit"
MPIS = ("openmpi", "openmpi-tcp", "mpich")


@dataclass
class SideTimes:
    """What one side took.

    Attributes:
        name, label: as options, and as tables have it.
        library: name and version, as it says itself.
        where: the Python that it ran in.
        command: how it was started.
        cores: those that each rank was pinned to.
        seconds: a call's, for each round: the slowest rank's median over batches.
        batches: that were timed, the fewest of all rounds.
    """

    name: str
    label: str
    library: str
    where: str
    command: str
    cores: list[list[int]] = field(default_factory=list)
    seconds: dict[Key, list[float]] = field(default_factory=dict)
    batches: dict[Key, int] = field(default_factory=dict)

    def add(self, key: Key, seconds: float, batches: int) -> None:
        """A round's result."""
        self.seconds.setdefault(key, []).append(seconds)
        self.batches[key] = min(batches, self.batches.get(key, batches))

    def typical(self, key: Key) -> float | None:
        """The median over the rounds; None for what the side does not have."""
        return median(self.seconds[key]) if key in self.seconds else None


@dataclass
class Comparison:
    """One run.

    Attributes:
        sides: fastcoll first, then the peers in the order asked for.
        limit: the machine's own times, by limit and size.
        planned: batches and calls for each cell.
        failed: what was said of sides that were left out as they failed.
    """

    start_time: str
    command: str
    machine: dict[str, Any]
    ranks: int
    cores: list[int]
    dtype: str
    rounds: int
    planned: dict[Key, tuple[int, int]]
    sides: list[SideTimes]
    limit: SideTimes
    failed: list[str] = field(default_factory=list)

    @property
    def peers(self) -> list[SideTimes]:
        """All sides but fastcoll."""
        return self.sides[1:]

    def operations(self) -> list[str]:
        """In the order asked for."""
        return list(dict.fromkeys(operation for operation, _ in self.planned))

    def sizes(self, operation: str) -> list[int]:
        """Of one operation, as they were run."""
        return [size for name, size in self.planned if name == operation]

    def ours(self, key: Key) -> float:
        """fastcoll's seconds."""
        seconds = self.sides[0].typical(key)
        assert seconds is not None
        return seconds

    def mpi_ratio(self, key: Key) -> float | None:
        """How many times longer than fastcoll the better MPI takes."""
        times = [side.typical(key) for side in self.peers if side.name in MPIS]
        known = [seconds for seconds in times if seconds is not None]
        return min(known) / self.ours(key) if known else None

    def ratio(self, name: str, key: Key) -> float | None:
        """How many times longer than fastcoll a peer takes."""
        for side in self.peers:
            if side.name == name and (seconds := side.typical(key)) is not None:
                return seconds / self.ours(key)
        return None

    def limit_seconds(self, key: Key) -> float | None:
        """The machine's own time; None for a barrier, and where it would be that of NumPy's call."""
        operation, size = key
        if size < LIMIT_FROM or operation not in LIMIT_OF:
            return None
        return self.limit.typical((LIMIT_OF[operation], size))

    def share(self, key: Key) -> float | None:
        """Of the machine's own speed, what fastcoll reaches: 1 is all of it."""
        limit = self.limit_seconds(key)
        return None if limit is None else limit / self.ours(key)

    def shortened(self) -> list[tuple[str, Key]]:
        """Who made fewer calls than the others, as they would have taken too long."""
        return [
            (side.label, key)
            for side in self.sides
            for key, batches in side.batches.items()
            if batches < self.planned[key][0]
        ]


def lost(comparison: Comparison, side: SideTimes) -> dict[str, list[int]]:
    """By operation, the sizes at which a peer is faster than fastcoll."""
    found: dict[str, list[int]] = {}
    for key in comparison.planned:
        seconds = side.typical(key)
        if seconds is not None and seconds < comparison.ours(key):
            found.setdefault(key[0], []).append(key[1])
    return found


def write_json(path: Path, comparison: Comparison) -> None:
    """Everything, with every round's times."""
    document = {
        "version": 1,
        **{
            name: value
            for name, value in vars(comparison).items()
            if name not in ("sides", "limit", "planned")
        },
        "sides": [_side(side) for side in comparison.sides],
        "limit": _side(comparison.limit),
        "results": [_result(comparison, key) for key in comparison.planned],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def _side(side: SideTimes) -> dict[str, Any]:
    described = asdict(side)
    described["rounds"] = [
        {"operation": key[0], "size": key[1], "batches": side.batches[key], "seconds": seconds}
        for key, seconds in side.seconds.items()
    ]
    del described["seconds"], described["batches"]
    return described


def _result(comparison: Comparison, key: Key) -> dict[str, Any]:
    batches, calls = comparison.planned[key]
    return {
        "operation": key[0],
        "size": key[1],
        "batches": batches,
        "calls": calls,
        "seconds": {side.name: side.typical(key) for side in comparison.sides},
        "best_mpi_over_fastcoll": comparison.mpi_ratio(key),
        "gloo_over_fastcoll": comparison.ratio("gloo", key),
        "limit_seconds": comparison.limit_seconds(key),
        "share_of_limit": comparison.share(key),
    }
