"""How ranks admit joiners (new ranks): they make a new world (default group) beside the old one.

If that fails, the old world stays in use. One key of the store decides which world is in force (job/joining.py), so all
ranks use the same world. The new world has the ranks of the old world in the same order, followed by the joiners. If a
rank cannot read that key although the new world may already be in force, the rank raises, because it must not go on in
the old world alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from ..core.group import ProcessGroup
from ..errors import FastcollError, PeerDiedError, StoreError
from ..job.groups import groups
from ..job.job import make_world
from ..job.joining import FORMING_SECONDS, JoinQueue, passes_barrier
from ..job.lease import StoreLease
from ..job.leaving import close
from ..job.world import current_job, replace_job
from ..rendezvous.join import join
from ..system.processes import describe_gone, forget, gone_among


class Attempt(NamedTuple):
    """An attempt to make a new world from the ranks of the old one and some joiners."""

    number: int
    joiner_count: int
    joiners: Sequence[int] = ()  # their numbers in the join queue; on rank 0 only


class NotGrownError(FastcollError):
    """The joiners could not be admitted; the old world is unchanged."""


def grow(join_queue: JoinQueue, attempt: Attempt) -> None:
    """Admit joiners to the default group; collective. All other groups are destroyed.

    Raises:
        NotGrownError: a joiner or a rank has died or did not arrive. The old world is unchanged.
        StoreError: the store was lost while the new world was being made.
    """
    before, old = current_job(), groups.world
    made: list[ProcessGroup] = []
    with ExitStack() as undo:
        undo.callback(lambda: close(made))
        job, failed = None, None
        try:
            if old.rank == 0:
                join_queue.invite(attempt.number, attempt.joiners, old.size)
            lease = _join(join_queue, attempt, undo)
            doing = "making the default group with joiners"
            job, world = make_world(lease, before.choice, FORMING_SECONDS, doing)
            made.append(world)
        except FastcollError as error:
            failed = error
        if not _is_admitted(join_queue, attempt, made):
            raise NotGrownError(
                f"{attempt.joiner_count} joiners could not be admitted: {failed or 'a rank has died'}"
            )
        assert job is not None, "the decision needs a barrier of all ranks of the new world"
        job.timeout, world.timeout = before.timeout, old.timeout
        made.clear()
        undo.pop_all()
    replace_job(job, world)
    if world.rank == 0:
        with suppress(StoreError):
            join_queue.clear(attempt.number)


def _is_admitted(join_queue: JoinQueue, attempt: Attempt, made: Sequence[ProcessGroup]) -> bool:
    try:
        return join_queue.decide(attempt.number, bool(made) and passes_barrier(made[0]))
    except StoreError:
        if made:
            raise
        return False  # no rank can pass the barrier without this rank, so the new world is not in force


def _join(join_queue: JoinQueue, attempt: Attempt, undo: ExitStack) -> StoreLease:
    """Meet the joiners in a store for the new world."""
    before, size = current_job(), groups.world.size + attempt.joiner_count

    def look() -> None:
        if gone := gone_among(before.lease.members):
            raise PeerDiedError(describe_gone(gone), [member.rank for member in gone])
        if attempt.joiners and (left := join_queue.gone(attempt.joiners)):
            raise PeerDiedError(f"{len(left)} joiners died while they joined")

    store, close_store = join_queue.place(f"world{attempt.number}")
    undo.callback(close_store)
    rank = before.lease.rank
    members = join(store, rank, size, str(before.choice), FORMING_SECONDS, look)
    undo.callback(forget, members)
    return StoreLease(store, members, rank, close_store)
