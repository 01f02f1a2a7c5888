"""Termination detection: worker 0 ends a shutdown when two rounds in a row have the same sums, and not before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fastcoll.rpc.termination import CallCounts, Termination
from fastcoll.rpc.worker_info import WorkerInfo


def test_a_shutdown_ends_when_two_rounds_have_the_same_sums() -> None:
    """One round is not enough: workers count at different times, so each may miss a call that the other one counts."""
    workers, handlers = [WorkerInfo("w0", 0), WorkerInfo("w1", 1)], dict[int, Any]()
    agent: Any = SimpleNamespace(
        workers=workers, timeout=60.0, on=handlers.__setitem__, on_death=lambda _: None
    )
    Termination(agent)
    (receive,) = handlers.values()

    def is_over(*counts: tuple[int, int]) -> bool:
        reports = [CallCounts(made, served, []) for made, served in counts]
        answers = [receive(worker, each) for worker, each in zip(workers, reports, strict=True)]
        first, second = [answer.wait(0.0) for answer in answers]
        assert first == second
        return bool(first)

    assert not is_over((1, 0), (0, 1))
    assert not is_over((2, 1), (0, 1))  # as many as before are under way
    assert not is_over((2, 1), (0, 2))
    assert not is_over((2, 1), (0, 0))
    assert not is_over((2, 1), (0, 0))  # the same again, and one is under way
    assert not is_over((2, 1), (0, 1))
    assert is_over((2, 1), (0, 1))
