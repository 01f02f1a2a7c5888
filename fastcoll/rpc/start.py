"""`init_rpc` and `shutdown`: how a process becomes a worker, and how it leaves.

If there is a default group that fits the arguments of `init_rpc`, its ranks become the workers and meet in the group's
store. Otherwise the workers meet as for `init_process_group`. They exchange their names and the addresses at which they
listen (rendezvous/listener.py); the job's secret authenticates every connection. A worker connects to another worker
when it first calls that worker. termination.py describes the graceful shutdown.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from .. import config
from ..core.monitor import describe_exit
from ..core.operands import positive_seconds, whole
from ..core.work import Timeout, seconds
from ..errors import (
    AbortedError,
    ArgumentTypeError,
    PeerDiedError,
    RpcTimeoutError,
    UnavailableError,
    UsageError,
)
from ..job.discovery import find_others
from ..job.groups import groups
from ..job.lease import StoreLease
from ..job.leaving import ExitHook
from ..job.world import current_job
from ..rendezvous.assemble import GroupMeeting, assemble
from ..rendezvous.detect import detect
from ..rendezvous.dials import Dial, dial_all
from ..rendezvous.join import join
from ..rendezvous.listener import Roster, gather
from ..store import PrefixStore, Store
from ..store.opening import ConnectionKind, Opening
from ..store.secret import check_unpickling
from ..system.forks import at_fork
from ..system.processes import Member, forget, gone_among
from . import calls
from .agent import Agent, current_agent, set_current
from .references import References
from .termination import Termination
from .worker_info import WorkerInfo

_DEFAULT_SECONDS = 60.0  # torch's default
_LISTEN_SECONDS = 2.0  # a worker whose address refuses connections for this long is gone
_DIALED_SECONDS = 2.0  # the time to finish connections that other workers open while this one leaves
_EXIT_SECONDS = 10.0  # how long worker 0 keeps rpc's own store open for the other workers


class BackendType(Enum):
    """torch's only RPC backend; the choice has no effect here."""

    TENSORPIPE = "TENSORPIPE"


@dataclass
class RpcBackendOptions:
    """Options of `init_rpc`.

    Attributes:
        num_worker_threads: how many idle threads are kept for the calls of other workers; while all are busy, more are
            started.
        rpc_timeout: default timeout of calls in seconds; 0: without limit.
        init_method: where the workers meet, as for `init_process_group`.
        device_maps, devices: must be empty: tensors are sent through host memory.
    """

    num_worker_threads: int = 16
    rpc_timeout: float = _DEFAULT_SECONDS
    init_method: str = "env://"
    device_maps: Any = None
    devices: Any = None

    def __post_init__(self) -> None:
        if whole("num_worker_threads", self.num_worker_threads) < 1:
            raise UsageError(f"num_worker_threads is {self.num_worker_threads}; give 1 or more")
        if self.rpc_timeout != 0:
            self.rpc_timeout = positive_seconds(self.rpc_timeout, _DEFAULT_SECONDS)
        if self.device_maps or self.devices:
            raise UnavailableError(
                "device_maps and devices: rpc does not send tensors of GPUs; move them to the CPU"
            )


TensorPipeRpcBackendOptions = RpcBackendOptions


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Become the worker `name`, which other workers can call. Blocks until all workers have joined.

    Args:
        name: this worker's name, unique among all workers.
        backend: None or BackendType.TENSORPIPE, without effect.
        rank, world_size: this worker's id and the number of workers; default: those of the default group, or what
            `init_process_group` would find in the environment.
        rpc_backend_options: a RpcBackendOptions.

    Raises:
        UsageError: an argument is wrong, two workers have the same name or rank, or world sizes differ; or neither the
            arguments nor the environment name the other workers.
        ArgumentTypeError: an argument has a wrong type.
        RendezvousError: the other workers did not join in time, or have another secret.
        PeerDiedError: a worker died before all had joined.
        UnavailableError: the job has no secret (FASTCOLL_INSECURE=1), so anyone could run code here.

    Examples:
        >>> rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"name is {name!r:.150}; give this worker a name")
    WorkerInfo(name, 0)  # raises if the name is not allowed
    if backend is not None and not isinstance(backend, Enum):
        raise ArgumentTypeError(
            f"Argument backend must be a member of BackendType, not {backend!r:.80}; leave it out"
        )
    if backend is not None and backend.name != BackendType.TENSORPIPE.name:
        raise UsageError(f"there is no backend {backend!r} of rpc; leave it out")
    options = RpcBackendOptions() if rpc_backend_options is None else rpc_backend_options
    if not isinstance(options, RpcBackendOptions):
        raise ArgumentTypeError(
            f"Argument rpc_backend_options must be an instance of RpcBackendOptions, not {options!r:.80}"
        )
    if _Running.it is not None:
        raise UsageError("RPC is already initialized in this process; call shutdown first")
    config.check()
    check_unpickling("a worker runs the functions that other workers send")
    size = -1 if world_size is None else whole("world_size", world_size)
    _Running.it = _start(name, whole("rank", rank), size, options)
    _exit_hook.set()


