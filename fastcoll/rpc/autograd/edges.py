"""The ends of this worker's part of an autograd graph: where tensors left it, and where tensors arrived.

A tensor that leaves for another worker is the input of a `Departure` node. The output of this node is called a *token*.
No other node uses the token, so the token is a root of the local graph. A tensor that arrives from another worker is
the output of an `ArrivalNode`. In a backward pass torch's engine runs both like any other node: a departure blocks
until the gradient arrives from the worker to which the tensor went; an arrival sends the tensor's gradient to the
worker from which the tensor came (passes.py).

Departures must run in descending order of the times at which their tensors left (by the context's clock, contexts.py),
and each only when no other node can run (passes.py has the reason). Among the nodes that are ready, torch's engine runs
the one with the highest sequence number. So a departure has its tensor's time as sequence number, and all other nodes
have numbers from RESERVED up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import Function

from ...errors import UsageError

RESERVED = 1 << 40
# The input of all arrival nodes: torch's engine runs only nodes that lead to a leaf.
_anchor = torch.empty(0, requires_grad=True)
_thread = threading.local()
_LEAF = torch._C._functions.AccumulateGrad


class GradientExchange(Protocol):
    """The exchange of gradients in the backward pass that runs on this thread."""

    def send(self, worker: int, message: int, gradient: Any) -> None:
        """Send the gradient of the tensor that came from `worker` in the message with this number."""

    def wait_for(self, message: int) -> Any:
        """Wait for the gradient of the tensor that left in `message`, and return it; None: it is zero."""


class Origin(NamedTuple):
    """The context and the message of a tensor that arrived, and the worker that sent it."""

    context: int
    message: int
    worker: int


class Departure(Function):  # type: ignore[misc]
    """The end of the local graph: a tensor that leaves for another worker."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, message: int) -> Any:
        ctx.message = message
        ctx.set_materialize_grads(False)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return _running().wait_for(ctx.message), None


class ArrivalNode(Function):  # type: ignore[misc]
    """The beginning of the local graph: a tensor that arrived from another worker."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, data: list[Any], origin: Origin) -> Any:
        ctx.origin = origin
        ctx.set_materialize_grads(False)
        return data[0]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        origin: Origin = ctx.origin
        _running().send(origin.worker, origin.message, gradient)
        return None, None, None


def departed(tensor: Any, message: int, number: int) -> Any:
    """Return the token of a tensor that leaves; `number`: the time at which it leaves."""
    with torch.enable_grad():
        token = Departure.apply(tensor, message)
    token.grad_fn._set_sequence_nr(number)
    return token


def arrived(data: Any, origin: Origin) -> Any:
    """Add a tensor that arrived to the local graph; return the result, which may be changed in place."""
    with torch.enable_grad():
        return ArrivalNode.apply(_anchor, [data], origin)


def explore(nodes: Iterable[Any], seen: set[Any]) -> tuple[list[Any], list[Origin]]:
    """Return the leaves and arrivals that gradients reach from these nodes; do not go beyond nodes in `seen`."""
    leaves, origins, stack = [], [], [node for node in nodes if node not in seen]
    seen.update(stack)
    while stack:
        node = stack.pop()
        kind = type(node)
        if kind is _LEAF:
            leaves.append(node.variable)
            continue
        number = node._sequence_nr()
        if number < RESERVED and kind is not Departure._backward_cls:
            node._set_sequence_nr(RESERVED + number)
        if kind is ArrivalNode._backward_cls:
            origins.append(node.origin)
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return leaves, origins


def flow(running: GradientExchange, roots: list[Any], leaves: list[Any], retain_graph: bool) -> list[Any]:
    """Run the local graph backward from `roots`, which are scalars; return the leaves' gradients, None for zero.

    The calling thread also runs the nodes whose tensors are on GPUs. If torch's GPU threads ran them, they could make a
    node ready while the calling thread blocks in a departure.
    """
    before, _thread.running = getattr(_thread, "running", None), running
    try:
        with torch.autograd.set_multithreading_enabled(False):
            inputs = [*leaves, _anchor]
            found = torch.autograd.grad(roots, inputs, retain_graph=retain_graph, allow_unused=True)
    finally:
        _thread.running = before
    return list(found[:-1])


def _running() -> GradientExchange:
    running: GradientExchange | None = getattr(_thread, "running", None)
    if running is None:
        raise UsageError(
            "a tensor that arrived by rpc is part of this graph: call rpc.autograd.backward(context_id, roots)"
        )
    return running
