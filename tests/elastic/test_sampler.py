"""Sampler: each sample once per epoch, although the world changes and steps are lost."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from fastcoll import UsageError
from fastcoll.elastic import Sampler, State, sampler


def test_a_disturbed_run_commits_the_steps_of_an_undisturbed_one() -> None:
    for seed in range(100):
        dice = random.Random(seed)
        follow_a_course(dice.randint(1, 40), dice.randint(1, 15), dice.random() < 0.8, seed)


def follow_a_course(n: int, batch: int, shuffle: bool, seed: int) -> None:
    """Run with ranks that join and die and steps that are lost; the committed steps must be those of a calm run."""
    dice = random.Random(seed)
    calm = Sampler(n, batch, shuffle, seed)
    wanted = [sorted(step.tolist()) for _ in range(3) for step in calm]
    with pytest.MonkeyPatch.context() as patch:
        size = dice.randint(1, 5)
        patch.setattr(sampler, "is_initialized", lambda: True)
        patch.setattr(sampler, "get_world_size", lambda: size)
        states: list[Any] = [State(s=Sampler(n, batch, shuffle, seed)) for _ in range(5)]
        done: list[list[int]] = []
        while states[0].s.epoch < 3:
            its = [iter(state.s) for state in states[:size]]
            while True:
                shares = []
                for rank, it in enumerate(its):
                    patch.setattr(sampler, "get_rank", lambda rank=rank: rank)
                    shares.append(next(it, None))
                if shares[0] is None:
                    assert all(share is None for share in shares)
                    break
                parts = [share.tolist() for share in shares]
                sizes = [len(part) for part in parts]
                assert sizes == sorted(sizes, reverse=True)
                assert sizes[0] - sizes[-1] <= 1
                assert {state.s.count for state in states[:size]} == {sum(sizes)}
                if dice.random() < 0.2:  # a rank dies before the commit
                    size = dice.randint(1, 5)
                    for state in states:
                        state.restore()
                    break
                done.append(sorted(index for part in parts for index in part))
                for state in states[:size]:
                    state.commit()
                if dice.random() < 0.2:  # joiners copy the state
                    size = dice.randint(1, 5)
                    for state in states:
                        state.s.load_state_dict(states[0].s.state_dict())
                        state.commit()
                    break
            for state in states:  # a rank that was not in the step
                state.s.load_state_dict(states[0].s.state_dict())
    assert done == wanted


def test_orders() -> None:
    a, b = Sampler(50, 50, seed=1), Sampler(50, 50, seed=1)
    (first,), (second,) = a, a
    assert sorted(first) == sorted(second) == list(range(50))
    assert first.tolist() != second.tolist()
    assert next(iter(b)).tolist() == first.tolist()
    assert next(iter(Sampler(50, 50, seed=2))).tolist() != first.tolist()
    assert [step.tolist() for step in Sampler(5, 2, shuffle=False)] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("wrong", [{"seed": 2}, {"shuffle": False}])
def test_the_order_of_a_loaded_state_continues(wrong: dict[str, Any]) -> None:
    """Otherwise an epoch that goes on in another order, or on a rank with another seed, takes samples twice."""
    whole, first = Sampler(20, 5, seed=1), Sampler(20, 5, seed=1)
    wanted = [step.tolist() for step in whole]
    next(iter(first))
    rest = Sampler(20, 5, **wrong)
    rest.load_state_dict(first.state_dict())
    assert [step.tolist() for step in rest] == wanted[1:]


def test_wrong_arguments() -> None:
    with pytest.raises(UsageError, match="seed is -1; give 0 or more"):
        Sampler(3, 1, seed=-1)
    for n, batch in ((0, 1), (1, 0), (1.5, 1)):
        with pytest.raises(UsageError):
            Sampler(n, batch)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="of 3 samples in steps of 1 cannot"):
        Sampler(3, 1).load_state_dict(Sampler(3, 2).state_dict())
    assert np.concatenate(list(Sampler(3, 2))).size == 3
