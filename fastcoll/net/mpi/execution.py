"""The functions that carry out an operation after its meeting. EXECUTED has the function for each kind of operation.

In the meeting of an operation (agreement.py), the ranks compare their calls. MPI's collective operations then move
blocks; a block is an address and a number of bytes. MPI's counts and displacements have 31 bits, so a rank's blocks
must be *near* one another: within 2 GiB of address space. If some rank's blocks are not near, all ranks exchange
messages of at most 1 GiB instead. All ranks must choose the same method, so each rank publishes in the meeting whether
its blocks are near.

Blocks on GPUs (gpu/cuda_aware_mpi.py) always travel in messages, because all CUDA-aware libraries accept them in
MPI_Isend and MPI_Irecv. Open MPI's non-blocking collective operations access GPU memory like host memory and crash
(https://github.com/open-mpi/ompi/issues/9845), and a wait in a blocking collective operation cannot have a deadline.

MPI's reductions guarantee neither an order nor the same bits on all ranks, and do not support some of our dtypes and
operations. So MPI only moves data, and our compiled reducers combine it in rank order. If the arrays are small, each
rank sends its array to all ranks, and every rank reduces all of them. Larger arrays are cut into a slice for each rank.
Each rank receives its slice of every rank's array, reduces these slices and sends the result to all ranks (the direct
algorithm of Rabenseifner 2004 for large arrays). So each rank sends and receives 2 (n - 1) / n times the bytes of the
array, the same as in a ring. Arrays of more than SEGMENT bytes are divided into segments, which are reduced one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...core import partition
from ...core.operations import KINDS, NO_ARRAY
from ...core.reduce_op import ReduceOp
from ...kernels.primitives import address_of
from ...kernels.reduce import Reducer, reducer
from . import compiled as c
from .agreement import Requests
from .library import MpiLibrary

LARGEST = 1 << 30
"""Maximum bytes of a message; MPI's counts go up to 2**31 - 1."""
REACH = (1 << 31) - 1
"""Blocks are near if at most this many bytes lie between the beginning of the first one and the end of the last."""
# Measured on a 2-core AMD EPYC (MPICH 5.0.2, Open MPI 5.0.11, one node). For 128 KiB, two ranks take 56 us if they
# gather whole arrays, and 58 to 65 us if each reduces a slice. For 4 KiB, they take 20 us and 30 us. With four ranks,
# gathering is faster for both sizes. 64 MiB take 7.4 ms in segments of 4 MiB, 7.9 ms in segments of 2 or 8 MiB, and 9.0
# to 9.5 ms in segments of 1 or 16 MiB.
GATHERED = 256 << 10
"""If all ranks' arrays together have at most this many bytes, every rank (in a `reduce`, only the root) receives all of
them and reduces them."""
SEGMENT = 4 << 20
"""Maximum bytes of an array that are reduced at one time."""
_STEP = 1 << 20  # bytes that one compiled call reduces; Python handles signals between two such calls

Block = tuple[int, int]
"""An address and a number of bytes."""
_NOWHERE: Block = (0, 0)


class Memory(Protocol):
    """The memory of the host or of GPUs.

    `copy`, `scratch` and `fold` return only when their work is complete.
    """

    @property
    def on_gpu(self) -> bool:
        """Whether this is the memory of GPUs.

        If it is, functions of the host, such as memmove, cannot use its addresses. MPI's messages can.
        """

    def blocks(self, arrays: Sequence[Any]) -> list[Block]:
        """Return the blocks of arrays, which must be contiguous."""

    def copy(self, source: Block, target: Block) -> None:
        """Copy the block `source` to `target`; the two are the same block or do not overlap."""

    def scratch(self, nbytes: int) -> tuple[int, Any]:
        """Return the address of `nbytes` scratch bytes, and the object that owns them.

        The next call of `scratch` may return the same bytes again.
        """

    def reducer(self, op: ReduceOp, dtype: np.dtype[Any], blocks: Sequence[Block]) -> Any:
        """Return the reducer for `blocks`, which are arrays of `dtype`.

        The reducer has an attribute `itemsize`. Returns None if these blocks cannot be reduced in this memory. Raises
        an error if `op` cannot reduce `dtype`.
        """

    def fold(self, how: Any, target: int, sources: Sequence[int], nbytes: int) -> None:
        """Reduce the arrays at `sources`, in this order, into `target`.

        The target is one of the sources, or overlaps none.
        """


