"""Agent: this process as a worker: whom it can call, what it has called, and what it answers.

A worker dials another one when it first calls it; over that connection its calls go, and their answers come back.
Calls in the other direction have a connection of their own. A call is in its link's table until who takes it out of
there (the answer, its deadline, or the other worker's end) completes its future, so exactly one of them does.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from ..core.work import ENDLESS, Timeout, seconds
from ..errors import (
    AbortedError,
    FastcollError,
    NotInitializedError,
    PeerDiedError,
    RemoteError,
    RpcTimeoutError,
    UsageError,
)
from ..system.processes import Member, cores_of, in_sight
from . import wire
from .futures import Future, anew
from .link import Link
from .readers import HANG_UP, READ, Readers, Task
from .wire import MessageType, Received
from .worker import Worker, WorkerInfo

_log = logging.getLogger("fastcoll")
_LOOK_SECONDS = 1.0  # between two looks for hosts that vanished
UNCOUNTED = 2  # the kind of call by which workers agree to end


Handler = Callable[[WorkerInfo, Any], Any]


class Call(NamedTuple):
    """A call that is under way."""

    future: Future[Any]
    kind: int
    context: bytes
    deadline: float
    timeout: float
    doing: object
    buffers: Sequence[memoryview]


class RemoteTraceback(Exception):
    """The traceback of an exception on another worker, as its cause."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class Agent:
    """This process as one of `workers`.

    Args:
        members: the processes of the workers.
        dial: makes a connection to a worker until a time; RendezvousError, PeerDiedError, RpcTimeoutError: it does not.
        timeout: seconds that a call may take where it says nothing else.
        spare: how many threads stay when nothing is to be done.
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
        self._is_spread = len(near) < len(members)
        self.workers = list(workers)
        self.members = list(members)
        self.me = self.workers[rank]
        self.timeout = timeout
        self._made = self._served = 0  # calls and tells, from here and to here
        self._dial = dial
        self._names: dict[Any, WorkerInfo] = {worker.name: worker for worker in workers}
        self._names |= {worker.id: worker for worker in workers} | {worker: worker for worker in workers}
        self._handlers: dict[int, tuple[Handler, bool]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._dialing = [threading.Lock() for _ in workers]
        self._out: dict[int, Link] = {}
        self._in: set[Link] = set()
        self._gone: dict[int, FastcollError] = {}
        self._announced: set[int] = set()  # of these, whose end the callbacks were told
        self._own: dict[int, Call] = {}  # calls to this worker
        self._serving: dict[object, tuple[WorkerInfo, int, object]] = {}  # calls that are not answered yet
        self._closed: FastcollError | None = None
        self._farewell = ""  # since it is closed
        self._death_callbacks: list[Callable[[int, FastcollError], None]] = []
        self._shutdown_callbacks: list[Callable[[float], None]] = []
        self._due = ENDLESS
        self._clock_wakes = threading.Condition()
        self._clock = threading.Thread(target=self._keep_time, name="fastcoll-rpc-clock", daemon=True)
        self._clock.start()

    # ---- for those who build on it --------------------------------------------------------------------------

    def on(self, kind: int, handler: Handler, with_contexts: bool = False) -> None:
        """Answer calls of a kind (1 to 255) by `handler(caller, payload)`: its result, that of the Future it returns,
        or its exception. Calls are handled at the same time, on threads that may block. What is told (`tell`) is
        handled in its order, before what the same worker says later, so there the handler must not block.
        """
        self._handlers[kind] = (handler, with_contexts)

    def on_death(self, callback: Callable[[int, FastcollError], None]) -> None:
        """Call `callback(worker id, error)` once for each worker that dies or leaves; calls to it fail before that."""
        self._death_callbacks.append(callback)

    def on_shutdown(self, callback: Callable[[float], None]) -> None:
        """Call `callback(until)` in `shutdown`, when all workers have called it and calls can still be made."""
        self._shutdown_callbacks.append(callback)

    def find(self, worker: Worker) -> WorkerInfo:
        """Who is meant by a name, an id or a WorkerInfo; UsageError: there is no such worker."""
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
        """Have another worker, or this one, handle `payload`. UsageError: no such worker, or not to be pickled.

        `timeout`: seconds; 0: without limit; None or less: the default. `doing`: what it is, for messages: a text or a
        function. `waits`: the caller waits for the future at once. Buffers of arrays must stay as they are until the
        future is done; where its time was up before all was sent, what is sent of them later is not looked at.
        """
        if self._closed is not None:
            raise anew(self._closed)
        to = self.find(worker)
        limit = self.timeout if timeout is None else seconds(timeout, 0.0)
        limit = (self.timeout if limit < 0 else limit) or ENDLESS
        future: Future[Any] = Future()
        future.deadline = deadline = time.monotonic() + limit
        try:  # first: what is pickled is sure to be sent
            link = None if to is self.me else self._link(to, deadline)
        except FastcollError as error:  # it cannot be reached, or is gone
            future.complete(None, error.with_traceback(None))  # which leads to the arguments
            return future
        context = wire.context_for(to) if self._handlers[kind][1] else b""
        pickled, buffers = wire.dumps(payload, to)
        if doing is None and isinstance(payload, tuple):
            doing = payload[0]
        call = Call(future, kind, context, deadline, limit, doing, buffers)
        number = next(self._numbers)
        self._count(kind, 1, 0)
        if link is None:
            self._own[number] = call
            self._watch_time(deadline)
            received = wire.copied(MessageType.CALL, kind, number, pickled, buffers, context)
            self.readers.run(partial(self._serve, None, received))
            return future
        link.pending[number] = call
        self._watch_time(deadline)
        future.link, future.number = link, number
        try:
            link.send(MessageType.CALL, kind, number, pickled, buffers, context, deadline)
        except OSError:
            self._lost(link)
        if link.is_closed and link.pending.pop(number, None):
            future.complete(None, self._why(link))
        elif not waits and link.armed < READ:
            self.readers.arm_later(link)
        return future

    def tell(self, worker: Worker, kind: int, payload: object) -> None:
        """As `call` without an answer, in order with the other tells and calls to that worker; lost if it is gone."""
        to = self.find(worker)
        try:
            link = None if to is self.me else self._link(to)
        except FastcollError:
            return
        pickled, buffers = wire.dumps(payload, to)
        self._count(kind, 1, 0)
        if link is None:
            self._handle(None, wire.copied(MessageType.TELL, kind, 0, pickled, buffers, b""))
            return
        try:
            link.send(MessageType.TELL, kind, 0, pickled, buffers)
        except OSError:
            self._lost(link)

    def futures(self, except_kind: int) -> list[Future[Any]]:
        """Of the calls from here that are under way, but for those of one kind."""
        return [call.future for _, call in self._under_way() if call.kind != except_kind]

    def waits_for(self) -> str:
        """Which calls from here are under way, for messages."""
        calls = [(to, call) for to, call in self._under_way() if call.kind != UNCOUNTED]
        return ", ".join(f"{_described(call.kind, call.doing)} on {to.name}" for to, call in calls)

    def serves(self) -> list[str]:
        """Which calls are under way here, for messages."""
        return [
            f"{self.me.name} is in {_described(kind, doing)} by {caller.name}"
            for caller, kind, doing in list(self._serving.values())
            if kind != UNCOUNTED
        ]

    def answers(self, kind: int) -> bool:
        """Whether there are calls of a kind here whose answers have not been sent yet."""
        return any(each == kind for _, each, _ in list(self._serving.values()))

    def _under_way(self) -> list[tuple[WorkerInfo, Call]]:
        tables = [(self.me, self._own), *((link.worker, link.pending) for link in list(self._out.values()))]
        return [(to, call) for to, table in tables for call in list(table.values())]

    def counts(self) -> tuple[int, int]:
        """How many calls were made from here, and how many were served here; those of the shutdown left out."""
        with self._lock:
            return self._made, self._served

    def _count(self, kind: int, made: int, served: int) -> None:
        with self._lock:
            if kind != UNCOUNTED:
                self._made += made
                self._served += served

    def death(self) -> FastcollError | None:
        """Of a worker that did not leave in order, if one is known."""
        return next((anew(error) for error in self._gone.values() if isinstance(error, PeerDiedError)), None)

    def connect(self, worker: WorkerInfo, until: float = ENDLESS) -> None:
        """Have a connection to a worker, so that its death is seen; PeerDiedError: it is gone."""
        self._link(worker, until)

    # ---- calling --------------------------------------------------------------------------------------------

    def _link(self, to: WorkerInfo, until: float = ENDLESS) -> Link:
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
            link = Link(self._dial(to.id, until), to, True, self.readers, self._received, self._lost)
            if not self._adopt(link):
                raise AbortedError("rpc was shut down")
            member, own = self.members[to.id], self.members[self.me.id]
            if member.same_node(own) and in_sight(member):
                with suppress(OSError):
                    link.offer_ring()
            return link
        finally:
            dialing.release()

    def take_over(self, connection: Any, rank: int) -> None:
        """Serve a connection that another worker has dialed."""
        self._adopt(Link(connection, self.workers[rank], False, self.readers, self._received, self._lost))

    def _adopt(self, link: Link) -> bool:
        """Use a new link; False: `close` came first."""
        with self._lock:
            if self._closed is not None:
                link.say_goodbye(self._farewell)
                link.close()
                return False
            if link.dialed:
                self._out[link.worker.id] = link
            else:
                self._in.add(link)
            self.readers.watch(link, HANG_UP if link.dialed else READ)
        return True

    # ---- what comes -----------------------------------------------------------------------------------------

    def _received(self, link: Link, received: Received) -> Task | None:
        """What is to be done for a message; who reads the link does at once what is in order, and cannot block."""
        match received.message:
            case MessageType.CALL:
                return partial(self._serve, link, received)
            case MessageType.RESULT | MessageType.RAISED:
                call = link.pending.pop(received.call, None)
                if call is None:
                    link.abandoned.discard(received.call)
                return partial(self._answered, call, link.worker, received)
            case MessageType.TELL:
                self._handle(link, received)
            case MessageType.GOODBYE:
                link.said_goodbye = bytes(received.pickled).decode(errors="replace")
            case MessageType.RING if link.dialed:
                link.offer_answered(bool(received.call))
            case MessageType.RING:
                link.answer_offer(self.members[link.worker.id].pid, bytes(received.pickled))
        return None

    def _answered(self, call: Call | None, worker: WorkerInfo, received: Received) -> None:
        if call is None:  # its time was up
            with suppress(FastcollError), wire.receiving(worker):
                wire.discard(received)
            return
        try:
            with wire.receiving(worker), wire.entered(call.context, worker):
                result = wire.loads(received)
                if received.message is not MessageType.RAISED:
                    call.future.complete(result, None)  # its callbacks are in the contexts, too
                    return
        except BaseException as error:
            # The traceback leads to frames that wait for the future: a circle, which would keep the call's arguments.
            call.future.complete(None, error.with_traceback(None))
            if isinstance(error, KeyboardInterrupt):  # it may have come in another call's answer
                raise
            return
        call.future.complete(None, _rebuilt(worker, *result))

    def _handle(self, link: Link | None, received: Received) -> None:
        """Handle what was told."""
        worker = link.worker if link else self.me
        try:
            with wire.receiving(worker):
                self._handlers[received.kind][0](worker, wire.loads(received))
        except Exception:
            _log.exception("what %s told could not be handled", worker)
        self._count(received.kind, 0, 1)

    def _serve(self, link: Link | None, received: Received) -> None:
        """Handle a call and answer it."""
        worker = link.worker if link else self.me
        try:
            handler, _ = self._handlers[received.kind]
            with wire.receiving(worker), wire.entered(received.context, worker):
                payload = _arguments(received)
                doing = payload[0] if type(payload) is tuple else None
                self._serving[worker.id, received.call] = worker, received.kind, doing
                result = handler(worker, payload)
                if isinstance(result, Future) and result.done():
                    result = result.value()
                if not isinstance(result, Future):
                    self._answer(link, received, MessageType.RESULT, result)
                    return
        except BaseException as error:
            self._raised(link, received, error)
            return
        answer = partial(
            self._answer_later, link, received._replace(pickled=b"", buffers=())
        )  # which may be large
        if link is None:  # a callback of the caller may wait for other callbacks of `result`
            result.add_done_callback(lambda done: self.readers.run(partial(answer, done)))
        else:
            result.add_done_callback(answer)

    def _answer_later(self, link: Link | None, received: Received, done: Future[Any]) -> None:
        worker = link.worker if link else self.me
        try:
            with wire.entered(received.context, worker):
                self._answer(link, received, MessageType.RESULT, done.value())
        except BaseException as error:
            self._raised(link, received, error)

    def _raised(self, link: Link | None, received: Received, error: BaseException) -> None:
        """Answer a call by an exception."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        names = (f"{type(error).__module__}.{type(error).__qualname__}", str(error), f"On {self.me}:\n{text}")
        self._answer(link, received, MessageType.RAISED, (wire.pickled_error(error), *names))

    def _answer(self, link: Link | None, received: Received, message: MessageType, result: Any) -> None:
        worker = link.worker if link else self.me
        pickled, buffers = wire.dumps(result, worker)
        self._count(received.kind, 0, 1)
        if link is None:
            self._serving.pop((worker.id, received.call), None)
            call = self._own.pop(received.call, None)  # None: timed out; the answer may hold RRefs
            self._answered(call, self.me, wire.copied(message, 0, received.call, pickled, buffers, b""))
            return
        try:
            link.send(message, 0, received.call, pickled, buffers)
        except OSError:
            self._lost(link)
        self._serving.pop((worker.id, received.call), None)

    # ---- ends -----------------------------------------------------------------------------------------------

    def _fail(self, call: Call, error: FastcollError) -> None:
        """Complete a call's future on a thread that its callbacks may block."""
        self.readers.run(partial(call.future.complete, None, error))

    def _lost(self, link: Link) -> None:
        """A link has ended: its worker left, died, or is out of reach."""
        worker = link.worker
        with self._lock:
            if link.is_lost:
                return
            link.is_lost = True
        self.readers.forget(link)
        link.shut()
        error = self._why(link)
        link.close()
        with self._lock:
            is_first = worker.id not in self._announced
            self._announced.add(worker.id)
            self._in.discard(link)
        for number in list(link.pending):
            if call := link.pending.pop(number, None):
                doing = _described(call.kind, call.doing)
                self._fail(call, type(error)(f"{error}; {doing} is lost", [worker.id]))
        if is_first:
            out = self._out.get(worker.id)
            if out is not None and link.said_goodbye is None:  # else its end comes, behind its last answers
                out.shut()
            for callback in self._death_callbacks:
                callback(worker.id, error)

    def _why(self, link: Link) -> FastcollError:
        """Why a link has ended, which is shut: the same for all links of a worker."""
        # Who sends may see the end before it has been read.
        if self._closed is None and link.said_goodbye is None:
            for task in link.take_rest():
                self.readers.run(task)
        worker, member = link.worker, self.members[link.worker.id]
        if self._closed is not None:
            error: FastcollError = self._closed
        elif link.said_goodbye is not None:
            error = AbortedError(f"worker {worker.name}, {member}, {link.said_goodbye}", [worker.id])
        else:
            error = PeerDiedError(f"worker {worker.name}, {member}, died", [worker.id])
        with self._lock:
            return self._gone.setdefault(worker.id, error)

    def close(self, farewell: str, error: FastcollError) -> None:
        """Say goodbye and end all links and threads; calls that are under way raise `error`."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed, self._farewell = error, farewell
            links = [*self._out.values(), *self._in]
        for link in links:
            link.say_goodbye(farewell)
        self._wake_clock(0.0)
        for link in links:
            self.readers.forget(link)
            link.shut()
        for pending in [self._own, *(link.pending for link in links)]:
            for number in list(pending):
                if call := pending.pop(number, None):
                    self._fail(call, error)
        self.readers.close(0.2)
        for link in links:
            link.close()

    def close_inherited(self) -> None:
        """In a child of fork: close the copies of all descriptors, without a word."""
        self.readers.close_inherited()
        for link in [*self._out.values(), *self._in]:
            link.close_inherited()

    def run_shutdown_callbacks(self, until: float) -> None:
        for callback in self._shutdown_callbacks:
            callback(until)

    # ---- time -----------------------------------------------------------------------------------------------

    def _watch_time(self, deadline: float) -> None:
        """A call is in its table: the clock looks there after `_due`, so it sees the call or is woken here."""
        if deadline < self._due:
            self._wake_clock(deadline)

    def _wake_clock(self, due: float) -> None:
        with self._clock_wakes:
            self._due = min(self._due, due)
            self._clock_wakes.notify()

    def _keep_time(self) -> None:
        """End the calls whose time is up, and links to hosts that vanished.

        The thread sleeps until the earliest deadline that was there; between hosts, for a second at most.
        """
        while self._closed is None:
            for link in [*self._out.values(), *self._in] if self._is_spread else ():
                if link.is_unreachable():
                    link.shut()  # its reader sees that
            with self._clock_wakes:
                left = self._due - time.monotonic()
                if left > 0:
                    self._clock_wakes.wait(min(left, _LOOK_SECONDS) if self._is_spread else left)
                    continue
                self._due = ENDLESS
            due = self._end_late(time.monotonic())
            with self._clock_wakes:
                self._due = min(self._due, due)

    def _end_late(self, now: float) -> float:
        """End them; the earliest deadline of those that are left."""
        due = ENDLESS
        links = list(self._out.values())
        for pending, abandoned in [
            (self._own, set[int]()),
            *((each.pending, each.abandoned) for each in links),
        ]:
            for number, call in pending.copy().items():  # other threads change it
                if call.deadline > now:
                    due = min(due, call.deadline)
                    continue
                abandoned.add(number)  # first: who takes the answer looks there if it finds no call
                if pending.pop(number, None):
                    doing = _described(call.kind, call.doing)
                    self._fail(call, RpcTimeoutError(_late(doing, call.timeout)))
                else:
                    abandoned.discard(number)
        for link in links:
            if link.abandoned:  # a caller that has not begun to wait does not look after its link
                link.look_after()
        return due


def _late(doing: str, limit: float) -> str:
    """Format the error of a timed-out call. It includes torch's wording: callers match on it."""
    return f"RPC ran for more than its timeout: {doing} was not answered within {limit:g} s"


