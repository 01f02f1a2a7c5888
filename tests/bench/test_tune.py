"""--tune: the limit that loses least, and a table for the ranks that it was measured with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fastcoll.bench import tune
from fastcoll.bench.tune import SIZES, Measured, best_limit
from fastcoll.shm import thresholds


@pytest.mark.parametrize(
    ("one_shot", "two_shot", "limit"),
    [
        ([1, 2, 4, 9], [3, 3, 5, 6], 4),
        ([1, 2, 4, 9], [9, 9, 9, 9.1], 8),
        ([3, 3, 4, 9], [1, 2, 3, 4], 0),
        ([1, 2.1, 2, 9], [2, 2.0, 4, 6], 4),  # one size a little off does not end it
    ],
)
def test_the_limit_loses_least(one_shot, two_shot, limit):
    rows = [Measured(*row) for row in zip([1, 2, 4, 8], one_shot, two_shot, strict=True)]
    assert best_limit(rows) == limit


def test_a_run_writes_this_machines_table(tmp_path):
    path = tmp_path / "tuning.json"
    # In every process of the run, whose numbers are of no interest here.
    (tmp_path / "sitecustomize.py").write_text(
        "from fastcoll.bench import tune\ntune._ROUNDS, tune._SECONDS = 2, 0.001\n"
    )
    places = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "FASTCOLL_TUNING": str(path), "PYTHONPATH": places}
    words = [sys.executable, "-m", "fastcoll.bench", "--tune", "-n", "3"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    table = thresholds.parse(path.read_text())
    assert list(table.one_shot) == [3]
    assert table.one_shot[3] in (0, *SIZES)
    assert table.command == "python -m fastcoll.bench --tune -n 3"
    assert f"one-shot up to {table.one_shot[3]} bytes" in done.stdout


def test_two_ranks_have_nothing_to_tune(capsys):
    with pytest.raises(SystemExit):
        tune.main(["--tune"])
    assert "from 3 ranks on" in capsys.readouterr().err
