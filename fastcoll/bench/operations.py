"""How each operation is called on one rank, on what arrays, and how its result is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import fastcoll as dist

from .cases import Case
from .patterns import Tile, moved, reduced_input, reduced_output
from .places import Place


@dataclass(frozen=True)
class Trial:
    """One rank's part in a case.

    Attributes:
        call: the operation once.
        reset: makes the inputs right and the outputs wrong.
        wrong: after `reset` and `call`, the number of wrong elements.
    """

    call: Callable[[], Any]
    reset: Callable[[], None]
    wrong: Callable[[], int]


def prepare(case: Case, rank: int, place: Place) -> Trial:
    """The trial of a rank, its arrays allocated."""
    return _PREPARE[case.operation](case, rank, place)


def reduce_op(name: str) -> dist.ReduceOp:
    """The ReduceOp of one of `cases.REDOPS`."""
    return _REDUCE_OPS[name]


def _all_reduce(case: Case, rank: int, place: Place) -> Trial:
    x = place.zeros(case.count, case.dtype)
    call = partial(dist.all_reduce, x, reduce_op(case.redop))
    return Trial(
        call, partial(place.fill, x, _input(case, rank)), partial(place.count_wrong, x, _output(case))
    )


def _update_all_reduce(case: Case, rank: int, place: Place) -> Trial:
    return _update(case, rank, place, place.zeros(case.count, case.dtype))


def _update_symmetric_all_reduce(case: Case, rank: int, place: Place) -> Trial:
    return _update(case, rank, place, dist.symmetric.empty(case.count, case.dtype))


def _update(case: Case, rank: int, place: Place, x: Any) -> Trial:
    """Each rank writes all of its array before each all_reduce, as programs do.

    Without that, a symmetric array would be measured that no core writes but the one that reduces it.
    """
    one = case.dtype.type(1)

    def call() -> None:
        np.multiply(x, one, out=x)
        dist.all_reduce(x, reduce_op(case.redop))

    return Trial(
        call, partial(place.fill, x, _input(case, rank)), partial(place.count_wrong, x, _output(case))
    )


def _reduce(case: Case, rank: int, place: Place) -> Trial:
    x = place.zeros(case.count, case.dtype)
    given = _input(case, rank)
    call = partial(dist.reduce, x, case.root, reduce_op(case.redop))
    return Trial(
        call,
        partial(place.fill, x, given),
        partial(place.count_wrong, x, _output(case) if rank == case.root else given),
    )


def _reduce_scatter(case: Case, rank: int, place: Place) -> Trial:
    x, out = _whole(case, place), place.zeros(case.count, case.dtype)
    call = partial(dist.reduce_scatter_tensor, out, x, reduce_op(case.redop))
    place.fill(x, _input(case, rank))
    return Trial(
        call, partial(out.fill, 0), partial(place.count_wrong, out, _output(case), rank * case.count)
    )


def _broadcast(case: Case, rank: int, place: Place) -> Trial:
    x = place.zeros(case.count, case.dtype)
    reset = partial(place.fill, x, moved(case.root, case.dtype)) if rank == case.root else partial(x.fill, 0)
    call = partial(dist.broadcast, x, case.root)
    return Trial(call, reset, partial(place.count_wrong, x, moved(case.root, case.dtype)))


def _all_gather(case: Case, rank: int, place: Place) -> Trial:
    x, out = _own(case, rank, place), _whole(case, place)
    call = partial(dist.all_gather_into_tensor, out, x)
    return Trial(
        call, partial(out.fill, 0), partial(_wrong_blocks, case, place, _blocks(case, out), range(case.ranks))
    )


def _gather(case: Case, rank: int, place: Place) -> Trial:
    x = _own(case, rank, place)
    blocks = _blocks(case, _whole(case, place)) if rank == case.root else None
    call = partial(dist.gather, x, blocks, case.root)
    return Trial(
        call, partial(_clear, blocks), partial(_wrong_blocks, case, place, blocks, range(case.ranks))
    )


def _scatter(case: Case, rank: int, place: Place) -> Trial:
    out = place.zeros(case.count, case.dtype)
    blocks = _blocks(case, _whole(case, place)) if rank == case.root else None
    for number, block in enumerate(blocks or ()):
        place.fill(block, moved(number, case.dtype))
    call = partial(dist.scatter, out, blocks, case.root)
    return Trial(call, partial(out.fill, 0), partial(place.count_wrong, out, moved(rank, case.dtype)))


def _all_to_all(case: Case, rank: int, place: Place) -> Trial:
    x, out, ranks = _whole(case, place), _whole(case, place), case.ranks
    for to, block in enumerate(_blocks(case, x)):
        place.fill(block, moved(rank * ranks + to, case.dtype))
    sources = range(rank, ranks * ranks, ranks)
    call = partial(dist.all_to_all_single, out, x)
    return Trial(call, partial(out.fill, 0), partial(_wrong_blocks, case, place, _blocks(case, out), sources))


def _sendrecv(case: Case, rank: int, place: Place) -> Trial:
    """To the next rank and from the one before, at the same time."""
    x, out = _own(case, rank, place), place.zeros(case.count, case.dtype)
    after, before = (rank + 1) % case.ranks, (rank - 1) % case.ranks
    exchange = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, out, before)]

    def call() -> None:
        for work in dist.batch_isend_irecv(exchange):
            work.wait()

    return Trial(call, partial(out.fill, 0), partial(place.count_wrong, out, moved(before, case.dtype)))


def _barrier(case: Case, rank: int, place: Place) -> Trial:
    return Trial(dist.barrier, lambda: None, lambda: 0)


def _whole(case: Case, place: Place) -> Any:
    """A block for each rank, in one array."""
    return place.zeros(case.ranks * case.count, case.dtype)


def _own(case: Case, rank: int, place: Place) -> Any:
    """The one block that a rank gives."""
    x = place.zeros(case.count, case.dtype)
    place.fill(x, moved(rank, case.dtype))
    return x


def _blocks(case: Case, whole: Any) -> list[Any]:
    return list(whole.reshape(case.ranks, case.count))


def _clear(blocks: list[Any] | None) -> None:
    for block in blocks or ():
        block.fill(0)


def _wrong_blocks(case: Case, place: Place, blocks: list[Any] | None, sources: range) -> int:
    return sum(
        place.count_wrong(block, moved(source, case.dtype))
        for source, block in zip(sources, blocks or (), strict=False)
    )


def _input(case: Case, rank: int) -> Tile:
    return reduced_input(case.redop, rank, case.ranks, case.dtype)


def _output(case: Case) -> Tile:
    return reduced_output(case.redop, case.ranks, case.dtype)


_PREPARE: dict[str, Callable[[Case, int, Place], Trial]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "sendrecv": _sendrecv,
    "barrier": _barrier,
    "update_all_reduce": _update_all_reduce,
    "update_symmetric_all_reduce": _update_symmetric_all_reduce,
}


def _absmax(a: Any, b: Any) -> Any:
    """A reduction such as a user defines: of two elements the one further from 0."""
    return a if abs(a) >= abs(b) else b


_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
    "custom": dist.ReduceOp.custom(_absmax, "absmax"),
}
