"""Moves and reductions of blocks between the ranks of an NCCL communicator, on a stream.

NCCL's own operations are used where they fit. All ranks must choose the same operations. So a choice depends on the
sizes, which all ranks know, and never on the addresses of this rank's arrays: arrays without the layout that NCCL needs
are copied through scratch memory. Arrays are flat; inputs and outputs may overlap. An empty block is neither sent nor
received. Reductions are done by

    Native    NCCL: not in rank order, and float16 and bfloat16 are rounded at each step
    Kernels   fastcoll's kernels, for every operation and dtype, in rank order: all ranks' arrays are gathered, and
              reduced on each GPU

`Kernels` splits a large array into segments, so that scratch memory stays bounded. In a large all_reduce, each rank
reduces only its block of a segment, and then the blocks are gathered. Objects of both classes are created when a call
is planned; an undefined reduction is rejected then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np

from ...core.operands import scaled
from ...core.partition import cut, shares
from ...core.reduce_op import AVG, PREMUL_SUM, ReduceOp
from ...errors import UnavailableError
from ...kernels.reduce import refuse_undefined
from ..device_array import DeviceArray, joined, parts
from ..streams import StreamScope
from .bindings import BYTES, dtype_code, reduction
from .communicator import Communicator

Arrays = Sequence[DeviceArray]

SCRATCH = 64 << 20
"""The most bytes, of all ranks together, that are gathered at a time. An estimate, not measured."""
DIVIDED = 256 << 10
"""From this many bytes on, in groups of more than two ranks, each rank of an all_reduce reduces only its block.

With n ranks this moves 2/n as many bytes as gathering all arrays, in two rounds instead of one. An estimate, not
measured.
"""


class Moves:
    """Queues the data movement of one call.

    Args:
        doing: the description of the call in error messages.
    """

    def __init__(self, comm: Communicator, scope: StreamScope, rank: int, size: int, doing: str) -> None:
        self.comm, self.scope, self.rank, self.size, self.doing = comm, scope, rank, size, doing

    def broadcast(self, x: DeviceArray, root: int) -> None:
        """Copy the root's x to every rank's x."""
        if x.nbytes:
            with self.comm.group(self.doing):
                self.queue("broadcast", x.address, x.address, x.nbytes, BYTES, root)

    def all_gather(self, outs: Arrays, x: DeviceArray) -> None:
        """Copy rank r's x to outs[r], of any sizes."""
        if len({out.nbytes for out in outs}) > 1:
            (x,) = self.scope.apart([x], outs, self.rank)
            with self.comm.group(self.doing):
                for root, out in enumerate(outs):
                    if out.nbytes:
                        src = x.address if root == self.rank else out.address
                        self.queue("broadcast", src, out.address, out.nbytes, BYTES, root)
        elif x.nbytes:
            joined_blocks = joined(outs)
            target = joined_blocks or self.scope.scratch_like(outs)
            if joined_blocks is not None:
                (x,) = self.scope.apart([x], outs, self.rank)
            with self.comm.group(self.doing):
                self.queue("all_gather", x.address, target.address, x.nbytes, BYTES)
            if joined_blocks is None:
                self.scope.copy_each(outs, parts(target, outs))

    def gather(self, outs: Arrays | None, x: DeviceArray, root: int) -> None:
        """Copy rank r's x to outs[r] on the root."""
        if outs is None:
            with self.comm.group(self.doing):
                self._send(x, root)
            return
        self.scope.copy(outs[root], x)  # before the other blocks arrive, because they may overwrite x
        with self.comm.group(self.doing):
            for peer in self._peers():
                self._recv(outs[peer], peer)

    def scatter(self, out: DeviceArray, blocks: Arrays | None, root: int) -> None:
        """Copy the root's blocks[rank] to out."""
        with self.comm.group(self.doing):
            if blocks is None:
                self._recv(out, root)
            else:
                for peer in self._peers():
                    self._send(blocks[peer], peer)
        if blocks is not None:
            self.scope.copy(out, blocks[root])  # after all blocks are sent: out may overlap them

    def all_to_all(self, outs: Arrays, blocks: Arrays) -> None:
        """Copy rank r's blocks[rank] to outs[r], of any sizes."""
        blocks = self.scope.apart(blocks, outs, self.rank)
        with self.comm.group(self.doing):
            for peer in self._peers():
                self._send(blocks[peer], peer)
                self._recv(outs[peer], peer)
        self.scope.copy(outs[self.rank], blocks[self.rank])

    def _peers(self) -> list[int]:
        """Return the other ranks, starting after this one.

        So not all ranks start with the same peer.
        """
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _send(self, x: DeviceArray, peer: int) -> None:
        if x.nbytes:
            self.queue("send", x.address, x.nbytes, BYTES, peer)

    def _recv(self, x: DeviceArray, peer: int) -> None:
        if x.nbytes:
            self.queue("recv", x.address, x.nbytes, BYTES, peer)

    def queue(self, operation: str, *args: int) -> None:
        """Queue an operation of the communicator on the call's stream."""
        self.comm.queue(operation, self.scope.stream, *args)