class HostMemory:
    """The host's memory. A reduction combines the arrays of at most `ranks` ranks."""

    on_gpu = False

    def __init__(self, ranks: int) -> None:
        self._sources = np.zeros(ranks, np.int64)
        self._address = address_of(self._sources)
        self._scratch = np.empty(0, np.uint8)

    def blocks(self, arrays: Sequence[Any]) -> list[Block]:
        return [(c.address.call(x), x.nbytes) for x in arrays]

    def copy(self, source: Block, target: Block) -> None:
        if source[0] != target[0]:
            ctypes.memmove(target[0], source[0], source[1])

    def scratch(self, nbytes: int) -> tuple[int, Any]:
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return address_of(self._scratch), self._scratch

    def reducer(self, op: ReduceOp, dtype: np.dtype[Any], blocks: Sequence[Block]) -> Reducer:
        return reducer(op, dtype)

    def fold(self, how: Reducer, target: int, sources: Sequence[int], nbytes: int) -> None:
        left, step = nbytes // how.itemsize, max(_STEP // how.itemsize, 1)
        self._sources[: len(sources)] = sources
        while left > step:
            c.reduce.call(how.address, how.code, target, self._address, len(sources), step)
            left -= step
            target += step * how.itemsize
            self._sources[: len(sources)] += step * how.itemsize
        c.reduce.call(how.address, how.code, target, self._address, len(sources), left)


class Addressed(NamedTuple):
    """An operation (core/operation.py), with blocks for its arrays.

    `takes` are the blocks of the outputs, `gives` those of the inputs.
    """

    kind: str
    takes: Sequence[Block]
    gives: Sequence[Block]
    how: Any  # the reducer, as `memory.reducer` returned it
    root: int


