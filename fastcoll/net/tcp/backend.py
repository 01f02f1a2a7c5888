"""The backend of ranks on any hosts, over TCP connections between them.

Each call is prepared once for its operation, dtype and sizes: a plan and the words that the engine compares
with the peers'. What it does over the sockets is in engine.py; here is what comes before and after.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from ...core import signature
from ...core.backend import Backend
from ...core.gate import Gate
from ...core.group import ProcessGroup
from ...core.members import Member
from ...core.monitor import Wait
from ...core.operands import Array, divide
from ...core.operation import Call, Operation
from ...core.processes import cores_of
from ...core.reduce_op import ReduceOp
from ...core.status import AGAIN, DONE, GARBLED, GONE, MISMATCH, WORKED
from ...errors import AbortedError, ArrayError, CollectiveTimeoutError, GroupError
from ...kernels.reduce import HALVES, reducer
from ...kernels.sockets import CLOSED
from ...p2p.engine import Engine
from ...p2p.pipe import Pipe
from ...rendezvous import Store
from . import engine, words
from .context import NetContext, Prepared, limits_for
from .control import NetMonitor
from .fast import Fast, folded
from .mesh import Mesh
from .pipe import TcpPipe
from .plans.choose import plan_for
from .plans.shape import MEET_RANKS, Shape
from .plans.table import COLUMNS, Plan
from .rows import PIECE
from .sizes import sizes_of

_CLOSE_SECONDS = 5.0
_MOST_PREPARED = 1024
# Sweeps in vain before a thread sleeps: some 50 us where every rank has a core of its own.
_DEDICATED, _OVERSUBSCRIBED = 50, 1
_TRY = 1000  # ns that a sweep of messages in vain takes, about
# How long a rank whose peer has closed the connection waits for the reason, which travels on another one.
_REASON_SECONDS = 2.0


class TcpBackend(Backend):
    """Collectives and point-to-point between ranks on any hosts, through TCP."""

    name = "tcp"
    monitor: NetMonitor

    @classmethod
    def make(
        cls,
        store: Store,
        name: str,
        members: Sequence[Member],
        rank: int,
        timeout: float,
        crowd: Sequence[Member] | None = None,
    ) -> TcpBackend:
        """Meet the other members over the network; collective. The arguments are those of ShmBackend.make, and:

        Args:
            crowd: ranks that use the hosts' cores at the same time; None: the members.

        Raises:
            RendezvousError: the members cannot reach one another; names both, and the address.
            PeerDiedError, StoreTimeoutError: a member died or did not come.
        """
        mesh = Mesh.make(store, name, members, rank, timeout)
        return cls(
            Gate(name, [member.rank for member in members], rank, timeout), members, mesh, crowd or members
        )

    def __init__(self, gate: Gate, members: Sequence[Member], mesh: Mesh, crowd: Sequence[Member]) -> None:
        self.gate = gate
        self.monitor = mesh.monitor
        self._mesh = mesh
        patience = _patience(crowd, members[gate.rank])
        self._limits = limits_for(gate.size)
        self.context = NetContext(gate.size, gate.rank, self._limits, mesh.streams, patience)
        self.pipe = TcpPipe(mesh, self.monitor, patience * _TRY)
        self.messages: Engine
        self.route({})
        self._prepared: dict[Any, Prepared] = {}
        self._remembering = threading.Lock()
        self._releases_later = False  # closed in the middle of a call

    def route(self, near: Mapping[int, tuple[Pipe, int]]) -> None:
        """Let messages to some ranks take other pipes than connections; before the first message."""
        routes = [near.get(rank, (self.pipe, rank)) for rank in range(self.gate.size)]
        self.messages = Engine(routes, self.gate.rank, self.monitor, self.gate.timeout)

    def fast(self, group: ProcessGroup) -> Mapping[str, Callable[..., Any]]:
        return Fast(group, self.pipe, self.messages, self.run_prepared).table()

    # ---- a call ----------------------------------------------------------------------------------

    def _carry_out(self, prepared: Prepared, arrays: tuple[Array, ...], timeout: float | None = None) -> None:
        """The call itself, by the thread that has the turn."""
        self.gate.check_usable()
        try:
            if not prepared.ready:
                self._make_ready(prepared, timeout)
            code = engine.collective.call(self.context.address, prepared.address, arrays)
            if code != DONE:
                self._resume(code, prepared, arrays, timeout)
        except BaseException as error:
            self._torn(error, prepared)
            raise
        finally:
            if self._releases_later:
                self._release()

    def _prepare(
        self,
        operation: str,
        dtype: np.dtype[Any] | None,
        op: ReduceOp | None,
        root: int,
        nbytes: tuple[int, ...],
        parts: tuple[int, ...],
        choose: Callable[[Shape], Plan],
    ) -> Prepared:
        itemsize = dtype.itemsize if dtype is not None else 1
        if op is not None and itemsize > PIECE:
            raise ArrayError(f"an element of {dtype} has {itemsize} bytes; {operation} takes {PIECE} here")
        code = signature.encode(operation, dtype, op=op, parts=parts) | root << signature.ROOT_SHIFT
        folds = (
            reducer(folded(op, self.gate.size), dtype)[:2] if op is not None and dtype is not None else (0, 0)
        )
        half = dtype is not None and dtype.name in HALVES
        ordered = op is not None and (op.function is not None or half)
        call = Shape(
            operation,
            self.gate.size,
            self.gate.rank,
            nbytes,
            self._limits,
            itemsize,
            root=root,
            ordered=ordered,
        )
        sizes = sizes_of(call)
        balance = 0
        if self.gate.size > MEET_RANKS:
            balance = signature.balance(self.gate.rank, sizes.gives, sizes.takes)
        plan, stride = choose(call), self._limits.frame_stride
        prepared = Prepared(code, sizes, plan, stride, folds, itemsize, balance)
        return prepared

    def _remember(self, key: Any, prepared: Prepared) -> None:
        """Keep a prepared call for the next time, instead of the oldest one when there are many."""
        with self._remembering:
            while len(self._prepared) >= _MOST_PREPARED:
                del self._prepared[next(iter(self._prepared))]
            self._prepared[key] = prepared

    def _make_ready(self, prepared: Prepared, timeout: float | None) -> None:
        """Before a call's first time, by the thread that has the turn: room, and connections to all its peers."""
        self.context.make_room(prepared)
        peers = {*self.context.met, *prepared.peers}
        # First those that this rank dials, who need not have come yet; it is not to be missed by them as well.
        in_order = sorted(peers, key=lambda peer: (peer < self.gate.rank, peer))
        fds, streams = self.context.fds, range(self.context.streams)
        missing = [(peer, stream) for peer in in_order for stream in streams if fds[peer, stream] < 0]
        self._connect(missing, prepared, self.gate.timeout if timeout is None else timeout)
        self.gate.check_usable()  # a signal handler may have closed the group meanwhile
        prepared.ready = True

    def _connect(self, missing: Sequence[tuple[int, int]], prepared: Prepared, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        late: set[int] = set()
        for peer, stream in missing:
            left = 0.0 if late else max(0.0, deadline - time.monotonic())
            try:
                self.context.fds[peer, stream] = self._mesh.data(peer, stream, left)
            except CollectiveTimeoutError:
                if peer > self.gate.rank:
                    raise  # it could not be reached, and the error says how that failed
                late.add(peer)
        if late:
            what = signature.describe(prepared.call, prepared.shape)
            names = ", ".join(self.monitor.name(peer) for peer in sorted(late))
            raise CollectiveTimeoutError(
                f"{what}, call {self.context[words.CALLS] + 1} of group {self.gate.name!r}: {names} did not arrive "
                f"within {timeout:g} s",
                [self.gate.ranks[peer] for peer in sorted(late)],
            )

    def _resume(
        self, code: int, prepared: Prepared, arrays: tuple[Array, ...], timeout: float | None
    ) -> None:
        """What follows when the engine comes back early."""
        doing = self.doing()
        wait = Wait(self.monitor, doing, self._late, self.gate.timeout if timeout is None else timeout)
        while code in (AGAIN, WORKED):
            wait.look() if code == AGAIN else wait.worked()
            code = engine.collective.call(self.context.address | words.RESUMED, prepared.address, arrays)
        if code == MISMATCH:
            raise self._mismatch()
        if code == GONE:
            self._raise_lost(doing)
        if code == GARBLED:
            peer = self.context[words.PEER]
            raise AbortedError(
                f"{self.monitor.name(peer)} sent what no rank sends in {doing}; the ranks' libraries or settings "
                "differ",
                [self.gate.ranks[peer]],
            )

    def doing(self) -> str:
        """The call under way, for messages."""
        number, head = self.context[words.CALLS], self.context.headers()[self.gate.rank]
        what = signature.describe(int(head[words.HEAD_CALL]), int(head[words.HEAD_SHAPE]))
        return f"{what}, call {number} of group {self.gate.name!r}"

    def _late(self) -> list[int]:
        """The group ranks whose headers have not come, or else all that the plan waits for."""
        numbers = self.context.headers()[:, words.NUMBER]
        late = [rank for rank in range(self.gate.size) if numbers[rank] < self.context[words.CALLS]]
        return late or self.context.waited_for

    def _mismatch(self) -> Exception:
        number, headers = self.context[words.CALLS], self.context.headers().copy()
        engine.after_mismatch.call(self.context.address)
        heads = [(int(h[words.HEAD_CALL]), int(h[words.HEAD_SHAPE])) for h in headers]
        if error := signature.refused(
            heads, self.gate.ranks, self.gate.refusal, self._from_all, number, self.name
        ):
            return error

        def tables() -> Sequence[signature.Sizes]:
            if self.gate.size > MEET_RANKS:
                return ()
            n = self.gate.size
            sizes = headers[:, words.SIZES : words.SIZES + 2 * n].reshape(n, 2, n)
            return [(gives, takes) for gives, takes in sizes.tolist()]

        text = signature.describe_mismatch(heads, self.gate.ranks, tables)
        return signature.mismatch(text, number, self.gate.name)

    def _from_all(self, own: Array) -> Array:
        """Every rank's array, by the thread that has the turn, between two calls."""
        everybody = np.empty((self.gate.size, *own.shape), own.dtype)
        self.plan(Operation("all_gather", tuple(everybody), (own,)))()
        return everybody

    def _raise_lost(self, doing: str) -> NoReturn:
        """Raise why the connection to a peer is over: what that peer or others say, or that it is gone."""
        peer, error = self.context[words.PEER], -self.context[words.ERROR]
        waiting = f"{doing}, waiting for {self.monitor.name(peer)}"
        deadline = time.monotonic() + _REASON_SECONDS
        while (found := self.monitor.verdict([peer], waiting)) is None:
            if time.monotonic() > deadline:
                how = "it closed a connection" if error == -CLOSED else os.strerror(error)
                self.monitor.lost(peer, how)
            time.sleep(0.005)
        raise found.with_traceback(None)

    def _torn(self, error: BaseException, prepared: Prepared) -> None:
        """After an exception: fail the group if the call was half-way, since the peers go on with it."""
        if isinstance(error, GroupError):
            self.fail(error)
        elif self.context.under_way:
            self.interrupted(error, self.doing())
        elif not prepared.ready:
            self.interrupted(error, f"connecting the ranks of group {self.gate.name!r}")

    def interrupted(self, error: BaseException, doing: str) -> None:
        here, why = self.monitor.name(self.gate.rank), type(error).__name__
        self.fail(
            AbortedError(f"{here} was interrupted by {why} in {doing}", [self.gate.ranks[self.gate.rank]])
        )

    # ---- the operations ------------------------------------------------------------------------------

    def plan(
        self,
        operation: Operation,
        timeout: float | None = None,
        choose: Callable[[Shape], Plan] = plan_for,
    ) -> Call:
        """See Backend; `choose` makes the plan."""
        kind, _, _, op, root, parts = operation
        arrays, sized = _ARRAYS[kind](operation)
        dtype = arrays[0].dtype if arrays else None
        key = (kind, dtype, op, root, tuple(x.nbytes for x in sized), parts, choose)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepare(*key)
            self._remember(key, prepared)

        def call() -> None:
            self._carry_out(prepared, arrays, timeout)

        divisor = self._divisor(operation)
        if op is None or folded(op, self.gate.size) is op or divisor == 0:
            return call

        def divided() -> None:
            call()
            divide(operation.outputs[0], divisor)

        return divided

    def meeting(self, operation: Operation) -> Call:
        """A call in which the ranks only make sure that all of them make it."""
        return self.plan(operation, choose=_nothing)

    def _divisor(self, operation: Operation) -> int:
        """By what an average is divided that was folded as a sum; 0 where there is no result."""
        if operation.kind == "reduce":
            return self.gate.size if self.gate.rank == operation.root else 0
        if operation.kind in ("scan", "exscan"):
            return self.gate.rank + (operation.kind == "scan")
        return self.gate.size

    def run_prepared(self, key: Any, arrays: tuple[Array, ...]) -> bool:
        """Carry a call out that was prepared before, with nothing ahead of it; False: it takes the general way."""
        prepared = self._prepared.get(key)
        if prepared is None or not self.gate.is_clear():
            return False
        self.gate.in_turn(self._carry_out, prepared, arrays)
        return True

    # ---- the end ---------------------------------------------------------------------------------

    def close(self, reason: GroupError | None) -> None:
        self.messages.close(reason)
        # A call under way was aborted and ends within moments. One that a signal handler has interrupted ends after
        # the handler, and then releases the connections itself.
        inside = self.gate.is_inside()
        turn = not inside and self.gate.turn.acquire(timeout=_CLOSE_SECONDS)
        self.monitor.leave()
        if turn or (inside and not self.context.under_way):
            self._release()
        else:
            self._releases_later = True
        if turn:
            self.gate.turn.release()

    def _release(self) -> None:
        """Close the connections, once no call uses them."""
        self._mesh.close()
        self.context.fds.fill(-1)

    def disown(self, error: GroupError) -> None:
        self._mesh.disown()


def _nothing(call: Shape) -> Plan:
    """The plan of a call that is over with the meeting."""
    return Plan(np.zeros((0, COLUMNS), np.int64), 0, "nothing")


def _patience(crowd: Sequence[Member], me: Member) -> int:
    """Sweeps in vain before sleeping: few where the ranks of this host outnumber the cores."""
    here = [member for member in crowd if member.boot_id == me.boot_id]
    return _DEDICATED if len(here) <= len(cores_of(here)) else _OVERSUBSCRIBED


Arrays = tuple[tuple[Array, ...], tuple[Array, ...]]

_ARRAYS: dict[str, Callable[[Operation], Arrays]] = {
    "all_reduce": lambda o: (o.outputs, o.outputs),
    "broadcast": lambda o: (o.outputs, o.outputs),
    "reduce": lambda o: ((*o.outputs, *o.inputs), o.inputs),
    "scan": lambda o: ((*o.outputs, *o.inputs), o.inputs),
    "exscan": lambda o: ((*o.outputs, *o.inputs), o.inputs),
    "reduce_scatter": lambda o: ((*o.outputs, *o.inputs), o.inputs),
    "all_gather": lambda o: ((*o.outputs, *o.inputs), o.outputs),
    "gather": lambda o: ((*o.outputs, *o.inputs), o.outputs or o.inputs),
    "scatter": lambda o: ((*o.outputs, *o.inputs), o.inputs or o.outputs),
    "all_to_all": lambda o: ((*o.outputs, *o.inputs), (*o.outputs, *o.inputs)),
    "barrier": lambda o: ((), ()),
    "refused": lambda o: ((), ()),
}
"""A kind's arrays in the order of plans/table.py, and those whose sizes plans/shape.py takes."""
