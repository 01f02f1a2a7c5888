"""References: the values that a worker owns, the references that it holds, and the calls that make and fetch values.

counting.py describes the protocol that counts references; its Ledger is this worker's part in the protocol. Here a lock
guards the ledger, and one thread sends the ledger's messages, so that no thread that reads a connection blocks in a
send. The `__del__` of an RRef may run on any thread at any time, even on a thread that holds the lock. So all it does
is to put the reference into a SimpleQueue, whose `put` is reentrant.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from ..core.future import anew
from ..core.work import Timeout
from ..errors import (
    FastcollError,
    GroupError,
    NotInitializedError,
    PeerDiedError,
    ResourceError,
    RpcTimeoutError,
    UsageError,
    message_of,
)
from . import exceptions, pickling, spans
from .agent import Agent
from .calls import run_user_function
from .counting import CONFIRMED, FORK, CountingMessage, Id, Ledger, Reference
from .futures import Future
from .worker_info import WorkerInfo

T = TypeVar("T")
_COUNTING, _REMOTE, _FETCH, _FAILED = 10, 11, 12, 13  # kinds of calls
# How long messages are collected before they are sent together: waking the thread for each RRef would cost as much as a
# call.
_MOMENT_SECONDS = 0.004
_SETTLE_SECONDS = 30.0  # how long `shutdown` waits until the other workers have released their RRefs
_log = logging.getLogger("fastcoll")


class References:
    """The values and references of this worker, from `init_rpc` until `shutdown`."""

    current: References | None = None

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.is_closed = False
        # Its items: a destroyed reference; a message (to, kind, payload) to send; None, which ends the thread.
        self.todo: SimpleQueue[Any] = SimpleQueue()
        self._me = agent.me.id
        self._ledger = Ledger(self._me, {worker.id for worker in agent.workers} - {self._me})
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._values: dict[Id, Future[Any]] = {}
        # The values that were requested before the call that makes them has arrived.
        self._expected: dict[Id, Future[Any]] = {}
        self._gone: dict[int, FastcollError] = {}
        self._thread = threading.Thread(target=self._run, name="fastcoll-rpc-references", daemon=True)
        agent.on(_COUNTING, lambda sender, messages: self._step(self._handle, sender.id, messages))
        agent.on(_REMOTE, self._make, with_contexts=True)
        agent.on(_FETCH, lambda _, rref: self.value_of(rref), with_contexts=True)
        agent.on(_FAILED, self._not_made)
        agent.on_death(self._died)
        agent.on_shutdown(self._wind_up)
        References.current = self
        self._thread.start()

    def close(self) -> None:
        """Drop all values."""
        self.is_closed = True
        if References.current is self:
            References.current = None
        self.todo.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)
        values, self._values, self._expected = [self._values, self._expected], {}, {}
        del values

    def close_inherited(self) -> None:
        """In a child process made by fork: refuse all uses of RRefs, because other threads may hold the lock here."""
        self.is_closed = True
        References.current = None

    # ---- RRefs of this worker --------------------------------------------------------------------------------------

    def own(self, value: Any) -> Reference:
        """Make this worker the owner of a value; return a reference to the value."""
        ref = self._step(self._ledger.make, self._me)
        future = self._values[ref.rref] = Future[Any]()
        future.set_result(value)
        return ref

    def make(self, to: WorkerInfo, call: tuple[Any, ...], timeout: Timeout) -> tuple[Reference, Future[None]]:
        """Have a worker make a call (function, arguments, keyword arguments) and keep the result.

        Returns a reference to the result, and the future of the call.
        """
        ref = self._step(self._ledger.make, to.id)
        try:
            begin = partial(self.agent.call, to, _REMOTE, (*call, tuple(ref)), timeout)
            made = spans.calling(to.name, call[0], call[1], begin) if spans.is_possible() else begin()
        except BaseException:
            self._step(self._ledger.take_back, ref)
            raise
        made.add_done_callback(partial(self._was_made, ref))
        return ref, made

    def fetch(self, ref: Reference, timeout: Timeout) -> Any:
        """Return a copy of a value; if this worker owns the value, return the value itself."""
        if ref.owner == self._me:
            return self.value_of(ref.rref).wait(timeout or None)
        return self.agent.call(
            ref.owner, _FETCH, ref.rref, timeout, "to_here() of an RRef", waits=True
        ).wait()

    def value_of(self, rref: Id) -> Future[Any]:
        """Return the future of a value that this worker owns, or will own when the call that makes it arrives."""
        with self._lock:
            found = self._values.get(rref) or self._expected.get(rref)
            if found is not None:
                return found
            found = Future()
            if self.is_closed or (rref[0] == self._me and rref not in self._ledger.forks):
                found.set_exception(UsageError(f"the value of RRef {rref[0]}.{rref[1]} was released"))
            elif gone := self._gone.get(rref[0]):
                found.set_exception(_never_made(gone, rref[0]))
            else:
                self._expected[rref] = found
            return found

    def confirm(self, ref: Reference) -> None:
        """Record that the owner knows a reference, because the owner has answered a call about it."""
        self._step(self._ledger.handle, ref.owner, CountingMessage(CONFIRMED, ref))

    def is_known(self, ref: Reference) -> bool:
        """Return whether this worker is certain that the owner knows a reference."""
        held = self._ledger.held.get(ref.fork)
        return ref.owner == self._me or (held is not None and held.known)

    def pass_on(self, ref: Reference, to: WorkerInfo) -> Reference:
        """Return a child of a reference, to be sent to another worker. If it cannot be sent, call `take_back`."""
        return self._step(self._pass_on, ref, to.id)

    def _pass_on(self, ref: Reference, to: int) -> Reference:
        if self.is_closed:
            raise NotInitializedError("an RRef cannot be passed on: rpc is being shut down")
        return self._ledger.pass_on(ref, to)

    def take_back(self, ref: Reference) -> None:
        self._step(self._ledger.take_back, ref)

    def take_in(self, ref: Reference, sender: WorkerInfo) -> None:
        """Add a reference that arrived in a message."""
        if not self._step(self._ledger.take_in, ref, sender.id):
            raise anew(self._gone.get(sender.id) or PeerDiedError(f"worker {sender} died", [sender.id]))

    # ---- values that this worker makes for others --------------------------------------------------------------------

    def _make(self, caller: WorkerInfo, payload: tuple[Any, ...]) -> Future[None] | None:
        func, args, kwargs, ref = *payload[:3], Reference(*payload[3])
        value = self._begin(caller, ref)
        try:
            run = partial(run_user_function, func, args, kwargs)
            result = spans.serving(self.agent.me.name, func, args, run) if spans.is_possible() else run()
        except BaseException as error:
            error.__cause__ = exceptions.RemoteTraceback(exceptions.traceback_text(error, self.agent.me))
            value.complete(None, error.with_traceback(None))
            return None
        if not isinstance(result, Future):
            value.complete(result, None)
            return None

        def end(done: Future[Any]) -> None:
            error = done.exception()
            value.complete(None if error else done.value(), error)

        return result.then(end)

    def _begin(self, caller: WorkerInfo, ref: Reference) -> Future[Any]:
        """Return the future of a value; the call that makes the value has just arrived."""
        if caller.id != self._me:
            self._step(self._ledger.handle, caller.id, CountingMessage(FORK, ref, caller.id))
        with self._lock:
            value = self._expected.pop(ref.rref, None) or Future()
            if ref.rref in self._ledger.forks:  # else all references were released already
                self._values[ref.rref] = value
        return value

    def _was_made(self, ref: Reference, made: Future[None]) -> None:
        """If the call that makes a value was not sent, or the owner could not unpickle it, send the owner the error.

        Calls that wait on the owner for the value then raise this error.
        """
        error, was_sent = made.exception(), made.answer is not None or ref.owner == self._me
        if error is not None and not (was_sent and isinstance(error, (RpcTimeoutError, GroupError))):
            self.todo.put(
                (ref.owner, _FAILED, (tuple(ref), pickling.pickled_error(error), message_of(error)))
            )

    def _not_made(self, caller: WorkerInfo, payload: tuple[Any, ...]) -> None:
        ref, pickled, text = Reference(*payload[0]), *payload[1:]
        error = (pickling.loaded_error(pickled) if pickled else None) or UsageError(text)
        self.agent.readers.run(partial(self._begin(caller, ref).complete, None, error))

    # ---- steps of the ledger -----------------------------------------------------------------------------------------

    def _step(self, do: Callable[..., T], *args: Any) -> T:
        """Call a method of the ledger, queue the ledger's messages, and drop the values that it has freed."""
        with self._lock:
            result = do(*args)
            while self._ledger.outbox:
                to, (kind, ref, number, dead) = self._ledger.outbox.pop()
                self.todo.put((to, _COUNTING, (kind, ref and tuple(ref), number, dead)))
            freed = []
            while self._ledger.freed:
                rref = self._ledger.freed.pop()
                freed += [self._values.pop(rref, None), self._expected.pop(rref, None)]
            if self.is_closed:
                self._settled.notify_all()
        if freed:  # a value's destructor may do anything: run it without the lock, on a thread that may block
            self.agent.readers.run(freed.clear)
        return result

    def _handle(self, sender: int, messages: Sequence[Any]) -> None:
        for kind, ref, number, dead in messages:
            self._ledger.handle(sender, CountingMessage(kind, ref and Reference(*ref), number, dead))

    def _run(self) -> None:
        """Send messages; the ledger's messages that are queued within 4 ms of each other are sent together."""
        counting: dict[int, list[Any]] = {}
        item = self.todo.get()
        while item is not None:
            if isinstance(item, Reference):
                self._step(self._ledger.release, item)
            elif item[1] == _COUNTING:
                counting.setdefault(item[0], []).append(item[2])
            else:
                self._notify(*item)
            if self.todo.empty():
                for to, messages in counting.items():
                    self._notify(to, _COUNTING, messages)
                counting.clear()
                time.sleep(_MOMENT_SECONDS)
            item = self.todo.get()

    def _notify(self, to: int, kind: int, payload: Any) -> None:
        while True:
            try:
                # `connect` raises if the worker is gone or cannot be reached; `notify` does not.
                self.agent.connect(self.agent.workers[to])
                self.agent.notify(to, kind, payload)
                return
            except ResourceError:  # this process lacks descriptors or ports, perhaps not for long
                time.sleep(_MOMENT_SECONDS)
            except FastcollError as error:
                self._died(to, error)
                return

    def _died(self, worker: int, error: FastcollError) -> None:
        self._gone.setdefault(worker, error)
        self._step(self._ledger.died, worker)
        with self._lock:
            lost = [self._expected.pop(rref) for rref in list(self._expected) if rref[0] == worker]
        for value in lost:
            self.agent.readers.run(partial(value.complete, None, _never_made(error, worker)))

    def _wind_up(self, until: float) -> None:
        """End all RRefs in `shutdown`, including those that the program still refers to."""
        limit = min(_SETTLE_SECONDS, max(until - time.monotonic(), 0.0))
        with self._lock:
            self.is_closed = True
        self._step(self._ledger.release_all)
        with self._settled:
            if not self._settled.wait_for(self._ledger.is_settled, limit):
                left = len(self._ledger.forks), len(self._ledger.held), limit
                _log.warning(
                    "shutdown: %d values and %d RRefs are left that other workers did not release in %g s",
                    *left,
                )


def _never_made(error: FastcollError, maker: int) -> FastcollError:
    return PeerDiedError(f"{error}, before its call that makes the RRef's value arrived", [maker])
