"""Progress of messages: which thread drives the pipes, and for how long.

To *drive* is to move the bytes of all operations under way, which needs the lock (lock.py). A thread that posts an
operation takes the lock if it is free, does all that can be done without waiting, and releases the lock. A thread that
waits for an operation takes the lock and drives until that operation has ended. The progress thread (thread.py) drives
only when operations are under way and no thread has driven for a millisecond; it gives the lock to a waiting thread at
once.

Any thread may append to the inbox; only the holder of the lock removes operations from it. All other state belongs to
the holder. lock.py has the order in which the inbox and the words BUSY and BEHIND are written and read.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..core.monitor import Monitor
from ..core.work import ENDLESS, forks
from ..errors import AbortedError, GroupError, ResourceError, UsageError
from .checks import Checks
from .events import BUDGET, POLL, Events
from .exchange import Exchange
from .lock import ProgressLock
from .pipe import NOT_MINE, Pipe
from .thread import ProgressThread
from .transfers import Probe, Receive, RequestPipe, Send, Transfer

_CLOSE_SECONDS = 5.0  # kernels return within 0.1 s; a longer wait: a thread was killed with the lock

_P = ParamSpec("_P")
_R = TypeVar("_R")


def returns_lock(
    method: Callable[Concatenate[Progress, _P], _R],
) -> Callable[Concatenate[Progress, _P], _R]:
    """Return a method that releases the lock if an exception leaves `method`, which takes and releases the lock.

    A signal handler may raise after BUSY was set and before `acquire` has returned, or before `release` has cleared it.
    """

    @wraps(method)
    def call(self: Progress, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        # If the lock is held already, this is a signal handler, and the call that it has interrupted releases the lock.
        nested = self.lock.is_mine()
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            if not nested:
                self.recover()
            raise

    return call


class Progress:
    """Moves a rank's messages. It is the `Driver` (transfers.py) of the rank's transfers.

    Args:
        routes: for each rank, the pipe to it and its number in that pipe. For this rank itself, any pipe.
        take_over: continues the requests that compiled callers have posted to a pipe; called by the holder of the lock.
            Its second argument is whether to include requests that have ended without an error.

    Attributes:
        exchange: the operations under way.
        inbox: posted operations that have not begun, in their order.
        drives: counts how often a thread has begun to drive.
        requests: the pipe that has the requests of Python, if any.
        request_waits, request_table: that pipe's `waits` and `address`, which each wait of a request uses.
    """

    def __init__(
        self,
        routes: list[tuple[Pipe, int]],
        rank: int,
        monitor: Monitor,
        timeout: float,
        take_over: Callable[[Pipe, bool], None],
    ) -> None:
        self.rank, self.monitor, self.timeout = rank, monitor, timeout
        self.forks = forks()
        self.exchange = Exchange(routes, rank)
        self.inbox: deque[Transfer] = deque()
        self.lock = ProgressLock(list(dict.fromkeys(pipe for pipe, _ in routes)))
        self.checks = Checks(self.exchange, routes, monitor)
        self.events = Events(self.lock, self.exchange, routes, self.checks.check, self._is_wanted)
        self.thread = ProgressThread(self.lock, self)
        self.drives = 0
        self._routes, self._take_over = routes, take_over
        self._pipes = self.lock.pipes
        requests = next((pipe for pipe in self._pipes if pipe.attends), self._pipes[0])
        self.requests: RequestPipe = requests
        self.request_waits, self.request_table = requests.waits, requests.address
        self._polled = False  # whether a thread has called `poll` while another thread drove
        # How operations end, if `close` has not taken the lock.
        self._given_up: BaseException | None = None
        self._shortage: ResourceError | None = None  # set if memory for reaching a peer was missing

    def has_operations(self) -> bool:
        """Whether operations are under way or posted, or received messages must be copied to the callers' arrays."""
        return bool(self.exchange.live or self.inbox or self.exchange.ended)

    # ---- the lock ---------------------------------------------------------------------------------

    def acquire(self) -> bool:
        """Take the lock unless another thread holds it, and take over the requests of compiled callers."""
        if not self.lock.acquire():
            return False
        try:
            for pipe in self._pipes:
                if pipe.has_posted():
                    self.take_over_posted(ended=False)
        except BaseException:
            self.release()
            raise
        return True

    @returns_lock
    def take_over_all(self) -> bool:
        """Continue all requests of compiled callers; return False if another thread holds the lock."""
        if not self.acquire():
            return False
        try:
            self.take_over_posted(ended=True)
        finally:
            self.release()
        return True

    def take_over_posted(self, ended: bool) -> None:
        """Continue the requests of compiled callers. The caller holds the lock. An interrupt fails the group."""
        for pipe in self._pipes:
            self.step(self._take_over, pipe, ended)

    def step(self, step: Callable[..., object], *args: Any) -> None:
        """Call `step`, which needs the lock. The caller holds the lock.

        An error fails the group and ends every operation, unless a signal handler has raised it between two events.
        """
        try:
            step(*args)
        except BaseException as error:
            if self.lock.is_consistent and not isinstance(error, GroupError):
                raise
            self.blame(error, "carrying messages")
            self.end_all(self.monitor.failure or error)
            if not isinstance(error, Exception):
                raise

    def release(self) -> None:
        """Release the lock, and begin the operations that were posted meanwhile."""
        if self.checks.recorded and not self.exchange.live:  # perhaps no thread will drive again
            self.checks.record(0.0)
        lock = self.lock
        if not self.exchange.is_busy() and not lock.is_closed:
            for pipe in self._pipes:
                pipe.set_behind(False)
            if self.inbox or lock.is_closed:
                lock.set_behind(True)
        lock.release()
        if self.exchange.ended:
            self._finish_received()
        if self.inbox or lock.waiters or self.thread.is_asleep:
            self._after_release()

    def recover(self) -> None:
        """Release what this thread has of the lock, after an exception. The progress thread does what remains."""
        self.lock.recover()
        self.lock.wake_one()
        if self.thread.is_asleep and self.has_operations():
            self.thread.wake()

    def let_go(self, pipe: Pipe) -> None:
        """Do what `release` does, for the one pipe that a short cut has kept."""
        pipe.let_go()
        if self.inbox or self.lock.waiters or self.thread.is_asleep:
            self._after_release()

    def _after_release(self) -> None:
        """Begin operations posted while the lock was held, and wake the next thread that waits for the lock."""
        while self._next_is_ready() is True and not self.lock.is_closed and self.acquire():
            try:
                self.step(self._admit_posts)
            finally:
                self.lock.release()
        self.lock.wake_one()
        if self.thread.is_asleep and self.has_operations():
            self.thread.wake()

    def _finish_received(self) -> None:
        """Copy received messages back to the callers' arrays and complete the receives.

        Called without the lock, since it may take long.
        """
        ended = self.exchange.ended
        while ended:
            try:
                received = ended[0]
            except IndexError:  # another thread was faster
                return
            try:
                self._finish(received)
            except BaseException:
                # A signal handler has raised. The next thread that waits copies the message again.
                if not received[0].ended and received not in ended:
                    ended.appendleft(received)
                raise
            self.lock.ring_bells()  # the thread that drives may wait for this receive

    def _finish(self, received: tuple[Receive, int]) -> None:
        try:
            self.exchange.ended.remove(received)
        except ValueError:  # another thread was faster
            return
        receive, source = received
        try:
            receive.finish()
        except Exception as error:
            receive.complete(None, error)
        else:
            receive.complete(source)

    # ---- posted operations ------------------------------------------------------------------------

    @returns_lock
    def post(self, transfer: Transfer) -> None:
        """Begin an operation now if the lock is free and its peer is connected, else leave it in the inbox."""
        if not self.inbox and self.is_ready(transfer) and self.acquire():
            try:
                self.lock.set_behind(True)
                self.step(self._begin, transfer)
            finally:
                self.release()
            return
        self.inbox.append(transfer)
        self.lock.set_behind(True)
        self.lock.ring_bells()
        if self.lock.is_closed:  # it was closed meanwhile, perhaps after `close` had emptied the inbox
            self.end_all(destroyed(transfer))
        self._after_release()
        if not self.is_ready(transfer):
            self.thread.wake()

    def _begin(self, transfer: Transfer) -> None:
        """Give an operation to the Exchange, and do what can be done without waiting."""
        self.drives += 1
        self.exchange.admit(transfer)
        self.lock.is_consistent = True
        if isinstance(transfer, Probe) and transfer.at_once:
            self._look_for(transfer)
        elif isinstance(transfer, Receive) or self.exchange.is_entering(transfer):
            self._move(transfer)

    def _move(self, transfer: Transfer) -> None:
        """Move messages as far as possible without waiting, or until a transfer has ended."""
        while not transfer.ended and self.events.advance(False):
            pass

    def _admit_posts(self) -> None:
        while self.inbox and self.is_ready(self.inbox[0]):
            self.lock.is_consistent = False
            self.exchange.admit(self.inbox[0])
            transfer = self.inbox.popleft()  # after `admit`: `is_in_vain` reads both queues without the lock
            if isinstance(transfer, Probe) and transfer.at_once:
                self._look_for(transfer)
        self.lock.is_consistent = True

    def _look_for(self, probe: Probe) -> None:
        """Complete a probe that does not wait: with a message that has arrived, or with none.

        Raises GroupError if there is no message and a peer has died or failed the group.
        """
        self.lock.is_consistent = True
        self._move(probe)
        if not probe.ended:
            try:
                self.checks.check_peers(probe)
            except GroupError:
                self._move(probe)  # the peer may have sent a message before it died
                if not probe.ended:
                    raise
        self.lock.is_consistent = False
        if not probe.ended:
            self.exchange.end_probe(probe)
        self.lock.is_consistent = True

    # ---- connections ------------------------------------------------------------------------------

    def is_ready(self, transfer: Transfer) -> bool:
        """Whether the operation's peer is connected; receives need no connection."""
        if not isinstance(transfer, Send) or transfer.peer == self.rank:
            return True
        pipe, number = self._routes[transfer.peer]
        return pipe.is_ready(number)

    def _next_is_ready(self) -> bool | None:
        """Whether the first posted operation can begin; None if there is none.

        Other threads may take the operation meanwhile.
        """
        first = list(self.inbox)[:1]
        return self.is_ready(first[0]) if first else None

    def connect(self, dst: int) -> None:
        """Connect to a rank; blocks. An error fails the group."""
        pipe, number = self._routes[dst]
        if not pipe.is_ready(number):
            try:
                pipe.prepare(number)
            except BaseException as error:
                if isinstance(error, ResourceError):
                    self._shortage = error
                self.blame(error, f"reaching {self.monitor.name(dst)}")
                raise

    def connect_posts(self) -> None:
        """Connect to the peer that the first posted send needs, if it is not connected yet; blocks."""
        if self._next_is_ready() is False:
            self._connect_all()
            self._after_release()

    def _connect_all(self) -> None:
        """Connect to the peers of all posted sends. If that fails, the group fails, and every operation ends."""
        for transfer in tuple(self.inbox):
            if isinstance(transfer, Send) and not self.is_ready(transfer) and self.monitor.failure is None:
                try:
                    self.connect(transfer.peer)
                except Exception:
                    break
        if self.monitor.failure is not None and self.acquire():
            try:
                self.end_all(self.monitor.failure)
            finally:
                self.release()

    # ---- driving ----------------------------------------------------------------------------------

    @returns_lock
    def await_end(self, transfer: Transfer, limit: float) -> bool:
        """Block until a transfer has ended, for at most `limit` seconds; return whether it has."""
        if self.thread.is_current():
            raise UsageError(f"waiting for {transfer.describe}: a Work's callback may not wait for messages")
        if transfer.is_small and len(self._pipes) == 1 and limit >= ENDLESS and not self.inbox:
            self._complete_small(transfer)
        if transfer.ended:
            return True
        transfer.is_awaited = True
        try:
            return self._drive_until(transfer, limit)
        finally:
            transfer.is_awaited = False

    def _complete_small(self, transfer: Transfer) -> None:
        """Drive with one call of the pipe. Mostly this completes the transfer, which a short cut has posted."""
        assert transfer.peer is not None
        lock, (pipe, number) = self.lock, self._routes[transfer.peer]
        nested = lock.nested
        lock.completing = threading.get_ident()
        try:
            event = pipe.complete(self.events.handled[0], number, transfer.number)
        finally:
            lock.completing = 0
        if event == NOT_MINE:
            return
        lock.is_driven = True
        try:
            self.step(self.events.handle, 0, event, nested)
        finally:
            self.release()

    @returns_lock
    def drive_until(self, transfer: Transfer, limit: float) -> bool:
        """Drive, or wait while another thread drives, until a transfer has ended or `limit` seconds have passed."""
        return self._drive_until(transfer, limit)

    def _drive_until(self, transfer: Transfer, limit: float) -> bool:
        end = None if limit >= ENDLESS else time.monotonic() + limit
        while not transfer.ended:
            if not self.lock.is_closed and self.acquire():
                try:
                    self.step(self._drive, transfer, end)
                finally:
                    self.release()
            elif self.lock.is_mine():
                self._drive_nested(transfer, end)
            elif self._given_up is not None:
                self.end_all(self._given_up)
                if not transfer.ended:  # a request that was not taken over
                    transfer.complete(None, self._given_up)
            else:
                self.lock.wait(end)
            if self.inbox and not transfer.ended:
                self._connect_all()
            if end is not None and not transfer.ended and time.monotonic() >= end:
                return False
        if self.checks.recorded:
            self.checks.record(time.monotonic() - BUDGET)
        return True

    def _drive(self, transfer: Transfer, end: float | None) -> None:
        """Drive until a transfer has ended, `end` has passed, or there is work that must be done without the lock."""
        self.drives += 1
        self.lock.is_consistent = True
        # `acquire` has taken over pending requests, so this one has ended: a thread has collected it, and a signal
        # handler has raised before the thread could complete the transfer. Or one has raised while a thread took the
        # request over, which has failed the group.
        if transfer.request and not transfer.ended and transfer not in self.exchange.live:
            if self.monitor.failure is None:
                transfer.complete_request()
            else:
                transfer.complete(None, self.monitor.failure)
        while not transfer.ended and not self.exchange.ended and not self.lock.is_closed:
            if self.inbox:
                if not self.is_ready(self.inbox[0]):
                    return
                self._admit_posts()
            near = end is not None and end - time.monotonic() < BUDGET
            if not self.events.advance(not near):
                self.checks.check()
                if near:
                    assert end is not None
                    if time.monotonic() >= end:
                        return
                    time.sleep(POLL)

    def _drive_nested(self, transfer: Transfer, end: float | None) -> None:
        """Drive in a signal handler whose thread holds the lock.

        Raises UsageError if the handler has interrupted the handling of an event, or a blocking call.
        """
        if not self.lock.may_nest():
            raise UsageError(
                f"waiting for {transfer.describe}: a signal handler may not wait for messages while its thread does"
            )
        self.lock.nested += 1
        try:
            self.step(self._drive, transfer, end)
            self._finish_received()
        finally:
            self.lock.is_consistent = True

    @returns_lock
    def poll(self) -> None:
        """Progress messages as far as possible without waiting."""
        if self.lock.is_closed or self.forks != forks() or self.thread.is_current():
            return
        if self.acquire():
            try:
                self.step(self._drive_at_once)
            finally:
                self.release()
        elif not self.lock.is_mine():
            self._polled = True
            self.lock.ring_bells()

    def _drive_at_once(self) -> None:
        self.drives += 1
        self._admit_posts()
        while self.exchange.live and self.events.advance(False):
            pass
        if time.monotonic() >= self.checks.next:
            self.checks.check()

    def collect(self) -> None:
        """Complete the requests of Python that have ended and for which no thread has waited."""
        for pipe in self._pipes:
            for transfer in pipe.take_ended():
                transfer.complete_request()

    def drive_unattended(self) -> bool:
        """Drive until another thread wants the lock or no operation is left; False: another thread holds the lock."""
        if not self.acquire():
            return False
        try:
            self.step(self._drive_others)
        finally:
            self.release()
        return True

    def _drive_others(self) -> None:
        self._polled = False
        self.lock.is_consistent = True
        while self.has_operations():
            if self.inbox:
                if not self.is_ready(self.inbox[0]):
                    break
                self._admit_posts()
            if (
                self.lock.waiters
                or self._polled
                or self.lock.is_closed
                or self.exchange.ended
                or self.thread.callbacks
            ):
                break
            if not self.events.advance(True):
                self.checks.check()
        self.drives += 1

    def _is_wanted(self) -> bool:
        """Whether the thread that waits for events of two pipes has to return."""
        return bool(
            self.inbox or self.lock.waiters or self.lock.is_closed or self.monitor.failure is not None
        )

    # ---- errors and the end -----------------------------------------------------------------------

    def crossing(self, peer: int) -> str:
        """Return a hint for the error of a send that no receive takes: the peer may be blocked in a send as well."""
        pipe, number = self._routes[peer]
        if not pipe.has_unread(number) and not self.exchange.peers[peer].kept_messages:
            return ""
        return (
            f"; this rank also has a message of {self.monitor.name(peer)} that no receive has taken: if both ranks "
            "wait in send, neither can continue; let one receive first, or use isend or batch_isend_irecv"
        )

    def blame(self, error: BaseException, doing: str) -> None:
        """Fail the group after an error in the middle of a message, because bytes of it may be missing."""
        if isinstance(error, UsageError):
            return
        if not isinstance(error, GroupError):
            error = AbortedError(f"{doing} was interrupted by {error!r}")
        self.monitor.fail(error)
        self.abort()

    def end_all(self, error: BaseException) -> None:
        """End every operation, whether it is under way or only posted, with an error.

        If the group has failed because this rank lacks memory, all get the ResourceError, which has the cure.
        """
        while self.inbox:
            self.exchange.live[self.inbox.popleft()] = None
        self.exchange.fail(self._shortage or error)

    def abort(self) -> None:
        """Have all threads that move messages check the group's state at once. Any thread may call this."""
        self.lock.ring_bells()
        self.thread.wake()

    def call_back(self, transfer: Transfer) -> None:
        """Have the progress thread call the callbacks of a transfer that has ended."""
        self.thread.call_back(transfer)

    def close(self, error: GroupError | None) -> None:
        """End all operations with `error`, and release the pipes. A second call has no effect.

        Afterwards this thread has the lock for good, unless another thread has kept it for too long: that one may still
        use the pipes' memory.
        """
        if not self.thread.close():
            return
        end = error or AbortedError("the group was destroyed before the operation was complete")
        held = False
        nested = self.lock.is_mine()  # a signal handler, which would wait for the call that it interrupted
        try:
            self.abort()
            self.thread.join(_CLOSE_SECONDS)
            deadline = time.monotonic() + _CLOSE_SECONDS
            while not nested and not (held := self.acquire()) and time.monotonic() < deadline:
                self.lock.ring_bells()
                time.sleep(POLL)
        finally:
            if not held:  # also after Ctrl-C: each thread that waits ends the operations itself
                self._given_up = end
        if held:
            self.take_over_posted(ended=True)
            self.end_all(end)
        if nested or held:
            for pipe in self._pipes:
                pipe.retire()
            self.lock.wake_all()
        self._finish_received()
        self.thread.run_callbacks()


def destroyed(transfer: Transfer) -> AbortedError:
    """Return the error for an operation whose group was destroyed."""
    return AbortedError(f"{transfer.describe}: the group was destroyed before the operation was complete")
