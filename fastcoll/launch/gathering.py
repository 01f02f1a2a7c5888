"""How the launchers of a job with generations gather: in a store that one of them serves and leads the job in.

    job           what all have agreed on, as the first one has it
    events        a queue: what launchers tell the leader, each a JSON list: who, its how manieth, what, and more
    order/N       what the leader has ordered, from 0: all read all of it, in this order
    gone/LAUNCHER the will of each launcher: the server sets it when that one ends without a word

A job of one node keeps all that in its memory. The leader's end is the end of the job: the others lose the store.

Ranks of different generations cannot speak to one another: each generation has a secret of its own, made of the job's
and its number, which both ends of every connection prove before anything else is read (store/opening.py); a rank
has that of its own generation alone. So one that was stopped, or is on a host that was out of reach, finds nobody.
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
_TRY_SECONDS = 0.5  # to connect, between looks at signals
# A wait for an order; the server answers at its end. The kernel finds within 16 s that its host is out of reach.
_LOOK_SECONDS = 20.0
_SILENT_SECONDS = 30.0  # after which a leader that does not answer is lost
_LAST_SECONDS = 5.0  # for the last order to reach the others, as the leader ends
_THREAD = "fastcoll-gathering"
_GONE = "ended unexpectedly, or is unreachable"


def encode(order: Order) -> str:
    """An order as text."""
    return json.dumps([type(order).__name__, asdict(order)])


def decode(text: bytes) -> Order:
    """What `encode` has made."""
    name, fields = json.loads(text)
    if "members" in fields:
        fields["members"] = tuple(Node(**node) for node in fields["members"])
    order: Order = _KINDS[name](**fields)
    return order


def secret_of(generation: int, run_id: str) -> str:
    """The secret of one generation, from which neither the job's nor another generation's can be found."""
    text = f"fastcoll generation {generation} of {run_id}"
    return hmac.digest(job_secret(), text.encode(), hashlib.sha256).hex()


class Gathering:
    """One launcher's part; what it tells never blocks. A context manager: says that it leaves, unless the job is over.

    Args:
        store: where all meet; closed at the end.
        node: this launcher; its port is drawn anew by `port` each time it is ready.
        leads: whether the job is led here, by these rules.
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
        for thread in self._threads[:-1]:  # they end when the last word was sent, and the last order given
            thread.join(max(0.0, end - time.monotonic()))
        self._closed.set()
        self._withdraw()
        if isinstance(self._store, HashStore):
            self._store.close()
        else:
            self._store.leave(max(0.0, end - time.monotonic()))  # the leader's is left by all others first
        for thread in self._threads:
            thread.join(_LAST_SECONDS)

    # ---- what this launcher tells ---------------------------------------------------------------------------------

    def ready(self) -> None:
        """Its ranks can be started."""
        self._outbox.put(("ready", asdict(replace(self._node, port=self._port()))))

    def failed(self, generation: int, failure: Failure) -> None:
        """One of its ranks has failed."""
        self._outbox.put(("failed", generation, failure.code, failure.text))

    def done(self, generation: int) -> None:
        """All its ranks have ended well."""
        self._outbox.put(("done", generation))

    def leave(self, failure: Failure) -> None:
        """This launcher ends, and its ranks with it."""
        self._outbox.put(("left", failure.code, failure.text))

    def _send(self) -> None:
        """Send what is told, in order. What a stopped leader does not confirm is sent again, and counts once."""
        number = 0
        with contextlib.suppress(StoreError):  # the leader is gone, as `_follow` finds, too
            while (event := self._outbox.get()) is not None:
                number, text = number + 1, json.dumps([self.key, number + 1, *event])
                while not self._closed.is_set():
                    try:
                        self._store.queue_push("events", text)
                        break
                    except StoreTimeoutError:
                        self._closed.wait(_TRY_SECONDS)

    # ---- what it is to do -----------------------------------------------------------------------------------------

    def take(self) -> Order | None:
        """The next order, None when there is none yet. Never blocks."""
        return self._orders.popleft() if self._orders else None

    def failure(self) -> Failure | None:
        """Why the ranks that run here are to end: the first order to end them. Never blocks."""
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
            pass  # it was closed

    def _check_leader(self) -> None:
        """ConnectionError: the leader does not answer, and has not for long."""
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
        applied = dict[str, int]()  # how much each launcher has told that is here
        queue = self._store.clone()
        queue.set_timeout(self._tick)
        number = 0
        with contextlib.suppress(StoreError):  # it was closed
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
        """Tell the state machine what a launcher has told."""
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
                if key == self.key:  # with the leader goes the store
                    job.over(code, text)


def open_store(
    host: str, port: int, leads: bool | None, within: float, waits: Callable[[], bool]
) -> tuple[TCPStore, bool]:
    """The store of the job at an address, and whether it is served here, so that this launcher leads.

    Args:
        leads: None: if the address is of this machine and free.
        within: seconds for the leader to come.
        waits: whether to try on, as no signal has come.

    Raises:
        FastcollError: it cannot be served, or was not there in time.
    """
    from ..store import TCPStore  # sockets and all that, for jobs of one node in vain

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
    """Check that the job's launchers were started alike: `what` is what must be equal.

    Raises:
        FastcollError: they were not.
    """
    first = store.compare_set("job", "", what).decode()
    if first != what:
        raise FastcollError(
            f"another job is led there, or the same one with other options: it has {first}, this launcher has {what}; "
            "give another --rdzv-endpoint, or the same options on every node"
        )
