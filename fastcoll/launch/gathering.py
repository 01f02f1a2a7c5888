"""How the launchers of a job with generations communicate: by keys in a store that one of them, the leader, serves.

    job           the options that all launchers must share; the first launcher sets them
    events        a queue of events from launchers, JSON: [launcher, sequence number, type, arguments ...]
    order/N       the leader's orders, numbered from 0; every launcher reads all of them by number
    gone/LAUNCHER the *will* of a launcher: a key that the server sets if the launcher disconnects unexpectedly

A launcher runs the ranks of one node. A generation is a set of ranks that start together; if a rank fails, the
launchers end the others and start the next generation (generations.py).

In a job of one node the store is in memory. If the leader ends, the other launchers lose the store, and the job ends.

Ranks of different generations cannot communicate. Each generation has its own secret, derived from the job's secret
and the generation's number, and both ends of a connection prove that they know it before anything else is
read (store/opening.py). A rank knows the secret of its own generation only. So a rank that was stopped, or whose host
was unreachable, cannot connect to ranks of a later generation.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import FastcollError, ResourceError, StoreError, StoreTimeoutError, UsageError
from ..store import HashStore
from ..store.secret import job_secret
from .failures import Failure
from .generations import End, Generations, Node, Order, Over, Phase, Rules, Start

if TYPE_CHECKING:
    from ..store import TCPStore

_KINDS = {kind.__name__: kind for kind in (Start, End, Over)}
_TRY_SECONDS = 0.5  # per attempt to connect; signals are handled between attempts
# How long the server holds a request for an order that is not set. If the server's host becomes unreachable, the kernel
# notices within 16 s, so the request ends with ConnectionError before this time is over.
_LOOK_SECONDS = 20.0
_SILENT_SECONDS = 30.0  # a leader that does not answer for longer counts as lost
_LAST_SECONDS = 5.0  # how long an exiting launcher waits for its last event or order to be sent
_THREAD = "fastcoll-gathering"
_GONE = "ended unexpectedly, or is unreachable"


def encode(order: Order) -> str:
    """Return an order as text."""
    return json.dumps([type(order).__name__, asdict(order)])


def decode(text: bytes) -> Order:
    """Return the order that `encode` converted to this text."""
    name, fields = json.loads(text)
    if "members" in fields:
        fields["members"] = tuple(Node(**node) for node in fields["members"])
    order: Order = _KINDS[name](**fields)
    return order


def secret_of(generation: int, run_id: str) -> str:
    """Return the secret of one generation.

    Neither the job's secret nor the secret of another generation can be derived from it.
    """
    text = f"fastcoll generation {generation} of {run_id}"
    return hmac.digest(job_secret(), text.encode(), hashlib.sha256).hex()


class Gathering:
    """One launcher's connection to the job: it publishes events and receives orders, without blocking the caller.

    At the end of the `with` block it publishes that this launcher leaves, unless the job is over.

    Args:
        store: the job's store; the Gathering closes it at the end.
        node: this launcher.
        port: returns the port on which rank 0 listens if it runs on this node; called each time this launcher is ready.
        rules: the job's rules; only the leader uses them.
        leads: whether this launcher is the leader.
        tick: the longest time in seconds between two checks of wills and deadlines; only the leader uses it.
    """

    def __init__(
        self,
        store: HashStore | TCPStore,
        node: Node,
        port: Callable[[], int],
        rules: Rules,
        leads: bool,
        tick: float,
    ) -> None:
        self.key = node.key
        self._store, self._node, self._port, self._rules = store, node, port, rules
        self._leads, self._tick = leads, tick
        self._orders: deque[Order] = deque()
        self._is_over, self._closed = False, threading.Event()
        self._withdraw: Callable[[], None] = lambda: None
        self._outbox: SimpleQueue[tuple[object, ...] | None] = SimpleQueue()
        work = [self._send, *([self._lead] if leads else []), self._follow]
        self._threads = [threading.Thread(target=each, name=_THREAD, daemon=True) for each in work]

    def __enter__(self) -> Gathering:
        if not isinstance(self._store, HashStore):
            text = f"{self._node} (pid {os.getpid()}) {_GONE}"
            self._withdraw = self._store.bequeath(f"gone/{self.key}", text)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_over:
            how = f"was ended by {kind.__name__}" if kind else "was ended"
            self.leave(Failure(1, f"{self._node} {how}"))
        end = time.monotonic() + _LAST_SECONDS
        self._outbox.put(None)
        for thread in self._threads[:-1]:  # `_send` and `_lead` end after the last event and order
            thread.join(max(0.0, end - time.monotonic()))
        self._closed.set()
        self._withdraw()
        if isinstance(self._store, HashStore):
            self._store.close()
        else:
            # In the leader, this first waits for the other launchers to disconnect.
            self._store.leave(max(0.0, end - time.monotonic()))
        for thread in self._threads:
            thread.join(_LAST_SECONDS)

    # ---- events of this launcher ----------------------------------------------------------------------------------

    def ready(self) -> None:
        """Publish that this launcher can start ranks."""
        self._outbox.put(("ready", asdict(replace(self._node, port=self._port()))))

    def failed(self, generation: int, failure: Failure) -> None:
        """Publish that a rank of this launcher has failed."""
        self._outbox.put(("failed", generation, failure.code, failure.text))

    def done(self, generation: int) -> None:
        """Publish that all ranks of this launcher have succeeded."""
        self._outbox.put(("done", generation))

    def leave(self, failure: Failure) -> None:
        """Publish that this launcher and its ranks end."""
        self._outbox.put(("left", failure.code, failure.text))

    def _send(self) -> None:
        """Send the events in order, and repeat each until the store confirms it.

        While the leader's process is stopped, the store confirms nothing, so an event may be sent twice. The leader
        applies it once, by its sequence number.
        """
        number = 0
        with contextlib.suppress(StoreError):  # the leader is lost, which `_follow` reports
            while (event := self._outbox.get()) is not None:
                number, text = number + 1, json.dumps([self.key, number + 1, *event])
                while not self._closed.is_set():
                    try:
                        self._store.queue_push("events", text)
                        break
                    except StoreTimeoutError:
                        self._closed.wait(_TRY_SECONDS)

    # ---- orders to this launcher ----------------------------------------------------------------------------------

    def take(self) -> Order | None:
        """Return the next order, or None if there is none yet. Never blocks."""
        return self._orders.popleft() if self._orders else None

    def failure(self) -> Failure | None:
        """Return why the ranks here must end, or None if no order says so. Never blocks."""
        for order in tuple(self._orders):
            if isinstance(order, End) or (isinstance(order, Over) and order.only in ("", self.key)):
                return Failure(order.code, order.text)
        return None

    def _follow(self) -> None:
        number = 0
        try:
            while not self._closed.is_set():
                try:
                    [text] = self._store.fetch([f"order/{number}"], _LOOK_SECONDS)
                except StoreTimeoutError:
                    self._check_leader()
                    continue
                order, number = decode(text), number + 1
                self._is_over |= isinstance(order, Over) and order.only in ("", self.key)
                self._orders.append(order)
        except ConnectionError:
            if not self._is_over:
                self._is_over = True
                self._orders.append(Over(1, f"the launcher that leads the job {_GONE}"))
        except StoreError:
            pass  # this launcher has closed the store

    def _check_leader(self) -> None:
        """Wait until the leader answers; raise ConnectionError after 30 s without an answer."""
        end = time.monotonic() + _SILENT_SECONDS
        while not self._closed.wait(_TRY_SECONDS):
            with contextlib.suppress(StoreTimeoutError):
                self._store.check(["job"])
                return
            if time.monotonic() > end:
                raise ConnectionError("the leader does not answer")

    # ---- the leader -----------------------------------------------------------------------------------------------

    def _lead(self) -> None:
        job = Generations(self._rules, time.monotonic())
        applied = dict[str, int]()  # by launcher, the sequence number of its last event
        queue = self._store.clone()
        queue.set_timeout(self._tick)
        number = 0
        with contextlib.suppress(StoreError):  # this launcher has closed the store
            while job.phase is not Phase.OVER:
                with contextlib.suppress(StoreTimeoutError):
                    self._apply(job, applied, json.loads(queue.queue_pop("events")))
                wills = self._store.peek([f"gone/{key}" for key in applied]) if applied else []
                for key, will in zip(tuple(applied), wills, strict=True):
                    if will is not None:
                        del applied[key]
                        job.left(key, 1, will.decode(), time.monotonic())
                job.tick(time.monotonic())
                for order in job.orders:
                    self._store.set(f"order/{number}", encode(order))
                    number += 1
                job.orders.clear()
        queue.close()

    def _apply(self, job: Generations, applied: dict[str, int], event: list[Any]) -> None:
        """Apply a launcher's event to the state machine, unless it was applied before."""
        now = time.monotonic()
        key, number, *content = event
        if number <= applied.get(key, 0):
            return
        applied[key] = number
        match content:
            case ["ready", fields]:
                job.ready(Node(**fields), now)
            case ["failed", generation, code, text]:
                job.failed(key, generation, code, text, now)
            case ["done", generation]:
                job.done(key, generation, now)
            case ["left", code, text]:
                job.left(key, code, text, now)
                if key == self.key:  # the store ends with the leader
                    job.over(code, text)


