"""Memory: where the arrays of a call lie, and what a rank does there by itself. The host's is here.

That of GPUs (gpu/cuda_aware_mpi.py) is given to MPI_Isend and MPI_Irecv alone. All CUDA-aware libraries take it
there, but Open MPI's non-blocking collective operations read it as the host's and crash
(https://github.com/open-mpi/ompi/issues/9845), and the blocking ones know no deadline.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ...core.reduce_op import ReduceOp
from ...kernels.primitives import address_of
from ...kernels.reduce import Reducer, reducer
from . import compiled

Block = tuple[int, int]
"""Address and bytes."""

_PIECE = 1 << 20  # bytes that are reduced at a time: in between Python sees signals


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
        """What reduces such blocks, with an attribute `itemsize`; None: they cannot be reduced here.

        Raises what is wrong with the two.
        """

    def fold(self, how: Any, target: int, sources: Sequence[int], nbytes: int) -> None:
        """Reduce the arrays at `sources`, in this order, into the one at `target`: one of them, or apart from all."""


class HostMemory:
    """The host's memory, for reductions of so many ranks' arrays."""

    on_gpu = False

    def __init__(self, ranks: int) -> None:
        self._sources = np.zeros(ranks, np.int64)
        self._address = address_of(self._sources)
        self._scratch = np.empty(0, np.uint8)

    def blocks(self, arrays: Sequence[Any]) -> list[Block]:
        return [(compiled.address.call(x), x.nbytes) for x in arrays]

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
        left, piece = nbytes // how.itemsize, max(_PIECE // how.itemsize, 1)
        self._sources[: len(sources)] = sources
        while left > piece:
            compiled.reduce.call(how.address, how.code, target, self._address, len(sources), piece)
            left -= piece
            target += piece * how.itemsize
            self._sources[: len(sources)] += piece * how.itemsize
        compiled.reduce.call(how.address, how.code, target, self._address, len(sources), left)