def reductions(op: ReduceOp, dtype: np.dtype[Any], size: int) -> Native | Kernels:
    """Return the object that does a reduction among `size` ranks; this takes some 30 us.

    Raises:
        ArrayError: the reduction is not defined for this dtype.
        UnavailableError: fastcoll's kernels are needed, but their extra is not installed, or the group is too large for
            them.
    """
    plain = scaled(np.empty(0, dtype), op)[1]
    refuse_undefined(plain, dtype)
    how = reduction(op, dtype)
    if how is None or (op.code == PREMUL_SUM and complex(op.factor).imag):
        return Kernels(op, dtype, size)
    return Native(op, dtype, how)


class Native:
    """NCCL's own reductions.

    Args:
        how: the result of `bindings.reduction`.
    """

    def __init__(self, op: ReduceOp, dtype: np.dtype[Any], how: tuple[int, int, int]) -> None:
        self._op, self._dtype = op, dtype
        self._number, self._code, self._parts = how

    def all_reduce(self, moves: Moves, x: DeviceArray) -> None:
        if x.size:
            with self._group(moves) as how:
                moves.queue("all_reduce", x.address, x.address, x.size * self._parts, *how)

    def reduce(self, moves: Moves, out: DeviceArray, x: DeviceArray, root: int) -> None:
        in_place_at = _apart(moves, out, (x,), x.address) if moves.rank == root else nullcontext(None)
        if x.size:
            with in_place_at as target, self._group(moves) as how:
                self._reduce(moves, target, x, how, root)

    def reduce_scatter(self, moves: Moves, out: DeviceArray, blocks: Arrays) -> None:
        if len({block.size for block in blocks}) > 1:
            in_place_at = blocks[moves.rank].address
            with _apart(moves, out, blocks, in_place_at) as target, self._group(moves) as how:
                for root, block in enumerate(blocks):
                    if block.size:
                        self._reduce(moves, target if root == moves.rank else None, block, how, root)
        elif out.size:
            joined_blocks = joined(blocks) or moves.scope.copied(blocks)
            in_place_at = joined_blocks.address + moves.rank * out.nbytes
            with _apart(moves, out, (joined_blocks,), in_place_at) as target, self._group(moves) as how:
                moves.queue(
                    "reduce_scatter", joined_blocks.address, target.address, out.size * self._parts, *how
                )

    def _reduce(
        self, moves: Moves, out: DeviceArray | None, x: DeviceArray, how: tuple[int, int], root: int
    ) -> None:
        to = 0 if out is None else out.address
        moves.queue("reduce", x.address, to, x.size * self._parts, *how, root)

    @contextmanager
    def _group(self, moves: Moves) -> Iterator[tuple[int, int]]:
        """Group the calls of a `with` block into one; yield NCCL's datatype and reduction."""
        with ExitStack() as ends:
            code = self._code
            if self._op.code == PREMUL_SUM:
                dtype, factor = self._dtype, self._op.factor
                if self._parts == 2:
                    dtype, factor = np.dtype(f"f{dtype.itemsize // 2}"), complex(factor).real
                assert dtype_code(dtype) == self._number
                code = ends.enter_context(moves.comm.premultiplied_sum(factor, dtype))
            ends.enter_context(moves.comm.group(moves.doing))
            yield self._number, code


