"""Calls for engines: the arrays of each rank, before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastcoll import ReduceOp
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
        return _PARTS[self.operation](self, engines, rank)


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


def _rubbish(call: Call) -> Array:
    return np.full(call.count, 0xA5, np.uint8).repeat(RUN.itemsize).view(RUN)


def _all_reduce(call: Call, engines: Engines, rank: int) -> Part:
    x = runs(call, rank, rank)
    prepared = engines.prepare(rank, "all_reduce", [x], [x.nbytes], JOIN)
    return Part(prepared, [x], {0: runs(call, 0, engines.size - 1)})


def _sum(call: Call, engines: Engines, rank: int) -> Part:
    """Return an all_reduce that may combine the ranks in any order."""
    x = np.arange(call.count) + call.salt + rank
    total = engines.size * (np.arange(call.count) + call.salt) + sum(range(engines.size))
    prepared = engines.prepare(rank, "all_reduce", [x], [x.nbytes], ReduceOp.SUM)
    return Part(prepared, [x], {0: total})


def _reduce(call: Call, engines: Engines, rank: int) -> Part:
    x, out = runs(call, rank, rank), _rubbish(call)
    prepared = engines.prepare(rank, "reduce", [out, x], [x.nbytes], JOIN, call.root)
    wanted = runs(call, 0, engines.size - 1) if rank == call.root else out.copy()
    return Part(prepared, [out, x], {0: wanted, 1: x.copy()})


def _scan(call: Call, engines: Engines, rank: int) -> Part:
    x, out = runs(call, rank, rank), _rubbish(call)
    prepared = engines.prepare(rank, "scan", [out, x], [x.nbytes], JOIN)
    return Part(prepared, [out, x], {0: runs(call, 0, rank), 1: x.copy()})


def _reduce_scatter(call: Call, engines: Engines, rank: int) -> Part:
    everybody = range(engines.size)
    blocks = [runs(call, rank, rank, salt=block) for block in everybody]
    arrays = [_rubbish(call), *blocks]
    prepared = engines.prepare(rank, "reduce_scatter", arrays, [block.nbytes for block in blocks], JOIN)
    return Part(prepared, arrays, {0: runs(call, 0, engines.size - 1, salt=rank)})


def _broadcast(call: Call, engines: Engines, rank: int) -> Part:
    x = runs(call, rank, rank) if rank == call.root else _rubbish(call)
    prepared = engines.prepare(rank, "broadcast", [x], [x.nbytes], root=call.root)
    return Part(prepared, [x], {0: runs(call, call.root, call.root)})


def _all_gather(call: Call, engines: Engines, rank: int) -> Part:
    arrays = [*(_rubbish(call) for _ in range(engines.size)), runs(call, rank, rank)]
    prepared = engines.prepare(rank, "all_gather", arrays, [x.nbytes for x in arrays[:-1]])
    return Part(prepared, arrays, {other: runs(call, other, other) for other in range(engines.size)})


def _all_to_all(call: Call, engines: Engines, rank: int) -> Part:
    everybody = range(engines.size)
    arrays = [_rubbish(call) for _ in everybody] + [runs(call, rank, other) for other in everybody]
    prepared = engines.prepare(rank, "all_to_all", arrays, [x.nbytes for x in arrays])
    return Part(prepared, arrays, {other: runs(call, other, rank) for other in everybody})


def _meeting(call: Call, engines: Engines, rank: int) -> Part:
    return Part(engines.prepare(rank, call.operation, [], []), [])


_PARTS: dict[str, Callable[[Call, Engines, int], Part]] = {
    "all_reduce": _all_reduce,
    "sum": _sum,
    "reduce": _reduce,
    "scan": _scan,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "barrier": _meeting,
    "refused": _meeting,
}
OPERATIONS = tuple(_PARTS)
