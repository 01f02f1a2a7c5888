"""The plans that calls take, simulated: every operation, size and root; and the choices of many ranks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll.core.travel import Travel
from fastcoll.net.tcp.plans import direct, narrowed
from fastcoll.net.tcp.plans import plan as t
from fastcoll.net.tcp.plans.choose import ALGORITHMS, EXCHANGED, cheapest, chosen, plan_for
from fastcoll.net.tcp.plans.shape import MEET_RANKS, CallShape, Limits, default_limits
from net.plan_cases import (
    ANY_ORDER,
    IN_ORDER,
    LIMITS,
    ONE_PASS,
    OPERATIONS,
    REDUCTIONS,
    ROOTED,
    WITH_BLOCKS,
    Case,
    check,
)

COUNTS = (0, 1, 4, 7, 40, 131)  # items; 4 are attached, 7 are sent after the meeting, 131 in segments
SIZES = (
    *range(1, 7),
    8,
    13,
    MEET_RANKS,
)  # larger ones take most of the time; `test_any_call` draws every size
MANY = Limits(payload=0, segment=256, at_once=1 << 14, peers=5)


def roots(operation, size):
    return range(size) if operation in ROOTED and size <= 5 else (size // 2,)


def promise(case):
    """Return the order that plan_for promises for the ranks of a reduction."""
    ordered = case.flags.get("ordered", False)
    if case.operation not in REDUCTIONS or (ordered and case.size <= 16):
        return ONE_PASS
    return IN_ORDER if ordered or case.size <= 16 else ANY_ORDER


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("size", SIZES)
def test_few_ranks(operation, size):
    for count in COUNTS if size <= 5 else COUNTS[1:-1]:
        for root in roots(operation, size):
            case = Case(operation, size, count, itemsize=4, root=root, in_place=bool(count % 2))
            # An unordered scan continues from the prefix before: ((a b) c). One item is enough of a buffer.
            order = IN_ORDER if operation.endswith("scan") else ONE_PASS
            check(case, plan_for, order, capacity=1 if count == 40 else 1 << 60, seed=count)
    if operation in REDUCTIONS:
        for count in (1, 131):
            check(Case(operation, size, count, flags={"ordered": True}), plan_for, ONE_PASS)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("size", [*SIZES, 17])
def test_arrays_that_travel_as_items_are_reduced_in_one_pass(size, keeps, monkeypatch):
    monkeypatch.setattr(narrowed, "SEGMENT", 24)
    plans = narrowed.plans_of(Travel("as it is", 1, np.dtype("V4")), keeps)
    for count in (0, 1, 7, 131, 300):
        made = check(
            Case("all_reduce", size, count), plans, capacity=1 if count == 131 else 1 << 60, seed=count
        )
        assert all(plan.scratch <= 5 * size * 64 for plan in made)


@pytest.mark.parametrize(
    ("operation", "ordered"),
    [*((each, False) for each in OPERATIONS), *((each, True) for each in REDUCTIONS)],
)
@pytest.mark.parametrize("size", [17, 33, pytest.param(64, marks=pytest.mark.long)])
def test_many_ranks(operation, size, ordered):
    for count in (1, 3 if operation in WITH_BLOCKS else 100):
        case = Case(operation, size, count, root=size // 3, limits=MANY, flags={"ordered": ordered})
        check(case, plan_for, promise(case))


@pytest.mark.parametrize("operation", WITH_BLOCKS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 17])
def test_uneven_sizes(operation, size):
    """By rank, or by pair; some pairs attach their data and others do not."""
    sizes = [(5 * rank + 3) % 11 * (rank % 3) for rank in range(size)]
    if operation == "all_to_all":
        sizes = [[(3 * giver + taker) % 7 * (taker % 2) for taker in range(size)] for giver in range(size)]
    for root in {0, size - 1}:
        case = Case(operation, size, sizes, root=root)
        plans = check(case, plan_for, promise(case))
    kinds = {int(kind) for plan in plans for kind in plan.table[:, t.KIND]}
    assert size == 1 or operation != "all_to_all" or t.PAYLOAD in kinds


def promised(operation, name):
    """Return the order that an algorithm promises for the ranks of a reduction."""
    is_direct = name == "complete arrays" or (name == "direct" and "scan" not in operation)
    if operation not in REDUCTIONS or is_direct:
        return ONE_PASS
    in_order = ("recursive doubling", "halving", "doubling", "direct", "ordered tree")
    return IN_ORDER if name in in_order else ANY_ORDER


@pytest.mark.long
@pytest.mark.parametrize(
    ("operation", "name"), [(each, name) for each in ALGORITHMS for name in ALGORITHMS[each]]
)
def test_an_algorithm_gives_the_result(operation, name):
    """For any number of ranks, also those for which it is not chosen, and through connections with small buffers."""
    build, flags = ALGORITHMS[operation][name][0], {"ordered": name == "ordered tree"}
    for size in range(2, 18):
        tight = Limits(0, 7 * size, 90, size // 3 + 1), 1 + size % 5
        for count in (1, 13) if size > 5 else (1, 2, 8, 13, 61):
            for root in {0, size // 2, size - 1} if size <= 5 else {size - 1}:
                case = Case(operation, size, count, root=root, in_place=bool(count % 2), flags=flags)
                for limits, capacity in (tight,) if size > 5 else ((LIMITS, 1 << 60), tight):
                    limited = replace(case, limits=limits)
                    check(limited, build, promised(operation, name), capacity=capacity, seed=size)
                if name == "direct" and operation.endswith("scan"):
                    check(replace(case, flags={"ordered": True}), direct.scan, ONE_PASS)


@st.composite
def limits(draw, payload):
    return Limits(payload, draw(st.integers(1, 80)), draw(st.integers(1, 400)), draw(st.integers(1, 9)))


@st.composite
def calls(draw):
    operation = draw(st.sampled_from(OPERATIONS))
    size = draw(st.integers(1, 18))
    counts = st.integers(0, 40)
    sizes = draw(counts)
    if operation in WITH_BLOCKS and draw(st.booleans()):
        row = st.lists(counts, min_size=size, max_size=size)
        sizes = draw(st.lists(row, min_size=size, max_size=size) if operation == "all_to_all" else row)
    return Case(
        operation,
        size,
        sizes,
        itemsize=draw(st.sampled_from([1, 4, 8])),
        root=draw(st.integers(0, size - 1)),
        in_place=draw(st.booleans()),
        limits=draw(limits(draw(st.sampled_from([0, 8, 64])) if size <= 16 else 0)),
        flags={"ordered": draw(st.booleans())},
    )


@settings(max_examples=50, deadline=None)
@given(calls(), st.sampled_from([1, 2, 7, 1 << 60]), st.integers(0, 1 << 30))
def test_any_call(case, capacity, seed):
    """Worlds, sizes, roots, limits, schedules and connections drawn at random."""
    check(case, plan_for, promise(case), capacity=capacity, seed=seed)


@pytest.mark.parametrize("operation", [*OPERATIONS, "barrier"])
def test_calls_without_bytes_have_only_a_meeting(operation):
    for size in (1, 2, 5):
        plans = check(Case(operation, size, 0), plan_for)
        assert all(len(plan.table) == plan.scratch == 0 for plan in plans)


def shape_of(operation, nbytes, size=2, **flags):
    return CallShape(operation, size, 0, (nbytes,), default_limits(size), itemsize=4, **flags)


def test_two_ranks_exchange_complete_small_arrays():
    assert chosen(shape_of("all_reduce", default_limits(2).payload)) == "attached"
    limits = default_limits(2)._replace(payload=2048)
    small, large = (CallShape("all_reduce", 2, 0, (n,), limits, 4) for n in (EXCHANGED, EXCHANGED + 4))
    assert chosen(small) == "recursive doubling"
    assert chosen(large) == "direct"


def test_many_ranks_choose_by_size():
    sizes = (8, 64 << 10, 1 << 20, 1 << 30)
    assert [cheapest(shape_of("broadcast", n, 64)) for n in sizes] == [
        "tree", "scatter and circulant", "scatter and circulant", "chain",
    ]  # fmt: skip
    found = [cheapest(shape_of("all_reduce", n, 100)) for n in sizes]
    assert found[0] == "recursive doubling"
    assert found[-2:] == ["circulant", "ring"]
    assert cheapest(shape_of("all_reduce", 1 << 30, 100, ordered=True)) == "direct"


@pytest.mark.parametrize("size", [2, 7, 16, 17, 40])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce", "scan", "broadcast"])
def test_all_ranks_choose_alike(operation, size):
    for nbytes in (4, 5000, 1 << 20):
        found = {chosen(shape_of(operation, nbytes, size)._replace(rank=rank)) for rank in range(size)}
        assert len(found) == 1


def test_plans_are_made_once_and_cannot_be_changed():
    plan = plan_for(shape_of("all_reduce", 1 << 20))
    assert plan_for(shape_of("all_reduce", 1 << 20)) is plan
    with pytest.raises(ValueError, match="read-only"):
        plan.table[0, 0] = 1


def test_limits_leave_room_for_every_peer():
    for size in range(2, MEET_RANKS + 1):
        payload = default_limits(size).payload
        assert payload >= 2048
        assert payload * (size - 1) <= max(64 << 10, 2048 * (size - 1))
    assert default_limits(MEET_RANKS + 1).payload == default_limits(1).payload == 0


def test_segments_shrink_where_many_ranks_send_at_once():
    limits = default_limits(64)
    shape = shape_of("all_reduce", 1 << 30, 64, ordered=True)
    assert direct.all_reduce(shape._replace(nbytes=(64 << 20,))).scratch <= 1.1 * limits.at_once


def test_two_ranks_send_each_other_an_array_once():
    for count in (40, 131, 1000):
        for plan in check(Case("all_reduce", 2, count), plan_for):
            assert int(np.sum(plan.table[plan.table[:, t.KIND] == t.SEND][:, t.NBYTES])) == 4 * count
