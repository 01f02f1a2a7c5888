"""Conversion between a group's tuning table (autotune.py) and the machine's tuning cache (tuning_cache.py).

A table has ticks, and numbers of operations, classes and algorithms; the cache has nanoseconds and names. Only rank 0
of a group converts times, because two ranks that calibrate the processor's clock get slightly different results. It
publishes ticks (meeting.py), and all ranks fill their tables with them as they attach. Times of messages are not kept:
posted messages are not measured, so an outdated time would never be corrected (rings.py).
"""

from __future__ import annotations

import functools
import random
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
"""The operations of a context's table, on any arrays and on such as lie in arenas (rounds.py)."""

_CLASSES = tuple(str(a.SMALLEST << 2 * number) for number in range(a.CLASSES))

# Calls from which on a row is worth keeping: all ways have been tried, and the best one often.
_ENOUGH = 32
# Calls until a way of a known row is tried of which nothing is known: as if it took twice the best of so many.
_UNKNOWN = a.SHARE * a.ALGORITHMS
_NANOSECONDS = 1_000_000  # for which the clock is measured


@entry
def read_clock() -> int:
    """The processor's clock, in ticks."""
    return ticks()  # type: ignore[no-any-return]


@functools.cache
def _ticks_a_nanosecond() -> float:
    """Measured for a millisecond, once: 0.02 % off."""

    def look() -> tuple[int, int, int]:
        before, count, after = time.perf_counter_ns(), read_clock.call(), time.perf_counter_ns()
        return after - before, count, after

    # Of several looks the quickest: this thread may have lost its core in the middle of another.
    _, begun, start = min(look() for _ in range(9))
    while time.perf_counter_ns() < start + _NANOSECONDS:
        pass
    _, ended, end = min(look() for _ in range(9))
    return (ended - begun) / (end - start)


def to_publish(ranks: int, slot: int) -> list[list[Any]]:
    """What rank 0 tells all ranks of groups like this one, under whatever other conditions.

    Of each: cores, ticks, and how much of their rests the ways still have before them, drawn by lot: so
    programs too short for a rest's end take part in trying the ways, too, and at the same share of the time.
    """
    found = [
        s for s in tuning_cache.sections() if (s["ranks"], s["slot"]) == (ranks, slot) and s["ns_per_mib"]
    ]
    rate = _ticks_a_nanosecond() if found else 1.0
    return [
        [s["cores"], _each(s["ns_per_mib"], lambda ns: max(1, round(ns * rate))), random.random()]
        for s in found
    ]


def _each(times: Mapping[str, Any], convert: Callable[[int], int]) -> dict[str, Any]:
    return {
        key: _each(value, convert) if isinstance(value, dict) else convert(value)
        for key, value in times.items()
    }


def matching(sections: Iterable[Sequence[Any]], conditions: Conditions) -> tuple[Times, float]:
    """Ticks for a group, and how much of their rests the ways have before them, of what rank 0 has told."""
    same = [s[1:] for s in sections if s[0] == conditions.cores]
    return (same[-1][0], same[-1][1]) if same else ({}, 1.0)


def fill(table: Array, times: Times, left: float = 1.0) -> None:
    """Begin a table with known times in ticks; `left`: how much of their rests the ways have before them."""
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
    """What a table holds, in nanoseconds, of its rows with enough calls; and how many calls these had."""
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
    """The rows of a table, with their operations and classes."""
    number = len(COLLECTIVES)
    rows = table[a.ROWS : a.table_words(number)].reshape(number, a.CLASSES, a.ROW_WORDS)
    for operation, classes in zip(COLLECTIVES, rows, strict=True):
        for size, row in zip(_CLASSES, classes, strict=True):
            yield row, operation, size
