"""Link: one connection to another worker, of which the side that dialed makes calls, and the other answers.

Any thread sends, one after the other, each message whole. Who holds `reading` reads. Of a link that was dialed that is
a thread that waits for an answer, if there is one: nobody else has to be woken for it then. Else the readers' threads
do, which are told to (`arm`) while answers are expected. No answer stays unread: a caller first enters its call into
`pending` and then looks whether somebody reads; who has read first releases `reading` and then looks into `pending`
(`look_after`); so one of them sees the other, and arms the link. Nobody takes that back but who reads next.
"""

from __future__ import annotations

import logging
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic, perf_counter
from typing import Any

from ..core.work import ENDLESS
from .readers import HANG_UP, READ, Readers, Task, reads
from .slots import Ring
from .wire import Assembler, MessageType, Received, pieces
from .worker import WorkerInfo

_log = logging.getLogger("fastcoll")
_LOOK_SECONDS = 0.1
_CLOSE_SECONDS = 2.0
_SILENT_MILLISECONDS = 8000  # as long as a connection without data under way is probed
_RETRANSMITS = 3  # these take 1.4 s: after a long silence, what was just sent may not be answered yet
_INFO = struct.Struct("@2xB21xI28xI")  # struct tcp_info: retransmits, unacked, last_ack_recv


