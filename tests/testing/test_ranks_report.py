"""The mark's arguments; the result of a test, and its report, from the ranks' results."""

from __future__ import annotations

from typing import Any

import pytest

from fastcoll.errors import UsageError
from fastcoll.testing.mark import (
    RankResult,
    RanksMark,
    failure_text,
    frames_of_the_test,
    name_ranks,
    skip_reason,
    xfail_reason,
)


def test_defaults_and_options() -> None:
    assert RanksMark.parse((1, 4), {}) == RanksMark((1, 4), True, None, 60.0, False, frozenset())
    options = {"init": False, "backend": "shm", "timeout": 5, "fresh": True, "may_die": [0, 2]}
    assert RanksMark.parse((3,), options) == RanksMark((3,), False, "shm", 5, True, frozenset([0, 2]))
    assert RanksMark.parse((2, 3), {"fresh": True, "may_die": True}).may_die == {0, 1, 2}
    assert RanksMark.parse((2, 3), {"fresh": True, "may_die": iter([1])}).may_die == {1}


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


@pytest.mark.parametrize(
    ("ranks", "world_size", "name"),
    [
        ([0], 1, "rank 0 of 1"),
        ([2], 4, "rank 2 of 4"),
        ([0, 1], 2, "all 2 ranks"),
        ([0, 3], 4, "ranks 0 and 3 of 4"),
        ([0, 1, 3], 4, "ranks 0, 1 and 3 of 4"),
    ],
)
def test_name_ranks(ranks: list[int], world_size: int, name: str) -> None:
    assert name_ranks(ranks, world_size) == name


def test_nothing_failed() -> None:
    assert failure_text([RankResult(0, "passed"), RankResult(1, "killed")], 2) == ""


def test_failures_with_one_cause_are_shown_once() -> None:
    results = [
        RankResult(0, "failed", "E: x", "trace with rank = 0", cause="file:1 x"),
        RankResult(1, "failed", "E: y", "another trace", cause="file:2 y"),
        RankResult(2, "failed", "E: x", "trace with rank = 2", cause="file:1 x"),
    ]
    assert failure_text(results, 3) == (
        "ranks 0 and 2 of 3: E: x\ntrace with rank = 0\n\nrank 1 of 3: E: y\nanother trace"
    )


def test_consequences_are_one_line_after_the_cause() -> None:
    results = [
        RankResult(0, "failed", "PeerDiedError: gone", "long trace", secondary=True),
        RankResult(1, "died", "its process ended"),
    ]
    assert failure_text(results, 2) == (
        "rank 1 of 2: its process ended\n\nrank 0 of 2, as a consequence: PeerDiedError: gone"
    )


def test_a_consequence_is_shown_in_full_when_there_is_no_cause() -> None:
    results = [
        RankResult(0, "failed", "PeerDiedError: gone", "trace", secondary=True),
        RankResult(1, "killed"),
    ]
    assert failure_text(results, 2) == "rank 0 of 2: PeerDiedError: gone\ntrace"


def test_ranks_skip_together() -> None:
    skipped, passed, killed = (
        RankResult(0, "skipped", "why"),
        RankResult(1, "passed"),
        RankResult(2, "killed"),
    )
    assert skip_reason([skipped, killed]) == "why"
    assert skip_reason([skipped, passed]) is None
    assert skip_reason([passed]) is None
    assert failure_text([skipped, killed], 2) == ""
    assert "rank 0 of 2 skipped the test (why), others ran it" in failure_text([skipped, passed], 2)


def test_an_expected_failure_explains_its_consequences_and_no_others() -> None:
    expected, passed = RankResult(0, "xfailed", "why"), RankResult(1, "passed")
    secondary = RankResult(1, "failed", "PeerDiedError: gone", secondary=True)
    assert xfail_reason([expected, passed]) == xfail_reason([expected, secondary]) == "why"
    assert xfail_reason([expected, RankResult(1, "failed", "ValueError: no")]) is None
    assert xfail_reason([secondary]) is xfail_reason([passed]) is None
    assert (expected.failed, expected.spoils, passed.spoils, secondary.spoils) == (False, True, False, True)


def test_frames_below_the_test_are_left_out() -> None:
    stacks = (
        "Thread 0x00007f01 (most recent call first):\n"
        '  File "threading.py", line 5 in run\n'
        "\n"
        "Current thread 0x00007f02 (most recent call first):\n"
        '  File "test_x.py", line 3 in test_x\n'
        '  File "_pytest/python.py", line 187 in pytest_pyfunc_call\n'
        '  File "pluggy.py", line 1 in _multicall\n'
    )
    assert frames_of_the_test(stacks) == (
        "Thread (most recent call first):\n"
        '  File "threading.py", line 5 in run\n'
        "\n"
        "Current thread (most recent call first):\n"
        '  File "test_x.py", line 3 in test_x'
    )
