"""The first meeting of an elastic job: a rank attempts to meet the others until an attempt succeeds.

An elastic job may go on without failed ranks and admit new ones. The ranks meet in a store of the launcher, where all
processes read how each attempt ended, its *outcome* (rendezvous/attempts.py).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from ..core.group import ProcessGroup
from ..errors import (
    FastcollError,
    GroupError,
    PeerDiedError,
    RendezvousError,
    StoreError,
)
from ..rendezvous.attempts import ELSEWHERE, MADE, Attempts, ProcessName, loss_of
from .job import Job
from .joining import JoinQueue, Start, passes_barrier

# How long to wait for a launcher to publish the death of its process, after ranks have detected this death.
_SEEN_SECONDS = 10.0
_LOOK_SECONDS = 60.0  # the length of one wait for an attempt's outcome


def begin(address: str, place: ProcessName, timeout: float, start: Start) -> tuple[Job, ProcessGroup] | None:
    """Meet the other ranks in the launcher's store at `address`; return None if they met without this process.

    If a process dies before all have met, the others wait for its replacement, a new process with the same rank.

    Raises:
        PeerDiedError: a process died and is not replaced.
        FastcollError: as for `init_process_group`.
    """
    began = time.monotonic()
    join_queue = JoinQueue(address, timeout)
    with closing(join_queue):
        join_queue.attempts.come()
        for attempt in itertools.count():
            outcome = join_queue.attempts.outcome(attempt)
            if outcome is None:
                try:
                    return _meet(join_queue, attempt, place, timeout, began, start)
                except FastcollError as error:
                    outcome = _end_of(join_queue.attempts, attempt, error, began + timeout)
                    if outcome in (None, MADE):
                        raise
            if outcome in (MADE, ELSEWHERE):
                return None
            loss = loss_of(outcome)
            if loss.is_final:
                raise PeerDiedError(
                    f"joining as rank {place.rank}: {loss.text}, and no process replaces it", [loss.rank]
                )
    raise AssertionError("the attempts that have ended are finite")


def met_elsewhere(address: str, place: ProcessName) -> None:
    """Publish to the launchers that the ranks have met by other means than `begin`, such as an init method."""
    with suppress(StoreError), closing(JoinQueue(address, _SEEN_SECONDS)) as join_queue:
        join_queue.attempts.join(place.name)
        join_queue.attempts.decide_next(ELSEWHERE)


def _meet(
    join_queue: JoinQueue, attempt: int, place: ProcessName, timeout: float, began: float, start: Start
) -> tuple[Job, ProcessGroup]:
    store, close = join_queue.place(f"first/{attempt}")

    def confirm(world: ProcessGroup) -> None:
        join_queue.attempts.join(place.name)
        outcome = (
            join_queue.attempts.decide(attempt, MADE)
            if passes_barrier(world)
            else join_queue.attempts.wait(attempt, _SEEN_SECONDS)
        )
        if outcome != MADE:
            raise RendezvousError("a rank died while all were joining")

    try:
        with _cut_off(join_queue, attempt, close):
            return start(store, place.rank, place.size, close, confirm, timeout, began)
    except BaseException:
        close()
        raise


def _end_of(attempts: Attempts, attempt: int, error: FastcollError, deadline: float) -> bytes | None:
    """Return the outcome of the attempt that failed here with `error`; None if it has no outcome yet.

    The death of a process may cause a GroupError or a RendezvousError. So after one of these, wait up to 10 s for a
    launcher to publish a death.
    """
    if not isinstance(error, GroupError | RendezvousError):
        return attempts.outcome(attempt)
    return attempts.wait(attempt, max(min(deadline - time.monotonic(), _SEEN_SECONDS), 0.0))


@contextmanager
def _cut_off(join_queue: JoinQueue, attempt: int, close: Callable[[], None]) -> Iterator[None]:
    """During the block, close the attempt's store as soon as the attempt fails, which ends every wait in that store."""
    attempts, stop = join_queue.attempts_apart()

    def follow() -> None:
        with suppress(StoreError):
            while (outcome := attempts.wait(attempt, _LOOK_SECONDS)) is None:
                pass
            if outcome != MADE:
                close()

    thread = threading.Thread(target=follow, name="fastcoll-begin", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop()
        thread.join()
