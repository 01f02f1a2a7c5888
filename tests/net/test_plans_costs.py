"""The formulas of choose.py against the plans, and the choices that follow from them."""

import numpy as np
import pytest

from fastcoll.net.tcp.plans import plan as t
from fastcoll.net.tcp.plans.choose import ALGORITHMS, Cost, cost
from fastcoll.net.tcp.plans.shape import Limits
from net.plan_cases import WITH_BLOCKS, Case

WIDE = Limits(payload=0, segment=1 << 40, at_once=1 << 50, peers=16)
ALL = [(operation, name) for operation, found in ALGORITHMS.items() for name in found]


def nbytes_of(rows, *kinds):
    return int(rows[np.isin(rows[:, t.KIND], kinds)][:, t.NBYTES].sum())


def cost_of(plans):
    """Count, phase by phase, the work of the busiest rank, from all tables."""
    counts = {}
    for plan in plans:
        for phase in np.unique(plan.table[:, t.PHASE]):
            rows = plan.table[plan.table[:, t.PHASE] == phase]
            sent, received = nbytes_of(rows, t.SEND), nbytes_of(rows, t.RECV, t.REDUCE)
            messages = np.isin(rows[:, t.KIND], (t.SEND, t.RECV, t.REDUCE)).sum()
            touched = nbytes_of(rows, t.SOURCE, t.COPY) + 2 * nbytes_of(rows, t.REDUCE)
            mine = np.array([sent > 0, messages, max(sent, received), sent + received, touched])
            counts[phase] = np.maximum(counts.get(phase, 0), mine)
    return Cost(*map(int, sum(counts.values())))


@pytest.mark.parametrize(("operation", "name"), ALL)
@pytest.mark.parametrize("size", [3, 8, 13, 16])
def test_a_formula_counts_what_the_plans_do(operation, name, size):
    count = 240 * size
    items, flags = count // size if operation in WITH_BLOCKS else count, {"ordered": "ordered" in name}
    case = Case(operation, size, items, limits=WIDE, root=1, flags=flags)
    plans = [ALGORITHMS[operation][name][0](case.shape(rank)) for rank in range(size)]
    predicted = cost(operation, name, size, 4 * count, WIDE)
    counted = cost_of(plans)
    assert counted.steps == predicted.steps
    assert counted.wire == pytest.approx(predicted.wire, rel=0.1)
    assert counted.handled == pytest.approx(predicted.handled, rel=0.1, abs=2 * 4 * count / size)
    # A small difference: blocks that cross the end of the circle are two messages.
    assert counted.messages == pytest.approx(predicted.messages, rel=0.4, abs=2)
    assert counted.touched == pytest.approx(predicted.touched, rel=0.1, abs=2 * 4 * count / size)
