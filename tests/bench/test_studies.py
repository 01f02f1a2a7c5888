"""The reports of --first-calls and --overlap."""

from __future__ import annotations

import json

import pytest

from fastcoll.bench import first_calls, overlap


@pytest.mark.long
def test_the_report_has_the_first_ten_calls_beside_later_ones(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(first_calls, "STARTS", 1)
    path = tmp_path / "first.json"
    words = ["broadcast", "reduce", "--first-calls", "--sizes", "8", "--seconds", "0.01", "--json", str(path)]
    assert first_calls.main(words) == 0
    report = json.loads(path.read_text())
    rows, lines = report["results"], capfd.readouterr().out.splitlines()
    assert report["kind"] == "first calls"
    assert [(row["operation"], row["size"]) for row in rows] == [("broadcast", 8), ("reduce", 8)]
    for row in rows:
        assert min(row["median_us"], row["first_us"]) > 0
        # Each is the maximum over ranks, and may be of another rank.
        assert row["ten_us"] <= (row["first_us"] + 9 * row["others_us"]) / 10 + 0.01
    assert lines[2:] == [first_calls.line(row) for row in rows]


@pytest.mark.long
def test_the_report_has_both_computations(monkeypatch, capfd):
    monkeypatch.setattr(overlap, "_ROUNDS", 1)
    assert overlap.main(["--overlap"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("4 all_reduces of 16 MiB in flight, 2 ranks")
    assert [line[:20].strip() for line in lines[2:]] == ["waits for a device", "on this core"]
    for line in lines[2:]:
        alone, computing, together, ratio = map(float, line[20:].split())
        assert abs(ratio - together / max(alone, computing)) < 0.02
