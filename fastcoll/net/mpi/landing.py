"""Receiving into the memory of a GPU: MPI writes there, but the engine is the host's and may not.

A message that comes before its receive is posted, or from this rank itself, lies in the host's memory already. It is
kept, and brought to the GPU when the receive is finished, which is on a thread that may wait for a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from ...interop.arrays import Adopted, Array
from ...kernels.primitives import address_of


class Landing(Adopted):
    """An array on a GPU that a message is received into.

    Args:
        view: an ndarray at its address, which nobody may read or write on the host.
        finish: called in the end; takes what the host has of the message, or None where MPI has written it.
    """

    __slots__ = ("_came", "_finish")
    owes = True

    def __init__(self, view: Array, finish: Callable[[Array | None], None]) -> None:
        super().__init__(view)
        self._came: Array | None = None
        self._finish = finish

    def put(self, address: int, nbytes: int) -> None:
        """Keep the message at an address of the host; it has the size of the array."""
        self._came = np.empty(self.array.shape, self.array.dtype)
        ctypes.memmove(address_of(self._came), address, nbytes)

    def finish(self) -> None:
        came, self._came = self._came, None
        self._finish(came)
