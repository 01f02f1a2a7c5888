"""What DistributedDataParallel does to gradients, in a backward pass that keeps them out of `.grad`.

DDP's reducer runs behind torch's nodes that add a gradient to `.grad` (AccumulateGrad): there it finds the gradient and
there it leaves the average over its group. So each leaf's gradient is added to an empty `.grad` for a moment.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

of_grad = threading.Lock()
"""Who has it uses `.grad` of leaves. It is kept while DDP waits for other ranks, and not while gradients travel."""


def averaged(leaves: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """The gradients of leaves, None for zero, as DDP leaves them; 0.1 ms. Where torch has no group, there is no DDP."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return list(gradients)
    with of_grad:
        found = [leaf for leaf, gradient in zip(leaves, gradients, strict=True) if gradient is not None]
        with _set_aside(found):
            if found:  # starts at the leaves: a view would reshape, and sparse gradients cannot be reshaped
                torch.autograd.backward(found, [each for each in gradients if each is not None])
            after = iter([_own(leaf.grad) for leaf in found])
    return [None if gradient is None else next(after) for gradient in gradients]


@contextmanager
def _set_aside(leaves: Sequence[Any]) -> Iterator[None]:
    """Leaves without `.grad`, and without the hooks of `register_hook`, which have run by then."""
    grads = [leaf.grad for leaf in leaves]
    hooks = [dict(leaf._backward_hooks or {}) for leaf in leaves]
    try:
        for leaf, own in zip(leaves, hooks, strict=True):
            leaf.grad = None
            if own:
                leaf._backward_hooks.clear()
        yield
    finally:
        for leaf, grad, own in zip(leaves, grads, hooks, strict=True):
            leaf.grad = grad
            if own:
                leaf._backward_hooks.update(own)


def _own(gradient: Any) -> Any:
    """A gradient in memory of its own: under `gradient_as_bucket_view` it is a part of a bucket, to be used again."""
    if gradient.layout == torch.strided and gradient.untyped_storage().nbytes() > gradient.nbytes:
        return gradient.clone()
    return gradient
