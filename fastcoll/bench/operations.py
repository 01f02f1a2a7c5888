"""How each operation is called on one rank, on what arrays, and how its result is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import fastcoll as dist

from .cases import Case
from .measuring import Tile, count_wrong, fill, moved, reduced_input, reduced_output

DEVICES = ("cpu", "cuda")


class Host:
    """Where arrays lie, here NumPy's; what makes them, fills and checks them (see `measuring`)."""

    def zeros(self, count: int, dtype: np.dtype[Any]) -> Any:
        return np.zeros(count, dtype)

    fill, count_wrong = staticmethod(fill), staticmethod(count_wrong)

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
    """The place that `--device` names; raises UnavailableError without CuPy or a GPU."""
    if device == "cpu":
        return Host()
    from ..gpu.runtime import cupy

    return Cuda(cupy(), local_rank)


@dataclass(frozen=True)
class Trial:
    """One rank's part in a case: `call` is the operation once."""

    place: Host
    call: Callable[[], Any]
    given: Sequence[tuple[Any, Tile]] = ()  # arrays that the call reads, with their patterns
    # Those it writes, what must be there, and where that starts.
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
    return (_movement if case.redop == "none" else _reduction)(case, rank, place)


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
        # Programs write all of an array before they reduce it. Without that, a symmetric array would be measured that
        # no core writes but the one that reduces it.
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

    def trial(call: Callable[[], Any], given: dict[int, Any], expected: dict[int, Any]) -> Trial:
        """Of arrays, by the numbers of the blocks that they hold."""
        inputs = [(x, moved(i, case.dtype)) for i, x in given.items()]
        return Trial(place, call, inputs, [(x, moved(i, case.dtype), 0) for i, x in expected.items()])

    match case.operation:
        case "broadcast":
            x = array()
            return trial(partial(dist.broadcast, x, root), {root: x} if is_root else {}, {root: x})
        case "all_gather":
            x, out = array(), array(n)
            call = partial(dist.all_gather_into_tensor, out, x)
            return trial(call, {rank: x}, dict(enumerate(parts(out))))
        case "gather":
            x, outs = array(), parts(array(n)) if is_root else []
            return trial(partial(dist.gather, x, outs or None, root), {rank: x}, dict(enumerate(outs)))
        case "scatter":
            xs, out = parts(array(n)) if is_root else [], array()
            return trial(partial(dist.scatter, out, xs or None, root), dict(enumerate(xs)), {rank: out})
        case "all_to_all":
            x, out = array(n), array(n)
            sent = {rank * n + peer: part for peer, part in enumerate(parts(x))}
            got = {peer * n + rank: part for peer, part in enumerate(parts(out))}
            return trial(partial(dist.all_to_all_single, out, x), sent, got)
        case "sendrecv":  # to the next rank and from the one before, at the same time
            x, out, after, before = array(), array(), (rank + 1) % n, (rank - 1) % n
            both = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, out, before)]

            def exchange() -> None:
                for work in dist.batch_isend_irecv(both):
                    work.wait()

            return trial(exchange, {rank: x}, {before: out})
        case _:
            return Trial(place, dist.barrier)


# A reduction such as a user defines: of two elements the one further from 0.
_ABSMAX = dist.ReduceOp.custom(lambda a, b: a if abs(a) >= abs(b) else b, "absmax")


def reduce_op(name: str) -> dist.ReduceOp:
    """The ReduceOp of one of `cases.REDOPS`."""
    return _ABSMAX if name == "custom" else getattr(dist.ReduceOp, name.upper())
