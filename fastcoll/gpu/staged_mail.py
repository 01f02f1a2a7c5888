"""Messages of arrays on GPUs, through pinned host memory and the mailbox of the group's CPU backend.

A send waits for the array's stream and copies the array to the host; the message goes on from there, and the array is
free again when it is said to be sent, as with any. A receive is posted with host memory; whoever completes it waits for
the array's stream and copies the message to the GPU, before the receive is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.group import ProcessGroup
from ..core.work import Work
from ..interop.arrays import Adopted, Array
from .device_array import DeviceArray
from .transit import Marks, Transit, laid_out


class StagedMail:
    """The messages of one group; arguments, results and errors are those of the group's own hooks."""

    def __init__(self, group: ProcessGroup, transit: Transit) -> None:
        self._group, self._transit = group, transit

    def send(self, x: Adopted, dst: int, tag: int) -> None:
        buffer, host = self._fetched(x, "send")
        self._group.messages.send(Adopted(host), dst, tag)
        self._transit.pool.give(buffer)

    def isend(self, x: Adopted, dst: int, tag: int) -> Work:
        return self._isend(*self._fetched(x, "isend"), dst, tag)

    def isend_after(self, x: Adopted, dst: int, tag: int, marks: Marks) -> Work:
        """As `isend`, of an array whose stream was at `marks` when it was given."""
        return self._isend(*self._fetched(x, "isend", marks), dst, tag)

    def _isend(self, buffer: Array, host: Array, dst: int, tag: int) -> Work:
        work = self._group.post_send(Adopted(host), dst, tag)

        def give(work: Work) -> None:
            # After an error channels may still know the memory; it goes when they do.
            if work.is_success():
                self._transit.pool.give(buffer)

        work.add_done_callback(give)
        return work

    def _fetched(self, adopted: Adopted, name: str, marks: Marks | None = None) -> tuple[Array, Array]:
        """A buffer, and in it what an array holds once its stream has come here."""
        (x,) = arrays_of([adopted])
        with self._transit.in_use([x]):
            buffer = self._transit.pool.take(x.nbytes)
            (host,) = laid_out(buffer, [x])
            self._transit.await_marks(self._transit.mark([x]) if marks is None else marks, name)
            self._transit.fetch([x], [host])
        return buffer, host.reshape(x.shape)

    def recv(self, x: Adopted, src: int | None, tag: int) -> int:
        return self._group.messages.recv(_Incoming(self._transit, x), src, tag)

    def irecv(self, x: Adopted, src: int | None, tag: int) -> Work:
        return self._group.post_receive(_Incoming(self._transit, x), src, tag)

    def irecv_after(self, x: Adopted, src: int, tag: int, marks: Marks) -> Work:
        """As `irecv`, of an array whose stream was at `marks` when it was given; waits for it here, not at the end."""
        with self._transit.in_use(arrays_of([x])):
            self._transit.await_marks(marks, "irecv")
            return self._group.post_receive(_Incoming(self._transit, x, []), src, tag)


class _Incoming(Adopted):
    """Host memory that a message is received into; `finish` brings it to the GPU."""

    __slots__ = ("_buffer", "_marks", "_target", "_transit")
    owes = True

    def __init__(self, transit: Transit, target: Adopted, marks: Marks | None = None) -> None:
        (x,) = arrays_of([target])
        self._transit, self._target = transit, target
        with transit.in_use([x]):
            self._buffer = transit.pool.take(x.nbytes)
            self._marks = transit.mark([x]) if marks is None else marks
        (host,) = laid_out(self._buffer, [x])
        super().__init__(host.reshape(x.shape))

    def finish(self) -> None:
        targets = arrays_of([self._target])
        with self._transit.in_use(targets):
            self._transit.await_marks(self._marks, "recv")
            self._transit.bring(targets, [self.array.reshape(-1)])
            self._target.finish()
        self._transit.pool.give(self._buffer)


def arrays_of(items: Sequence[Adopted]) -> list[DeviceArray]:
    """The arrays on GPUs in what a carrier has adopted."""
    arrays: list[Any] = [item.array for item in items]
    return arrays
