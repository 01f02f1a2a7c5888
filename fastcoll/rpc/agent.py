"""Agent: one process as an RPC worker: the workers that it can call, its calls under way, and its connections.

A *link* is one connection to another worker (link.py). A worker dials another worker when it first calls that worker.
The link then carries the dialing worker's calls and the answers to them. For calls in the other direction, the other
worker dials a link of its own. A call stays in its link's table (`Link.pending`) until the answer, the deadline or the
peer's disconnect removes it. Whatever removes the call completes its future, so each future is completed exactly once.

The path of a call: `Agent.call` pickles it and `Link.send` sends it. On the other worker a thread of the readers
(readers.py) receives the call by `Link.receive`, `Agent._received` returns a task for it, and in this task
`Handlers.serve` runs the handler and sends the answer. On the caller, the thread that waits for the future receives the
answer (`Readers.read_answer`), and `Agent._answered` completes the future.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from ..core.future import anew
from ..core.work import ENDLESS, Timeout, seconds
from ..errors import (
    AbortedError,
    FastcollError,
    NotInitializedError,
    PeerDiedError,
    RpcError,
    RpcTimeoutError,
    UsageError,
)
from ..system.processes import Member, cores_of, in_sight
from . import exceptions, pickling, wire
from .deadlines import Deadlines
from .futures import Future
from .handlers import UNCOUNTED, Counts, Handler, Handlers, described
from .link import Link, Task, is_end
from .polling import HANG_UP, READ
from .readers import Readers
from .wire import MessageError, MessageType, RpcMessage
from .worker_info import Worker, WorkerInfo

_log = logging.getLogger("fastcoll")


class PendingCall(NamedTuple):
    """A call that is under way."""

    future: Future[Any]
    kind: int  # selects the handler (`Agent.on`)
    context: bytes  # the values of the call's contexts (calls.py)
    deadline: float
    timeout: float
    doing: object  # describes the call in error messages: a text or a function
    buffers: Sequence[memoryview]  # the arguments' memory, kept alive until the answer arrives


class Agent:
    """This process, which is worker number `rank` in `workers`.

    Args:
        members: the processes of the workers, in the same order.
        dial: called with a worker's id and a deadline; returns a connection to that worker. It raises RpcTimeoutError
            at the deadline, and may raise another FastcollError before: that of `check_open`, if the agent is closed.
        timeout: default timeout of calls in seconds.
        spare: how many idle threads are kept.
    """

    def __init__(
        self,
        workers: Sequence[WorkerInfo],
        members: Sequence[Member],
        rank: int,
        dial: Callable[[int, float], Any],
        timeout: float,
        spare: int,
    ) -> None:
        near = [member for member in members if member.same_node(members[rank])]
        self.readers = Readers(spare, spins=len(near) <= len(cores_of(near)))
        self.workers = list(workers)
        self.members = list(members)
        self.me = self.workers[rank]
        self.timeout = timeout
        self.counts = Counts()
        self.handlers = Handlers(self.me, self.readers, self.counts, self._answered_here, self._lost)
        self._dial = dial
        self._names: dict[Any, WorkerInfo] = {worker.name: worker for worker in workers}
        self._names |= {worker.id: worker for worker in workers} | {worker: worker for worker in workers}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._dialing = [threading.Lock() for _ in workers]
        self._out: dict[int, Link] = {}  # dialed by this worker
        self._in: set[Link] = set()  # dialed by others
        self._gone: dict[int, FastcollError] = {}  # for each worker that has ended: the error that says why
        self._announced: set[int] = set()  # the workers for which the death callbacks were called
        self._own: dict[int, PendingCall] = {}  # calls of this worker to itself
        self._closed: FastcollError | None = None
        self._exit_reason = ""  # set by `close`
        self._death_callbacks: list[Callable[[int, FastcollError], None]] = []
        self._shutdown_callbacks: list[Callable[[float], None]] = []
        self._deadlines = Deadlines(
            self._fail_late, self._shut_unreachable if len(near) < len(members) else None
        )

    # ---- for the rest of rpc --------------------------------------------------------------------------------

    def on(self, kind: int, handler: Handler, with_contexts: bool = False) -> None:
        """Run `handler(caller, payload)` for the calls and notifications of the kind with this number (1 to 255).

        The answer to a call is what the handler returns or raises; if the handler returns a Future, it is the Future's
        result or exception. Handlers of calls run concurrently and may block. The handler of a notification (`notify`)
        must not block, because the next message on that connection is read only after the handler has returned.
        If `with_contexts`, calls of this kind carry the values of `contexts` (calls.py).
        """
        self.handlers.add(kind, handler, with_contexts)

    def on_death(self, callback: Callable[[int, FastcollError], None]) -> None:
        """Call `callback(worker id, error)` once for each worker that dies or leaves.

        The pending calls to that worker fail on other threads, before or after the callback is called.
        """
        self._death_callbacks.append(callback)

    def on_shutdown(self, callback: Callable[[float], None]) -> None:
        """Have `shutdown` call `callback(until)` when all workers have called it.

        `until` is the deadline of the shutdown. The callback may still make calls.
        """
        self._shutdown_callbacks.append(callback)

    def check_open(self) -> None:
        """Raise the error that `close` was called with, if it was called."""
        if self._closed is not None:
            raise anew(self._closed)

    def find(self, worker: Worker) -> WorkerInfo:
        """Return the worker with a name, an id or a WorkerInfo.

        Raises:
            UsageError: there is no such worker.
        """
        try:
            return self._names[worker]
        except (KeyError, TypeError):
            names = ", ".join(each.name for each in self.workers)
            raise UsageError(
                f"could not find destination {worker!r:.80}: there is no worker of that name or id; there are {names}"
            ) from None

    def call(
        self,
        worker: Worker,
        kind: int,
        payload: object,
        timeout: Timeout = None,
        doing: object = None,
        waits: bool = False,
    ) -> Future[Any]:
        """Have another worker, or this one, handle `payload`; return a future of the answer.

        The memory of arrays in `payload` must not change until the future is done. If the call times out before all of
        that memory is sent, the rest is sent later, with its contents at that time, and the answer is ignored.

        Args:
            timeout: seconds; 0: without limit; None or negative: the default.
            doing: describes the call in error messages: a text or a function.
            waits: the caller waits for the future at once, so no other thread needs to read the answer.

        Raises:
            UsageError: there is no such worker, or `payload` cannot be pickled.
        """
        self.check_open()
        to = self.find(worker)
        limit = self.timeout if timeout is None else seconds(timeout, 0.0)
        limit = (self.timeout if limit < 0 else limit) or ENDLESS
        deadline = time.monotonic() + limit
        future: Future[Any] = Future()
        try:  # connect before pickling: a pickled message must be sent, because its RRefs count as passed on
            link = None if to is self.me else self._link_to(to, deadline)
        except FastcollError as error:  # the worker cannot be reached, or is gone
            future.complete(None, error.with_traceback(None))  # a traceback would keep the arguments alive
            return future
        context = pickling.context_for(to) if self.handlers.takes_contexts(kind) else b""
        pickled, buffers = pickling.dumps(payload, to)
        if doing is None and isinstance(payload, tuple):
            doing = payload[0]
        call = PendingCall(future, kind, context, deadline, limit, doing, buffers)
        number = next(self._numbers)
        message = RpcMessage(MessageType.CALL, kind, number, pickled, buffers, context)
        self.counts.add(kind, made=1)
        if link is None:
            self._own[number] = call
            self._deadlines.watch(deadline)
            self.readers.run(partial(self.handlers.serve, None, wire.copied(message)))
            return future
        link.pending[number] = call
        self._deadlines.watch(deadline)
        future.answer = self.readers, link, number, deadline
        try:
            link.send(message, deadline)
        except OSError as error:
            if not is_end(error):
                raise
            self._lost(link)
        if link.is_closed and link.pending.pop(number, None):
            future.complete(None, self._reason(link))
        elif not waits and link.armed < READ:
            self.readers.rearm_later(link)
        return future

    def notify(self, worker: Worker, kind: int, payload: object) -> None:
        """Send a notification, which is a call without an answer; it is lost if the worker is gone.

        The receiver reads this worker's calls and notifications in the order in which they were sent.
        """
        to = self.find(worker)
        try:
            link = None if to is self.me else self._link_to(to)
        except FastcollError:
            return
        message = RpcMessage(MessageType.NOTIFY, kind, 0, *pickling.dumps(payload, to))
        self.counts.add(kind, made=1)
        if link is None:
            self.handlers.handle_notification(None, wire.copied(message))
            return
        try:
            link.send(message)
        except OSError as error:
            if not is_end(error):
                raise
            self._lost(link)

    def futures(self, except_kind: int) -> list[Future[Any]]:
        """Return the futures of this worker's calls that are under way, except those of one kind."""
        return [call.future for _, call in self._under_way() if call.kind != except_kind]

    def waits_for(self) -> str:
        """Describe the calls of this worker that are under way, for error messages."""
        calls = [(to, call) for to, call in self._under_way() if call.kind != UNCOUNTED]
        return ", ".join(f"{described(call.kind, call.doing)} on {to.name}" for to, call in calls)

    def _under_way(self) -> list[tuple[WorkerInfo, PendingCall]]:
        tables = [(self.me, self._own), *((link.worker, link.pending) for link in list(self._out.values()))]
        return [(to, call) for to, table in tables for call in list(table.values())]

    def death(self) -> FastcollError | None:
        """Return the error of a worker that died without leaving first, or None if no worker did."""
        return next((anew(error) for error in self._gone.values() if isinstance(error, PeerDiedError)), None)

    def connect(self, worker: WorkerInfo, until: float = ENDLESS) -> None:
        """Connect to a worker unless there is a connection, so that its death is noticed.

        Raises:
            PeerDiedError: the worker is gone.
        """
        self._link_to(worker, until)

    # ---- calling --------------------------------------------------------------------------------------------

    def _link_to(self, to: WorkerInfo, until: float = ENDLESS) -> Link:
        link = self._out.get(to.id)
        if link is not None and not link.is_closed:
            return link
        dialing = self._dialing[to.id]
        if not dialing.acquire(timeout=max(until - time.monotonic(), 0.0)):
            raise RpcTimeoutError(f"worker {to.name} was not reached in time")
        try:
            if (error := self._closed or self._gone.get(to.id)) is not None:
                raise anew(error)
            if link := self._out.get(to.id):
                return link
            link = self._new_link(self._dial(to.id, until), to, True)
            if not self._add(link):
                raise AbortedError("rpc was shut down")
            member, own = self.members[to.id], self.members[self.me.id]
            if member.same_node(own) and in_sight(member):
                with suppress(OSError):
                    link.offer_ring()
            return link
        finally:
            dialing.release()

    def take_over(self, connection: Any, rank: int) -> None:
        """Begin to read the calls on a connection that another worker has dialed."""
        self._add(self._new_link(connection, self.workers[rank], False))

    def _new_link(self, connection: Any, worker: WorkerInfo, dialed: bool) -> Link:
        return Link(connection, worker, dialed, self._received, self._lost, self.readers.run)

    def _add(self, link: Link) -> bool:
        """Add a link, so that it is read; if the agent is closed, close the link and return False."""
        with self._lock:
            if self._closed is not None:
                link.send_goodbye(self._exit_reason)
                link.close()
                return False
            if link.dialed:
                self._out[link.worker.id] = link
            else:
                self._in.add(link)
            self.readers.poller.watch(link, HANG_UP if link.dialed else READ)
        return True

    # ---- messages -------------------------------------------------------------------------------------------

    def _received(self, link: Link, message: RpcMessage) -> Task | None:
        """Return the task that handles a message, or None if the message was handled here.

        The reading thread itself handles messages whose order matters: all except calls and answers.

        Raises:
            MessageError: no worker sends such a message on this connection.
        """
        match message.type:
            case MessageType.CALL | MessageType.NOTIFY if not self.handlers.has(message.kind):
                raise MessageError(f"there is no call of kind {message.kind}")
            case MessageType.CALL if not link.dialed:
                return partial(self.handlers.serve, link, message)
            case MessageType.RESULT | MessageType.RAISED if link.dialed:
                call = link.pending.pop(message.call, None)
                if call is None:
                    link.abandoned.discard(message.call)
                return partial(self._answered, call, link.worker, message)
            case MessageType.NOTIFY if not link.dialed:
                self.handlers.handle_notification(link, message)
            case MessageType.GOODBYE:
                link.exit_reason = bytes(message.pickled).decode(errors="replace")
            case MessageType.RING if link.dialed:
                link.offer_answered(bool(message.call))
            case MessageType.RING:
                link.answer_offer(self.members[link.worker.id].pid, bytes(message.pickled))
            case _:
                raise MessageError(f"{message.type.name} was sent in the wrong direction")
        return None

    def _answered_here(self, answer: RpcMessage) -> None:
        """Handle the answer of a call of this worker to itself."""
        # If the call has timed out, the answer must still be unpickled, because this releases the RRefs in it.
        self._answered(self._own.pop(answer.call, None), self.me, answer)

    def _answered(self, call: PendingCall | None, worker: WorkerInfo, answer: RpcMessage) -> None:
        """Complete a call's future with its answer. If `call` is None, the call has timed out: drop the answer."""
        if call is None:
            try:
                with pickling.receiving(worker):
                    pickling.discard(answer)
            except FastcollError:
                pass
            except Exception as error:
                _log.warning("a late answer of %s cannot be unpickled: %r", worker, error)
            return
        try:
            with pickling.receiving(worker), pickling.entered(call.context, worker):
                result = pickling.loads(answer)
                if answer.type is not MessageType.RAISED:
                    call.future.complete(result, None)  # its callbacks run in the call's contexts, too
                    return
            raised = exceptions.unpack(worker, result)
        except pickling.UNREADABLE as error:
            doing = described(call.kind, call.doing)
            call.future.complete(None, RpcError(f"{worker}'s answer to {doing} cannot be unpickled: {error}"))
            return
        except BaseException as error:
            # The traceback refers to frames that wait for the future; that cycle would keep the arguments alive.
            call.future.complete(None, error.with_traceback(None))
            if isinstance(error, KeyboardInterrupt):
                raise  # also interrupt this thread, which may be waiting for another call
            return
        call.future.complete(None, raised)

    # ---- ends -----------------------------------------------------------------------------------------------

    def _fail(self, call: PendingCall, error: FastcollError) -> None:
        """Fail a call's future on a thread of the readers, because the future's callbacks may block."""
        self.readers.run(partial(call.future.complete, None, error))

    def _lost(self, link: Link) -> None:
        """Fail the calls of a link that has ended: its worker has left, has died, or is unreachable."""
        worker = link.worker
        with self._lock:
            if link.is_lost:
                return
            link.is_lost = True
        self.readers.poller.forget(link)
        link.shut()
        error = self._reason(link)
        link.close()
        with self._lock:
            is_first = worker.id not in self._announced
            self._announced.add(worker.id)
            self._in.discard(link)
        for number in list(link.pending):
            if call := link.pending.pop(number, None):
                doing = described(call.kind, call.doing)
                self._fail(call, type(error)(f"{error}; {doing} is lost", [worker.id]))
        if is_first:
            out = self._out.get(worker.id)
            # If the worker has sent a GOODBYE, keep `out` open: the worker's last answers may still arrive on it.
            if out is not None and link.exit_reason is None:
                out.shut()
            for callback in self._death_callbacks:
                callback(worker.id, error)

    def _reason(self, link: Link) -> FastcollError:
        """Return the error that says why a shut link has ended; it is the same for all links of a worker."""
        # A sending thread may notice the end before a reader has received the GOODBYE. So read what has arrived.
        if self._closed is None and link.exit_reason is None:
            for task in link.receive_rest():
                self.readers.run(task)
        worker, member = link.worker, self.members[link.worker.id]
        if self._closed is not None:
            error: FastcollError = self._closed
        elif link.exit_reason is not None:
            error = AbortedError(f"worker {worker.name}, {member}, {link.exit_reason}", [worker.id])
        elif link.fault is not None:
            error = AbortedError(f"worker {worker.name}, {member}, {link.fault}", [worker.id])
        else:
            error = PeerDiedError(f"worker {worker.name}, {member}, died", [worker.id])
        with self._lock:
            return self._gone.setdefault(worker.id, error)

    def close(self, exit_reason: str, error: FastcollError) -> None:
        """Send the exit reason, and end all links and threads; calls that are under way raise `error`."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed, self._exit_reason = error, exit_reason
            links = [*self._out.values(), *self._in]
        for link in links:
            link.send_goodbye(exit_reason)
        self._deadlines.close()
        for link in links:
            self.readers.poller.forget(link)
            link.shut()
        for pending in [self._own, *(link.pending for link in links)]:
            for number in list(pending):
                if call := pending.pop(number, None):
                    self._fail(call, error)
        self.readers.close(0.2)
        for link in links:
            link.close()

    def close_inherited(self) -> None:
        """In a child process made by fork: close the copies of all descriptors, and send nothing."""
        self.readers.close_inherited()
        for link in [*self._out.values(), *self._in]:
            link.close_inherited()

    def run_shutdown_callbacks(self, until: float) -> None:
        for callback in self._shutdown_callbacks:
            callback(until)

    # ---- time -----------------------------------------------------------------------------------------------

    def _shut_unreachable(self) -> None:
        """Shut the links to hosts that vanished; the threads that read them report the end."""
        for link in [*self._out.values(), *self._in]:
            if link.is_unreachable():
                link.shut()

    def _fail_late(self, now: float) -> float:
        """Fail the calls whose deadline is before `now`; return the earliest deadline of the others."""
        due = ENDLESS
        links = list(self._out.values())
        for worker, pending, abandoned in [
            (self.me, self._own, set[int]()),
            *((each.worker, each.pending, each.abandoned) for each in links),
        ]:
            for number, call in pending.copy().items():  # other threads change the table
                if call.deadline > now:
                    due = min(due, call.deadline)
                    continue
                # Add the number before `pop`: as soon as the call is gone, another thread may receive its answer, and
                # that thread removes the number from `abandoned`.
                abandoned.add(number)
                if pending.pop(number, None):
                    # The error includes torch's wording: callers match on it.
                    text = "RPC ran for more than its timeout: {} was not answered by {} within {:g} s"
                    doing = described(call.kind, call.doing)
                    self._fail(call, RpcTimeoutError(text.format(doing, worker, call.timeout)))
                else:
                    abandoned.discard(number)
        for link in links:
            if link.abandoned:  # late answers must be read, and perhaps no thread reads this link
                self.readers.rearm(link)
        return due


# ---- this process's agent ------------------------------------------------------------------------------------

_current: Agent | None = None


def current_agent() -> Agent:
    """Return this process's agent.

    Raises:
        NotInitializedError: there is none.
    """
    if _current is None:
        raise NotInitializedError(
            "RPC has not been initialized. Current RPC agent is not set! Did you initialize the RPC framework by "
            "fastcoll.rpc.init_rpc?"
        )
    return _current


def set_current(agent: Agent | None) -> None:
    global _current
    _current = agent
