"""A rank is killed at a random moment: in a call, at the start, or at the end.

Each case is one world, and depends on its number and the seed alone. The promises: every survivor of a call raises an
error that names the dead rank, its pid, the operation and the number of the call, within a second (p99); every later
call raises the same error at once; results of calls that returned are right; no name in /dev/shm, thread, descriptor or
process is left.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import numpy as np

import fastcoll as dist
from fastcoll import FastcollError, GroupError, config
from fastcoll.launch.nodes import free_port
from fastcoll.testing.worker import Footprint, clock_at_work, lasting, shm_names

from .calls import CALLS, ONE_NODE
from .fleet import End, Fleet, left_in_shm, live_on_nodes, names_absent
from .report import Report, percentile

BACKENDS = ("shm", "tcp", "auto")  # auto: on two nodes with half of the ranks each
WORLDS = (2, 4, 8)
COUNTS = (0, 1, 2, 1000, 262_144, 1_000_003)  # of float32
DEATHS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM)
LARGE = (16 << 20,)  # 64 MiB, in one of 50 cases with few ranks
TIMEOUT = 20.0  # of the groups; no case may reach it
# Of the groups if a rank dies while the job starts: perhaps no other rank knows of it, and all wait for the timeout.
START_TIMEOUT = 3.0
P99, MOST = 1.0, 2.0  # most seconds until a survivor raises: the 99th percentile, and in any case
READY = 90.0  # seconds for three calls, some of 64 MiB, on a loaded machine
PASSED = 12  # a victim that has not hit its failpoint after this many calls never will, so it is killed
AGAIN = 0.1  # most seconds until a later call on the group raises, not counting waits for a core
_CALL = r"call \d+ of group|send to|recv from|symmetric\.|new_group\(|making a data connection"


@dataclass(frozen=True)
class Case:
    """One kill.

    Attributes:
        moment: "call", "start", "leave", or "phase", in which the victim kills itself at the failpoint.
        after: seconds from the beginning of the moment to the kill.
        by: the signal.
    """

    number: int
    backend: str
    n: int
    op: str
    count: int
    victim: int
    moment: str
    after: float
    failpoint: str = ""
    by: int = signal.SIGKILL

    @property
    def in_call(self) -> bool:
        """Whether all survivors detect the death in a call."""
        return self.moment in ("call", "phase")

    def __str__(self) -> str:
        what = f"{self.op} of {self.count}" if self.moment != "start" else "the start"
        where = self.failpoint or self.moment
        return f"case {self.number}: rank {self.victim} of {self.n}, {self.backend}, {where}, {what}"


def draw(seed: int, number: int) -> Case:
    """Return the case with a number."""
    dice = random.Random(f"{seed}/{number}")
    backend, n = BACKENDS[number % 3], WORLDS[number // 3 % 3]
    ops = sorted(set(CALLS) - (ONE_NODE if backend != "shm" else set()))
    moment = dice.choices(("call", "start", "leave"), (8, 1, 1))[0]
    large = n <= 4 and dice.random() < 0.02
    spans = {"call": 0.02, "start": 0.15, "leave": 0.005}
    return Case(
        number, backend, n, dice.choice(ops), dice.choice(LARGE if large else COUNTS), dice.randrange(n), moment,
        dice.random() * spans[moment], by=dice.choices(DEATHS, (6, 1, 1, 1))[0],
    )  # fmt: skip


def run(amount: int, seed: int) -> Report:
    """Kill one rank of `amount` worlds."""
    return carry_out(amount, lambda number: draw(seed, number))


def carry_out(amount: int, case_of: Callable[[int], Case]) -> Report:
    """Carry out the first `amount` cases of `case_of`."""
    report, delays, kinds = Report(), dict[str, list[float]](), Counter[str]()
    began = time.monotonic()
    for number in range(amount):
        case = case_of(number)
        known = kill_one(case, kinds, report.fail)
        delays.setdefault(case.backend, []).extend(known)
        if max(known, default=0.0) > P99:
            print(f"{case}: known after {max(known):.2f} s", flush=True)
        if number % 200 == 199:
            print(
                f"{number + 1} kills, {len(report.faults)} faults, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    report.done = f"{amount:,} kills"
    for backend, seen in delays.items():
        p99 = percentile(seen, 0.99)
        report.figures[f"{backend}: p50, p99, longest"] = (
            f"{percentile(seen, 0.5) * 1e3:.1f}, {p99 * 1e3:.0f}, {max(seen, default=0) * 1e3:.0f} ms"
        )
        if p99 > P99 or max(seen, default=0.0) > MOST:
            report.fail(f"{backend}: survivors knew after {p99:.2f} s (p99), {max(seen):.2f} s at most")
    report.figures["survivors raised"] = " ".join(f"{kind}: {count}" for kind, count in kinds.most_common())
    report.figures["took"] = f"{time.monotonic() - began:.0f} s"
    return report


def kill_one(case: Case, kinds: Counter[str], fail: Callable[[str], None]) -> list[float]:
    """Carry out a case; return how many seconds the survivors of a call took to raise.

    Args:
        kinds: counts the kinds of errors.
        fail: called with each fault.
    """
    names = shm_names()
    with Fleet() as fleet:
        url = f"file://{fleet.folder}/meet" if case.number % 2 else f"tcp://127.0.0.1:{free_port()}"
        for rank in range(case.n):
            fleet.start(work, rank, case, url)
        everybody, victim = range(case.n), fleet.children[case.victim]
        ready = case.moment in ("start", "phase") or fleet.await_turns(everybody, 3, READY)
        if case.moment == "leave":
            fleet.marks[0] = 1.0  # rank 0 then tells the others that all leave
            fleet.await_turns([case.victim], 1 << 20, TIMEOUT)
        time.sleep(case.after)
        if case.moment == "phase" and not _kills_itself(fleet, case.victim):
            kinds[f"never hit {case.failpoint.partition(':')[0]}"] += 1
        killed = time.monotonic()
        victim.signal(case.by)
        ends = fleet.ends(TIMEOUT + 5.0)
        pid = victim.pid
        # The victim's last time on the board is the begin of the call in which it hit its failpoint.
        killed = min(killed, float(fleet.times[case.victim])) if case.moment == "phase" else killed
    delays = list[float]()
    faults = [] if ready else ["the ranks did not reach their third call"]
    for rank, end in enumerate(ends):
        if rank == case.victim:
            right = (-case.by,) if case.in_call else (-case.by, 0)
            faults += (
                []
                if end.code in right and not end.hung
                else [f"the victim ended with {end.code}: {end.error}"]
            )
        else:
            faults += [f"rank {rank} {fault}" for fault in judge(case, end, pid)]
            if end.result and end.result["kind"]:
                kinds[end.result["kind"]] += 1
                if case.in_call:
                    delays.append(max(end.result["raised"] - max(killed, end.result["began"]), 0.0))
    if left := left_in_shm(names):
        faults.append(f"left in /dev/shm: {left}")
    for fault in faults:
        fail(f"{case}: {fault}")
    return delays


def _kills_itself(fleet: Fleet, rank: int) -> bool:
    """Wait for a victim to end at its failpoint; False: its call used another algorithm and did not hit it."""
    victim, end = fleet.children[rank], time.monotonic() + READY
    while not wait([victim.pidfd], 0.05):
        if fleet.turns[rank] >= PASSED or time.monotonic() > end:
            return False
    return True


def judge(case: Case, end: End, pid: int) -> list[str]:
    """Return the faults of a survivor, given its end and the victim's pid."""
    if end.hung or end.result is None:
        return [f"{'hung' if end.hung else 'failed'} (exit code {end.code}): {end.error}"]
    outcome, text = end.result, end.result["text"]
    faults = [f"got a wrong result in turn {outcome['wrong']}"] if outcome["wrong"] is not None else []
    faults += [f"left behind: {outcome['left']}"] if outcome["left"] else []
    if not outcome["kind"]:
        return faults if case.moment == "leave" else [*faults, "saw no error"]
    if case.moment == "start":
        # A rank that died before it joined is missing at the timeout.
        named = f"rank {case.victim}" in text or names_absent(text, case.victim, pid)
    else:
        # While a group is made, an error may also name survivors that have failed and ended.
        others = case.op == "new_group" and case.victim in outcome["ranks"]
        named = (
            outcome["ranks"] == (case.victim,) or others
        ) and f"rank {case.victim} (pid {pid} on " in text
    if not named:
        faults.append(
            f"does not name rank {case.victim} (pid {pid}), but {outcome['ranks']}: {outcome['kind']}: {text}"
        )
    if case.in_call:
        if not re.search(_CALL, text):
            faults.append(f"does not say in which call: {text}")
        if case.op == "new_group":  # each call makes another group
            same, soon = outcome["again"] != "no error", P99
        else:
            same, soon = outcome["again"] == text, AGAIN
        if not same or outcome["again_after"] > soon:
            faults.append(f"raised {text!r}, then after {outcome['again_after']:.3f} s {outcome['again']!r}")
    return faults


