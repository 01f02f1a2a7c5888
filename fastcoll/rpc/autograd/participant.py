"""This worker's part in autograd: its contexts, each thread's current context, and the calls of a backward pass.

The functions that workers call on one another are at the end of this file. A worker imports this file when it receives
the first call in a context, because contexts are sent with the name of this module (pickling.contexts).
"""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from ...core.future import anew
from ...errors import AbortedError, FastcollError, RpcError, message_of
from .. import pickling
from ..agent import Agent, current_agent
from ..calls import USER_CALL
from ..futures import Future
from ..tensor_buffers import reduced
from ..worker_info import WorkerInfo
from .contexts import Context, Contexts, maker
from .edges import Origin
from .passes import Pass

_ID = struct.Struct("<Q")
_thread = threading.local()


def current() -> Context | None:
    """Return the current context of this thread."""
    return getattr(_thread, "context", None)


@contextmanager
def entered(context: Context | None) -> Iterator[None]:
    """Make `context`, or none, this thread's current context."""
    before, _thread.context = current(), context
    try:
        yield
    finally:
        _thread.context = before


class Participant:
    """This worker's part in autograd, as long as its agent lives."""

    def __init__(self, agent: Agent) -> None:
        self.agent, self.me = agent, agent.me.id
        self.contexts = Contexts(self.me)
        agent.on_death(self.contexts.died)

    def call(self, worker: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call one of the functions at the end of this file on a worker, outside any context."""
        with entered(None):
            return self.agent.call(worker, USER_CALL, (function, args, {}))

    def join(self, id: int, sender: int) -> Context | None:
        """Return the context whose id arrived with a call of `sender`; None: it is over."""
        context, is_new = self.contexts.join(id)
        if is_new and sender != maker(id):
            announced = self.call(maker(id), announce, id, self.me)
            announced.add_done_callback(lambda done: done.exception() and self.end(id, id))
        return context

    def end(self, id: int, oldest: int) -> Context | None:
        """End a context on this worker, and record that its maker's contexts before `oldest` are over."""
        return self.contexts.end(id, oldest, AbortedError("the autograd context was left"))

    def leave(self, id: int) -> None:
        """End a context that this worker made, on all workers that have it."""
        oldest = self.contexts.oldest()
        context = self.end(id, oldest)
        for worker in context.workers if context is not None else ():
            self.send_end(worker, id, oldest)

    def send_end(self, worker: int, id: int, oldest: int) -> None:
        with suppress(FastcollError):  # a worker that is gone has no contexts
            self.call(worker, end, id, oldest)

    def begin(self, context: Context, id: int, roots: Sequence[Any] = ()) -> Pass:
        """Return this worker's part of a pass; make it if the pass has not reached this worker before."""

        def deliver(worker: int, message: int, gradient: Any) -> Future[None]:
            return self.call(worker, take, context.id, id, message, gradient)

        return context.begin(Pass(context, id, deliver, roots))

    def backward(self, context: Context, roots: Sequence[Any], retain_graph: bool) -> None:
        """Accumulate the gradients of the sum of the roots, on all workers."""
        id, workers = self.contexts.new_id(), {self.me}
        ended: queue.SimpleQueue[tuple[int, Future[None]]] = queue.SimpleQueue()
        try:
            self._discover(context, id, self.begin(context, id, roots).begin(), workers)
            for worker in workers:
                done = self.call(worker, run, context.id, id, retain_graph)
                done.add_done_callback(partial(_note, ended, worker))
            for _ in workers:
                worker, done = ended.get()
                _raise(worker, done.exception())
        except BaseException as error:
            reason = AbortedError(f"backward has failed: {type(error).__name__}: {message_of(error)}")
            for worker in workers:
                with suppress(FastcollError):
                    self.call(worker, fail, context.id, id, reason)
            raise

    def _discover(self, context: Context, id: int, reached: Sequence[Origin], workers: set[int]) -> None:
        """Have the workers explore their graphs from `reached` on; add the workers that take part to `workers`."""
        while reached:
            messages: dict[int, list[int]] = {}
            for origin in reached:
                messages.setdefault(origin.worker, []).append(origin.message)
            workers.update(messages)
            asked = [self.call(worker, discover, context.id, id, each) for worker, each in messages.items()]
            reached = [origin for each in asked for origin in each.wait()]


def _note(ended: queue.SimpleQueue[tuple[int, Future[None]]], worker: int, done: Future[None]) -> None:
    ended.put((worker, done))


def _raise(worker: int, error: BaseException | None) -> None:
    """Raise the error that ended a worker's part of a pass, converted to a RuntimeError as in torch."""
    if error is None:
        return
    if isinstance(error, RuntimeError) or not isinstance(error, Exception):
        raise anew(error)
    raise RpcError(f"Error on Node {worker}: {message_of(error)} ({type(error).__name__})") from error


_participant: Participant | None = None
_lock = threading.Lock()


def participant() -> Participant:
    """Return this worker's part in autograd.

    Raises:
        NotInitializedError: `init_rpc` was not called.
    """
    global _participant
    agent = current_agent()
    with _lock:
        if _participant is None or _participant.agent is not agent:
            _participant = Participant(agent)
        return _participant


# ---- contexts of calls, and tensors in them ---------------------------------------------------------------------


class _Carried:
    """Sends the id of the current context with a call (pickling.CallContext)."""

    def encode(self, to: WorkerInfo) -> bytes | None:
        context = current()
        if context is None:
            return None
        own = participant().me
        if maker(context.id) == own != to.id and not context.admit(to.id):
            return None
        return _ID.pack(context.id)

    def enter(self, value: bytes, sender: WorkerInfo) -> Any:
        (id,) = _ID.unpack(value)
        return entered(participant().join(id, sender.id))


def _reduced(tensor: Any, _: WorkerInfo) -> Any:
    """Return the reduce tuple of a tensor. In a context, record the departure of a tensor that needs a gradient."""
    context = current()
    if context is None or not tensor.requires_grad:
        return reduced(tensor)
    data = tensor.detach()
    if not torch.is_grad_enabled():
        return reduced(data)
    message = participant().contexts.new_id()
    return _rebuild, (context.id, message, context.depart(tensor, message), data)


def _rebuild(id: int, message: int, time: int, data: Any) -> Any:
    """Return a tensor that arrived in a message. If its context is over, the tensor needs no gradient."""
    context = current()
    if context is None or context.id != id:
        return data
    return context.arrive(data, Origin(id, message, pickling.sender().id), time)


pickling.contexts[f"{__package__}.participant"] = _Carried()
pickling.reduce_type(torch.Tensor, _reduced)


# ---- functions that workers call --------------------------------------------------------------------------------


def discover(context: int, id: int, messages: Sequence[int]) -> list[Origin]:
    """Return the arrivals on this worker that a pass reaches from the tensors that left in these messages."""
    me = participant()
    return me.begin(me.contexts.get(context), id).discover(messages)


def run(context: int, id: int, retain_graph: bool) -> None:
    """Run this worker's part of a pass."""
    found = participant().contexts.get(context)
    try:
        found.passes[id].run(retain_graph)
    finally:
        found.passes.pop(id, None)


def take(context: int, id: int, message: int, gradient: Any) -> None:
    """Take the gradient of the tensor that left this worker in the message with this number."""
    part = participant().contexts.get(context).passes.get(id)
    if part is None:
        raise AbortedError("the backward pass is over on this worker")
    part.take(message, gradient)


def fail(context: int, id: int, error: BaseException) -> None:
    """Fail this worker's part of a pass that has failed on another worker."""
    with suppress(FastcollError):
        part = participant().contexts.get(context).passes.pop(id, None)
        if part is not None:
            part.fail(error)


def announce(id: int, worker: int) -> None:
    """Record that `worker` has a context that this worker made; it got the id from a third worker."""
    me = participant()
    context, _ = me.contexts.join(id)
    if context is None or not context.admit(worker):
        me.send_end(worker, id, me.contexts.oldest())


def end(id: int, oldest: int) -> None:
    """End a context that its maker has left."""
    participant().end(id, oldest)
