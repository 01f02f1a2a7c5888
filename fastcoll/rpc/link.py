"""Link: one connection to another worker. The side that dialed makes calls, and the other side answers.

Any thread may send; a lock keeps each message in one piece. Only the thread that holds `Link.reading` reads; readers.py
describes which thread that is. Messages of one connection are read in the order in which they were sent.
"""

from __future__ import annotations

import errno
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
from ..store.encryption import carrier
from .slots import Ring
from .wire import Assembler, MessageError, MessageType, RpcMessage, encode
from .worker_info import WorkerInfo

_log = logging.getLogger("fastcoll")
Task = Callable[[], object]
LOOK_SECONDS = 0.1
_CLOSE_SECONDS = 2.0
_SILENT_MILLISECONDS = 8000  # the kernel also gives up an idle connection after this time
# Three retransmits take 1.4 s. Fewer prove nothing: even a reachable host needs a moment to acknowledge the first data
# after a long silence.
_RETRANSMITS = 3
_INFO = struct.Struct("@2xB21xI28xI")  # of struct tcp_info: retransmits, unacked, last_ack_recv


class Link:
    """A connection to or from `worker`; the link owns the socket.

    Args:
        received: called with the link and each message, in order; returns a task for the message, or None.
        ended: called, perhaps more than once, when the peer has ended.
        run: runs a task on another thread.

    Attributes:
        pending: the calls over this link that are not answered yet, by number.
        abandoned: the numbers of calls that timed out; their answers are still read.
        exit_reason: why the peer left, once its GOODBYE (wire.py) has arrived.
        fault: why the link ended, if not because of the peer's end: a message that cannot be read, or an interrupt.
        armed: the events of this link that the readers' poller reports (polling.py); 0: none.
        ring: shared memory for large buffers, once both sides have mapped it.
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
        self.fault: str | None = None
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
        """Send a message, and wait until the kernel or the ring (slots.py) has taken all of it.

        If a part is left at the time `until`, another thread sends it. Later messages wait until that part is sent.

        Raises:
            OSError: the peer is gone, if `is_end` is true of the error.
        """
        is_left, held = False, list[bool]()
        try:
            # One call of C code acquires the lock and adds the result to `held`: Ctrl-C cannot interrupt in between.
            held.extend(map(self._sending.acquire, (True,), (max(until - monotonic(), 0.0),)))
            if not held[0]:
                self._send_on_thread(partial(self.send, message))
                return
            ring = self.ring
            start, large = encode(message, ring is not None)
            try:
                try:  # faster than `suppress`, which takes 0.4 us
                    sent = self._socket.send(start)
                except BlockingIOError:
                    sent = 0
                if sent == len(start) and not large:
                    return
                steps = self._steps(memoryview(start)[sent:], large, ring)
                is_left = not self._run_steps(steps, until)
            except BaseException as error:
                if not is_end(error):
                    self.fault = _interrupted(error)
                self.shut()  # the peer may have received a part of the message
                raise
        finally:
            if held == [True] and not is_left:
                self._sending.release()
        if is_left:
            self._send_on_thread(partial(self._send_rest_late, steps))

    def _send_on_thread(self, sending: Task) -> None:
        """Send on another thread."""

        def send() -> None:
            try:
                sending()
            except OSError:
                self.ended()

        self._run(send)

    def _send_rest_late(self, steps: Iterator[None]) -> None:
        try:
            self._run_steps(steps, ENDLESS)
        finally:
            self._sending.release()

    def _run_steps(self, steps: Iterator[None], until: float) -> bool:
        """Run the steps; return False if some are left at the time `until`."""
        for _ in steps:
            self._is_stuck = True
            self._check_peer()
            if monotonic() > until:
                return False
        self._is_stuck = False
        return True

    def _steps(self, start: memoryview, large: Sequence[memoryview], ring: Ring | None) -> Iterator[None]:
        """Send the rest of a message; yield each time that the peer has taken nothing for a while."""
        yield from self._write(start)
        for buffer in large:
            yield from self._write(buffer) if ring is None else ring.put(buffer)

    def send_goodbye(self, exit_reason: str) -> None:
        """Send the peer a GOODBYE with the exit reason, unless another message is stuck on the connection."""
        # Wait this long, because the thread that holds the lock may only be waiting for a core.
        end = monotonic() + _CLOSE_SECONDS
        while not (has := self._sending.acquire(timeout=LOOK_SECONDS)) and monotonic() < end:
            if self._is_stuck:
                break
        if has:
            try:
                with suppress(OSError):
                    self._socket.send(encode(RpcMessage(MessageType.GOODBYE, 0, 0, exit_reason.encode()))[0])
            finally:
                self._sending.release()

    def _write(self, left: memoryview) -> Iterator[None]:
        while left.nbytes:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                poller = select.poll()
                poller.register(self._fileno, select.POLLOUT)
                poller.poll(1000 * LOOK_SECONDS)
                yield

    def _check_peer(self) -> None:
        """Raise ConnectionError if the peer has ended or is unreachable."""
        poller = select.poll()
        poller.register(self._fileno, select.POLLRDHUP)
        if self.is_closed or poller.poll(0) or self.is_unreachable():
            raise ConnectionError(errno.ECONNRESET, "the connection was closed")

    def is_unreachable(self) -> bool:
        """Return whether the peer's host has stopped acknowledging data.

        The kernel probes an idle connection and gives it up after 8 s, but it retransmits data for 15 minutes.
        TCP_USER_TIMEOUT does not help: it would also end a connection to a process that is only stopped, although the
        kernel of that process answers.
        """
        try:
            info = carrier(self._socket).getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        except OSError:  # the socket is closed
            return False
        retransmits, unacked, silent_milliseconds = _INFO.unpack(info)
        return bool(unacked) and retransmits >= _RETRANSMITS and silent_milliseconds > _SILENT_MILLISECONDS

    def offer_ring(self) -> None:
        """Offer shared memory to the peer; the caller has checked that the peer is on this node."""
        self._offered, offer = Ring.offer()
        self.send(RpcMessage(MessageType.RING, 0, 0, offer))

    def answer_offer(self, pid: int, offer: bytes) -> None:
        """Map the shared memory that process `pid` offers, if possible, and report the result to the peer.

        Raises:
            MessageError: the peer has offered memory before.
        """
        if self.ring is not None:
            raise MessageError("shared memory is offered a second time")
        ring = None
        with suppress(OSError):
            ring = Ring.accept(pid, offer)
        with suppress(OSError):  # if the peer is gone, the thread that reads this link reports that
            self.send(RpcMessage(MessageType.RING, 0, ring is not None, b""))
        self.ring = ring

    def offer_answered(self, taken: bool) -> None:
        """Use the offered memory if the peer has mapped it, else close it.

        Raises:
            MessageError: this is not the first answer to an offer.
        """
        if self._offered is None or self.ring is not None:
            raise MessageError("shared memory is accepted that was not offered")
        if taken:
            self.ring = self._offered
        else:
            self._offered.close()
            self._offered = None

    # ---- reading -------------------------------------------------------------------------------------------

    def poll(self, milliseconds: float = 0) -> bool:
        """Return whether data arrives or the peer disconnects within `milliseconds`. The caller holds `reading`.

        Return True as well if data may arrive in shared memory.
        """
        return self.is_filling() or bool(self._poller.poll(milliseconds))

    def is_filling(self) -> bool:
        """Return whether a buffer is arriving in shared memory, which the poller does not notice."""
        return not self._assembler.space.nbytes

    def expects_answers(self) -> bool:
        """Return whether answers are expected, including those of calls that timed out."""
        return bool(self.pending or self.abandoned)

    def receive(self, until: float = ENDLESS) -> list[Task] | None:
        """Return the tasks of the messages that have arrived, without waiting for more. The caller holds `reading`.

        For the rest of a buffer in shared memory, wait until the time `until`. Return None if the peer has ended, or if
        a message from it could not be read.
        """
        tasks: list[Task] = []
        if self._is_broken:
            return None
        try:
            while not tasks or self.is_filling():
                space = self._assembler.space
                nbytes = self._socket.recv_into(space) if space.nbytes else 0
                if space.nbytes and not nbytes:
                    return None
                tasks.extend(filter(None, map(self._received, self._assembler.add(nbytes))))
                if self.is_filling():  # the next step takes 50 ms at most
                    self._check_peer()
                    if monotonic() > until:
                        break
                elif nbytes < space.nbytes:
                    break
        except BlockingIOError:
            pass
        except BaseException as error:
            self._is_broken = True  # this message is lost; the messages before it are still handled
            if isinstance(error, MessageError):
                self.fault = f"sent a message that cannot be read: {error}; the connection is closed"
                self.send_goodbye(f"could not read a message and closed the connection: {error}")
            elif not is_end(error):
                self.fault = _interrupted(error)
                self.send_goodbye(
                    f"closed the connection, because {type(error).__name__} interrupted a message"
                )
            self.shut()
            is_of_reading = isinstance(error, MessageError) or is_end(error)
            if not is_of_reading and threading.current_thread() is threading.main_thread():
                # Ctrl-C, or an error of another signal handler: raise it, and let other threads run the tasks.
                for task in tasks:
                    self._run(task)
                raise
            if isinstance(error, MessageError):
                _log.warning(
                    "a message from %s cannot be read: %s; the connection is closed", self.worker, error
                )
            elif not is_of_reading:
                _log.exception("a message from %s cannot be read; the connection is closed", self.worker)
            return tasks or None
        return tasks

    def receive_rest(self) -> list[Task]:
        """Return the tasks of the messages that arrived before the peer ended."""
        tasks: list[Task] = []
        if self.reading.acquire(timeout=_CLOSE_SECONDS):
            try:
                while more := self.receive():
                    tasks.extend(more)
            finally:
                self.reading.release()
        return tasks

    def _take_buffer(self, buffer: memoryview) -> Iterator[None]:
        if self.ring is None:
            raise MessageError("a buffer is sent through shared memory, which the two workers do not have")
        return self.ring.take(buffer)

    def ended(self) -> None:
        """Call the callback `ended`, because the peer has ended; may be called more than once."""
        self._ended(self)

    # ---- the end -------------------------------------------------------------------------------------------

    def shut(self) -> None:
        """Shut both directions of the connection, which wakes the threads that wait for it."""
        self.is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut the connection, and close it when no thread reads or sends."""
        self.shut()
        # Ctrl-C between two statements may have left a lock locked; then the descriptors stay open.
        acquired = [lock for lock in (self._sending, self.reading) if lock.acquire(timeout=_CLOSE_SECONDS)]
        if len(acquired) == 2:
            self.close_inherited()
        for lock in acquired:
            lock.release()

    def close_inherited(self) -> None:
        """Close the descriptors of the connection and of the shared memory."""
        self._socket.close()
        ring, self.ring, self._offered = self.ring or self._offered, None, None
        if ring is not None:
            ring.close()


def is_end(error: BaseException) -> bool:
    """Return whether an error of a link's socket means that the peer is gone.

    Signal handlers may raise an OSError, such as TimeoutError, between any two steps; such an error has no errno.
    """
    return isinstance(error, OSError) and error.errno is not None


def _interrupted(error: BaseException) -> str:
    """Return the `fault` of a link that `error`, such as Ctrl-C, has ended in the middle of a message."""
    return f"is no longer connected, because {type(error).__name__} interrupted a message here"
