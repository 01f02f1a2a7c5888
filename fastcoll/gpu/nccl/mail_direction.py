"""Direction: this rank's end of the messages from one rank to another, with a communicator and a stream of its own.

Its jobs run one after the other on a thread of its own, and may block there: nothing but this direction waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from ...core.work import ProgressQueue
from ...errors import AbortedError, FastcollError, GroupError
from ..array import DeviceArray
from ..stream_watch import Watcher
from ..stream_work import Own
from ..streams import StreamCarrier
from ..transit import Events
from .comm import Communicator
from .library import Library
from .mail_work import Message
from .seats import Patience

_SENDER, _RECEIVER = 0, 1  # ranks of the communicator


class Direction:
    """See this module's docstring.

    Args:
        carrier: the group's.
        peer: the other rank; this one itself for messages to oneself, which need no communicator.
        sending: whether messages go to the peer.
        device: this rank's GPU.
        events: where the messages' marks are given back.

    Attributes:
        queue: carries the jobs out.
    """

    def __init__(
        self, carrier: StreamCarrier, library: Library, peer: int, sending: bool, device: int, events: Events
    ) -> None:
        group = carrier._group
        name = f"{group.name}-{'to' if sending else 'from'}-{peer}"
        self.queue = ProgressQueue(name)
        self._carrier, self._library, self._group = carrier, library, group
        self._peer, self._sending, self._events = peer, sending, events
        self._comm: Communicator | None = None
        self._device = device
        self._lane: Own | None = None
        self._watcher = Watcher(name, group.timeout, self._look, carrier._fail)

    @property
    def is_connected(self) -> bool:
        """Whether the communicator is there."""
        return self._comm is not None

    # ---- on the queue's thread -----------------------------------------------------------------------

    def move(self, message: Message, identity: bytes) -> None:
        """Queue a message, after its peer has agreed; the first time make the communicator, which blocks.

        Args:
            identity: the communicator's, the first time.

        Raises:
            NcclError, GroupError: it cannot be done.
        """
        comm, x = self._communicator(identity), message.array

        def work(kept: list[Any]) -> None:
            with comm.group(message._describe):
                if self._sending:
                    comm.send(x.address, x.nbytes, _RECEIVER, self._own.stream)
                else:
                    comm.recv(x.address, x.nbytes, _SENDER, self._own.stream)
            if not self._sending:
                message.item.unpack(self._own.stream)

        self._queue([message], work)

    def copy(self, sent: Message, received: Message) -> None:
        """Queue a message to oneself."""

        def work(kept: list[Any]) -> None:
            src, dst = sent.array, received.array
            if dst.overlaps(src):
                src = self._copied(src, kept)
            self._own.runtime.copy(dst.address, src.address, src.nbytes, self._own.stream)
            received.item.unpack(self._own.stream)

        self._queue([sent, received], work)

    def buffer(self, message: Message, take: Callable[[DeviceArray], None]) -> None:
        """Queue a copy of an array, in memory of its own, which `take` gets before the message counts as queued."""
        self._queue([message], lambda kept: take(self._copied(message.array, kept)))

    @property
    def _own(self) -> Own:
        """The stream; made here, as making one may wait for the GPU."""
        if self._lane is None:
            self._lane = Own(self._carrier._runtime, self._device)
        return self._lane

    def _copied(self, x: DeviceArray, kept: list[Any]) -> DeviceArray:
        own = self._own
        memory = own.runtime.allocate(x.nbytes, own.device, own.stream)
        kept.append(memory)
        own.runtime.copy(memory.ptr, x.address, x.nbytes, own.stream)
        return DeviceArray(memory.ptr, x.dtype, x.shape, own.device, own.stream, memory)

    def _communicator(self, identity: bytes) -> Communicator:
        if self._comm is None:
            place = _SENDER if self._sending else _RECEIVER
            with self._carrier._runtime.on(self._device):
                self._comm = Communicator.make(
                    self._library, 2, place, identity, Patience(self._group, self._look_for_peer)
                )
            if self._carrier._broken:  # meanwhile, when there was nothing to abort yet
                self._comm.abort()
        return self._comm

    def _queue(self, messages: Sequence[Message], work: Callable[[list[Any]], None]) -> None:
        """Queue work behind what the arrays' streams held when the messages were posted; its end is theirs."""
        own = self._own
        kept: list[Any] = []
        with own.runtime.on(own.device):
            error = None
            try:
                with self._carrier._failing(messages[0]._describe):
                    for message in messages:
                        self._follow(message)
                    work(kept)
            except BaseException as problem:
                error = problem
                raise
            finally:
                # Also what was queued in part uses memory.
                for message in messages:
                    event = own.event()
                    own.runtime.record(event, own.stream)
                    message.queued_on(own, event, kept, error)
                    self._watcher.add(message)

    def _follow(self, message: Message) -> None:
        marks, message.marks = message.marks, []
        for device, event in marks:
            self._own.runtime.order(self._own.stream, event)
            self._events.give(device, [event])

    # ---- when things go wrong, and the end -----------------------------------------------------------

    def _look(self, doing: str) -> GroupError | None:
        found = None if self._comm is None else self._comm.trouble()
        if found is not None and self._group.failure is None:
            return AbortedError(f"{doing}: {found}")
        return self._group.failure or self._group.monitor.verdict([], doing)

    def _look_for_peer(self, doing: str) -> GroupError | None:
        return self._group.monitor.verdict([self._peer], doing)

    def break_off(self, error: GroupError) -> None:
        """End what runs on the GPU, and its Works with `error`; from any thread."""
        if self._comm is not None:
            self._comm.abort()
        self._watcher.break_off(error)

    def finish(self) -> None:
        """Block until all jobs are done and the GPU is through."""
        if self.queue._thread is not threading.current_thread():
            self.queue.submit("the end of messages", lambda: None)._join()
        self._watcher.drain()

    def disconnect(self) -> None:
        """End the communicator; waits for the peer, which does the same, for some seconds at most."""
        if self._comm is not None:
            self._comm.close()

    def close(self) -> None:
        """Give everything back, after `finish` and `disconnect`."""
        self.queue.close()
        self._watcher.close()
        if self._lane is not None:
            # A GPU that failed gives nothing back.
            with suppress(FastcollError) if self._carrier._broken else nullcontext():
                self._lane.end()
