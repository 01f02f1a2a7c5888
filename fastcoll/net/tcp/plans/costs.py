"""What each algorithm costs, as closed formulas: the choice between them, and the benchmark's model, rest on these.

A cost adds up, over the phases of a plan that is not divided into segments, what the rank has to do that has most to
do. With n ranks, L = ceil(log2 n) and N bytes (all ranks' parts together, where ranks have parts):

    steps      phases in which something is sent
    messages   sent and received
    wire       bytes, in the direction that has more of them
    handled    bytes sent plus bytes received
    touched    bytes that are read to be reduced or copied

Segments travel while others are reduced, which adds messages, but no steps. Segments of a chain do add steps to each
other; its formula has them.
"""

from __future__ import annotations

from typing import NamedTuple

from .shape import Limits


class Network(NamedTuple):
    """What a network, and a rank's way into it, can do, in seconds."""

    step: float  # until a message that was waited for has been sent, received and seen
    message: float  # of work for each further message
    byte: float  # on the wire, of the direction that has more of them
    handle: float  # of work for a byte that a rank sends or receives
    touch: float  # for a byte that is reduced or copied


LAN = Network(step=25e-6, message=2e-6, byte=0.8e-9, handle=0.1e-9, touch=0.1e-9)
"""Ethernet of 10 Gbit/s: 15 to 30 µs a step are usual over TCP; a system call with its part of the kernel's TCP takes
about 2 µs, and copying a byte into the kernel or out of it 0.1 ns, as measured over loopback; memory, 10 GB/s a core.
Decides beyond MEET_RANKS only."""


class Cost(NamedTuple):
    """What an algorithm takes; see the module."""

    steps: float
    messages: float
    wire: float
    handled: float
    touched: float

    def seconds(self, network: Network) -> float:
        return sum(count * price for count, price in zip(self, network, strict=True))

    def then(self, other: Cost) -> Cost:
        """Both, one after the other."""
        return Cost(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Scale(NamedTuple):
    """How large a call is: n ranks, at least 2, b bytes, and the limits of its group's plans."""

    n: int
    b: int
    limits: Limits

    @property
    def log(self) -> int:
        return (self.n - 1).bit_length()

    @property
    def rest(self) -> float:
        """The bytes of all blocks but one."""
        return self.b * (self.n - 1) / self.n

    @property
    def turns(self) -> int:
        """Steps for exchanging something with all others."""
        return -(-(self.n - 1) // self.limits.peers)


def both(steps: float, messages: float, wire: float, touched: float) -> Cost:
    """The cost of ranks that send as much as they receive."""
    return Cost(steps, messages, wire, 2 * wire, touched)


def one_way(steps: float, messages: float, wire: float, touched: float) -> Cost:
    """The cost of ranks that either send or receive in a step."""
    return Cost(steps, messages, wire, wire, touched)


def in_pairs(c: Scale, turns: int, wire: float) -> Cost:
    """A power of two of the ranks take that many turns of log2 n steps; the others leave theirs to one of these."""
    steps = turns * (c.n.bit_length() - 1)
    extra = 0 if c.n & (c.n - 1) == 0 else 2
    return both(steps, 2 * steps, wire, 2 * wire / turns).then(
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
    """log2 n steps, in the last of which a rank either sends or receives."""
    return Cost(c.log, 2 * c.log, c.log * c.b, (2 * c.log - 1) * c.b, passes * c.b)


def exchange(c: Scale) -> Cost:
    return both(c.turns, 2 * (c.n - 1), c.rest, c.b / c.n)


def rooted(c: Scale) -> Cost:
    return one_way(c.turns, c.n - 1, c.rest, c.b / c.n)


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
    """Blocks go down a tree, and then to all."""
    return one_way(c.log, c.log, c.rest, 0).then(both(steps, 2 * messages, c.rest, 0))
