"""Moves: blocks of bytes between the ranks of a NCCL communicator, on a stream; NCCL's own operations where they fit.

All ranks must choose the same operations of NCCL, so a choice depends on the sizes, which all know, and never on where
this rank's arrays lie: what does not lie as NCCL wants it goes through scratch memory. Inputs and outputs may overlap.
Empty blocks are left out, on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..array import DeviceArray
from ..streams import Turn
from .comm import Communicator

_BYTE = np.dtype(np.uint8)


class Moves:
    """The moves of one call.

    Args:
        comm: the communicator.
        turn: the call's.
        doing: the call, for messages.
    """

    def __init__(self, comm: Communicator, turn: Turn, rank: int, size: int, doing: str) -> None:
        self.comm, self.turn, self.rank, self.size, self.doing = comm, turn, rank, size, doing

    def broadcast(self, x: DeviceArray, root: int) -> None:
        """x = the root's x."""
        if x.nbytes:
            with self.comm.group(self.doing):
                self.comm.broadcast(x.address, x.address, x.nbytes, root, self.turn.stream)

    def all_gather(self, outs: Sequence[DeviceArray], x: DeviceArray) -> None:
        """outs[r] = rank r's x, of any sizes."""
        if len({out.nbytes for out in outs}) > 1:
            self._all_gather_uneven(outs, x)
        elif x.nbytes:
            whole = joined(outs)
            target = whole or self.scratch_like(outs)
            if whole is not None:
                x = self._apart(x, outs, outs[self.rank])
            with self.comm.group(self.doing):
                self.comm.all_gather(x.address, target.address, x.nbytes, self.turn.stream)
            if whole is None:
                self._copy_each(outs, parts(target, outs))

    def _all_gather_uneven(self, outs: Sequence[DeviceArray], x: DeviceArray) -> None:
        x = self._apart(x, outs, outs[self.rank])
        with self.comm.group(self.doing):
            for root, out in enumerate(outs):
                if out.nbytes:
                    src = x.address if root == self.rank else out.address
                    self.comm.broadcast(src, out.address, out.nbytes, root, self.turn.stream)

    def gather(self, outs: Sequence[DeviceArray] | None, x: DeviceArray, root: int) -> None:
        """On the root outs[r] = rank r's x."""
        if outs is None:
            with self.comm.group(self.doing):
                self._send(x, root)
            return
        self.copy(outs[root], x)  # before others' arrive, which may overlap x
        with self.comm.group(self.doing):
            for peer in self._peers():
                self._recv(outs[peer], peer)

    def scatter(self, out: DeviceArray, blocks: Sequence[DeviceArray] | None, root: int) -> None:
        """out = the root's blocks[rank]."""
        with self.comm.group(self.doing):
            if blocks is None:
                self._recv(out, root)
            else:
                for peer in self._peers():
                    self._send(blocks[peer], peer)
        if blocks is not None:
            self.copy(out, blocks[root])  # after all are sent, which may overlap out

    def all_to_all(self, outs: Sequence[DeviceArray], blocks: Sequence[DeviceArray]) -> None:
        """outs[r] = rank r's blocks[rank], of any sizes."""
        if _meet(outs, blocks):
            copies = parts(self.scratch_like(blocks), blocks)
            self._copy_each(copies, blocks)
            blocks = copies
        with self.comm.group(self.doing):
            for peer in self._peers():
                self._send(blocks[peer], peer)
                self._recv(outs[peer], peer)
        self.copy(outs[self.rank], blocks[self.rank])

    # ---- inside this rank ----------------------------------------------------------------------------

    def scratch_like(self, arrays: Sequence[DeviceArray]) -> DeviceArray:
        """Scratch memory for copies of some arrays of one dtype, one after the other."""
        return self.turn.scratch(sum(x.size for x in arrays), arrays[0].dtype)

    def copy(self, dst: DeviceArray, src: DeviceArray) -> None:
        """Copy an array, also to where it overlaps."""
        if dst.address != src.address and dst.overlaps(src):
            between = self.turn.scratch(src.size, src.dtype)
            self.turn.copy(between, src)
            src = between
        self.turn.copy(dst, src)

    def _copy_each(self, dsts: Sequence[DeviceArray], srcs: Sequence[DeviceArray]) -> None:
        for dst, src in zip(dsts, srcs, strict=True):
            self.turn.copy(dst, src)

    def _apart(self, x: DeviceArray, outs: Sequence[DeviceArray], own: DeviceArray) -> DeviceArray:
        """x, or a copy where it overlaps `outs` and is not the very place `own`."""
        if x.address == own.address or not _meet(outs, (x,)):
            return x
        copied = self.turn.scratch(x.size, x.dtype)
        self.turn.copy(copied, x)
        return copied

    def _peers(self) -> list[int]:
        """The others, beginning after this rank, so that not all turn to one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _send(self, x: DeviceArray, peer: int) -> None:
        if x.nbytes:
            self.comm.send(x.address, x.nbytes, peer, self.turn.stream)

    def _recv(self, x: DeviceArray, peer: int) -> None:
        if x.nbytes:
            self.comm.recv(x.address, x.nbytes, peer, self.turn.stream)


def joined(arrays: Sequence[DeviceArray]) -> DeviceArray | None:
    """The arrays as one, if each begins where the one before ends."""
    first, end = arrays[0], arrays[0].address
    for x in arrays:
        if x.address != end:
            return None
        end += x.nbytes
    size = sum(x.size for x in arrays)
    return DeviceArray(first.address, first.dtype, (size,), first.device, first.stream, first.owner)


def parts(whole: DeviceArray, like: Sequence[DeviceArray]) -> list[DeviceArray]:
    """Parts of a flat array, one after the other, as large as others are."""
    end = 0
    return [whole[end : (end := end + x.size)] for x in like]


def _meet(some: Sequence[DeviceArray], others: Sequence[DeviceArray]) -> bool:
    """Whether any of some arrays shares memory with any of others."""
    (start, end), (other_start, other_end) = _extent(some), _extent(others)
    if start >= other_end or other_start >= end:
        return False
    return any(x.overlaps(y) for x in some for y in others)


def _extent(arrays: Sequence[DeviceArray]) -> tuple[int, int]:
    there = [x for x in arrays if x.nbytes]
    if not there:
        return 0, 0
    return min(x.address for x in there), max(x.address + x.nbytes for x in there)
