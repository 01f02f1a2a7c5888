"""Calls for engines: the arrays of each rank, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastcoll import ReduceOp
from fastcoll.core.operations import KINDS
from fastcoll.net.tcp.context import PreparedPlan
from net.engines import Array, Engines

# A span of adjacent ranks that are joined. 15 bytes, so that transfers of any usual size cut items.
RUN = np.dtype([("first", "i4"), ("last", "i4"), ("joined", "u1"), ("item", "u2"), ("salt", "u4")])
assert RUN.itemsize == 15


def _join(a: Any, b: Any) -> Any:
    """Join the spans of ranks of two operands. Associative; the result shows whether all ranks were joined once, in
    order.
    """
    fits = a.last + 1 == b.first and a.item == b.item and a.salt == b.salt
    a.joined = a.joined if fits and b.joined else 0
    a.last = b.last
    return a


JOIN = ReduceOp.custom(_join, "join")
OPERATIONS = (
    *("all_reduce", "sum", "reduce", "scan", "reduce_scatter"),  # the sum may combine the ranks in any order
    *("broadcast", "all_gather", "all_to_all", "barrier", "refused"),
)


@dataclass(frozen=True)
class Call:
    """A collective of all ranks on `count` items each.

    Attributes:
        salt: makes its data differ from that of other calls.
    """

    operation: str
    count: int
    root: int = 0
    salt: int = 0

    def of(self, engines: Engines, rank: int) -> Part:
        """Return one rank's part of the call."""
        arrays, sized, expected = _arrays(self, engines.size, rank)
        name = "all_reduce" if self.operation == "sum" else self.operation
        op = ReduceOp.SUM if self.operation == "sum" else JOIN if KINDS[name].reduces else None
        root = self.root if KINDS[name].root else 0
        prepared = engines.prepare(rank, name, arrays, [x.nbytes for x in sized], op, root)
        return Part(prepared, arrays, expected)


@dataclass
class Part:
    """One rank's part of a call: the arguments of the engine, and the expected contents of the arrays."""

    prepared: PreparedPlan
    arrays: Sequence[Array]
    expected: dict[int, Array] = field(default_factory=dict)

    def is_right(self) -> bool:
        return all((self.arrays[at] == wanted).all() for at, wanted in self.expected.items())

    def is_untouched(self, before: Sequence[Array]) -> bool:
        return all((x == y).all() for x, y in zip(self.arrays, before, strict=True))


def runs(call: Call, first: int, last: int, salt: int = 0) -> Array:
    """Return the reduction of the ranks from `first` to `last`."""
    found = np.zeros(call.count, RUN)
    found["first"], found["last"], found["joined"] = first, last, 1
    found["item"], found["salt"] = np.arange(call.count) % 65536, call.salt + salt
    return found


def _arrays(call: Call, size: int, rank: int) -> tuple[list[Array], list[Array], dict[int, Array]]:
    """Return a rank's arrays, those whose sizes ranks compare, and the expected contents by index."""
    everybody, mine, total = range(size), runs(call, rank, rank), runs(call, 0, size - 1)
    outs = [np.full(call.count, 0xA5, np.uint8).repeat(RUN.itemsize).view(RUN) for _ in everybody]
    out, is_root = outs[0], rank == call.root
    match call.operation:
        case "all_reduce":
            return [mine], [mine], {0: total}
        case "sum":
            x = np.arange(call.count) + call.salt
            return [x + rank], [x], {0: size * x + sum(everybody)}
        case "reduce":
            return [out, mine], [mine], {0: total if is_root else out.copy(), 1: mine.copy()}
        case "scan":
            return [out, mine], [mine], {0: runs(call, 0, rank), 1: mine.copy()}
        case "reduce_scatter":
            blocks = [runs(call, rank, rank, salt=block) for block in everybody]
            return [out, *blocks], blocks, {0: runs(call, 0, size - 1, salt=rank)}
        case "broadcast":
            x = mine if is_root else out
            return [x], [x], {0: runs(call, call.root, call.root)}
        case "all_gather":
            return [*outs, mine], outs, {other: runs(call, other, other) for other in everybody}
        case "all_to_all":
            arrays = [*outs, *(runs(call, rank, other) for other in everybody)]
            return arrays, arrays, {other: runs(call, other, rank) for other in everybody}
    return [], [], {}
