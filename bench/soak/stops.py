"""A rank is stopped (SIGSTOP), for half the timeout or for good.

During a stop of half the timeout no rank may declare the rank dead. If the rank stays stopped, the others name it when
they time out. A rank that waits for a message knows only the message's other rank, which may itself be waiting; then
the error may name that rank instead. A world is used for many short stops, and several worlds run at once, because they
mostly wait. A rank that continues after the others have given up must get an error from its next call, and no result.
"""

from __future__ import annotations

import contextlib
import random
import re
import signal
import time
from dataclasses import dataclass
from typing import Any

import fastcoll as dist
from fastcoll import GroupError
from fastcoll.testing.worker import clock_at_work

from .calls import CALLS, ONE_NODE
from .fleet import Child, Fleet, live_on_nodes
from .report import Report

TIMEOUT = 3.0  # of the groups; short stops last half of it
SLACK = 0.5  # seconds by which a timeout may be late, in addition to the time that the rank waits for a core
ONCE = 10  # short stops per world
_WORLDS = [(backend, n) for n in (2, 4) for backend in ("shm", "tcp", "auto")]


@dataclass
class World:
    """A running world, and the stops of its ranks."""

    fleet: Fleet
    backend: str
    n: int
    stops: int = 0

    @property
    def ranks(self) -> list[Child]:
        return self.fleet.children

    def __str__(self) -> str:
        return f"{self.n} ranks, {self.backend}"