class Link:
    """A connection, which it owns, to or from `worker`.

    Args:
        received: makes a task of a message, if there is anything to do for it.
        ended: called, maybe more than once, when the other side has ended.

    Attributes:
        pending: the calls made over it that are not answered yet, by their numbers.
        abandoned: the numbers of calls whose time was up before; their answers are read all the same.
        said_goodbye: how the other side has left in order, once it has.
        ring: for large buffers, once both sides have it.
    """

    def __init__(
        self,
        connection: socket.socket,
        worker: WorkerInfo,
        dialed: bool,
        readers: Readers,
        received: Callable[[Link, Received], Task | None],
        ended: Callable[[Link], None],
    ) -> None:
        self.worker, self.dialed = worker, dialed
        self.pending: dict[int, Any] = {}
        self.abandoned: set[int] = set()
        self.said_goodbye: str | None = None
        self.is_closed = self.is_lost = self._is_broken = self._is_stuck = False
        self.armed = 0
        self.reading = threading.Lock()
        self.ring: Ring | None = None
        self._offered: Ring | None = None
        self._readers, self._ended = readers, ended
        self._received = partial(received, self)
        self._socket, self._fileno = connection, connection.fileno()
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN | select.POLLRDHUP)
        self._assembler = Assembler(self._take_buffer)
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._fileno

    # ---- sending -------------------------------------------------------------------------------------------

    def send(
        self,
        message: MessageType,
        kind: int,
        call: int,
        pickled: bytes,
        buffers: Sequence[memoryview] = (),
        context: bytes = b"",
        until: float = ENDLESS,
    ) -> None:
        """Send a message, and wait until the kernel has all of it; OSError: the other side is gone.

        At the time `until` a thread of the readers goes on with it: no other message can go before it is whole.
        """
        goes_on, held = False, list[bool]()
        try:
            # A Ctrl-C that comes meanwhile is raised before the lock is acquired, or when `held` says so.
            held.extend(map(self._sending.acquire, (True,), (max(until - monotonic(), 0.0),)))
            if not held[0]:
                self._go_on(partial(self.send, message, kind, call, pickled, buffers, context))
                return
            ring = self.ring
            start, behind = pieces(message, kind, call, pickled, buffers, context, ring is not None)
            try:
                sent = 0
                with suppress(BlockingIOError):
                    sent = self._socket.send(start)
                if sent == len(start) and not behind:
                    return
                steps = self._steps(memoryview(start)[sent:], behind, ring)
                goes_on = not self._follow(steps, until)
            except BaseException:
                self.shut()  # the other side may have a part of a message
                raise
        finally:
            if held == [True] and not goes_on:
                self._sending.release()
        if goes_on:
            self._go_on(partial(self._finish, steps))

    def _go_on(self, sending: Task) -> None:
        """Have a thread of the readers send."""

        def send() -> None:
            try:
                sending()
            except OSError:
                self.ended()

        self._readers.run(send)

    def _finish(self, steps: Iterator[None]) -> None:
        try:
            self._follow(steps, ENDLESS)
        finally:
            self._sending.release()

    def _follow(self, steps: Iterator[None], until: float) -> bool:
        """Do all steps; False: it is late, and some are left."""
        for _ in steps:
            self._is_stuck = True
            self._look()
            if monotonic() > until:
                return False
        self._is_stuck = False
        return True

    def _steps(self, start: memoryview, behind: Sequence[memoryview], ring: Ring | None) -> Iterator[None]:
        """Send what is left of a message; yields when it has waited for a while."""
        yield from self._send_rest(start)
        for buffer in behind:
            yield from self._send_rest(buffer) if ring is None else ring.put(buffer)

    def say_goodbye(self, farewell: str) -> None:
        """Tell the other side how this one leaves, unless a message is stuck on its way there."""
        end = monotonic() + _CLOSE_SECONDS  # who sends may just lack a core
        while not (has := self._sending.acquire(timeout=_LOOK_SECONDS)) and monotonic() < end:
            if self._is_stuck:
                break
        if has:
            try:
                with suppress(OSError):
                    self._socket.send(pieces(MessageType.GOODBYE, 0, 0, farewell.encode())[0])
            finally:
                self._sending.release()

    def _send_rest(self, left: memoryview) -> Iterator[None]:
        while left.nbytes:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                poller = select.poll()
                poller.register(self._fileno, select.POLLOUT)
                poller.poll(1000 * _LOOK_SECONDS)
                yield

    def _look(self) -> None:
        """Raise when waiting for the other side is in vain."""
        poller = select.poll()
        poller.register(self._fileno, select.POLLRDHUP)
        if self.is_closed or poller.poll(0) or self.is_unreachable():
            raise ConnectionError("the connection was closed")

    def is_unreachable(self) -> bool:
        """Whether the other host does not answer what it was sent.

        The kernel probes a silent connection, and gives it up after 8 s, but sends data again for 15 minutes.
        TCP_USER_TIMEOUT would also end one whose reader is stopped and leaves its buffer full; its kernel answers.
        """
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        except OSError:  # closed
            return False
        retransmits, unacked, silent_milliseconds = _INFO.unpack(info)
        return bool(unacked) and retransmits >= _RETRANSMITS and silent_milliseconds > _SILENT_MILLISECONDS

    def offer_ring(self) -> None:
        """Offer the other side, which is on this node, shared memory."""
        self._offered, offer = Ring.offer()
        self.send(MessageType.RING, 0, 0, offer)

    def answer_offer(self, pid: int, offer: bytes) -> None:
        """Take what process `pid` offers, if it can be opened here."""
        ring = None
        with suppress(OSError):
            ring = Ring.accept(pid, offer)
        with suppress(OSError):  # else the other side is gone, which its end will tell
            self.send(MessageType.RING, 0, ring is not None, b"")
        self.ring = ring

    def offer_answered(self, taken: bool) -> None:
        """The other side has taken what was offered, or not."""
        if taken:
            self.ring = self._offered
        elif self._offered is not None:
            self._offered.close()
            self._offered = None

    # ---- reading -------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Whether there is something to read; with `reading`."""
        return bool(self._poller.poll(0))

    def take(self) -> list[Task] | None:
        """What is to be done for the messages that have come, without waiting for more; with `reading`.

        None: the other side has ended, or what it sends cannot be read any more.
        """
        tasks: list[Task] = []
        if self._is_broken:
            return None
        try:
            while not tasks:
                space = self._assembler.space
                nbytes = self._socket.recv_into(space)
                if not nbytes:
                    return None
                tasks.extend(filter(None, map(self._received, self._assembler.came(nbytes))))
                if nbytes < space.nbytes:
                    break
        except BlockingIOError:
            pass
        except BaseException as error:
            self._is_broken = True  # a part of a message is lost; those before it are not
            self.shut()
            if not isinstance(error, Exception):  # Ctrl-C
                for task in tasks:
                    self._readers.run(task)
                raise
            if not isinstance(error, OSError):
                _log.exception("what came from %s cannot be read; the connection is given up", self.worker)
            return tasks or None
        return tasks

    def take_rest(self) -> list[Task]:
        """What is to be done for the messages that came before the end."""
        tasks: list[Task] = []
        if self.reading.acquire(timeout=_CLOSE_SECONDS):
            try:
                while more := self.take():
                    tasks.extend(more)
            finally:
                self.reading.release()
        return tasks

    def _take_buffer(self, buffer: memoryview) -> None:
        assert self.ring is not None, "both sides have it"
        for _ in self.ring.take(buffer):
            self._look()

    def lead(self, number: int, until: float) -> None:
        """Read until the answer of a call is taken, or the time `until`; return if another thread reads."""
        try:
            while monotonic() < until and self.reading.acquire(blocking=False):
                try:
                    reads(self)
                    if number not in self.pending:
                        return  # who has taken the answer completes the call's future
                    if self.armed == READ:
                        self._readers.disarm(self)
                    tasks = self.take() if self._await(until) else []
                finally:
                    self.reading.release()
                if tasks is None:
                    self.ended()
                    return
                if tasks:
                    if self.pending:
                        self._readers.arm_later(self)  # a callback may block
                    self._readers.complete(tasks)
        finally:
            self.look_after()

    def _await(self, until: float) -> bool:
        """Wait until there is something to read; False: not for now."""
        poll = self._poller.poll
        if (seconds := self._readers.spin_seconds) > 0:
            end = perf_counter() + seconds
            while perf_counter() < end:
                if poll(0):
                    return True
        return bool(poll(1000 * min(_LOOK_SECONDS, max(until - monotonic(), 0.0)) + 0.5))

    def look_after(self) -> None:
        """Unless somebody reads, have the readers do so if answers are expected, else see the other side's end."""
        events = READ if self.pending or self.abandoned else HANG_UP
        if self.armed < events and not self.reading.locked():
            self._readers.arm(self, events)

    def ended(self) -> None:
        self._ended(self)

    # ---- the end -------------------------------------------------------------------------------------------

    def shut(self) -> None:
        """End the connection in both directions; whoever waits for it sees that."""
        self.is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it, once nobody reads or sends any more."""
        self.shut()
        # A Ctrl-C between two statements may have left a lock locked.
        had = [lock for lock in (self._sending, self.reading) if lock.acquire(timeout=_CLOSE_SECONDS)]
        if len(had) == 2:
            self.close_inherited()
        for lock in had:
            lock.release()

    def close_inherited(self) -> None:
        """Close the descriptors."""
        self._socket.close()
        ring, self.ring, self._offered = self.ring or self._offered, None, None
        if ring is not None:
            ring.close()
