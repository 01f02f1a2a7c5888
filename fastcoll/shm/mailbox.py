"""Point-to-point of one rank over the rings of a segment: send, recv, isend, irecv.

A blocking call is one compiled call on the caller's thread while nothing else is under way. Everything
else is posted to a courier, whose thread starts with the first such operation and sleeps when it has
none. Whoever drives the rings holds `_turn`; a blocking call that others wait for hands its half-done
transfer over to the courier, which works on the same words.

Lock order: `_turn`, then `_changed`. Outcomes are delivered, and callbacks run, with neither held.
"""

from __future__ import annotations

import operator
import threading
import time
from collections import deque
from typing import Any, TypeVar

from ..arrays import Adopted
from ..errors import AbortedError, GroupError, NotInitializedError, UsageError
from ..kernels.jit import Entry
from ..watch import Vigil
from ..work import Work
from . import lanes as words
from . import ring_kernels
from .courier import Courier
from .lanes import Lanes
from .layout import Layout
from .ring_kernels import ANY
from .rounds import AGAIN, DONE, LATER, PREPARED, RESUMED
from .transfers import Array, Receive, Send, Transfer

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
        self._inside: set[int] = set()  # threads with a blocking call on the way of `_turn`
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
        if dst == self._rank:
            self._post(self._send_of(x.array.copy(), dst, tag, buffered=True))
            return
        self._refuse_nesting("send")
        send = self._send_of(x.array, dst, tag)
        call = (dst, x.array, send.kind)
        status = self._drive(ring_kernels.send, call, send)
        if status == LATER:
            self._post_blocking(send)
        if status != DONE:
            self._await(send)

    def resume_send(self, status: int, array: Array, dst: int, tag: int) -> None:
        """Go on with a send on the synchronous path that came back early."""
        send = self._send_of(array, operator.index(dst), operator.index(tag))
        if self._go_on(ring_kernels.send, status, (dst, array, tag), send, 0) != DONE:
            self._await(send)

    def recv(self, x: Adopted, src: int | None, tag: int) -> int:
        """Receive from `src`, or from any rank; returns the sender.

        Raises:
            MismatchError: the message has another size or dtype.
            GroupError: a peer died, left or did not come in time.
        """
        self._refuse_nesting("recv")
        receive = self._receive_of(x, src, tag)
        call = (ANY if src is None else src, x.array, receive.kind)
        status = LATER if src == self._rank else self._drive(ring_kernels.receive, call, receive)
        if status < DONE:
            x.finish()
            return -1 - status
        if status == LATER:
            self._post_blocking(receive)
        return int(self._await(receive))

    def resume_receive(self, status: int, array: Array, src: int | None, tag: int) -> int:
        """Go on with a receive on the synchronous path that came back early; the sender."""
        source = None if src is None else operator.index(src)
        receive = self._receive_of(Adopted(array), source, operator.index(tag))
        call = (ANY if src is None else src, array, tag)
        status = self._go_on(ring_kernels.receive, status, call, receive, 0)
        return -1 - status if status < DONE else int(self._await(receive))

    def _drive(self, entry: Entry, call: tuple[Any, ...], transfer: Send | Receive) -> int:
        """Carry a blocking call on a prepared array out on this thread: what `_go_on` returns, or LATER."""
        if self._turn.locked():
            return LATER
        thread = threading.get_ident()
        self._inside.add(thread)
        try:
            with self._turn:  # which no signal can tear apart, as it could acquire() and try
                if self._is_behind():
                    return LATER
                self._lanes.table[words.GIVEN] = transfer.nbytes
                try:
                    status = entry.call(self.address | PREPARED, *call)
                    return self._go_on(entry, status, call, transfer, PREPARED)
                except BaseException as error:
                    self.torn(error, transfer.name)
                    raise
        finally:
            self._inside.discard(thread)

    def _go_on(
        self, entry: Entry, status: int, call: tuple[Any, ...], transfer: Send | Receive, tags: int
    ) -> int:
        """What follows an entry that came back with `status`: at most DONE, LATER, or OTHER for the courier's."""
        try:
            status = self._persist(entry, call, transfer, status, tags)
            if status <= DONE or status == LATER:
                return status
            if isinstance(transfer, Send):
                self._hand_over_send(status, transfer)
            else:
                self._check_may_wait(transfer)
                self._courier.adopt_receive(transfer)
            self._lanes.set_behind(True)
            return ring_kernels.OTHER
        except BaseException as error:
            self._blame(error, transfer.name)
            raise
        finally:
            self._let_go()

    def _hand_over_send(self, status: int, send: Send) -> None:
        """Let the courier go on with a send, unless the receiver has refused it."""
        if status == ring_kernels.REFUSED:
            dst = send.peer
            raise send.misfit(self._lanes.word(dst, words.ACK_KIND), self._lanes.word(dst, words.ACK_NBYTES))
        self._courier.adopt_send(send)

    def _has_rings(self) -> bool:
        """Whether a blocking call of this thread is under way."""
        return int(self._lanes.table[words.BUSY]) == threading.get_ident()

    def _let_go(self) -> None:
        if self._has_rings():
            self._lanes.let_go()

    def _refuse_nesting(self, name: str) -> None:
        if self._has_rings() or threading.get_ident() in self._inside:
            raise UsageError(f"{name}: a signal handler may not wait for messages while its thread does")

    def torn(self, error: BaseException, doing: str) -> None:
        """After an exception between a blocking entry's return and what follows: fail if it was half-way."""
        if self._has_rings():
            self._blame(error, doing)
            self._let_go()

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
            while held and not self._has_rings() and not self._lanes.seize() and time.monotonic() < deadline:
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
                return AGAIN
            if self._closed:
                raise _destroyed(transfer)
            transfer.watch.look() if status == AGAIN else transfer.watch.worked()
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
                self._drive_courier()
            self._courier.deliver()

    def _await_business(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._inbox or self._courier.live)
            return not self._closed

    def _drive_courier(self) -> None:
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
