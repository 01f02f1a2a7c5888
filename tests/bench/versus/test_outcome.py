"""Medians, ratios, shares, and the tables, pages and pictures made of them."""

import json

import pytest
from versus import picture, record, tables
from versus.outcome import Comparison, SideTimes, lost, write_json
from versus.plan import Cell
from versus.rounds import Contender, order, slowest

SIZE = 1 << 20
KEYS = [("all_reduce", 8), ("all_reduce", SIZE), ("barrier", 0), ("custom", SIZE)]


def side(name, label, micros):
    times = SideTimes(name, label, f"{label} 1.0", "somewhere", "a command")
    for key, value in zip(KEYS, micros, strict=True):
        for factor in (1, 50, 0.9) if value else ():
            times.add(key, value * factor * 1e-6, 25)
    return times


def comparison(peers=("openmpi", "mpich", "gloo")):
    every = {
        "openmpi": side("openmpi", "Open MPI", [2, 120, 0.5, 900]),
        "mpich": side("mpich", "MPICH", [3, 80, 2, 950]),
        "gloo": side("gloo", "Gloo", [300, 600, 200, None]),
    }
    limit = SideTimes("limit", "limit", "", "NumPy", "")
    limit.add(("stream", 8), 0.3e-6, 25)
    limit.add(("stream", SIZE), 36e-6, 25)
    machine = {"cpu": "a CPU", "cores": 2, "usable_cores": 2, "kernel": "Linux 6"}
    machine |= {"python": "3.12", "numpy": "2", "numba": "0.6"}
    return Comparison(
        "2030-01-02T03:04:05+00:00", "python -m fastcoll.bench --vs x", machine, 2, [0, 1], "float32", 3,
        dict.fromkeys(KEYS, (25, 40)), [side("fastcoll", "fastcoll", [1, 40, 1, 45]), *(every[p] for p in peers)],
        limit,
    )  # fmt: skip


def test_the_time_is_the_median_of_the_rounds():
    assert comparison().ours(("all_reduce", 8)) == pytest.approx(1e-6)


def test_ratios_are_over_fastcoll_and_to_the_better_mpi():
    found = comparison()
    assert found.mpi_ratio(("all_reduce", 8)) == pytest.approx(2)
    assert found.mpi_ratio(("all_reduce", SIZE)) == pytest.approx(2)
    assert found.ratio("gloo", ("all_reduce", 8)) == pytest.approx(300)
    assert found.ratio("gloo", ("custom", SIZE)) is None
    assert comparison(["gloo"]).mpi_ratio(("all_reduce", 8)) is None


def test_the_share_is_the_limit_over_our_time_where_there_is_one():
    found = comparison()
    assert found.share(("all_reduce", SIZE)) == pytest.approx(0.9)
    assert found.share(("custom", SIZE)) == pytest.approx(0.8)
    assert found.share(("all_reduce", 8)) is None
    assert found.share(("barrier", 0)) is None


def test_who_is_faster_where():
    found = comparison()
    assert lost(found, found.sides[1]) == {"barrier": [0]}
    assert lost(found, found.sides[2]) == {}


def test_a_table_for_a_terminal():
    lines = tables.text(comparison(["openmpi", "gloo"]), "all_reduce")
    assert lines[1] == "# all_reduce, float32"
    assert lines[2].split("  ")[-1] == "of the limit"
    assert lines[3].split() == ["8", "1.00", "2.00", "300.0", "2.00", "300", "–", "–"]
    assert lines[4].split() == ["1M", "40.00", "120.0", "600.0", "3.00", "15.00", "36.00", "90", "%"]
    assert len({len(line) for line in lines[2:]}) == 1


def test_columns_are_those_of_the_peers_that_ran():
    assert tables.headings(comparison(["gloo"])) == [
        "size", "fastcoll (µs)", "Gloo (µs)", "Gloo / fastcoll", "limit (µs)", "of the limit",
    ]  # fmt: skip


def test_verdict_and_notes():
    found = comparison()
    assert tables.verdict(found)[:2] == ["Open MPI is faster at: barrier.", "MPICH is faster at: nothing."]
    assert tables.notes(found) == []
    found.sides[3].batches["barrier", 0] = 3
    found.sides[3].batches["all_reduce", SIZE] = 4
    found.failed.append("gloo failed: exit code 1\n  more")
    assert tables.notes(found) == [
        "Left out: gloo failed: exit code 1.",
        "Gloo made fewer calls, to save time, at: all_reduce 1M, barrier.",
    ]


def test_page(tmp_path):
    path = record.write_page(tmp_path / "new", comparison(), None)
    assert path.name == "2030-01-02-comparison-2-ranks.md"
    text = path.read_text()
    for part in (
        "a CPU",
        "MPICH 1.0",
        "pinned to cores 0, 1",
        "25 × 40 of 8",
        "`python -m fastcoll.bench --vs x`",
    ):
        assert part in text
    assert "| 1M | 40.00 | 120.0 | 80.00 | 600.0 | 2.00 | 15.00 | 36.00 | 90 % |" in text
    assert record.page_name(comparison(), "mine") == "2030-01-02-mine.md"


def test_json_has_every_round(tmp_path):
    write_json(tmp_path / "out.json", comparison())
    read = json.loads((tmp_path / "out.json").read_text())
    assert [len(row["seconds"]) for row in read["sides"][1]["rounds"]] == [3] * 4
    result = read["results"][1]
    assert (result["operation"], result["size"], result["calls"]) == ("all_reduce", SIZE, 40)
    assert result["seconds"]["mpich"] == pytest.approx(80e-6)
    assert result["best_mpi_over_fastcoll"] == pytest.approx(2)
    assert result["share_of_limit"] == pytest.approx(0.9)
    assert read["limit"]["rounds"][1]["seconds"] == [36e-6]


def test_pictures(tmp_path):
    picture.draw([tmp_path / "out.png", tmp_path / "out.svg"], comparison())
    assert (tmp_path / "out.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "out.svg").read_text().startswith("<?xml")


def test_ticks():
    assert [picture._bytes(size) for size in (8, 1024, 4104, 64 << 20)] == ["8", "1K", "4.01K", "64M"]
    assert [picture._duration(micros) for micros in (0.3, 20, 4180)] == ["0.3 µs", "20 µs", "4.18 ms"]


def test_turns_change_from_round_to_round():
    contenders = [Contender(None, None, name) for name in "abc"]
    assert [c.times for c in order(contenders, 0)] == ["a", "b", "c"]
    assert [c.times for c in order(contenders, 1)] == ["c", "b", "a"]


def test_the_slowest_rank_counts():
    cells = [Cell("all_reduce", 2, 8, 25, 40), Cell("barrier", 0, 0, 25, 40)]

    def said(*seconds):
        return [
            {"library": "x"},
            *({"ends": number, "seconds": time, "batches": 25} for number, time in enumerate(seconds)),
        ]

    assert slowest(cells, [said(1.0, 4.0), said(2.0, 3.0)]) == [(cells[0], 2.0, 25), (cells[1], 4.0, 25)]
