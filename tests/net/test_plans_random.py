"""Plans for any possible shape: worlds, sizes, roots, limits, schedules and connections drawn at random."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll.net.tcp.plans.choose import plan_for
from fastcoll.net.tcp.plans.shape import Limits
from net.plan_cases import ANY_ORDER, IN_ORDER, ONE_PASS, OPERATIONS, REDUCTIONS, WITH_BLOCKS, Case, check


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


@settings(max_examples=80, deadline=None)
@given(calls(), st.sampled_from([1, 2, 7, 1 << 60]), st.integers(0, 1 << 30))
def test_any_call(case, capacity, seed):
    check(case, plan_for, promise(case), capacity=capacity, seed=seed)


def promise(case):
    if case.operation not in REDUCTIONS or (case.flags["ordered"] and case.size <= 16):
        return ONE_PASS
    return IN_ORDER if case.flags["ordered"] or case.size <= 16 else ANY_ORDER
