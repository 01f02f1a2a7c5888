"""Rows, the table's text, and the files."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from fastcoll.bench import results
from fastcoll.bench.cases import Case
from fastcoll.bench.measuring import Schedule, Timing
from fastcoll.bench.picture import MOST_CURVES, draw, limit_us, panels, write_html
from fastcoll.bench.results import Run, header, in_short, load_of, per_element, write_csv, write_json


def row(operation="all_reduce", count=1000, ranks=4, wrong=0, root=-1, redop="sum", seconds=2e-6):
    case = Case(operation, np.dtype("float32"), redop, root, count, ranks)
    return results.make_row(case, Schedule(10, 20), Timing(seconds, 1.5 * seconds), wrong)


def run(*rows, ranks=2):
    facts = {"fastcoll": "1.2", "cpu": "a CPU", "caches": "L2 2M", "cores": 8, "usable_cores": 2}
    facts |= {"kernel": "Linux 6", "python": "3.12", "numpy": "2", "numba": "0.6"}
    facts |= {"update_gbs": 10.0, "copy_gbs": 5.0}
    devices = [{"rank": r, "pid": 7 + r, "hostname": "here", "cores": [r]} for r in range(ranks)]
    return Run("2030-01-02T03:04:05+00:00", ["python", "-m", "fastcoll.bench"], "shm", facts, devices, rows)


def test_bandwidths():
    found = row()
    assert (found.size, found.iterations) == (4000, 200)
    assert found.algbw == pytest.approx(2.0)
    assert found.busbw == pytest.approx(3.0)
    found = row("barrier", count=0, redop="none")
    assert (found.type, found.size, found.algbw, found.busbw) == ("none", 0, 0, 0)


def test_line_has_the_columns_of_the_heading():
    lines = results.heading("all_reduce")
    assert lines[1] == "# all_reduce"
    assert lines[2].split() == "# size count type redop root time p99 algbw busbw #wrong".split()
    assert lines[3].split() == "# (B) (elements) (us) (us) (GB/s) (GB/s)".split()
    large = results.line(row(count=1 << 30, wrong=1 << 20, seconds=2.0))
    assert results.line(row()).split() == "4000 1000 float32 sum -1 2.00 3.00 2.00 3.00 0".split()
    assert len(results.line(row())) == len(large) == len(lines[2])
    assert large.endswith(" 1048576")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.384, "0.38"), (9.999, "10.00"), (123.45, "123.5"), (1234.5, "1234"), (1e6, "1000000")],
)
def test_digits(value, text):
    assert results.digits(value) == text


def test_summary_reports_wrong_values():
    assert results.summary([row(), row()])[1:] == [
        "# Out of bounds values : 0 OK",
        "# Avg bus bandwidth    : 3.0000 GB/s",
    ]
    assert results.summary([row(), row(wrong=5)])[1].endswith("5 FAILED")
    assert results.summary([row(wrong=None)])[1].endswith("not checked")
    assert results.summary([row("barrier", 0)])[2].endswith("N/A")


def test_an_element_is_compared_with_one_of_float32s_sum():
    half = replace(row(), type="float16", count=2000, time_us=3.0)
    custom = replace(row(), redop="custom", time_us=4.0)
    other = replace(half, operation="reduce")
    lines = per_element([row(), half, custom, other])
    assert [" ".join(line.split()[1:]) for line in lines[3:]] == [
        "all_reduce 4000 float32 sum 2000 1.00 1.00",
        "all_reduce 4000 float16 sum 1500 0.75 1.50",
        "all_reduce 4000 float32 custom 4000 2.00 2.00",
    ]
    assert len(lines[2]) == len(lines[3])
    empty = replace(row(), size=0, count=0)
    assert per_element([empty, replace(empty, type="float16"), row(), half, custom, other]) == lines


@pytest.mark.parametrize(
    "rows",
    [[row()], [row(), row(count=2000), row("reduce"), row("broadcast", redop="none")], [row("barrier", 0)]],
)
def test_without_anything_to_compare_there_are_no_lines(rows):
    assert per_element(rows) == []


def test_in_short_has_the_best_of_each_operation():
    rows = [row(count=2), row(count=1 << 20, seconds=1e-3), row("barrier", 0, redop="none")]
    _, machine, reduced, barrier, memory, _ = in_short(run(*rows))
    assert machine == "# in short: 2 ranks on 2 cores of a CPU"
    assert reduced.split() == "# all_reduce 2.00 us for 8, busbw 6.29 GB/s for 4M".split()
    assert barrier.split() == ["#", "barrier", "2.00", "us"]
    assert memory == "# memory alone: update 10.0 GB/s, copy 5.0 GB/s a rank"


def test_header_has_the_machine():
    text = "\n".join(header(run(row())))
    for part in (
        "fastcoll 1.2",
        "shm",
        "2 ranks on here",
        "a CPU",
        "8 cores (2 usable)",
        "rank 1 on 1",
    ):
        assert part in text


def test_json(tmp_path):
    write_json(tmp_path / "out.json", run(row(), row(wrong=None)))
    read = json.loads((tmp_path / "out.json").read_text())
    assert read["version"] == 3
    assert read["devices"][1] == {"rank": 1, "pid": 8, "hostname": "here", "cores": [1]}
    first, second = read["results"]
    names = ("operation", "size", "time_us", "wrong")
    assert [first[name] for name in names] == ["all_reduce", 4000, 2.0, 0]
    assert second["wrong"] is None


def test_csv(tmp_path):
    write_csv(tmp_path / "out.csv", [row(), row(wrong=None)])
    with (tmp_path / "out.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["size"], first["type"], first["busbw"], first["wrong"]) == ("4000", "float32", "3.0", "0")
    assert second["wrong"] == ""


def test_a_picture_of_one_rank_says_that_the_machine_is_busy(tmp_path):
    made = run(row(ranks=1), ranks=1)
    made.machine["cores_of_others"] = 1.26
    draw(tmp_path / "out.svg", made)
    text = (tmp_path / "out.svg").read_text()  # matplotlib draws letters, and has the text as comments
    assert text.startswith("<?xml")
    assert "other processes used 1.3 of 2 cores" in text


def test_each_operation_has_a_panel_with_few_curves():
    types = ["int8", "int32", "float16", "float32", "float64"]
    rows = [replace(row(count=count), type=name) for name in types for count in (1, 2)]
    rows += [row("broadcast", redop="none"), row("barrier", 0, redop="none")]
    found = panels(run(*rows))
    assert [name for name, _ in found] == ["all_reduce (1)", "all_reduce (2)", "broadcast"]
    assert [label for _, curves in found for label in curves] == [*types, "time"]
    assert [len(curves) for _, curves in found] == [2, 3, 1]
    assert max(len(curves) for _, curves in found) <= MOST_CURVES
    assert [len(rows) for rows in found[0][1].values()] == [2, 2]


def test_the_limit_is_one_pass_of_the_memory():
    made = run(row())
    assert limit_us(made, row(count=1 << 20)) == pytest.approx((4 << 20) / 10e9 * 1e6)
    assert limit_us(made, row("broadcast", count=1 << 20, redop="none")) == pytest.approx(
        (4 << 20) / 5e9 * 1e6
    )


def test_a_busy_machine_is_mentioned():
    made = run(row())
    assert load_of(made) == []
    made.machine["cores_of_others"] = 0.04
    assert load_of(made) == []
    made.machine["cores_of_others"] = 1.26
    assert load_of(made)[0].startswith("# other processes used 1.3 of 2 cores during this run")


def test_a_page_has_a_plot_for_each_operation_and_all_rows(tmp_path):
    made = run(row(), row("broadcast", redop="none"), row("barrier", 0, redop="none"))
    write_html(tmp_path / "out.html", made, ["about this <run>"])
    page = (tmp_path / "out.html").read_text()
    assert page.count("Plotly.newPlot(") == page.count("</h2>") - 1 == 2
    assert "<td>barrier</td>" in page
    assert "about this &lt;run&gt;" in page
