"""The tuning cache: reading, merging and writing, without harm to a job if the file is unusable."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from shm.groups import assert_same_everywhere, rows_of

import fastcoll as dist
from fastcoll import config
from fastcoll.shm import autotune, tuning_cache, tuning_table
from fastcoll.shm import context_layout as words
from fastcoll.shm.tuning_cache import Conditions

TWO = Conditions(2, "own", 256 << 10)
TIMES = {"all_reduce": {"131072": {"close": 1000, "past": 3000}}}


@pytest.fixture(autouse=True)
def use(monkeypatch):
    """Set the path of the file."""

    def use(path):
        monkeypatch.setenv("FASTCOLL_TUNING", str(path))
        config.forget()

    yield use
    config.forget()


@pytest.fixture
def path(tmp_path, use):
    """Path of the file."""
    path = tmp_path / "dir" / "tuning.json"
    use(path)
    return path


def again():
    """Read the file again, as another process would."""
    tuning_cache._read_files.clear()
    return tuning_cache.sections()


def edit(path, change):
    """Change the file's first section, as a user would, and return this machine's sections."""
    text = json.loads(path.read_text())
    change(text["sections"])
    path.write_text(json.dumps(text))
    return again()


def new_table():
    return np.zeros(autotune.table_words(len(tuning_table.COLLECTIVES)), np.int64)


def test_path_of_the_file(monkeypatch, tmp_path, use):
    monkeypatch.delenv("FASTCOLL_TUNING", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    config.forget()
    assert tuning_cache.path() == tmp_path / "fastcoll" / "tuning.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning_cache.path() == tmp_path / ".config" / "fastcoll" / "tuning.json"
    use("none")
    assert tuning_cache.path() is None
    assert tuning_cache.sections() == []
    assert tuning_cache.save(TWO, TIMES, 100) is None


def test_built_in_limits_by_number_of_ranks(path: Path, caplog):
    limits = [tuning_cache.one_shot_limit(size) for size in (1, 2, 3, 4, 5, 8, 9, 33, 1000)]
    table = tuning_cache.ONE_SHOT
    assert limits == [table[4]] * 4 + [table[8]] * 2 + [table[16]] + [table[32]] * 2
    assert not caplog.text
    assert not path.exists()


def test_saved_times_are_read_with_their_provenance(path: Path):
    assert tuning_cache.save(TWO, TIMES, 100) == path
    (section,) = again()
    assert {**section, "date": ""} == {
        "machine": tuning_cache.machine(), "ranks": 2, "cores": "own", "slot": 256 << 10,
        "command": tuning_cache.RUNNING, "date": "", "calls": 100, "ns_per_mib": TIMES,
    }  # fmt: skip
    assert [file.name for file in path.parent.iterdir()] == ["tuning.json"]


def test_one_shot_limits_are_kept_for_each_number_of_ranks(path: Path):
    tuning_cache.save(TWO._replace(ranks=4), {}, 0, "first", 12345)
    tuning_cache.save(TWO._replace(ranks=6), TIMES, 9, "second", 999)
    tuning_cache.save(TWO._replace(ranks=6), {"reduce": {"8192": {"close": 1}}}, 9)
    again()
    assert [tuning_cache.one_shot_limit(size) for size in (3, 4, 5, 6, 7)][:4] == [12345, 12345, 999, 999]


def test_each_machine_and_condition_has_its_own_section(path: Path, monkeypatch):
    for conditions in (TWO, TWO._replace(slot=64 << 10), TWO._replace(cores="shared"), TWO._replace(ranks=3)):
        tuning_cache.save(conditions, TIMES, 1)
    assert len(again()) == 4
    with monkeypatch.context() as patch:
        patch.setattr(tuning_cache, "machine", lambda: "a Cray")
        assert again() == []
        tuning_cache.save(TWO, TIMES, 1)
        assert len(again()) == 1
    assert len(again()) == 4


def test_shorter_times_count_at_once_and_longer_ones_slowly():
    news = {"all_reduce": {"131072": {"close": 500, "past": 5000}}, "reduce": {"8192": {"past": 1}}}
    slowly = tuning_cache.merged(TIMES, news, fresh=False)
    assert slowly["all_reduce"]["131072"] == {"close": 500, "past": 3500}
    assert slowly["reduce"] == news["reduce"]
    assert tuning_cache.merged(TIMES, news, fresh=True) == news
    assert TIMES["all_reduce"]["131072"]["close"] == 1000


def test_the_file_is_written_only_if_times_have_changed(path: Path):
    tuning_cache.save(TWO, TIMES, 100)
    before = path.stat()
    for times in ({}, TIMES, {"all_reduce": {"131072": {"close": 950, "past": 3300}}}):
        assert tuning_cache.save(TWO, times, 100) is None
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert tuning_cache.save(TWO, {"all_reduce": {"131072": {"close": 500}}}, 100) == path


def test_unknown_names_stay(path: Path):
    def add(sections):
        sections[0]["ns_per_mib"]["all_reduce"]["131072"]["teleport"] = 7
        sections[0]["moon"] = "full"

    tuning_cache.save(TWO, TIMES, 100)
    edit(path, add)
    tuning_cache.save(TWO, {"reduce": TIMES["all_reduce"]}, 100)
    (section,) = again()
    assert section["moon"] == "full"
    assert section["ns_per_mib"]["all_reduce"]["131072"] == {"close": 1000, "past": 3000, "teleport": 7}
    table = new_table()
    tuning_table.fill(table, section["ns_per_mib"])
    assert 7 not in table


OLD = '{"machine": "m", "command": "c", "one_shot": {"4": 1}}'


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "\x00", OLD, '{"format": 1, "sections": []}', "[" * 100_000]
)
def test_a_file_of_another_format_is_ignored_with_one_warning_and_replaced(path: Path, text, caplog):
    path.parent.mkdir()
    path.write_text(text)
    assert again() == []
    assert tuning_cache.one_shot_limit(4) == tuning_cache.ONE_SHOT[4]
    assert caplog.text.count("cannot be used") == 1
    assert tuning_cache.save(TWO, TIMES, 100) == path
    assert len(again()) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("ns_per_mib", 3), ("ns_per_mib", {"reduce": 1, "scan": {"8192": {"close": -1, "past": "x"}}}), ("one_shot", -1),
     ("one_shot", "many")],
)  # fmt: skip
def test_invalid_numbers_are_dropped(path: Path, field, value):
    def spoil(sections):
        sections += [3, {"machine": "m"}, {**sections[0], "ranks": "two"}, {**sections[0], "slot": math.inf}]
        sections[0][field] = value

    tuning_cache.save(TWO, TIMES, 100, "command", 77)
    (section,) = edit(path, spoil)
    found = section["ns_per_mib"], section.get("one_shot")
    assert found == (({}, 77) if field == "ns_per_mib" else (TIMES, None))


def test_a_path_that_cannot_be_written_does_no_harm(tmp_path, use):
    (tmp_path / "file").write_text("")
    use(tmp_path / "file" / "tuning.json")
    with pytest.raises(OSError, match="exists"):
        tuning_cache.save(TWO, TIMES, 100)
    assert tuning_cache.sections()[0]["ns_per_mib"] == TIMES  # this process uses it anyway


def test_one_process_writes_at_a_time_and_a_killed_writers_file_is_overwritten(path: Path):
    path.parent.mkdir()
    part = path.with_name("tuning.json.new")
    with part.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write("half a fi" * 1000)
        other.flush()
        with pytest.raises(BlockingIOError):
            tuning_cache.save(TWO, TIMES, 100)
        assert not path.exists()
    assert part.exists()
    tuning_cache._read_files.clear()
    assert tuning_cache.save(TWO, TIMES, 100) == path
    assert len(again()) == 1
    assert not part.exists()


@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to, lambda part, _: os.mkfifo(part)])
def test_a_foreign_file_at_the_path_of_the_new_file_is_not_touched(path: Path, plant):
    precious = path.with_name("precious")
    path.parent.mkdir()
    precious.write_text("of this user")
    plant(path.with_name("tuning.json.new"), precious)
    with pytest.raises(OSError, match=r"links|link, or no file of this user"):
        tuning_cache.save(TWO, TIMES, 100)
    assert precious.read_text() == "of this user"
    assert not path.exists()


def test_a_pipe_at_the_path_of_the_file_does_not_block(path: Path, caplog):
    path.parent.mkdir()
    os.mkfifo(path)
    assert again() == []
    assert "it is not a regular file" in caplog.text


WRITE_OFTEN = """
import contextlib, sys
from pathlib import Path
from fastcoll.shm import tuning_cache

