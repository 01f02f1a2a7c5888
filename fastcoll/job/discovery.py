"""How a process finds the other ranks of its job: by an init method, through MPI, or in a store that the user passes.

A store may have served earlier jobs. A store that the user passes is divided into numbered parts, one for each job. An
init method may still lead to the store of the previous job; then the process waits until rank 0 has left that job.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from ..core.group import ProcessGroup
from ..errors import RendezvousError, StoreError, StoreTimeoutError, UsageError
from ..rendezvous import has_handler, meet
from ..rendezvous.join import Claim, claim, has_failed, registered
from ..store import PrefixStore, Store, imported
from ..store.store import Rendezvous, limited
from ..store.waiting import LateWarning
from ..system.processes import dead_among, forget, this_process
from .backends import BackendChoice
from .lease import has_left, times_settled

_CLOSE_SECONDS = 1.0  # timeout of a user's store for a leaving rank; short, because the server may be stopped


class Found(NamedTuple):
    """The result of finding the others: the job's part of a store, this process's rank, and the size of the world."""

    store: Store
    rank: int
    world_size: int
    close: Callable[[float], None]
    """`close(seconds)` releases the store; the rank that serves it waits up to `seconds` for the other ranks first."""
    confirm: Callable[[ProcessGroup], None] = lambda world: None
    """Raises if the new world must not be used, because an attempt to meet or to join has failed."""
    claim: Claim | None = None
    """The result of claiming the rank in the store, if that has been done."""


def finder(
    init_method: str | None,
    store: Store | None,
    rank: int,
    world_size: int,
    limit: float,
    group_name: str,
    choice: BackendChoice,
) -> Callable[[], Found]:
    """Return the function that finds the other ranks by these arguments of `init_process_group`."""
    for name, text in (("init_method", init_method or ""), ("group_name", group_name)):
        if not isinstance(text, str):
            raise UsageError(f"{name} is {text!r}, a {type(text).__name__}; give a str")
    addressed = init_method is not None or any(map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT")))
    if store is None and choice.initialises_mpi and not addressed:

        def meet_in_store_of_rank_0() -> Found:  # rank 0 makes a new store, and MPI sends its address
            from ..net.mpi.membership import meet_through_mpi  # imports sockets and Numba

            return _found(meet_through_mpi(rank, world_size, limit))

        return meet_in_store_of_rank_0
    if store is None:
        url = init_method or "env://"
        return functools.partial(find_others, url, rank, world_size, limit, group_name, str(choice))
    if init_method is not None:
        raise UsageError(f"store and init_method={init_method!r} are both given; give one of them")
    store = imported(store)
    if not 0 <= rank < world_size:
        raise UsageError(
            f"rank is {rank} and world_size is {world_size}; with a store give both, rank from 0 to world_size - 1"
        )
    return functools.partial(_use, store, rank, world_size, group_name)


def _found(meeting: Rendezvous, place: str = "fastcoll") -> Found:
    """Return the result of a rendezvous whose store has one job at a time."""
    return Found(PrefixStore(place, meeting.store), meeting.rank, meeting.world_size, meeting.close)


def _use(
    store: Store,
    rank: int,
    world_size: int,
    group_name: str,
    root: str = "fastcoll",
    close_store: Callable[[float], None] = lambda _: None,
) -> Found:
    """Return the part of a user's store for the next job, because each use of a store is a new job.

    All ranks use the part with the same number, which is in the store. The number moves on when the first rank leaves
    the job, also after a failed start, or when a process finds that the start has failed or its predecessor is gone.

        job             how many jobs are over: the number of the current job
        <number>/over   a counter: the process that raises it to 1 moves the number on
        <number>/...    the keys of the job with this number
    """
    ours = PrefixStore(f"{root}/{group_name}", store)

    def current() -> int:
        return int(ours.peek(["job"])[0] or 0)

    def move_on() -> None:
        if ours.add(f"{number}/over", 1) == 1:
            ours.add("job", 1)

    number = current()
    while True:
        job = PrefixStore(str(number), ours)
        if job.check(["over"]):  # the process that has raised it moves the number on
            number += 1
        elif has_failed(job) or _is_left(job, rank, "in this store", "group_name or PrefixStore"):
            move_on()
            number += 1
        elif (latest := current()) > number:
            # The job's ranks may have deleted the keys before they were read.
            number = latest
        else:
            break

    def close(linger: float) -> None:
        try:
            # StoreError: the store is gone, closed or out of reach.
            with limited(store, _CLOSE_SECONDS), suppress(StoreError):
                move_on()
                ours.retire(f"{number}/", world_size)
        finally:
            close_store(linger)

    return Found(job, rank, world_size, close)


def find_others(
    init_method: str,
    rank: int,
    world_size: int,
    limit: float,
    group_name: str,
    backend: str,
    place: str = "fastcoll",
) -> Found:
    """Meet the others by an init method. Repeat this while it leads to a previous job that rank 0 has not left yet.

    In the store of a previous job, this process's rank is claimed. The handler of a user's URL scheme may return the
    same store for each job, so `_use` divides that store. `backend` is the one that this rank was asked to use, `place`
    the prefix of the keys.
    """
    deadline, left = time.monotonic() + limit, limit
    late, handled = LateWarning(), has_handler(init_method)
    while True:
        meeting = meet(init_method, rank, world_size, left, group_name)
        try:
            if handled:
                return _use(meeting.store, meeting.rank, meeting.world_size, group_name, place, meeting.close)
            found = _found(meeting, place)
            claimed = claim(found.store, found.rank, found.world_size, backend)
            if claimed.owner is None or not times_settled(found.store, found.rank):
                return found._replace(claim=claimed)
            _is_left(found.store, found.rank, f"at {init_method}")  # raises if it never will be
        except BaseException as error:
            meeting.close()
            # StoreTimeoutError: the server is stopped or out of reach, so raise. Any other StoreError: the server is
            # closing. It serves an earlier job, of which this process is no part, so try again.
            if handled or not isinstance(error, StoreError) or isinstance(error, StoreTimeoutError):
                raise
        meeting.close()
        left = limit if handled else max(deadline - time.monotonic(), 0.001)
        late.look(f"starting at {init_method}", lambda: "rank 0 to leave the previous job")
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"{init_method} leads to a job in which rank {meeting.rank} has started before; give this job its own "
                "address, port or file"
            )
        time.sleep(0.02)


def _is_left(store: Store, rank: int, where: str, what: str = "address, port or file") -> bool:
    """Return whether the process that has joined this job as `rank` is this one, has left the job, or has died.

    UsageError: the job has started, and the process is another one that is alive. `where` is where the job has met; the
    error says that each job needs its own `what`.
    """
    owner, me = registered(store, rank), this_process()
    if owner is None:
        return False
    if owner.is_process(me) or has_left(store, rank):
        return True
    died = dead_among([owner])
    forget([owner])
    if not died and times_settled(store, rank):
        raise UsageError(
            f"rank {rank} is claimed by two processes, {owner.where}, whose job {where} has started, and {me.where}; "
            f"give each process its own rank, and each job its own {what}"
        )
    return bool(died)
