"""Operation: one call as data, made after its arguments are checked; and how some operations are composed of others.

An operation has a *kind*, such as "all_reduce". The kind's form (operations.py) determines the outputs and inputs. In a
scan every rank has a result; in a reduce only the root has one. Only the root of a gather has outputs, and only the
root of a scatter has inputs.

Arrays are contiguous ndarrays, or DeviceArrays (on a GPU). An input and an output in host memory share memory only if
they are the same array by the kind's form, or if both are the block that a rank sends to itself. Arrays on GPUs may
overlap in any way. `parts` are further numbers in which all ranks must agree. For example, those of a coalesced call
(one call on a list of arrays) are the sizes of its arrays. `narrow` is how the array of an all_reduce travels between
nodes (travel.py), or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .operands import scaled
from .reduce_op import ReduceOp
from .travel import Narrow

Call = Callable[[], Any]
"""A function that carries out an operation. It blocks. If it raises GroupError or MismatchError, the outputs are
undefined."""


class Operation(NamedTuple):
    kind: str
    outputs: tuple[Any, ...] = ()
    inputs: tuple[Any, ...] = ()
    op: ReduceOp | None = None
    root: int = 0
    parts: tuple[int, ...] = ()
    narrow: Narrow | None = None


Planner = Callable[[Operation], Call]


def flattened(xs: Sequence[Any]) -> Any:
    """Concatenate the elements of host arrays of one dtype."""
    flat = np.empty(sum(x.size for x in xs), xs[0].dtype)  # np.concatenate alone would change the byte order
    return np.concatenate([x.reshape(-1) for x in xs], out=flat)


def then_split(call: Call, flat: Any, outs: Sequence[Any]) -> Call:
    """Return a call that runs `call`, and then copies consecutive parts of `flat` to the arrays `outs`."""

    def run() -> None:
        call()
        results, start = flat.reshape(-1), 0
        for out in outs:
            out.reshape(-1)[...] = results[start : start + out.size]
            start += out.size

    return run


def _all_reduce_together(plan: Planner, operation: Operation) -> Call:
    xs = operation.outputs
    flat = xs[0] if len(xs) == 1 else flattened(xs)
    assert operation.op is not None
    source, op = scaled(flat, operation.op)
    parts = operation.parts or tuple(x.size for x in xs)
    call = plan(Operation("all_reduce", (source,), (source,), op, parts=parts))
    return call if source is xs[0] else then_split(call, source, xs)


def _all_gather_together(plan: Planner, operation: Operation) -> Call:
    xs, size = operation.inputs, len(operation.outputs) // len(operation.inputs)
    per_rank = [operation.outputs[rank::size] for rank in range(size)]
    flats = tuple(np.empty(sum(out.size for out in outs), xs[0].dtype) for outs in per_rank)
    parts = operation.parts or tuple(x.size for x in xs)
    call = plan(Operation("all_gather", flats, (flattened(xs),), parts=parts))
    for flat, outs in zip(flats, per_rank, strict=True):
        call = then_split(call, flat, outs)
    return call


COMPOSITIONS: dict[str, Callable[[Planner, Operation], Call]] = {
    "all_reduce_coalesced": _all_reduce_together,
    "all_gather_coalesced": _all_gather_together,
}
"""For each kind that a backend need not have natively: the function that plans it from other kinds."""
