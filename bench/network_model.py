"""A cost model of collectives over a network: fitted to what was measured, then asked about what was not.

A call takes what its operation takes in Python, the meeting of all ranks, and the cost of its algorithm as
net/tcp/plans/choose.py counts it, each count times a price:

    price      of
    step       a message that was waited for
    message    a further message
    byte       a byte on the wire, of the direction that has more of them
    handle     a byte sent or received
    touch      a byte reduced or copied
    far        one handled or copied beyond the first NEAR of a call, which no cache holds any more, besides
    wake       a message to a rank that sleeps, besides

Where a host has fewer cores than ranks, these share the cores: Python and steps take as many times longer as there are
ranks a core, the work of all ranks is divided among the cores, and ranks sleep at once when they wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fastcoll.net.tcp.plans.choose import Cost, chosen, cost
from fastcoll.net.tcp.plans.shape import HEADER_BYTES, MEET_RANKS, Shape, default_limits

NEAR = 2 << 20
"""Bytes: what the caches of a core are good for, L2 and its share of L3 (AMD EPYC of family 25)."""

SMALL = 64 << 10
"""Bytes up to which one rank of a node talks for all, as in hybrid/backend.py."""

PRICES = ("step", "message", "byte", "handle", "far", "touch", "wake")
NOTHING = Cost(0, 0, 0, 0, 0)

_NEIGHBOURS = frozenset({"ring", "chain", "scatter and ring"})
_OF_ONE_SIZE = frozenset({"all_reduce", "reduce", "scan", "exscan", "broadcast"})
_COPIED = frozenset({"reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"})

Array = np.ndarray[Any, np.dtype[np.float64]]


class Sample(NamedTuple):
    """A measured time.

    Attributes:
        nbytes: as choose.py counts them: of the array, or of all ranks' parts together.
        seconds: of a call.
        cores: that all ranks share; None where each has its own.
    """

    operation: str
    ranks: int
    nbytes: int
    seconds: float
    cores: int | None = None


@dataclass(frozen=True)
class Model:
    """Prices in seconds, and what a call of each operation takes besides."""

    prices: Mapping[str, float]
    calls: Mapping[str, float]

    def seconds(self, sample: Sample) -> float:
        """The time predicted for what a sample measured."""
        operation = self.calls.get(sample.operation, 0.0)
        prices = np.array([self.prices[name] for name in PRICES])
        return operation * _turns(sample) + float(_shared(sample) @ prices)


def shape_of(operation: str, ranks: int, nbytes: int) -> Shape:
    """Rank 0's view of a call with equal parts."""
    part = nbytes // ranks
    limits = default_limits(ranks)
    sizes = {
        "reduce_scatter": (part,) * ranks,
        "all_gather": (part,) * ranks,
        "gather": (part,) * ranks,
        "scatter": (part,) * ranks,
        "all_to_all": (part,) * 2 * ranks,
        "barrier": (),
    }
    return Shape(operation, ranks, 0, sizes.get(operation, (nbytes,)), limits, itemsize=1)


def _turns(sample: Sample) -> float:
    """How many ranks take turns on a core."""
    return max(1.0, sample.ranks / sample.cores) if sample.cores else 1.0


def _shared(sample: Sample) -> Array:
    """The features of a sample, made longer by the ranks that share its cores."""
    counts = features(sample.operation, sample.ranks, sample.nbytes)
    if sample.cores is None:
        return counts
    # Where one rank gives and the others take, all bytes are handled twice, else by every rank.
    attached = chosen(shape_of(sample.operation, sample.ranks, sample.nbytes)) == "attached"
    rooted = sample.operation in ("gather", "scatter") or (
        attached and sample.operation in ("reduce", "broadcast")
    )
    workers = min(2, sample.ranks) if rooted else sample.ranks
    shares = np.full(len(PRICES), max(1.0, workers / sample.cores))
    shares[0] = _turns(sample)
    shared: Array = counts * shares
    shared[PRICES.index("wake")] = counts[PRICES.index("message")] if _turns(sample) > 1 else 0
    return shared


def features(operation: str, ranks: int, nbytes: int) -> Array:
    """What each price is multiplied by, for the algorithm that the library chooses."""
    shape = shape_of(operation, ranks, nbytes)
    return counts_of(algorithm_cost(chosen(shape), operation, ranks, nbytes), operation, ranks)


def algorithm_cost(algorithm: str, operation: str, ranks: int, nbytes: int) -> Cost:
    """The cost of an algorithm without the meeting; `attached` and `nothing` are the meeting."""
    limits = default_limits(ranks)
    if algorithm == "alone":
        return Cost(0, 0, 0, 0, nbytes if operation in _COPIED else 0)
    if algorithm == "nothing":
        return NOTHING
    if algorithm == "attached":  # besides the meeting
        sent = (nbytes if operation in _OF_ONE_SIZE else nbytes / ranks) * (ranks - 1)
        both = operation in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
        return Cost(0, 0, sent, 2 * sent if both else sent, sent)
    return cost(operation, algorithm, ranks, nbytes, limits)


def counts_of(cost: Cost, operation: str, ranks: int) -> Array:
    """The features of an algorithm and the meeting before it."""
    return _features(cost.then(meeting(ranks)), operation)


def _features(cost: Cost, operation: str) -> Array:
    steps, messages, wire, handled, touched = cost
    # What is reduced has just arrived; what is copied comes from afar.
    moved = handled + (touched if operation in _COPIED else 0)
    return np.array([steps, messages, wire, handled, max(moved - NEAR, 0.0), touched, 0], np.float64)


