"""Medians, ratios and shares, and their tables, pages and pictures."""

import json

import pytest
from versus import picture, record, rounds, tables
from versus.launch import Launch, SideFailedError
from versus.outcome import MPIS, Comparison, SideTimes, write_json
from versus.plan import Cell, Job
from versus.rounds import Contender
from versus.targets import Missed

SIZE = 1 << 20
KEYS = [("all_reduce", 8), ("all_reduce", SIZE), ("barrier", 0), ("custom", SIZE)]


def side(name, label, micros):
    times = SideTimes(name, label, f"{label} 1.0", "somewhere", "a command")
    for key, value in zip(KEYS, micros, strict=True):
        for factor in (1, 50, 0.9) if value else ():
            singles = [[value * factor * 1e-6] * 10, [2 * value * factor * 1e-6] * 10]
            times.add(key, value * factor * 1e-6, 3 * value * factor * 1e-6, 25, singles)
    return times


def comparison(peers=("openmpi", "mpich", "gloo")):
    every = {
        "openmpi": side("openmpi", "Open MPI", [2, 120, 0.5, 900]),
        "mpich": side("mpich", "MPICH", [3, 80, 2, 950]),
        "gloo": side("gloo", "Gloo", [300, 600, 200, None]),
    }
    limit = SideTimes("limit", "limit", "", "NumPy", "")
    limit.add(("stream", 8), 0.3e-6, 0.6e-6, 25, [])
    limit.add(("stream", SIZE), 36e-6, 72e-6, 25, [])
    machine = {"cpu": "a CPU", "caches": "L2 2M", "cores": 2, "usable_cores": 2, "kernel": "Linux 6"}
    machine |= {"python": "3.12", "numpy": "2", "numba": "0.6"}
    return Comparison(
        "2030-01-02T03:04:05+00:00", "python -m fastcoll.bench --vs x", machine, "auto", 2, 1, [0, 1], "float32", 3,
        dict.fromkeys(KEYS, (25, 40)), [side("fastcoll", "fastcoll", [1, 40, 1, 45]), *(every[p] for p in peers)],
        limit,
    )  # fmt: skip


def test_p99_is_the_slowest_ranks_over_the_calls_of_all_rounds():
    times = SideTimes("fastcoll", "fastcoll", "", "", "")
    times.add(("barrier", 0), 1.0, 2.0, 25, [[1.0] * 50, [2.0] * 50])
    times.add(("barrier", 0), 1.0, 2.0, 25, [[5.0] * 50, [3.0] * 50])
    assert times.p99(("barrier", 0)) == 5.0
    assert times.p99(("all_reduce", 8)) is None


def test_ratios_are_over_fastcoll_and_to_the_better_mpi():
    found = comparison()
    assert found.ours(("all_reduce", 8)) == pytest.approx(1e-6)  # the median of the rounds
    assert found.ratio(MPIS, ("all_reduce", 8)) == pytest.approx(2)
    assert found.ratio(MPIS, ("all_reduce", SIZE)) == pytest.approx(2)
    assert found.p99_ratio(MPIS, ("all_reduce", 8)) == pytest.approx(2)
    assert found.ratio(["gloo"], ("all_reduce", 8)) == pytest.approx(300)
    assert found.ratio(["gloo"], ("custom", SIZE)) is None
    assert comparison(["gloo"]).ratio(MPIS, ("all_reduce", 8)) is None


def test_the_limit_is_the_quickest_of_its_kinds_where_there_is_one():
    found = comparison()
    assert found.over_limit(("all_reduce", SIZE)) == pytest.approx(1 / 0.9)
    assert found.over_limit(("custom", SIZE)) == pytest.approx(1.25)
    assert found.over_limit(("all_reduce", 8)) is None
    assert found.over_limit(("barrier", 0)) is None
    found.limit.add(("copy", SIZE), 30e-6, 60e-6, 25, [])
    found.limit.add(("copy_past", SIZE), 20e-6, 40e-6, 25, [])
    assert found.limit_seconds(("broadcast", SIZE)) == pytest.approx(20e-6)


