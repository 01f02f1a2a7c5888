"""A member of the job sends broken frames behind a valid opening.

Each kind of connection has two processes. One is the *victim*. The other, the *attacker*, is a member with the secret,
which opens its connections by fastcoll's own code, and then sends frames that mutations.py has changed. The victim may
end a connection, or raise a FastcollError that names the attacker. It must not crash, hang or grow, raise another
exception, or log the traceback of one. The victim may take 4 GiB of address space, so that an unbounded allocation
fails here and does not exhaust the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from . import frames_groups, frames_rpc, frames_store
from .fleet import Child, Fleet
from .report import Report
from .watching import ATTACKER, OVER, Seen, peak_bytes, watch

MOST_BYTES = 64 << 20  # by which the peak of a victim's memory may grow
_WARM = 0.1  # the part of the frames after which memory is measured, so that allocations of first uses do not count
_SECONDS_A_FRAME, _LEAST_SECONDS = 0.5, 60.0
_END_SECONDS = 30.0


@dataclass(frozen=True)
class Kind:
    """A kind of connection: its victim, its attacker, and its share of all frames."""

    victim: Callable[[Fleet, Seen, int], None]
    attack: Callable[[Fleet, int, int], None]
    share: float


KINDS = {
    "requests": Kind(frames_store.hold_store, frames_store.attack_store, 0.47),
    "answers": Kind(frames_store.use_store, frames_store.answer_badly, 0.01),
    "remote calls": Kind(frames_rpc.be_called, frames_rpc.attack_worker, 0.47),
    "results": Kind(frames_rpc.call, frames_rpc.answer_badly, 0.01),
    "collectives": Kind(frames_groups.reduce, frames_groups.attack_collectives, 0.02),
    "messages": Kind(frames_groups.exchange, frames_groups.attack_messages, 0.02),
}


def run(amount: int, seed: int) -> Report:
    """Send `amount` frames, of all kinds."""
    report, total, began = Report(), 0, time.monotonic()
    for name, kind in KINDS.items():
        count = max(round(kind.share * amount), 10)
        total += count
        with Fleet() as fleet:
            _run(fleet, name, kind, count, seed, report)
    report.done = f"{total:,} frames in {time.monotonic() - began:.0f} s"
    return report


def _run(fleet: Fleet, name: str, kind: Kind, count: int, seed: int, report: Report) -> None:
    victim = fleet.start(_be_victim, kind, count)
    attacker = fleet.start(kind.attack, count, seed)
    deadline = time.monotonic() + _LEAST_SECONDS + _SECONDS_A_FRAME * count
    if not fleet.await_turns([ATTACKER], max(round(_WARM * count), 1), deadline - time.monotonic()):
        report.fail(f"{name}: the attacker does not begin")
    before = peak_bytes(victim.pid)
    end = fleet.reap(attacker, deadline)
    if end.code or end.hung or end.error:
        report.fail(f"{name}: the attacker: code {end.code}, {'it hung, ' * end.hung}{end.error}")
    grown = _peak_of(victim, before) - before
    fleet.marks[OVER] = 1.0
    ended = fleet.reap(victim, time.monotonic() + _END_SECONDS)
    if ended.result is None or ended.code or ended.hung:
        report.fail(f"{name}: the victim: code {ended.code}, {'it hung, ' * ended.hung}{ended.error}")
        return
    for fault in ended.result.faults:
        report.fail(f"{name}: {fault}")
    if ended.result.outcomes and not ended.result.outcomes["returned"]:
        report.fail(f"{name}: not one whole frame was accepted")
    if grown > MOST_BYTES:
        report.fail(f"{name}: the victim has grown by {grown / 2**20:.1f} MiB")
    outcomes = ", ".join(f"{what} {number:,}" for what, number in sorted(ended.result.outcomes.items()))
    report.figures[name] = f"{count:,} (+{grown / 2**20:.1f} MiB{f'; {outcomes}' * bool(outcomes)})"


def _peak_of(child: Child, otherwise: int) -> int:
    try:
        return peak_bytes(child.pid)
    except (OSError, ProcessLookupError):  # the victim has ended, which `reap` reports
        return otherwise


def _be_victim(fleet: Fleet, kind: Kind, count: int) -> Seen:
    seen = watch()
    kind.victim(fleet, seen, count)
    return seen
