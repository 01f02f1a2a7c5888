"""Backward passes that fail, and what is left of contexts that were left or lost."""

import math

import pytest
from faults import crew

from rpc import autograd_victims as victims


@pytest.mark.parametrize("victim", ["w1", "w2"])
@pytest.mark.parametrize(
    "within",
    [pytest.param(math.inf, marks=pytest.mark.long), pytest.param(crew.WITHIN, marks=pytest.mark.timed)],
)
def test_a_worker_that_dies_in_backward_is_named(victim, within):
    with crew.nothing_left():
        first = crew.run(victims.one_dies_in_backward, 3, victim)[0]
    assert first.result, first.error
    assert victim in first.result["said"]
    assert first.result["took"] < within
    assert first.result["again"] == [2.0, 2.0]


@pytest.mark.long
def test_contexts_of_a_dead_maker_end():
    outcomes = crew.run(victims.the_maker_dies, 2)
    assert outcomes[1].result == [1], outcomes[1].error
