"""Collective calls on symbols: the shapes and arrays of all ranks, and the expected contents of the arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastcoll.core.operations import KINDS, NATIVE, WITH_ARRAYS
from fastcoll.net.tcp.plans import plan as t
from fastcoll.net.tcp.plans.plan import Plan
from fastcoll.net.tcp.plans.shape import CallShape, Limits, relay
from net.simulate import check_tables, joined, reads, require, rubbish, simulate

Builder = Callable[[CallShape], Plan]
OPERATIONS = tuple(name for name in KINDS if name in NATIVE & WITH_ARRAYS)
REDUCTIONS = tuple(name for name in OPERATIONS if KINDS[name].reduces)
ROOTED = tuple(name for name in OPERATIONS if KINDS[name].root)
WITH_BLOCKS = tuple(name for name in OPERATIONS if KINDS[name].has_blocks)
LIMITS = Limits(payload=16, segment=24, at_once=1 << 20, peers=3)
ONE_PASS, IN_ORDER, ANY_ORDER = range(3)  # the order that an algorithm promises for a reduction

_LETTERS = 0x4E00  # the first of 20,000 characters for ranks, blocks and items
_SYMBOL = 3
_FLAT = str.maketrans("", "", "()")


@dataclass(frozen=True)
class Case:
    """A collective call.

    Attributes:
        sizes: items by rank; all_to_all: by giver, then taker; one number if all are equal.
        in_place: outputs and inputs are the same arrays where they may be.
        flags: further fields of CallShape.
    """

    operation: str
    size: int
    sizes: int | Sequence[int] | Sequence[Sequence[int]]
    itemsize: int = 4
    root: int = 0
    in_place: bool = False
    limits: Limits = LIMITS
    flags: dict[str, Any] = field(default_factory=dict)

    def given(self, giver: int, taker: int) -> int:
        """Return the items of one rank for another."""
        found = self.sizes if isinstance(self.sizes, int) else self.sizes[self._index(giver, taker)]
        return found if isinstance(found, int) else found[taker]

    def _index(self, giver: int, taker: int) -> int:
        return taker if self.operation in ("scatter", "reduce_scatter") else giver

    def shape(self, rank: int) -> CallShape:
        return CallShape(
            operation=self.operation,
            size=self.size,
            rank=rank,
            nbytes=tuple(count * self.itemsize for count in self._counts(rank)),
            limits=self.limits,
            itemsize=self.itemsize,
            root=self.root,
            **self.flags,
        )

    def _counts(self, rank: int) -> list[int]:
        given, everybody, root = self.given, range(self.size), self.root
        match self.operation:
            case "reduce_scatter":
                return [given(rank, other) for other in everybody]
            case "all_gather":
                return [given(other, rank) for other in everybody]
            case "gather":
                return [given(other, root) for other in everybody] if rank == root else [given(rank, root)]
            case "scatter":
                return [given(root, other) for other in everybody] if rank == root else [given(root, rank)]
            case "all_to_all":
                outs = [given(other, rank) for other in everybody]
                return outs + [given(rank, other) for other in everybody]
            case "barrier":
                return []
        return [given(0, 0)]


class Call:
    """A case's arrays, by rank, as the plans number them, and their expected contents."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.arrays: list[list[np.ndarray]] = []
        self.same: list[tuple[int, int]] = []
        self.expected: list[list[np.ndarray | None]] = []  # None: unchanged
        for rank in range(case.size):
            self._add(*self._parts(rank))

    def _parts(self, rank: int) -> tuple[Any, ...]:
        """Return the arguments of `_add`."""
        operation, everybody, root = self.case.operation, range(self.case.size), self.case.root
        own, total, kept = self._own, self._reduced, [None] * self.case.size
        match operation:
            case "barrier":
                return [], []
            case "all_reduce":
                return [own(rank, 0)], [total(0, everybody)]
            case "reduce" | "scan" | "exscan":
                of = {"reduce": everybody if rank == root else (), "scan": range(rank + 1)}
                ranks = of.get(operation, range(rank))
                return [like(own(rank, 0)), own(rank, 0)], [total(0, ranks) if ranks else None, None], (0, 1)
            case "reduce_scatter":
                out, blocks = total(rank, everybody), [own(rank, block) for block in everybody]
                return [like(out), *blocks], [out, *kept], (0, 1 + rank)
            case "broadcast":
                x = own(root, 0)
                return [x if rank == root else like(x)], [x]
            case "gather" if rank != root:
                return [own(rank, root)], [None]
            case "all_gather" | "gather":
                parts = [own(other, 0 if operation == "all_gather" else rank) for other in everybody]
                return [*map(like, parts), parts[rank]], [*parts, None], (rank, self.case.size)
            case "scatter":
                x, blocks = own(root, rank), [own(root, other) for other in everybody]
                return ([like(x), *blocks], [x, *kept], (0, 1 + rank)) if rank == root else ([like(x)], [x])
        parts, blocks = [own(other, rank) for other in everybody], [own(rank, other) for other in everybody]
        return [*map(like, parts), *blocks], [*parts, *kept]

    def _add(
        self, arrays: list[np.ndarray], expected: list[Any], same: tuple[int, int] | None = None
    ) -> None:
        """Add a rank's arrays; `same` are the two that are one array when the call is in place."""
        arrays = [array.copy() for array in arrays]
        pairs = zip(arrays, expected, strict=True)
        wanted = [before.copy() if after is None else after for before, after in pairs]
        self.same.append((0, 0))
        if same and self.case.in_place:
            out, x = same
            arrays[out] = arrays[x]
            wanted[x] = wanted[out] = wanted[x] if expected[out] is None else wanted[out]
            self.same[-1] = (t.FIRST_ARRAY + out, t.FIRST_ARRAY + x)
        self.arrays.append(arrays)
        self.expected.append(wanted)

    def _reduced(self, block: int, ranks: Iterable[int]) -> np.ndarray:
        """Make the items of some ranks for another, in the order of the ranks."""
        terms = [self._own(rank, block) for rank in ranks]
        result = np.empty(len(terms[0]), object)
        result[:] = ["".join(items) for items in zip(*terms, strict=True)]
        return result

    def _own(self, giver: int, taker: int) -> np.ndarray:
        return symbols(giver, taker, self.case.given(giver, taker))


