"""A rank in a long wait does not use its core."""

from __future__ import annotations

from functools import cache

import pytest
from faults import crew, victims


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
