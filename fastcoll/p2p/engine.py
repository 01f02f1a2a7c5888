"""The operations of messages: send, recv, isend, irecv and probe of one rank.

A *pipe* (pipe.py) moves bytes to and from peers; the Exchange (exchange.py) matches messages and receives. The Engine
makes a Transfer (transfers.py) for each call. A Transfer begins in one of two ways: with a *short cut*, one compiled
call of the pipe, or in the Exchange, under the lock (lock.py). A blocking call tries a short cut first. If the short
cut has begun nothing, the call posts a Transfer and waits for it. A short cut that returns before its message is
complete keeps the pipe locked, so no other thread can use the pipe until the Engine has given the message to the
Exchange.

The progress thread (thread.py) runs the callbacks of operations.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from ..arrays.imported import ImportedArray
from ..core.message import Status
from ..core.monitor import Monitor
from ..core.status import DONE, LATER, REFUSED
from ..core.work import ENDLESS, Work
from ..errors import FastcollError, GroupError, NotInitializedError, UsageError
from .events import POLL
from .pipe import ANY, ARMED, Pipe
from .progress import Progress, destroyed
from .transfers import Array, Probe, Receive, Send, Transfer, kind_of, tag_of

_T = TypeVar("_T", bound=Transfer)


class Engine:
    """Messages between the ranks of a group. All ranks here are group ranks; all methods are thread-safe.

    A send is complete when a receive has taken its message. A send to this rank itself is complete when the message is
    buffered.
    Messages between two ranks with one tag arrive in order. Receives match in the order in which they were posted. A
    message that does not fit the array of its receive (size, dtype) is dropped, and both ranks raise MismatchError;
    the group stays usable. Any other error fails the group, for example a peer's death, or an operation that is not
    complete `timeout` seconds after it was posted.

    Args:
        routes: for each rank, the pipe to it and its number in that pipe. For this rank itself, any pipe.
        rank: this process's group rank.
        monitor: the group's.
        timeout: seconds that an operation may take.

    Attributes:
        adopts: a function that is called with a request's number and its Transfer when the engine takes over the
            request from a compiled caller.
        notes: a function that is called with the Work of a request of Python when the engine takes over the request.
        progress: the driver of the Transfers.
        pipes: one or two.
        inbox: posted operations that have not begun, in order.
    """

    def __init__(self, routes: list[tuple[Pipe, int]], rank: int, monitor: Monitor, timeout: float) -> None:
        self.rank, self.monitor = rank, monitor
        self.adopts: Callable[[int, Transfer], object] = lambda number, transfer: None
        self.notes: Callable[[Transfer], object] = lambda transfer: None
        self.progress = progress = Progress(routes, rank, monitor, timeout, self._take_over_posted)
        self._exchange, self._lock = progress.exchange, progress.lock
        self._routes, self.pipes = routes, progress.lock.pipes
        self.inbox: deque[Transfer] = progress.inbox
        self._handing_over = threading.RLock()

    @property
    def timeout(self) -> float:
        """Seconds that an operation may take."""
        return self.progress.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.progress.timeout = seconds

    # ---- the operations ---------------------------------------------------------------------------

    def send(self, x: ImportedArray, dst: int, tag: int) -> None:
        """Send, and block until a receive has taken the message; return at once if `dst` is this rank.

        A message to this rank itself is buffered.

        Raises:
            MismatchError: the receiver's array has another size or dtype.
            GroupError: a peer died, left, or did not receive in time.
        """
        array = x.array
        if dst == self.rank:
            self.isend(x, dst, tag)
            return
        self._refuse_nesting("send")
        self.progress.connect(dst)
        pipe, number = self._routes[dst]
        try:
            status = pipe.send(array, number, kind_of(tag, array.dtype))
            if status != DONE:
                self.resume_send(status, array, dst, tag)
        except BaseException as error:
            self.torn(error, "send")
            raise

    def recv(self, x: ImportedArray, src: int | None, tag: int, status: Status | None = None) -> int:
        """Receive from `src` (None: from any rank), block until the message is complete, and return the sender.

        If a `status` is given, it is filled, and the message may be shorter than the array.

        Raises:
            MismatchError: the message has another size or dtype.
            GroupError: a peer died, left, or did not send in time.
        """
        self._refuse_nesting("recv")
        if tag < 0 or status is not None:
            return int(
                self._finish_blocking(
                    Receive().of(self.progress, x.array, src, tag, src).into(x, status), LATER
                )
            )
        code = LATER
        try:
            if src != self.rank and (src is not None or len(self.pipes) == 1):
                pipe, number = self.pipes[0], ANY
                if src is not None:
                    pipe, number = self._routes[src]
                code = pipe.receive(x.array, number, kind_of(tag, x.array.dtype))
            if code >= DONE:
                return self.resume_receive(code, x.array, src, tag, x)
            x.finish()
        except BaseException as error:
            self.torn(error, "recv")
            raise
        return -1 - code if src is None else src

    def isend(self, x: ImportedArray, dst: int, tag: int) -> Work:
        """Post a send. Its Work is complete when a receive has taken the message, or at once if `dst` is this rank."""
        return self._post(Send().of(self.progress, x.array.copy() if dst == self.rank else x.array, dst, tag))

    def irecv(self, x: ImportedArray, src: int | None, tag: int, status: Status | None = None) -> Work:
        """Post a receive; the Work's result is the sender. `status`: as for `recv`."""
        return self._post(Receive().of(self.progress, x.array, src, tag, src).into(x, status))

    def probe(self, src: int | None, tag: int) -> Status:
        """Wait until there is a message from `src`, or from any rank, that no receive has taken; a receive can take it.

        Raises:
            GroupError: a peer died, left or did not send in time.
        """
        status: Status = self._finish_blocking(Probe().at(self.progress, src, tag, at_once=False), LATER)
        return status

    def iprobe(self, src: int | None, tag: int) -> Status | None:
        """Return what `probe` would find among the messages that have arrived, or None. Never waits."""
        status: Status | None = self._finish_blocking(
            Probe().at(self.progress, src, tag, at_once=True), LATER
        )
        return status

    # ---- short cuts that returned early -----------------------------------------------------------

    def resume_send(self, status: int, array: Array, dst: int, tag: int) -> None:
        """Continue a blocking send whose short cut has returned `status`, which is not DONE."""
        send = Send().of(self.progress, array, dst, tag)
        if status == REFUSED:
            pipe, number = self._routes[dst]
            ack = pipe.last_ack(number)
            self.progress.let_go(pipe)
            raise send.misfit(ack.kind, ack.nbytes)
        self._finish_blocking(send, status)

    def resume_receive(
        self, status: int, array: Array, src: int | None, tag: int, imported: ImportedArray | None = None
    ) -> int:
        """Continue a blocking receive whose short cut has not completed it; return the sender.

        `status` is what the short cut has returned.
        """
        receive = Receive().of(self.progress, array, src, tag, src).into(imported)
        return int(self._finish_blocking(receive, status))

    def _hand_over(self, transfer: Transfer, pipe: Pipe) -> None:
        """Give the incomplete message of a short cut to the Exchange, and release the pipe.

        Another thread may do this at the same time for another pipe, so `_handing_over` guards the Exchange. No thread
        can hold the lock meanwhile, because the holder of the lock has taken every pipe.
        """
        try:
            if self._lock.is_closed:
                raise destroyed(transfer)
            with self._handing_over:
                if isinstance(transfer, Send):
                    self._exchange.resume_send(transfer)
                elif isinstance(transfer, Receive):
                    self._exchange.resume_receive(transfer, pipe)
            for other in self.pipes:
                other.set_behind(True)
        finally:
            pipe.let_go()

    def _finish_blocking(self, transfer: Transfer, status: int) -> Any:
        """Complete a blocking operation, and return its result.

        `status` is LATER if the operation must be posted; otherwise a short cut has begun it.
        """
        try:
            if status == LATER:
                self._refuse_waiting(transfer)
                self._post(transfer)
            else:
                transfer.posted = time.monotonic()
                pipe = self.pipes[0] if transfer.peer is None else self._routes[transfer.peer][0]
                self._hand_over(transfer, pipe)
            transfer.is_awaited = True
            if not transfer.request:
                self.progress.drive_until(transfer, ENDLESS)
            return transfer.result()
        except BaseException as error:
            if not transfer.ended and not (status == LATER and isinstance(error, FastcollError)):
                self.progress.blame(error, transfer.describe)
            raise

    def torn(self, error: BaseException, doing: str) -> None:
        """Fail the group if an exception has ended a short cut whose message is incomplete.

        In that case the short cut has kept its pipe.
        """
        for pipe in self.pipes:
            if pipe.is_mine():
                self.progress.blame(error, doing)
                self.progress.let_go(pipe)

    # ---- posting ----------------------------------------------------------------------------------

    def _post(self, transfer: _T) -> _T:
        """Begin an operation by a short cut, or in the Exchange.

        If another thread holds the lock, that thread begins the operation later.
        """
        transfer.posted = time.monotonic()
        if self.monitor.failure is not None:
            raise self.monitor.failure
        if self._lock.is_closed:
            raise NotInitializedError(f"{transfer.describe}: the group was destroyed; make a new one")
        if self.inbox or not self._takes_short_cut(transfer):
            self.progress.post(transfer)
        return transfer

    def _takes_short_cut(self, transfer: Transfer) -> bool:
        """Begin an operation with one compiled call, if the pipe has one for it; return whether it has begun."""
        if transfer.peer is None or transfer.peer == self.rank or not transfer.is_plain:
            return False
        pipe, number = self._routes[transfer.peer]
        if self.progress.thread.is_asleep and pipe.attends:
            self.progress.thread.wake(anyway=True)
        try:
            if not transfer.needs_copy_back and pipe.request(transfer, number):
                return True
            if isinstance(transfer, Send):
                if not self._exchange.may_begin(transfer):
                    return False
                sent = pipe.post_send(transfer.array, number, transfer.kind)
                if sent is None:
                    return False
                self._exchange.note_sent(transfer, *sent)
            elif isinstance(transfer, Receive):
                status = (
                    LATER
                    if transfer.needs_copy_back
                    else pipe.post_receive(transfer.array, number, transfer.kind)
                )
                if status == DONE:
                    transfer.complete(transfer.peer)
                if status != ARMED:
                    return status == DONE
                self._exchange.note_armed(transfer)
            self.progress.let_go(pipe)
        except BaseException as error:
            self.torn(error, transfer.describe)
            raise
        return True

    # ---- requests of compiled callers -------------------------------------------------------------

    def _take_over_posted(self, pipe: Pipe, ended: bool) -> None:
        pipe.set_behind(True)
        for posted in pipe.take_posted(ended):
            if posted.work is not None:
                posted.work.posted = time.monotonic()
                posted.work.be_of(posted.kind)
                self.notes(posted.work)
                self._exchange.take_over(posted.work, posted)
                continue
            kind = Send if posted.sends else Receive
            peer = self.progress.events.rank_of(pipe, posted.peer)
            result = None if posted.sends else peer
            transfer = kind().of(self.progress, posted.array, peer, tag_of(posted.kind), result)
            transfer.posted = time.monotonic()
            transfer.be_of(posted.kind)
            self._exchange.take_over(transfer, posted)
            self.adopts(posted.number, transfer)

    def take_over(self) -> None:
        """Take over all requests of compiled callers; block while another thread holds the lock."""
        while not (self._lock.is_closed or self.has_lock() or self.progress.take_over_all()):
            self._lock.wait(None)

    def take_over_pending(self) -> None:
        """Take over all requests that are pending. Blocks while a thread drives them, at most a second."""
        end = time.monotonic() + 1
        self.poll()
        while any(pipe.has_posted() for pipe in self.pipes) and time.monotonic() < end:
            time.sleep(POLL)
            self.poll()  # it rings the bell, so a thread that waits for a request takes it over

    # ---- the progress of operations ---------------------------------------------------------------

    def poll(self) -> None:
        """Progress messages as far as possible without waiting."""
        self.progress.poll()

    def is_in_vain(self, work: Work) -> bool:
        """Whether a posted receive has matched no message, and no live peer can send one."""
        if not isinstance(work, Transfer):
            return False
        peers = range(len(self.monitor.members)) if work.peer is None else (work.peer,)
        if not all(peer == self.rank or self.monitor.has_left(peer) for peer in peers):
            return False
        # The peers' states are read before the queues, because all messages of the peers were matched before the peers
        # left. Two operations of this rank may match each other, so the inbox must be empty. An operation that has
        # matched needs no live peer, even if another thread is still copying its message.
        return not self.inbox and self._exchange.is_unmatched(work)

    def is_entered(self) -> bool:
        """Whether messages cannot progress while the calling thread waits for them.

        This is so if the calling thread is the progress thread, or runs a signal handler that has interrupted a call.
        """
        return self.progress.thread.is_current() or self.has_lock()

    def has_lock(self) -> bool:
        """Whether this thread holds a pipe. If so, the caller is a signal handler or a callback of an ImportedArray."""
        return self._lock.is_mine()

    def stay_awake(self) -> None:
        """Have the progress thread check every millisecond for receives of compiled callers."""
        self.progress.thread.wake(anyway=True)

    def abort(self) -> None:
        """Have all threads that move messages check the group's state at once. Any thread may call it."""
        self.progress.abort()

    def close(self, error: GroupError | None) -> None:
        """End all operations with `error`, and release the pipes. A second call has no effect.

        If `has_lock` is False afterwards, another thread may still use the pipes' memory.
        """
        self.progress.close(error)

    def _refuse_nesting(self, name: str) -> None:
        if self.has_lock():
            raise UsageError(f"{name}: a signal handler may not wait for messages while its thread does")

    def _refuse_waiting(self, transfer: Transfer) -> None:
        if self.progress.thread.is_current():
            raise UsageError(
                f"{transfer.describe}: a callback of a Work may not wait for messages while others are under way; "
                "use isend or irecv there"
            )
