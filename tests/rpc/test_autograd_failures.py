"""Backward passes that fail, and the end of contexts that were left or whose maker died."""

import math

import pytest
from faults import crew

from rpc import autograd_victims as victims

DEADLINE = 200.0  # each process imports torch


@pytest.mark.parametrize(
    ("dying", "within"),
    [
        pytest.param(["w1", "w2"], math.inf, marks=pytest.mark.long),
        pytest.param(["w2"], crew.WITHIN, marks=pytest.mark.timed),
    ],
)
def test_a_worker_that_dies_in_backward_is_named(dying, within):
    with crew.nothing_left():
        worlds = crew.run_together([(victims.one_dies_in_backward, 3, each) for each in dying], DEADLINE)
    for victim, (first, *_) in zip(dying, worlds, strict=True):
        assert first.result, first.error
        assert victim in first.result["error"]
        assert first.result["took"] < within
        assert first.result["again"] == [2.0, 2.0]


@pytest.mark.long
def test_contexts_of_a_dead_maker_end():
    outcomes = crew.run(victims.the_maker_dies, 2, deadline=DEADLINE)
    assert outcomes[1].result == [1], outcomes[1].error