def open_store(
    host: str, port: int, leads: bool | None, within: float, waits: Callable[[], bool]
) -> tuple[TCPStore, bool]:
    """Serve the job's store or connect to it.

    Args:
        leads: whether this launcher serves the store; None: it does if the address belongs to this machine and the port
            is free.
        within: how many seconds to try to connect.
        waits: returns whether to go on trying; it returns False after a signal.

    Returns:
        The store, and whether this launcher serves it and so leads the job.

    Raises:
        FastcollError: the store cannot be served, or cannot be reached in time.
    """
    from ..store import TCPStore  # imported here, because it imports sockets and jobs of one node need none

    if leads is not False:
        try:
            return TCPStore(host, port, is_master=True), True
        except (UsageError, ResourceError):
            if leads:
                raise
    end = time.monotonic() + within
    while True:
        try:
            return TCPStore(host, port, timeout=_TRY_SECONDS), False
        except StoreTimeoutError:
            if time.monotonic() > end or not waits():
                raise


def agree(store: HashStore | TCPStore, what: str) -> None:
    """Check that `what`, a text with the options, is the same on all launchers of the job.

    Raises:
        FastcollError: the launcher that published its options first has other options.
    """
    first = store.compare_set("job", "", what).decode()
    if first != what:
        raise FastcollError(
            f"another job is led there, or the same one with other options: it has {first}, this launcher has {what}; "
            "give another --rdzv-endpoint, or the same options on every node"
        )
