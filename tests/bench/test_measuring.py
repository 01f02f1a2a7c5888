"""How many calls are timed, and the statistics over batches."""

import gc

import pytest

from fastcoll.bench import measuring
from fastcoll.bench.measuring import Schedule, measure, schedule, time_batches


@pytest.mark.parametrize(
    ("seconds", "limit", "iterations", "planned"),
    [
        (1e-3, 0.1, None, Schedule(100, 1)),
        (1e-3, 1e308, None, Schedule(100_000, 1)),
        (1e-3, 0.1, 7, Schedule(7, 1)),
        (1e-6, 0.1, 7, Schedule(1, 7)),
        (1e-6, 0.1, 60, Schedule(3, 20)),
        (1e-6, 0.1, 70, Schedule(5, 14)),
    ],
)
def test_how_many_calls_are_timed(seconds, limit, iterations, planned):
    assert schedule(seconds, limit, iterations) == planned


def test_short_calls_share_batches_and_there_are_limits():
    assert schedule(1e-6, 0.1).calls == 20
    assert schedule(1.0, 0.1).batches == 20
    short = schedule(0.0, 1000.0)
    assert short.batches * short.calls <= 100_000


def test_median_and_p99_are_over_batches(monkeypatch):
    clock = iter([0, 100, 0, 100, 0, 100, 0, 100, 0, 1100])
    monkeypatch.setattr(measuring, "perf_counter_ns", lambda: next(clock))
    _, found = measure(lambda: None, Schedule(5, 10))
    assert found.median == 10e-9
    assert 100e-9 < found.p99 <= 110e-9


@pytest.mark.parametrize(("ends_after", "batches"), [(1, 16), (2, 48), (3, 100)])
def test_a_measurement_that_takes_too_long_ends_early(ends_after, batches):
    calls, asked = [], []

    def is_over():
        asked.append(len(calls) // 2)
        return len(asked) == ends_after

    done, _ = measure(lambda: calls.append(1), Schedule(100, 2), is_over=is_over)
    assert done == Schedule(batches, 2)
    assert len(calls) == 2 * batches
    assert asked == [16, 48][:ends_after]


def test_a_thread_that_sleeps_takes_no_cpu_time(monkeypatch):
    clock = iter([0, 40])
    monkeypatch.setattr(measuring, "thread_time_ns", lambda: next(clock))
    assert time_batches(lambda: None, Schedule(1, 4), cpu_time=True).median == 10e-9


def test_collector_is_off_while_timing_and_back_after_an_error():
    seen = []
    measure(lambda: seen.append(gc.isenabled()), Schedule(2, 3))
    assert seen == [False] * 6
    assert gc.isenabled()

    def fail():
        raise KeyError

    with pytest.raises(KeyError):
        measure(fail, Schedule(1, 1))
    assert gc.isenabled()
    gc.disable()
    try:
        measure(lambda: None, Schedule(1, 1))
        assert not gc.isenabled()
    finally:
        gc.enable()
