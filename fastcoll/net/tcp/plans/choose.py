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
from . import circulant, direct, doubling, ring
from . import pairwise as exchange
from .costs import COSTS, LAN
from .plan import Plan, Rows
from .shape import MEET_RANKS, Shape

Builder = Callable[[Shape], Plan]

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
        return exchange.attached(shape)  # of which one rank copies its own contribution
    return BUILDERS[shape.operation]["direct" if name == "alone" else name](shape)


def chosen(shape: Shape) -> str:
    """The name of the algorithm, as in BUILDERS, or attached, alone or nothing."""
    if shape.operation == "barrier" or not any(shape.nbytes):
        return "nothing"
    if shape.size == 1:
        return "alone"
    if shape.operation not in _BY_PAIR and max(shape.nbytes) <= shape.limits.payload:
        return "attached"
    if shape.size == 2:
        exchanged = shape.operation == "all_reduce" and shape.total <= EXCHANGED
        return "recursive doubling" if exchanged else _FOR_TWO.get(shape.operation, "direct")
    many = shape.size > MEET_RANKS and shape.operation in _MANY
    return cheapest(shape) if many else "direct"


def cheapest(shape: Shape) -> str:
    """The name of the algorithm that costs least among many ranks."""
    operation = shape.operation
    names = (_ORDERED if shape.ordered else _MANY)[operation]

    def price(name: str) -> float:
        seconds = COSTS[operation][name](shape.size, shape.total, shape.limits).seconds(LAN)
        return seconds * (NEIGHBOURLY if name in _RINGS else 1)

    return min(names, key=price)


def nothing(shape: Shape) -> Plan:
    """Nothing moves after the meeting."""
    return Rows().plan("nothing")


_BY_PAIR = frozenset({"gather", "scatter", "all_to_all"})
_FOR_TWO = {"reduce": "to the root", "scan": "upwards", "exscan": "upwards"}
_SCANS: dict[str, Builder] = {
    "direct": direct.scan,
    "upwards": direct.scan_upwards,
    "doubling": doubling.scan,
}
BUILDERS: dict[str, dict[str, Builder]] = {
    "all_reduce": {
        "direct": direct.all_reduce,
        "recursive doubling": doubling.all_reduce,
        "halving": doubling.halving,
        "circulant": circulant.all_reduce,
        "ring": ring.all_reduce,
    },
    "reduce": {
        "direct": direct.reduce,
        "to the root": direct.reduce_to_root,
        "tree": trees.reduce,
        "ordered tree": trees.reduce,
        "ring": ring.reduce,
    },
    "reduce_scatter": {
        "direct": direct.reduce_scatter,
        "circulant": circulant.reduce_scatter,
        "ring": ring.reduce_scatter,
    },
    "scan": _SCANS,
    "exscan": _SCANS,
    "broadcast": {
        "direct": direct.broadcast,
        "tree": trees.broadcast,
        "chain": trees.chain,
        "scatter and ring": trees.scatter_ring,
        "scatter and circulant": trees.scatter_circulant,
    },
    "all_gather": {"direct": exchange.all_gather, "circulant": circulant.all_gather, "ring": ring.all_gather},
    "gather": {"direct": exchange.gather},
    "scatter": {"direct": exchange.scatter},
    "all_to_all": {"direct": exchange.all_to_all},
}
"""All algorithms, by operation and name; COSTS has their formulas."""

_MANY: dict[str, tuple[str, ...]] = {
    "all_reduce": ("recursive doubling", "halving", "circulant", "ring"),
    "reduce": ("tree", "ring"),
    "reduce_scatter": ("circulant", "ring"),
    "scan": ("doubling", "direct"),
    "exscan": ("doubling", "direct"),
    "broadcast": ("tree", "chain", "scatter and ring", "scatter and circulant"),
    "all_gather": ("circulant", "ring"),
}
_ORDERED: dict[str, tuple[str, ...]] = _MANY | {
    "all_reduce": ("recursive doubling", "halving", "direct"),
    "reduce": ("ordered tree", "direct"),
    "reduce_scatter": ("direct",),
}
