"""The default backend: shared memory inside a node, the network between nodes, together as one group.

A HybridGroup is a TcpGroup of all ranks with two groups more, which the user does not see:

    local    the ranks of this node, in shared memory
    rail     the ranks with this one's place on each node, over TCP or, by FASTCOLL_BETWEEN_NODES, over MPI: each shares
             its part of the data with them

Every call begins with the meeting of all ranks over TCP, in which mismatches and missing ranks are found as in any
TcpGroup, and what is small enough is done in it. Only then does the data take the way through the nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from .. import config
from ..core.group import ProcessGroup
from ..core.members import Member
from ..core.operands import LARGEST_TAG, Array, divide, sum_for
from ..core.operation import Call
from ..core.partition import cut, shares
from ..core.reduce_op import AVG, ReduceOp
from ..core.status import DONE, LATER
from ..core.topology import Topology
from ..core.work import Work
from ..errors import AbortedError, GroupError, MismatchError
from ..net.tcp import words
from ..net.tcp.group import TcpGroup
from ..net.tcp.mesh import Mesh
from ..net.tcp.plans.shape import MEET_RANKS
from ..p2p.pipe import Pipe
from ..rendezvous import PrefixStore, Store
from ..rendezvous.assemble import GroupMeeting
from ..shm import ring_kernels
from ..shm.group import ShmGroup

DIRECT = 512 << 10
"""Bytes up to which groups of at most MEET_RANKS ranks take the direct way. all_reduce on two hosts of two ranks, nodes
against direct: 256 KiB 480 us and 370 us, 1 MiB 1.15 ms and 1.36 ms (a core a host, AMD EPYC)."""
SMALL = 64 << 10
"""Bytes up to which one rank of each node talks for all, in larger groups: to divide less gains nothing over a round's
latency."""
SEGMENT = 8 << 20
"""Bytes of a rank's part that travel while the next ones are reduced in shared memory. 64 MiB on the same two hosts:
93 ms with 1 MiB, 65 ms with 16 MiB; where each rank has a core of its own, smaller segments overlap more."""
# How long a rank whose call was broken off waits to hear who died.
_REASON_SECONDS = 1.0


def make_auto(store: Store, name: str, members: Sequence[Member], rank: int, timeout: float) -> ProcessGroup:
    """The group that suits where its members are: ShmGroup, TcpGroup or HybridGroup; collective."""
    topology = Topology.of(members, rank)
    if len(topology.nodes) == 1:
        return ShmGroup.make(store, name, members, rank, timeout)
    if all(len(node) == 1 for node in topology.nodes):
        return _between_nodes()(store, name, members, rank, timeout)
    return HybridGroup.make(store, name, members, rank, timeout)


def _between_nodes() -> Callable[..., ProcessGroup]:
    """What makes groups of ranks on different nodes."""
    if config.get("FASTCOLL_BETWEEN_NODES") == "mpi":
        from ..net.mpi.backend import MpiGroup  # few need it

        return MpiGroup.make
    return TcpGroup.make


class HybridGroup(TcpGroup):
    """Ranks on several nodes, some of which share a node."""

    backend = "auto"

    @classmethod
    def make(
        cls,
        store: Store,
        name: str,
        members: Sequence[Member],
        rank: int,
        timeout: float,
        crowd: Sequence[Member] | None = None,
    ) -> HybridGroup:
        """Meet the other members; collective. The arguments and errors are those of ShmGroup and TcpGroup."""
        topology = Topology.of(members, rank)
        parts: list[ProcessGroup] = []
        mesh: Mesh | None = None

        def part(make: Callable[..., ProcessGroup], label: str, ranks: Sequence[int]) -> None:
            there = [members[r] for r in ranks]
            parts.append(
                make(PrefixStore(label, store), f"{name}/{label}", there, ranks.index(rank), timeout)
            )

        try:
            mesh = Mesh.make(store, name, members, rank, timeout)
            # Of a part of the world it is not known here how many other ranks are on the node.
            is_world = len(members) == members[rank].world_size
            neighbours = len(topology.local) if is_world else None
            part(partial(ShmGroup.make, neighbours=neighbours), f"node{topology.node}", topology.local)
            if topology.rail is not None:
                part(
                    partial(_between_nodes(), crowd=crowd or members),
                    f"rail{topology.local_rank}",
                    topology.rail,
                )
        except BaseException as error:
            for place in range(topology.rails):  # whoever makes a rail already looks at its store only
                GroupMeeting(PrefixStore(f"rail{place}", store), members, rank, timeout, name).tell(error)
            if mesh is not None:
                why = error if str(error) else type(error).__name__
                mesh.monitor.fail(AbortedError(f"{members[rank]} could not make the group {name}: {why}"))
                for made in parts:
                    made.close()
                mesh.close()
            raise
        return cls(name, members, timeout, mesh, crowd or members, topology, parts)

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        timeout: float,
        mesh: Mesh,
        crowd: Sequence[Member],
        topology: Topology,
        parts: Sequence[ProcessGroup],
    ) -> None:
        self._topology = topology
        local = parts[0]
        assert isinstance(local, ShmGroup)
        self._local = local
        self._rail = parts[1] if len(parts) > 1 else None
        self._parts = list(parts)  # before anything that can fail the group, which aborts them
        self._direct = DIRECT if len(members) <= MEET_RANKS else 0
        super().__init__(name, members, timeout, mesh, crowd)
        self._rings = local.pipe.address
        self._places = {peer: place for place, peer in enumerate(topology.local) if peer != mesh.rank}

    def _routes(self) -> list[tuple[Pipe, int]]:
        near: Pipe = self._local.pipe
        routes = super()._routes()
        for place, peer in enumerate(self._topology.local):
            routes[peer] = (near, place)
        return routes

    # ---- operations ----------------------------------------------------------------------------------

    def _through_nodes(self, meeting: Call, work: Call) -> Call:
        """The meeting, then `work` on the groups of this node and rail."""

        def call() -> None:
            before = self._context[words.CALLS]
            try:
                meeting()
                work()
            except BaseException as error:
                if isinstance(error, MismatchError) or self._context[words.CALLS] == before:
                    raise  # no rank goes on, or this one did not begin
                failure = self._broken_off(error)
                if failure is error:
                    raise
                raise failure.with_traceback(None) from error

        return call

    def _plan_all_reduce(self, x: Array, op: ReduceOp, parts: Sequence[int] = ()) -> Call:
        if not self._may_regroup(op, x.nbytes):
            return super()._plan_all_reduce(x, op, parts)
        meeting = self._meeting("all_reduce", [x], [x.nbytes], op=op, parts=parts)
        return self._through_nodes(meeting, lambda: self._reduce_everywhere(x, op))

    def _plan_reduce(self, out: Array, x: Array, op: ReduceOp, root: int) -> Call:
        if not self._may_regroup(op, x.nbytes):
            return super()._plan_reduce(out, x, op, root)

        def work() -> None:
            total = x.copy() if self.rank != root or out is not x else out
            self._reduce_everywhere(total, op)
            if self.rank == root:
                out[...] = total

        return self._through_nodes(self._meeting("reduce", [out, x], [x.nbytes], op=op, root=root), work)

    def _plan_reduce_scatter(self, out: Array, blocks: Sequence[Array], op: ReduceOp) -> Call:
        sizes = [block.nbytes for block in blocks]
        if not self._topology.even or len(set(sizes)) > 1 or not self._may_regroup(op, max(sizes)):
            return super()._plan_reduce_scatter(out, blocks, op)

        def work() -> None:
            # First inside the node, for the rail that each rank is on, then along the rails.
            rails = zip(*self._topology.nodes, strict=True)
            mine = [np.concatenate([blocks[rank].reshape(-1) for rank in rail]) for rail in rails]
            own = mine[self._topology.local_rank]
            self._local.reduce_scatter(own, mine, sum_for(op))
            assert self._rail is not None
            self._rail.reduce_scatter_single(out, own, sum_for(op))
            self._divide(out, op)

        return self._through_nodes(self._meeting("reduce_scatter", [out, *blocks], sizes, op=op), work)

    def _plan_broadcast(self, x: Array, root: int, parts: Sequence[int] = ()) -> Call:
        if not self._goes_through_nodes(x.nbytes):
            return super()._plan_broadcast(x, root, parts)
        node, place = self._topology.home_of(root)

        def work() -> None:
            if self._topology.node == node:
                self._local.broadcast(x, place)
            shares = self._parts_of(x.reshape(-1))
            if self._rail is not None:
                self._rail.broadcast(shares[self._topology.local_rank], node)
            if self._topology.node != node:
                self._local.all_gather(shares, shares[self._topology.local_rank])

        return self._through_nodes(self._meeting("broadcast", [x], [x.nbytes], root=root, parts=parts), work)

    def _plan_all_gather(self, outs: Sequence[Array], x: Array, parts: Sequence[int] = ()) -> Call:
        sizes = [out.nbytes for out in outs]
        if not self._topology.even or len(set(sizes)) > 1 or not self._goes_through_nodes(x.nbytes):
            return super()._plan_all_gather(outs, x, parts)

        def work() -> None:
            # First along the rails, then inside the node, each of whose ranks has got a part of every node.
            nodes, here = len(self._topology.nodes), self._local.size
            mine = np.empty((nodes, x.size), x.dtype)
            assert self._rail is not None
            self._rail.all_gather_single(mine, x)
            everything = np.empty((here, nodes, x.size), x.dtype)
            self._local.all_gather_single(everything, mine)
            for number, ranks in enumerate(self._topology.nodes):
                for place, rank in enumerate(ranks):
                    outs[rank].reshape(-1)[...] = everything[place, number]

        return self._through_nodes(self._meeting("all_gather", [*outs, x], sizes, parts=parts), work)

    # ---- messages ------------------------------------------------------------------------------------

    def learn(self, dtype: np.dtype[Any]) -> None:
        self._local.learn(dtype)

    def _place(self, peer: Any, tag: Any) -> int | None:
        """The place of a rank of this node; None: it is on another, or the arguments are not those of a plain call."""
        if type(peer) is not int or type(tag) is not int or not 0 <= tag <= LARGEST_TAG:
            return None
        return self._places.get(peer)

    def send(self, tensor: Any, dst: int, tag: int = 0) -> None:
        place = self._place(dst, tag)
        if place is None:
            return super().send(tensor, dst, tag)
        try:
            status = ring_kernels.send.call(self._rings, place, tensor, tag, -1)
            if status == DONE:
                return None
            if status != LATER:
                return self.messages.resume_send(status, tensor, dst, tag)
        except BaseException as error:
            self.messages.torn(error, "send")
            raise
        return ProcessGroup.send(self, tensor, dst, tag)

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0) -> int:
        place = self._place(src, tag)
        if place is None:
            return super().recv(tensor, src, tag)
        try:
            status = ring_kernels.receive.call(self._rings, place, tensor, tag, -1)
            if status < DONE:
                return int(src)  # type: ignore[arg-type]
            if status != LATER:
                return self.messages.resume_receive(status, tensor, src, tag)
        except BaseException as error:
            self.messages.torn(error, "recv")
            raise
        return ProcessGroup.recv(self, tensor, src, tag)

    # ---- reducing through nodes ----------------------------------------------------------------------

    def _may_regroup(self, op: ReduceOp, nbytes: int) -> bool:
        """Whether to reduce node by node: large arrays, and functions only in rank order."""
        return self._goes_through_nodes(nbytes) and (op.function is None or self._topology.in_order)

    def _goes_through_nodes(self, nbytes: int) -> bool:
        """Whether arrays of a size take the way through the nodes."""
        return nbytes > self._direct

    def _reduce_everywhere(self, x: Array, op: ReduceOp) -> None:
        """x = the reduction over all ranks."""
        if x.nbytes <= SMALL:
            self._local.reduce(x, 0, sum_for(op))
            if self._topology.local_rank == 0:
                assert self._rail is not None
                self._rail.all_reduce(x, sum_for(op))
                self._divide(x, op)
            self._local.broadcast(x, 0)
        else:
            self._reduce_by_rails(x, op)

    def _reduce_by_rails(self, x: Array, op: ReduceOp) -> None:
        """Each rail reduces its part of each segment; while one travels, the next is reduced in shared memory."""
        under_way: list[tuple[list[Array], Work | None]] = []
        flat, rails = x.reshape(-1), self._topology.rails
        items = max(rails, rails * SEGMENT // x.itemsize)
        segments = cut(flat, items)
        for segment in segments:
            parts = self._parts_of(segment)
            own = parts[self._topology.local_rank]
            self._local.reduce_scatter(own, parts, sum_for(op))
            # With nothing to overlap it with, handing over to another thread only costs.
            overlaps = len(segments) > 1
            work = None if self._rail is None else self._rail.all_reduce(own, sum_for(op), async_op=overlaps)
            under_way.append((parts, work))
            if len(under_way) > 1:
                self._share(*under_way.pop(0), op)
        for parts, work in under_way:
            self._share(parts, work, op)

    def _share(self, parts: list[Array], work: Work | None, op: ReduceOp) -> None:
        """Give each rank of the node what the others have got."""
        own = parts[self._topology.local_rank]
        if work is not None:
            work._join()
        self._divide(own, op)
        self._local.all_gather(parts, own)

    def _parts_of(self, segment: Array) -> list[Array]:
        """A segment's part of each rank on this node; surplus ranks have none."""
        parts = shares(segment, self._topology.rails)
        return parts + [segment[:0]] * (self._local.size - len(parts))

    def _divide(self, x: Array, op: ReduceOp) -> None:
        """Make an average of a sum."""
        if op.code == AVG:
            divide(x, self.size)

    # ---- when things go wrong, and the end -----------------------------------------------------------

    def _broken_off(self, error: BaseException) -> BaseException:
        """What to raise when a call ended in the middle of its way, after telling all ranks."""
        if not isinstance(error, GroupError):
            self._interrupted(error, self._doing())
            return error
        # A part says who left it; the vigil over all ranks knows why.
        deadline = time.monotonic() + _REASON_SECONDS
        while (found := self.monitor.verdict([], self._doing())) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        failure = found or error
        self.fail(failure)
        return failure

    def _stop(self) -> None:
        super()._stop()
        for part in self._parts:
            part.abort(str(self.failure))

    def _close(self, reason: GroupError | None) -> None:
        self.messages.close(reason)  # before the segment that its messages pass is gone
        for part in self._parts:
            part.close(self.monitor.farewell)
        super()._close(reason)

    def disown(self, error: GroupError) -> None:
        super().disown(error)
        for part in self._parts:
            part.disown(error)
