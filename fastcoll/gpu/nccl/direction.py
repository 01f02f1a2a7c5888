"""Direction: this rank's end of the messages from one rank to another.

A direction has a communicator, a stream and a thread of its own. The thread runs the direction's jobs one after the
other. A job may block, because only this direction waits for it. NcclMessage is the Work of one message:

    posted -> claimed by the job that moves it -> queued on a GPU -> over
                                               -> over (an error, empty, or moved through the host)

A message is *over* when it is complete or has failed. A posted message can be claimed once (messages.py), and only its
claimer queues or ends it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...core.message import Status
from ...core.work import ENDLESS, ProgressQueue, Work, refuse_to_block
from ...errors import AbortedError, GroupError
from ..device_array import DeviceArray, OnDevice
from ..own_stream import OwnStream
from ..staging import CudaEvents, Marks
from ..stream_work import StreamWork, Watcher
from ..streams import StreamCarrier, StreamScope
from .bindings import BYTES, NcclLibrary
from .communicator import Backoff, Communicator

_SENDER, _RECEIVER = 0, 1  # ranks in the communicator


class NcclMessage(StreamWork):
    """A send or a receive.

    `wait()` blocks the host until the message is queued, and then makes streams wait for it, as any StreamWork does.

    Args:
        own: a stream on the array's GPU.
        item: the imported array; released when the message is over.
        kind: tag and dtype as one number (p2p/transfers.py).
        marks: events behind the work that was queued on the array's stream when the message was posted.
        number: identifies the message on this rank.

    Attributes:
        status: of a receive: filled when the message is matched; None if the caller wants no status.
        nbytes: bytes that are moved.
    """

    status: Status | None = None

    def __init__(
        self, describe: str, own: OwnStream, item: OnDevice, kind: int, marks: Marks, number: int
    ) -> None:
        super().__init__(describe, own, [item.array])
        self.item: Any = item
        self.kind, self.marks, self.number = kind, marks, number
        self.nbytes = item.array.nbytes
        self._begun = threading.Event()

    @property
    def array(self) -> DeviceArray:
        """The array that is moved, until the message is over."""
        array: DeviceArray = self.item.array
        return array

    @property
    def held(self) -> tuple[int, int]:
        """The kind (tag and dtype) and the bytes of the array."""
        return self.kind, self.array.nbytes

    @property
    def has_begun(self) -> bool:
        """Whether the message is queued, or over."""
        return self._begun.is_set() or self.ended

    def set_source(self, source: int, tag: int, nbytes: int) -> None:
        """Record which message a receive gets; called before the receive is queued or ends."""
        self.returned, self.nbytes = source, nbytes
        if self.status is not None:
            self.status.fill(source, tag, nbytes // (self.array.dtype.itemsize or 1), nbytes)

    def queued(self, own: OwnStream, event: int, kept: Any, error: BaseException | None) -> None:
        self.began = time.monotonic()
        super().queued(own, event, kept, error)
        if error is not None:
            self.settle(error)
        self._begun.set()

    def order_streams(self) -> None:
        if not self.has_begun:
            refuse_to_block(f"waiting for {self.describe}")
            self._begun.wait(ENDLESS)
        super().order_streams()

    def is_past(self) -> bool:
        return self.has_begun and super().is_past()

    def settle(self, error: BaseException | None = None) -> None:
        super().settle(error)
        self._begun.set()
        if self.event is None:
            self.let_go()

    def let_go(self) -> None:
        super().let_go()
        self.item = None


class Direction:
    """The messages to one peer, or from it; see the module docstring.

    The peer may be this rank; then no communicator is needed.
    """

    def __init__(
        self, carrier: StreamCarrier, library: NcclLibrary, peer: int, sending: bool, events: CudaEvents
    ) -> None:
        assert carrier.own_stream is not None
        group = carrier.group
        name = f"{group.name}-{'to' if sending else 'from'}-{peer}"
        self._carrier, self._library, self._group = carrier, library, group
        self._peer, self._sending, self._events = peer, sending, events
        self._device = carrier.own_stream.device
        self.communicator: Communicator | None = None
        self._own_stream: OwnStream | None = None
        self._watcher = Watcher(name, lambda: group.timeout, self._look, carrier.fail)
        self._jobs = ProgressQueue(name)
        self._ending: Work | None = None

    def submit(self, message: NcclMessage, job: Callable[[], None]) -> None:
        """Run a job on the direction's thread."""
        self._jobs.submit(message.describe, job)

    # ---- on the direction's thread -------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self.communicator is not None

    def move(self, message: NcclMessage, identity: bytes) -> None:
        """Queue a message that both ranks have agreed to move by NCCL.

        The first call creates the communicator, and blocks.
        """
        if self.communicator is None:
            rank = _SENDER if self._sending else _RECEIVER
            backoff = Backoff(self._group, lambda doing: self._group.monitor.decide([self._peer], doing))
            with self._carrier.runtime.on(self._device):
                self.communicator = Communicator.make(self._library, 2, rank, identity, backoff)
            if self._carrier.broken:  # the group failed while there was no communicator to abort
                self.communicator.abort()
        comm, x = self.communicator, message.array

        def work(scope: StreamScope) -> None:
            operation, peer = ("send", _RECEIVER) if self._sending else ("recv", _SENDER)
            with comm.group(message.describe):
                comm.queue(operation, scope.stream, x.address, message.nbytes, BYTES, peer)
            if not self._sending:
                message.item.unpack(scope.stream)

        self._queue([message], work)

    def copy(self, sent: NcclMessage, received: NcclMessage) -> None:
        """Queue a message to this rank itself."""

        def work(scope: StreamScope) -> None:
            scope.copy(received.array, sent.array)
            received.item.unpack(scope.stream)

        self._queue([sent, received], work)

    def buffer(self, message: NcclMessage, take: Callable[[DeviceArray], None]) -> None:
        """Queue a copy of the message's array to scratch memory.

        `take` is called with the copy before the message counts as queued.
        """
        self._queue([message], lambda scope: take(scope.copied([message.array])))

    def _queue(self, messages: Sequence[NcclMessage], work: Callable[[StreamScope], None]) -> None:
        """Queue work behind the work that was queued on the arrays' streams when the messages were posted.

        The messages are complete when this work has ended.
        """
        if self._own_stream is None:
            # Created on this thread, because creating a stream may wait for the GPU.
            self._own_stream = OwnStream(self._carrier.runtime, self._device)
        own = self._own_stream
        with self._carrier.queueing(messages, own, self._watcher) as scope:
            for message in messages:
                marks, message.marks = message.marks, []
                for device, event in marks:
                    own.runtime.order(own.stream, event)
                    self._events.give(device, [event])
            work(scope)

    # ---- when things go wrong, and the end -----------------------------------------------------------

    def _look(self, doing: str) -> GroupError | None:
        found = None if self.communicator is None else self.communicator.trouble()
        if found is not None and self._group.failure is None:
            return AbortedError(f"{doing}: {found}")
        return self._group.failure or self._group.monitor.decide([], doing)

    def break_off(self, error: GroupError) -> None:
        """Complete the Works of the work on the GPU with `error`; from any thread."""
        self._watcher.break_off(error)

    def finish(self) -> None:
        """Block until all jobs are done and the GPU has finished."""
        self._jobs.submit("the end of messages", lambda: None).join()
        self._watcher.drain()

    def disconnect(self) -> None:
        """Begin to end the communicator, on the direction's thread.

        The end takes at most some seconds, in which the thread waits for the peer to end its side.
        """
        if self.communicator is not None:
            self._ending = self._jobs.submit("the end", self.communicator.close)

    def close(self) -> None:
        """Free everything, after `finish` and `disconnect`."""
        if self._ending is not None:
            self._ending.join()
        self._jobs.close()
        self._watcher.close()
        if self._own_stream is not None:
            self._own_stream.end(self._carrier.broken)
