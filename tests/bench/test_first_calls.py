"""The report of --first-calls."""

from __future__ import annotations

import json

import pytest

from fastcoll.bench import first_calls


@pytest.mark.long
def test_the_report_has_the_first_ten_calls_beside_later_ones(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(first_calls, "STARTS", 1)
    path = tmp_path / "first.json"
    words = ["broadcast", "--first-calls", "--sizes", "8", "--seconds", "0.01", "--json", str(path)]
    assert first_calls.main(words) == 0
    report = json.loads(path.read_text())
    (row,) = report["results"]
    assert (report["kind"], row["operation"], row["size"]) == ("first calls", "broadcast", 8)
    assert min(row["median_us"], row["first_us"]) > 0
    # Each is the maximum over ranks, and may be of another rank.
    assert row["ten_us"] <= (row["first_us"] + 9 * row["others_us"]) / 10 + 0.01
    lines = capfd.readouterr().out.splitlines()
    assert lines[2] == first_calls.line(row)
