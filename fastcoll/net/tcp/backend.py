"""The backend of ranks on any hosts, over TCP connections between them.

Calls with the same operation, dtype and sizes are prepared once: this makes their plan, and the words that ranks
compare. The engine (executor.py) carries out a call over the sockets; this file has the steps before and after that.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...core import signature
from ...core.backend import Backend, RecoveryEndpoint
from ...core.collective import Collective
from ...core.gate import Gate
from ...core.group import ProcessGroup
from ...core.inquiry import Inquiry
from ...core.operands import Array, divide
from ...core.operation import Call, Operation
from ...core.operations import KINDS
from ...core.prepared import CallKey, PreparedCalls
from ...core.reduce_op import AVG, ReduceOp
from ...core.sizes import sized
from ...core.status import AGAIN, DONE, GARBLED, GONE, LATER, MISMATCH, UNCONNECTED
from ...errors import AbortedError, ArrayError, GroupError, MismatchError
from ...kernels.reduce import HALVES, reducer
from ...kernels.sockets import CLOSED
from ...kernels.waiting import SPINS, YIELDS
from ...p2p.engine import Engine
from ...p2p.pipe import Pipe
from ...record.recorder import GroupRecorder
from ...rendezvous.control import NetMonitor
from ...store import Store
from ...system.processes import Member, have_own_cores
from . import engine_layout as words
from . import executor as engine
from .context import NetContext, PreparedPlan
from .fast import fast_calls, folded
from .mesh import Mesh
from .pipe import TcpPipe
from .plans.choose import chosen, nothing, plan_for
from .plans.narrowed import plans_of
from .plans.node_meeting import CARRIED, GATHERED
from .plans.plan import Plan
from .plans.relayed import is_relayed
from .plans.relayed import relayed as plan_relayed
from .plans.shape import CallShape, default_limits
from .recovery_endpoint import TcpRecoveryEndpoint

logger = logging.getLogger("fastcoll")
_CLOSE_SECONDS, _SETTLE_MS = 5.0, 50
# A thread sleeps after this many sweeps in which nothing moved. _DEDICATED holds if every rank has a core of its own;
# these sweeps take about 50 us.
_DEDICATED, _OVERSUBSCRIBED = 50, 1
# How often a thread polls for a header of a rank of its node, and then yields, before it sleeps (kernels/lines.py).
_LINE_WAITS = {_DEDICATED: (2000, 0), _OVERSUBSCRIBED: (0, 1)}
_TRY = 1000  # ns that a sweep takes in which no message moves (mail_sweep.py)
# When a peer has closed a connection, how long this rank waits for the reason, which arrives on another connection.
_REASON_SECONDS = 2.0


class TcpBackend(Backend):
    """Collectives and point-to-point messages between ranks on any hosts, over TCP."""

    name = "tcp"
    narrows = True
    monitor: NetMonitor

    @classmethod
    def make(
        cls,
        store: Store,
        name: str,
        members: Sequence[Member],
        rank: int,
        timeout: float,
        crowd: Sequence[Member] = (),
        nodes: Sequence[Sequence[int]] = (),
        relayed: int = 0,
    ) -> TcpBackend:
        """Meet the other members over the network; collective.

        The other arguments are those of ShmBackend.make.

        Args:
            nodes: the group ranks of each node, if they meet by nodes; `share` must follow.
            relayed: see `Limits`.

        Raises:
            RendezvousError: two members cannot reach each other; the error names both, and the address.
            ResourceError: this process has no descriptor left.
            PeerDiedError, StoreTimeoutError: a member died or did not arrive.
        """
        near = next((node for node in nodes if rank in node), ())
        mesh = Mesh.make(store, name, members, rank, timeout, near)
        try:
            gate = Gate(name, [member.rank for member in members], rank, timeout)
            return cls(gate, members, mesh, crowd, nodes, relayed)
        except BaseException as error:  # the peers may have made the group already
            mesh.fail(error)
            raise

    def __init__(
        self,
        gate: Gate,
        members: Sequence[Member],
        mesh: Mesh,
        crowd: Sequence[Member],
        nodes: Sequence[Sequence[int]] = (),
        relayed: int = 0,
    ) -> None:
        self.gate = gate
        self.monitor = mesh.monitor
        self.monitor.inquiry = self.inquiry = Inquiry()
        self.inquiry.listen(self.monitor, range(gate.size))
        self._mesh = mesh
        self._recovery_endpoint = TcpRecoveryEndpoint(mesh)
        here = [member for member in members if member.boot_id == members[gate.rank].boot_id]
        backoff = _DEDICATED if have_own_cores(here, crowd) else _OVERSUBSCRIBED
        self.pipe = TcpPipe(mesh, self.monitor, backoff * _TRY)  # first, because it may lack a descriptor
        self._nodes = tuple(map(tuple, nodes))
        self._limits = default_limits(gate.size)
        if nodes:
            carried = CARRIED if len(nodes) <= GATHERED else 0
            self._limits = self._limits._replace(payload=0, carried=carried, relayed=relayed)
        self._record = GroupRecorder(gate.name, members, gate.rank, self.name, words.CONTEXT_WORDS)
        self._record.follow(words.CALLS, words.FINISHED, since=words.BEGAN)
        self.monitor.record = self._record
        context = self._record.context
        self.context = NetContext(gate.size, gate.rank, self._limits, mesh.streams, backoff, context, nodes)
        self.context.words[words.RING] = self._record.ring
        self.context.words[[words.BACKOFF + SPINS, words.BACKOFF + YIELDS]] = _LINE_WAITS[backoff]
        self.messages: Engine
        self.route({})
        self._prepared: PreparedCalls[PreparedPlan] = PreparedCalls()
        self._collective = Collective(gate, self.monitor, self.context.head, self._late, self._gather)
        # `close` was called during a call; this call will release the connections when it ends.
        self._releases_later = False

    def route(self, near: Mapping[int, tuple[Pipe, int]]) -> None:
        """Send messages to some ranks through other pipes.

        Must be called before the first message.

        Args:
            near: by group rank, the other pipe and the rank's number in it.
        """
        routes = [near.get(rank, (self.pipe, rank)) for rank in range(self.gate.size)]
        self.messages = Engine(routes, self.gate.rank, self.monitor, self.gate.timeout)

    def share(
        self, lines: Sequence[int], relays: Sequence[int], allocate: Callable[[int, int], None]
    ) -> None:
        """Set the memory that the ranks of the node share. Must be called before the first call, if they meet by nodes.

        Args:
            lines: the addresses of the lines for headers: of each rank, and of the result; and those for relayed data.
            relays: the address of each rank's relay memory (plans/relayed.py).
            allocate: allocates a part of this rank's relay memory; raises ResourceError if there is no room.
        """
        self.context.share(lines, relays)
        self._allocate_relay = allocate

    def fast(self, group: ProcessGroup) -> Mapping[str, Callable[..., Any]]:
        return fast_calls(group, self.pipe, self.messages, self.run_prepared, self.context.combines)

    # ---- a call ----------------------------------------------------------------------------------

    def _carry_out(
        self, prepared: PreparedPlan, arrays: tuple[Array, ...], timeout: float | None = None, tags: int = 0
    ) -> int:
        """Carry out a call. The caller holds the gate's lock.

        Returns DONE; or LATER, with nothing done, if the array that has all ranks' blocks overlaps the other array.
        """
        self.gate.check_usable()
        started = None  # when the engine began
        try:
            if not prepared.ready:
                started = time.monotonic()
                self._make_ready(prepared, timeout, started)
            code = engine.collective.call(self.context.address | tags, prepared.address, arrays)
            if code not in (DONE, LATER):
                started = self.context[words.BEGAN] / 1e9 if started is None else started
                self._resume(code, prepared, arrays, timeout, started)
            return code
        except BaseException as error:
            if isinstance(error, GroupError) or self.context.in_progress:
                self.interrupted(error, self.doing())
                # If this rank returned early from an earlier call, and that call did not match, a peer may have left
                # because of the mismatch. Then the mismatch is the error to raise.
                if isinstance(error, GroupError) and self.context[words.DIFFERS]:
                    engine.settle.call(self.context.address, _SETTLE_MS)
                    if cause := self._earlier_mismatch():
                        raise cause from error
            elif not prepared.ready:
                self.interrupted(error, f"preparing a call of group {self.gate.name!r}")
            raise
        finally:
            if self._releases_later:
                self._release()

    def _prepare(self, key: CallKey) -> PreparedPlan:
        """Prepare a call. The key's variant, its last field, is the function that chooses the plan."""
        call, folds = self._shape_of(key), (0, 0)
        if key.op is not None and key.dtype is not None:
            folds = reducer(folded(key.op, self.context.combines), key.dtype)[:2]
        plan, even = key.variant(call), None
        if key.variant is plan_for and KINDS[key.kind].is_by_pair and is_relayed(call):
            even = PreparedPlan(key.word, call, plan_relayed(call, plan_for))
        if plan.carried and key.op is None:
            folds = reducer(ReduceOp.BOR, np.dtype(np.uint8))[:2]
        return PreparedPlan(key.word, call, plan, folds, even)

    def _shape_of(self, key: CallKey) -> CallShape:
        operation, dtype, op, root, nbytes, _, _ = key
        itemsize = dtype.itemsize if dtype is not None else 1
        if op is not None and itemsize > engine.IO_BYTES:
            raise ArrayError(
                f"an element of {dtype} has {itemsize} bytes; {operation} takes {engine.IO_BYTES} here"
            )
        ordered = False
        if op is not None and dtype is not None:
            # An average up to a rank cannot be made from the average before it.
            averages = operation in ("scan", "exscan") and folded(op, self.context.combines).code == AVG
            ordered = op.function is not None or dtype.name in HALVES or averages
        return CallShape(
            operation,
            self.gate.size,
            self.gate.rank,
            nbytes,
            self._limits,
            itemsize,
            root,
            ordered,
            self._nodes,
        )

    def _make_ready(self, prepared: PreparedPlan, timeout: float | None, started: float) -> None:
        """Allocate memory, and connect to the peers of the meeting. Done once, before the first call with this plan.

        Of the plan's peers, a rank that makes another call would not know that it has to connect. So the first call
        connects to them after the meeting has shown that all ranks make this call.
        """
        self.context.make_room(prepared)
        plans = [prepared] if prepared.even is None else [prepared, prepared.even]
        for plan in plans:
            for span in plan.relays:
                self._allocate_relay(*span)
        what = self.gate.name_of(
            signature.describe(prepared.call, prepared.shape, self.gate.ranks), self.context[words.CALLS] + 1
        )
        self._connect(self.context.met, what, timeout, started)
        for plan in plans:
            plan.lacks_peers = not {*plan.peers} <= {*self.context.met}
        prepared.ready = True

    def _connect(self, peers: Iterable[int], doing: str, timeout: float | None, started: float) -> None:
        """Make the missing data connections with some peers, for a call that `doing` names.

        The caller holds the gate's lock.
        """
        limit = self.gate.timeout if timeout is None else timeout
        number = self.context[words.CALLS] + (not self.context.in_progress)
        missing = [peer for peer in sorted(peers) if (self.context.fds[peer] < 0).any()]
        self._mesh.connect_data(missing, doing, limit, started, number)
        for peer in missing:
            for stream in range(self.context.streams):
                self.context.fds[peer, stream] = self._mesh.data(peer, stream)
        self.gate.check_usable()  # a signal handler may have closed the group meanwhile

    def _resume(
        self,
        code: int,
        prepared: PreparedPlan,
        arrays: tuple[Array, ...],
        timeout: float | None,
        started: float,
    ) -> None:
        """Continue a call to its end.

        The engine has returned `code` before the call was complete. Raises an error if the call cannot complete.
        """
        context, call = self.context.address | words.RESUMED, prepared.address
        wait = self._collective.wait(timeout, started)
        again = partial(engine.collective.call, context, call, arrays)
        code = wait.resume(code, again)
        if code == UNCONNECTED:
            running = self.context.running(prepared)
            self._connect(running.peers, self.doing(), timeout, started)
            running.lacks_peers = False
            code = wait.resume(again(), again)
        if code == MISMATCH and not self.context.in_progress:
            self.gate.earlier = self.gate.earlier or self._earlier_mismatch()
            return
        if code == MISMATCH:
            self._record.broken_off("mismatch")
            number, heads, notes = self.context.heads()
            engine.after_mismatch.call(self.context.address)
            notes[self.gate.rank] = self.gate.refusal
            # Combined headers carry no texts: `mismatch` gathers them.
            with_headers = None if self.context.combines else notes
            raise self._collective.mismatch(number, heads, prepared.sizes, notes=with_headers)
        peer, doing = self.context[words.PEER], self.doing()
        if code == GARBLED:
            raise AbortedError(
                f"{self.monitor.name(peer)} sent invalid data in {doing}; the ranks' libraries or settings "
                "differ",
                [self.gate.ranks[peer]],
            )
        # GONE: the connection is lost. Raise the reason that the peer or another rank publishes. If no reason arrives
        # within _REASON_SECONDS, report the peer as lost, so that `decide` returns that as the error.
        waiting = f"{doing}, waiting for {self.monitor.name(peer)}"
        deadline = time.monotonic() + _REASON_SECONDS
        while code == GONE:
            if found := self.monitor.decide([peer], waiting):
                raise found.with_traceback(None)
            if time.monotonic() > deadline:
                error = self.context[words.ERROR]
                self.monitor.lost(peer, "it closed a connection" if error == CLOSED else os.strerror(-error))
            time.sleep(0.005)

    def _earlier_mismatch(self) -> MismatchError | None:
        """Return the error of an earlier call that did not match.

        This rank returned early from that call. Returns None if there was no such call, or if some of its headers have
        not arrived.
        """
        if (found := self.context.take_earlier_heads()) is None:
            return None
        number, heads, notes = found
        self._record.did_not_match(number)
        return self._collective.mismatch(number, heads, notes=notes)

    def doing(self) -> str:
        """Return the name of the current call, for error messages."""
        return self._collective.doing()

    def _late(self) -> list[int]:
        """Return the group ranks whose headers have not arrived.

        If all have arrived, returns the ranks for which the plan waits. Leaves out a rank that has left if its header
        arrives through other ranks. If that rank left before it had completed the call, the rank that waits for it
        directly reports this.
        """
        waited_for = self.context.waited_for
        late = self.context.late_ranks()
        here = [rank for rank in late if rank in waited_for or not self.monitor.has_left(rank)]
        return here or waited_for

    def _gather(self, everybody: Array, own: Array) -> None:
        """Do an all_gather between two calls. The caller holds the gate's lock."""
        self.plan(Operation("all_gather", tuple(everybody), (own,)))()

    # ---- the operations ------------------------------------------------------------------------------

    def plan(
        self,
        operation: Operation,
        timeout: float | None = None,
        choose: Callable[[CallShape], Plan] = plan_for,
    ) -> Call:
        """See Backend. `choose` is the function that makes the plan.

        If it is `plans.choose.nothing`, the call consists of the meeting only.
        """
        kind, outputs, inputs, op, root, parts, narrow = operation
        arrays = outputs if KINDS[kind].is_in_place else (*outputs, *inputs)  # in the order of plans/plan.py
        if kind == "refused" and not self.context.combines:
            # The headers carry the text of the refusal. A second call could not gather the texts, because ranks that
            # returned early from this call would not take part in it.
            outputs = arrays = (np.zeros(signature.NOTE_BYTES, np.uint8),)
            choose = plan_for
        dtype = arrays[0].dtype if arrays and kind != "refused" else None
        nbytes = tuple(x.nbytes for x in sized(kind, outputs, inputs))
        if narrow is not None:
            dtype, keeps = narrow.travel.items, narrow.lost is not None
            arrays = (*arrays, narrow.lost) if narrow.lost is not None else arrays
            if choose is plan_for:
                choose = plans_of(narrow.travel, keeps)
        key = CallKey(kind, dtype, op, root, nbytes, tuple(parts), choose)
        prepared = self._prepared.get_or_make(key, self._prepare)

        def call() -> None:
            if kind == "refused" and arrays:
                signature.write_note(self.gate.refusal, arrays[0])
            self._carry_out(prepared, arrays, timeout)

        divisor = self.gate.size
        if kind in ("scan", "exscan"):
            divisor = self.gate.rank + (kind == "scan")
        elif kind == "reduce" and self.gate.rank != root:
            divisor = 0  # this rank has no result
        if op is None or folded(op, self.context.combines) is op or divisor == 0 or choose is nothing:
            return call

        def divided() -> None:
            call()
            divide(operation.outputs[0], divisor)

        return divided

    def carries(self, operation: Operation) -> bool:
        """Return whether the headers of a call carry its data, or the first rank of each node relays them."""
        kind, outputs, inputs, op, root, parts, narrow = operation
        if narrow is not None or not self._nodes:
            return False
        nbytes = tuple(x.nbytes for x in sized(kind, outputs, inputs))
        key = CallKey(kind, (outputs or inputs)[0].dtype, op, root, nbytes, tuple(parts), plan_for)
        return chosen(self._shape_of(key)) in ("carried", "relayed")

    def run_prepared(self, key: Any, arrays: tuple[Array, ...]) -> bool:
        """Carry out a call that was prepared before, unless other calls are queued.

        Returns False if the caller has to take the general path. Only calls carried out by this method may return early
        (meet.py): other calls may be parts of a larger operation.
        """
        prepared = self._prepared.get(key)
        if prepared is None or not self.gate.is_clear():
            return False
        code = self.gate.run_exclusively(self._carry_out, prepared, arrays, None, words.MAY_RETURN_EARLY)
        return bool(code != LATER)

    def recovery_endpoint(self) -> RecoveryEndpoint:
        return self._recovery_endpoint

    # ---- the end ---------------------------------------------------------------------------------

    def close(self, reason: GroupError | None) -> None:
        self.messages.close(reason)
        # Wait for the current call, which has been aborted and ends soon. But if this is a signal handler that has
        # interrupted the call, do not wait, because the call ends after the handler. It then releases the connections.
        inside = self.gate.is_inside()
        turn = not inside and self.gate.lock.acquire(timeout=_CLOSE_SECONDS)
        if turn and reason is None and not self.context.in_progress:
            self._settle()
        self.monitor.leave()
        if turn or (inside and not self.context.in_progress):
            self._release()
        else:
            self._releases_later = True
        # A signal handler may have interrupted a wait for a turn, while another thread's engine reads the lines.
        if turn or not self.gate.has_others_inside():
            self.context.drop_lines()
        if turn:
            self.gate.lock.release()

    def _settle(self) -> None:
        """Wait until the peers have begun the calls from which this rank returned early.

        Until then, the peers may need data that this rank has sent and that has not arrived.
        """
        wait, deadline = AGAIN, time.monotonic() + _CLOSE_SECONDS
        while wait == AGAIN and self.context.is_ahead and time.monotonic() < deadline:
            wait = engine.settle.call(self.context.address, _SETTLE_MS)
            if wait == AGAIN and self.monitor.decide([], "leaving") is not None:
                break
        if mismatch := self._earlier_mismatch():
            logger.warning("%s", mismatch)

    def _release(self) -> None:
        """Close the connections. Must not be called while a call uses them."""
        self._record.close()
        self._mesh.close()
        self.context.fds.fill(-1)

    def disown(self, error: GroupError) -> None:
        self._mesh.disown()
