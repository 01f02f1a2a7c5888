"""The default group, of all ranks (the *world*): how a process joins it, and how it leaves it.

Joining: find the other ranks (discovery.py), exchange identities (rendezvous/join.py), and make the group of all
ranks. Meanwhile, another thread imports Numba. Leaving: close the groups, newest first (leaving.py), then the store. A
script that does not call `destroy_process_group` leaves at exit.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ParamSpec

from .. import config, failpoints
from ..core.group import ProcessGroup
from ..core.monitor import describe_exit
from ..core.operands import check_unused, positive_seconds, whole
from ..core.work import Timeout
from ..errors import (
    GroupError,
    NotInitializedError,
    RendezvousError,
    UsageError,
)
from ..metrics import in_rank
from ..record import recorder
from ..rendezvous.attempts import ProcessName, place_of
from ..rendezvous.detect import number_in
from ..rendezvous.join import join
from ..store import Store
from ..system.forks import at_fork
from ..system.processes import Member, forget, gone_among, set_process_rank, this_process
from . import backends
from .backends import BackendChoice, parse_backend
from .beginning import begin, met_elsewhere
from .discovery import Found, finder
from .groups import Group, NonMember, groups
from .job import Job, make_world
from .joining import Start, come_in
from .lease import StoreLease
from .leaving import ExitHook, close, leave
from .shared_arrays import shared_arrays
from .standalone import leave_groups

_log = logging.getLogger("fastcoll")

# The longest times for which rank 0 keeps the store open for other ranks: after a failed start, so that they can read
# the reason; at exit, so that they can finish making groups.
_FAILED_START_SECONDS = 0.5
_EXIT_SECONDS = 10.0

_P = ParamSpec("_P")

_job: Job | None = None
_starts = 0  # how often this process has joined a job
_joining = threading.Lock()  # held by the thread that is joining a job


def _after_fork() -> None:
    global _joining
    _joining = threading.Lock()  # the thread that held it is not in this process


at_fork("world", _after_fork)


def current_job() -> Job:
    """Return this process's job; raise if there is none, or if a fork has copied the job from the parent."""
    if groups.inherited is not None:
        raise groups.inherited
    if _job is None:
        raise NotInitializedError("there is no default process group; call init_process_group first")
    return _job