def like(array: np.ndarray) -> np.ndarray:
    return rubbish(len(array))


def symbols(giver: int, taker: int, count: int) -> np.ndarray:
    """Make items that show the rank that gives them, the rank that takes them, and their number."""
    found = np.empty(count, object)
    pair = chr(_LETTERS + giver) + chr(_LETTERS + taker)
    found[:] = [pair + chr(_LETTERS + item) for item in range(count)]
    return found


def check(
    case: Case, builder: Builder, promise: int = ONE_PASS, *, capacity: int = 1 << 60, seed: int = 0
) -> list[Plan]:
    """Build, check and run the plans of all ranks; return them."""
    shapes = [case.shape(rank) for rank in range(case.size)]
    plans = [builder(shape) for shape in shapes]
    call = Call(case)
    buffers = [lengths(case, plan, arrays) for plan, arrays in zip(plans, call.arrays, strict=True)]
    check_tables(plans, buffers, call.same, case.limits.payload)
    check_attached(case, plans)
    stride = case.limits.stride
    nodes = case.flags.get("nodes", ())
    simulate(
        plans,
        call.arrays,
        itemsize=case.itemsize,
        frame_stride=stride,
        capacity=capacity,
        seed=seed,
        nodes=nodes,
        relay_bytes=2 * case.limits.relayed,
    )
    for rank in range(case.size):
        for number, (got, wanted) in enumerate(zip(call.arrays[rank], call.expected[rank], strict=True)):
            compare(got, wanted, promise, f"{case}: rank {rank}, array {number}")
    if case.operation == "all_reduce":
        alike = all((arrays[0] == call.arrays[0][0]).all() for arrays in call.arrays)
        require(alike, f"{case}: other bits elsewhere")
    return plans


def lengths(case: Case, plan: Plan, arrays: Sequence[np.ndarray]) -> dict[int, int]:
    """Return the bytes of a rank's buffers."""
    found = {t.SCRATCH: plan.scratch, t.FRAMES: case.size * case.limits.stride}
    if nodes := case.flags.get(
        "nodes"
    ):  # all buffers of relay memory, though some nodes may have fewer ranks
        found |= {relay(case.size, place): 2 * case.limits.relayed for place in range(max(map(len, nodes)))}
    return found | {t.FIRST_ARRAY + k: len(array) * case.itemsize for k, array in enumerate(arrays)}


def check_attached(case: Case, plans: Sequence[Plan]) -> None:
    """Check that a rank's plan uses exactly the bytes that the others attach for it."""
    sent = [[0] * case.size for _ in plans]
    for giver, plan in enumerate(plans):
        for row in plan.table.tolist():
            if row[t.KIND] == t.PAYLOAD:
                sent[row[t.PEER]][giver] += row[t.NBYTES]
    for rank, plan in enumerate(plans):
        require(sent[rank] == attached_to(plan, case), f"{case}: attached to {rank}")


def compare(got: np.ndarray, wanted: np.ndarray, promise: int, where: str) -> None:
    def sorted_symbols(item: str) -> list[str]:
        return sorted(item[at : at + _SYMBOL] for at in range(0, len(item), _SYMBOL))

    for at, (item, expected) in enumerate(zip(got, wanted, strict=True)):
        if promise == ONE_PASS:
            right = item == (joined(expected) if len(expected) > _SYMBOL else expected)
        elif promise == IN_ORDER:
            right = item.translate(_FLAT) == expected
        else:
            right = sorted_symbols(item.translate(_FLAT)) == sorted_symbols(expected)
        require(right, f"{where}, item {at}: {item!r} instead of {expected!r}")


def attached_to(plan: Plan, case: Case) -> list[int]:
    """Return the bytes of each rank's payload that a plan uses."""
    found = [0] * case.size
    for row in plan.table.tolist():
        if row[t.KIND] in (t.COPY, t.SOURCE):
            buffer, low, high = reads(row)[0]
            if buffer == t.FRAMES:
                found[low // case.limits.stride] = high - low
    return found