def test_arrays_in_shared_pages_are_compared_with_ordinary_ones():
    found = comparison()
    ordinary, shared = ("update_all_reduce", SIZE), ("update_shared_all_reduce", SIZE)
    for key, seconds in ((ordinary, 9e-6), (shared, 6e-6)):
        found.planned[key] = (25, 1)
        for one in found.sides:
            one.add(key, seconds, 2 * seconds, 25, [[seconds], [seconds]])
    assert found.ordinary_over_shared(shared) == pytest.approx(1.5)
    assert found.ordinary_over_shared(ordinary) is None
    said = "fastcoll on ordinary arrays over arrays in shared pages: 1.50 at 1M."
    assert said in tables.faster_peers(found)
    assert Missed(*shared, "own", pytest.approx(1.5), 1.8) in tables.misses(found)


def test_if_ranks_share_cores_processor_times_are_compared_too():
    found = comparison(["openmpi", "gloo"])
    assert not found.crowded
    found.ranks = 3
    assert found.crowded
    found.sides[0].processor["all_reduce", 8] = [9e-6] * 3
    assert found.processor_ratio(MPIS, ("all_reduce", 8)) == pytest.approx(2 / 3)
    row = "| 8 | 1.00 (100.00; 9.00) | 2.00 (200.0; 6.00) | 300.0 (30000; 900.0) | 2.00 (2.00; 0.67) | 300 (300; 100) |"
    assert any(line.startswith(row) for line in tables.markdown(found, "all_reduce"))
    assert "best MPI: time 3 of 4, processor time 2 of 4; Gloo: time 3 of 3" in tables.faster_peers(found)[-1]
    assert Missed("all_reduce", 8, "processor", pytest.approx(2 / 3), 1.0) in tables.misses(found)


def test_on_several_hosts_the_bytes_of_a_host_are_shown():
    found = comparison(["gloo"])
    found.hosts = 2
    found.sides[0].sent["all_reduce", SIZE] = 2.5 * SIZE
    row = "| 1M | 40.00 (4000), 2560 | 600.0 (60000), – | 15.00 (15.00) |"
    assert any(line.startswith(row) for line in tables.markdown(found, "all_reduce"))
    assert "2 on 2 hosts, which are namespaces" in "\n".join(record.page(found))
    found.sides[0].processor["all_reduce", 8] = [1800e-6] * 3
    assert tables.misses(found) == [Missed("all_reduce", 8, "Gloo's processor", pytest.approx(0.5), 1.0)]


def test_a_table_for_a_terminal():
    lines = tables.text(comparison(["openmpi", "gloo"]), "all_reduce")
    assert lines[1] == "# all_reduce, float32"
    assert lines[2].split("  ")[-1].strip() == "missed"
    assert lines[3].split() == [
        "8", "1.00", "(100.00)", "2.00", "(200.0)", "300.0", "(30000)", "2.00", "(2.00)", "300", "(300)", "–", "–", "–",
    ]  # fmt: skip
    assert lines[4].split()[-5:] == ["15.00", "(15.00)", "36.00", "1.11", "–"]
    assert lines[5].split() == ["mean", "–", "–", "–", "2.45", "67.08", "–", "–", "–"]
    assert len({len(line) for line in lines[2:]}) == 1
    assert tables.rows(comparison(), "barrier")[0][-1] == "MPI ≥ 1.3, p99 ≥ 1"


def test_where_each_side_copies_once():
    found = comparison(["openmpi", "mpich"])
    found.sides[0].copies = dict.fromkeys(KEYS, 0.1)
    found.sides[1].copies = {("all_reduce", 8): 0, ("all_reduce", 4096): 2.0, ("all_reduce", SIZE): 4.0}
    (line,) = tables.single_copies(found)
    assert line.endswith(
        "here). fastcoll: none. Open MPI: all_reduce from 4K on. MPICH: not to be seen here."
    )