def _described(kind: int, doing: object) -> str:
    """What a call is, for messages."""
    if isinstance(doing, str):
        return doing
    return f"the call of {getattr(doing, '__qualname__', None) or f'kind {kind}'}"


def _arguments(received: Received) -> Any:
    """Unpickle a call's arguments. RemoteError: they name a function or class that is not here."""
    try:
        return wire.loads(received)
    except (AttributeError, ImportError) as error:
        raise RemoteError(
            f"{error}. The RPC pickler does not serialize the code of functions and classes: define them in a module "
            "that the caller and the callee have"
        ) from error


def _rebuilt(worker: WorkerInfo, pickled: bytes | None, kind: str, said: str, text: str) -> BaseException:
    """The exception of another worker, with its traceback as the cause."""
    error = wire.loaded_error(pickled) if pickled is not None else None
    if error is None:
        error = RemoteError(
            f"{kind} on worker {worker}: {said}. Original exception on remote side was of a class that "
            "cannot be built here"
        )
    error.__cause__ = RemoteTraceback(text)
    return error


# ---- this process's agent ------------------------------------------------------------------------------------

_current: Agent | None = None


def current_agent() -> Agent:
    """This process's agent; NotInitializedError: there is none."""
    if _current is None:
        raise NotInitializedError(
            "RPC has not been initialized. Current RPC agent is not set! Did you initialize the RPC framework by "
            "fastcoll.rpc.init_rpc?"
        )
    return _current


def set_current(agent: Agent | None) -> None:
    global _current
    _current = agent