def shutdown(graceful: bool = True, timeout: Timeout = None) -> None:
    """Stop being a worker.

    Args:
        graceful: wait until all workers have called this and all calls are answered. For calls that timed out at their
            callers, wait up to the timeout of `init_rpc`. False: leave now; calls of and to this worker that are under
            way raise AbortedError.
        timeout: seconds or timedelta to wait for the others; None or 0: until all have called this.

    Raises:
        PeerDiedError, AbortedError: a worker died or left early; this worker has left, too.
        RpcTimeoutError: other workers did not call this in time, or calls did not end; the text names them. This worker
            has left.
        NotInitializedError: `init_rpc` was not called.
    """
    agent = current_agent()
    running = _Running.it
    assert running is not None, "there is an agent"
    exit_reason = "left"
    try:
        if graceful:
            running.termination.finish(seconds(timeout, 0.0))
    except BaseException as error:
        exit_reason = describe_exit(error)
        raise
    finally:
        running.leave(exit_reason)
    del agent


class _Found(NamedTuple):
    """What `_meet` returns: the processes of the workers, and the store in which they meet."""

    store: Store
    members: Sequence[Member]
    rank: int
    limit: float
    lease: StoreLease | None  # on a store of rpc's own; None: the store belongs to the default group


class _Running:
    """This process as a worker, until it leaves."""

    it: _Running | None = None

    def __init__(
        self, agent: Agent, references: References, termination: Termination, found: _Found, roster: Roster
    ) -> None:
        self.agent, self.references, self.termination = agent, references, termination
        self._found, self._roster = found, roster

    def leave(self, exit_reason: str) -> None:
        """Close everything, and send the exit reason to the others."""
        if _Running.it is not self:
            return
        _Running.it = None
        _exit_hook.take_back()
        with ExitStack() as steps:
            if self._found.lease is not None:
                steps.callback(forget, self._found.members)
                steps.callback(self._found.lease.leave, _EXIT_SECONDS)
            # Connections that are dialed meanwhile are still accepted, and get the exit reason (`Agent.take_over`).
            steps.callback(self._roster.leave, _DIALED_SECONDS)
            steps.callback(self.references.close)
            steps.callback(set_current, None)
            # This last callback runs first, so that late calls of others do not reach a half-closed worker.
            steps.callback(self.agent.close, exit_reason, AbortedError("rpc was shut down"))


def _start(name: str, rank: int, size: int, options: RpcBackendOptions) -> _Running:
    joined = threading.Event()
    rosters: list[Roster] = []
    with ExitStack() as undo:
        found = _meet(rank, size, options, undo)
        doing = f"joining rpc as {name}"
        store, members, limit = found.store, found.members, found.limit
        names = assemble(PrefixStore("names", store), members, found.rank, name, limit, doing)
        _check_names(names, members)
        workers = [WorkerInfo(each, number) for number, each in enumerate(names)]

        def dial(to: int, until: float) -> Any:
            if not joined.wait(max(until - time.monotonic(), 0.0)):
                raise RpcTimeoutError(f"worker {workers[to].name} was not reached in time: {doing}")
            agent.check_open()  # it is closed if joining has failed
            return _dialed(rosters[0], members, workers[to], until, agent.check_open)

        undo.callback(joined.set)
        agent = Agent(workers, members, found.rank, dial, options.rpc_timeout, options.num_worker_threads)
        undo.callback(agent.close, "left", AbortedError("init_rpc failed"))
        undo.callback(set_current, None)
        set_current(agent)  # before `gather`: from then on, calls of workers that have joined may arrive
        calls.serve(agent)
        references, termination = References(agent), Termination(agent)
        undo.callback(references.close)

        def deliver(opening: Opening, connection: Any) -> None:
            if opening.kind is ConnectionKind.RPC:
                agent.take_over(connection, opening.rank)
            else:
                connection.close()

        with GroupMeeting(PrefixStore("places", store), members, found.rank, limit, doing) as meeting:
            running_roster = gather(meeting, members, found.rank, deliver)
        rosters.append(running_roster)
        running = _Running(agent, references, termination, found, running_roster)
        joined.set()
        undo.pop_all()
    return running


