"""Plans by which one rank of each node passes on the data of its node."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest

from fastcoll.kernels.primitives import address_of
from fastcoll.net.tcp import engine_layout as w
from fastcoll.net.tcp.context import NetContext, PreparedPlan
from fastcoll.net.tcp.plans import plan as t
from fastcoll.net.tcp.plans import relayed
from fastcoll.net.tcp.plans.choose import chosen, plan_for
from fastcoll.net.tcp.plans.plan import Plan
from fastcoll.net.tcp.plans.shape import CallShape, Limits
from net.plan_cases import ANY_ORDER, IN_ORDER, REDUCTIONS, ROOTED, WITH_BLOCKS, Case, check
from net.simulate import PlanError

RELAYED = 4800
LIMITS = Limits(payload=0, relayed=RELAYED)
KINDS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
)
NODES = {
    "even": ((0, 1), (2, 3)),
    "a surplus rank": ((0, 1, 2), (3, 4)),
    "interleaved": ((0, 3), (1, 4), (2, 5)),
    "alone": ((0,), (1, 2), (3,)),
    "many": tuple((2 * node, 2 * node + 1) for node in range(9)),
}


def case_of(operation: str, nodes: tuple[tuple[int, ...], ...], sizes: Any, **more: Any) -> Case:
    size = sum(map(len, nodes))
    return Case(
        operation, size, sizes, limits=LIMITS, flags={"nodes": nodes, **more.pop("flags", {})}, **more
    )


def build(shape: CallShape) -> Plan:
    assert relayed.is_relayed(shape)
    return relayed.relayed(shape, plan_for)


@pytest.mark.parametrize("operation", KINDS)
@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_every_rank_gets_its_result(operation: str, nodes: tuple[tuple[int, ...], ...]) -> None:
    """And only first ranks use connections."""
    size = sum(map(len, nodes))
    promise = IN_ORDER if [*chain(*nodes)] == [*range(size)] else ANY_ORDER
    firsts = {node[0] for node in nodes}
    for root in range(size) if operation in ROOTED and size < 10 else (size // 2,):
        for count in (1, 3):
            case = case_of(operation, nodes, count, root=root, in_place=count == 3)
            plans = check(case, build, promise, capacity=1 if count == 1 else 1 << 60, seed=root)
            for rank, plan in enumerate(plans):
                rows = plan.table[plan.table[:, t.KIND] <= t.REDUCE]
                assert {*rows[:, t.PEER].tolist()} <= (firsts - {rank} if rank in firsts else set())


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
def test_blocks_of_different_sizes_that_all_ranks_know(operation: str) -> None:
    for nodes in NODES.values():
        size = sum(map(len, nodes))
        case = case_of(operation, nodes, [(5 * rank + 3) % 7 * (rank % 3 > 0) for rank in range(size)])
        check(case, build, ANY_ORDER)


@pytest.mark.parametrize(
    ("operation", "items"),
    [
        ("all_reduce", 30),
        ("reduce", 18),
        ("broadcast", 15),
        ("all_gather", 120),
        ("reduce_scatter", 120),
        ("gather", 30),
        ("scatter", 30),
        ("all_to_all", 240),
    ],
)
def test_each_byte_goes_to_another_node_once(operation: str, items: int) -> None:
    """Four nodes of two ranks with arrays or blocks of 5 items; 1.5 arrays a node are the least for an all_reduce."""
    plans = check(
        case_of(operation, tuple((2 * node, 2 * node + 1) for node in range(4)), 5), build, IN_ORDER
    )
    rows = [plan.table[plan.table[:, t.KIND] == t.SEND] for plan in plans]
    assert sum(int(each[:, t.NBYTES].sum()) for each in rows) == 4 * items
    assert max(int(each[:, t.PHASE].max(initial=0)) for each in rows) <= 2


def test_what_is_relayed() -> None:
    nodes, apart = NODES["even"], NODES["interleaved"]
    shape = CallShape("all_reduce", 4, 1, (RELAYED,), LIMITS, nodes=nodes)
    assert relayed.is_relayed(shape)
    assert chosen(shape) == "relayed"
    assert not relayed.is_relayed(shape._replace(nbytes=(RELAYED + 4,)))
    assert not relayed.is_relayed(shape._replace(limits=Limits(payload=0)))
    assert not relayed.is_relayed(shape._replace(operation="scan"))
    assert relayed.is_relayed(shape._replace(ordered=True))
    assert not relayed.is_relayed(shape._replace(ordered=True, size=6, nodes=apart))
    assert not relayed.is_relayed(shape._replace(nbytes=(0,)))
    gather = CallShape("gather", 4, 0, (RELAYED // 4,) * 4, LIMITS, nodes=nodes)
    assert relayed.is_relayed(gather)
    assert relayed.is_relayed(gather._replace(rank=1, nbytes=(RELAYED // 4,)))
    assert chosen(gather) == "direct"  # until all ranks know that all blocks have this size
    assert not relayed.is_relayed(gather._replace(nbytes=(4, 4, 4, 8)))
    assert not relayed.is_relayed(gather._replace(nbytes=(RELAYED // 4 + 4,) * 4))
    to_all = gather._replace(operation="all_to_all", nbytes=(RELAYED // 8,) * 8)
    assert relayed.is_relayed(to_all)
    assert not relayed.is_relayed(to_all._replace(nbytes=(RELAYED // 8 + 4,) * 8))


def test_relayed_data_are_chosen_for_small_calls_by_nodes() -> None:
    for operation in KINDS:
        case = case_of(operation, NODES["a surplus rank"], 2)
        check(case, plan_for, IN_ORDER)


FAULTS = {
    "a rank does not signal": (t.SIGNAL, 1, "deadlock"),
    "the first rank does not wait": (t.WAIT, 0, "instead of"),
    "the first rank does not signal the result": (t.SIGNAL, 0, "deadlock"),
    "a rank does not wait for the result": (t.WAIT, 1, "instead of"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_missing_step_is_found(operation: str, fault: str) -> None:
    kind, victim, found = FAULTS[fault]

    def without(shape: CallShape) -> Plan:
        plan = build(shape)
        left = plan.table[plan.table[:, t.KIND] != kind] if shape.rank == victim else plan.table
        return plan._replace(table=left.copy())

    def check_under_some_schedules() -> None:
        for seed in range(20):
            check(case_of(operation, ((0, 1), (2, 3)), 3), without, IN_ORDER, seed=seed)

    with pytest.raises(PlanError, match=found):
        check_under_some_schedules()


def test_the_operations_with_blocks_and_reductions_are_all_relayed_but_scans() -> None:
    assert {*REDUCTIONS, *WITH_BLOCKS, "broadcast"} - {"scan", "exscan"} == {*KINDS}


def test_a_first_rank_reduces_a_limited_number_of_bytes() -> None:
    """Eight ranks of a node give at most half of what one may give; blocks that are not reduced have no such limit."""
    nodes = tuple(tuple(range(8 * node, 8 * node + 8)) for node in range(2))
    shape = CallShape("all_reduce", 16, 1, (RELAYED // 2,), LIMITS, nodes=nodes)
    assert relayed.is_relayed(shape)
    assert not relayed.is_relayed(shape._replace(nbytes=(RELAYED // 2 + 4,)))
    assert relayed.is_relayed(shape._replace(operation="broadcast", nbytes=(RELAYED,)))


def test_a_rank_allocates_only_the_relay_memory_that_it_needs() -> None:
    """What it gives, and on the first rank of its node the result, which is behind all that it may give."""
    for operation, first, other in (
        ("all_reduce", [(RELAYED, 12)], [(0, 12)]),
        ("all_gather", [(RELAYED, 48)], [(0, 12)]),
        ("reduce_scatter", [(0, 48), (RELAYED, 24)], [(0, 48)]),
    ):
        shapes = [case_of(operation, NODES["even"], 3).shape(rank) for rank in range(2)]
        found = [PreparedPlan(0, shape, build(shape)).relays for shape in shapes]
        assert found == [first, other]


@pytest.mark.parametrize(("rank", "missing", "late"), [(0, [1, 2], [1, 2]), (0, [2], [2]), (1, [3], [0])])
def test_a_rank_names_the_ranks_whose_signals_it_awaits(
    rank: int, missing: list[int], late: list[int]
) -> None:
    """The lines of relayed data are those of the node's three ranks and of the result."""
    case = case_of("all_reduce", NODES["a surplus rank"], 3)
    prepared = PreparedPlan(0, case.shape(rank), build(case.shape(rank)))
    context = NetContext(5, rank, LIMITS, 1, 1, nodes=NODES["a surplus rank"])
    numbers = np.full(8, 7)  # of the last call that each line has, first those of headers
    numbers[[4 + line for line in missing]] = 6
    context.share([address_of(numbers[line:]) for line in range(8)], [0, 0, 0])
    first = prepared.plan.table[:, t.PHASE] == 0
    context.words[[w.STAGE, w.CALLS, w.AWAITED]] = w.RUN, 7, 1
    context.words[[w.RUNNING, w.PHASE, w.PHASE_END]] = prepared.address, 0, first.sum()
    assert context.waited_for == late