def run(amount: int, seed: int) -> Report:
    """Make `amount` short stops, and a tenth as many permanent ones."""
    report, dice = Report(), random.Random(seed)
    short = long = 0
    lates: list[float] = []
    while short < amount:
        with contextlib.ExitStack() as stack:
            worlds = []
            for backend, n in _WORLDS:
                fleet = stack.enter_context(Fleet())
                worlds.append(World(fleet, backend, n))
                for rank in range(n):
                    fleet.start(work, rank, backend, n)
            for world in worlds:
                if not world.fleet.await_turns(range(world.n), 20, 60.0):
                    report.fail(f"{world}: did not reach its 20th call")
            rounds = min(ONCE, -(-(amount - short) // len(worlds)))
            for _ in range(rounds):
                short += _stop_for_a_while(worlds, dice, report)
            lates += _stop_for_good(worlds, dice, report)
            long += len(worlds)
    report.done = f"{short} stops of {TIMEOUT / 2:g} s, {long} for good"
    report.figures = {"false deaths": str(len([text for text in report.faults if "short" in text]))}
    report.figures["timeouts after the promised moment"] = (
        f"{min(lates, default=0) * 1e3:.0f} to {max(lates, default=0) * 1e3:.0f} ms"
    )
    return report


def _stop_for_a_while(worlds: list[World], dice: random.Random, report: Report) -> int:
    """Stop a rank of each world for half the timeout; check that all then go on.

    Returns:
        how many ranks were stopped.
    """
    stopped = [dice.choice(world.ranks) for world in worlds]
    for child in stopped:
        child.signal(signal.SIGSTOP)
    time.sleep(TIMEOUT / 2)
    for child in stopped:
        child.signal(signal.SIGCONT)
    for world in worlds:
        turns = int(world.fleet.turns[: world.n].max())
        if not world.fleet.await_turns(range(world.n), turns + 3, 30.0):
            outcome = [end.error or end.result for end in world.fleet.ends(1.0)]
            report.fail(f"short stop, {world}: it does not go on: {outcome}")
    return len(worlds)


def _stop_for_good(worlds: list[World], dice: random.Random, report: Report) -> list[float]:
    """Stop a rank of each world until the others have given up.

    Returns:
        for each of the others, by how many seconds its timeout was late.
    """
    chosen = [dice.randrange(world.n) for world in worlds]
    began = {}
    for world, number in zip(worlds, chosen, strict=True):
        began[id(world)] = time.monotonic()
        world.ranks[number].signal(signal.SIGSTOP)
    lates = []
    for world, number in zip(worlds, chosen, strict=True):
        deadline = time.monotonic() + 4 * TIMEOUT
        ends = {
            rank: world.fleet.reap(child, deadline)
            for rank, child in enumerate(world.ranks)
            if rank != number
        }
        texts = {rank: end.result.get("text", "") for rank, end in ends.items() if end.result}
        for rank, end in ends.items():
            if end.result is None:
                report.fail(
                    f"for good, {world}, rank {rank}: {'hung' if end.hung else 'failed'}: {end.error}"
                )
                continue
            outcome = end.result
            # The call that timed out may have begun before the stop; no rank gives up before its own timeout.
            late = (
                outcome["raised"]
                - max(began[id(world)], outcome["began"])
                - TIMEOUT
                - outcome["without_core"]
            )
            early = (
                outcome["raised"] - outcome["began"] < TIMEOUT - 0.05
                and outcome["kind"] == "CollectiveTimeoutError"
            )
            named = _names(number, f"rank {number} (pid {world.ranks[number].pid} on ", outcome, texts)
            if outcome["wrong"] is not None or not named or late > SLACK or early:
                report.fail(
                    f"for good, {world}, rank {number} stopped, rank {rank}, {late:+.2f} s: {outcome}"
                )
            lates.append(late)
        stopped = world.ranks[number]
        stopped.signal(signal.SIGCONT)
        end = world.fleet.reap(stopped, time.monotonic() + 4 * TIMEOUT)
        if end.result is None or end.result["wrong"] is not None or not end.result["kind"]:
            report.fail(f"for good, {world}: the stopped rank {number} afterwards: {end}")
    return lates


def _names(number: int, words: str, outcome: dict[str, Any], texts: dict[int, str]) -> bool:
    """Return whether an error names the stopped rank `number`.

    It may name that rank through others. If the error is that of a message, the rank that it names may have reported
    that it waits for another rank.

    Args:
        words: how an error names the stopped rank.
        outcome: the rank's error.
        texts: the errors of all ranks that were not stopped.
    """
    named, reported = set(outcome["ranks"]), [outcome["text"]]
    if re.search("recv from|send to", outcome["text"]):
        for _ in texts:
            reported += [texts[rank] for rank in named if rank in texts]
            waits = r"(?:waiting for|recv from|send to) rank (\d+) \(pid"
            named |= {int(rank) for text in reported[1:] for rank in re.findall(waits, text)}
    return number in named and any(words in text for text in reported)


def work(fleet: Fleet, rank: int, backend: str, n: int) -> dict[str, Any]:
    """Repeat all kinds of calls, in the same order on all ranks, until one raises."""
    if backend == "auto":
        live_on_nodes(rank, n // 2)
    dist.init_process_group(backend, f"file://{fleet.folder}/meet", 60, n, rank)
    group = dist.GroupMember.WORLD
    names = sorted(set(CALLS) - {"new_group"} - (ONE_NODE if backend != "shm" else set()))
    outcome: dict[str, Any] = {"wrong": None, "kind": ""}
    try:
        for turn in range(1 << 30):
            if turn == 2 * len(names):  # first uses, which may take longer than the timeout, are over
                dist.barrier()
                group.timeout = TIMEOUT
            steps = CALLS[names[turn % len(names)]](rank, n, (7, 5000)[turn % 2], turn)
            next(steps)
            began, at_work = time.monotonic(), clock_at_work()
            if not next(steps):
                return outcome | {"wrong": turn, "kind": "wrong"}
            fleet.turns[rank] = max(turn - 2 * len(names), 0)
    except GroupError as error:
        outcome |= {"kind": type(error).__name__, "text": str(error), "ranks": error.ranks}
        outcome |= {"raised": time.monotonic(), "began": began}
        outcome["without_core"] = outcome["raised"] - began - (clock_at_work() - at_work)
        if not re.search(r"rank \d+", str(error)):
            outcome["wrong"] = "no rank is named"
    with contextlib.suppress(GroupError):
        dist.destroy_process_group()
    return outcome
