"""The thresholds: a user's own table wins where it is this machine's, and a bad one harms nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fastcoll as dist
from fastcoll import config
from fastcoll.shm import context_layout as words
from fastcoll.shm import thresholds


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Where the table is looked for."""
    path = tmp_path / "dir" / "tuning.json"
    monkeypatch.setenv("FASTCOLL_TUNING", str(path))
    config.forget()
    yield path
    config.forget()


def test_built_in_numbers_hold_up_to_so_many_ranks(monkeypatch, tmp_path, caplog):
    monkeypatch.delenv("FASTCOLL_TUNING", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    config.forget()
    assert thresholds.table_path() == tmp_path / "fastcoll" / "tuning.json"
    assert not thresholds.table_path().exists()
    limits = [thresholds.one_shot_limit(size) for size in (1, 2, 3, 4, 5, 8, 9, 33, 1000)]
    table = thresholds.BUILT_IN.one_shot
    assert limits == [table[4]] * 4 + [table[8]] * 2 + [table[16]] + [table[32]] * 2
    assert not caplog.text


def test_a_written_table_is_read_and_keeps_its_other_numbers(path: Path):
    thresholds.write(path, 4, 12345, "first")
    thresholds.write(path, 6, 999, "second")
    table = thresholds.parse(path.read_text())
    assert table == thresholds.Table(thresholds.machine(), "second", {4: 12345, 6: 999})
    assert [thresholds.one_shot_limit(size) for size in (3, 4, 5, 6, 7)][:4] == [12345, 12345, 999, 999]
    assert [file.name for file in path.parent.iterdir()] == ["tuning.json"]


def test_another_machines_table_is_ignored_with_a_warning_and_overwritten(path: Path, caplog):
    path.parent.mkdir()
    path.write_text(json.dumps({"machine": "a Cray", "command": "c", "one_shot": {"4": 7}}))
    assert thresholds.one_shot_limit(4) == thresholds.BUILT_IN.one_shot[4]
    assert "a Cray" in caplog.text
    assert "--tune" in caplog.text
    thresholds.write(path, 8, 99, "c")
    assert thresholds.parse(path.read_text()).one_shot == {8: 99}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "\x00",
        '{"machine": "m", "command": "c", "one_shot": {"four": 1}}',
        '{"machine": "m", "command": "c", "one_shot": {"4": -1}}',
        '{"machine": "m", "command": "c", "one_shot": {"1": 1}}',
        '{"machine": "m", "command": "c", "one_shot": [4]}',
    ],
)
def test_a_corrupt_table_is_ignored_with_a_warning(path: Path, text: str, caplog):
    path.parent.mkdir()
    path.write_text(text)
    assert thresholds.one_shot_limit(4) == thresholds.BUILT_IN.one_shot[4]
    assert caplog.text.count("cannot be used") == 1
    thresholds.one_shot_limit(4)
    assert caplog.text.count("cannot be used") == 1


def test_a_table_that_was_named_and_is_not_there_is_missed(path: Path, caplog):
    thresholds.one_shot_limit(4)
    assert "is not there" in caplog.text


@pytest.mark.ranks(3, timeout=60)
def test_all_ranks_take_rank_0s_number(rank, world_size, tmp_path, monkeypatch):
    own = tmp_path / f"{rank}.json"
    thresholds.write(own, 3, 1000 + rank, "test")
    monkeypatch.setenv("FASTCOLL_TUNING", str(own))
    config.forget()
    group = dist.new_group(backend="shm")
    config.forget()
    assert group.backend.context[words.ONE_SHOT] == 1000
    for count in (10, 250, 251, 1000):
        x = np.full(count, rank + 1, np.float32)
        group.all_reduce(x)
        assert (x == 6).all()
