"""The meeting that every collective over MPI begins with: each rank tells every other what it calls.

A row travels between each two ranks by persistent requests, which can be taken back and show who has not come; a
collective operation of MPI can neither. It has 40 bytes and, where it is small, the rank's data: MPI lets a message
be shorter than the memory for it, so rows of a few sizes go to the same requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.pointers import address_of
from ..tcp.sizes import Sizes
from . import meet_kernels as words
from .kernels import AGAIN
from .library import Library
from .requests import Requests, abandon

_ROOMS = (88, 1 << 10, 4 << 10, 16 << 10, 64 << 10)
"""Bytes of data for which there are rows. all_reduce of two ranks on a 2-core AMD EPYC, in a row and otherwise: 1 KiB
2.5 and 21 us, 16 KiB 18 and 38, 64 KiB 51 and 74 (MPICH 5.0.2; Open MPI 5.0.11: 3.7 and 22, 20 and 37, 51 and 73); of
four ranks 12 and 118, 43 and 178, 86 and 232."""
_MOST_BYTES = 256 << 10  # of all ranks' data together, which each rank keeps
_LITTLE = 4 << 10


class Said:
    """What a rank says of a call, made once for all calls that are alike.

    Args:
        code: the call word of core/signature.py.
        sizes: bytes that the rank contributes, gives and expects.
        balance: a sum over what it gives less one over what it expects; over all ranks it is 0 if these match.

    Attributes:
        table, address: the words of mpi_meet_kernels.py.
    """

    __slots__ = ("address", "finishes", "sizes", "table")

    def __init__(self, code: int, sizes: Sizes, balance: int) -> None:
        self.sizes = sizes
        self.table: NDArray[np.int64] = np.zeros(words.CALL_WORDS, np.int64)
        self.table[: words.FINISH] = code, sizes.shape, balance
        self.address = address_of(self.table)
        self.finishes = False

    def finish_by(
        self, how: int, nbytes: int, root: int = 0, reducer: int = 0, op: int = 0, count: int = 0
    ) -> None:
        """Have the compiled call do all of it: `how` and the rest are words of its table."""
        self.table[words.FINISH :] = how, nbytes, reducer, op, count, root
        self.finishes = True


def row_sizes(ranks: int) -> list[int]:
    """The sizes of rows in bytes, ascending, in a group of so many ranks."""
    rooms = [room for room in _ROOMS if room == _ROOMS[0] or room * ranks <= _MOST_BYTES]
    return [words.HEAD_BYTES + room for room in rooms]


class Meeting:
    """The rows of a group's ranks.

    Args:
        comm: the group's communicator.
        dedicated: as for Requests.
        tag: of the rows.

    Attributes:
        address: of the words of mpi_meet_kernels.py.
        room: bytes that a rank may attach.
        little: the same where the data is for one rank, and all get it.
        rows: of the call under way, by group rank; a word each of what the kernels name ROW_...
        attached: the address of what each rank attached.
    """

    def __init__(self, library: Library, comm: Any, dedicated: bool, tag: int) -> None:
        self.size, self.rank = comm.size, comm.rank
        sizes = row_sizes(self.size)
        self.room = sizes[-1] - words.HEAD_BYTES
        self.little = min(self.room, _LITTLE)
        self.rows: NDArray[np.int64] = np.zeros((self.size, sizes[-1] // 8), np.int64)
        first = address_of(self.rows) + words.HEAD_BYTES
        self.attached = [first + sizes[-1] * rank for rank in range(self.size)]
        self._library = library
        self._requests = Requests(library, dedicated)
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._persistent = self._make_requests(comm, tag, sizes)
        handles = self._requests.handles(self._persistent)
        self._requests.reserve(2 * len(self._peers))
        self._tables = np.array(handles, np.int64), np.array(self.attached, np.int64)
        self._words: NDArray[np.int64] = np.zeros(words.LIMITS + len(sizes), np.int64)
        self._words[words.ROWS : words.CALLS] = address_of(self.rows), sizes[-1], self.size, self.rank
        self._words[words.TABLE : words.NEAR] = self._requests.address, library.start
        self._words[words.HANDLES : words.LIMITS] = [address_of(table) for table in self._tables]
        self._words[words.LIMITS :] = [size - words.HEAD_BYTES for size in sizes]
        self.address = address_of(self._words)

    def _make_requests(self, comm: Any, tag: int, sizes: Sequence[int]) -> list[Any]:
        """Those that receive rows, one a peer, then those that send rows of each size."""
        MPI, mine = self._library.MPI, self.rows[self.rank]
        with self._library.lock:
            made = [comm.Recv_init([self.rows[peer], MPI.BYTE], peer, tag) for peer in self._peers]
            for size in sizes:
                row = [mine[: size // 8], MPI.BYTE]
                made += [comm.Send_init(row, peer, tag) for peer in self._peers]
        return made

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return int(self._words[words.CALLS])

    @property
    def under_way(self) -> bool:
        """Whether a call has begun and is not over."""
        return bool(self._words[words.UNDER_WAY])

    def end(self) -> None:
        """The call is over."""
        self._words[words.UNDER_WAY] = 0

    def meet(self, said: Said, near: bool, attached: Sequence[int], look: Callable[[], None]) -> int:
        """Begin a call; returns AGREED, APART, DIFFERENT or UNBALANCED once all rows are here.

        Args:
            near: whether MPI's collective operations can address this rank's arrays.
            attached: address and bytes, at most `room`, of what goes in the row; or empty.
            look: as for Requests.finish.
        """
        source, nbytes = attached or (0, 0)
        self._words[words.NEAR : words.HANDLES] = near, source, nbytes
        with self._library.lock:
            code = words.meet.call(self.address, said.address)
        return self.go_on(code, lambda: words.meet.call(self.address | words.RESUMED, said.address), look)

    def go_on(self, code: int, resume: Callable[[], int], look: Callable[[], None]) -> int:
        """What a compiled call returns in the end, if it has come back with `code`; `resume` calls it again."""
        try:
            while code == AGAIN:
                self._requests.pause(look)
                with self._library.lock:
                    code = resume()
            if code < 0:
                raise self._library.MPI.Exception(-code)
        except BaseException:
            abandon(self._persistent, (self.rows, self._words, self._tables))
            raise
        return code

    def late(self) -> list[int]:
        """The group ranks whose rows have not come."""
        return [self._peers[slot] for slot in self._requests.open() if slot < len(self._peers)]

    def free(self) -> None:
        """Release the requests; none may be active."""
        with self._library.lock:
            for request in self._persistent:
                request.Free()
