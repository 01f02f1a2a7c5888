"""The times of all sides, and medians and ratios that are derived from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np

from .limits import LIMIT_FROM, LIMITS_OF
from .plan import UPDATES

Key = tuple[str, int]
"""An operation (or a limit) and its size in bytes."""

OURS, LIMIT = "fastcoll", "limit"
MPIS = ("openmpi", "openmpi-tcp", "mpich", "intelmpi")
GLOO = ("gloo",)


@dataclass
class SideTimes:
    """The times of one side.

    Attributes:
        name, label: its name in options and in tables.
        library: its name and version, as the library reports it.
        where: the Python that it ran in.
        command: the command that started it.
        placed: each rank's cores: those of its calling thread, and those of the library's threads.
        seconds: for each round, the seconds of a call: the slowest rank's median over batches.
        processor: for each round, the processor seconds of a call, of all ranks together.
        singles: for each rank, the seconds of calls that were timed one by one, in all rounds.
        sent: the bytes that a host sends in a call, the mean over the hosts, in the last round.
        batches: the number of timed batches, in the round that had the fewest.
        copies: the number of single copies between processes by all ranks in a call; None: they could not be counted.
    """

    name: str
    label: str
    library: str
    where: str
    command: str
    placed: list[dict[str, list[int]]] = field(default_factory=list)
    seconds: dict[Key, list[float]] = field(default_factory=dict)
    processor: dict[Key, list[float]] = field(default_factory=dict)
    singles: dict[Key, list[list[float]]] = field(default_factory=dict)
    sent: dict[Key, float] = field(default_factory=dict)
    batches: dict[Key, int] = field(default_factory=dict)
    copies: dict[Key, float] | None = None

    def add(
        self, key: Key, seconds: float, processor: float, batches: int, singles: Sequence[list[float]]
    ) -> None:
        """Add a round's result."""
        self.seconds.setdefault(key, []).append(seconds)
        self.processor.setdefault(key, []).append(processor)
        self.batches[key] = min(batches, self.batches.get(key, batches))
        for rank, found in zip(self.singles.setdefault(key, [[] for _ in singles]), singles, strict=True):
            rank += found

    def typical(self, key: Key) -> float | None:
        """Return the median over the rounds; None if the side does not have the cell."""
        return median(self.seconds[key]) if key in self.seconds else None

    def processor_time(self, key: Key) -> float | None:
        """Return the median over the rounds of the processor seconds of a call, of all ranks together."""
        return median(self.processor[key]) if key in self.processor else None

    def p99(self, key: Key) -> float | None:
        """Return the slowest rank's 99th percentile of single calls, over all rounds."""
        if key not in self.singles:
            return None
        return max(float(np.percentile(rank, 99)) for rank in self.singles[key])


