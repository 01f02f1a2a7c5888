"""--tune: the limit that loses least, and the file with the results."""

from __future__ import annotations

import os

import pytest
from programs import python

from fastcoll.bench import tune
from fastcoll.bench.tune import SIZES, Measured, best_limit
from fastcoll.shm import tuning_cache


@pytest.mark.parametrize(
    ("one_shot", "two_shot", "limit"),
    [
        ([1, 2, 4, 9], [3, 3, 5, 6], 4),
        ([1, 2, 4, 9], [9, 9, 9, 9.1], 8),
        ([3, 3, 4, 9], [1, 2, 3, 4], 0),
        ([1, 2.1, 2, 9], [2, 2.0, 4, 6], 4),  # a single size that deviates does not lower the limit
    ],
)
def test_the_limit_loses_least(one_shot, two_shot, limit):
    rows = [Measured(*row) for row in zip([1, 2, 4, 8], one_shot, two_shot, strict=True)]
    assert best_limit(rows) == limit


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_writes_its_results(tmp_path, ranks):
    path = tmp_path / "tuning.json"
    # In every process of the run; its numbers do not matter here.
    (tmp_path / "sitecustomize.py").write_text(
        "from fastcoll.bench import tune\n"
        "tune._ROUNDS, tune._SECONDS, tune._SECONDS_A_CLASS, tune._CALLS = 2, 0.001, 0.001, 60\n"
        "tune.CLASSES, tune.SIZES = tune.CLASSES[:4], tune.SIZES[:4]\n"
    )
    places = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {"FASTCOLL_TUNING": str(path), "PYTHONPATH": places}
    done = python("-m", "fastcoll.bench", "--tune", "-n", ranks, environ=environ)
    assert done.returncode == 0, done.stderr
    (section,) = tuning_cache.parse(path.read_text())
    assert (section["ranks"], section.get("one_shot") in (None, 0, *SIZES[:4])) == (ranks, True)
    assert ("one_shot" in section) == (ranks > 2)
    assert section["command"] == f"python -m fastcoll.bench --tune -n {ranks}"
    found = section["ns_per_mib"]
    assert {*found} == {*tune.OPERATIONS}
    assert {"close", "past"} <= {*found["all_reduce"]["131072"]}
    assert {"close", "past", "ahead"} <= {*found["broadcast"]["524288"]}
    assert str(path) in done.stdout
