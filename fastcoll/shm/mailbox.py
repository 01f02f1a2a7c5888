"""Point-to-point of one rank over the rings of a segment: send, recv, isend, irecv.

A blocking call is one compiled call on the caller's thread while nothing else is under way. Everything
else is posted to a courier, whose thread starts with the first such operation and sleeps when it has
none. Whoever drives the rings holds `_turn`; a blocking call that others wait for hands its half-done
transfer over to the courier, which works on the same words.

Lock order: `_turn`, then `_changed`. Outcomes are delivered, and callbacks run, with neither held.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import AbortedError, GroupError, NotInitializedError, UsageError
from ..kernels.pointers import header_of
from ..work import Work
from . import lanes as words
from . import ring_kernels
from .courier import Courier
from .lanes import Lanes
from .layout import Layout
from .transfers import Array, Receive, Send, Transfer, kind_of
from .vigil import Vigil

if TYPE_CHECKING:
    from ..arrays import Adopted

_ANY = -1
_CLOSE_SECONDS = 5.0  # kernels come back within 0.1 s; longer means a thread killed while it had the turn
_T = TypeVar("_T", bound=Transfer)


class Mailbox:
    """Messages between the ranks of a segment. All ranks here are group ranks; all methods are thread-safe.

    A send is complete when a receive has taken its message. Messages between two ranks with one tag
    arrive in order, receives match in the order in which they were posted. A message that a receive
    with its tag cannot hold (size, dtype) is dropped and raises on both sides; the mailbox stays usable.
    Everything else that goes wrong, a peer's death or an operation not complete `timeout` seconds after it
    was posted, fails the group.

    Args:
        segment_address: where the segment is mapped.
        layout: the segment's.
        rank: this process's group rank.
        vigil: the group's.
        timeout: seconds that an operation may take.
        patience: polls, then yields, before a waiting kernel sleeps.
    """

    def __init__(
        self,
        segment_address: int,
        layout: Layout,
        rank: int,
        vigil: Vigil,
        timeout: float,
        patience: tuple[int, int],
    ) -> None:
        self._rank = rank
        self._vigil = vigil
        self._timeout = timeout
        self._lanes = Lanes(segment_address, layout, rank, patience)
        self._m = self._lanes.address
        self._courier = Courier(self._lanes, rank)
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._inbox: deque[Transfer] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    # ---- the four operations ----------------------------------------------------------------------

    def send(self, x: Adopted, dst: int, tag: int) -> None:
        """Send and wait until it is taken; to oneself, until it is buffered.

        Raises:
            MismatchError: the receiver's array has another size or dtype.
            GroupError: a peer died, left or did not come in time.
        """
        array = x.array
        handed_over: Send | None = None
        if dst == self._rank:
            self._post(self._send_of(array.copy(), dst, tag, buffered=True))
            return
        if not self._turn.locked():
            with self._turn:  # which no signal can tear apart, as it could acquire() and try
                if not self._is_behind():
                    handed_over = self._drive_send(array, dst, tag)
                    if handed_over is None:
                        return
        self._await(handed_over or self._post_blocking(self._send_of(array, dst, tag)))

    def _drive_send(self, array: Array, dst: int, tag: int) -> Send | None:
        """Send on this thread, which holds the turn; the transfer, if the courier shall go on with it."""
        try:
            call = (self._m, dst, header_of(array), array.nbytes, kind_of(tag, array.dtype))
            status = ring_kernels.send(*call)
            if status == ring_kernels.DONE:
                return None
            send = self._send_of(array, dst, tag)
            status = self._persist(ring_kernels.send, call, send, status)
            if status == ring_kernels.REFUSED:
                raise send.misfit(
                    self._lanes.word(dst, words.ACK_KIND), self._lanes.word(dst, words.ACK_NBYTES)
                )
            if status == ring_kernels.DONE:
                return None
            self._courier.adopt_send(send)
            return send
        except BaseException as error:
            self._blame(error, f"send to {self._vigil.name(dst)}")
            raise

    def recv(self, x: Adopted, src: int | None, tag: int) -> int:
        """Receive from `src`, or from any rank; returns the sender.

        Raises:
            MismatchError: the message has another size or dtype.
            GroupError: a peer died, left or did not come in time.
        """
        outcome: Receive | int | None = None
        if src != self._rank and not self._turn.locked():
            with self._turn:
                if not self._is_behind():
                    outcome = self._drive_receive(x, src, tag)
        if isinstance(outcome, int):
            x.finish()
            return outcome
        return int(self._await(outcome or self._post_blocking(self._receive_of(x, src, tag))))

    def _drive_receive(self, x: Adopted, src: int | None, tag: int) -> Receive | int:
        """Receive on this thread, which holds the turn; the sender, or what the courier shall go on with."""
        array = x.array
        try:
            source = _ANY if src is None else src
            call = (self._m, source, header_of(array), array.nbytes, kind_of(tag, array.dtype))
            status = ring_kernels.receive(*call)
            if status != ring_kernels.DONE:
                receive = self._receive_of(x, src, tag)
                status = self._persist(ring_kernels.receive, call, receive, status)
            if status == ring_kernels.DONE:
                return self._lanes.take_source() if src is None else src
            self._check_may_wait(receive)
            self._courier.adopt_receive(receive)
            return receive
        except BaseException as error:
            self._blame(error, "recv")
            raise

    def isend(self, x: Adopted, dst: int, tag: int) -> Work:
        """Post a message; the Work is complete when it is taken."""
        return self._post(self._send_of(x.array, dst, tag))

    def irecv(self, x: Adopted, src: int | None, tag: int) -> Work:
        """Post a receive; the Work's result is the sender."""
        return self._post(self._receive_of(x, src, tag))

    # ---- life -------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Have everything under way look at the group's state at once. From any thread."""
        self._wake()

    def close(self, error: GroupError | None) -> None:
        """End what is under way with `error`, and use the segment no more. Closing twice is fine."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
        self._wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS)
        if self._turn.acquire(timeout=_CLOSE_SECONDS):
            try:
                self._take_posts()
                self._courier.fail(
                    error or AbortedError("the group was destroyed before the operation was complete")
                )
                ring_kernels.retire(self._m)
            finally:
                self._turn.release()
        self._courier.deliver()

    # ---- the caller's thread ----------------------------------------------------------------------

    def _send_of(self, array: Array, dst: int, tag: int, buffered: bool = False) -> Send:
        return Send(array, dst, tag, self._vigil, self._timeout, self._rank, buffered)

    def _receive_of(self, x: Adopted, src: int | None, tag: int) -> Receive:
        return Receive(x, src, tag, self._vigil, self._timeout, self._rank)

    def _is_behind(self) -> bool:
        """Whether other operations come first, or the end has come."""
        return self._courier.busy or bool(self._inbox) or self._closed

    def _persist(
        self, kernel: Callable[..., int], call: tuple[int, ...], transfer: Transfer, status: int
    ) -> int:
        """Call the kernel until it is done; AGAIN when posted operations want the rings."""
        while status == ring_kernels.AGAIN:
            self._lanes.silence_bell()
            if self._inbox and not self._on_own_thread():
                break
            if self._closed:
                raise _destroyed(transfer)
            transfer.watch.look()
            status = kernel(*call)
        return status

    def _await(self, transfer: Transfer) -> Any:
        """Wait until the courier is done with a transfer, and return its result."""
        self._wake()
        try:
            return transfer.result()
        except BaseException as error:
            if not transfer.is_completed():
                self._blame(error, transfer.name)
            raise

    def _post_blocking(self, transfer: _T) -> _T:
        """Post what the caller is going to wait for."""
        self._check_may_wait(transfer)
        return self._post(transfer)

    def _check_may_wait(self, transfer: Transfer) -> None:
        if self._on_own_thread():
            raise UsageError(
                f"{transfer.name}: a callback of a Work may not wait for messages while others are under way; "
                "use isend or irecv there"
            )

    def _blame(self, error: BaseException, doing: str) -> None:
        """After an error in the middle of a message the streams are torn: the group fails."""
        if isinstance(error, UsageError):
            return
        if not isinstance(error, GroupError):
            error = AbortedError(f"{doing} was interrupted by {error!r}")
        self._vigil.fail(error)
        self._wake()

    # ---- posted operations ------------------------------------------------------------------------

    def _post(self, transfer: _T) -> _T:
        """Leave an operation to the courier."""
        if self._vigil.failure is not None:
            raise self._vigil.failure
        with self._changed:
            if self._closed:
                raise NotInitializedError(f"{transfer.name}: the group was destroyed; make a new one")
            self._inbox.append(transfer)
        self._wake()
        return transfer

    def _wake(self) -> None:
        """Have whoever drives the rings look at what is new; start the thread with the first such thing."""
        self._lanes.ring_bell()
        with self._changed:
            if self._thread is None and not self._closed and (self._inbox or self._courier.live):
                self._thread = threading.Thread(target=self._run, name="fastcoll-mailbox", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while self._await_business():
            with self._turn:
                self._serve()
            self._courier.deliver()

    def _await_business(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._inbox or self._courier.live)
            return not self._closed

    def _serve(self) -> None:
        """Let the courier take one step; whatever goes wrong there ends every operation."""
        try:
            self._lanes.silence_bell()
            self._take_posts()
            if self._vigil.failure is not None:
                raise self._vigil.failure
            self._courier.step()
        except Exception as error:
            self._blame(error, "carrying messages")
            self._courier.fail(self._vigil.failure or error)

    def _take_posts(self) -> None:
        while self._inbox:
            self._courier.admit(self._inbox.popleft())

    def _on_own_thread(self) -> bool:
        return threading.current_thread() is self._thread


def _destroyed(transfer: Transfer) -> AbortedError:
    return AbortedError(f"{transfer.name}: the group was destroyed before the operation was complete")