def work(fleet: Fleet, rank: int, case: Case, url: str) -> dict[str, Any]:
    """Run a rank: repeat the case's call until it raises, or until all ranks leave."""
    if case.failpoint and rank == case.victim:
        os.environ["FASTCOLL_FAILPOINT"] = case.failpoint
        config.forget()
    if case.backend == "auto":
        live_on_nodes(rank, case.n // 2)
    before, outcome = Footprint.now(), dict[str, Any](kind="", text="", ranks=(), wrong=None, raised=0.0)
    call, turn = CALLS[case.op], 0
    try:
        timeout = START_TIMEOUT if case.moment == "start" else TIMEOUT
        dist.init_process_group(case.backend, url, timeout, case.n, rank)
        while outcome["wrong"] is None and not _has_to_leave(fleet, rank, case):
            steps = call(rank, case.n, case.count, turn)
            next(steps)
            fleet.times[rank] = time.monotonic()
            if not next(steps):
                outcome["wrong"] = turn
            turn += 1
            fleet.turns[rank] = turn
            del steps  # the generator holds the call's arrays
        fleet.turns[rank] = 1 << 20
        dist.destroy_process_group()
    except FastcollError as error:
        outcome |= {"kind": type(error).__name__, "text": str(error), "raised": time.monotonic()}
        outcome["ranks"] = getattr(error, "ranks", ())
        if case.in_call:
            outcome |= {"began": float(fleet.times[rank]), **_call_again(case, rank, turn)}
    if dist.is_initialized():
        with contextlib.suppress(GroupError):  # its error names pending operations, and is ignored
            dist.destroy_process_group()
    return outcome | {"left": lasting(before.growth)}


def _has_to_leave(fleet: Fleet, rank: int, case: Case) -> bool:
    """Return whether the parent has asked rank 0 to end; collective."""
    if case.moment != "leave":
        return False
    ends = np.array([fleet.marks[0] if rank == 0 else 0.0])
    dist.broadcast(ends, 0)
    return bool(ends[0])


def _call_again(case: Case, rank: int, turn: int) -> dict[str, Any]:
    took, again = list[float](), ""
    for _ in range(1 if case.op == "new_group" else 3):  # the first call is collective
        since = clock_at_work()
        try:
            all(CALLS[case.op](rank, case.n, min(case.count, 1000), turn))
        except GroupError as error:
            again = str(error)
        else:
            return {"again": "no error", "again_after": 0.0}
        took.append(clock_at_work() - since)
    return {"again": again, "again_after": min(took)}