class Kernels:
    """Reductions by fastcoll's kernels; see the module docstring."""

    def __init__(self, op: ReduceOp, dtype: np.dtype[Any], size: int) -> None:
        from ...kernels.cuda.reducers import MOST_SOURCES, cuda_reducer

        plain = scaled(np.empty(0, dtype), op)[1]
        if op.code == AVG and size > MOST_SOURCES:
            raise UnavailableError(
                f"{op!r} of {dtype} on GPUs takes groups of up to {MOST_SOURCES} ranks, this one has {size}; use SUM, "
                "and divide afterwards"
            )
        self._op, self._dtype, self._most = op, dtype, MOST_SOURCES
        self._reducer = cuda_reducer(plain, dtype)

    def prepare(self, kind: str, rank: int, size: int) -> None:
        """Load the kernels of a call into the current context, before NCCL's kernels wait for the peers."""
        sources = {"scan": rank + 1, "exscan": rank}.get(kind, size)
        if sources:
            self._reducer.prepare(min(sources, self._most))

    def all_reduce(self, moves: Moves, x: DeviceArray) -> None:
        source = moves.scope.scaled(x, self._op)
        for segment, out in zip(_segments(source, moves.size), _segments(x, moves.size), strict=True):
            if moves.size > 2 and segment.nbytes >= DIVIDED:
                outs = shares(out, moves.size)
                self._exchange(moves, outs[moves.rank], shares(segment, moves.size))
                moves.all_gather(outs, outs[moves.rank])
            else:
                self._fold(moves.scope, out, self._gathered(moves, segment))

    def reduce(self, moves: Moves, out: DeviceArray, x: DeviceArray, root: int) -> None:
        here = moves.rank == root
        x = moves.scope.scaled(x, self._op)
        if here:
            (x,) = moves.scope.apart([x], [out])
        for segment, to in zip(_segments(x, moves.size), _segments(out, moves.size), strict=True):
            room = self._room(moves, [segment] * moves.size) if here else None
            moves.gather(room, segment, root)
            if room is not None:
                self._fold(moves.scope, to, room)

    def scan(self, moves: Moves, out: DeviceArray, x: DeviceArray, exclusive: bool) -> None:
        """Reduce x over ranks 0..rank, or 0..rank-1 if `exclusive`, into out.

        In an exclusive scan rank 0's out is not changed.
        """
        x = moves.scope.scaled(x, self._op)
        (x,) = moves.scope.apart([x], [out])
        count = moves.rank + (not exclusive)
        for segment, to in zip(_segments(x, moves.size), _segments(out, moves.size), strict=True):
            everybody = self._gathered(moves, segment)
            if count:
                self._fold(moves.scope, to, everybody[:count])

    def reduce_scatter(self, moves: Moves, out: DeviceArray, blocks: Arrays) -> None:
        self._exchange(moves, out, [moves.scope.scaled(block, self._op) for block in blocks])

    def _exchange(self, moves: Moves, out: DeviceArray, blocks: Arrays) -> None:
        """Reduce all ranks' blocks[rank], which must be scaled already, into out."""
        room = self._room(moves, [out] * moves.size)
        moves.all_to_all(room, blocks)
        self._fold(moves.scope, out, room)

    def _gathered(self, moves: Moves, x: DeviceArray) -> list[DeviceArray]:
        """Return every rank's x, in scratch memory."""
        room = self._room(moves, [x] * moves.size)
        moves.all_gather(room, x)
        return room

    def _room(self, moves: Moves, like: Arrays) -> list[DeviceArray]:
        return parts(moves.scope.scratch_like(like), like)

    def _fold(self, scope: StreamScope, out: DeviceArray, srcs: Arrays) -> None:
        """Reduce the sources in rank order into out, which shares no memory with them."""
        launch: Callable[..., None] = self._reducer.launch
        addresses = [x.address for x in srcs]
        launch(out.address, addresses[: self._most], out.size, scope.stream)
        for start in range(self._most, len(addresses), self._most - 1):
            more = addresses[start : start + self._most - 1]
            launch(out.address, [out.address, *more], out.size, scope.stream)


def _segments(x: DeviceArray, size: int) -> list[DeviceArray]:
    """Split a flat array so that all ranks' segments fit into SCRATCH together."""
    return cut(x, max(SCRATCH // (size * x.dtype.itemsize) // size * size, size))


@contextmanager
def _apart(moves: Moves, out: DeviceArray, inputs: Arrays, in_place_at: int) -> Iterator[DeviceArray]:
    """Yield the array to write a result to: `out`, or scratch memory that is copied to it.

    Scratch memory is used if `out` overlaps inputs and does not begin exactly at `in_place_at`.
    """
    if out.address == in_place_at or not any(out.overlaps(x) for x in inputs):
        yield out
        return
    scratch = moves.scope.scratch(out.size, out.dtype)
    yield scratch
    moves.scope.copy(out, scratch)
