"""NcclCarrier: GPU arrays by NCCL, one GPU a rank.

The communicator is made with the first collective call, over the group's CPU backend. Calls are queued (streams.py) and
the host goes on; a call of a new kind first meets the other ranks on the host and compares (nccl_check.py). What NCCL
lacks is put together from what it has: moves from grouped sends (nccl_moves.py), reductions from moves and our kernels
(nccl_reduce.py). Messages are matched by the CPU backend, and go by communicators of their own (nccl_mail.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ...core import signature
from ...core.group import ProcessGroup
from ...core.operation import Call
from ...core.reduce_op import ReduceOp
from ...core.work import Work
from ...errors import AbortedError, GroupError
from ...interop.arrays import Adopted
from ..array import DeviceArray
from ..stream_work import Own
from ..streams import StreamCarrier, Turn
from . import library as nccl_library
from .check import Checks, Signature
from .comm import Communicator
from .mail import NcclMail
from .moves import Moves
from .reduce import Kernels, Reductions, reductions
from .seats import Patience, make_communicator

Queue = Callable[[Moves], None]


class NcclCarrier(StreamCarrier):
    """See this module's docstring.

    Raises:
        UnavailableError: there is no NCCL, or no GPU.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._library = nccl_library.library()
        super().__init__(group)
        self._comm: Communicator | None = None
        self._checks = Checks(group)
        self._mail = NcclMail(self, self._library)
        self._words: dict[tuple[Any, ...], int] = {}
        self._kept: dict[tuple[ReduceOp, np.dtype[Any]], Reductions] = {}

    # ---- collectives ---------------------------------------------------------------------------------

    def _call(
        self,
        operation: str,
        arrays: Sequence[DeviceArray],
        queue: Queue,
        *,
        op: ReduceOp | None = None,
        root: int = 0,
        shape: int = 0,
        parts: Sequence[int] = (),
        gives: Sequence[int] = (),
        takes: Sequence[int] = (),
        kind: Sequence[int] = (),
    ) -> Call:
        """The call that queues what `queue` says.

        Args:
            shape, gives, takes: as Signature's.
            kind: sizes that all ranks know, besides `shape`.
        """
        word = self._word(operation, arrays[0].dtype, op, parts) | root << signature.ROOT_SHIFT
        said = Signature(
            word, shape, (word, shape, *kind), *((tuple(gives), tuple(takes)) if gives else (None, None))
        )
        doing = _doing(word, shape, self._group.name)

        def prepare() -> None:
            self._checks.check(said)
            self._communicator(arrays)

        def work(turn: Turn) -> None:
            queue(Moves(self._communicator(arrays), turn, self._group.rank, self._group.size, doing))

        return self._queued(arrays, work, prepare)

    def _word(self, operation: str, dtype: np.dtype[Any], op: ReduceOp | None, parts: Sequence[int]) -> int:
        key = (operation, dtype, None if op is None else op.code)
        if parts:
            return signature.encode(operation, dtype, op=op, parts=parts)
        if key not in self._words:
            self._words[key] = signature.encode(operation, dtype, op=op)
        return self._words[key]

    def _reductions(self, op: ReduceOp, dtype: np.dtype[Any]) -> Reductions:
        if op.factor is not None:  # each call may have another
            return reductions(op, dtype, self._group.size)
        key = (op, dtype)
        if key not in self._kept:
            self._kept[key] = reductions(op, dtype, self._group.size)
        return self._kept[key]

    def _plan_all_reduce(self, x: DeviceArray, op: ReduceOp, parts: Sequence[int] = ()) -> Call:
        how, flat = self._reductions(op, x.dtype), x.reshape(-1)
        return self._call(
            "all_reduce",
            (flat,),
            lambda moves: how.all_reduce(moves, flat),
            op=op,
            shape=x.nbytes,
            parts=parts,
        )

    def _plan_reduce(self, out: DeviceArray, x: DeviceArray, op: ReduceOp, root: int) -> Call:
        how, to, flat = self._reductions(op, x.dtype), out.reshape(-1), x.reshape(-1)
        return self._call(
            "reduce",
            (flat, to),
            lambda moves: how.reduce(moves, to, flat, root),
            op=op,
            root=root,
            shape=x.nbytes,
        )

    def _plan_scan(self, out: DeviceArray, x: DeviceArray, op: ReduceOp, exclusive: bool) -> Call:
        how, to, flat = Kernels(op, x.dtype, self._group.size), out.reshape(-1), x.reshape(-1)
        return self._call(
            "exscan" if exclusive else "scan",
            (flat, to),
            lambda moves: how.scan(moves, to, flat, exclusive),
            op=op,
            shape=x.nbytes,
        )

    def _plan_reduce_scatter(self, out: DeviceArray, blocks: Sequence[DeviceArray], op: ReduceOp) -> Call:
        how, to, flat = self._reductions(op, out.dtype), out.reshape(-1), _flat(blocks)
        return self._call(
            "reduce_scatter",
            (to, *flat),
            lambda moves: how.reduce_scatter(moves, to, flat),
            op=op,
            shape=_shape(flat),
        )

    def _plan_broadcast(self, x: DeviceArray, root: int, parts: Sequence[int] = ()) -> Call:
        flat = x.reshape(-1)
        return self._call(
            "broadcast",
            (flat,),
            lambda moves: moves.broadcast(flat, root),
            root=root,
            shape=x.nbytes,
            parts=parts,
        )

    def _plan_all_gather(
        self, outs: Sequence[DeviceArray], x: DeviceArray, parts: Sequence[int] = ()
    ) -> Call:
        flat, to = x.reshape(-1), _flat(outs)
        sizes = _sizes(to)
        return self._call(
            "all_gather",
            (flat, *to),
            lambda moves: moves.all_gather(to, flat),
            parts=parts,
            gives=[x.nbytes] * len(to),
            takes=sizes,
            kind=sizes,
        )

    def _plan_gather(self, outs: Sequence[DeviceArray] | None, x: DeviceArray, root: int) -> Call:
        flat, to = x.reshape(-1), None if outs is None else _flat(outs)
        return self._call(
            "gather",
            (flat, *(to or ())),
            lambda moves: moves.gather(to, flat, root),
            root=root,
            gives=self._to_root(flat, root),
            takes=_sizes(to) if to is not None else [-1] * self._group.size,
        )

    def _plan_scatter(self, out: DeviceArray, blocks: Sequence[DeviceArray] | None, root: int) -> Call:
        to, flat = out.reshape(-1), None if blocks is None else _flat(blocks)
        return self._call(
            "scatter",
            (to, *(flat or ())),
            lambda moves: moves.scatter(to, flat, root),
            root=root,
            gives=_sizes(flat) if flat is not None else [-1] * self._group.size,
            takes=self._to_root(to, root),
        )

    def _to_root(self, x: DeviceArray, root: int) -> list[int]:
        return [x.nbytes if rank == root else -1 for rank in range(self._group.size)]

    def _plan_all_to_all(self, outs: Sequence[DeviceArray], blocks: Sequence[DeviceArray]) -> Call:
        to, flat = _flat(outs), _flat(blocks)
        return self._call(
            "all_to_all",
            (*to, *flat),
            lambda moves: moves.all_to_all(to, flat),
            gives=_sizes(flat),
            takes=_sizes(to),
        )

    def _plan_all_reduce_coalesced(
        self, xs: Sequence[Adopted], op: ReduceOp, parts: Sequence[int] = ()
    ) -> Call:
        flat = _flat_of(xs)
        how = self._reductions(op, flat[0].dtype)

        def queue(moves: Moves) -> None:
            for x in flat:
                how.all_reduce(moves, x)

        sizes = [x.size for x in flat]
        return self._call(
            "all_reduce", flat, queue, op=op, shape=sum(_sizes(flat)), parts=parts or sizes, kind=sizes
        )

    def _plan_all_gather_coalesced(self, lists: Sequence[Sequence[Adopted]], xs: Sequence[Adopted]) -> Call:
        flat = _flat_of(xs)
        tos = [_flat_of(outs) for outs in lists]

        def queue(moves: Moves) -> None:
            for to, x in zip(tos, flat, strict=True):
                moves.all_gather(to, x)

        every = [out for to in tos for out in to]
        sizes = [sum(to[rank].nbytes for to in tos) for rank in range(self._group.size)]
        return self._call(
            "all_gather",
            (*flat, *every),
            queue,
            parts=[x.size for x in flat],
            gives=[sum(_sizes(flat))] * self._group.size,
            takes=sizes,
            kind=_sizes(every),
        )

    # ---- point to point ------------------------------------------------------------------------------

    def _isend(self, x: Adopted, dst: int, tag: int) -> Work:
        return self._mail.isend(x, dst, tag)

    def _irecv(self, x: Adopted, src: int | None, tag: int) -> Work:
        return self._mail.irecv(x, src, tag)

    def _send(self, x: Adopted, dst: int, tag: int) -> None:
        self._mail.send(x, dst, tag)

    def _recv(self, x: Adopted, src: int | None, tag: int) -> int:
        return self._mail.recv(x, src, tag)

    # ---- the communicator ----------------------------------------------------------------------------

    def _communicator(self, arrays: Sequence[DeviceArray]) -> Communicator:
        """The group's; made with the first collective call, on the arrays' GPU."""
        if self._comm is None:
            device, patience = self._own(arrays).device, Patience(self._group, self._look)
            self._comm = make_communicator(self._group, self._library, self._runtime, device, patience)
        return self._comm

    @property
    def splits(self) -> bool:
        return self._comm is not None and not self._broken

    def split(self, group: ProcessGroup | None) -> NcclCarrier | None:
        assert self._comm is not None
        assert self._lane is not None
        with self._in_turn("new_group"), self._failing("new_group"):
            self._watcher.drain()  # NCCL might deadlock if anything were under way
            with self._runtime.on(self._lane.device):
                comm = self._comm.split(None if group is None else group.rank)
        if group is None or comm is None:
            return None
        made = NcclCarrier(group)
        comm.ask(Patience(group, made._look))
        made._comm, made._lane = comm, Own(self._runtime, self._lane.device)
        return made

    def _trouble(self) -> GroupError | None:
        found = None if self._comm is None else self._comm.trouble()
        return None if found is None else AbortedError(str(found))

    def _break_off(self) -> None:
        if self._comm is not None:
            self._comm.abort()
        self._mail.break_off(self._group.failure or AbortedError(f"the group {self._group.name} was aborted"))

    def _release(self) -> None:
        self._mail.close()
        if self._comm is not None:
            self._comm.close()


@lru_cache(maxsize=1024)
def _doing(word: int, shape: int, group: str) -> str:
    return f"{signature.describe(word, shape)} in group {group!r} on a GPU"


def _flat(arrays: Sequence[Any]) -> list[DeviceArray]:
    return [x.reshape(-1) for x in arrays]


def _flat_of(xs: Sequence[Adopted]) -> list[DeviceArray]:
    return _flat([x.array for x in xs])


def _sizes(arrays: Sequence[Any]) -> list[int]:
    return [x.nbytes for x in arrays]


def _shape(blocks: Sequence[DeviceArray]) -> int:
    """The bytes of all blocks; if they differ, a negative number that tells their sizes from others."""
    sizes = _sizes(blocks)
    if len(set(sizes)) <= 1:
        return sum(sizes)
    return -1 - zlib.crc32(repr(sizes).encode())
