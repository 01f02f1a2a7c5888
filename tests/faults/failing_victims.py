"""Ranks that work until one of them fails at a failpoint, and report how it ended."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import fastcoll as dist
from fastcoll import GroupError
from fastcoll.shm import segment
from fastcoll.testing.worker import clock_at_work
from faults import net_victims, victims
from faults.net_victims import arm

MESSAGES = {
    "send_recv": ["send.enter", "send.after_done", "recv.enter", "recv.after_done", "message.before_ack"],
    "batch_isend_irecv": ["isend.after_post", "message.piece_sent", "message.before_ack"],
    "irecv": ["irecv.after_post"],  # if the message has not arrived: it is of rank 0 in any case
}
"""Operations on messages, and where a rank is killed in them."""
SHORT, LONG = 7, 1_000_003  # float32
MIDDLE = 700  # float32, more than the headers of ranks that meet by nodes carry
FIFTH = 5  # the call in which the victim usually dies; the group has no other calls


def work_until_failpoint(
    rank: int, n: int, url: str, op: str, count: int, failpoint: str, victim: int, how: str
) -> dict[str, Any]:
    """Repeat `op` on a group that has no other calls; return the survivor's error and its time.

    In the call that fails, the time in which this rank had no core does not count.

    Args:
        failpoint: the failpoint of the victim; of all ranks, if it names a rank.
        how: the backend, or a key of HOW.
    """
    backend, before, after = HOW.get(how, (how, lambda rank: None, lambda: None))
    before(rank)
    if rank == victim or "#" in failpoint:
        arm(failpoint)
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=n, timeout=60)
    others = dist.new_group([r for r in range(n) if r != victim])
    try:
        for turn in range(10_000):
            if turn == 1:  # the kernels are loaded by now
                after()
            waited = _without_core()
            victims.STEPS[op](count, rank, n)
    except GroupError as error:
        raised = time.monotonic() - (_without_core() - waited)
        return {"raised": raised, **_survived(error, op, count, rank, n, others)}
    raise AssertionError("the victim did not die")


def _without_core() -> float:
    """Return how many seconds this thread has waited for a core so far."""
    return time.monotonic() - clock_at_work()


def _survived(error: GroupError, op: str, count: int, rank: int, n: int, others: Any) -> dict[str, Any]:
    """Check that the group raises the same error again, at once, and that groups of the living ranks work."""
    again, took = set(), []
    for _ in range(3):
        began = clock_at_work()
        try:
            victims.STEPS[op](count, rank, n)
        except GroupError as repeated:
            again.add(str(repeated))
        took.append(clock_at_work() - began)
    x = np.full(3, rank + 1.0)
    dist.all_reduce(x, group=others)
    dist.destroy_process_group()
    return {**victims.report_of(error), "again": again, "again_after": min(took), "others": x[0]}


def _go_direct(rank: int) -> None:
    os.environ["FASTCOLL_SHM_ALGORITHMS"] = "direct"


def _share_arrays() -> None:
    dist.shared_arrays.enable()


def _attach_late(rank: int) -> None:
    """Delay rank 2 until the others have attached and unlinked the segment, as on a full machine."""
    attach = segment.Segment.attach

    def late(name: str, layout: Any) -> segment.Segment:
        while rank == 2 and os.path.exists(f"{segment.DIRECTORY}/{name}"):
            time.sleep(0)
        return attach(name, layout)

    segment.Segment.attach = late  # type: ignore[method-assign]


HOW: dict[str, tuple[str, Callable[[int], None], Callable[[], None]]] = {
    "direct": ("shm", _go_direct, lambda: None),
    "shared": ("shm", _go_direct, _share_arrays),
    "attach late": ("shm", _attach_late, lambda: None),
    "nodes": ("auto", net_victims.live_on_nodes, lambda: None),
    "by nodes": ("auto", net_victims.meet_by_nodes, lambda: None),
    "large nodes": ("auto", net_victims.live_on_large_nodes, lambda: None),
}
"""Ways of the data: the backend, what a rank does before it starts, and what after its first call."""


def die(op: str, place: str, count: int, victim: int, how: str = "shm", n: int = 3) -> tuple[Any, ...]:
    """Return a world whose victim is killed at a failpoint, such as shm.barrier.enter@5."""
    name, _, which = place.partition("@")
    failpoint = f"{name}:kill@{which or FIFTH}"
    return (work_until_failpoint, n, op, count, failpoint, victim, how)


def start_and_leave(
    rank: int, n: int, url: str, failpoint: str, victim: int, how: str, meeting: str
) -> dict[str, Any]:
    """Run a job from its start to its end, in which the victim fails; return the survivor's error and its time.

    In the step that fails, the time in which this rank had no core does not count.

    Args:
        how: as in `work_until_failpoint`.
        meeting: where ranks meet, instead of `url`.

    The timeout is longer than the deadline of `crew.run`: a rank that waits for it "hangs".
    """
    backend, before, _ = HOW.get(how, (how, lambda rank: None, lambda: None))
    before(rank)
    if rank == victim:
        arm(failpoint)
    try:
        waited = _without_core()
        dist.init_process_group(backend, init_method=meeting or url, rank=rank, world_size=n, timeout=600)
        waited = _without_core()
        dist.new_group(list(range(n)))
        waited = _without_core()
        dist.barrier()
    except dist.FastcollError as error:
        raised = time.monotonic() - (_without_core() - waited)
        with contextlib.suppress(dist.FastcollError):
            dist.destroy_process_group()
        return {"raised": raised, "error": str(error)}
    with contextlib.suppress(dist.FastcollError):  # if the victim died after its part of the barrier
        dist.destroy_process_group()
    return {"raised": time.monotonic(), "error": ""}
