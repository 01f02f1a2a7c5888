"""The result of a test, and its report, from the ranks' results."""

from __future__ import annotations

import pytest

from fastcoll.testing.mark import RankResult, failure_text, frames_of_the_test, name_ranks, skip_reason


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
