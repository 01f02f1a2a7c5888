"""The counters of one node's ranks, which only grow, and what `prometheus_client` shows of them."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from .reading import News, Position

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_MOST_GROUPS = 256
"""How many names of groups have counters of their own. Each name is a time series in Prometheus for ever, and a program
may make a group in each step; further groups are counted together as `OTHERS`."""

OTHERS = "(others)"

_SIGNALS = {int(each): each.name for each in signal.Signals}
"""The names of signals; real-time signals have none."""


class Totals:
    """All counters. Whoever calls a method holds the server's lock.

    Attributes:
        ranks: the number of processes whose records are read now.
    """

    def __init__(self) -> None:
        self.ranks = 0
        self._calls: Counter[tuple[str, ...]] = Counter()  # by rank, group and operation
        self._nbytes: Counter[tuple[str, ...]] = Counter()
        self._uneven: Counter[tuple[str, ...]] = Counter()
        self._errors: Counter[tuple[str, ...]] = Counter()  # by rank, group and error
        self._waits: Counter[tuple[str, ...]] = Counter()  # seconds by rank and group
        self._exits: Counter[tuple[str, ...]] = Counter()  # by exit code or signal
        self._restarts = 0
        self._names: set[str] = set()

    def add(self, rank: int, news: Iterable[News]) -> None:
        """Count what is new in the groups of a rank."""
        for each in news:
            group = str(rank), self._shown(each.group)
            self._waits[group] += 0  # the series exists from the first reading on
            for calls in each.calls:
                self._calls[(*group, calls.operation)] += calls.number
                if even := calls.nbytes - calls.uneven:
                    self._nbytes[(*group, calls.operation)] += even
                if calls.uneven:
                    self._uneven[(*group, calls.operation)] += calls.uneven
            for error, count in each.errors.items():
                self._errors[(*group, error)] += count

    def waited(self, rank: int, group: str, seconds: float) -> None:
        """Count time for which a rank has waited in a group."""
        self._waits[str(rank), self._shown(group)] += seconds  # type: ignore[assignment]

    def restarted(self) -> None:
        """Count a joiner that replaces a failed rank, or a new generation of all ranks of this node."""
        self._restarts += 1

    def failed(self, code: int) -> None:
        """Count a rank's process that has failed; its exit code, -n for signal n."""
        self._exits[str(code) if code >= 0 else _SIGNALS.get(-code, f"signal {-code}"),] += 1

    def _shown(self, group: str) -> str:
        if group not in self._names and len(self._names) >= _MOST_GROUPS:
            return OTHERS
        self._names.add(group)
        return group

    def metrics(self, is_launcher: bool) -> Iterator[Metric]:
        """Yield the counters for `prometheus_client`; only a launcher knows restarts and exits."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def counter(name: str, about: str, labels: str, values: Counter[tuple[str, ...]]) -> Metric:
            made = CounterMetricFamily(f"fastcoll_{name}", about, labels=labels.split())
            for labelled, value in sorted(values.items()):
                made.add_metric(labelled, value)
            return made

        calls, group = "rank group operation", "rank group"
        yield counter("calls", "Completed collective calls", calls, self._calls)
        yield counter("bytes", "Sizes of the arrays of calls with equal sizes", calls, self._nbytes)
        yield counter(
            "block_bytes",
            "Sizes in the records of calls whose ranks may have arrays of different sizes",
            calls,
            self._uneven,
        )
        yield counter("waiting_seconds", "Time of waiting for others, by samples", group, self._waits)
        yield counter(
            "errors", "Failures of groups, and calls that did not match", f"{group} error", self._errors
        )
        yield GaugeMetricFamily("fastcoll_ranks", "Ranks whose records are read now", value=self.ranks)
        if is_launcher:
            yield counter("failed_ranks", "Processes of ranks that have failed", "exit", self._exits)
            yield CounterMetricFamily(
                "fastcoll_restarts", "Starts of new processes after failures", value=self._restarts
            )


def waiting(before: dict[int, list[Position]], after: dict[int, list[Position]]) -> Iterator[tuple[int, str]]:
    """Yield the ranks that wait, each with the group's name, from two readings of a node's ranks.

    All of `before` was read before any of `after`. A rank that is in a call in `before` waits if a member of the group
    has not begun the call in `after`. Members on other machines cannot be read, so a rank also waits if its record
    shows a wait of 50 ms and more.
    """
    begun: dict[tuple[str, tuple[int, ...]], int] = {}
    for places in after.values():
        for place in places:
            begun[place.group] = min(place.begun, begun.get(place.group, place.begun))
    for rank, places in before.items():
        for place in places:
            is_first = place.begun > place.finished and begun.get(place.group, place.begun) < place.begun
            if is_first or place.waits:
                yield rank, place.group[0]
