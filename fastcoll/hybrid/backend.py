"""The default backend: one group over shared memory inside nodes and a network between nodes.

It consists of a TcpBackend of all ranks and two internal groups:

    local    the ranks of this node, in shared memory
    rail     the ranks with the same local rank on every node, over TCP, or over MPI if FASTCOLL_BETWEEN_NODES is
             mpi; each rail moves one block of the data

Every call begins with a meeting of all ranks, which finds mismatches and missing ranks. In a group of more than FLAT
ranks, the ranks of a node meet in shared memory, and one rank a node goes out (net/tcp/plans/node_meeting.py). That
rank also moves the data of a small call (relayed.py); the internal groups move those of a large one. In a smaller
group, the ranks meet as in any group over TCP, and the TcpBackend also moves the data of a small call. Large calls of
kinds that are not in _ALGORITHMS use TCP between all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from .. import config
from ..core.backend import Backend, RecoveryEndpoint
from ..core.group import ProcessGroup
from ..core.message import Status
from ..core.monitor import LargerCall
from ..core.operands import LARGEST_TAG, Array, divide, sum_for
from ..core.operation import Call, Operation
from ..core.operations import KINDS
from ..core.partition import cut, shares
from ..core.reduce_op import AVG, ReduceOp
from ..core.travel import Narrow, add_lost
from ..core.work import Work
from ..errors import (
    AbortedError,
    CollectiveTimeoutError,
    GroupError,
    MismatchError,
    PeerDiedError,
    StoreError,
)
from ..failpoints import reach
from ..net.tcp import engine_layout as words
from ..net.tcp.backend import TcpBackend
from ..net.tcp.plans.choose import nothing
from ..net.tcp.plans.relayed import RELAYED
from ..p2p.engine import Engine
from ..p2p.short_cuts import short_cuts
from ..rendezvous.assemble import GroupMeeting
from ..shm.backend import ShmBackend
from ..shm.fast import MESSAGES
from ..store import PrefixStore, Store
from ..system.processes import Member, Topology

FLAT = 4
"""Largest number of ranks that exchange headers over TCP in one step, and with them small data. With two nodes of two
ranks, that is one step over the network instead of two for data that headers cannot carry. With two simulated
nodes of four ranks (two cores of an AMD EPYC for all), an all_reduce of 8 bytes takes 73 us if the ranks meet by nodes,
and 273 us if they do not; one of 64 KiB takes 162 us and 763 us."""
DIRECT = 512 << 10
"""Bytes up to which groups of at most FLAT ranks use TCP between all ranks. On two hosts with two ranks each (one
core per host, AMD EPYC), an all_reduce of 256 KiB takes 480 us by the internal groups and 370 us by TCP between all
ranks; one of 1 MiB takes 1.15 ms and 1.36 ms."""
SEGMENT = 8 << 20
"""Bytes of a segment of a rail's block. While a rail sends one segment, the node reduces the next in shared memory. On
the same two hosts, an all_reduce of 64 MiB takes 93 ms with segments of 1 MiB, and 65 ms with 16 MiB. If each rank has
a core of its own, smaller segments overlap more."""
# How long a rank whose call has failed waits for the monitor to find the dead rank.
_REASON_SECONDS = 1.0


def between_nodes() -> Callable[..., Backend]:
    """Return the function that makes the backend of ranks on different nodes."""
    if config.get("FASTCOLL_BETWEEN_NODES") == "mpi":
        from ..net.mpi.backend import MpiBackend  # imported only if it is used

        return MpiBackend.make
    return TcpBackend.make


class HybridBackend(Backend):
    """Backend of ranks on several nodes; some of the ranks share a node."""

    name = "auto"

    @classmethod
    def make(
        cls,
        store: Store,
        name: str,
        members: Sequence[Member],
        rank: int,
        timeout: float,
        crowd: Sequence[Member] = (),
    ) -> HybridBackend:
        """Meet the other members; collective. The arguments and errors are those of ShmBackend and TcpBackend."""
        topology = Topology(members, rank)
        groups: list[ProcessGroup] = []
        everyone: TcpBackend | None = None

        def add(make: Callable[..., Backend], label: str, ranks: Sequence[int]) -> Backend:
            some = [members[r] for r in ranks]
            part = PrefixStore(label, store)
            made = make(part, f"{name}/{label}", some, ranks.index(rank), timeout, crowd=crowd or members)
            groups.append(ProcessGroup(made))
            return made

        try:
            nodes = topology.nodes if len(members) > FLAT else ()
            # Between nodes, MPI is faster than TCP, so one rank of each node relays nothing over TCP.
            relayed = RELAYED if nodes and between_nodes() == TcpBackend.make else 0
            everyone = TcpBackend.make(store, name, members, rank, timeout, crowd, nodes, relayed)
            inside = partial(ShmBackend.make, relay=2 * relayed)
            near = add(inside, f"node{topology.node}", topology.local)
            assert isinstance(near, ShmBackend)
            if topology.rail is not None:
                add(between_nodes(), f"rail{topology.local_rank}", topology.rail)
        except BaseException as error:
            failure: BaseException = error
            if everyone is not None and isinstance(error, PeerDiedError | StoreError):
                # An internal group knows only its own ranks. If one of these ranks has ended, that rank may have failed
                # before, and have published the reason to all ranks of `everyone`.
                failure = everyone.monitor.decide([], f"making the group {name}") or error
            # A rank that is making the group of a node or of a rail checks only the store of that group.
            for label in (f"node{topology.node}", *(f"rail{index}" for index in range(topology.rails))):
                GroupMeeting(PrefixStore(label, store), members, rank, timeout, name).publish_error(failure)
            if everyone is not None:
                why = f"{members[rank]} could not make the group {name}: {str(error) or type(error).__name__}"
                everyone.fail(failure if isinstance(failure, GroupError) else AbortedError(why))
                for made in groups:
                    made.close()
                everyone.close(everyone.monitor.failure)
            if failure is error:
                raise
            raise failure.with_traceback(None) from error
        return cls(everyone, near, topology, groups)

    def __init__(
        self, everyone: TcpBackend, near: ShmBackend, topology: Topology, groups: Sequence[ProcessGroup]
    ) -> None:
        self.gate = everyone.gate
        self.monitor = everyone.monitor
        self._everyone = everyone
        self._topology = topology
        self._groups = list(groups)
        self.local = groups[0]
        self.rail = groups[1] if len(groups) > 1 else None
        self._parts = [*zip(self._groups, (topology.local, topology.rail or ()), strict=False)]
        # The ranks of a large group do not all have control connections; those of a rail have some of their own.
        if self.rail is not None and isinstance(self.rail.backend, TcpBackend):
            everyone.inquiry.listen(self.rail.backend.monitor, topology.rail or ())
        self._direct = DIRECT
        if self.gate.size > FLAT:
            self._direct = 0
            everyone.share(near.lines(), near.relays(), near.allocate_relay)
        self._near = near
        self.narrows = between_nodes() == TcpBackend.make
        everyone.route({peer: (near.pipe, index) for index, peer in enumerate(topology.local)})
        self.messages: Engine = everyone.messages

    def limit(self, seconds: float) -> None:
        super().limit(seconds)
        for group in self._groups:
            group.timeout = seconds

    def learn(self, dtype: np.dtype[Any]) -> None:
        self._near.learn(dtype)

    def fast(self, group: ProcessGroup) -> Mapping[str, Callable[..., Any]]:
        flat = self._everyone.fast(group)
        ranks = self._topology.local
        local_ranks = {peer: index for index, peer in enumerate(ranks) if peer != self.gate.rank}
        near = short_cuts(group, self.messages, self._near.pipe.address, MESSAGES, ranks.__getitem__)

        def local_rank_of(peer: Any, tag: Any) -> int | None:
            """Return a peer's rank in the local group; None if it is on another node, or the arguments are unusual."""
            plain = type(peer) is int and type(tag) is int and 0 <= tag <= LARGEST_TAG
            return local_ranks.get(peer) if plain else None

        def send(tensor: Any, dst: int, tag: int = 0) -> Any:
            if (index := local_rank_of(dst, tag)) is None:
                return flat["send"](tensor, dst, tag)
            return near.send(tensor, index, tag)

        def recv(tensor: Any, src: Any = None, tag: int = 0, status: Status | None = None) -> Any:
            if status is not None or (index := local_rank_of(src, tag)) is None:
                return flat["recv"](tensor, src, tag, status)
            near.recv(tensor, index, tag)
            return src

        return {**flat, "send": send, "recv": recv}

    # ---- operations ----------------------------------------------------------------------------------

    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        if not self._goes_through_nodes(operation):
            return self._everyone.plan(operation, timeout)
        meeting = self._everyone.plan(operation, choose=nothing)
        calls = self._everyone.context

        def call() -> None:
            before, started = calls[words.CALLS], time.monotonic()
            try:
                meeting()
                # The internal groups wait until the deadline of this call.
                timing = calls[words.CALLS], started, self.gate.timeout
                for group, ranks in self._parts:
                    group.monitor.larger = LargerCall(self.monitor, ranks, self._everyone.doing, *timing)
                reach("hybrid.OPERATION.after_meeting", operation.kind)
                _ALGORITHMS[operation.kind](self, operation)
                reach("hybrid.OPERATION.before_done", operation.kind)
            except BaseException as error:
                if isinstance(error, MismatchError) or calls[words.CALLS] == before:
                    raise  # no rank continues the call, or this rank did not begin it
                doing = self._everyone.doing()
                if not isinstance(error, GroupError):
                    self._everyone.interrupted(error, doing)
                    raise
                # The error of an internal group names the rank that left this group; the monitor of all ranks knows why
                # it left. A timeout has found the rank at fault already.
                failure, deadline = error, time.monotonic() + _REASON_SECONDS
                if isinstance(error, CollectiveTimeoutError):
                    deadline = 0.0
                try:
                    while (found := self.monitor.decide([], doing)) is None and time.monotonic() < deadline:
                        time.sleep(0.01)
                    failure = found or error
                finally:  # also if Ctrl-C ends the wait
                    self.fail(failure)
                if failure is error:
                    raise
                raise failure.with_traceback(None) from error

        return call

    def _goes_through_nodes(self, operation: Operation) -> bool:
        """Return whether the internal groups carry out an operation; if not, TCP between all ranks does."""
        kind, outputs, inputs, op, _, _, _ = operation
        if kind not in _ALGORITHMS or self._everyone.carries(operation):
            return False
        sizes = [x.nbytes for x in (inputs if KINDS[kind].gives_blocks else outputs)]
        if max(sizes) <= self._direct:
            return False
        # A user's function must be applied in rank order. The internal groups reduce node by node, which is rank order
        # only if the ranks are numbered node by node.
        if op is not None and op.function is not None and not self._topology.in_order:
            return False
        if not KINDS[kind].has_blocks:
            return True
        return self._topology.even and (kind == "reduce_scatter" or len(set(sizes)) == 1)

    def _all_reduce(self, operation: Operation) -> None:
        """Reduce x segment by segment, in the node and along the rails, and exchange the blocks inside the node."""
        x, op, narrow = operation.outputs[0], operation.op, operation.narrow
        assert op is not None
        add_lost(narrow, x)
        segments, lost = self._segments_of(x), None if narrow is None else narrow.lost
        losses = [None] * len(segments) if lost is None else self._segments_of(lost)
        here = self._topology.local_rank

        def begin(segment: Array, lost: Array | None) -> tuple[list[Array], Work | None]:
            blocks, part = self._blocks_of(segment), narrow
            self.local.fast.reduce_scatter(blocks[here], blocks, sum_for(op))
            if part is not None and lost is not None:  # what rounding takes from this rank's block
                part = part._replace(lost=self._blocks_of(lost)[here])
            # With a single segment there is no overlap, so the hand-over to another thread would only cost time.
            return blocks, self._reduce_between_nodes(blocks[here], op, part, len(segments) > 1)

        def end(blocks: list[Array], work: Work | None) -> None:
            if work is not None:
                work.join()
            self._divide(blocks[here], op)
            self.local.fast.all_gather(blocks, blocks[here])

        _overlap(zip(segments, losses, strict=True), begin, end)

    def _reduce(self, operation: Operation) -> None:
        """Reduce inside the nodes, then along the rails to the root's node, where the root gathers the blocks."""
        (out,), (x,), op = operation.outputs, operation.inputs, operation.op
        assert op is not None
        (node, index), is_root = self._topology.home_of(operation.root), self.gate.rank == operation.root
        segments = [*zip(self._segments_of(x), self._segments_of(out), strict=True)]

        def begin(segment: Array, result: Array) -> tuple[Array, Array, Work | None]:
            blocks = self._blocks_of(segment)
            own, work = np.empty_like(blocks[self._topology.local_rank]), None
            self.local.fast.reduce_scatter(own, blocks, sum_for(op))
            if self.rail is not None:
                work = self.rail.fast.reduce(own, node, sum_for(op), async_op=len(segments) > 1)
            return result, own, work

        def end(result: Array, own: Array, work: Work | None) -> None:
            if work is not None:
                work.join()
            if self._topology.node == node:
                self.local.fast.gather(own, self._blocks_of(result) if is_root else None, index)

        _overlap(segments, begin, end)
        if is_root:
            self._divide(out, op)

    def _reduce_scatter(self, operation: Operation) -> None:
        """Reduce inside the node, each rank the blocks for the ranks of its rail. Then reduce along the rails."""
        (out,), blocks, op = operation.outputs, operation.inputs, operation.op
        assert op is not None
        assert self.rail is not None
        rails, here = [*zip(*self._topology.nodes, strict=True)], self._topology.local_rank
        mine = [np.concatenate([blocks[rank].reshape(-1) for rank in rail]) for rail in rails]
        self.local.fast.reduce_scatter(mine[here], mine, sum_for(op))
        sizes = [blocks[rank].size for rank in rails[here]]
        self.rail.fast.reduce_scatter_single(out, mine[here], sum_for(op), input_split_sizes=sizes)
        self._divide(out, op)

    def _broadcast(self, operation: Operation) -> None:
        (x,) = operation.outputs
        node, index = self._topology.home_of(operation.root)
        if self._topology.node == node:
            self.local.fast.broadcast(x, index)
        blocks = self._blocks_of(x.reshape(-1))
        if self.rail is not None:
            self.rail.fast.broadcast(blocks[self._topology.local_rank], node)
        if self._topology.node != node:
            self.local.fast.all_gather(blocks, blocks[self._topology.local_rank])

    def _all_gather(self, operation: Operation) -> None:
        """Gather along the rails, which gives each rank a block of every node. Then gather inside the node."""
        outs, (x,) = operation.outputs, operation.inputs
        assert self.rail is not None
        nodes, here = len(self._topology.nodes), self.local.size
        mine = np.empty((nodes, x.size), x.dtype)
        self.rail.fast.all_gather_single(mine, x)
        everything = np.empty((here, nodes, x.size), x.dtype)
        self.local.fast.all_gather_single(everything, mine)
        for number, ranks in enumerate(self._topology.nodes):
            for index, rank in enumerate(ranks):
                outs[rank].reshape(-1)[...] = everything[index, number]

    def _reduce_between_nodes(
        self, x: Array, op: ReduceOp, narrow: Narrow | None, async_op: bool = False
    ) -> Work | None:
        """Sum over this rank's rail."""
        if self.rail is None:
            return None
        if narrow is None:
            done = self.rail.fast.all_reduce(x, sum_for(op), async_op=async_op)
        else:
            done = self.rail.all_reduce_narrow(x, sum_for(op), async_op, narrow.travel.name, narrow.lost)
        return cast("Work | None", done)

    def _segments_of(self, x: Array) -> list[Array]:
        """Divide an array into segments, whose blocks have SEGMENT bytes."""
        rails = self._topology.rails
        return cut(x.reshape(-1), max(rails, rails * SEGMENT // x.itemsize))

    def _blocks_of(self, segment: Array) -> list[Array]:
        """Divide a segment into a block for each rank on this node; ranks without a rail have empty blocks."""
        blocks = shares(segment, self._topology.rails)
        return blocks + [segment[:0]] * (self.local.size - len(blocks))

    def _divide(self, x: Array, op: ReduceOp) -> None:
        """Divide a sum by the number of ranks if `op` is an average."""
        if op.code == AVG:
            divide(x, self.gate.size)

    # ---- the end -------------------------------------------------------------------------------------

    def recovery_endpoint(self) -> RecoveryEndpoint:
        return self._everyone.recovery_endpoint()

    def stop(self) -> None:
        for group in self._groups:
            group.abort(str(self.gate.failure))

    def close(self, reason: GroupError | None) -> None:
        # Last, `local` unmaps the memory that messages and meetings use, unless a thread is still inside one of them.
        # Closing the messages takes their lock for good.
        in_message = self.messages.has_lock()
        self.messages.close(reason)
        in_message |= not self.messages.has_lock()
        self._everyone.close(reason)
        in_call = self.gate.lock.locked() and self.gate.has_others_inside()
        self._near.keeps_memory = in_message or in_call
        for group in self._groups:
            group.close(self.monitor.exit_reason)

    def disown(self, error: GroupError) -> None:
        self._everyone.disown(error)
        for group in self._groups:
            group.disown(error)


def _overlap(items: Iterable[tuple[Any, ...]], begin: Callable[..., Any], end: Callable[..., None]) -> None:
    """Begin each item before the one before it is ended: one travels between nodes while its node reduces the next.

    `begin` takes the fields of an item, and returns the arguments of `end`.
    """
    before = None
    for item in items:
        begun = begin(*item)
        if before is not None:
            end(*before)
        before = begun
    if before is not None:
        end(*before)


_ALGORITHMS: dict[str, Callable[[HybridBackend, Operation], None]] = {
    "all_reduce": HybridBackend._all_reduce,
    "reduce": HybridBackend._reduce,
    "reduce_scatter": HybridBackend._reduce_scatter,
    "broadcast": HybridBackend._broadcast,
    "all_gather": HybridBackend._all_gather,
}
"""Kinds whose large operations run in the internal groups; all others use TCP between all ranks."""
