"""Messages of arrays on GPUs over a CUDA-aware MPI library: as they are, where they are not small.

Small ones travel inside the letters of net/mpi_mail.py, which the host writes, and so are staged, as is what a rank
sends itself. Nothing of this shows on the other side: a message may come from a GPU and go to the host's memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.group import ProcessGroup
from ..core.work import Work
from ..interop.arrays import Adopted, Array
from .array import DeviceArray
from .staged_mail import arrays_of
from .transit import Transit, laid_out


class DirectMail:
    """The messages of one group of the backend mpi that are large; arguments and results are those of its own hooks.

    Attributes:
        device: the GPU of the last message.
    """

    def __init__(self, group: ProcessGroup, transit: Transit) -> None:
        self._group, self._transit = group, transit
        self._hooks: Any = group
        self.device = 0

    def suits(self, x: Adopted, dst: int | None) -> bool:
        """Whether a message, to rank `dst` or to be received, may go without the host."""
        return bool(x.array.nbytes > self._hooks.least_on_gpus) and dst != self._group.rank

    def send(self, x: Adopted, dst: int, tag: int) -> None:
        with self._transit.in_use(arrays_of([x])):
            self._group._send(Adopted(self._ready(x, "send")), dst, tag)

    def isend(self, x: Adopted, dst: int, tag: int) -> Work:
        with self._transit.in_use(arrays_of([x])):
            return self._group._isend(Adopted(self._ready(x, "isend")), dst, tag)

    def recv(self, x: Adopted, src: int | None, tag: int) -> int:
        with self._transit.in_use(arrays_of([x])):
            return self._group._recv(self._landing(x), src, tag)

    def irecv(self, x: Adopted, src: int | None, tag: int) -> Work:
        with self._transit.in_use(arrays_of([x])):
            return self._group._irecv(self._landing(x), src, tag)

    def _ready(self, adopted: Adopted, name: str) -> Array:
        """An ndarray that stands for an array, once its stream has come here."""
        (x,) = arrays_of([adopted])
        self.device = x.device
        self._transit.await_marks(self._transit.mark([x]), name)
        return _view(x)

    def _landing(self, adopted: Adopted) -> Adopted:
        (x,) = arrays_of([adopted])

        def finish(came: Array | None) -> None:
            with self._transit.in_use([x]):
                if came is not None:
                    with self._transit.pool.lent(x.nbytes) as buffer:
                        (host,) = laid_out(buffer, [x])
                        host[...] = came
                        self._transit.bring([x], [host])
                adopted.finish()

        landing: Adopted = self._hooks.landing(self._ready(adopted, "recv"), finish)
        return landing


class _Bytes:
    """NumPy's protocol for the bytes of an array on a GPU, which it does not touch."""

    def __init__(self, x: DeviceArray) -> None:
        self.owner = x
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (x.nbytes,),
            "data": (x.address, False),
        }


def _view(x: DeviceArray) -> Array:
    """An ndarray with an array's address, dtype and size, which keeps it alive; its elements may not be touched."""
    flat: Array = np.asarray(_Bytes(x)).view(x.dtype)
    return flat
