"""How long a rank polls and yields in a wait; in a long one it does not use its core."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from faults import crew, victims

import fastcoll as dist
from fastcoll.kernels import waiting
from fastcoll.shm import context_layout as at


@cache
def outcomes() -> dict[str, list[crew.Outcome]]:
    """Run a world for each kind of wait at the same time; a rank that polls would get at least a third of a core."""
    worlds = [(victims.wait_for_long, 2, what) for what in victims.LONG_WAITS]
    return dict(zip(victims.LONG_WAITS, crew.run_together(worlds), strict=True))


@pytest.mark.timed
@pytest.mark.parametrize("what", victims.LONG_WAITS)
def test_under_a_fifth_of_a_core_after_one_second(what: str) -> None:
    for outcome in outcomes()[what]:
        assert outcome.result is not None, outcome.error
    share = outcomes()[what][0].result
    assert share < 0.2, f"{share:.0%} of a core"


@pytest.mark.ranks(2)
def test_only_a_caller_with_a_core_of_its_own_yields_for_long():
    """A thread that runs calls in the background would take the core from its owner's computation."""
    words = dist.group.WORLD.backend.context.words
    waits = dict(zip(("caller", "background"), words[[at.FULL_WAIT + 1, at.PENDING_WAIT + 1]], strict=True))
    dist.barrier()
    assert words[at.BACKOFF + waiting.YIELDS] == waits["caller"]
    dist.all_reduce(np.ones(1 << 20, np.float32), async_op=True).wait()  # in the background, as it is large
    assert words[at.BACKOFF + waiting.YIELDS] == waits["background"]
    has_a_core = words[at.FULL_WAIT] > 0
    assert waits["caller"] == waits["background"] * (15 if has_a_core else 1)
