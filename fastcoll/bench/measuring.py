"""Fill and check arrays, and time calls.

This module needs only NumPy and the standard library, because ranks of other libraries use it too.

The inputs and expected results are formulas of the element's index and the rank. All values are small integers, so that
every result is exact in every dtype (bfloat16 is exact up to 256). A pattern repeats after PERIOD elements, which is a
prime, so that a misplaced chunk is noticed. Because of the repetition, filling or checking 64 MiB takes two passes over
memory, instead of evaluating the formula for each element.

Calls are timed in batches of about 20 us, because reading the clock twice costs 0.1 us; a call that takes longer is a
batch by itself. The garbage collector is off during the timing.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from time import perf_counter_ns, thread_time_ns
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tile = NDArray[Any]  # one period of a pattern, in the dtype of the arrays
Call = Callable[[], Any]

PERIOD = 16381
_INDEX = np.arange(PERIOD, dtype=np.int64)


def pin(cores: Sequence[int], rank: int) -> None:
    """Pin this process to its rank's core, if any cores are given."""
    if cores:  # before the ranks meet, because a group chooses by the cores how its ranks wait
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


# The functions that combine the values of two ranks.
_FOLDS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "custom": np.maximum,  # the same as absmax, because no value is negative
}


def _given(redop: str, rank: int, ranks: int) -> Array:
    # For each element one rank gives a multiple of the number of ranks, so that the average is exact in integers too.
    if redop == "avg":
        return np.where(_INDEX % ranks == rank, ranks * (1 + _INDEX % 3), 0)
    return 1 + ((_INDEX + rank) % 2 if redop in ("sum", "product") else (5 * _INDEX + 3 * rank) % 63)


def moved(source: int, dtype: np.dtype[Any]) -> Tile:
    """Return the content of block `source` in an operation that only moves data.

    No element is 0.
    """
    return _of_dtype(1 + (7 * _INDEX + 31 * source) % 100, dtype)


def reduced_input(redop: str, rank: int, ranks: int, dtype: np.dtype[Any]) -> Tile:
    """Return a rank's input of a reduction."""
    return _of_dtype(_given(redop, rank, ranks), dtype)


def reduced_output(redop: str, ranks: int, dtype: np.dtype[Any]) -> Tile:
    """Return the expected result of the reduction over all ranks."""
    wide = dtype if dtype.kind == "b" else np.dtype(np.int64)
    total = reduce(_FOLDS[redop], [_of_dtype(_given(redop, rank, ranks), wide) for rank in range(ranks)])
    return (total // ranks if redop == "avg" else total).astype(dtype)


def fill(x: Array, tile: Tile, start: int = 0) -> None:
    """Set element i of the flat array x to element `start + i` of the pattern."""
    whole, body, rest = _periods(x, tile, start)
    whole[...] = body
    x[whole.size :] = rest


def count_wrong(x: Array, tile: Tile, start: int = 0) -> int:
    """Return how many elements of the flat array x differ from the pattern, from `start` on."""
    whole, body, rest = _periods(x, tile, start)
    return int(np.count_nonzero(whole != body) + np.count_nonzero(x[whole.size :] != rest))


def _periods(x: Array, tile: Tile, start: int) -> tuple[Array, Tile, Tile]:
    """Return x as whole periods, the pattern of a period, and that of the rest of x."""
    body = np.roll(tile, -(start % PERIOD))
    periods = x.size // PERIOD
    return x[: periods * PERIOD].reshape(periods, PERIOD), body, body[: x.size - periods * PERIOD]


def _of_dtype(values: Array, dtype: np.dtype[Any]) -> Tile:
    return (values % 2 if dtype.kind == "b" else values).astype(dtype)


_BATCH_SECONDS = 20e-6
_LEAST_CALLS, _MOST_CALLS = 20, 100_000
_FIRST_PART = 16  # batches; each later part of a measurement has twice as many


class Schedule(NamedTuple):
    """How many batches of how many calls are timed, the same on all ranks."""

    batches: int
    calls: int


class Timing(NamedTuple):
    """Seconds per call: the median and the 99th percentile over the batches."""

    median: float
    p99: float


def schedule(per_call: float, seconds: float, iterations: int | None = None) -> Schedule:
    """Return a schedule of `seconds` with calls of about `per_call` seconds, or of exactly `iterations` calls."""
    per_call = max(per_call, 1e-8)
    total = iterations or int(min(_MOST_CALLS, max(_LEAST_CALLS, seconds / per_call)))
    calls = max(1, min(total, round(_BATCH_SECONDS / per_call)))
    if iterations:
        calls = next(fewer for fewer in range(calls, 0, -1) if iterations % fewer == 0)
    return Schedule(total // calls, calls)


def estimate(call: Call, calls: int, settle: Call | None = None) -> float:
    """Return the mean seconds per call of `calls` successive calls."""
    return time_batches(call, Schedule(1, max(1, calls)), settle=settle).median


def measure(
    call: Call, plan: Schedule, settle: Call | None = None, is_over: Callable[[], bool] | None = None
) -> tuple[Schedule, Timing]:
    """Time `call`, and return what was done of the schedule, and the times.

    Args:
        settle: waits at the end of each batch for work that the calls have queued.
        is_over: returns whether to end now; asked after 16, 48, 112, ... batches. None: the whole schedule is done.
    """
    taken: list[Array] = []
    done, part = 0, plan.batches if is_over is None else _FIRST_PART
    with no_collector():
        while done < plan.batches:
            part = min(part, plan.batches - done)
            taken.append(_each(call, plan._replace(batches=part), perf_counter_ns, settle))
            done, part = done + part, 2 * part
            if is_over is not None and done < plan.batches and is_over():
                break
    return plan._replace(batches=done), _timing(np.concatenate(taken))


def time_batches(call: Call, plan: Schedule, cpu_time: bool = False, settle: Call | None = None) -> Timing:
    """Time `call`, and leave the garbage collector as it is.

    Args:
        cpu_time: whether to measure this thread's CPU time instead of wall-clock time.
    """
    return _timing(_each(call, plan, thread_time_ns if cpu_time else perf_counter_ns, settle))


def _timing(each: Array) -> Timing:
    return Timing(float(np.median(each)), float(np.percentile(each, 99)))


def _each(call: Call, plan: Schedule, clock: Callable[[], int], settle: Call | None) -> Array:
    """Return the seconds per call of each batch."""
    batches = []
    for _ in range(plan.batches):
        start = clock()
        for _ in range(plan.calls):
            call()
        if settle is not None:
            settle()
        batches.append(clock() - start)
    return np.array(batches) * 1e-9 / plan.calls


@contextmanager
def no_collector() -> Iterator[None]:
    """Collect garbage now, which takes milliseconds, and not again before the end of the block."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
