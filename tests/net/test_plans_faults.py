"""The simulator finds what is wrong with a plan: faults are planted in good ones."""

import numpy as np
import pytest

from fastcoll.net.tcp.plans import direct
from fastcoll.net.tcp.plans.choose import plan_for
from fastcoll.net.tcp.plans.plan import (
    BUFFER,
    COPY,
    FOLD,
    KIND,
    NBYTES,
    OFFSET,
    OFFSET2,
    PAYLOAD,
    PEER,
    PHASE,
    RECV,
    REDUCE,
    SCRATCH,
    SEND,
    SOURCE,
)
from net.plan_cases import ANY_ORDER, LIMITS, Case, check
from net.simulate import PlanError


def changed(builder, victim, change):
    """A builder whose plan for one rank is changed."""

    def build(shape):
        plan = builder(shape)
        if shape.rank != victim:
            return plan
        table = change(plan.table.copy())
        return plan._replace(table=np.ascontiguousarray(table))

    return build


def first(kind, column, value, add=False, at=0):
    """Change a column of the first row, or a later one, of a kind."""

    def change(table):
        row = np.flatnonzero(table[:, KIND] == kind)[at]
        table[row, column] = table[row, column] + value if add else value
        return table

    return change


def without(kind):
    def change(table):
        return np.delete(table, np.flatnonzero(table[:, KIND] == kind)[0], 0)

    return change


def all_without(kind):
    return lambda table: table[table[:, KIND] != kind]


def later(table):
    """All is done one phase later than the peers do it."""
    table[:, PHASE] += 1
    return table


def receives_onto_what_is_sent(table):
    """A receive of phase 0 lands where phase 0 sends from."""
    sent = table[np.flatnonzero(table[:, KIND] == SEND)[0]]
    row = np.flatnonzero(table[:, KIND] == RECV)[0]
    table[row, BUFFER], table[row, OFFSET] = sent[BUFFER], sent[OFFSET]
    return table


def landing_twice(table):
    """What two ranks send arrives at the same place."""
    rows = np.flatnonzero(table[:, KIND] == RECV)[:2]
    table[rows[1], OFFSET] = table[rows[0], OFFSET]
    return table


def same_source(table):
    """A fold takes one operand twice, and another one never."""
    rows = np.flatnonzero(table[:, KIND] == SOURCE)[:3]
    scratch = [row for row in rows if table[row, BUFFER] == SCRATCH]
    table[scratch[1], OFFSET] = table[scratch[0], OFFSET]
    return table


def sources_swapped(table):
    rows = np.flatnonzero(table[:, KIND] == SOURCE)[:2]
    table[rows] = table[rows[::-1]]
    return table


def peers_swapped(table):
    """What came from one rank is folded in the place of another."""
    rows = np.flatnonzero(table[:, KIND] == RECV)[:2]
    table[rows, OFFSET] = table[rows[::-1], OFFSET]
    return table


LARGE = Case("all_reduce", 3, 40)
TWO = Case("all_reduce", 2, 40)
SMALL = Case("all_reduce", 3, 4)
FAULTS = {
    "a send is missing": (LARGE, without(SEND), "sent"),
    "a receive is missing": (LARGE, without(RECV), "received"),
    "the wrong peer": (LARGE, first(SEND, PEER, 0), "sent"),
    "to itself": (LARGE, first(SEND, PEER, 1), "peer"),
    "a phase too late": (LARGE, later, "sent"),
    "rows not in order": (LARGE, lambda table: table[::-1].copy(), "sorted|sources"),
    "a wrong size": (LARGE, first(SEND, NBYTES, 4, add=True), "sent|outside"),
    "a wrong offset": (LARGE, first(SEND, OFFSET, 4, add=True), "instead of"),
    "a cut item": (LARGE, first(SEND, OFFSET, 2, add=True), "cut"),
    "outside of the array": (LARGE, first(SEND, OFFSET, 1 << 20), "outside"),
    "before the array": (LARGE, first(FOLD, OFFSET, -4), "outside"),
    "no such buffer": (LARGE, first(SEND, BUFFER, 9), "no buffer 9"),
    "written while it is sent": (LARGE, receives_onto_what_is_sent, "in use twice"),
    "received into the same place twice": (LARGE, landing_twice, "in use twice"),
    "never folded": (LARGE, lambda table: all_without(FOLD)(all_without(SOURCE)(table)), "instead of"),
    "one source too few": (LARGE, first(FOLD, PEER, 2), "sources do not follow"),
    "a contribution twice": (LARGE, same_source, "instead"),
    "operands in the wrong order": (LARGE, sources_swapped, "instead of"),
    "results of two ranks exchanged": (LARGE, peers_swapped, "instead of"),
    "left and right exchanged": (TWO, first(REDUCE, OFFSET2, 0), "instead of"),
    "not reduced": (TWO, first(REDUCE, KIND, RECV), "instead of"),
    "an empty row": (LARGE, first(SEND, NBYTES, 0), "size"),
    "a payload is missing": (SMALL, without(PAYLOAD), "attached"),
    "a payload too large": (SMALL, first(PAYLOAD, NBYTES, 20), "too much|outside"),
    "two payloads for a rank": (SMALL, first(PAYLOAD, PEER, 0, at=0), "twice|attached"),
    "a payload after the meeting": (SMALL, first(PAYLOAD, PHASE, 0, at=1), "payload|sorted"),
    "a copy of the wrong place": (Case("all_gather", 3, 4), first(COPY, OFFSET2, 4, add=True, at=2), "instead of"),
    "an input is changed": (Case("reduce", 3, 40), first(FOLD, BUFFER, 3), "instead of"),
    "others' output is touched": (Case("reduce", 3, 40), first(FOLD, BUFFER, 2), "instead of"),
    "scratch is too small": (LARGE, None, "outside"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    case, change, found = FAULTS[fault]
    good = direct.all_reduce if case is TWO else plan_for
    check(case, good)  # it is right without
    if change is None:

        def builder(shape):
            plan = plan_for(shape)
            return plan._replace(scratch=plan.scratch - 1)
    else:
        builder = changed(good, 1, change)
    with pytest.raises(PlanError, match=found):
        check(case, builder)


def test_what_cannot_go_on_is_found():
    """Plans whose pairs match within a phase always go on; so the check of pairs is left out here."""
    import net.simulate as simulate

    case = Case("all_gather", 2, 40, limits=LIMITS)
    plans = [plan_for(case.shape(rank)) for rank in range(2)]
    late = plans[1].table.copy()
    late[late[:, KIND] == SEND, PHASE] += 1  # each waits for the other, and what is sent first has no room
    early = plans[0].table.copy()
    early[early[:, KIND] == RECV, PHASE] += 1
    early[early[:, KIND] == SEND, NBYTES] -= 4
    plans = [
        plan._replace(table=np.array(sorted(table.tolist())))
        for plan, table in zip(plans, (early, late), strict=True)
    ]
    arrays = [[simulate.rubbish(40) for _ in range(3)] for _ in range(2)]
    with pytest.raises(PlanError, match="deadlock"):
        simulate.simulate(plans, arrays, itemsize=4, capacity=1)


def test_a_rank_that_reduces_in_another_order_has_other_bits():
    two = Case("all_reduce", 2, 4, limits=LIMITS._replace(payload=0))
    check(two, plan_for, ANY_ORDER)
    with pytest.raises(PlanError, match="other bits"):
        check(two, changed(plan_for, 1, sources_swapped), ANY_ORDER)