def replace_job(job: Job, world: ProcessGroup) -> None:
    """Replace this process's job and its default group; close all groups of the old job."""
    global _job
    before, made, choice = current_job(), list(groups.backends), groups.backends[groups.world]
    groups.clear()
    groups.add(world, choice)
    _job = job
    set_process_rank(job.lease.rank)
    with ExitStack() as steps:  # in reverse order
        steps.callback(in_rank.follow, job.lease.members, job.lease.rank)
        steps.callback(forget, before.lease.members)
        steps.callback(before.lease.close_store)
        close(made)


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's rank among the ranks of its node, for example to choose a GPU.

    The result is LOCAL_RANK, which launchers set. If this variable is not set, the result is the number of lower ranks
    on this node; before `init_process_group`, it is `fallback_rank`.

    Args:
        fallback_rank: the result if LOCAL_RANK is not set and there is no default group.

    Raises:
        UsageError: LOCAL_RANK is not a whole number; or it is not set, there is no default group, and `fallback_rank`
            is None.
    """
    local_rank = number_in(os.environ, "LOCAL_RANK", 0)
    if local_rank is not None:
        return local_rank
    if _job is not None and groups.inherited is None:
        members, rank = _job.lease.members, _job.lease.rank
        return sum(member.same_node(members[rank]) for member in members[:rank])
    if fallback_rank is None:
        raise UsageError("LOCAL_RANK is not set and there is no default group; give fallback_rank")
    return whole("fallback_rank", fallback_rank)


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | Any = None,
    group_name: str = "",
    pg_options: None = None,
    device_id: Any = None,
) -> None:
    """Join the other processes of the job, and make the default group. Block until all have joined.

    Args:
        backend: "auto" (the default), "shm", "tcp", "mpi" or "gloo" (the CPU default, for scripts that ask for it),
            or one for each kind of device: "cpu:auto,cuda:nccl".
        init_method: a URL. "env://" (the default) reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT,
            or the variables of mpirun or Slurm; without any of these it makes a world of one rank. Other URLs are
            "tcp://host:port", "tcp://multicast-address:port", "file:///path", and those with a scheme added by
            `register_rendezvous_handler`.
        timeout: seconds or timedelta, for joining and for every call on the group; the default is
            FASTCOLL_TIMEOUT (1800 s), the most 1e9 s.
        world_size, rank: the size of the job and this process's rank; -1: taken from `init_method`.
        store: a store that all processes share, of fastcoll or torch.distributed, instead of `init_method`; needs
            rank and world_size. fastcoll does not close it.
        group_name: distinguishes jobs that use one multicast address or one file.
        pg_options: must be None; no backend has options.
        device_id: this rank's GPU. It is checked and has no effect, because each array knows its GPU.

    Raises:
        UsageError: an argument is wrong, the ranks' arguments do not fit together, the process already has
            a default group, or another thread is joining.
        UnavailableError: the backend is not available, or cannot connect these nodes.
        RendezvousError: other processes did not join in time (StoreTimeoutError), or the store is lost.
        PeerDiedError: a process that had joined died before all processes had joined.
        ResourceError: no shared memory or no port.

    Examples:
        >>> import fastcoll as dist
        >>> dist.init_process_group()
    """
    by_environment = store is None and init_method in (None, "env://")
    if config.get("FASTCOLL_JOINER") and by_environment:
        check_unused(pg_options, device_id)
        join_running_job(config.get("FASTCOLL_ELASTIC"), backend, timeout)
        return
    choice, limit = _prepare(backend, timeout)
    check_unused(pg_options, device_id)
    rank, world_size = whole("rank", rank), whole("world_size", world_size)
    place = _place()
    begins = place is not None and rank in (-1, place.rank) and world_size in (-1, place.size)
    if place is not None and begins and by_environment and not choice.initialises_mpi:
        _enter(functools.partial(_begin, place, choice, limit), choice)
        return
    find = finder(init_method, store, rank, world_size, limit, group_name, choice)
    _enter(functools.partial(_start, find, choice, limit), choice)
    if place is not None:
        met_elsewhere(config.get("FASTCOLL_ELASTIC"), place)


def join_running_job(address: str, backend: str | None = None, timeout: Timeout = None) -> None:
    """Join a running job of `fastcoll.elastic.run`, whose queue of joiners is in a store.

    Args:
        address: HOST:PORT of the store.
        backend, timeout: as for `init_process_group`; the timeout also limits the wait to be admitted.

    Raises:
        RendezvousError: the job has ended, or did not admit this process in time (StoreTimeoutError).
        UsageError: the address is not HOST:PORT, or the job has another backend.
    """
    choice, limit = _prepare(backend, timeout)
    backends.load(choice)  # now, because later the ranks of the job would wait for this import
    place, me = _place(), this_process()
    name = f"{me.boot_id}/{me.pid}/{me.start_time}" if place is None else place.name

    def enter() -> tuple[Job, ProcessGroup]:
        start = _start_in_store(choice, limit)
        first = None if place is None else begin(address, place, limit, start)
        return first or come_in(address, name, limit, start)

    _enter(enter, choice)


def _place() -> ProcessName | None:
    """Return this process's name and rank for an elastic job's first meeting (beginning.py).

    The result is None if FASTCOLL_PLACE is not set, or if this process has joined a job before.
    """
    text = config.get("FASTCOLL_PLACE")
    return place_of(text) if text and not _starts else None


def _begin(place: ProcessName, choice: BackendChoice, limit: float) -> tuple[Job, ProcessGroup]:
    """Meet the other ranks in the launcher's store."""
    first = begin(config.get("FASTCOLL_ELASTIC"), place, limit, _start_in_store(choice, limit))
    if first is None:
        raise RendezvousError(
            f"the job has begun without rank {place.rank}: the others have met by other means"
        )
    return first


