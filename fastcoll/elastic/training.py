"""run: call a training function again, from the last commit, whenever ranks have died or joiners have arrived.

All ranks execute the same rounds. In a round they agree on which rank has the state, copy its state, and call the
function. A death ends the round on each rank with a GroupError; the remaining ranks then form a smaller group. When
joiners (new ranks) wait, the round ends at the same commit on all ranks (`WorldChange`). No rank returns from the last
round before all have finished it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np

from .. import config
from ..api.collectives import all_gather_single, barrier, broadcast
from ..core.operands import whole
from ..errors import (
    AbortedError,
    FastcollError,
    GroupError,
    MismatchError,
    RendezvousError,
    StoreError,
    UsageError,
)
from ..job.groups import groups, is_initialized
from ..job.joining import JobEndedError, JoinQueue
from ..job.recovery import shrink
from ..job.world import current_job, destroy_process_group, init_process_group, join_running_job
from .growth import Attempt, NotGrownError, grow
from .state import State

_log = logging.getLogger("fastcoll")

T = TypeVar("T")
Train = Callable[..., T]

_LOOK_SECONDS = 1.0  # the time between two checks for joiners
_ASKED_SECONDS = 0.05  # the same, if rank 0 has just asked joiners whether they still run
_STORE_SECONDS = 2.0  # timeout of requests to the store; short, because all ranks wait for rank 0
_MOST_AT_ONCE = 1000  # how many joiners may be admitted together
_numbers = itertools.count(1)  # numbers this process's calls of functions that `run` returned


class WorldChange(BaseException):
    """Raised by a commit to end the training function, so that joiners can be admitted; `run` then calls it again."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(f"{attempt.joiner_count} joiners wait")
        self.attempt = attempt


OnChange = Callable[[int, int], None]


@overload
def run(
    train: Train[T],
    *,
    min_ranks: int = ...,
    max_ranks: int | None = ...,
    max_restarts: int | None = ...,
    on_change: OnChange | None = ...,
    store: str | None = ...,
) -> Train[T]: ...
@overload
def run(
    *,
    min_ranks: int = ...,
    max_ranks: int | None = ...,
    max_restarts: int | None = ...,
    on_change: OnChange | None = ...,
    store: str | None = ...,
) -> Callable[[Train[T]], Train[T]]: ...
def run(
    train: Train[T] | None = None,
    *,
    min_ranks: int = 1,
    max_ranks: int | None = None,
    max_restarts: int | None = None,
    on_change: OnChange | None = None,
    store: str | None = None,
) -> Any:
    """Make a training function survive the death of ranks and admit joiners; also a decorator.

    The function that `run` returns takes a `State` and the further arguments of `train`, and returns what `train`
    returns. If `init_process_group` was not called before, it first joins the job. When a rank has died, the ranks that
    are left form the new default group, copy the state of the longest-lived rank as of its last commit, and call
    `train` again. All ranks do the same when joiners are admitted, which happens in `state.commit()`. Either change
    destroys the groups that `new_group` made, and ends pending works, so make groups inside `train`.

    A process with FASTCOLL_JOINER=1 is a joiner. It runs the same program, and calls `train` when the other ranks
    have admitted it. If the job ends before that, the joiner exits with SystemExit and code 0.

    Args:
        train: called as `train(state, *args, **kwargs)`; continues from the state.
        min_ranks: if fewer ranks are left after a death, the GroupError of that death is raised.
        max_ranks: joiners wait while there are this many ranks; None: no limit.
        max_restarts: how often `train` is called again after deaths; the GroupError of the next death is raised. None:
            no limit.
        on_change: called on all ranks with the old and the new number of ranks, when all ranks have the state. Values
            of the state that it sets count as committed.
        store: HOST:PORT of a store that outlives the ranks and holds the join queue, the same on all ranks; None:
            FASTCOLL_ELASTIC, which the launcher sets. Without a store there are no joiners.

    Raises:
        GroupError: too few ranks are left, or there were too many restarts.
        UsageError: an argument is wrong.
        UnavailableError: the group runs on MPI, which does not survive deaths.

    If `train` raises another exception, it is raised on this rank, which leaves the job; the other ranks go on.

    Examples:
        >>> @elastic.run(min_ranks=2)
        ... def train(state):
        ...     while state.step < 1000:
        ...         update(state)
        ...         state.step += 1
        ...         state.commit()
        >>> train(elastic.State(weights=weights, step=0))
    """
    terms = _Terms(min_ranks, max_ranks, max_restarts, on_change, store)

    def outliving(train: Train[T]) -> Train[T]:
        if not callable(train):
            raise UsageError(f"train is {train!r}; give a function of a state")

        @functools.wraps(train)
        def elastic(state: State, *args: Any, **kwargs: Any) -> T:
            if not isinstance(state, State):
                raise UsageError(f"state is a {type(state).__name__}; give a fastcoll.elastic.State")
            return _Run(state, terms).run(lambda: train(state, *args, **kwargs))

        return elastic

    return outliving if train is None else outliving(train)


