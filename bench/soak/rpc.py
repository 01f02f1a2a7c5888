"""A worker of remote calls is killed at a random moment: while workers call one another, join, or shut down.

Each of four workers has two threads that call functions of random workers: with numbers and arrays, on several workers
one after the other, with futures, and by references. Every call either gives the right result, or raises an error that
names the killed worker, within a second (p99); calls between other workers go on, until these leave. Nothing is left.
"""

from __future__ import annotations

import operator
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastcoll import FastcollError, config, rpc
from fastcoll.testing.worker import Footprint, lasting, shm_names

from .fleet import End, Fleet, left_in_shm, names_absent
from .report import Report, percentile

WORKERS, THREADS = 4, 2
P99, MOST = 1.0, 2.0  # most seconds until a caller raises: the 99th percentile, and in any case
AFTER = 30  # calls of each thread after it knows that a worker is dead, or that all know
READY = 90.0  # seconds for the first calls on a loaded machine
_TIMEOUT, _START_TIMEOUT = 20.0, 5.0
_SIZES = (1, 1000, 100_000, 1_000_000)  # elements of arrays; the largest go through shared memory
_LEAVING = 1.0  # the mark of place 0: all leave
_KILLED, _DONE = (
    1,
    2,
)  # places on the board: the worker has been killed; from _DONE on: a worker's threads have ended


@dataclass
class Case:
    """One kill, at the start, in calls, or at the end, `after` seconds from then on."""

    victim: int
    moment: str
    after: float