def _start_in_store(choice: BackendChoice, limit: float) -> Start:
    """Return a function that joins through a store that outlives the ranks (`Start` in joining.py).

    The job and its world then have the timeout `limit`.
    """

    def start(
        store: Store,
        rank: int,
        size: int,
        close: Callable[[], None],
        confirm: Callable[[ProcessGroup], None],
        within: float,
        began: float,
    ) -> tuple[Job, ProcessGroup]:
        found = Found(store, rank, size, lambda _: close(), confirm)
        job, world = _start(lambda: found, choice, within, began)
        job.timeout = world.timeout = limit
        return job, world

    return start


def _prepare(backend: str | None, timeout: Timeout) -> tuple[BackendChoice, float]:
    """Read the settings and failpoints; return the backends and the timeout in seconds."""
    config.check()
    failpoints.arm(config.get("FASTCOLL_FAILPOINT"))
    failpoints.reach("start.enter")
    return parse_backend(backend), positive_seconds(timeout, config.get("FASTCOLL_TIMEOUT"))


def _enter(start: Callable[[], tuple[Job, ProcessGroup]], choice: BackendChoice) -> None:
    """Join a job by `start`, and set up the hook that leaves it at exit."""
    global _job, _starts
    if not _joining.acquire(blocking=False):
        raise UsageError(
            "this process is joining a job already, on another thread; a process is one rank: start one for each rank, "
            "as by Dask's LocalCluster(processes=True) or joblib's backend 'loky'"
        )
    try:
        if groups.initialized and groups.inherited is None:
            raise UsageError("there is a default process group already; call destroy_process_group first")
        groups.clear()
        with recorder.joining():
            job, world = start()
        groups.add(world, choice)
        _job, _starts = job, _starts + 1
    finally:
        _joining.release()
    if config.get("FASTCOLL_SHARED_ARRAYS"):
        shared_arrays.enable()
    # Last, because exit hooks run newest first: a hook of the store, which closes the store, must run after this one.
    _exit_hook.set()


def destroy_process_group(group: Group = None) -> None:
    """Leave a group; with None or the default group, leave all groups of the job and the job itself.

    Asynchronous operations under way are completed first, within the group's timeout. While an exception is handled
    (in `except` or `finally`), this does not wait, and the other ranks get an error with the exception's text. If other
    ranks are still inside calls on the group, these calls raise, except calls in which this rank has done its part.
    When rank 0 leaves the job, it waits for ranks that are still making groups.

    Raises:
        GroupError: operations were lost that the program did not wait for: receives without a sender, or operations
            that failed because of a peer. The group is destroyed all the same.
        UsageError: `group` is not a group.
        NotInitializedError: the group was destroyed before.
    """
    if isinstance(group, NonMember):
        return
    current: Group = groups.world if group is None else group
    if isinstance(group, ProcessGroup) and group in groups.standalone:
        lost = leave_groups([group], sys.exc_info()[1])
    elif not groups.initialized or current not in groups.backends:
        raise NotInitializedError(f"the group {group or 'WORLD'} does not exist, or was destroyed before")
    elif current is groups.world:
        lost = _leave(sys.exc_info()[1], None)
    elif isinstance(current, ProcessGroup):
        del groups.backends[current]
        lost = None
        if groups.inherited is None:
            lost = leave([current], sys.exc_info()[1])
            if _job is not None:  # None: another thread has left the job meanwhile
                _job.left(current)
    else:
        return
    if lost is not None:
        raise lost


def _as_context(init: Callable[_P, None]) -> Callable[_P, AbstractContextManager[ProcessGroup]]:
    """Return the context manager `world`, which takes the arguments of `init`."""

    @contextmanager
    @functools.wraps(init, assigned=("__module__",))
    def world(*args: _P.args, **kwargs: _P.kwargs) -> Iterator[ProcessGroup]:
        """Call `init_process_group`, and `destroy_process_group` at the end of the block.

        Args:
            backend, init_method, timeout, world_size, rank, store, group_name, pg_options, device_id: as for
                `init_process_group`.

        After an exception in the block this rank leaves at once, without waiting for ranks that still make groups. The
        block may call `destroy_process_group` itself.

        Yields:
            The default group.

        Examples:
            >>> with dist.world():
            ...     dist.all_reduce(x)
        """
        init(*args, **kwargs)
        mine = _starts
        try:
            yield groups.world
        except BaseException as error:
            if groups.initialized and _starts == mine:
                _leave(error, 0.0)
            raise
        if groups.initialized and _starts == mine:
            destroy_process_group()

    world.__qualname__ = "world"
    return world


