"""A rank that waits for long leaves its core to others."""

from __future__ import annotations

from functools import cache

import pytest
from faults import crew, victims


@cache
def outcomes() -> dict[str, list[crew.Outcome]]:
    """Of a world for each kind of wait, at once: whoever kept a core busy would have at least a third of it."""
    worlds = [(victims.wait_for_long, 2, what) for what in victims.LONG_WAITS]
    return dict(zip(victims.LONG_WAITS, crew.run_together(worlds), strict=True))


@pytest.mark.timed
@pytest.mark.parametrize("what", victims.LONG_WAITS)
def test_under_a_fifth_of_a_core_after_one_second(what: str) -> None:
    for outcome in outcomes()[what]:
        assert outcome.result is not None, outcome.error
    share = outcomes()[what][0].result
    assert share < 0.2, f"{share:.0%} of a core"
