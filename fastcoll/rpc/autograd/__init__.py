"""Gradients across workers, with the API of torch.distributed.autograd. Needs the extra `torch`.

Inside a `context`, tensors that are sent by rpc remain parts of one autograd graph across the workers. `backward` runs
the whole graph backward, and stores the gradients in the context, not in `.grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

try:
    import torch
except ImportError as error:
    from ...errors import UnavailableError, install

    raise UnavailableError(f"fastcoll.rpc.autograd needs torch: {install('torch')}") from error

from ...errors import ArgumentTypeError, UsageError
from .participant import current, entered, participant

__all__ = ["backward", "context", "get_gradients"]


class context:
    """A forward pass and the backward passes through it.

    `with` returns the context's id, which is valid on all workers. If a tensor that needs a gradient is sent by rpc
    inside the context, as an argument or result or inside a container, it arrives as a part of the graph. Leaving the
    context, also by an exception, frees the graph and the gradients on all workers.

    Raises:
        UsageError: this thread is in a context already.
        NotInitializedError: `init_rpc` was not called.

    Examples:
        >>> with rpc.autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.mul, args=(weight, 2)).sum()
        ...     rpc.autograd.backward(context_id, [loss])
        ...     gradient = rpc.autograd.get_gradients(context_id)[weight]
    """

    def __enter__(self) -> int:
        if (outer := current()) is not None:
            raise UsageError(f"Already have an autograd context id for this thread: {outer.id}")
        self._participant = participant()
        made = self._participant.contexts.new()
        self._inside: AbstractContextManager[None] = entered(made)
        self._inside.__enter__()
        self._id = made.id
        return made.id

    def __exit__(self, *raised: Any) -> None:
        self._inside.__exit__(*raised)
        self._participant.leave(self._id)


def backward(context_id: int, roots: Sequence[Any], retain_graph: bool = False) -> None:
    """Compute the gradients of the sum of `roots`, and add them to the gradients in the context.

    Each worker stores the gradients of its own leaves.

    Args:
        context_id: the id of the context in which the roots were computed.
        roots: tensors of one element that need gradients.
        retain_graph: keep the graph for another backward pass.

    Raises:
        UsageError: there is no such context here, or the roots are wrong.
        ArgumentTypeError: an argument has a wrong type.
        PeerDiedError: a worker that takes part died.
        RpcTimeoutError: a worker did not finish within the timeout of `init_rpc`.

    If a function of the graph raises on any worker, its error is raised here: a RuntimeError as it is, any other error
    as the cause of a RuntimeError. After a failure the context's gradients may be incomplete.
    """
    _check(context_id, roots)
    me = participant()
    found = me.contexts.get(context_id)
    me.backward(found, roots, retain_graph)


def get_gradients(context_id: int) -> dict[Any, Any]:
    """Return the gradients in a context for the leaves of this worker: a dictionary from leaf to gradient.

    Raises:
        UsageError: there is no such context here.
    """
    return participant().contexts.get(context_id).gradients()


def _check(context_id: int, roots: Sequence[Any]) -> None:
    if not isinstance(context_id, int) or not isinstance(roots, Sequence):
        raise ArgumentTypeError(
            "backward(): incompatible function arguments: give the id of a context and a list of tensors, not "
            f"{context_id!r:.80} and {roots!r:.80}"
        )
    if not roots:
        raise UsageError("No tensors provided for gradient computation: roots is empty")
    for number, root in enumerate(roots):
        if not isinstance(root, torch.Tensor):
            raise ArgumentTypeError(f"root {number} must be a tensor, not {root!r:.80}")
        if not root.requires_grad:
            raise UsageError(f"root {number}: requires_grad not set on a tensor of shape {tuple(root.shape)}")
        if root.numel() != 1:
            raise UsageError(
                f"root {number} of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar: tensors of "
                "one element"
            )