conditions = tuning_cache.Conditions(int(sys.argv[1]), "own", 256 << 10)
number = written = 0
while number < 50 or not written:  # all 50 times another one may be about it, which is not run meanwhile
    with contextlib.suppress(OSError):  # another one writes
        written += tuning_cache.save(conditions, {"reduce": {"8192": {"close": 1 << number % 30}}}, 1, "c") is not None
    tuning_cache.parse(Path(sys.argv[2]).read_text())
    number += 1
"""


def test_concurrent_writers_leave_a_complete_file(path: Path):
    tuning_cache.save(TWO, TIMES, 100)  # FASTCOLL_TUNING has the path, also for the writers
    writers = [subprocess.Popen([sys.executable, "-c", WRITE_OFTEN, str(n), str(path)]) for n in (3, 4, 5)]
    assert [writer.wait(600) for writer in writers] == [0, 0, 0]
    assert {section["ranks"] for section in again()} == {2, 3, 4, 5}


# ---- from a table to the file and back -------------------------------------------------------------------


def test_a_table_is_the_same_after_saving_and_loading(path: Path):
    table = new_table()
    row = table[autotune.ROWS :][: autotune.ROW_WORDS]
    row[autotune.CALLS], row[autotune.BEST] = 1000, 1
    row[autotune.TIMES : autotune.TIMES + 3] = 3_000_000, 1_000_000, 2_500_000
    times, calls = tuning_table.results(table)
    tuning_cache.save(TWO, times, calls)
    again()
    heard, left = tuning_table.matching(json.loads(json.dumps(tuning_table.to_publish(2, TWO.slot))), TWO)
    assert 0 <= left < 1
    begun = np.zeros_like(table)
    tuning_table.fill(begun, heard)
    other = begun[autotune.ROWS :][: autotune.ROW_WORDS]
    assert calls == 1000
    assert other[autotune.CALLS] == 0
    assert other[autotune.BEST] == 1
    times = slice(autotune.TIMES, autotune.AGAIN)
    assert np.allclose(other[times], row[times], rtol=1e-3)
    assert other[autotune.AGAIN] == autotune.LONG  # of more than twice the best
    assert (begun[autotune.ROWS + autotune.ROW_WORDS :] == 0).all()
    for ranks, conditions in ((3, TWO), (2, TWO._replace(cores="shared"))):
        assert tuning_table.matching(tuning_table.to_publish(ranks, TWO.slot), conditions) == ({}, 1.0)


def test_the_programs_random_numbers_stay_the_same(use, tmp_path):
    use(tmp_path / "cache.json")
    tuning_cache.save(TWO, {"reduce": {"8192": {"close": 1000}}}, 100)
    before = random.getstate()
    assert len(tuning_table.to_publish(2, TWO.slot)) == 1
    assert random.getstate() == before


def test_rows_with_few_calls_are_not_saved():
    table = new_table()
    table[autotune.ROWS], table[autotune.ROWS + autotune.TIMES] = 10, 5
    assert tuning_table.results(table) == ({}, 0)


# ---- in real groups --------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
def test_all_ranks_begin_with_the_times_of_rank_0(rank, world_size, tmp_path, use, monkeypatch):
    """Each rank has its own file; rank 0 saves the times at the end."""
    # Every back-off begins in its middle. A random one may have 0 calls left, which the count below would miss.
    monkeypatch.setattr(random, "Random", lambda: SimpleNamespace(random=lambda: 0.5))
    use(tmp_path / f"{rank}.json")
    group = dist.new_group(backend="shm")
    conditions = group.backend.conditions
    group.close()
    algorithms = {"close": 3000, "past": 1000 + rank, "ahead": 9000}
    times = {name: {"131072": algorithms} for name in ("all_reduce", "broadcast", "shared:reduce")}
    tuning_cache.save(conditions, times, 100, "test", 1000 + rank)
    group = dist.new_group(backend="shm")
    assert group.backend.context[words.ONE_SHOT] == 1000
    table = rows_of(group).copy()
    assert_same_everywhere(group, table)
    words_a_row = 1 + 3 + autotune.ALGORITHMS  # the best algorithm, three times, ends of back-offs
    assert np.count_nonzero(table) == 3 * words_a_row
    x = np.ones(50_000, np.float32)
    for _ in range(10):
        group.fast.all_reduce(x)
        assert group.backend.context[words.CHOOSING + autotune.LAST_ALGORITHM] == autotune.PAST
    for _ in range(70):
        group.fast.reduce(x, 0)
    group.close()
    mine = [list(s["ns_per_mib"]) for s in again() if s["command"] == tuning_cache.RUNNING]
    assert mine == ([["all_reduce", "broadcast", "shared:reduce", "reduce"]] if rank == 0 else [])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fails", [True, False])
def test_a_failed_group_saves_nothing_and_an_unwritable_file_does_not_fail_a_close(
    rank, world_size, tmp_path, use, caplog, fails
):
    use(tmp_path / f"{rank}.json" if fails else "/proc/none/tuning.json")
    caplog.set_level(logging.DEBUG, "fastcoll")
    group, x = dist.new_group(backend="shm"), np.ones(50_000, np.float32)
    for _ in range(100):
        group.fast.all_reduce(x)
    if fails:
        group.abort("enough")
    group.close()
    assert list(tmp_path.iterdir()) == []
    assert ("are not kept" in caplog.text) == (rank == 0 and not fails)
