"""How each operation is called on one rank, on what arrays, and how its result is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import fastcoll as dist

from .cases import Case
from .patterns import Tile, count_wrong, fill, moved, reduced_input, reduced_output

DEVICES = ("cpu", "cuda")
_Numbered = tuple[Sequence[Any], Sequence[int]]


class Host:
    """Where arrays lie, here NumPy's; what makes them, fills and checks them (see `patterns`)."""

    def zeros(self, count: int, dtype: np.dtype[Any]) -> Any:
        return np.zeros(count, dtype)

    def fill(self, x: Any, tile: Tile, start: int = 0) -> None:
        fill(x, tile, start)

    def count_wrong(self, x: Any, tile: Tile, start: int = 0) -> int:
        return count_wrong(x, tile, start)

    def settle(self) -> None:
        """Wait until what was called is done, at the end of each batch that is timed: calls on NumPy's arrays are."""


class Cuda(Host):
    """CuPy's arrays on the GPU of a local rank, modulo how many there are, on CuPy's current stream."""

    def __init__(self, cupy: Any, local_rank: int) -> None:
        self._cupy = cupy
        cupy.cuda.Device(local_rank % cupy.cuda.runtime.getDeviceCount()).use()

    def zeros(self, count: int, dtype: np.dtype[Any]) -> Any:
        return self._cupy.zeros(count, dtype)

    def fill(self, x: Any, tile: Tile, start: int = 0) -> None:
        host = np.empty(x.shape, x.dtype)
        fill(host, tile, start)
        x.set(host)

    def count_wrong(self, x: Any, tile: Tile, start: int = 0) -> int:
        return count_wrong(x.get(), tile, start)

    def settle(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()


def place_of(device: str, local_rank: int) -> Host:
    """The place that `--device` names.

    Raises:
        UnavailableError: there is no CuPy, or no GPU.
    """
    if device == "cpu":
        return Host()
    from ..gpu.runtime import cupy

    return Cuda(cupy(), local_rank)


@dataclass(frozen=True)
class Trial:
    """One rank's part in a case.

    Attributes:
        call: the operation once.
        given: arrays that the call reads, with their patterns.
        expected: arrays that the call writes, with the patterns that must be there and where these start.
    """

    place: Host
    call: Callable[[], Any]
    given: Sequence[tuple[Any, Tile]] = ()
    expected: Sequence[tuple[Any, Tile, int]] = ()

    def reset(self) -> None:
        """Make the outputs wrong and the inputs right."""
        for x, *_ in self.expected:
            x.fill(0)
        for x, tile in self.given:
            self.place.fill(x, tile)

    def wrong(self) -> int:
        """After `reset` and `call`, the number of wrong elements."""
        return sum(self.place.count_wrong(*each) for each in self.expected)


def prepare(case: Case, rank: int, place: Host) -> Trial:
    """The trial of a rank, its arrays allocated."""
    if case.redop != "none":
        return _reduction(case, rank, place)
    return _movement(case, rank, place)


def _reduction(case: Case, rank: int, place: Host) -> Trial:
    op, count, dtype = reduce_op(case.redop), case.count, case.dtype
    given = reduced_input(case.redop, rank, case.ranks, dtype)
    total = reduced_output(case.redop, case.ranks, dtype)
    if case.operation == "reduce_scatter":
        x, out = place.zeros(case.ranks * count, dtype), place.zeros(count, dtype)
        call = partial(dist.reduce_scatter_tensor, out, x, op)
        return Trial(place, call, [(x, given)], [(out, total, rank * count)])
    symmetric = case.operation == "update_symmetric_all_reduce"
    x = dist.symmetric.empty(count, dtype) if symmetric else place.zeros(count, dtype)
    if case.operation == "reduce":
        after = total if rank == case.root else given
        return Trial(place, partial(dist.reduce, x, case.root, op), [(x, given)], [(x, after, 0)])

    def update() -> None:
        """Each rank writes all of its array before each all_reduce, as programs do.

        Without that, a symmetric array would be measured that no core writes but the one that reduces it.
        """
        np.multiply(x, dtype.type(1), out=x)
        dist.all_reduce(x, op)

    alone = case.operation == "all_reduce"
    return Trial(place, partial(dist.all_reduce, x, op) if alone else update, [(x, given)], [(x, total, 0)])


def _movement(case: Case, rank: int, place: Host) -> Trial:
    """Block number i of a rank or root holds `moved(i)`; of all_to_all i is that of sender and receiver."""
    n, root, is_root = case.ranks, case.root, rank == case.root

    def array(blocks: int = 1) -> Any:
        return place.zeros(blocks * case.count, case.dtype)

    def parts(x: Any) -> list[Any]:
        return list(x.reshape(n, case.count))

    def trial(call: Callable[[], Any], given: _Numbered, expected: _Numbered) -> Trial:
        """Arrays with the numbers of their patterns."""
        holds = [
            [(x, moved(i, case.dtype)) for x, i in zip(*each, strict=True)] for each in (given, expected)
        ]
        return Trial(place, call, holds[0], [(x, tile, 0) for x, tile in holds[1]])

    match case.operation:
        case "broadcast":
            x = array()
            return trial(
                partial(dist.broadcast, x, root), ([x], [root]) if is_root else ([], []), ([x], [root])
            )
        case "all_gather":
            x, out = array(), array(n)
            call = partial(dist.all_gather_into_tensor, out, x)
            return trial(call, ([x], [rank]), (parts(out), range(n)))
        case "gather":
            x, outs = array(), parts(array(n)) if is_root else []
            return trial(partial(dist.gather, x, outs or None, root), ([x], [rank]), (outs, range(len(outs))))
        case "scatter":
            xs, out = parts(array(n)) if is_root else [], array()
            return trial(partial(dist.scatter, out, xs or None, root), (xs, range(len(xs))), ([out], [rank]))
        case "all_to_all":
            x, out = array(n), array(n)
            sent, got = range(rank * n, rank * n + n), range(rank, n * n, n)
            return trial(partial(dist.all_to_all_single, out, x), (parts(x), sent), (parts(out), got))
        case "sendrecv":  # to the next rank and from the one before, at the same time
            x, out, after, before = array(), array(), (rank + 1) % n, (rank - 1) % n
            both = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, out, before)]
            return trial(partial(_exchange, both), ([x], [rank]), ([out], [before]))
        case _:
            return Trial(place, dist.barrier)


def _exchange(both: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(both):
        work.wait()


def reduce_op(name: str) -> dist.ReduceOp:
    """The ReduceOp of one of `cases.REDOPS`."""
    return _ABSMAX if name == "custom" else getattr(dist.ReduceOp, name.upper())


def _absmax(a: Any, b: Any) -> Any:
    """A reduction such as a user defines: of two elements the one further from 0."""
    return a if abs(a) >= abs(b) else b


_ABSMAX = dist.ReduceOp.custom(_absmax, "absmax")
