"""Which algorithm a call takes.

    what fits with the headers               attached
    two ranks                                one exchange: all of the array up to EXCHANGED, halves beyond
    up to MEET_RANKS                         direct: every rank with every other
    more                                     the cheapest by costs.py on a LAN, of those that keep the order if it
                                             must be kept

All that this looks at is the same on all ranks, but for gather, scatter and all_to_all, where each pair agrees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from . import binomial as trees
from . import circulant, costs, direct, doubling, ring
from .costs import LAN, Cost, Scale, both, direct_scatter, one_way, ring_scatter
from .pairwise import attached, exchange
from .plan import Plan, Rows
from .shape import MEET_RANKS, Limits, Shape

Algorithm = tuple[Callable[[Shape], Plan], Callable[[Scale], Cost], int]
"""What makes a rank's plan, what it costs, and where more than MEET_RANKS ranks consider it."""
NEVER, FREE, ORDERED = 0, 1, 2  # FREE: where operands may be combined in any order; ORDERED: where not
ALWAYS = FREE | ORDERED

EXCHANGED = 256 << 10
"""Bytes up to which two ranks send each other all of an array: one step instead of two for the same bytes, at the
price of reducing all of it instead of half. Over loopback between two cores of an AMD EPYC, float32: 96 KiB 82 µs
against 113, 256 KiB 108 against 127, 1 MiB 341 against 359, which is within the noise."""

NEIGHBOURLY = 0.8
"""What the formulas, which see no congestion, are multiplied by where ranks talk to their neighbours only. In the other
ways for large arrays half of the bytes go half-way round the circle, over links between switches that many ranks share.
A guess: no network with switches was at hand."""

_RINGS = frozenset({"ring", "chain", "scatter and ring"})


@lru_cache(maxsize=256)
def plan_for(shape: Shape) -> Plan:
    """This rank's plan of a call; all ranks choose the same algorithm."""
    name = chosen(shape)
    if name == "nothing":
        return nothing(shape)
    if name == "attached" or (name == "alone" and shape.operation not in _BY_PAIR):
        return attached(shape)  # of which one rank copies its own contribution
    return ALGORITHMS[shape.operation]["direct" if name == "alone" else name][0](shape)


def chosen(shape: Shape) -> str:
    """The name of the algorithm, as in ALGORITHMS, or attached, alone or nothing."""
    if shape.operation == "barrier" or not any(shape.nbytes):
        return "nothing"
    if shape.size == 1:
        return "alone"
    if shape.operation not in _BY_PAIR and max(shape.nbytes) <= shape.limits.payload:
        return "attached"
    if shape.size == 2:
        exchanged = shape.operation == "all_reduce" and shape.total <= EXCHANGED
        return "recursive doubling" if exchanged else "whole" if shape.operation in _WHOLE else "direct"
    many = shape.size > MEET_RANKS and shape.operation not in _BY_PAIR
    return cheapest(shape) if many else "direct"


def cheapest(shape: Shape) -> str:
    """The name of the algorithm that costs least among many ranks."""
    order = ORDERED if shape.ordered else FREE
    found = ALGORITHMS[shape.operation].items()

    def price(name: str) -> float:
        seconds = cost(shape.operation, name, shape.size, shape.total, shape.limits).seconds(LAN)
        return seconds * (NEIGHBOURLY if name in _RINGS else 1)

    return min((name for name, (_, _, considered) in found if considered & order), key=price)


def cost(operation: str, name: str, size: int, nbytes: int, limits: Limits) -> Cost:
    """What an algorithm of ALGORITHMS costs."""
    return ALGORITHMS[operation][name][1](Scale(size, nbytes, limits))


def nothing(shape: Shape) -> Plan:
    """Nothing moves after the meeting."""
    return Rows().plan()


