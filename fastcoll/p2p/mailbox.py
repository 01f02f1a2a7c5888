"""Point-to-point of one rank over channels to its peers: send, recv, isend, irecv.

A blocking call is one compiled call on the caller's thread while nothing else is under way. Everything
else is posted to a courier, whose thread starts with the first such operation and sleeps when it has
none. Whoever drives the channels holds `_turn`; a blocking call that others wait for hands its half-done
transfer over to the courier, which works on the same words.

Lock order: `_turn`, then `_changed`. Outcomes are delivered, and callbacks run, with neither held.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ..core.monitor import Vigil
from ..core.status import AGAIN, DONE, LATER, REFUSED, WORKED
from ..core.work import Work
from ..errors import AbortedError, FastcollError, GroupError, NotInitializedError, UsageError
from ..interop.arrays import Adopted
from .channels import ANY, Channels
from .courier import Courier
from .transfers import Array, Receive, Send, Transfer, kind_of

_POLL_SECONDS = 1e-4
_CLOSE_SECONDS = 5.0  # kernels come back within 0.1 s; longer means a thread killed while it had the turn
_T = TypeVar("_T", Send, Receive)


class Mailbox:
    """Messages between the ranks of a group. All ranks here are group ranks; all methods are thread-safe.

    A send is complete when a receive has taken its message. Messages between two ranks with one tag
    arrive in order, receives match in the order in which they were posted. A message that a receive
    with its tag cannot hold (size, dtype) is dropped and raises on both sides; the mailbox stays usable.
    Everything else that goes wrong, a peer's death or an operation not complete `timeout` seconds after it
    was posted, fails the group.

    Args:
        channels: to the peers.
        courier: what carries posted operations out over these channels.
        rank: this process's group rank.
        vigil: the group's.
        timeout: seconds that an operation may take.
    """

    def __init__(self, channels: Channels, courier: Courier, rank: int, vigil: Vigil, timeout: float) -> None:
        self._rank = rank
        self._vigil = vigil
        self._timeout = timeout
        self._channels = channels
        self._courier = courier
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
        array = x.array
        if dst == self._rank:
            self._post(self._send_of(array.copy(), dst, tag, buffered=True))
            return
        self._refuse_nesting("send")
        self._prepare(dst)
        call = partial(self._channels.send, array, dst, kind_of(tag, array.dtype))
        status = self._drive(call, partial(self._send_of, array, dst, tag))
        if isinstance(status, Send):
            self._await(status)

    def recv(self, x: Adopted, src: int | None, tag: int) -> int:
        """Receive from `src`, or from any rank; returns the sender.

        Raises:
            MismatchError: the message has another size or dtype.
            GroupError: a peer died, left or did not come in time.
        """
        self._refuse_nesting("recv")
        if src == self._rank:
            return int(self._await(self._post_blocking(self._receive_of(x, src, tag))))
        call = partial(
            self._channels.receive, x.array, ANY if src is None else src, kind_of(tag, x.array.dtype)
        )
        status = self._drive(call, partial(self._receive_of, x, src, tag))
        if isinstance(status, Receive):
            return int(self._await(status))
        x.finish()
        return -1 - status

    def isend(self, x: Adopted, dst: int, tag: int) -> Work:
        """Post a message; the Work is complete when it is taken."""
        return self._post(self._send_of(x.array, dst, tag))

    def irecv(self, x: Adopted, src: int | None, tag: int) -> Work:
        """Post a receive; the Work's result is the sender."""
        return self._post(self._receive_of(x, src, tag))

    # ---- life -------------------------------------------------------------------------------------

    def is_in_vain(self, work: Work) -> bool:
        """Whether nobody is left who could complete a posted operation that needs a message, or is one to this rank."""
        # The inbox first: two operations of this rank may be made for each other.
        if not isinstance(work, Transfer) or self._inbox or work not in self._courier.live:
            return False
        peers = range(len(self._vigil.members)) if work.peer is None else (work.peer,)
        return all(peer == self._rank or self._vigil.has_left(peer) for peer in peers)

    def is_entered(self) -> bool:
        """Whether messages cannot go on until this thread does: it is the courier's, or a signal handler in a call."""
        return self._on_own_thread() or self._has_channels() or threading.get_ident() in self._inside

    def abort(self) -> None:
        """Have everything under way look at the group's state at once. From any thread."""
        self._wake()

    def close(self, error: GroupError | None) -> None:
        """End what is under way with `error`, and use the channels no more. Closing twice is fine."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._channels.set_behind(True)
            thread = self._thread
        self._wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS)
        deadline = time.monotonic() + _CLOSE_SECONDS
        # A signal handler may have interrupted the very call that holds the turn, and waits for nothing.
        mine = threading.get_ident() in self._inside and self._has_channels()
        held = not mine and self._turn.acquire(timeout=_CLOSE_SECONDS)
        try:
            while held and not self._has_channels() and not self._channels.seize():
                if time.monotonic() >= deadline:
                    break
                self._channels.ring_bell()
                time.sleep(_POLL_SECONDS)
            if held:
                self._end_all(
                    error or AbortedError("the group was destroyed before the operation was complete")
                )
                self._channels.retire()
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

    def _is_awaited(self) -> bool:
        """Whether another thread waits for the turn that this one has or is about to take; it had found it free."""
        return threading.get_ident() in self._inside and len(self._inside) > 1

    def _has_channels(self) -> bool:
        """Whether a blocking call of this thread is under way."""
        return self._channels.is_mine()

    def _let_go(self) -> None:
        if self._has_channels():
            self._channels.let_go()

    def _refuse_nesting(self, name: str) -> None:
        if self._has_channels() or threading.get_ident() in self._inside:
            raise UsageError(f"{name}: a signal handler may not wait for messages while its thread does")

    def _prepare(self, dst: int) -> None:
        """Make the channel to a rank ready."""
        if not self._channels.is_ready(dst):
            try:
                self._channels.prepare(dst)
            except BaseException as error:
                self._blame(error, f"reaching {self._vigil.name(dst)}")
                raise

    def _drive(self, call: Callable[[bool], int], make: Callable[[], _T]) -> int | _T:
        """Carry a blocking call out on this thread: DONE or less; or its transfer, left to the courier.

        Args:
            call: takes whether it is resumed.
            make: makes the transfer when it is needed, which costs more than a small message.
        """
        if not self._turn.locked():
            thread = threading.get_ident()
            self._inside.add(thread)
            try:
                if self._is_awaited():
                    self._channels.ring_bell()  # whoever is first hands over to the courier
                with self._turn:  # which no signal can tear apart, as it could acquire() and try
                    done = LATER if self._is_behind() else self._try(call, make)
            finally:
                self._inside.discard(thread)
            if not isinstance(done, int) or done <= DONE:
                return done
        return self._post_blocking(make())

    def _try(self, call: Callable[[bool], int], make: Callable[[], _T]) -> int | _T:
        """As `_drive`; LATER when another thread has the channels. Called with the turn."""
        try:
            status = call(False)
            if status <= DONE or status == LATER:
                return status
            return self._go_on(partial(call, True), status, make())
        except BaseException as error:
            if self._has_channels():
                self.torn(error, make().name)
            raise

    def _go_on(self, again: Callable[[], int], status: int, transfer: _T) -> int | _T:
        """What follows a blocking call that came back with `status`: at most DONE, or the courier has the transfer."""
        if isinstance(transfer, Send):
            transfer.watch.hint = partial(self._crossing, transfer.peer)
        try:
            status = self._persist(again, transfer, status)
            if status <= DONE:
                return status
            if status == LATER:
                raise AbortedError(f"{transfer.name}: the array was changed meanwhile")
            if isinstance(transfer, Send):
                self._hand_over_send(status, transfer)
            else:
                self._check_may_wait(transfer)
                self._courier.adopt_receive(transfer)
            self._channels.set_behind(True)
            return transfer
        except BaseException as error:
            self._blame(error, transfer.name)
            raise
        finally:
            self._let_go()

    def _persist(self, again: Callable[[], int], transfer: Transfer, status: int) -> int:
        """Call the kernel until it is done; AGAIN when posted operations want the channels."""
        while status in (AGAIN, WORKED):
            self._channels.silence_bell()
            if (self._inbox or self._is_awaited()) and not self._on_own_thread():
                return AGAIN
            if self._closed:
                raise _destroyed(transfer)
            if status == AGAIN:
                transfer.watch.look()
                self._channels.check(transfer.peer)
            else:
                transfer.watch.worked()
            status = again()
        return status

    def _crossing(self, peer: int) -> str:
        """What else may be the matter with a send that is not taken."""
        if not self._channels.has_unread(peer):
            return ""
        return (
            f"; a message of {self._vigil.name(peer)} lies here, too, which no receive has taken: if both ranks wait "
            "in send, neither goes on; let one of them receive first, or post both with isend or batch_isend_irecv"
        )

    def _hand_over_send(self, status: int, send: Send) -> None:
        """Let the courier go on with a send, unless the receiver has refused it."""
        if status == REFUSED:
            ack = self._channels.last_ack(send.peer)
            raise send.misfit(ack.kind, ack.nbytes)
        self._courier.adopt_send(send)

    def torn(self, error: BaseException, doing: str) -> None:
        """After an exception between a blocking call's return and what follows: fail if it was half-way."""
        if self._has_channels():
            self._blame(error, doing)
            self._let_go()

    def _await(self, transfer: Transfer) -> Any:
        """Wait until the courier is done with a transfer, and return its result."""
        try:
            self._wake()
            return transfer.result()
        except BaseException as error:
            if not transfer.is_completed():
                self._blame(error, transfer.name)
            raise

    def _post_blocking(self, transfer: _T) -> _T:
        """Post what the caller is going to wait for."""
        self._check_may_wait(transfer)
        try:
            return self._post(transfer)
        except FastcollError:
            raise  # it was not posted
        except BaseException as error:
            self._blame(error, transfer.name)
            raise

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
            self._channels.set_behind(True)
        self._wake()
        return transfer

    def _wake(self) -> None:
        """Have whoever drives the channels look at what is new; start the thread with the first such thing."""
        self._channels.ring_bell()
        with self._changed:
            if self._thread is None and not self._closed and (self._inbox or self._courier.live):
                thread = threading.Thread(target=self._run, name="fastcoll-mailbox", daemon=True)
                thread.start()  # may fail, or be interrupted when it has begun
                self._thread = thread
            self._changed.notify_all()

    def _run(self) -> None:
        while self._await_business():
            self._prepare_posts()
            with self._turn:
                self._drive_courier()
            self._courier.deliver()

    def _await_business(self) -> bool:
        with self._changed:
            if not self._on_own_thread():  # whoever started it was interrupted
                return False
            self._changed.wait_for(lambda: self._closed or self._inbox or self._courier.live)
            return not self._closed

    def _prepare_posts(self) -> None:
        """Make ready what new sends need; if that fails, the group has failed."""
        for transfer in tuple(self._inbox):
            if isinstance(transfer, Send) and not self._is_prepared(transfer) and self._vigil.failure is None:
                try:
                    self._prepare(transfer.peer)
                except Exception:  # it is why the group has failed now, and ends what was posted
                    return

    def _is_prepared(self, transfer: Transfer) -> bool:
        return (
            not isinstance(transfer, Send)
            or transfer.peer == self._rank
            or self._channels.is_ready(transfer.peer)
        )

    def _drive_courier(self) -> None:
        """Take the channels from whoever has them, and let the courier use them."""
        while not self._channels.seize():
            if self._closed:
                return
            self._channels.ring_bell()
            time.sleep(_POLL_SECONDS)
        try:
            self._serve()
        finally:
            with self._changed:
                self._channels.set_behind(self._is_behind())
            self._channels.let_go()

    def _serve(self) -> None:
        """Let the courier take one step; whatever goes wrong there ends every operation."""
        try:
            self._channels.silence_bell()
            while self._inbox and self._is_prepared(self._inbox[0]):
                self._courier.admit(self._inbox.popleft())
            if self._vigil.failure is not None:
                raise self._vigil.failure
            if not self._inbox:
                self._courier.step()
        except Exception as error:
            self._blame(error, "carrying messages")
            self._end_all(self._vigil.failure or error)

    def _end_all(self, error: BaseException) -> None:
        """End every operation, under way or only posted, with an error."""
        while self._inbox:
            self._courier.live[self._inbox.popleft()] = None
        self._courier.fail(error)

    def _on_own_thread(self) -> bool:
        return threading.current_thread() is self._thread


def _destroyed(transfer: Transfer) -> AbortedError:
    return AbortedError(f"{transfer.name}: the group was destroyed before the operation was complete")
