"""DistributedOptimizer: one optimizer on each worker that owns parameters; all of them step together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .autograd import get_gradients
from .autograd.hooks import of_grad
from .autograd.participant import entered, participant
from .calls import rpc_async
from .futures import all_done, wait_all
from .rref import RRef
from .worker_info import WorkerInfo


class DistributedOptimizer:
    """One optimizer on each worker that owns some of the parameters, as in torch.distributed.optim.

    On each worker, the steps of several DistributedOptimizers run one after the other.

    Args:
        optimizer_class: a class of torch.optim, or a similar one whose `step` needs no closure.
        params_rref: RRefs of the parameters, on any workers.
        args, kwargs: further arguments of `optimizer_class`, after the list of parameters.

    Examples:
        >>> optimizer = rpc.DistributedOptimizer(torch.optim.SGD, [rpc.RRef(weight), far_weight], lr=0.05)
        >>> with rpc.autograd.context() as context_id:
        ...     rpc.autograd.backward(context_id, [loss()])
        ...     optimizer.step(context_id)
    """

    def __init__(
        self, optimizer_class: type, params_rref: Sequence[RRef[Any]], *args: Any, **kwargs: Any
    ) -> None:
        of_owner: dict[WorkerInfo, list[RRef[Any]]] = {}
        for each in params_rref:
            of_owner.setdefault(each.owner(), []).append(each)
        self.remote_optimizers: list[RRef[_Local]] = wait_all(
            [
                rpc_async(owner, _made, args=(optimizer_class, theirs, args, kwargs))
                for owner, theirs in of_owner.items()
            ]
        )

    def step(self, context_id: int) -> None:
        """Step all optimizers by the gradients of a context.

        Wait until all have finished; then raise the error of the first one that failed, if there is one.
        Parameters without a gradient in the context do not change, and no `.grad` changes.

        Raises:
            UsageError: there is no such context here.
        """
        with entered(participant().contexts.get(context_id)):
            steps = [
                rpc_async(each.owner(), _step, args=(each, context_id)) for each in self.remote_optimizers
            ]
        for step in all_done(steps).wait():
            step.value()


class _Local:
    """The optimizer of one worker."""

    def __init__(self, optimizer: Any, params: Sequence[Any]) -> None:
        self._optimizer, self._params = optimizer, params

    def step(self, context_id: int) -> None:
        gradients = get_gradients(context_id)
        with of_grad:  # several optimizers may share parameters
            before = [param.grad for param in self._params]
            try:
                for param in self._params:
                    param.grad = gradients.get(param)
                self._optimizer.step()
            finally:
                for param, gradient in zip(self._params, before, strict=True):
                    param.grad = gradient


def _made(optimizer_class: type, rrefs: Sequence[RRef[Any]], args: Any, kwargs: Any) -> RRef[_Local]:
    params = [rref.local_value() for rref in rrefs]
    return RRef(_Local(optimizer_class(params, *args, **kwargs), params))


def _step(optimizer: RRef[_Local], context_id: int) -> None:
    optimizer.local_value().step(context_id)