class Execution:
    """Carries out calls on which all ranks have agreed.

    Every method blocks until this rank has finished. `tag` is the tag of messages that replace collective operations.
    `look` is called every 50 ms; an error that it raises ends the call.
    """

    def __init__(
        self,
        library: MpiLibrary,
        comm: Any,
        requests: Requests,
        tag: int,
        look: Callable[[], None],
        memory: Memory,
    ) -> None:
        self.size, self.rank, self.memory = comm.size, comm.rank, memory
        self._library, self._comm, self._requests, self._tag, self._look = library, comm, requests, tag, look
        self._sources = {"all_reduce": self.size, "scan": self.rank + 1, "exscan": self.rank}
        self._keep: Any = None
        self._scratch: Any = None

    def run(self, call: Addressed, near: bool, keep: Any) -> None:
        """Carry out a call of any kind in EXECUTED.

        `near` is true if, on every rank, the blocks of that rank are near one another. `keep` has the arrays: if the
        call is interrupted, they are kept until MPI is finalized, since MPI may still use them.
        """
        self._keep = keep
        try:
            EXECUTED[call.kind](self, call, near)
        finally:
            self._keep = None

    def run_attached(self, call: Addressed, attached: Sequence[int]) -> None:
        """Carry out a call whose data has arrived from all ranks.

        The data has arrived in the meeting or by `_gathered`. `attached` has the address of each rank's data.
        """
        if call.how is not None:
            last = self._sources.get(call.kind, self.size if self.rank == call.root else 0)
            if last:
                self.memory.fold(call.how, call.takes[0][0], attached[:last], call.gives[0][1])
        elif call.kind != "broadcast":
            # In a gather, only the root has targets; on the other ranks, `takes` is empty.
            for source, target in zip(attached, call.takes, strict=False):
                self.memory.copy((source, target[1]), target)
        elif self.rank != call.root:
            self.memory.copy((attached[call.root], call.takes[0][1]), call.takes[0])

    # ---- moves ---------------------------------------------------------------------------------------

    def broadcast(self, call: Addressed, near: bool) -> None:
        """Send the root's block to all ranks.

        On GPUs, the block moves along a binomial tree. Each rank receives it completely before it sends it on.
        """
        block, root = call.takes[0], call.root
        if not self.memory.on_gpu:
            with self._library.lock:
                posted = [
                    self._comm.Ibcast(self._library.data(*message), root) for message in messages_of(block)
                ]
            self._finish(posted)
            return
        offset, step = (self.rank - root) % self.size, 1
        while step < self.size and not offset & step:
            step *= 2
        if offset:
            self._post([], [((self.rank - step) % self.size, block)])
        steps = [1 << bit for bit in range(step.bit_length() - 1)]
        children = [(self.rank + ahead) % self.size for ahead in steps if offset + ahead < self.size]
        self._post([(child, block) for child in reversed(children)], [])

    def all_to_all(self, gives: Sequence[Block], takes: Sequence[Block], near: bool) -> None:
        """Send `gives[r]` to each rank r, and receive `takes[r]`.

        `gives[rank]` and `takes[rank]` may be the same block. No other block of `takes` overlaps a block of `gives`.
        """
        own = self.rank
        if gives[own][0] and takes[own][0]:
            self.memory.copy(gives[own], takes[own])
        if near and not self.memory.on_gpu:
            gives, takes = [[*blocks[:own], _NOWHERE, *blocks[own + 1 :]] for blocks in (gives, takes)]
            self._start(self._comm.Ialltoallv, self._vector(gives), self._vector(takes))
        else:
            peers = [(own + step) % self.size for step in range(1, self.size)]
            self._post([(peer, gives[peer]) for peer in peers], [(peer, takes[peer]) for peer in peers])

    def gather(self, x: Block, takes: Sequence[Block], root: int | None, near: bool) -> None:
        """Send each rank's x to the root, or to all ranks if `root` is None.

        A receiver stores rank r's x at `takes[r]`. `x` may be `takes[rank]`.
        """
        if root is not None:
            here = takes if self.rank == root else self._only(root, _NOWHERE)
            self.all_to_all(self._only(root, x), here, near)
        elif near and not self.memory.on_gpu:
            self.memory.copy(x, takes[self.rank])
            self._start(self._comm.Iallgatherv, self._library.MPI.IN_PLACE, self._vector(takes))
        else:
            self.all_to_all([x] * self.size, takes, False)

    def scatter(self, call: Addressed, near: bool) -> None:
        """Send each of the root's blocks to the rank that it is for."""
        gives = call.gives or self._only(call.root, _NOWHERE)
        self.all_to_all(gives, self._only(call.root, call.takes[0]), near)

    def _only(self, root: int, x: Block) -> list[Block]:
        return [x if rank == root else _NOWHERE for rank in range(self.size)]

    def _start(self, operation: Callable[..., Any], *args: Any) -> None:
        with self._library.lock:
            posted = operation(*args)
        self._finish([posted])

    def _post(self, gives: Sequence[tuple[int, Block]], takes: Sequence[tuple[int, Block]]) -> None:
        """Send `gives` and receive `takes`, which are pairs of a peer and a block."""
        comm, tag = self._comm, self._tag
        posted = []
        with self._library.lock:
            for start, moves in ((comm.Irecv, takes), (comm.Isend, gives)):
                for peer, block in moves:
                    posted += [
                        start(self._library.data(*message), peer, tag) for message in messages_of(block)
                    ]
        self._finish(posted)

    def _finish(self, posted: Sequence[Any]) -> None:
        self._requests.finish(posted, self._look, c.BUSY, (self._keep, self._scratch))

    def _vector(self, blocks: Sequence[Block]) -> list[Any]:
        """Return blocks as an argument of MPI's vector operations (MPI_Ialltoallv)."""
        MPI = self._library.MPI
        base, end = _span(blocks)
        counts = [nbytes for _, nbytes in blocks]
        displacements = [start - base if nbytes else 0 for start, nbytes in blocks]
        return [MPI.buffer.fromaddress(base, end - base), counts, displacements, MPI.BYTE]

    # ---- reductions ----------------------------------------------------------------------------------

    def all_reduce(self, call: Addressed, near: bool) -> None:
        """Reduce all ranks' arrays into the output of every rank.

        In a `reduce`, only the root gets the result. The output may be x, this rank's array.
        """
        how, x, out = call.how, call.gives[0], (call.takes or call.gives)[0]
        root = call.root if call.kind == "reduce" else None
        if x[1] * self.size <= GATHERED:
            self.run_attached(call, self._gathered(x, root))
            return
        for start, slices in segments(x[1], self.size, how.itemsize):
            first, nbytes = slices[self.rank]
            gives = [(x[0] + start + offset, count) for offset, count in slices]
            sources = self._collected(gives, self._room(self.size * nbytes), True)
            target = out[0] + start + first if root in (None, self.rank) else sources[self.rank - 1]
            self.memory.fold(how, target, sources, nbytes)
            takes = [(out[0] + start + offset, count) for offset, count in slices]
            self.gather((target, nbytes), takes, root, True)

    def scan(self, call: Addressed, near: bool) -> None:
        """Reduce the arrays of ranks 0..rank; in an exscan, those of ranks 0..rank-1.

        In an exscan, rank 0's output is unchanged. The output may be x, this rank's array.
        """
        how, x, out, exclusive = call.how, call.gives[0], call.takes[0], call.kind == "exscan"
        if x[1] * self.size <= GATHERED:
            self.run_attached(call, self._gathered(x, None))
            return
        for start, slices in segments(x[1], self.size, how.itemsize):
            nbytes = slices[self.rank][1]
            room = self._room(2 * self.size * nbytes)
            sources = self._collected(
                [(x[0] + start + offset, count) for offset, count in slices], room, True
            )
            gives = [(room + (self.size + rank) * nbytes, nbytes) for rank in range(self.size)]
            for rank in range(exclusive, self.size):
                self.memory.fold(how, gives[rank][0], sources[: rank + (not exclusive)], nbytes)
            takes = [(out[0] + start + offset, count) for offset, count in slices]
            if exclusive:
                gives[0] = _NOWHERE
                takes = takes if self.rank else [_NOWHERE] * self.size
            self.all_to_all(gives, takes, True)

    def reduce_scatter(self, call: Addressed, near: bool) -> None:
        """Reduce block `rank` of all ranks into the output.

        The output may be this rank's own block `rank`.
        """
        how, out, blocks = call.how, call.takes[0], call.gives
        rounds = max(1, -(-sum(nbytes for _, nbytes in blocks) // SEGMENT))
        for index in range(rounds):
            spans = [partition.even(nbytes, rounds, how.itemsize)[index] for _, nbytes in blocks]
            gives = [
                (address + first, nbytes) for (address, _), (first, nbytes) in zip(blocks, spans, strict=True)
            ]
            first, nbytes = spans[self.rank]
            sources = self._collected(gives, self._room(self.size * nbytes), near)
            self.memory.fold(how, out[0] + first, sources, nbytes)

    def _gathered(self, x: Block, root: int | None) -> list[int]:
        """Gather all ranks' arrays and return their addresses.

        They are gathered on the root, or on every rank if `root` is None.
        """
        room = self._room(self.size * x[1])
        takes = [(room + rank * x[1], x[1]) for rank in range(self.size)]
        self.gather(x, takes, root, True)
        return [address for address, _ in takes]

    def _collected(self, gives: list[Block], room: int, near: bool) -> list[int]:
        """Send `gives[r]` to each rank r, and receive all ranks' blocks for this rank.

        Returns the addresses of the blocks for this rank. Received blocks are stored at `room`; this rank's block for
        itself is not copied.
        """
        own, nbytes = gives[self.rank]
        takes = [(room + rank * nbytes, nbytes) for rank in range(self.size)]
        takes[self.rank] = own, nbytes
        self.all_to_all(gives, takes, near)
        return [address for address, _ in takes]

    def _room(self, nbytes: int) -> int:
        """Return the address of `nbytes` bytes of scratch memory; the next call may overwrite them."""
        room, self._scratch = self.memory.scratch(nbytes)
        return room


EXECUTED: dict[str, Callable[[Execution, Addressed, bool], None]] = {
    "all_reduce": Execution.all_reduce,
    "reduce": Execution.all_reduce,
    "scan": Execution.scan,
    "exscan": Execution.scan,
    "reduce_scatter": Execution.reduce_scatter,
    "broadcast": Execution.broadcast,
    "all_gather": lambda e, call, near: e.gather(call.gives[0], call.takes, None, near),
    "gather": lambda e, call, near: e.gather(call.gives[0], call.takes, call.root, near),
    "scatter": Execution.scatter,
    "all_to_all": lambda e, call, near: e.all_to_all(call.gives, call.takes, near),
    **{name: lambda e, call, near: None for name, kind in KINDS.items() if kind.form == NO_ARRAY},
}
"""The function for each kind of call; kinds without arrays are complete after the meeting."""


def are_near(blocks: Sequence[Block]) -> bool:
    """Return whether MPI's collective operations can address these blocks."""
    if len(blocks) < 2:
        return all(nbytes <= REACH for _, nbytes in blocks)
    base, end = _span(blocks)
    return end - base <= REACH


def _span(blocks: Sequence[Block]) -> tuple[int, int]:
    there = [(start, start + nbytes) for start, nbytes in blocks if nbytes]
    return (min(start for start, _ in there), max(end for _, end in there)) if there else (0, 0)


def messages_of(block: Block) -> list[Block]:
    """Divide a block into messages of at most LARGEST bytes."""
    begin, nbytes = block
    return [(begin + start, size) for start, size in partition.segments(nbytes, LARGEST)]


def segments(nbytes: int, ranks: int, itemsize: int) -> list[tuple[int, list[Block]]]:
    """Return each segment's offset, and each rank's slice of it.

    A slice is its offset in the segment and its number of bytes.
    """
    step = max(SEGMENT // itemsize, 1) * itemsize
    return [
        (start, [*partition.even(size, ranks, itemsize)]) for start, size in partition.segments(nbytes, step)
    ]
