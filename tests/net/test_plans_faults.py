"""The simulator finds faulty plans: faults are planted in good ones."""

import numpy as np
import pytest

from fastcoll.net.tcp.plans import direct
from fastcoll.net.tcp.plans import plan as t
from fastcoll.net.tcp.plans.choose import plan_for
from net.plan_cases import ANY_ORDER, LIMITS, Case, check
from net.simulate import PlanError, rubbish, simulate


def changed(builder, victim, change):
    """Return a builder whose plan for one rank is changed."""

    def build(shape):
        plan = builder(shape)
        if shape.rank != victim:
            return plan
        return plan._replace(table=np.ascontiguousarray(change(plan.table.copy())))

    return build


def first(kind, column, value, add=False, at=0):
    """Change a column of the first row, or a later row, of a kind."""

    def change(table):
        row = np.flatnonzero(table[:, t.KIND] == kind)[at]
        table[row, column] = table[row, column] + value if add else value
        return table

    return change


def without(*kinds, most=None):
    """Delete the rows of some kinds, or the first ones of them."""
    return lambda table: np.delete(table, np.flatnonzero(np.isin(table[:, t.KIND], kinds))[:most], 0)


def exchanged(kind, columns=slice(None)):
    """Exchange the first two rows of a kind, or only these columns of them."""

    def change(table):
        rows = np.flatnonzero(table[:, t.KIND] == kind)[:2]
        table[rows, columns] = table[rows[::-1], columns]
        return table

    return change


def later(table):
    """Do everything one phase later than the peers."""
    table[:, t.PHASE] += 1
    return table


def receives_onto_what_is_sent(table):
    """Receive in phase 0 into memory that phase 0 sends."""
    sent = table[np.flatnonzero(table[:, t.KIND] == t.SEND)[0]]
    row = np.flatnonzero(table[:, t.KIND] == t.RECV)[0]
    table[row, t.BUFFER], table[row, t.OFFSET] = sent[t.BUFFER], sent[t.OFFSET]
    return table


def twice(kind, buffer=None):
    """Give the second row of a kind, a receive or an operand, the location of the first one."""

    def change(table):
        chosen = (table[:, t.KIND] == kind) & (buffer is None or table[:, t.BUFFER] == buffer)
        rows = np.flatnonzero(chosen)[:2]
        table[rows[1], t.OFFSET] = table[rows[0], t.OFFSET]
        return table

    return change


LARGE = Case("all_reduce", 3, 40)
TWO = Case("all_reduce", 2, 40)
SMALL = Case("all_reduce", 3, 4)
FAULTS = {
    "a send is missing": (LARGE, without(t.SEND, most=1), "sent"),
    "a receive is missing": (LARGE, without(t.RECV, most=1), "received"),
    "the wrong peer": (LARGE, first(t.SEND, t.PEER, 0), "sent"),
    "to itself": (LARGE, first(t.SEND, t.PEER, 1), "peer"),
    "a phase too late": (LARGE, later, "sent"),
    "rows not in order": (LARGE, lambda table: table[::-1].copy(), "sorted|sources"),
    "a wrong size": (LARGE, first(t.SEND, t.NBYTES, 4, add=True), "sent|outside"),
    "a wrong offset": (LARGE, first(t.SEND, t.OFFSET, 4, add=True), "instead of"),
    "a cut item": (LARGE, first(t.SEND, t.OFFSET, 2, add=True), "cut"),
    "outside of the array": (LARGE, first(t.SEND, t.OFFSET, 1 << 20), "outside"),
    "before the array": (LARGE, first(t.FOLD, t.OFFSET, -4), "outside"),
    "no such buffer": (LARGE, first(t.SEND, t.BUFFER, 9), "no buffer 9"),
    "written while it is sent": (LARGE, receives_onto_what_is_sent, "in use twice"),
    "received into the same place twice": (LARGE, twice(t.RECV), "in use twice"),
    "never folded": (LARGE, without(t.FOLD, t.SOURCE), "instead of"),
    "one source too few": (LARGE, first(t.FOLD, t.PEER, 2), "sources do not follow"),
    "a contribution twice": (LARGE, twice(t.SOURCE, t.SCRATCH), "instead"),
    "operands in the wrong order": (LARGE, exchanged(t.SOURCE), "instead of"),
    "results of two ranks exchanged": (LARGE, exchanged(t.RECV, t.OFFSET), "instead of"),
    "left and right exchanged": (TWO, first(t.REDUCE, t.OFFSET2, 0), "instead of"),
    "not reduced": (TWO, first(t.REDUCE, t.KIND, t.RECV), "instead of"),
    "an empty row": (LARGE, first(t.SEND, t.NBYTES, 0), "size"),
    "a payload is missing": (SMALL, without(t.PAYLOAD, most=1), "attached"),
    "a payload too large": (SMALL, first(t.PAYLOAD, t.NBYTES, 20), "too much|outside"),
    "two payloads for a rank": (SMALL, first(t.PAYLOAD, t.PEER, 0, at=0), "twice|attached"),
    "a payload after the meeting": (SMALL, first(t.PAYLOAD, t.PHASE, 0, at=1), "payload|sorted"),
    "a copy of the wrong place": (Case("all_gather", 3, 4), first(t.COPY, t.OFFSET2, 4, add=True, at=2), "instead of"),
    "an input is changed": (Case("reduce", 3, 40), first(t.FOLD, t.BUFFER, 3), "instead of"),
    "others' output is touched": (Case("reduce", 3, 40), first(t.FOLD, t.BUFFER, 2), "instead of"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    case, change, found = FAULTS[fault]
    good = direct.all_reduce if case is TWO else plan_for
    check(case, good)  # the plan is right without the fault
    with pytest.raises(PlanError, match=found):
        check(case, changed(good, 1, change))


def test_scratch_that_is_too_small_is_found():
    def build(shape):
        plan = plan_for(shape)
        return plan._replace(scratch=plan.scratch - 1)

    with pytest.raises(PlanError, match="outside"):
        check(LARGE, build)


def test_a_deadlock_is_found():
    """Plans whose pairs match within a phase never block; so the check of pairs is left out here."""
    case = Case("all_gather", 2, 40, limits=LIMITS)
    plans = [plan_for(case.shape(rank)) for rank in range(2)]
    # Each rank waits for the other, and the first send has no space.
    late = plans[1].table.copy()
    late[late[:, t.KIND] == t.SEND, t.PHASE] += 1
    early = plans[0].table.copy()
    early[early[:, t.KIND] == t.RECV, t.PHASE] += 1
    early[early[:, t.KIND] == t.SEND, t.NBYTES] -= 4
    plans = [
        plan._replace(table=np.array(sorted(table.tolist())))
        for plan, table in zip(plans, (early, late), strict=True)
    ]
    arrays = [[rubbish(40) for _ in range(3)] for _ in range(2)]
    with pytest.raises(PlanError, match="deadlock"):
        simulate(plans, arrays, itemsize=4, capacity=1)


def test_another_order_of_reduction_is_found():
    two = Case("all_reduce", 2, 4, limits=LIMITS._replace(payload=0))
    check(two, plan_for, ANY_ORDER)
    with pytest.raises(PlanError, match="other bits"):
        check(two, changed(plan_for, 1, exchanged(t.SOURCE)), ANY_ORDER)
