"""Handlers: the functions that this worker runs for calls and notifications, and how it sends the answers.

A call that this worker makes to itself takes the same path, without a link.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import RemoteError
from . import exceptions, pickling, wire
from .futures import Future
from .link import Link
from .readers import Readers
from .wire import MessageType, RpcMessage
from .worker_info import WorkerInfo

_log = logging.getLogger("fastcoll")
UNCOUNTED = 2  # the kind of the calls of the shutdown protocol (termination.py)
Handler = Callable[[WorkerInfo, Any], Any]


class Counts:
    """The number of calls and notifications that this worker has made, and that it has served."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made = self._served = 0

    def add(self, kind: int, made: int = 0, served: int = 0) -> None:
        """Add to the numbers, except for calls of the shutdown protocol (UNCOUNTED)."""
        with self._lock:
            if kind != UNCOUNTED:
                self._made += made
                self._served += served

    def read(self) -> tuple[int, int]:
        """Return both numbers, made and served, as they were at the same moment."""
        with self._lock:
            return self._made, self._served


class Handlers:
    """The handlers of each kind of call, and the calls that this worker has not answered yet.

    Args:
        answer_own: called with the answer to a call that this worker made to itself.
        lost: called when a link turns out to be broken.
    """

    def __init__(
        self,
        me: WorkerInfo,
        readers: Readers,
        counts: Counts,
        answer_own: Callable[[RpcMessage], None],
        lost: Callable[[Link], None],
    ) -> None:
        self._me, self._readers, self._counts = me, readers, counts
        self._answer_own, self._lost = answer_own, lost
        self._handlers: dict[int, tuple[Handler, bool]] = {}
        self._under_way: dict[object, tuple[WorkerInfo, int, object]] = {}  # calls that are not answered yet

    def add(self, kind: int, handler: Handler, with_contexts: bool) -> None:
        """Handle calls and notifications of a kind: see `Agent.on`."""
        self._handlers[kind] = (handler, with_contexts)

    def has(self, kind: int) -> bool:
        """Return whether there is a handler for calls of a kind."""
        return kind in self._handlers

    def takes_contexts(self, kind: int) -> bool:
        """Return whether calls of a kind carry the values of `pickling.contexts`."""
        return self._handlers[kind][1]

    def under_way(self) -> list[str]:
        """Describe the calls that this worker has not answered yet, for error messages."""
        return [
            f"{self._me.name} is in {described(kind, doing)} by {caller.name}"
            for caller, kind, doing in list(self._under_way.values())
            if kind != UNCOUNTED
        ]

    def serves(self, kind: int) -> bool:
        """Return whether there are calls of a kind here whose answers have not been sent yet."""
        return any(each == kind for _, each, _ in list(self._under_way.values()))

    def handle_notification(self, link: Link | None, message: RpcMessage) -> None:
        """Handle a notification."""
        worker = link.worker if link else self._me
        try:
            with pickling.receiving(worker):
                self._handlers[message.kind][0](worker, pickling.loads(message))
        except Exception as error:
            debugs = _log.isEnabledFor(logging.DEBUG)
            _log.error("a notification of %s could not be handled: %r", worker, error, exc_info=debugs)
        self._counts.add(message.kind, served=1)

    def serve(self, link: Link | None, message: RpcMessage) -> None:
        """Handle a call and answer it."""
        worker = link.worker if link else self._me
        try:
            handler, _ = self._handlers[message.kind]
            with pickling.receiving(worker), pickling.entered(message.context, worker):
                payload = _arguments(message)
                doing = payload[0] if type(payload) is tuple else None
                self._under_way[worker.id, message.call] = worker, message.kind, doing
                result = handler(worker, payload)
                if isinstance(result, Future) and result.done():
                    result = result.value()
                if not isinstance(result, Future):
                    self._answer(link, message, MessageType.RESULT, result)
                    return
        except BaseException as error:
            self._answer(link, message, MessageType.RAISED, exceptions.pack(error, self._me))
            return
        # Until the future is done, keep the message without its pickle and buffers, which may be large.
        answer = partial(self._answer_later, link, replace(message, pickled=b"", buffers=()))
        if link is None:
            # Answer on another thread. The answer runs callbacks of the caller's future. These may wait for other
            # callbacks of `result`, which run on this thread.
            result.add_done_callback(lambda done: self._readers.run(partial(answer, done)))
        else:
            result.add_done_callback(answer)

    def _answer_later(self, link: Link | None, message: RpcMessage, done: Future[Any]) -> None:
        try:
            with pickling.entered(message.context, link.worker if link else self._me):
                self._answer(link, message, MessageType.RESULT, done.value())
        except BaseException as error:
            self._answer(link, message, MessageType.RAISED, exceptions.pack(error, self._me))

    def _answer(self, link: Link | None, call: RpcMessage, type: MessageType, result: Any) -> None:
        worker = link.worker if link else self._me
        pickled, buffers = pickling.dumps(result, worker)
        answer = RpcMessage(type, 0, call.call, pickled, buffers)
        self._counts.add(call.kind, served=1)
        if link is None:
            self._under_way.pop((worker.id, call.call), None)
            self._answer_own(wire.copied(answer))
            return
        try:
            link.send(answer)
        except OSError:
            self._lost(link)
        self._under_way.pop((worker.id, call.call), None)


def described(kind: int, doing: object) -> str:
    """Return the text for a call in error messages. `doing`: this text, or the function that is called."""
    if isinstance(doing, str):
        return doing
    return f"the call of {getattr(doing, '__qualname__', None) or f'kind {kind}'}"


def _arguments(message: RpcMessage) -> Any:
    """Unpickle a call's arguments.

    Raises:
        RemoteError: they name a function or class that this process lacks.
    """
    try:
        return pickling.loads(message)
    except (AttributeError, ImportError) as error:
        raise RemoteError(
            f"{error}. The RPC pickler does not serialize the code of functions and classes: define them in a module "
            "that the caller and the callee have"
        ) from error
