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
from time import monotonic
from typing import Any

from ..core.work import ENDLESS
from .slots import Ring
from .wire import Assembler, MessageType, RpcMessage, encode
from .worker_info import WorkerInfo

_log = logging.getLogger("fastcoll")
Task = Callable[[], object]
LOOK_SECONDS = 0.1
_CLOSE_SECONDS = 2.0
_SILENT_MILLISECONDS = 8000  # as long as a connection without data under way is probed
_RETRANSMITS = 3  # these take 1.4 s: after a long silence, what was just sent may not be answered yet
_INFO = struct.Struct("@2xB21xI28xI")  # struct tcp_info: retransmits, unacked, last_ack_recv


class Link:
    """A connection, which it owns, to or from `worker`.

    Args:
        received: makes a task of a message, if there is anything to do for it.
        ended: called, maybe more than once, when the other side has ended.
        run: runs a task on another thread.

    Attributes:
        pending: the calls made over it that are not answered yet, by their numbers.
        abandoned: the numbers of calls whose time was up before; their answers are read all the same.
        exit_reason: how the other side has left in order, once it has.
        ring: for large buffers, once both sides have it.
    """

    def __init__(
        self,
        connection: socket.socket,
        worker: WorkerInfo,
        dialed: bool,
        received: Callable[[Link, RpcMessage], Task | None],
        ended: Callable[[Link], None],
        run: Callable[[Task], None],
    ) -> None:
        self.worker, self.dialed = worker, dialed
        self.pending: dict[int, Any] = {}
        self.abandoned: set[int] = set()
        self.exit_reason: str | None = None
        self.is_closed = self.is_lost = self._is_broken = self._is_stuck = False
        self.armed = 0
        self.reading = threading.Lock()
        self.ring: Ring | None = None
        self._offered: Ring | None = None
        self._ended, self._run = ended, run
        self._received = partial(received, self)
        self._socket, self._fileno = connection, connection.fileno()
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN | select.POLLRDHUP)
        self._assembler = Assembler(self._take_buffer)
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._fileno

    # ---- sending -------------------------------------------------------------------------------------------

    def send(self, message: RpcMessage, until: float = ENDLESS) -> None:
        """Send a message, and wait until the kernel has all of it.

        At the time `until` another thread goes on with it: no other message can be sent before this one is complete.

        Raises:
            OSError: the other side is gone.
        """
        goes_on, held = False, list[bool]()
        try:
            # A Ctrl-C that comes meanwhile is raised before the lock is acquired, or when `held` says so.
            held.extend(map(self._sending.acquire, (True,), (max(until - monotonic(), 0.0),)))
            if not held[0]:
                self._go_on(partial(self.send, message))
                return
            ring = self.ring
            start, behind = encode(message, ring is not None)
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

        self._run(send)

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

    def say_goodbye(self, exit_reason: str) -> None:
        """Tell the other side how this one leaves, unless a message is stuck on its way there."""
        end = monotonic() + _CLOSE_SECONDS  # who sends may just lack a core
        while not (has := self._sending.acquire(timeout=LOOK_SECONDS)) and monotonic() < end:
            if self._is_stuck:
                break
        if has:
            try:
                with suppress(OSError):
                    self._socket.send(encode(RpcMessage(MessageType.GOODBYE, 0, 0, exit_reason.encode()))[0])
            finally:
                self._sending.release()

    def _send_rest(self, left: memoryview) -> Iterator[None]:
        while left.nbytes:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                poller = select.poll()
                poller.register(self._fileno, select.POLLOUT)
                poller.poll(1000 * LOOK_SECONDS)
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
        self.send(RpcMessage(MessageType.RING, 0, 0, offer))

    def answer_offer(self, pid: int, offer: bytes) -> None:
        """Take what process `pid` offers, if it can be opened here."""
        ring = None
        with suppress(OSError):
            ring = Ring.accept(pid, offer)
        with suppress(OSError):  # else the other side is gone, which its end will tell
            self.send(RpcMessage(MessageType.RING, 0, ring is not None, b""))
        self.ring = ring

    def offer_answered(self, taken: bool) -> None:
        """The other side has taken what was offered, or not."""
        if taken:
            self.ring = self._offered
        elif self._offered is not None:
            self._offered.close()
            self._offered = None

    # ---- reading -------------------------------------------------------------------------------------------

    def poll(self, seconds: float = 0.0) -> bool:
        """Return whether there is something to read, or arrives within `seconds`. The caller holds `reading`."""
        return bool(self._poller.poll(1000 * seconds))

    def expects_answers(self) -> bool:
        """Return whether answers are to arrive, of calls that wait or of calls whose time is up."""
        return bool(self.pending or self.abandoned)

    def receive(self) -> list[Task] | None:
        """Return the tasks of the messages that have arrived, without waiting for more. The caller holds `reading`.

        None: the other side has ended, or its messages cannot be read any more.
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
            self._is_broken = True  # a part of a message is lost; the messages before it are not
            self.shut()
            if not isinstance(error, Exception):  # Ctrl-C
                for task in tasks:
                    self._run(task)
                raise
            if not isinstance(error, OSError):
                _log.exception("what came from %s cannot be read; the connection is given up", self.worker)
            return tasks or None
        return tasks

    def receive_rest(self) -> list[Task]:
        """Return the tasks of the messages that arrived before the end."""
        tasks: list[Task] = []
        if self.reading.acquire(timeout=_CLOSE_SECONDS):
            try:
                while more := self.receive():
                    tasks.extend(more)
            finally:
                self.reading.release()
        return tasks

    def _take_buffer(self, buffer: memoryview) -> None:
        assert self.ring is not None, "both sides have it"
        for _ in self.ring.take(buffer):
            self._look()

    def ended(self) -> None:
        """Report that the other side has ended; may be called more than once."""
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
