"""Every algorithm by itself, for any number of ranks."""

from typing import NamedTuple

import pytest

from fastcoll.net.tcp.plans import binomial as trees
from fastcoll.net.tcp.plans import circulant, direct, doubling, ring
from fastcoll.net.tcp.plans.direct import exchange
from net.plan_cases import ANY_ORDER, IN_ORDER, ONE_PASS, Builder, Case, check


class Algorithm(NamedTuple):
    name: str
    operation: str
    builder: Builder
    promise: int = ONE_PASS
    flags: tuple[str, ...] = ()
    least: int = 2  # ranks


ALGORITHMS = (
    Algorithm("direct", "all_reduce", direct.all_reduce),
    Algorithm("doubling", "all_reduce", doubling.all_reduce, IN_ORDER),
    Algorithm("halving", "all_reduce", doubling.halving, IN_ORDER),
    Algorithm("circulant", "all_reduce", circulant.all_reduce, ANY_ORDER),
    Algorithm("ring", "all_reduce", ring.all_reduce, ANY_ORDER),
    Algorithm("direct", "reduce", direct.reduce),
    Algorithm("whole", "reduce", direct.whole),
    Algorithm("ring", "reduce", ring.reduce, ANY_ORDER),
    Algorithm("tree", "reduce", trees.reduce, ANY_ORDER),
    Algorithm("ordered_tree", "reduce", trees.reduce, IN_ORDER, ("ordered",)),
    Algorithm("direct", "reduce_scatter", direct.reduce_scatter),
    Algorithm("circulant", "reduce_scatter", circulant.reduce_scatter, ANY_ORDER),
    Algorithm("ring", "reduce_scatter", ring.reduce_scatter, ANY_ORDER),
    Algorithm("whole", "scan", direct.whole),
    Algorithm("direct", "scan", direct.scan, IN_ORDER),
    Algorithm("ordered_direct", "scan", direct.scan, ONE_PASS, ("ordered",)),
    Algorithm("doubling", "scan", doubling.scan, IN_ORDER),
    Algorithm("whole", "exscan", direct.whole),
    Algorithm("direct", "exscan", direct.scan, IN_ORDER),
    Algorithm("ordered_direct", "exscan", direct.scan, ONE_PASS, ("ordered",)),
    Algorithm("doubling", "exscan", doubling.scan, IN_ORDER),
    Algorithm("direct", "all_gather", exchange),
    Algorithm("circulant", "all_gather", circulant.all_gather),
    Algorithm("ring", "all_gather", ring.all_gather),
    Algorithm("direct", "gather", exchange),
    Algorithm("direct", "scatter", exchange),
    Algorithm("direct", "all_to_all", exchange),
    Algorithm("direct", "broadcast", direct.broadcast),
    Algorithm("tree", "broadcast", trees.broadcast),
    Algorithm("chain", "broadcast", trees.chain),
    Algorithm("scatter_ring", "broadcast", trees.scatter_ring),
    Algorithm("scatter_circulant", "broadcast", trees.scatter_circulant),
)


def case_of(algorithm: Algorithm, size: int, count: int, **more) -> Case:
    return Case(algorithm.operation, size, count, flags=dict.fromkeys(algorithm.flags, True), **more)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.operation}-{a.name}")
def test_an_algorithm_gives_the_result(algorithm):
    for size in range(algorithm.least, 18):
        for count in (1, 13) if size > 5 else (1, 2, 8, 13, 61):
            for root in {0, size // 2, size - 1} if size <= 5 else {size - 1}:
                case = case_of(algorithm, size, count, root=root, in_place=bool(count % 2))
                check(case, algorithm.builder, algorithm.promise, seed=size)