def meeting(ranks: int) -> Cost:
    """What the meeting of all ranks takes: each one's header, to all or passed on in steps."""
    steps = 1 if ranks <= MEET_RANKS else (ranks - 1).bit_length()
    messages = 2 * (ranks - 1) if ranks <= MEET_RANKS else 2 * steps
    told = (ranks - 1) * HEADER_BYTES
    return Cost(steps, messages, told, 2 * told, 0) if ranks > 1 else NOTHING


def fit(samples: Sequence[Sample], rounds: int = 200) -> Model:
    """Prices and calls for which the logarithms of predictions and samples differ least, in the mean square.

    Levenberg and Marquardt's method on the logarithms of the prices, which so stay positive.

    Raises:
        ValueError: there are too few samples.
    """
    operations = sorted({sample.operation for sample in samples})
    if len(samples) < len(PRICES) + len(operations):
        raise ValueError(f"{len(samples)} samples cannot give {len(PRICES) + len(operations)} numbers")
    matrix = np.array([_row(sample, operations) for sample in samples])
    wanted = np.log([sample.seconds for sample in samples])
    logs = _descend(matrix, wanted, np.log(_start(len(operations))), rounds)
    values = np.exp(logs).tolist()
    prices = dict(zip(PRICES, values, strict=False))
    return Model(prices, dict(zip(operations, values[len(PRICES) :], strict=True)))


def _row(sample: Sample, operations: Sequence[str]) -> Array:
    called = _turns(sample) * np.array([float(sample.operation == name) for name in operations])
    return np.concatenate([_shared(sample), called])


def _start(operations: int) -> Array:
    """Prices of a usual machine, to begin with."""
    return np.array([1e-5, 2e-6, 1e-10, 1e-10, 1e-10, 1e-10, 1e-5, *[5e-6] * operations])


def _descend(matrix: Array, wanted: Array, logs: Array, rounds: int) -> Array:
    damping = 1e-2
    error = _errors(matrix, wanted, logs)
    for _ in range(rounds):
        terms = matrix * np.exp(logs)
        slope = terms / terms.sum(1, keepdims=True)
        normal = slope.T @ slope
        step = np.linalg.solve(normal + damping * np.eye(len(logs)), -slope.T @ error)
        trial = _errors(matrix, wanted, logs + step)
        if trial @ trial < error @ error:
            logs, error, damping = logs + step, trial, damping / 3
        else:
            damping = min(damping * 4, 1e6)
    return logs


def _errors(matrix: Array, wanted: Array, logs: Array) -> Array:
    found: Array = np.log(matrix @ np.exp(logs)) - wanted
    return found


class Cluster(NamedTuple):
    """Nodes that were not measured.

    Attributes:
        nodes, per_node: how many there are, and ranks on each, every rank on a core of its own.
        latency: seconds that the network adds to a step.
        bandwidth: bytes a second of a node's card, each way.
        local_step: seconds that ranks of a node take to meet in shared memory.
    """

    nodes: int
    per_node: int = 1
    latency: float = 15e-6
    bandwidth: float = 1.25e9
    local_step: float = 1e-6

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    def prices(self, model: Model, sharing: int) -> Array:
        """A model's prices here, where so many ranks of a node send through its card at the same time."""
        found = dict(model.prices)
        found["step"] += self.latency
        found["byte"] = max(found["byte"], sharing / self.bandwidth)
        return np.array([found[name] for name in PRICES])


def flat(model: Model, cluster: Cluster, algorithm: str, operation: str, nbytes: int) -> float:
    """Seconds of a call among all ranks, without what the headers of the meeting weigh."""
    # Around the ring, only the last rank of a node sends to the next node.
    sharing = 1 if algorithm in _NEIGHBOURS else cluster.per_node
    cost = algorithm_cost(algorithm, operation, cluster.ranks, nbytes).then(_weightless(cluster.ranks))
    return float(_features(cost, operation) @ cluster.prices(model, sharing))


def by_nodes(model: Model, cluster: Cluster, nbytes: int) -> float:
    """Seconds of an all_reduce through shared memory in each node and the network between; headers as in `flat`.

    Each rank reduces its share of the node's arrays, all_reduces it with its like on the other nodes, and copies what
    the node's others have got; up to SMALL bytes, one rank of each node talks for all.
    """
    rails = 1 if nbytes <= SMALL else cluster.per_node
    share = nbytes // rails
    across = chosen(shape_of("all_reduce", cluster.nodes, share))
    cost = algorithm_cost(across, "all_reduce", cluster.nodes, share)
    # All ranks meet, then those of a rail among themselves.
    met = _weightless(cluster.ranks).then(_weightless(cluster.nodes))
    network = float(_features(cost.then(met), "all_reduce") @ cluster.prices(model, rails))
    touched = 3 * nbytes * model.prices["touch"]
    return network + touched + 2 * cluster.local_step


def _weightless(ranks: int) -> Cost:
    """The meeting, with headers of no bytes."""
    return meeting(ranks)._replace(wire=0, handled=0)


def header_seconds(model: Model, cluster: Cluster) -> float:
    """Seconds for the bytes of the headers of all ranks, which every rank gets."""
    weight = meeting(cluster.ranks)._replace(steps=0, messages=0)
    return float(_features(weight, "barrier") @ cluster.prices(model, cluster.per_node))


class Accuracy(NamedTuple):
    """How far predictions are from samples, as a share of what was measured.

    Attributes:
        median, worst: over the samples.
        within: the share of samples that are predicted within 25 %.
    """

    median: float
    worst: float
    within: float


def accuracy(model: Model, samples: Sequence[Sample]) -> Accuracy:
    """Compare predictions with samples."""
    off = np.array([abs(model.seconds(s) / s.seconds - 1) for s in samples])
    return Accuracy(float(np.median(off)), float(off.max()), float((off <= 0.25).mean()))
