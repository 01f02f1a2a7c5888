"""The formulas of choose.py against the plans, and the choices that follow from them."""

import numpy as np
import pytest

from fastcoll.net.tcp.plans import plan as t
from fastcoll.net.tcp.plans.choose import ALGORITHMS, Cost, cost
from fastcoll.net.tcp.plans.shape import Limits
from net.plan_cases import WITH_BLOCKS, Case

WIDE = Limits(payload=0, segment=1 << 40, at_once=1 << 50, peers=16)
ALL = [(operation, name) for operation, found in ALGORITHMS.items() for name in found]


def cost_of(plans):
    """Count, phase by phase, the work of the busiest rank, from all tables."""
    counts = {}
    for plan in plans:
        for phase in np.unique(plan.table[:, t.PHASE]):
            rows = plan.table[plan.table[:, t.PHASE] == phase]
            mine = np.array(
                [
                    any(rows[:, t.KIND] == t.SEND),
                    messages(rows),
                    max(moved(rows)),
                    sum(moved(rows)),
                    touched(rows),
                ]
            )
            counts[phase] = np.maximum(counts.get(phase, 0), mine)
    return Cost(*map(int, sum(counts.values())))


def messages(rows):
    return sum((rows[:, t.KIND] == kind).sum() for kind in (t.SEND, t.RECV, t.REDUCE))


def moved(rows):
    sent = rows[rows[:, t.KIND] == t.SEND][:, t.NBYTES].sum()
    received = rows[(rows[:, t.KIND] == t.RECV) | (rows[:, t.KIND] == t.REDUCE)][:, t.NBYTES].sum()
    return sent, received


def touched(rows):
    once = rows[(rows[:, t.KIND] == t.SOURCE) | (rows[:, t.KIND] == t.COPY)][:, t.NBYTES].sum()
    return once + 2 * rows[rows[:, t.KIND] == t.REDUCE][:, t.NBYTES].sum()


@pytest.mark.parametrize(("operation", "name"), ALL)
@pytest.mark.parametrize("size", [3, 8, 13, 16])
def test_a_formula_counts_what_the_plans_do(operation, name, size):
    count = 240 * size
    case = Case(
        operation,
        size,
        count // size if operation in WITH_BLOCKS else count,
        limits=WIDE,
        root=1,
        flags={"ordered": "ordered" in name},
    )
    plans = [ALGORITHMS[operation][name][0](case.shape(rank)) for rank in range(size)]
    predicted = cost(operation, name, size, 4 * count, WIDE)
    counted = cost_of(plans)
    assert counted.steps == predicted.steps
    assert counted.wire == pytest.approx(predicted.wire, rel=0.1)
    assert counted.handled == pytest.approx(predicted.handled, rel=0.1, abs=2 * 4 * count / size)
    # A small difference: blocks that cross the end of the circle are two messages.
    assert counted.messages == pytest.approx(predicted.messages, rel=0.4, abs=2)
    assert counted.touched == pytest.approx(predicted.touched, rel=0.1, abs=2 * 4 * count / size)
