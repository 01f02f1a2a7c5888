"""The report of --overlap."""

from __future__ import annotations

import pytest

from fastcoll.bench import overlap


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
