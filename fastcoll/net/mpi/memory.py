"""Memory: where the arrays of a call lie, and what a rank does there by itself. The host's is here.

That of GPUs (fastcoll/gpu/mpi_memory.py) is given to MPI_Isend and MPI_Irecv alone. All CUDA-aware libraries take it
there, but Open MPI's non-blocking collective operations read it as the host's and crash
(https://github.com/open-mpi/ompi/issues/9845), and the blocking ones know no deadline.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ...core.operands import Array
from ...core.reduce_op import ReduceOp
from ...kernels.pointers import address_of
from ...kernels.reduce import Reducer, reducer
from . import kernels as words

Block = tuple[int, int]
"""Address and bytes."""

_PIECE = 1 << 20  # bytes that are reduced between two looks at the clock
_LOOK_EVERY = 0.05


class Reducing(Protocol):
    """A reduction of one operation and dtype."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""


class Memory(Protocol):
    """The memory of the host or of GPUs. Every method but `blocks` and `reducer` blocks until it is done."""

    @property
    def on_gpu(self) -> bool:
        """Whether it is a GPU's: then only MPI's messages take its addresses, and no call of the host may."""

    def blocks(self, arrays: Sequence[Any]) -> list[Block]:
        """The arrays' blocks; they must be contiguous."""

    def copy(self, source: Block, target: Block) -> None:
        """Copy a block; they are the same, or apart."""

    def scratch(self, nbytes: int) -> tuple[int, Any]:
        """The address of so many bytes, and what keeps them; what is in them is lost with the next call of this."""

    def reducer(self, op: ReduceOp, dtype: np.dtype[Any], blocks: Sequence[Block]) -> Any:
        """The Reducing of such blocks; None: they cannot be reduced here. Raises what is wrong with the two."""

    def fold(self, how: Any, target: int, sources: Sequence[int], nbytes: int) -> None:
        """Reduce the arrays at `sources`, in this order, into the one at `target`: one of them, or apart from all."""


class HostMemory:
    """The host's memory.

    Args:
        ranks: the most sources of a reduction.
        worked: called every 50 ms while reducing.
    """

    on_gpu = False

    def __init__(self, ranks: int, worked: Callable[[], None]) -> None:
        self._worked = worked
        self._sources = np.zeros(ranks, np.int64)
        self._words = np.zeros(6, np.int64)
        self._words[3] = address_of(self._sources)
        self._address = address_of(self._words)
        self._scratch = np.empty(0, np.uint8)

    def blocks(self, arrays: Sequence[Any]) -> list[Block]:
        return blocks_of(arrays)

    def copy(self, source: Block, target: Block) -> None:
        copy(source, target)

    def scratch(self, nbytes: int) -> tuple[int, Any]:
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return address_of(self._scratch), self._scratch

    def reducer(self, op: ReduceOp, dtype: np.dtype[Any], blocks: Sequence[Block]) -> Reducer:
        return reducer(op, dtype)

    def fold(self, how: Reducer, target: int, sources: Sequence[int], nbytes: int) -> None:
        table, count = self._words, nbytes // how.itemsize
        table[0], table[1], table[4] = how.address, how.code, len(sources)
        if nbytes <= _PIECE:
            self._sources[: len(sources)] = sources
            table[2], table[5] = target, count
            words.reduce.call(self._address)
            return
        step = max(_PIECE // how.itemsize, 1)
        looked = time.monotonic()
        for first in range(0, count, step):
            start = first * how.itemsize
            self._sources[: len(sources)] = [source + start for source in sources]
            table[2], table[5] = target + start, min(step, count - first)
            words.reduce.call(self._address)
            if time.monotonic() - looked > _LOOK_EVERY:
                self._worked()
                looked = time.monotonic()


def blocks_of(arrays: Sequence[Array]) -> list[Block]:
    """The blocks of contiguous arrays of the host."""
    return [(words.address.call(x), x.nbytes) for x in arrays]


def copy(source: Block, target: Block) -> None:
    """Copy within the host's memory; they are the same block, or apart."""
    if source[0] != target[0]:
        ctypes.memmove(target[0], source[0], source[1])
