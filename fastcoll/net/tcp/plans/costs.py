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
    """What a network, and a rank's way into it, can do.

    Attributes:
        step: seconds until a message that was waited for has been sent, received and seen.
        message: seconds of work for each further message.
        byte: seconds a byte on the wire, of the direction that has more of them.
        handle: seconds of work a byte that a rank sends or receives.
        touch: seconds a byte that is reduced or copied.
    """

    step: float
    message: float
    byte: float
    handle: float
    touch: float


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
"""From the number of ranks, at least 2, and the bytes."""


def _log(size: int) -> int:
    return (size - 1).bit_length()


def _both(steps: float, messages: float, wire: float, touched: float) -> Cost:
    """The cost of ranks that send as much as they receive."""
    return Cost(steps, messages, wire, 2 * wire, touched)


def _one_way(steps: float, messages: float, wire: float, touched: float) -> Cost:
    """The cost of ranks that either send or receive in a step."""
    return Cost(steps, messages, wire, wire, touched)


def _others(size: int, nbytes: int) -> float:
    """The bytes of all blocks but one."""
    return nbytes * (size - 1) / size


def _at_once(size: int, limits: Limits) -> int:
    """Steps for exchanging something with all others."""
    return -(-(size - 1) // limits.peers)


def _doubling(size: int, nbytes: int, limits: Limits) -> Cost:
    steps = size.bit_length() - 1
    extra = 0 if size == 1 << steps else 2
    both = _both(steps, 2 * steps, steps * nbytes, 2 * steps * nbytes)
    return both.then(_one_way(extra, extra, extra * nbytes, extra * nbytes))


def _halving(size: int, nbytes: int, limits: Limits) -> Cost:
    steps = size.bit_length() - 1
    extra = 0 if size == 1 << steps else 2
    moved = 2 * _others(1 << steps, nbytes)
    both = _both(2 * steps, 4 * steps, moved, moved)
    return both.then(_one_way(extra, extra, extra * nbytes, extra * nbytes))


def _direct_all_reduce(size: int, nbytes: int, limits: Limits) -> Cost:
    return _both(2, 4 * (size - 1), 2 * _others(size, nbytes), nbytes)


def _circulant_all_reduce(size: int, nbytes: int, limits: Limits) -> Cost:
    return _both(2 * _log(size), 4 * _log(size), 2 * _others(size, nbytes), 2 * _others(size, nbytes))


def _ring_all_reduce(size: int, nbytes: int, limits: Limits) -> Cost:
    return _both(2 * (size - 1), 8 * (size - 1), 2 * _others(size, nbytes), 2 * _others(size, nbytes))


def _direct_scatter(size: int, nbytes: int, limits: Limits) -> Cost:
    return _both(1, 2 * (size - 1), _others(size, nbytes), nbytes)


def _circulant_scatter(size: int, nbytes: int, limits: Limits) -> Cost:
    return _both(_log(size), 2 * _log(size), _others(size, nbytes), nbytes + 2 * _others(size, nbytes))


def _ring_scatter(size: int, nbytes: int, limits: Limits) -> Cost:
    return _both(size - 1, 2 * (size - 1), _others(size, nbytes), 2 * _others(size, nbytes))


def _tree_reduce(size: int, nbytes: int, limits: Limits) -> Cost:
    return _one_way(_log(size), _log(size), _log(size) * nbytes, 2 * _log(size) * nbytes)


def _ordered_tree_reduce(size: int, nbytes: int, limits: Limits) -> Cost:
    return _tree_reduce(size, nbytes, limits).then(_one_way(1, 1, nbytes, 0))


def _to_root(size: int, nbytes: int, limits: Limits) -> Cost:
    return _one_way(1, size - 1, (size - 1) * nbytes, size * nbytes)


def _blocks_to_root(size: int, nbytes: int, limits: Limits) -> Cost:
    return _one_way(_at_once(size, limits), size - 1, _others(size, nbytes), 0)


def _direct_reduce(size: int, nbytes: int, limits: Limits) -> Cost:
    return _direct_scatter(size, nbytes, limits).then(_one_way(1, size - 1, _others(size, nbytes), 0))


def _ring_reduce(size: int, nbytes: int, limits: Limits) -> Cost:
    return _ring_scatter(size, nbytes, limits).then(_blocks_to_root(size, nbytes, limits))


def _upwards_scan(size: int, nbytes: int, limits: Limits) -> Cost:
    return _one_way(1, size - 1, (size - 1) * nbytes, size * nbytes)


def _upwards_exscan(size: int, nbytes: int, limits: Limits) -> Cost:
    return _one_way(1, size - 1, (size - 1) * nbytes, (size - 1) * nbytes)


def _direct_scan(size: int, nbytes: int, limits: Limits) -> Cost:
    return _both(2, 4 * (size - 1), 2 * _others(size, nbytes), 2 * nbytes)


def _doubled(size: int, nbytes: int, passes: int) -> Cost:
    """log2 n steps, in the last of which a rank either sends or receives."""
    steps = _log(size)
    return Cost(steps, 2 * steps, steps * nbytes, (2 * steps - 1) * nbytes, passes * nbytes)


def _doubling_scan(size: int, nbytes: int, limits: Limits) -> Cost:
    return _doubled(size, nbytes, 2 * _log(size) + 1)


def _doubling_exscan(size: int, nbytes: int, limits: Limits) -> Cost:
    return _doubled(size, nbytes, 4 * _log(size) - 1)


def _direct_gather(size: int, nbytes: int, limits: Limits) -> Cost:
    return _both(_at_once(size, limits), 2 * (size - 1), _others(size, nbytes), nbytes / size)


def _circulant_gather(size: int, nbytes: int, limits: Limits) -> Cost:
    return _both(_log(size), 2 * _log(size), _others(size, nbytes), nbytes + nbytes / size)


def _ring_gather(size: int, nbytes: int, limits: Limits) -> Cost:
    return _both(size // 2, 2 * (size - 1), _others(size, nbytes), nbytes / size)


def _rooted_direct(size: int, nbytes: int, limits: Limits) -> Cost:
    return _one_way(_at_once(size, limits), size - 1, _others(size, nbytes), nbytes / size)


def _rooted_tree(size: int, nbytes: int, limits: Limits) -> Cost:
    return _one_way(_log(size), _log(size), _others(size, nbytes), nbytes + nbytes / size)


def _direct_all_to_all(size: int, nbytes: int, limits: Limits) -> Cost:
    return _both(_at_once(size, limits), 2 * (size - 1), _others(size, nbytes), nbytes / size)


def _direct_broadcast(size: int, nbytes: int, limits: Limits) -> Cost:
    if size == 2:
        return _one_way(1, 1, nbytes, 0)
    forwarded = min(_others(size - 1, nbytes), (size - 2) * limits.segment)
    handled = nbytes + _others(size - 1, nbytes) + forwarded
    return Cost(2, 3 * size - 5, nbytes + forwarded, handled, 0)


def _tree_broadcast(size: int, nbytes: int, limits: Limits) -> Cost:
    return _one_way(_log(size), _log(size), _log(size) * nbytes, 0)


def _chain(size: int, nbytes: int, limits: Limits) -> Cost:
    segment, count = min(nbytes, limits.segment), -(-nbytes // limits.segment)
    return Cost(
        size - 1, 2 * count + size - 3, nbytes + (size - 2) * segment, 2 * nbytes + (size - 3) * segment, 0
    )


def _tree_scatter(size: int, nbytes: int) -> Cost:
    return _one_way(_log(size), _log(size), _others(size, nbytes), 0)


def _scatter_ring(size: int, nbytes: int, limits: Limits) -> Cost:
    return _tree_scatter(size, nbytes).then(_both(size // 2, 2 * (size - 1), _others(size, nbytes), 0))


def _scatter_circulant(size: int, nbytes: int, limits: Limits) -> Cost:
    return _tree_scatter(size, nbytes).then(_both(_log(size), 2 * _log(size), _others(size, nbytes), 0))


_OF_ONE_SIZE = frozenset({"all_reduce", "reduce", "scan", "exscan", "broadcast"})


def attached(operation: str, size: int, nbytes: int) -> Cost:
    """What a call costs whose data travels with the headers, besides the meeting."""
    sent = (nbytes if operation in _OF_ONE_SIZE else nbytes / size) * (size - 1)
    both = operation in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
    return Cost(0, 0, sent, 2 * sent if both else sent, sent)


COSTS: dict[str, dict[str, Formula]] = {
    "all_reduce": {
        "direct": _direct_all_reduce,
        "recursive doubling": _doubling,
        "halving": _halving,
        "circulant": _circulant_all_reduce,
        "ring": _ring_all_reduce,
    },
    "reduce": {
        "direct": _direct_reduce,
        "to the root": _to_root,
        "tree": _tree_reduce,
        "ordered tree": _ordered_tree_reduce,
        "ring": _ring_reduce,
    },
    "reduce_scatter": {"direct": _direct_scatter, "circulant": _circulant_scatter, "ring": _ring_scatter},
    "scan": {"direct": _direct_scan, "upwards": _upwards_scan, "doubling": _doubling_scan},
    "broadcast": {
        "direct": _direct_broadcast,
        "tree": _tree_broadcast,
        "chain": _chain,
        "scatter and ring": _scatter_ring,
        "scatter and circulant": _scatter_circulant,
    },
    "all_gather": {"direct": _direct_gather, "circulant": _circulant_gather, "ring": _ring_gather},
    "gather": {"direct": _rooted_direct, "tree": _rooted_tree},
    "scatter": {"direct": _rooted_direct, "tree": _rooted_tree},
    "all_to_all": {"direct": _direct_all_to_all},
}
COSTS["exscan"] = COSTS["scan"] | {"upwards": _upwards_exscan, "doubling": _doubling_exscan}
"""Formulas by operation and algorithm."""
