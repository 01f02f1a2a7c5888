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

from collections.abc import Callable
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


Formula = Callable[[int, int, Limits], Cost]
"""From the number of ranks, at least 2, and the bytes: n, b and m below."""


def _log(n: int) -> int:
    return (n - 1).bit_length()


def _both(steps: float, messages: float, wire: float, touched: float) -> Cost:
    """The cost of ranks that send as much as they receive."""
    return Cost(steps, messages, wire, 2 * wire, touched)


def _one_way(steps: float, messages: float, wire: float, touched: float) -> Cost:
    """The cost of ranks that either send or receive in a step."""
    return Cost(steps, messages, wire, wire, touched)


def _rest(n: int, b: int) -> float:
    """The bytes of all blocks but one."""
    return b * (n - 1) / n


def _at_once(n: int, m: Limits) -> int:
    """Steps for exchanging something with all others."""
    return -(-(n - 1) // m.peers)


def _in_pairs(n: int, b: int, turns: int, wire: float) -> Cost:
    """A power of two of the ranks take that many turns of log2 n steps; the others leave theirs to one of these."""
    steps = turns * (n.bit_length() - 1)
    extra = 0 if n & (n - 1) == 0 else 2
    return _both(steps, 2 * steps, wire, 2 * wire / turns).then(_one_way(extra, extra, extra * b, extra * b))


def _direct_scatter(n: int, b: int, m: Limits) -> Cost:
    return _both(1, 2 * (n - 1), _rest(n, b), b)


def _ring_scatter(n: int, b: int, m: Limits) -> Cost:
    return _both(n - 1, 2 * (n - 1), _rest(n, b), 2 * _rest(n, b))


def _tree_reduce(n: int, b: int, m: Limits) -> Cost:
    return _one_way(_log(n), _log(n), _log(n) * b, 2 * _log(n) * b)


def _direct_scan(n: int, b: int, m: Limits) -> Cost:
    return _both(2, 4 * (n - 1), 2 * _rest(n, b), 2 * b)


def _doubling_scan(n: int, b: int, passes: int) -> Cost:
    """log2 n steps, in the last of which a rank either sends or receives."""
    steps = _log(n)
    return Cost(steps, 2 * steps, steps * b, (2 * steps - 1) * b, passes * b)


def _exchange(n: int, b: int, m: Limits) -> Cost:
    return _both(_at_once(n, m), 2 * (n - 1), _rest(n, b), b / n)


def _rooted(n: int, b: int, m: Limits) -> Cost:
    return _one_way(_at_once(n, m), n - 1, _rest(n, b), b / n)


def _direct_broadcast(n: int, b: int, m: Limits) -> Cost:
    if n == 2:
        return _one_way(1, 1, b, 0)
    forwarded = min(_rest(n - 1, b), (n - 2) * m.segment)
    return Cost(2, 3 * n - 5, b + forwarded, b + _rest(n - 1, b) + forwarded, 0)


def _chain(n: int, b: int, m: Limits) -> Cost:
    segment, count = min(b, m.segment), -(-b // m.segment)
    return Cost(n - 1, 2 * count + n - 3, b + (n - 2) * segment, 2 * b + (n - 3) * segment, 0)


def _scattered(n: int, b: int, steps: int, messages: int) -> Cost:
    """Blocks go down a tree, and then to all."""
    down = _one_way(_log(n), _log(n), _rest(n, b), 0)
    return down.then(_both(steps, 2 * messages, _rest(n, b), 0))


COSTS: dict[str, dict[str, Formula]] = {
    "all_reduce": {
        "direct": lambda n, b, m: _both(2, 4 * (n - 1), 2 * _rest(n, b), b),
        "recursive doubling": lambda n, b, m: _in_pairs(n, b, 1, (n.bit_length() - 1) * b),
        "halving": lambda n, b, m: _in_pairs(n, b, 2, 2 * _rest(1 << n.bit_length() - 1, b)),
        "circulant": lambda n, b, m: _both(2 * _log(n), 4 * _log(n), 2 * _rest(n, b), 2 * _rest(n, b)),
        "ring": lambda n, b, m: _both(2 * (n - 1), 8 * (n - 1), 2 * _rest(n, b), 2 * _rest(n, b)),
    },
    "reduce": {
        "direct": lambda n, b, m: _direct_scatter(n, b, m).then(_one_way(1, n - 1, _rest(n, b), 0)),
        "to the root": lambda n, b, m: _one_way(1, n - 1, (n - 1) * b, n * b),
        "tree": _tree_reduce,
        "ordered tree": lambda n, b, m: _tree_reduce(n, b, m).then(_one_way(1, 1, b, 0)),
        "ring": lambda n, b, m: _ring_scatter(n, b, m).then(_one_way(_at_once(n, m), n - 1, _rest(n, b), 0)),
    },
    "reduce_scatter": {
        "direct": _direct_scatter,
        "circulant": lambda n, b, m: _both(_log(n), 2 * _log(n), _rest(n, b), b + 2 * _rest(n, b)),
        "ring": _ring_scatter,
    },
    "scan": {
        "direct": _direct_scan,
        "upwards": lambda n, b, m: _one_way(1, n - 1, (n - 1) * b, n * b),
        "doubling": lambda n, b, m: _doubling_scan(n, b, 2 * _log(n) + 1),
    },
    "exscan": {
        "direct": _direct_scan,
        "upwards": lambda n, b, m: _one_way(1, n - 1, (n - 1) * b, (n - 1) * b),
        "doubling": lambda n, b, m: _doubling_scan(n, b, 4 * _log(n) - 1),
    },
    "broadcast": {
        "direct": _direct_broadcast,
        "tree": lambda n, b, m: _one_way(_log(n), _log(n), _log(n) * b, 0),
        "chain": _chain,
        "scatter and ring": lambda n, b, m: _scattered(n, b, n // 2, n - 1),
        "scatter and circulant": lambda n, b, m: _scattered(n, b, _log(n), _log(n)),
    },
    "all_gather": {
        "direct": _exchange,
        "circulant": lambda n, b, m: _both(_log(n), 2 * _log(n), _rest(n, b), b + b / n),
        "ring": lambda n, b, m: _both(n // 2, 2 * (n - 1), _rest(n, b), b / n),
    },
    "gather": {"direct": _rooted},
    "scatter": {"direct": _rooted},
    "all_to_all": {"direct": _exchange},
}
"""Formulas by operation and algorithm."""

_OF_ONE_SIZE = frozenset({"all_reduce", "reduce", "scan", "exscan", "broadcast"})


def attached(operation: str, size: int, nbytes: int) -> Cost:
    """What a call costs whose data travels with the headers, besides the meeting."""
    sent = (nbytes if operation in _OF_ONE_SIZE else nbytes / size) * (size - 1)
    both = operation in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
    return Cost(0, 0, sent, 2 * sent if both else sent, sent)
