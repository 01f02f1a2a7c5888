"""All algorithms, their costs, and the choice of the algorithm for a call.

    data that fits behind the headers        attached: each rank sends its data together with the header of its call
    or behind combined headers               carried: whoever combines headers reduces the data (node_meeting.py)
    small data of a group by nodes           relayed: by one rank of each node (relayed.py)
    gather, scatter, all_to_all              direct: each rank exchanges data with every other; in a group by nodes,
                                             the backend relays small data if all blocks have one size
    two ranks, all_reduce                    recursive doubling up to EXCHANGED bytes, direct beyond
    two ranks, reduce, scan, exscan          complete arrays: ranks do not divide their arrays into slices
    up to MEET_RANKS ranks                   direct
    more ranks                               the cheapest on a LAN; if operands must be combined in rank order, the
                                             cheapest of the algorithms that do so

All ranks must choose the same algorithm, so the choice uses only values that all ranks share. For gather, scatter and
all_to_all, it uses values that both ranks of a pair share.

A cost counts the work of a plan whose data is not divided into segments. It adds up the work of all phases; in each
phase it counts the work of the rank that has most to do:

    steps      phases in which something is sent
    messages   sent and received
    wire       bytes sent or bytes received, whichever are more
    handled    bytes sent plus bytes received
    touched    bytes that are read to be reduced or copied

In the formulas, c is a `Scale`. c.n is the number of ranks, c.log is ceil(log2 n), and c.b is the number of bytes of
the array, or of all ranks' blocks together.

Plans divide data into segments, so that some segments travel while others are reduced. This adds messages, which the
formulas leave out, but no steps. Only the formulas of `chain` and `direct_broadcast` count segments, because in these
algorithms ranks forward one segment after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from ....core.operations import KINDS, ONE_TO_ONE
from . import binomial as trees
from . import circulant, direct, doubling, ring
from .direct import attached, exchange
from .node_meeting import carried, is_carried
from .plan import Plan, Rows
from .relayed import is_relayed, relayed
from .shape import MEET_RANKS, CallShape, Limits


class Cost(NamedTuple):
    """The cost of an algorithm; the module's docstring explains the fields."""

    steps: float
    messages: float
    wire: float
    handled: float
    touched: float

    @property
    def seconds(self) -> float:
        """The time of this cost on a network whose prices are those of `LAN`."""
        return sum(count * price for count, price in zip(self, LAN, strict=True))

    def then(self, other: Cost) -> Cost:
        """Return the cost of this and `other`, one after the other."""
        return Cost(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


LAN = Cost(steps=25e-6, messages=2e-6, wire=0.8e-9, handled=0.1e-9, touched=0.1e-9)
"""Seconds of one step, message or byte on 10 Gbit/s Ethernet. A step over TCP usually takes 15 to 30 µs. A system call
with its share of the kernel's TCP takes about 2 µs, and copying a byte into or out of the kernel takes 0.1 ns (measured
over loopback). A core reads or writes memory at 10 GB/s. Only calls of more than MEET_RANKS ranks use these prices."""


class Scale(NamedTuple):
    """The size of a call: n ranks (at least 2), b bytes, and the limits of its plans."""

    n: int
    b: int
    limits: Limits

    @property
    def log(self) -> int:
        return (self.n - 1).bit_length()

    @property
    def rest(self) -> float:
        """The bytes of all blocks except one."""
        return self.b * (self.n - 1) / self.n

    @property
    def rounds(self) -> int:
        """The steps that a rank needs to exchange data with all others."""
        return -(-(self.n - 1) // self.limits.peers)


def both(steps: float, messages: float, wire: float, touched: float) -> Cost:
    """Return the cost of ranks that send as much as they receive."""
    return Cost(steps, messages, wire, 2 * wire, touched)


def one_way(steps: float, messages: float, wire: float, touched: float) -> Cost:
    """Return the cost of ranks that either send or receive in a step."""
    return Cost(steps, messages, wire, wire, touched)


def in_pairs(c: Scale, rounds: int, wire: float) -> Cost:
    """Return the cost of `rounds` rounds, each of log2 n steps between partners.

    The number of ranks that take part is the largest power of two that is at most n. If ranks remain, there are two
    more steps: before the rounds, each remaining rank sends its array to a rank that takes part; after the rounds, the
    remaining rank receives the result from that rank.
    """
    steps = rounds * (c.n.bit_length() - 1)
    extra = 0 if c.n & (c.n - 1) == 0 else 2
    return both(steps, 2 * steps, wire, 2 * wire / rounds).then(
        one_way(extra, extra, extra * c.b, extra * c.b)
    )


def halved(c: Scale) -> Cost:
    power = 1 << c.n.bit_length() - 1
    return in_pairs(c, 2, 2 * c._replace(n=power).rest)


def direct_scatter(c: Scale) -> Cost:
    return both(1, 2 * (c.n - 1), c.rest, c.b)


def ring_scatter(c: Scale) -> Cost:
    return both(c.n - 1, 2 * (c.n - 1), c.rest, 2 * c.rest)


def tree_reduce(c: Scale) -> Cost:
    return one_way(c.log, c.log, c.log * c.b, 2 * c.log * c.b)


def direct_scan(c: Scale) -> Cost:
    return both(2, 4 * (c.n - 1), 2 * c.rest, 2 * c.b)


def doubling_scan(c: Scale, passes: int) -> Cost:
    """Return the cost of a scan in log2 n steps.

    In the last step, a rank either sends or receives. Reducing and copying read the array `passes` times.
    """
    return Cost(c.log, 2 * c.log, c.log * c.b, (2 * c.log - 1) * c.b, passes * c.b)


def all_pairs(c: Scale) -> Cost:
    return both(c.rounds, 2 * (c.n - 1), c.rest, c.b / c.n)


def rooted(c: Scale) -> Cost:
    return one_way(c.rounds, c.n - 1, c.rest, c.b / c.n)


def direct_broadcast(c: Scale) -> Cost:
    if c.n == 2:
        return one_way(1, 1, c.b, 0)
    rest = c._replace(n=c.n - 1).rest
    forwarded = min(rest, (c.n - 2) * c.limits.segment)
    return Cost(2, 3 * c.n - 5, c.b + forwarded, c.b + rest + forwarded, 0)


def chain(c: Scale) -> Cost:
    segment, count = min(c.b, c.limits.segment), -(-c.b // c.limits.segment)
    return Cost(c.n - 1, 2 * count + c.n - 3, c.b + (c.n - 2) * segment, 2 * c.b + (c.n - 3) * segment, 0)


def scattered(c: Scale, steps: int, messages: int) -> Cost:
    """Return the cost of scattering blocks down a tree, then gathering them."""
    return one_way(c.log, c.log, c.rest, 0).then(both(steps, 2 * messages, c.rest, 0))


Algorithm = tuple[Callable[[CallShape], Plan], Callable[[Scale], Cost], int]
"""The function that makes a rank's plan; the function that returns the algorithm's cost; and NEVER, FREE, ORDERED or
ALWAYS: in which calls of more than MEET_RANKS ranks the algorithm is considered."""
# FREE: in calls that may combine operands in any order; ORDERED: in calls that must combine them in rank order.
NEVER, FREE, ORDERED = 0, 1, 2
ALWAYS = FREE | ORDERED

EXCHANGED = 256 << 10
"""In an all_reduce of at most this many bytes, two ranks exchange the complete array. That takes one step instead of
two and sends the same number of bytes, but each rank reduces the complete array instead of half of it. Times of float32
in one step and in two steps (loopback, two cores of an AMD EPYC): 82 and 113 µs for 96 KiB, 108 and 127 µs for 256 KiB,
341 and 359 µs for 1 MiB. The last difference is within the noise."""

NEIGHBOURLY = 0.8
"""Factor on the cost of algorithms in which ranks exchange data only with their neighbours, because the formulas ignore
congestion. In the other algorithms for large arrays, half of the bytes go to the opposite side of the circle of ranks,
over links between switches that many ranks share. The factor is a guess, because no network with switches was
available."""

_RINGS = frozenset({"ring", "chain", "scatter and ring"})


@lru_cache(maxsize=256)
def plan_for(shape: CallShape) -> Plan:
    """Return this rank's plan of a call; all ranks choose the same algorithm."""
    name = chosen(shape)
    if name == "nothing":
        return nothing(shape)
    if name == "attached" or (name == "alone" and not KINDS[shape.operation].is_by_pair):
        return attached(shape)  # this plan copies the contribution of a rank that is alone
    if name == "carried":
        return carried(shape)
    if name == "relayed":
        return relayed(shape, plan_for)
    return ALGORITHMS[shape.operation]["direct" if name == "alone" else name][0](shape)


def chosen(shape: CallShape) -> str:
    """Return the name of the algorithm for a call.

    It is a name in ALGORITHMS, "attached" or "carried" (the data travels with the headers), "relayed", "alone" (the
    group has one rank) or "nothing" (no data moves).
    """
    if shape.operation == "barrier" or not any(shape.nbytes):
        return "nothing"
    if shape.operation == "refused":
        return "attached"
    if shape.size == 1:
        return "alone"
    kind = KINDS[shape.operation]
    if is_carried(shape):
        return "carried"
    if not kind.is_by_pair and is_relayed(shape):
        return "relayed"
    if not kind.is_by_pair and max(shape.nbytes) <= shape.limits.payload:
        return "attached"
    if shape.size == 2:
        exchanged = shape.operation == "all_reduce" and shape.total <= EXCHANGED
        return (
            "recursive doubling" if exchanged else "complete arrays" if kind.form == ONE_TO_ONE else "direct"
        )
    many = shape.size > MEET_RANKS and not kind.is_by_pair
    return cheapest(shape) if many else "direct"


def cheapest(shape: CallShape) -> str:
    """Return the name of the cheapest algorithm for more than MEET_RANKS ranks."""
    order = ORDERED if shape.ordered else FREE
    found = ALGORITHMS[shape.operation].items()

    def price(name: str) -> float:
        seconds = cost(shape.operation, name, shape.size, shape.total, shape.limits).seconds
        return seconds * (NEIGHBOURLY if name in _RINGS else 1)

    return min((name for name, (_, _, considered) in found if considered & order), key=price)


def cost(operation: str, name: str, size: int, nbytes: int, limits: Limits) -> Cost:
    """Return the cost of an algorithm of ALGORITHMS."""
    return ALGORITHMS[operation][name][1](Scale(size, nbytes, limits))


def nothing(shape: CallShape) -> Plan:
    """Return a plan that moves nothing after the meeting, in which ranks compare calls."""
    return Rows().plan()


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "recursive doubling": (
            doubling.all_reduce,
            lambda c: in_pairs(c, 1, (c.n.bit_length() - 1) * c.b),
            ALWAYS,
        ),
        "halving": (doubling.halving, halved, ALWAYS),
        "circulant": (
            circulant.all_reduce,
            lambda c: both(2 * c.log, 4 * c.log, 2 * c.rest, 2 * c.rest),
            FREE,
        ),
        "ring": (ring.all_reduce, lambda c: both(2 * (c.n - 1), 8 * (c.n - 1), 2 * c.rest, 2 * c.rest), FREE),
        "direct": (direct.all_reduce, lambda c: both(2, 4 * (c.n - 1), 2 * c.rest, c.b), ORDERED),
    },
    "reduce": {
        "tree": (trees.reduce, tree_reduce, FREE),
        "ring": (ring.reduce, lambda c: ring_scatter(c).then(one_way(c.rounds, c.n - 1, c.rest, 0)), FREE),
        "ordered tree": (trees.reduce, lambda c: tree_reduce(c).then(one_way(1, 1, c.b, 0)), ORDERED),
        "direct": (direct.reduce, lambda c: direct_scatter(c).then(one_way(1, c.n - 1, c.rest, 0)), ORDERED),
        "complete arrays": (
            direct.complete_arrays,
            lambda c: one_way(1, c.n - 1, (c.n - 1) * c.b, c.n * c.b),
            NEVER,
        ),
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
        "doubling": (doubling.scan, lambda c: doubling_scan(c, 2 * c.log + 1), ALWAYS),
        "direct": (direct.scan, direct_scan, ALWAYS),
        "complete arrays": (
            direct.complete_arrays,
            lambda c: one_way(1, c.n - 1, (c.n - 1) * c.b, c.n * c.b),
            NEVER,
        ),
    },
    "exscan": {
        "doubling": (doubling.scan, lambda c: doubling_scan(c, 4 * c.log - 1), ALWAYS),
        "direct": (direct.scan, direct_scan, ALWAYS),
        "complete arrays": (
            direct.complete_arrays,
            lambda c: one_way(1, c.n - 1, (c.n - 1) * c.b, (c.n - 1) * c.b),
            NEVER,
        ),
    },
    "broadcast": {
        "tree": (trees.broadcast, lambda c: one_way(c.log, c.log, c.log * c.b, 0), ALWAYS),
        "chain": (trees.chain, chain, ALWAYS),
        "scatter and ring": (trees.scatter_ring, lambda c: scattered(c, c.n // 2, c.n - 1), ALWAYS),
        "scatter and circulant": (
            trees.scatter_circulant,
            lambda c: scattered(c, c.log, c.log),
            ALWAYS,
        ),
        "direct": (direct.broadcast, direct_broadcast, NEVER),
    },
    "all_gather": {
        "circulant": (
            circulant.all_gather,
            lambda c: both(c.log, 2 * c.log, c.rest, c.b + c.b / c.n),
            ALWAYS,
        ),
        "ring": (ring.all_gather, lambda c: both(c.n // 2, 2 * (c.n - 1), c.rest, c.b / c.n), ALWAYS),
        "direct": (exchange, all_pairs, NEVER),
    },
    "gather": {"direct": (exchange, rooted, NEVER)},
    "scatter": {"direct": (exchange, rooted, NEVER)},
    "all_to_all": {"direct": (exchange, all_pairs, NEVER)},
}
"""All algorithms, by operation and name."""
