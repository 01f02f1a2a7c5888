"""Backward passes: how gradients go from roots through the graphs of all workers to their leaves.

The *initiator*, who has the roots, first discovers who takes part: each worker explores its graph below the tensors
that left it, and says which arrivals of others that reaches, until nothing new is found. Then all run their part at
once, each by one run of torch's engine, so that every node and hook runs once, on the whole gradient (edges.py). A
departure waits for the one gradient of where its tensor went; an arrival sends one. When all parts are over, so is the
pass.

No deadlock: of all departures that wait, take the one whose tensor left at the latest time t. Its gradient is sent by
an arrival, whose worker waits, too, in a departure of a time of t or before, and has run all its later departures, and
every node that those alone reach. Among these is the arrival: what reaches it left after it had come, later than t.

A worker that fails says so to the initiator, who makes all others fail (participant.py). That ends every wait, as the
initiator's calls have a deadline, and its death is seen by all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch.autograd.graph import get_gradient_edge

from ...errors import UsageError
from ..futures import Future
from ..readers import before_blocking
from .edges import Origin, explore, flow
from .hooks import averaged

Deliver = Callable[[int, int, Any], Future[None]]


class Recorded(Protocol):
    """What this worker has recorded of a forward pass: its Context."""

    id: int

    def tokens(self, messages: Iterable[int]) -> list[Any]:
        """Return the roots that stand for the tensors that left as `messages`."""

    def accumulate(self, leaves: Sequence[Any], gradients: list[Any]) -> None:
        """Add gradients to those of the leaves; removes them from the list."""


class Pass:
    """This worker's part of a backward pass.

    Args:
        deliver: sends a gradient to a worker, for the message by which the tensor has left it.
        roots: where the gradient is one.
    """

    def __init__(self, context: Recorded, id: int, deliver: Deliver, roots: Sequence[Any] = ()) -> None:
        self.id = id
        self._context, self._deliver, self._roots = context, deliver, list(roots)
        self._seen: set[Any] = set()  # keeps Python's objects of the nodes, which are what tells nodes apart
        self._leaves: list[Any] = []
        self._messages: list[int] = []  # of the tensors that left from here and take part
        self._came: dict[int, Any] = {}
        self._sent: list[Future[None]] = []
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def begin(self) -> list[Origin]:
        """The arrivals that the roots reach."""
        return self._explore(self._roots)

    def discover(self, messages: Sequence[int]) -> list[Origin]:
        """The arrivals that tensors reach that left from here, but for those that were reached before."""
        self._messages += messages
        return self._explore(self._context.tokens(messages))

    def _explore(self, tensors: Iterable[Any]) -> list[Origin]:
        leaves, origins = explore([get_gradient_edge(each).node for each in tensors], self._seen)
        self._leaves += leaves
        for origin in origins:
            if origin.context != self._context.id:
                raise UsageError(
                    f"a tensor that worker {origin.worker} sent in the autograd context {origin.context} is part of "
                    f"the graph of the context {self._context.id}; take what leaves a context out of it by detach()"
                )
        return origins

    def run(self, retain_graph: bool) -> None:
        """Run the local graph, and accumulate the leaves' gradients in the context."""
        roots = [*self._roots, *self._context.tokens(self._messages)]
        gradients = [flow(self, roots, self._leaves, retain_graph)]
        for future in self._sent:
            future.wait()
        # `pop`: no other list refers to the gradients when they are accumulated.
        self._context.accumulate(self._leaves, averaged(self._leaves, gradients.pop()))

    def fail(self, error: BaseException) -> None:
        """End what waits here."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def take(self, message: int, gradient: Any) -> None:
        """The gradient of a tensor that left as `message` has come."""
        with self._changed:
            self._came[message] = gradient
            self._changed.notify_all()

    def wait_for(self, message: int) -> Any:
        """The gradient of a tensor that left; None: it is zero everywhere."""
        before_blocking()
        with self._changed:
            self._changed.wait_for(lambda: message in self._came or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._came.pop(message)

    def send(self, worker: int, message: int, gradient: Any) -> None:
        """The gradient of a tensor that a worker sent by `message`."""
        if self._error is not None:
            raise self._error
        self._sent.append(self._deliver(worker, message, gradient))
