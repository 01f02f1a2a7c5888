"""torch's reduce operations as fastcoll's."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..core.reduce_op import ReduceOp
from ..errors import UnavailableError

# By torch's ReduceOp, which is what options hold: its members (RedOpType) do not equal it from their side.
_OPS = {
    dist.ReduceOp(getattr(dist.ReduceOp, op.name)): op
    for op in (
        ReduceOp.SUM,
        ReduceOp.AVG,
        ReduceOp.PRODUCT,
        ReduceOp.MIN,
        ReduceOp.MAX,
        ReduceOp.BAND,
        ReduceOp.BOR,
        ReduceOp.BXOR,
    )
}


def reduction(op: Any) -> ReduceOp:
    """The operation that torch's `op` asks for.

    Raises:
        UnavailableError: fastcoll has no such operation.
    """
    if op == dist.ReduceOp.SUM:  # a third of the time of a look into the table
        return ReduceOp.SUM
    try:
        return _OPS[op]
    except KeyError:
        if op == dist.ReduceOp.PREMUL_SUM:
            factor = op.factor
            return ReduceOp.PREMUL_SUM(factor.item() if hasattr(factor, "item") else factor)
        names = ", ".join(known.name for known in _OPS.values())
        raise UnavailableError(f"op is {op!r}; give one of {names} or PREMUL_SUM") from None
