"""TcpGroup: ranks on any hosts, over TCP connections between them.

Each call is prepared once for its operation, dtype and sizes: a plan and the words that the engine compares
with the peers'. What it does over the sockets is in engine.py; here is what comes before and after.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from ...core import signature
from ...core.members import Member
from ...core.monitor import Wait
from ...core.operands import Array, divide
from ...core.operation import Call
from ...core.processes import cores_of
from ...core.reduce_op import ReduceOp
from ...core.status import AGAIN, DONE, GARBLED, GONE, MISMATCH, WORKED
from ...errors import AbortedError, ArrayError, CollectiveTimeoutError, GroupError
from ...kernels.reduce import HALVES, reducer
from ...kernels.sockets import CLOSED
from ...p2p.engine import Engine
from ...p2p.mailing import Mailing
from ...p2p.pipe import Pipe
from ...rendezvous import Store
from . import engine, words
from .context import NetContext, Prepared, limits_for
from .control import NetMonitor
from .mesh import Mesh
from .pipe import TcpPipe
from .plans.choose import plan_for
from .plans.shape import MEET_RANKS, Shape
from .plans.table import COLUMNS, Plan
from .rows import PIECE
from .short import ShortPaths
from .sizes import sizes_of

_CLOSE_SECONDS = 5.0
_MOST_PREPARED = 1024
# Sweeps in vain before a thread sleeps: some 50 us where every rank has a core of its own.
_DEDICATED, _OVERSUBSCRIBED = 50, 1
_TRY = 1000  # ns that a sweep of messages in vain takes, about
# How long a rank whose peer has closed the connection waits for the reason, which travels on another one.
_REASON_SECONDS = 2.0


class TcpGroup(ShortPaths, Mailing):
    """Collectives and point-to-point between ranks on any hosts, through TCP."""

    backend = "tcp"
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
    ) -> TcpGroup:
        """Meet the other members over the network; collective. The arguments are those of ShmGroup.make, and:

        Args:
            crowd: ranks that use the hosts' cores at the same time; None: the members.

        Raises:
            RendezvousError: the members cannot reach one another; names both, and the address.
            PeerDiedError, StoreTimeoutError: a member died or did not come.
        """
        mesh = Mesh.make(store, name, members, rank, timeout)
        return cls(name, members, timeout, mesh, crowd or members)

    def __init__(
        self, name: str, members: Sequence[Member], timeout: float, mesh: Mesh, crowd: Sequence[Member]
    ) -> None:
        super().__init__(name, [member.rank for member in members], mesh.rank, timeout)
        self._mesh = mesh
        self.monitor = mesh.monitor
        self.monitor.on_failure = self._stop
        patience = _patience(crowd, members[mesh.rank])
        self._limits = limits_for(self.size)
        self._context = NetContext(self.size, mesh.rank, self._limits, mesh.streams, patience)
        self.pipe = TcpPipe(mesh, self.monitor, patience * _TRY)
        self.messages = Engine(self._routes(), mesh.rank, self.monitor, timeout)
        self._remembering = threading.Lock()
        self._releases_later = False  # closed in the middle of a call

    def _routes(self) -> list[tuple[Pipe, int]]:
        """How messages get to each rank."""
        return [(self.pipe, rank) for rank in range(self.size)]

    # ---- a call ----------------------------------------------------------------------------------

    def _plan(
        self,
        operation: str,
        arrays: Sequence[Array],
        nbytes: Sequence[int],
        *,
        op: ReduceOp | None = None,
        root: int = 0,
        parts: Sequence[int] = (),
        timeout: float | None = None,
        choose: Callable[[Shape], Plan] = plan_for,
    ) -> Call:
        """A call of an operation on arrays in the order that plans/table.py gives.

        Args:
            nbytes: as in plans/shape.py.
            parts: sizes of the arrays of a coalesced call.
            choose: makes the plan.
        """
        dtype = arrays[0].dtype if arrays else None
        key = (operation, dtype, op, root, tuple(nbytes), tuple(parts), choose)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepare(*key)
            self._remember(key, prepared)
        given = tuple(arrays)
        return lambda: self._carry_out(prepared, given, timeout)

    def _carry_out(self, prepared: Prepared, arrays: tuple[Array, ...], timeout: float | None = None) -> None:
        """The call itself, by the thread that has the turn."""
        self.gate.check_usable()
        try:
            if not prepared.ready:
                self._make_ready(prepared, timeout)
            code = engine.collective.call(self._context.address, prepared.address, arrays)
            if code != DONE:
                self._go_on(code, prepared, arrays, timeout)
        except BaseException as error:
            self._torn(error, prepared)
            raise
        finally:
            if self._releases_later:
                self._release()

    def _meeting(self, operation: str, arrays: Sequence[Array], nbytes: Sequence[int], **rest: Any) -> Call:
        """A call in which the ranks only make sure that all of them make it."""
        return self._plan(operation, arrays, nbytes, choose=_nothing, **rest)

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
        folds = reducer(self._folded(op), dtype)[:2] if op is not None and dtype is not None else (0, 0)
        half = dtype is not None and dtype.name in HALVES
        ordered = op is not None and (op.function is not None or half)
        call = Shape(
            operation, self.size, self.rank, nbytes, self._limits, itemsize, root=root, ordered=ordered
        )
        sizes = sizes_of(call)
        balance = 0
        if self.size > MEET_RANKS:
            balance = signature.balance(self.rank, sizes.gives, sizes.takes)
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
        self._context.make_room(prepared)
        peers = {*self._context.met, *prepared.peers}
        # First those that this rank dials, who need not have come yet; it is not to be missed by them as well.
        in_order = sorted(peers, key=lambda peer: (peer < self.rank, peer))
        fds, streams = self._context.fds, range(self._context.streams)
        missing = [(peer, stream) for peer in in_order for stream in streams if fds[peer, stream] < 0]
        self._connect(missing, prepared, self.timeout if timeout is None else timeout)
        self.gate.check_usable()  # a signal handler may have closed the group meanwhile
        prepared.ready = True

    def _connect(self, missing: Sequence[tuple[int, int]], prepared: Prepared, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        late: set[int] = set()
        for peer, stream in missing:
            left = 0.0 if late else max(0.0, deadline - time.monotonic())
            try:
                self._context.fds[peer, stream] = self._mesh.data(peer, stream, left)
            except CollectiveTimeoutError:
                if peer > self.rank:
                    raise  # it could not be reached, and the error says how that failed
                late.add(peer)
        if late:
            what = signature.describe(prepared.call, prepared.shape)
            names = ", ".join(self.monitor.name(peer) for peer in sorted(late))
            raise CollectiveTimeoutError(
                f"{what}, call {self._context[words.CALLS] + 1} of group {self.name!r}: {names} did not arrive within "
                f"{timeout:g} s",
                [self.ranks[peer] for peer in sorted(late)],
            )

    def _go_on(self, code: int, prepared: Prepared, arrays: tuple[Array, ...], timeout: float | None) -> None:
        """What follows when the engine comes back early."""
        doing = self._doing()
        wait = Wait(self.monitor, doing, self._late, self.timeout if timeout is None else timeout)
        while code in (AGAIN, WORKED):
            wait.look() if code == AGAIN else wait.worked()
            code = engine.collective.call(self._context.address | words.RESUMED, prepared.address, arrays)
        if code == MISMATCH:
            raise self._mismatch()
        if code == GONE:
            self._raise_lost(doing)
        if code == GARBLED:
            peer = self._context[words.PEER]
            raise AbortedError(
                f"{self.monitor.name(peer)} sent what no rank sends in {doing}; the ranks' libraries or settings "
                "differ",
                [self.ranks[peer]],
            )

    def _doing(self) -> str:
        """The call under way, for messages."""
        number, head = self._context[words.CALLS], self._context.headers()[self.rank]
        what = signature.describe(int(head[words.HEAD_CALL]), int(head[words.HEAD_SHAPE]))
        return f"{what}, call {number} of group {self.name!r}"

    def _late(self) -> list[int]:
        """The group ranks whose headers have not come, or else all that the plan waits for."""
        numbers = self._context.headers()[:, words.NUMBER]
        late = [rank for rank in range(self.size) if numbers[rank] < self._context[words.CALLS]]
        return late or self._context.waited_for

    def _mismatch(self) -> Exception:
        number, headers = self._context[words.CALLS], self._context.headers().copy()
        engine.after_mismatch.call(self._context.address)
        heads = [(int(h[words.HEAD_CALL]), int(h[words.HEAD_SHAPE])) for h in headers]
        if error := signature.refused(
            heads, self.ranks, self.gate.refusal, self._from_all, number, self.name
        ):
            return error

        def tables() -> Sequence[signature.Sizes]:
            if self.size > MEET_RANKS:
                return ()
            sizes = headers[:, words.SIZES : words.SIZES + 2 * self.size].reshape(self.size, 2, self.size)
            return [(gives, takes) for gives, takes in sizes.tolist()]

        text = signature.describe_mismatch(heads, self.ranks, tables)
        return signature.mismatch(text, number, self.name)

    def _from_all(self, own: Array) -> Array:
        """Every rank's array, by the thread that has the turn, between two calls."""
        everybody = np.empty((self.size, *own.shape), own.dtype)
        self._plan("all_gather", [*everybody, own], [own.nbytes] * self.size)()
        return everybody

    def _raise_lost(self, doing: str) -> NoReturn:
        """Raise why the connection to a peer is over: what that peer or others say, or that it is gone."""
        peer, error = self._context[words.PEER], -self._context[words.ERROR]
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
        elif self._context.under_way:
            self._interrupted(error, self._doing())
        elif not prepared.ready:
            self._interrupted(error, f"connecting the ranks of group {self.name!r}")

    def _interrupted(self, error: BaseException, doing: str) -> None:
        here, why = self.monitor.name(self.rank), type(error).__name__
        self.fail(AbortedError(f"{here} was interrupted by {why} in {doing}", [self.ranks[self.rank]]))

    def _stop(self) -> None:
        """The group has failed, wherever that was found."""
        self.gate.failure = self.monitor.failure

    # ---- the operations ------------------------------------------------------------------------------

    def _plan_all_reduce(self, x: Array, op: ReduceOp, parts: Sequence[int] = ()) -> Call:
        call = self._plan("all_reduce", [x], [x.nbytes], op=op, parts=parts)
        return self._then_divide(call, x, op, self.size)

    def _plan_reduce(self, out: Array, x: Array, op: ReduceOp, root: int) -> Call:
        call = self._plan("reduce", [out, x], [x.nbytes], op=op, root=root)
        return self._then_divide(call, out, op, self.size if self.rank == root else 0)

    def _plan_scan(self, out: Array, x: Array, op: ReduceOp, exclusive: bool) -> Call:
        call = self._plan("exscan" if exclusive else "scan", [out, x], [x.nbytes], op=op)
        return self._then_divide(call, out, op, self.rank + (not exclusive))

    def _plan_reduce_scatter(self, out: Array, blocks: Sequence[Array], op: ReduceOp) -> Call:
        call = self._plan("reduce_scatter", [out, *blocks], [block.nbytes for block in blocks], op=op)
        return self._then_divide(call, out, op, self.size)

    def _then_divide(self, call: Call, x: Array, op: ReduceOp, ranks: int) -> Call:
        """The call, and the division that `_folded` has put off; by 0 stands for no result here."""
        if self._folded(op) is op or ranks == 0:
            return call

        def divided() -> None:
            call()
            divide(x, ranks)

        return divided

    def _plan_broadcast(self, x: Array, root: int, parts: Sequence[int] = ()) -> Call:
        return self._plan("broadcast", [x], [x.nbytes], root=root, parts=parts)

    def _plan_all_gather(self, outs: Sequence[Array], x: Array, parts: Sequence[int] = ()) -> Call:
        return self._plan("all_gather", [*outs, x], [out.nbytes for out in outs], parts=parts)

    def _plan_gather(self, outs: Sequence[Array] | None, x: Array, root: int) -> Call:
        if outs is None:
            return self._plan("gather", [x], [x.nbytes], root=root)
        return self._plan("gather", [*outs, x], [out.nbytes for out in outs], root=root)

    def _plan_scatter(self, out: Array, blocks: Sequence[Array] | None, root: int) -> Call:
        if blocks is None:
            return self._plan("scatter", [out], [out.nbytes], root=root)
        return self._plan("scatter", [out, *blocks], [block.nbytes for block in blocks], root=root)

    def _plan_all_to_all(self, outs: Sequence[Array], blocks: Sequence[Array]) -> Call:
        return self._plan("all_to_all", [*outs, *blocks], [x.nbytes for x in (*outs, *blocks)])

    def _plan_meeting(self, operation: str, timeout: float) -> Call:
        return self._plan(operation, [], [], timeout=timeout)

    # ---- the end ---------------------------------------------------------------------------------

    def _close(self, reason: GroupError | None) -> None:
        self.messages.close(reason)
        # A call under way was aborted and ends within moments. One that a signal handler has interrupted ends after
        # the handler, and then releases the connections itself.
        inside = self.gate.is_inside()
        turn = not inside and self.gate.turn.acquire(timeout=_CLOSE_SECONDS)
        self.monitor.leave()
        if turn or (inside and not self._context.under_way):
            self._release()
        else:
            self._releases_later = True
        if turn:
            self.gate.turn.release()

    def _release(self) -> None:
        """Close the connections, once no call uses them."""
        self._mesh.close()
        self._context.fds.fill(-1)

    def disown(self, error: GroupError) -> None:
        """In a child of fork: make every use raise, and say nothing on the sockets, which are the parent's."""
        self.monitor.failure = self.gate.failure = error
        self._mesh.disown()


def _nothing(call: Shape) -> Plan:
    """The plan of a call that is over with the meeting."""
    return Plan(np.zeros((0, COLUMNS), np.int64), 0, "nothing")


def _patience(crowd: Sequence[Member], me: Member) -> int:
    """Sweeps in vain before sleeping: few where the ranks of this host outnumber the cores."""
    here = [member for member in crowd if member.boot_id == me.boot_id]
    return _DEDICATED if len(here) <= len(cores_of(here)) else _OVERSUBSCRIBED
