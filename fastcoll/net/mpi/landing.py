"""Receiving into the memory of a GPU: MPI writes there, but the courier is the host's and may not.

A message that comes before its receive is posted, or from this rank itself, lies in the host's memory already. It is
kept, and brought to the GPU when the receive is finished, which is on a thread that may wait for a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from ...interop.arrays import Adopted, Array
from ...kernels.primitives import address_of
from ...p2p.courier import Courier
from ...p2p.matching import Message
from ...p2p.transfers import Receive


class Landing(Adopted):
    """An array on a GPU that a message is received into.

    Args:
        view: an ndarray at its address, which nobody may read or write on the host.
        finish: called in the end; takes what the host has of the message, or None where MPI has written it.
    """

    __slots__ = ("_came", "_finish")

    def __init__(self, view: Array, finish: Callable[[Array | None], None]) -> None:
        super().__init__(view)
        self._came: Array | None = None
        self._finish = finish

    def keep(self, address: int) -> None:
        """Keep the message at an address of the host; it has the size of the array."""
        self._came = np.empty(self.array.shape, self.array.dtype)
        ctypes.memmove(address_of(self._came), address, self.array.nbytes)

    def finish(self) -> None:
        came, self._came = self._came, None
        self._finish(came)


class MpiCourier(Courier):
    """A courier whose receives may be Landings."""

    def _settle(self, message: Message, receive: Receive) -> None:
        target = receive._adopted
        if isinstance(target, Landing) and message.address and receive.fits(message.kind, message.nbytes):
            target.keep(message.address)
            message.address = 0
        super()._settle(message, receive)
