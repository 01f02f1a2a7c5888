"""The study beside MPI: its loop finds wrong results, and its table says who is faster."""

import importlib
from pathlib import Path

import pytest

STUDIES = Path(__file__).parents[2] / "bench"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(STUDIES)
    return importlib.import_module("versus_mpi")


@pytest.fixture
def loop(monkeypatch):
    monkeypatch.syspath_prepend(STUDIES)
    return importlib.import_module("loop")


def results(study):
    ours = study.Result("fastcoll 1", {8: 1e-6, 4096: 4e-6})
    theirs = study.Result("mpi4py 2", {8: 2e-6, 4096: 3e-6})
    return {"fastcoll": ours, "MPICH": theirs}


def test_table(study):
    assert study.table(results(study)) == [
        "| size | fastcoll (µs) | MPICH (µs) | MPICH / fastcoll |",
        "|--:|--:|--:|--:|",
        "| 8 | 1.00 | 2.00 | 2.00 |",
        "| 4K | 4.00 | 3.00 | 0.75 |",
    ]


def test_verdict_names_the_sizes_that_are_lost(study):
    assert study.verdict(results(study)) == ["MPICH is faster at: 4K."]


def test_sides_are_combined_by_the_median_of_the_rounds(study):
    rounds = [{"fastcoll": study.Result("x", {8: seconds})} for seconds in (1e-6, 9e-6, 2e-6)]
    assert study.combine(rounds)["fastcoll"].seconds == {8: 2e-6}


def test_one_side_without_peers_gives_right_results(loop):
    for operation in loop.OPERATIONS:
        buffers = loop.make_buffers(operation, 64, 1)
        loop.fill(operation, buffers, 0, 1)
        buffers.out[:] = buffers.x
        loop.check(operation, buffers, 0, 1)


def test_untouched_results_are_found(loop):
    for operation in loop.OPERATIONS:
        buffers = loop.make_buffers(operation, 64, 2)
        loop.fill(operation, buffers, 1, 2)
        if operation == "reduce":
            buffers.out[3] = 0
        with pytest.raises(AssertionError, match=operation):
            loop.check(operation, buffers, 1, 2)


def test_fewer_calls_for_larger_arrays(loop):
    assert loop.schedule(8, 1.0) == (400, 200)
    assert loop.schedule(64 << 20, 1.0) == (16, 1)
    assert loop.schedule(64 << 20, 0.01) == (3, 1)