@dataclass(frozen=True)
class _Terms:
    """The arguments of `run`."""

    min_ranks: int
    max_ranks: int | None
    max_restarts: int | None
    on_change: OnChange | None
    store: str | None

    def __post_init__(self) -> None:
        least, restarts = whole("min_ranks", self.min_ranks), whole("max_restarts", self.max_restarts or 0)
        most = least if self.max_ranks is None else whole("max_ranks", self.max_ranks)
        if not 1 <= least <= most or restarts < 0:
            raise UsageError(f"{self}; give 1 <= min_ranks <= max_ranks, and 0 restarts or more")
        if not (self.on_change is None or callable(self.on_change)):
            raise UsageError(f"on_change is {self.on_change!r}; give a function of two numbers of ranks")
        if not isinstance(self.store, str | None):
            raise UsageError(f"store is {self.store!r}; give HOST:PORT")

    def __str__(self) -> str:
        return (
            f"min_ranks is {self.min_ranks}, max_ranks {self.max_ranks} and max_restarts {self.max_restarts}"
        )


class _Run:
    """One call, on this rank, of a function that `run` returned."""

    def __init__(self, state: State, terms: _Terms) -> None:
        self._state, self._terms, self._number = state, terms, next(_numbers)
        self._address: str = config.get("FASTCOLL_ELASTIC") if terms.store is None else terms.store
        # _grows: whether joiners are possible, because every rank has the address of a store.
        self._has_state, self._grows, self._is_joiner = False, False, False
        # Number of ranks when the state was last copied, or at the beginning, 0 for a joiner; restarts so far.
        self._size = self._restarts = 0
        self._found: JoinQueue | None = None
        self._next_look, self._at_once = 0.0, _MOST_AT_ONCE

    def run(self, train: Callable[[], T]) -> T:
        """Join the job, run rounds until one is complete, and drop the connection to the join queue."""
        if not is_initialized():
            self._join()
        try:
            groups.world.backend.recovery_endpoint()  # raises if the backend does not survive deaths
            if (size := groups.world.size) < self._terms.min_ranks:
                raise UsageError(f"min_ranks is {self._terms.min_ranks}, and there are {size}")
            self._is_joiner = current_job().is_joiner
            self._size = 0 if self._is_joiner else size
            self._state.commit()  # a death before the function's first commit restores these values
            while True:
                try:
                    return self._round(train)
                except WorldChange as change:
                    self._grow(change.attempt)
                except GroupError as error:
                    self._shrink(error)
        except BaseException:
            if is_initialized():
                destroy_process_group()
            raise
        finally:
            self._state.at_commit(None)
            found, self._found = self._found, None
            if found is not None:
                found.close()

    def _join(self) -> None:
        if not config.get("FASTCOLL_JOINER"):
            init_process_group()
            return
        try:
            join_running_job(self._address)
        except JobEndedError as error:
            _log.warning("%s", error)
            raise SystemExit(0) from None

    def _round(self, train: Callable[[], T]) -> T:
        self._state.at_commit(None)  # commits admit joiners only inside the function
        self._agree()
        self._state.at_commit(self._admit_at_commit)
        if self._admits():
            with suppress(StoreError):
                self._join_queue()  # opens the queue again if an earlier run has shut it
        result = train()
        barrier()  # a rank that is still in the function may need the others
        if self._admits():
            with suppress(StoreError):
                self._join_queue().shut()
        return result

    def _admits(self) -> bool:
        """Return whether this rank admits joiners."""
        return groups.world.rank == 0 and self._grows and bool(self._address)

    def _agree(self) -> None:
        """Copy the state of the first rank that has one. It is the longest-lived one, as ranks are in order of age.

        If joiners are at another point of the program, raise an error on all ranks.
        """
        mine = [self._has_state, bool(self._address), self._size, self._restarts, self._number]
        size = groups.world.size
        rows = np.empty((size, len(mine)), np.int64)
        try:
            all_gather_single(rows.reshape(-1), np.array(mine, np.int64))
        except MismatchError as error:
            if not self._has_state or size <= self._size:
                raise
            raise self._displaced(range(self._size, size), str(error)) from None
        has_state, finds, sizes, restarts, numbers = rows.T.tolist()
        if self._is_joiner and not any(has_state):
            raise RendezvousError("the state is lost: every rank that had it has died, and joiners have none")
        source = has_state.index(max(has_state))
        if others := [rank for rank, number in enumerate(numbers) if number != numbers[source]]:
            where = (
                f"these are in run {numbers[others[0]]} of their program, and not in run {numbers[source]}"
            )
            raise self._displaced(others, where)
        self._state.sync(source)
        barrier()  # a joiner may be unable to load the state
        current_job().is_joiner = False  # in a later run it is a rank like the others
        self._has_state, self._grows = True, all(finds)
        before, self._size, self._restarts = sizes[source], sizes[source], restarts[source]

        def count() -> None:
            self._size = size

        if before != size and self._terms.on_change is not None:
            self._state.at_commit(count)  # on_change may commit and then fail because of a death
            self._terms.on_change(before, size)
            self._state.commit()  # a death before the next commit must not undo what it has set for this size
        count()

    def _displaced(self, ranks: Sequence[int], what: str) -> FastcollError:
        """Return this rank's error for a round in which joiners are at another point of the program than the others.

        With a UsageError the joiners exit; with an AbortedError the other ranks go on without them.
        """
        if groups.world.rank not in ranks:
            return AbortedError(f"joiners cannot take part: {what}", ranks)
        return UsageError(f"this joiner is at another point of the program than the ranks of the job: {what}")

    def _shrink(self, error: GroupError) -> None:
        """Continue from the last commit with the ranks that are left."""
        if groups.world.size <= self._size:  # else joiners have not copied the state yet, and one was lost
            self._restarts += 1
        least, most = self._terms.min_ranks, self._terms.max_restarts
        if most is not None and self._restarts > most:
            raise type(error)(f"{error} (after {most} restarts, the most)", error.ranks) from error
        size = shrink().size
        if size < least:
            few = f"{size} {'rank is' if size == 1 else 'ranks are'} left, and min_ranks is {least}"
            raise type(error)(f"{error}; {few}", error.ranks) from error
        if groups.world.rank == 0:
            _log.warning(
                "%s; %s from the last commit", error, "1 rank goes on" if size == 1 else f"{size} ranks go on"
            )
        self._state.restore()

    # ---- joiners -----------------------------------------------------------------------------------------------

    def _admit_at_commit(self) -> None:
        """Raise WorldChange on all ranks if joiners are to be admitted at this commit; rank 0 decides."""
        if not self._grows:
            return
        number, joiners = self._next_attempt() if groups.world.rank == 0 else (0, [])
        found = np.array([number, len(joiners)], np.int64)
        broadcast(found, 0)
        if found[1]:
            raise WorldChange(Attempt(int(found[0]), int(found[1]), joiners))

    def _next_attempt(self) -> tuple[int, list[int]]:
        """Return the number of the next attempt to admit joiners, and the joiners.

        If there are no joiners, return (0, []). Most calls do so without a request to the store.
        """
        now, most = time.monotonic(), self._terms.max_ranks
        room = self._at_once if most is None else min(self._at_once, most - groups.world.size)
        if not self._address or now < self._next_look or room <= 0:
            return 0, []
        try:
            ready, asked = self._join_queue().ready()
            self._next_look = now + (_ASKED_SECONDS if asked else _LOOK_SECONDS)
            return (self._join_queue().next_attempt(), ready[:room]) if ready else (0, [])
        except StoreError as error:
            _log.warning("joiners are no longer admitted: %s", error)
            self._address = ""
            return 0, []

    def _grow(self, attempt: Attempt) -> None:
        self._next_look = time.monotonic() + _LOOK_SECONDS
        try:
            join_queue = self._join_queue()
        except StoreError as error:
            _log.warning("joiners are not admitted: %s", error)
            return  # the other ranks cannot make the new world without this rank, so they go on, too
        try:
            grow(join_queue, attempt)
            self._at_once = _MOST_AT_ONCE
        except NotGrownError as error:
            self._at_once = 1  # try one joiner at a time, so that a failing one does not keep the others out
            if groups.world.rank == 0:
                _log.warning("%s; the job goes on without them", error)

    def _join_queue(self) -> JoinQueue:
        if self._found is None:
            found = JoinQueue(self._address, _STORE_SECONDS)
            try:
                found.open()
            except BaseException:
                found.close()
                raise
            self._found = found
        return self._found
