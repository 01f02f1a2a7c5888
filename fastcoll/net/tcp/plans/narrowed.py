"""Plans of an all_reduce whose float32 array travels as narrow items (core/travel.py).

SCRATCH holds the items of one segment of each block, and of no more, so that items stay in the L2 cache. Segment k of
the array passes through three phases:

    k      it is converted to items, which are sent to the ranks that reduce them
    k + 1  each rank converts its own segment, reduces all ranks' items in one pass, and sends the result
    k + 2  the results of the other ranks are converted to float32

So each rank's elements are rounded once, and the result is rounded once. No data is attached to headers, because a
header is written before ranks have compared calls, and NARROW changes the array `lost`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ....core.partition import Segments, Span, even
from ....core.travel import Travel
from .plan import SCRATCH, Location, Plan, Rows
from .shape import CallShape, array

SEGMENT = 64 << 10
"""Maximum bytes of the items of a segment: the best of 16 to 256 KiB over loopback (bench/travel.py, two cores of an
AMD EPYC with 1 MiB of L2 each)."""

_ALIGNED = 64


@cache
def plans_of(travel: Travel, keeps: bool) -> Callable[[CallShape], Plan]:
    """Return the function that makes the plans of a narrow type; `keeps` is whether calls have an array `lost`.

    The function takes the shape of the call on float32, with the size of an item as `itemsize`.
    """

    def plan(shape: CallShape) -> Plan:
        rows, rank, size = Rows(), shape.rank, shape.size
        blocks = even(travel.nbytes(shape.total // 4), size, shape.itemsize)
        most = min(SEGMENT, shape.limits.at_once // (2 * size))
        segments = Segments.of_blocks(blocks, most, shape.itemsize)
        stride = -(-segments.nbytes // _ALIGNED) * _ALIGNED

        def slots(number: int) -> list[Location]:
            """Return where the items of each rank are in the ring `number`."""
            return [(SCRATCH, (number * size + each) * stride) for each in range(size)]

        def floats(items: Span) -> Span:
            """Return the span of the array that some items represent."""
            offset, nbytes = (4 * travel.elements * (n // shape.itemsize) for n in items)
            return Span(offset, max(min(nbytes, shape.total - offset), 0))

        for k in range(segments.number):
            spans = [segments.of(block, k) for block in blocks]
            sent, operands, results = slots(0), slots(1 + k % 2), slots(3 + k % 2)
            own, result = spans[rank], operands[rank]
            for peer in shape.others:
                rows.narrow(k, sent[peer], (array(0), floats(spans[peer])), keeps)
                rows.send(k, peer, sent[peer], spans[peer].nbytes)
                rows.recv(k, peer, operands[peer], own.nbytes)
            rows.narrow(k + 1, result, (array(0), floats(own)), keeps)
            rows.fold(k + 1, result, own.nbytes, operands)
            rows.widen(k + 1, (array(0), floats(own)), result)
            for peer in shape.others:
                rows.send(k + 1, peer, result, own.nbytes)
                rows.recv(k + 1, peer, results[peer], spans[peer].nbytes)
                rows.widen(k + 2, (array(0), floats(spans[peer])), results[peer])
        return rows.plan(5 * size * stride)

    return plan