@dataclass
class Comparison:
    """The results of one comparison.

    Attributes:
        sides: fastcoll first, then the peers in the requested order.
        limit: the times of the limits (see `limits`), by limit and size.
        backend: the requested backend of fastcoll.
        planned: batches and calls for each cell.
        failed: messages about sides that failed and were left out.
    """

    start_time: str
    command: str
    machine: dict[str, Any]
    backend: str
    ranks: int
    hosts: int
    cores: list[int]
    dtype: str
    rounds: int
    planned: dict[Key, tuple[int, int]]
    sides: list[SideTimes]
    limit: SideTimes
    failed: list[str] = field(default_factory=list)

    @property
    def crowded(self) -> bool:
        """Whether ranks share cores. Then processor time matters, because a waiting rank takes it from others."""
        return self.ranks > len(set(self.cores) or range(self.machine["usable_cores"]))

    @property
    def peers(self) -> list[SideTimes]:
        """All sides except fastcoll."""
        return self.sides[1:]

    def operations(self) -> list[str]:
        """The operations, in the requested order."""
        return list(dict.fromkeys(operation for operation, _ in self.planned))

    def sizes(self, operation: str) -> list[int]:
        """Return the sizes of an operation, in the order of the run."""
        return [size for name, size in self.planned if name == operation]

    def ours(self, key: Key) -> float:
        """Return fastcoll's median seconds per call."""
        seconds = self.sides[0].typical(key)
        assert seconds is not None
        return seconds

    def ratio(self, names: Sequence[str], key: Key) -> float | None:
        """Return the time of the fastest of these peers over fastcoll's; None if none of them has the cell."""
        return self._over_ours(SideTimes.typical, names, key)

    def p99_ratio(self, names: Sequence[str], key: Key) -> float | None:
        """Return the ratio of 99th percentiles: the best of these peers over fastcoll's."""
        return self._over_ours(SideTimes.p99, names, key)

    def processor_ratio(self, names: Sequence[str], key: Key) -> float | None:
        """Return the ratio of processor times: the least of these peers over fastcoll's."""
        return self._over_ours(SideTimes.processor_time, names, key)

    def _over_ours(
        self, value: Callable[[SideTimes, Key], float | None], names: Sequence[str], key: Key
    ) -> float | None:
        """Return the least value of these peers over fastcoll's; None if none of them has the cell."""
        ours = value(self.sides[0], key)
        assert ours is not None
        theirs = [value(side, key) for side in self.peers if side.name in names]
        known = [each for each in theirs if each is not None]
        return min(known) / ours if known else None

    def mean_ratio(self, names: Sequence[str], operations: Sequence[str]) -> float | None:
        """Return the geometric mean of `ratio` over all cells of these operations."""
        found = [self.ratio(names, key) for key in self.planned if key[0] in operations]
        known = [ratio for ratio in found if ratio is not None]
        return geometric_mean(known) if known else None

    def limit_seconds(self, key: Key) -> float | None:
        """Return the machine's own time; None for a barrier or a size below LIMIT_FROM."""
        operation, size = key
        if size < LIMIT_FROM:
            return None
        known = [self.limit.typical((limit, size)) for limit in LIMITS_OF.get(operation, ())]
        return min((seconds for seconds in known if seconds is not None), default=None)

    def over_limit(self, key: Key) -> float | None:
        """Return the ratio of fastcoll's time to the machine's own."""
        limit = self.limit_seconds(key)
        return None if limit is None else self.ours(key) / limit

    def ordinary_over_shared(self, key: Key) -> float | None:
        """Return fastcoll's time on ordinary arrays / that on arrays in shared pages."""
        ordinary, shared = UPDATES
        if key[0] != shared or (ordinary, key[1]) not in self.planned:
            return None
        return self.ours((ordinary, key[1])) / self.ours(key)

    def shortened(self) -> list[tuple[str, Key]]:
        """Return the sides and cells with fewer calls than planned, made to save time."""
        return [
            (side.label, key)
            for side in self.sides
            for key, batches in side.batches.items()
            if batches < self.planned[key][0]
        ]


def lost(comparison: Comparison, side: SideTimes) -> dict[str, list[int]]:
    """Return the sizes at which a peer is faster than fastcoll, by operation."""
    found: dict[str, list[int]] = {}
    for key in comparison.planned:
        seconds = side.typical(key)
        if seconds is not None and seconds < comparison.ours(key):
            found.setdefault(key[0], []).append(key[1])
    return found


def write_json(path: Path, comparison: Comparison) -> None:
    """Write `document`."""
    path.write_text(json.dumps(document(comparison), indent=1) + "\n")


def document(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as an object for JSON, which `targets` reads.

    It has every round's times.
    """
    return {
        "version": 2,
        "kind": "versus",
        **{
            name: value
            for name, value in vars(comparison).items()
            if name not in ("sides", "limit", "planned")
        },
        "sides": [_side(side) for side in comparison.sides],
        "limit": _side(comparison.limit),
        "results": [_result(comparison, key) for key in comparison.planned],
    }


def _side(side: SideTimes) -> dict[str, Any]:
    described = asdict(side)
    described["rounds"] = [
        {"operation": key[0], "size": key[1], "batches": side.batches[key], "seconds": seconds}
        for key, seconds in side.seconds.items()
    ]
    for name in ("seconds", "processor", "sent", "batches", "singles", "copies"):
        del described[name]
    return described


def _result(comparison: Comparison, key: Key) -> dict[str, Any]:
    batches, calls = comparison.planned[key]
    return {
        "operation": key[0],
        "size": key[1],
        "batches": batches,
        "calls": calls,
        "seconds": {side.name: side.typical(key) for side in comparison.sides},
        "processor_seconds": {side.name: side.processor_time(key) for side in comparison.sides},
        "sent_bytes": {side.name: side.sent.get(key) for side in comparison.sides},
        "p99_seconds": {side.name: side.p99(key) for side in comparison.sides},
        "single_copies": {side.name: (side.copies or {}).get(key) for side in comparison.sides},
        "best_mpi_over_fastcoll": comparison.ratio(MPIS, key),
        "processor_best_mpi_over_fastcoll": comparison.processor_ratio(MPIS, key),
        "processor_gloo_over_fastcoll": comparison.processor_ratio(GLOO, key),
        "p99_best_mpi_over_fastcoll": comparison.p99_ratio(MPIS, key),
        "gloo_over_fastcoll": comparison.ratio(GLOO, key),
        "limit_seconds": comparison.limit_seconds(key),
        "fastcoll_over_limit": comparison.over_limit(key),
        "ordinary_over_shared": comparison.ordinary_over_shared(key),
    }