def _meet(rank: int, size: int, options: RpcBackendOptions, undo: ExitStack) -> _Found:
    """Find the other workers: take the ranks of the default group if they fit the arguments, else meet anew."""
    if groups.initialized and options.init_method == "env://":
        job, lease = current_job(), current_job().lease
        if rank in (-1, lease.rank) and size in (-1, len(lease.members)):
            store = PrefixStore(f"rpc{job.number('rpc')}", lease.store)
            return _Found(store, lease.members, lease.rank, job.timeout, None)
    limit = config.get("FASTCOLL_TIMEOUT")
    began = time.monotonic()
    if options.init_method == "env://":
        detected = detect(os.environ, *(None if each == -1 else each for each in (rank, size)))
        if detected.rank is None and detected.world_size is None:
            raise UsageError(
                "environment variable RANK expected, but not set, nor those of any launcher; pass rank and world_size, "
                "or start with python -m fastcoll.launch"
            )
    # "fastcoll-rpc" makes `file://` use a file of rpc's own: a process group may meet in the given one.
    found = find_others(options.init_method, rank, size, limit, "fastcoll-rpc", "rpc", "fastcoll-rpc")
    undo.callback(found.close, 0.5)
    members = join(found.store, found.rank, found.world_size, "rpc", limit, began=began, claimed=found.claim)
    undo.callback(forget, members)
    lease = StoreLease(found.store, members, found.rank, partial(found.close, 0.0))
    lease.settle()
    return _Found(PrefixStore("rpc", found.store), members, found.rank, limit, lease)


def _check_names(names: Sequence[str], members: Sequence[Member]) -> None:
    for rank, name in enumerate(names):
        if (first := names.index(name)) != rank:
            raise UsageError(
                f"the name {name!r} is not unique, two workers have it: {members[first]} and {members[rank]}; "
                "give each another name"
            )


def _dialed(
    roster: Roster,
    members: Sequence[Member],
    to: WorkerInfo,
    until: float,
    check_open: Callable[[], None],
) -> Any:
    """Connect to a worker.

    Raises:
        PeerDiedError: it is gone.
        RpcTimeoutError: it was not reached by the time `until`.

    Also raises what `check_open` raises, which is called about every 50 ms.
    """
    place, member = roster.places[to.id], members[to.id]
    dial = Dial(
        roster.endpoint,
        to.id,
        f"worker {to.name}",
        ConnectionKind.RPC,
        0,
        roster.interfaces[0],
        (place.addresses[0], place.ports[0]),
    )

    def look() -> None:
        check_open()
        if time.monotonic() > until:
            raise RpcTimeoutError(f"worker {to.name}, {member}, was not reached in time: {dial.reason}")
        since = dial.refused_since
        late = since is not None and time.monotonic() - since > _LISTEN_SECONDS
        if late or gone_among([member]):
            raise PeerDiedError(f"worker {to.name}, {member}, died or has left", [to.id])

    dial_all([dial], look)
    return dial.connection


def _leave_at_exit(error: BaseException | None) -> None:
    if _Running.it is not None:
        _Running.it.leave(describe_exit(error, ended=True))


def _drop_inherited() -> None:
    """Forget the agent in a child process made by fork, because the child is not a worker."""
    running, _Running.it = _Running.it, None
    set_current(None)
    if running is not None:
        _exit_hook.take_back()
        running.references.close_inherited()
        running.agent.close_inherited()


_exit_hook = ExitHook(_leave_at_exit)
at_fork("remote calls", _drop_inherited)
