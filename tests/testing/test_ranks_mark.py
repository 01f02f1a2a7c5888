"""The arguments of the mark: valid ones are parsed, others are refused with a cure."""

from __future__ import annotations

from typing import Any

import pytest

from fastcoll.errors import UsageError
from fastcoll.testing.mark import RanksMark


def test_defaults_and_options() -> None:
    assert RanksMark.parse((1, 4), {}) == RanksMark((1, 4), True, None, 60.0, False, frozenset())
    options = {"init": False, "backend": "shm", "timeout": 5, "fresh": True, "may_die": [0, 2]}
    assert RanksMark.parse((3,), options) == RanksMark((3,), False, "shm", 5, True, frozenset([0, 2]))
    assert RanksMark.parse((2, 3), {"fresh": True, "may_die": True}).may_die == {0, 1, 2}


@pytest.mark.parametrize("sizes", [(), (0,), (-1,), ("2",), (2.0,), (True,), (2, 2), ([1, 2],)])
def test_world_sizes_are_different_positive_integers(sizes: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match="give different world sizes from 1 up"):
        RanksMark.parse(sizes, {})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"colour": 1}, "unknown option 'colour'; known are init, backend, timeout, fresh, may_die"),
        ({"timeout": 0}, "timeout is a number of seconds above 0, got 0"),
        ({"timeout": "5"}, "timeout is a number of seconds above 0, got '5'"),
        ({"timeout": True}, "timeout is a number of seconds"),
        ({"timeout": float("nan")}, "timeout is a number of seconds"),
        ({"may_die": [0]}, "may_die needs fresh=True"),
        ({"may_die": [2], "fresh": True}, "may_die takes ranks from 0 to 1 or True for any"),
        ({"may_die": 1, "fresh": True}, "may_die takes ranks from 0 to 1 or True for any, got 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        RanksMark.parse((2,), options)
