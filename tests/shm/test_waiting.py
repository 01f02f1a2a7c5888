"""How long a rank polls and yields in a wait; in a long one it does not use its core."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from faults import crew, victims
from programs import until

import fastcoll as dist
from fastcoll.kernels import waiting
from fastcoll.shm import context_layout as at
from fastcoll.shm import rings


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


@pytest.mark.ranks(2)
def test_only_a_caller_yields_for_long_in_a_message(rank: int):
    table = dist.group.WORLD.backend.pipe.table
    caller, background = (int(table[word]) for word in (waiting.YIELDS, rings.BACKGROUND_YIELDS))
    assert caller == background * (15 if table[waiting.SPINS] > 0 else 1)
    x = np.ones(4)
    if rank == 0:
        work = dist.irecv(x[::2], 1)  # by the engine, whose thread waits, as the array is strided
        until(lambda: table[waiting.YIELDS] == background)
    dist.barrier()
    if rank == 1:
        dist.send(x[:2], 0)
    else:
        work.wait()
        until(lambda: table[waiting.YIELDS] == caller)
    dist.barrier()