def test_faster_peers_and_notes():
    found = comparison()
    *faster, _, means, cells = tables.faster_peers(found)
    assert faster == ["Open MPI is faster at: barrier.", "MPICH is faster at: nothing."]
    assert means == "Geometric means over all cells: 2.51 against best MPI, 96.55 against Gloo."
    assert cells == "Cells in which fastcoll is at least as good: best MPI: time 3 of 4; Gloo: time 3 of 3."
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
    command = "`python -m fastcoll.bench --vs x`"
    for part in ("a CPU, L2 2M", "MPICH 1.0", "pinned to cores 0, 1", "25 × 40 of 8", command):
        assert part in text
    assert "| 2.00 (2.00) | 15.00 (15.00) | 36.00 | 1.11 | – |" in text
    assert "| barrier | MPI | 0.50 | ≥ 1.3 |" in text
    assert record.page_name(comparison(), "mine") == "2030-01-02-mine.md"


def test_json_has_every_round(tmp_path):
    write_json(tmp_path / "out.json", comparison())
    read = json.loads((tmp_path / "out.json").read_text())
    assert [len(row["seconds"]) for row in read["sides"][1]["rounds"]] == [3] * 4
    result = read["results"][1]
    assert (result["operation"], result["size"], result["calls"]) == ("all_reduce", SIZE, 40)
    assert result["seconds"]["mpich"] == pytest.approx(80e-6)
    assert result["best_mpi_over_fastcoll"] == pytest.approx(2)
    assert result["fastcoll_over_limit"] == pytest.approx(1 / 0.9)
    assert result["p99_seconds"]["mpich"] == pytest.approx(80e-4 * 1)
    assert read["limit"]["rounds"][1]["seconds"] == [36e-6]


def test_pictures(tmp_path):
    picture.draw([tmp_path / "out.png", tmp_path / "out.svg"], comparison())
    assert (tmp_path / "out.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "out.svg").read_text().startswith("<?xml")


def test_a_peer_that_fails_is_left_out_and_named(monkeypatch, capsys):
    ran = []

    def run(launch, *_):
        ran.append(launch.side)
        if launch.side == "gloo":
            raise SideFailedError("gloo failed: exit code 1")
        return [[{"library": "x", "placed": {}}]]

    monkeypatch.setattr(rounds, "run", run)
    job = Job((), 2, "float32", (), 1.0, 5.0)
    names = ["fastcoll", "gloo", "limit"]
    sides = [Contender(Launch(name, (), ""), job, SideTimes(name, "", "", "", "")) for name in names]
    assert rounds.run_rounds(sides, 3) == ["gloo failed: exit code 1"]
    assert ran == [*names, "limit", "fastcoll", "fastcoll", "limit"]  # the order changes from round to round
    assert capsys.readouterr().err.count(": gloo\n") == 1


def test_the_slowest_rank_counts(monkeypatch):
    cells = (Cell("all_reduce", 2, 8, 25, 40), Cell("barrier", 0, 0, 25, 40))

    def lines_of(*seconds):
        ends = {"processor": 1.5, "sent": 512.0, "batches": 25, "singles": [1.0]}
        return [
            {"library": "x", "placed": {"caller": [0], "others": []}},
            *({"ends": number, "seconds": time, **ends} for number, time in enumerate(seconds)),
        ]

    monkeypatch.setattr(rounds, "run", lambda *_: [lines_of(1.0, 4.0), lines_of(2.0, 3.0)])
    times = SideTimes("fastcoll", "", "", "", "")
    rounds.run_once(Contender(None, Job(cells, 2, "float32", (), 1.0, 5.0), times))
    assert times.seconds == {("all_reduce", 8): [2.0], ("barrier", 0): [4.0]}
    assert times.processor_time(("barrier", 0)) == 3.0
