"""Conversion between a group's tuning table (autotune.py) and the machine's tuning cache (tuning_cache.py).

A table has times in ticks, and identifies operations, classes and algorithms by numbers; the cache has nanoseconds and
names. Only rank 0 of a group converts times, because two ranks that calibrate the processor's clock get slightly
different results. Rank 0 publishes ticks (meeting.py), and all ranks fill their tables with these when the group meets.
The cache has no times of messages: posted messages are not measured, so an outdated time would never be corrected
(rings.py).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..compiler.jit import entry
from ..core.operands import Array
from ..core.operations import OPERATIONS
from ..kernels.primitives import ticks
from . import autotune as a
from . import tuning_cache
from .tuning_cache import Conditions, Times

COLLECTIVES = (*OPERATIONS, *(f"shared:{name}" for name in OPERATIONS))
"""Operations of a context's table: first those on arrays anywhere, then those on arrays in arenas (rounds.py)."""

_CLASSES = tuple(str(a.SMALLEST << 2 * number) for number in range(a.CLASSES))

# A row is saved if it has had this many calls: by then, all algorithms have been tried, and the best one often.
_ENOUGH = 32
# In a row with times, the back-off in calls of an algorithm without a time, as if it took twice the time of the best.
_UNKNOWN = a.SHARE * a.ALGORITHMS
_NANOSECONDS = 1_000_000  # duration of the measurement of the clock's rate


@entry
def read_clock() -> int:
    """Read the processor's clock, in ticks."""
    return ticks()  # type: ignore[no-any-return]


@functools.cache
def _ticks_a_nanosecond() -> float:
    """Measure the clock's rate for a millisecond, once; the error is 0.02 %."""

    def look() -> tuple[int, int, int]:
        before, count, after = time.perf_counter_ns(), read_clock.call(), time.perf_counter_ns()
        return after - before, count, after

    # Use the quickest of several readings: this thread may lose its core during one of them.
    _, begun, start = min(look() for _ in range(9))
    while time.perf_counter_ns() < start + _NANOSECONDS:
        pass
    _, ended, end = min(look() for _ in range(9))
    return (ended - begun) / (end - start)


def to_publish(ranks: int, slot: int) -> list[list[Any]]:
    """Return the data that rank 0 publishes: the cached times of groups with this number of ranks and this slot size.

    Each item has `cores` (tuning_cache.py), the times in ticks, and the fraction of the algorithms' back-off that is
    left. The fraction is random, so that algorithms are tried also in programs that are too short for a complete
    back-off, and take the same share of the time on average.
    """
    import random  # takes 1 ms; only rank 0 needs it

    own = random.Random()  # not the global generator, which a program may have seeded alike on all ranks
    found = [
        s for s in tuning_cache.sections() if (s["ranks"], s["slot"]) == (ranks, slot) and s["ns_per_mib"]
    ]
    rate = _ticks_a_nanosecond() if found else 1.0
    return [
        [s["cores"], _each(s["ns_per_mib"], lambda ns: max(1, round(ns * rate))), own.random()] for s in found
    ]


def _each(times: Mapping[str, Any], convert: Callable[[int], int]) -> dict[str, Any]:
    return {
        key: _each(value, convert) if isinstance(value, dict) else convert(value)
        for key, value in times.items()
    }


def matching(sections: Iterable[Sequence[Any]], conditions: Conditions) -> tuple[Times, float]:
    """Return the times in ticks, and the fraction of the back-off that is left, for a group's conditions."""
    same = [s[1:] for s in sections if s[0] == conditions.cores]
    return (same[-1][0], same[-1][1]) if same else ({}, 1.0)


def fill(table: Array, times: Times, left: float = 1.0) -> None:
    """Fill a new table with times in ticks; `left`: fraction of the back-off that algorithms still have to wait."""
    if not times:
        return
    for row, operation, size in _rows(table):
        algorithms = times.get(operation, {}).get(size, {})
        ticks = {
            a.NAMES.index(algorithm): ticks for algorithm, ticks in algorithms.items() if algorithm in a.NAMES
        }
        if not ticks:
            continue
        best = min(ticks, key=ticks.__getitem__)
        row[a.BEST] = best
        row[a.AGAIN :] = _UNKNOWN
        for algorithm, its in ticks.items():
            row[a.TIMES + algorithm] = its
            row[a.AGAIN + algorithm] = left * a.rest_of.py_func(its, its, ticks[best], len(ticks))


def results(table: Array) -> tuple[Times, int]:
    """Return the times in nanoseconds of the rows with enough calls, and the number of these calls."""
    rate = _ticks_a_nanosecond()
    times: Times = {}
    calls = 0
    for row, operation, size in _rows(table):
        if row[a.CALLS] >= _ENOUGH:
            calls += int(row[a.CALLS])
            ticks = zip(a.NAMES, row[a.TIMES : a.AGAIN].tolist(), strict=True)
            times.setdefault(operation, {})[size] = {
                algorithm: max(1, round(n / rate)) for algorithm, n in ticks if 0 < n < a.HOPELESS
            }
    return times, calls


def _rows(table: Array) -> Iterable[tuple[Array, str, str]]:
    """Yield the rows of a table with the names of their operations and classes."""
    number = len(COLLECTIVES)
    rows = table[a.ROWS : a.table_words(number)].reshape(number, a.CLASSES, a.ROW_WORDS)
    for operation, classes in zip(COLLECTIVES, rows, strict=True):
        for size, row in zip(_CLASSES, classes, strict=True):
            yield row, operation, size