world = _as_context(init_process_group)


def _start(
    find: Callable[[], Found], choice: BackendChoice, limit: float, began: float | None = None
) -> tuple[Job, ProcessGroup]:
    """Find and join the other ranks, and make the world; after a failure, close everything.

    `limit` counts from `began`, a value of time.monotonic(); None: from now.
    """
    from concurrent.futures import ThreadPoolExecutor

    began = began or time.monotonic()
    # Another thread imports Numba while this one waits for the others: if one rank is late, the world is ready 0.02 s
    # after that rank arrives instead of 0.4 s (two ranks, Numba 0.68, 2 cores of an EPYC).
    with ThreadPoolExecutor(1, "fastcoll-import") as importer, ExitStack() as undo:
        loading = importer.submit(backends.load, choice)
        undo.callback(_sweep)
        found = find()
        set_process_rank(found.rank)
        failpoints.arm(config.get("FASTCOLL_FAILPOINT"), found.rank)
        failpoints.reach("start.after_rendezvous")
        if found.rank == 0:
            config.warn_of_unknown()

        def close_store(_: object, error: BaseException | None, trace: object) -> None:
            # After Ctrl-C close the store at once.
            found.close(_FAILED_START_SECONDS if isinstance(error, Exception) else 0.0)

        undo.push(close_store)
        members = join(
            found.store, found.rank, found.world_size, str(choice), limit, began=began, claimed=found.claim
        )
        undo.callback(forget, members)
        failpoints.reach("start.after_join")
        loading.result()
        lease = StoreLease(found.store, members, found.rank, lambda: found.close(0.0))
        job, world = make_world(lease, choice, limit, "making the default group")
        undo.callback(world.close)
        undo.callback(in_rank.stop)
        in_rank.follow(members, found.rank)
        failpoints.reach("start.after_world")
        found.confirm(world)
        undo.pop_all()
    return job, world


def _sweep() -> None:
    """Unlink the segments of ranks that died while they made the group, and while this rank was still joining them."""
    from ..shm.segment import sweep  # imports NumPy

    sweep()


def _leave(error: BaseException | None, grace: float | None, ended: bool = False) -> GroupError | None:
    """Leave every group and the job; return the error of `leave` (leaving.py), or None.

    `ended`: the process exits, and the program has not left the job.
    """
    if ended:
        _log.info("destroy_process_group was not called; leaving at exit")
    failpoints.reach("destroy.enter")
    mine, exit_reason = list(groups.backends) if groups.inherited is None else [], describe_exit(error, ended)
    return leave(mine, error, functools.partial(_let_go, grace, exit_reason))


def _let_go(grace: float | None, exit_reason: str) -> None:
    """Close every group and release the job's store, even if some steps fail."""
    global _job
    job, _job = _job, None
    made, inherited = list(groups.backends), groups.inherited
    with ExitStack() as steps:  # in reverse order; Ctrl-C in one step does not prevent the others
        if inherited is None and job is not None:
            lease, gone = job.lease, list[Member]()
            steps.callback(lambda: failpoints.reach("destroy.after_store"))
            steps.callback(in_rank.stop)
            steps.callback(forget, lease.members)
            steps.callback(lease.leave, job.timeout if grace is None else grace, gone, exit_reason)
            steps.callback(lambda: failpoints.reach("destroy.after_groups"))
            steps.callback(close, made, exit_reason)
            if lease.rank == 0:  # the only rank that waits for others
                steps.callback(lambda: gone.extend(gone_among(lease.members)))
        groups.clear()
        _exit_hook.take_back()


_exit_hook = ExitHook(functools.partial(_leave, grace=_EXIT_SECONDS, ended=True))
