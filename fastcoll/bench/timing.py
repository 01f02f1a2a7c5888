"""How a call is timed: in batches, long enough for the clock, many enough for a median and a p99.

One batch is about 20 us of calls (reading the clock twice costs 0.1 us), so a single call is a batch
of its own if it takes longer. The garbage collector is off meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns, thread_time_ns
from typing import Any, NamedTuple

import numpy as np

_BATCH_SECONDS = 20e-6
_LEAST_CALLS = 20
_MOST_CALLS = 100_000


class Schedule(NamedTuple):
    """How many batches of how many calls are timed; the same on all ranks."""

    batches: int
    calls: int


class Timing(NamedTuple):
    """Seconds a call: the median over the batches, and their 99th percentile."""

    median: float
    p99: float


def schedule(per_call: float, seconds: float, iterations: int | None = None) -> Schedule:
    """What fills so many seconds with calls that take about `per_call` seconds, or has exactly so many iterations."""
    per_call = max(per_call, 1e-8)
    total = iterations or int(min(_MOST_CALLS, max(_LEAST_CALLS, seconds / per_call)))
    calls = max(1, min(total, round(_BATCH_SECONDS / per_call)))
    if iterations:
        calls = next(fewer for fewer in range(calls, 0, -1) if iterations % fewer == 0)
    return Schedule(total // calls, calls)


def estimate(call: Callable[[], Any], calls: int, settle: Callable[[], None] | None = None) -> float:
    """Seconds a call, over `calls` calls in a row."""
    return time_batches(call, Schedule(1, max(1, calls)), settle=settle).median


def measure(call: Callable[[], Any], plan: Schedule, settle: Callable[[], None] | None = None) -> Timing:
    """Time `call` as planned; `settle` waits for what calls have only queued, at the end of each batch."""
    with no_collector():
        return time_batches(call, plan, settle=settle)


def time_batches(
    call: Callable[[], Any], plan: Schedule, cpu_time: bool = False, settle: Callable[[], None] | None = None
) -> Timing:
    """The same without a look at the collector; `cpu_time`: by the time that this thread runs, not the wall clock."""
    clock, batches = thread_time_ns if cpu_time else perf_counter_ns, []
    for _ in range(plan.batches):
        start = clock()
        for _ in range(plan.calls):
            call()
        if settle is not None:
            settle()
        batches.append(clock() - start)
    each = np.array(batches) * 1e-9 / plan.calls
    return Timing(float(np.median(each)), float(np.percentile(each, 99)))


@contextmanager
def no_collector() -> Iterator[None]:
    """Collect now, which takes milliseconds, and not again before the end."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
