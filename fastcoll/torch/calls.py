"""Conversion of torch's calls to calls of a fastcoll group: options, lists of one tensor, and the Work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _len_torch_dispatch_stack
from torch.autograd import profiler

from ..core.reduce_op import ReduceOp
from ..core.work import Work
from ..errors import UnavailableError, UsageError
from .work import DoneWork, PendingWork

Tensors = list[torch.Tensor]
_T = TypeVar("_T")

# The keys are ReduceOp objects, as in torch's options. Members of RedOpType would not serve as keys, because `RedOpType
# == ReduceOp` is False, although `ReduceOp == RedOpType` is True.
_OPS: dict[Any, ReduceOp] = {
    dist.ReduceOp(getattr(dist.ReduceOp, name)): getattr(ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
_SUM, _PREMUL_SUM = dist.ReduceOp.SUM, dist.ReduceOp.PREMUL_SUM
_UNSET = timedelta()  # zero or less means the group's timeout; torch uses negative values


def options(kind: Any, *short: Any, op: Any = None, root: Any = None, timeout: Any = None) -> Any:
    """Return a call's options as torch's type `kind`, which `short` may already have.

    The short form of a call has op, root and timeout instead of options. They are passed by name, or by position in any
    order; then their types tell which is which.
    """
    values = {"reduceOp": op, "rootRank": root, "timeout": timeout}
    for value in short:
        if isinstance(value, kind):
            return value
        if value is not None:
            is_root, is_limit = isinstance(value, int), isinstance(value, timedelta)
            values["timeout" if is_limit else "rootRank" if is_root else "reduceOp"] = value
    options = kind()
    for name, value in values.items():
        try:
            if value is not None:
                setattr(options, name, value)
        except (AttributeError, TypeError) as error:
            raise UsageError(f"{name} is {value!r}; this operation takes torch's {kind.__name__}") from error
    return options


class _Collective:
    """A stand-in for an operation of torch.ops.c10d, for modes that count calls; calling it does nothing."""

    def __init__(self, name: str) -> None:
        self._overloadpacket = getattr(torch.ops.c10d, name)

    def __call__(self, *args: Any, **options: Any) -> None:
        return None

    def __str__(self) -> str:
        return f"{self._overloadpacket}.default"


def _notify_modes(name: str) -> None:
    """Notify dispatch modes that count collectives (CommDebugMode), because this call bypasses torch's dispatcher."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    for mode in _get_current_dispatch_mode_stack():
        if hasattr(mode, "comm_counts"):
            mode.__torch_dispatch__(_Collective(name), ())


def recorded(call: Callable[..., _T]) -> Callable[..., _T]:
    """Record the call as an event of torch's profiler; the event of an asynchronous call covers its start only."""
    if not profiler._is_profiler_enabled:
        return call

    def event(*args: Any, **options: Any) -> _T:
        with profiler.record_function(f"fastcoll:{getattr(call, '__name__', 'call')}"):
            return call(*args, **options)

    return event


def run(
    name: str, opts: Any, tensors: Tensors, call: Callable[..., Work | None], *args: Any
) -> DoneWork | None:
    """Carry out an operation. `name` is its name in torch's dispatcher; `tensors` will hold its results.

    Without asyncOp return None, as NCCL's groups do: to make a Work of torch takes 0.7 us.
    """
    if _len_torch_dispatch_stack():
        _notify_modes(name)
    if profiler._is_profiler_enabled:
        call = recorded(call)
    limit = limit_of(opts)
    if is_async(opts):
        work = started(call, args)
        return DoneWork(tensors) if work.is_success() else PendingWork([work], tensors, limit)
    if limit is None:
        call(*args)
    else:
        PendingWork([started(call, args)], tensors, limit).wait()
    return None


def run_each(
    name: str, opts: Any, tensors: Tensors, call: Callable[..., Work | None], calls: Sequence[tuple[Any, ...]]
) -> DoneWork:
    """Carry out several operations of one kind as one operation of torch."""
    if _len_torch_dispatch_stack():
        _notify_modes(name)
    call = recorded(call)
    work = PendingWork([started(call, args) for args in calls], tensors, limit_of(opts))
    if not is_async(opts):
        work.wait()
    return work


def started(call: Callable[..., Work | None], args: tuple[Any, ...], **options: Any) -> Work:
    work = call(*args, async_op=True, **options)
    assert work is not None
    return work


def is_async(opts: Any) -> bool:
    try:
        return bool(opts.asyncOp)
    except AttributeError:  # None, and some options of older releases; torch then waits for the Work
        return True


def op(opts: Any) -> ReduceOp:
    # The comparison takes a third of the time of a table lookup.
    if opts is None or (wanted := opts.reduceOp) == _SUM:
        return ReduceOp.SUM
    if wanted == _PREMUL_SUM:
        factor = wanted.factor
        return ReduceOp.PREMUL_SUM(factor.item() if hasattr(factor, "item") else factor)
    if wanted not in _OPS:
        names = ", ".join(known.name for known in _OPS.values())
        raise UnavailableError(f"op is {wanted!r}; give one of {names} or PREMUL_SUM")
    return _OPS[wanted]


def limit_of(opts: Any) -> float | None:
    """Return this call's timeout in seconds; None: the group's timeout."""
    if opts is None or (timeout := opts.timeout) <= _UNSET:
        return None
    return float(timeout.total_seconds())


def root(opts: Any) -> int:
    if opts.rootTensor:
        raise UsageError(f"rootTensor is {opts.rootTensor}; a rank has one tensor here, number 0")
    return int(opts.rootRank)


def only(what: str, items: Any) -> Any:
    """Return the only item of a list (torch gives one per device of a rank), or an item given without a list."""
    if type(items) is list and len(items) == 1:
        return items[0]
    if isinstance(items, torch.Tensor):
        return items
    if len(items) != 1:
        raise UsageError(f"{what} has {len(items)} items; a rank has one device here, so give one")
    return items[0]


def only_list(what: str, items: Any) -> Any:
    """Return the only list in a list of lists (torch gives one per device), or a list given directly."""
    return items if items and isinstance(items[0], torch.Tensor) else only(what, items)


def pairs(outputs: Tensors, inputs: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if len(outputs) != len(inputs):
        raise UsageError(f"there are {len(outputs)} outputs and {len(inputs)} inputs; give as many of both")
    return list(zip(outputs, inputs, strict=True))
