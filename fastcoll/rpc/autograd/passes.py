"""Backward passes: how gradients flow from the roots through the graphs of all workers to the leaves.

A tensor that one worker sends to another has a node in the graph of each: a *departure* on the worker that it left, and
an *arrival* on the worker that received it (edges.py). In a backward pass the arrival sends the gradient of the tensor,
and the departure waits for that gradient.

The *initiator*, the worker that has the roots, first discovers the workers that take part. Each of them explores its
graph from the tensors that left it, and returns the arrivals that it reaches, until no new arrival is found. Then all
workers run their parts at the same time. Each part is one run of torch's engine, so every node and hook runs once, on
the complete gradient. The pass ends when all parts have ended.

There is no deadlock. Suppose that all workers wait in departures. Among these, consider the departure whose tensor left
last, at time t. The arrival of this tensor is on another worker. That worker waits in a departure of time t or earlier.
So it has already run all its departures with times after t, and all nodes that only these departures and the roots
reach. The arrival is such a node, because every tensor that depends on it left later than t. So the arrival has sent
the gradient for which the first worker waits, which contradicts the assumption.

A worker that fails informs the initiator, which makes all others fail (participant.py). No wait is endless, because the
initiator's calls have a deadline, and all workers notice the initiator's death.
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
    """This worker's record of a forward pass: its Context."""

    id: int

    def tokens(self, messages: Iterable[int]) -> list[Any]:
        """Return the tokens (edges.py) of the tensors that left in the messages with these numbers."""

    def accumulate(self, leaves: Sequence[Any], gradients: list[Any]) -> None:
        """Add `gradients` to the gradients of the leaves, and remove each from the list."""


class Pass:
    """This worker's part of a backward pass.

    Args:
        deliver: called with a worker, the number of a message and a gradient; sends the gradient to that worker, which
            had sent the tensor in that message.
        roots: tensors of one element, where the gradient is 1.
    """

    def __init__(self, context: Recorded, id: int, deliver: Deliver, roots: Sequence[Any] = ()) -> None:
        self.id = id
        self._context, self._deliver, self._roots = context, deliver, list(roots)
        # Nodes are distinguished by the identity of their Python objects, which this set keeps alive.
        self._seen: set[Any] = set()
        self._leaves: list[Any] = []
        self._messages: list[int] = []  # the numbers of the messages whose tensors take part
        self._gradients: dict[int, Any] = {}
        self._sent: list[Future[None]] = []
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def begin(self) -> list[Origin]:
        """Return the arrivals that the roots reach."""
        return self._explore(self._roots)

    def discover(self, messages: Sequence[int]) -> list[Origin]:
        """Return the arrivals that the tensors of `messages` reach, except those that were reached before."""
        self._messages += messages
        return self._explore(self._context.tokens(messages))

    def _explore(self, tensors: Iterable[Any]) -> list[Origin]:
        leaves, origins = explore([get_gradient_edge(each).node for each in tensors], self._seen)
        self._leaves += leaves
        for origin in origins:
            if origin.context != self._context.id:
                raise UsageError(
                    f"a tensor that worker {origin.worker} sent in the autograd context {origin.context} is part of "
                    f"the graph of the context {self._context.id}; detach() tensors that leave a context"
                )
        return origins

    def run(self, retain_graph: bool) -> None:
        """Run the local graph, and accumulate the leaves' gradients in the context."""
        roots = [*self._roots, *self._context.tokens(self._messages)]
        gradients = [flow(self, roots, self._leaves, retain_graph)]
        for future in self._sent:
            future.wait()
        # `pop` ensures that no other list refers to the gradients while they are accumulated.
        self._context.accumulate(self._leaves, averaged(self._leaves, gradients.pop()))

    def fail(self, error: BaseException) -> None:
        """Have the departures that wait on this worker raise an error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def take(self, message: int, gradient: Any) -> None:
        """Store the gradient of the tensor that left in `message`, and wake its departure."""
        with self._changed:
            self._gradients[message] = gradient
            self._changed.notify_all()

    def wait_for(self, message: int) -> Any:
        """Wait for the gradient of the tensor that left in `message`, and return it; None: it is zero."""
        before_blocking()
        with self._changed:
            self._changed.wait_for(lambda: message in self._gradients or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._gradients.pop(message)

    def send(self, worker: int, message: int, gradient: Any) -> None:
        """Send a worker the gradient of the tensor that it had sent in `message`."""
        if self._error is not None:
            raise self._error
        self._sent.append(self._deliver(worker, message, gradient))