@dataclass
class Seen:
    """What the threads of a worker have seen.

    Attributes:
        errors: the text of each error, the ranks that it names, and when the call began and raised.
        wrong: descriptions of wrong results, and of errors of other classes.
    """

    calls: int = 0
    errors: list[tuple[str, tuple[int, ...], float, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def run(amount: int, seed: int) -> Report:
    """Kill one worker of each of `amount` worlds."""
    report, kinds, delays, calls = Report(), Counter[str](), list[float](), 0
    spans = {"calls": 0.3, "start": 0.2, "end": 0.05}
    for number in range(amount):
        dice, names = random.Random(f"{seed}/{number}"), shm_names()
        moment = dice.choices(list(spans), (8, 1, 1))[0]
        case = Case(dice.randrange(WORKERS), moment, dice.random() * spans[moment])
        with Fleet() as fleet:
            for rank in range(WORKERS):
                fleet.start(work, rank, case, f"{seed}/{number}")
            victim, ready = fleet.children[case.victim], True
            if moment != "start":
                ready = fleet.await_turns(range(WORKERS), 20, READY)
            if moment == "end":
                fleet.marks[0] = _LEAVING
            time.sleep(case.after)
            killed = time.monotonic()
            victim.signal(signal.SIGKILL)
            fleet.marks[_KILLED] = 1.0
            ends = fleet.ends(READY)
        faults = [] if ready else ["the workers did not make their first calls"]
        for rank, end in enumerate(ends):
            if rank != case.victim:
                faults += [f"w{rank} {fault}" for fault in judge(case, end, victim.pid)]
                if end.result is not None:
                    seen: Seen = end.result[0]
                    calls += seen.calls
                    kinds[f"errors at {moment}"] += len(seen.errors)
                    delays += [
                        raised - max(began, killed)
                        for _, _, began, raised in seen.errors
                        if moment == "calls"
                    ]
        if left := left_in_shm(names):
            faults.append(f"left in /dev/shm: {left}")
        for fault in faults:
            report.fail(f"world {number}, {case}: {fault}")
    late = percentile(delays, 0.99), max(delays, default=0.0)
    if late[0] > P99 or late[1] > MOST:
        report.fail(f"callers knew after {late[0]:.2f} s (p99), {late[1]:.2f} s at most")
    report.done = f"{amount:,} workers killed"
    milliseconds = (percentile(delays, 0.5), *late)
    report.figures = {
        "raised after (p50, p99, longest)": ", ".join(f"{1e3 * each:.0f}" for each in milliseconds) + " ms"
    }
    report.figures |= {"calls": f"{calls:,}"} | {kind: f"{n:,}" for kind, n in sorted(kinds.items())}
    return report


def judge(case: Case, end: End, pid: int) -> list[str]:
    """Return the faults of a survivor."""
    if end.result is None:
        return [f"{'hung' if end.hung else 'failed'} (exit code {end.code}): {end.error}"]
    seen, left = end.result
    faults = [*seen.wrong, *([f"left behind: {left}"] if left else [])]
    for text, ranks, _, _ in seen.errors:
        named = f"rank {case.victim} " in text or ranks == (case.victim,)
        if not named and not (case.moment == "start" and names_absent(text, case.victim, pid)):
            faults.append(f"does not name w{case.victim} (pid {pid}), but {ranks}: {text}")
    if case.moment == "calls" and not seen.errors:
        faults.append("saw no error")
    return faults


def work(fleet: Fleet, rank: int, case: Case, seed: str) -> tuple[Seen, Any]:
    """Run a worker until all have seen the death, or are asked to leave."""
    before, seen = Footprint.now(), Seen()
    options = rpc.RpcBackendOptions(init_method=f"file://{fleet.folder}/meet", rpc_timeout=_TIMEOUT)
    if case.moment == "start":  # perhaps no other worker knows of the victim, and all wait for the timeout
        os.environ["FASTCOLL_TIMEOUT"] = str(_START_TIMEOUT)
        config.forget()
    began, has_joined = time.monotonic(), False
    try:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=WORKERS, rpc_backend_options=options)
        has_joined = True
        threads = [
            threading.Thread(
                target=_call_others, args=(fleet, rank, case, random.Random(f"{seed} {rank} {k}"), seen)
            )
            for k in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except FastcollError as error:
        seen.errors.append((str(error), getattr(error, "ranks", ()), began, time.monotonic()))
    fleet.marks[_DONE + rank] = 1.0
    if case.moment != "end":  # a worker that leaves earlier is missed by others
        for other in range(WORKERS):
            if other != case.victim:
                fleet.await_mark(_DONE + other)
    began = time.monotonic()
    try:
        if has_joined:
            rpc.shutdown(graceful=case.moment == "end")
    except FastcollError as error:
        seen.errors.append((str(error), getattr(error, "ranks", ()), began, time.monotonic()))
    del options
    return seen, lasting(before.growth)


def _call_others(fleet: Fleet, rank: int, case: Case, dice: random.Random, seen: Seen) -> None:
    after = 0
    while after < AFTER and fleet.marks[0] != _LEAVING and len(seen.wrong) < 10:
        call = dice.choice(_CALLS)
        others = [dice.choice([k for k in range(WORKERS) if k != rank]) for _ in range(2)]
        began = time.monotonic()
        try:
            if not call(dice, *others):
                seen.wrong.append(f"a wrong result of {call.__name__} on {others}")
        except FastcollError as error:
            seen.errors.append((str(error), getattr(error, "ranks", ()), began, time.monotonic()))
            # At the end a worker that knows of the death leaves, and calls of it are lost, too.
            if case.victim not in others and case.moment != "end":
                seen.wrong.append(f"{call.__name__} on {others} failed: {error}")
        except Exception as error:
            seen.wrong.append(f"{call.__name__} on {others} raised {error!r}")
        seen.calls += 1
        fleet.turns[rank] += 1
        known = any(case.victim in ranks for _, ranks, _, _ in seen.errors)
        after += bool(case.moment == "calls" and fleet.marks[_KILLED] and known)
        if fleet.marks[_KILLED] and case.moment == "start":
            after += 1


# ---- the calls: each takes two workers, and returns whether its result is right ---------------------------------


class Counting:
    """An object to which other workers have references."""

    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, number: int) -> int:
        self.value += number
        return self.value


def _numbers(dice: random.Random, one: int, other: int) -> bool:
    x = dice.randrange(1000)
    return bool(rpc.rpc_sync(f"w{one}", operator.add, args=(x, 1)) == x + 1)


def _arrays(dice: random.Random, one: int, other: int) -> bool:
    x = np.full(dice.choice(_SIZES), dice.random())
    return bool((rpc.rpc_sync(f"w{one}", operator.mul, args=(x, 2.0)) == 2 * x).all())


def _futures(dice: random.Random, one: int, other: int) -> bool:
    x = np.arange(dice.choice(_SIZES[:3]))
    futures = [rpc.rpc_async(f"w{each}", operator.add, args=(x, each)) for each in (one, other, one)]
    return all(
        bool((future.wait() == x + each).all())
        for future, each in zip(futures, (one, other, one), strict=True)
    )


def nested(other: int, x: int) -> int:
    """Call another worker from this one."""
    result: int = rpc.rpc_sync(f"w{other}", operator.mul, args=(x, 3))
    return result


def _nested(dice: random.Random, one: int, other: int) -> bool:
    x = dice.randrange(1000)
    return bool(rpc.rpc_sync(f"w{one}", nested, args=(other, x)) == 3 * x)


def _references(dice: random.Random, one: int, other: int) -> bool:
    x = dice.randrange(1000)
    counting = rpc.remote(f"w{one}", Counting, args=(x,))
    return bool(counting.rpc_sync().add(2) == x + 2 and counting.to_here().value == x + 2)


_CALLS: tuple[Callable[[random.Random, int, int], bool], ...] = (
    _numbers,
    _arrays,
    _futures,
    _nested,
    _references,
)
