"""Point-to-point of one rank over the rings of a segment: send, recv, isend, irecv.

A blocking call is one compiled call on the caller's thread while nothing else is under way. Everything
else is posted to a courier, whose thread starts with the first such operation and sleeps when it has
none. Whoever drives the rings holds `_turn`; a blocking call that others wait for hands its half-done
transfer over to the courier, which works on the same words.

Lock order: `_turn`, then `_changed`. Outcomes are delivered, and callbacks run, with neither held.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, TypeVar

from ..arrays import Adopted
from ..errors import AbortedError, GroupError, NotInitializedError, UsageError
from ..kernels.jit import Entry
from ..work import Work
from . import lanes as words
from . import ring_kernels
from .courier import Courier
from .lanes import Lanes
from .layout import Layout
from .rounds import AGAIN, DONE, LATER, PREPARED, RESUMED
from .transfers import Array, Receive, Send, Transfer, kind_of
from .vigil import Vigil

_ANY = -1
_POLL_SECONDS = 1e-4
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
        context: address of the group's context.

    Attributes:
        address: what entries take for this mailbox.
    """

    def __init__(
        self,
        segment_address: int,
        layout: Layout,
        rank: int,
        vigil: Vigil,
        timeout: float,
        patience: tuple[int, int],
        context: int,
    ) -> None:
        self._rank = rank
        self._vigil = vigil
        self._timeout = timeout
        self._lanes = Lanes(segment_address, layout, rank, patience, context)
        self.address = self._lanes.address
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
                    self._lanes.table[words.GIVEN] = array.nbytes
                    call = (dst, array, kind_of(tag, array.dtype))
                    status = self._begin(ring_kernels.send, call, f"send to {self._vigil.name(dst)}")
                    if status == DONE:
                        return
                    if status != LATER:
                        handed_over = self._go_on_sending(
                            status, call, self._send_of(array, dst, tag), PREPARED
                        )
                        if handed_over is None:
                            return
        self._await(handed_over or self._post_blocking(self._send_of(array, dst, tag)))

    def resume_send(self, status: int, array: Array, dst: int, tag: int) -> None:
        """Go on with a send on the synchronous path that came back early."""
        handed_over = self._go_on_sending(status, (dst, array, tag), self._send_of(array, dst, tag), 0)
        if handed_over is not None:
            self._await(handed_over)

    def _go_on_sending(self, status: int, call: tuple[Any, ...], send: Send, tags: int) -> Send | None:
        """Send on this thread, which has the rings; the transfer, if the courier shall go on with it."""
        dst = send.peer
        try:
            status = self._persist(ring_kernels.send, call, send, status, tags)
            if status == DONE:
                return None
            if status == ring_kernels.REFUSED:
                raise send.misfit(
                    self._lanes.word(dst, words.ACK_KIND), self._lanes.word(dst, words.ACK_NBYTES)
                )
            self._courier.adopt_send(send)
            self._lanes.set_behind(True)
            return send
        except BaseException as error:
            self._blame(error, send.name)
            raise
        finally:
            if status != DONE:
                self._lanes.let_go()

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
                    self._lanes.table[words.GIVEN] = x.array.nbytes
                    call = (_ANY if src is None else src, x.array, kind_of(tag, x.array.dtype))
                    status = self._begin(ring_kernels.receive, call, "recv")
                    if status <= DONE:
                        outcome = src if src is not None else -1 - status
                    elif status != LATER:
                        outcome = self._go_on_receiving(status, call, self._receive_of(x, src, tag), PREPARED)
        if isinstance(outcome, int):
            x.finish()
            return outcome
        return int(self._await(outcome or self._post_blocking(self._receive_of(x, src, tag))))

    def resume_receive(self, status: int, array: Array, src: int | None, tag: int) -> int:
        """Go on with a receive on the synchronous path that came back early; the sender."""
        receive = self._receive_of(Adopted(array), src, tag)
        outcome = self._go_on_receiving(status, (_ANY if src is None else src, array, tag), receive, 0)
        return outcome if isinstance(outcome, int) else int(self._await(outcome))

    def _go_on_receiving(
        self, status: int, call: tuple[Any, ...], receive: Receive, tags: int
    ) -> Receive | int:
        """Receive on this thread, which has the rings; the sender, or what the courier shall go on with."""
        try:
            status = self._persist(ring_kernels.receive, call, receive, status, tags)
            if status <= DONE:
                return receive.peer if receive.peer is not None else -1 - status
            self._check_may_wait(receive)
            self._courier.adopt_receive(receive)
            self._lanes.set_behind(True)
            return receive
        except BaseException as error:
            self._blame(error, receive.name)
            raise
        finally:
            if status > DONE:
                self._lanes.let_go()

    def _begin(self, entry: Entry, call: tuple[Any, ...], doing: str) -> int:
        """The first call of an entry on a prepared array."""
        try:
            return entry.call(self.address | PREPARED, *call)
        except BaseException as error:
            self.torn(error, doing)
            raise

    def torn(self, error: BaseException, doing: str) -> None:
        """After an exception between a blocking entry's return and what follows: fail if it was half-way."""
        if int(self._lanes.table[words.BUSY]) == threading.get_ident():
            self._blame(error, doing)
            self._lanes.let_go()

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
            self._lanes.set_behind(True)
            thread = self._thread
        self._wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS)
        deadline = time.monotonic() + _CLOSE_SECONDS
        held = self._turn.acquire(timeout=_CLOSE_SECONDS)
        try:
            while held and not self._lanes.seize() and time.monotonic() < deadline:
                self._lanes.ring_bell()
                time.sleep(_POLL_SECONDS)
            if held:
                self._take_posts()
                self._courier.fail(
                    error or AbortedError("the group was destroyed before the operation was complete")
                )
                ring_kernels.retire.call(self.address)
        finally:
            if held:
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
        self, entry: Entry, call: tuple[Any, ...], transfer: Transfer, status: int, tags: int
    ) -> int:
        """Call the kernel until it is done; AGAIN when posted operations want the rings."""
        while status == AGAIN:
            self._lanes.silence_bell()
            if self._inbox and not self._on_own_thread():
                break
            if self._closed:
                raise _destroyed(transfer)
            transfer.watch.look()
            status = entry.call(self.address | tags | RESUMED, *call)
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
            self._lanes.set_behind(True)
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
                self._drive()
            self._courier.deliver()

    def _await_business(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._inbox or self._courier.live)
            return not self._closed

    def _drive(self) -> None:
        """Take the rings from whoever has them, and let the courier use them."""
        while not self._lanes.seize():
            if self._closed:
                return
            self._lanes.ring_bell()
            time.sleep(_POLL_SECONDS)
        try:
            self._serve()
        finally:
            with self._changed:
                self._lanes.set_behind(self._is_behind())
            self._lanes.let_go()

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
