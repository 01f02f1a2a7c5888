"""The report of --start."""

from __future__ import annotations

import subprocess

import pytest

from fastcoll.bench import start_times


@pytest.mark.long
def test_the_report_has_each_step_of_the_slowest_rank(capsys):
    start_times.run(2, times=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 ranks, 1 starts")
    times = {line[:20].strip(): float(line[20:].split()[0]) for line in lines[2:]}
    assert list(times) == list(start_times.STEPS)
    assert all(time > 0 for time in times.values())
    for part in ("interpreter", "import", "init_process_group"):
        assert times[part] < times["all three"]


def test_an_interrupted_benchmark_leaves_no_rank(monkeypatch):
    class Started(subprocess.Popen):
        def communicate(self, *args, **options):
            raise KeyboardInterrupt

        def __enter__(self):
            ranks.append(self)
            return super().__enter__()

    ranks = []
    monkeypatch.setattr(subprocess, "Popen", Started)
    with pytest.raises(KeyboardInterrupt):
        start_times.run(2, times=1)
    assert [rank.returncode is None for rank in ranks] == [False, False]