_BY_PAIR = frozenset({"gather", "scatter", "all_to_all"})
_WHOLE = frozenset({"reduce", "scan", "exscan"})
ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "recursive doubling": (
            doubling.all_reduce,
            lambda c: costs.in_pairs(c, 1, (c.n.bit_length() - 1) * c.b),
            ALWAYS,
        ),
        "halving": (doubling.halving, costs.halved, ALWAYS),
        "circulant": (
            circulant.all_reduce,
            lambda c: both(2 * c.log, 4 * c.log, 2 * c.rest, 2 * c.rest),
            FREE,
        ),
        "ring": (ring.all_reduce, lambda c: both(2 * (c.n - 1), 8 * (c.n - 1), 2 * c.rest, 2 * c.rest), FREE),
        "direct": (direct.all_reduce, lambda c: both(2, 4 * (c.n - 1), 2 * c.rest, c.b), ORDERED),
    },
    "reduce": {
        "tree": (trees.reduce, costs.tree_reduce, FREE),
        "ring": (ring.reduce, lambda c: ring_scatter(c).then(one_way(c.turns, c.n - 1, c.rest, 0)), FREE),
        "ordered tree": (trees.reduce, lambda c: costs.tree_reduce(c).then(one_way(1, 1, c.b, 0)), ORDERED),
        "direct": (direct.reduce, lambda c: direct_scatter(c).then(one_way(1, c.n - 1, c.rest, 0)), ORDERED),
        "whole": (direct.whole, lambda c: one_way(1, c.n - 1, (c.n - 1) * c.b, c.n * c.b), NEVER),
    },
    "reduce_scatter": {
        "circulant": (
            circulant.reduce_scatter,
            lambda c: both(c.log, 2 * c.log, c.rest, c.b + 2 * c.rest),
            FREE,
        ),
        "ring": (ring.reduce_scatter, ring_scatter, FREE),
        "direct": (direct.reduce_scatter, direct_scatter, ORDERED),
    },
    "scan": {
        "doubling": (doubling.scan, lambda c: costs.doubling_scan(c, 2 * c.log + 1), ALWAYS),
        "direct": (direct.scan, costs.direct_scan, ALWAYS),
        "whole": (direct.whole, lambda c: one_way(1, c.n - 1, (c.n - 1) * c.b, c.n * c.b), NEVER),
    },
    "exscan": {
        "doubling": (doubling.scan, lambda c: costs.doubling_scan(c, 4 * c.log - 1), ALWAYS),
        "direct": (direct.scan, costs.direct_scan, ALWAYS),
        "whole": (direct.whole, lambda c: one_way(1, c.n - 1, (c.n - 1) * c.b, (c.n - 1) * c.b), NEVER),
    },
    "broadcast": {
        "tree": (trees.broadcast, lambda c: one_way(c.log, c.log, c.log * c.b, 0), ALWAYS),
        "chain": (trees.chain, costs.chain, ALWAYS),
        "scatter and ring": (trees.scatter_ring, lambda c: costs.scattered(c, c.n // 2, c.n - 1), ALWAYS),
        "scatter and circulant": (
            trees.scatter_circulant,
            lambda c: costs.scattered(c, c.log, c.log),
            ALWAYS,
        ),
        "direct": (direct.broadcast, costs.direct_broadcast, NEVER),
    },
    "all_gather": {
        "circulant": (
            circulant.all_gather,
            lambda c: both(c.log, 2 * c.log, c.rest, c.b + c.b / c.n),
            ALWAYS,
        ),
        "ring": (ring.all_gather, lambda c: both(c.n // 2, 2 * (c.n - 1), c.rest, c.b / c.n), ALWAYS),
        "direct": (exchange, costs.exchange, NEVER),
    },
    "gather": {"direct": (exchange, costs.rooted, NEVER)},
    "scatter": {"direct": (exchange, costs.rooted, NEVER)},
    "all_to_all": {"direct": (exchange, costs.exchange, NEVER)},
}
"""All algorithms, by operation and name."""
