"""Workers that die, stop, leave or are interrupted: the errors of the others, and how soon they are raised."""

from __future__ import annotations

import math
import socket
from functools import partial
from typing import Any

import pytest
from faults import crew

from . import victims

run = partial(crew.run, deadline=120.0)


def result_of(outcome: crew.Outcome) -> Any:
    assert outcome.result, outcome.error
    return outcome.result


@pytest.mark.parametrize("within", [math.inf, pytest.param(crew.WITHIN, marks=pytest.mark.timed)])
def test_a_worker_that_dies_is_named_to_all_its_callers_and_others_go_on(within: float) -> None:
    with crew.nothing_left():
        outcomes = run(victims.one_dies, 3)
    dead = outcomes[1]
    assert dead.exitcode == -9
    for outcome in (outcomes[0], outcomes[2]):
        errors, again, works, ends = result_of(outcome)
        who = f"worker w1, rank 1 (pid {dead.pid} on {socket.gethostname()}), died"
        for kind, text, ranks, when in [*errors, again]:
            assert (kind, ranks) == ("PeerDiedError", (1,)), text
            assert who in text
            assert when - dead.died < within
        lost = {text.partition("; ")[2] for _, text, *_ in errors}
        assert lost <= {"the call of hold is lost", "the call of die is lost"}
        assert works == 3
        assert who in ends


@pytest.mark.long
def test_calls_to_a_stopped_worker_time_out_and_work_after_it_continues() -> None:
    errors, works = result_of(run(victims.one_is_stopped, 2)[0])
    assert [kind for kind, *_ in errors] == ["RpcTimeoutError"] * 6, errors
    assert works == [3, 3]


def test_ctrl_c_in_a_shutdown_ends_the_calls_of_others() -> None:
    (kind, text, ranks, _), second = map(result_of, run(victims.ctrl_c_in_shutdown, 2))
    assert (second, kind, ranks) == ("interrupted", "AbortedError", (1,))
    assert "left: KeyboardInterrupt" in text


@pytest.mark.parametrize(
    "within",
    [pytest.param(math.inf, marks=pytest.mark.long), pytest.param(10, marks=pytest.mark.timed)],
)
def test_a_call_that_never_ends_fails_the_shutdown_after_its_timeout(within: float) -> None:
    worlds = [(victims.shutdown_waits, 3, doing) for doing in ("default", "timeout")]
    for outcomes in crew.run_together(worlds, deadline=120.0):
        results = [result_of(outcome) for outcome in outcomes]
        for kind, text, used, waited in results:
            assert kind in ("RpcTimeoutError", "AbortedError"), (
                text
            )  # AbortedError if another worker left first
            assert waited > 0.9 or kind == "AbortedError"
            assert waited < within
            assert used < 0.1 + 0.1 * waited or within == math.inf, "the pauses grow"
        kind, text, *_ = results[0]
        assert kind == "RpcTimeoutError"
        assert "w1 is in the call of never by w0" in text


@pytest.mark.long
def test_a_shutdown_names_the_worker_that_does_not_call_it() -> None:
    first, second, third = map(result_of, run(victims.absent, 3))
    assert (second, third[0]) == ("left", "AbortedError")
    expected = "shutdown was not over after 1 s: w1 did not call shutdown, or still waits for a call"
    assert first == ("RpcTimeoutError", f"timed out: {expected}")


def test_ctrl_c_in_a_call_ends_only_the_waiting() -> None:
    assert result_of(run(victims.ctrl_c_in_a_call, 2)[0]) == 3


def test_calls_to_a_leaving_worker_raise_its_exit_reason() -> None:
    kind, text = result_of(run(victims.one_leaves_slowly, 2)[0])
    assert kind == "AbortedError", text
    assert "left" in text


def test_a_worker_that_has_just_dialed_gets_the_exit_reason() -> None:
    first, (kind, text, ranks, _) = map(result_of, run(victims.one_leaves_as_it_is_dialed, 2))
    assert (first, kind, ranks) == ("left", "AbortedError", (0,)), text


def test_a_worker_whose_program_ends_sends_its_exit_reason() -> None:
    kind, text, ranks, _ = result_of(run(victims.one_ends_without_shutdown, 2)[0])
    assert (kind, ranks) == ("AbortedError", (1,)), text
    assert "left (its program ended)" in text


def test_world_sizes_and_ranks_that_do_not_match_are_refused() -> None:
    sizes, ranks = crew.run_together([(victims.other_sizes, 2), (victims.same_rank, 2)], deadline=120.0)
    assert any("world size" in outcome.error and "UsageError" in outcome.kinds for outcome in sizes)
    assert all(outcome.error for outcome in sizes)
    assert all("rank 0 is claimed by two processes" in outcome.error for outcome in ranks), ranks
