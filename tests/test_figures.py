"""Figures that README.md and docs/ quote: each equals the recorded one, or bench/results/quoted.txt has the reason.

A figure is a number with a unit of time or rate, or with "times", outside of code; and each number of a table's column
whose heading names such a unit.
"""

import re
from functools import cache
from itertools import compress
from pathlib import Path
from statistics import mean

import pytest
import speed_picture

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
TABLES = "versus-amd"  # which README quotes
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?")
UNIT = r"(?:µs|us|ns|ms|GB/s|times)\b"
FIGURE = re.compile(rf"(?<![\w.])(?:[\d.,]*\d to )?[\d.,]*\d ?{UNIT}")
LINES = [
    re.fullmatch(r"([\w-]+\.md): (.*) <- (.*)", line).groups()
    for line in (RESULTS / "quoted.txt").read_text().splitlines()
    if line and line[0] != "#"
]
RECORDED = [line for line in LINES if re.match(r"(?!constant|measured once)[\w, -]+: ", line[2])]
PAGES = {path.name: path for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}


@cache
def text(page):
    """Return the prose of a page, each run of white space as one space, and the cells of its tables."""
    prose = re.sub(r"^```.*?^```$", "", PAGES[page].read_text(), flags=re.MULTILINE | re.DOTALL)
    return " ".join(prose.split())


@cache
def recorded(name):
    (path,) = RESULTS.glob(f"*-{name}.md")
    return path.read_text()


@cache
def rows(name):
    """Return the rows of a recorded page's tables: "heading | cell | cell ...", the columns' names, and the cells."""
    found, heading, columns = [], "", []
    for line in recorded(name).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif not line.startswith("|"):
            columns = []
        elif not columns:
            columns = cells
        elif not line.startswith("|-"):
            found.append((" | ".join([heading, *cells]) + " ", columns, cells))
    return found


def numbers(quoted):
    return [float(number.replace(",", "")) for number in NUMBER.findall(quoted)]


def cell(columns, cells, column):
    name, _, place = column.partition("#")
    return cells[[at for at, each in enumerate(columns) if each.startswith(name)][int(place or 1) - 1]]


def values(source):
    """Return the values of a source, each as the numbers that the cell has: one, or those of several runs."""
    names, row, column = source.split(": ", 2)
    if row == "text":
        return [numbers(re.search(column, recorded(names))[1])]
    return [
        numbers(re.sub(r"\(.*?\)", "", cell(columns, cells, each)))
        for name in names.split(", ")
        for label, columns, cells in rows(name)
        if re.match(row, label)
        for each in column.split("; ")
    ]


def is_rounded(quoted, value):
    decimals = len(quoted.partition(".")[2])
    return abs(float(quoted) - value) <= 0.5 * 10**-decimals + 1e-9


@pytest.mark.parametrize(("page", "quoted", "source"), RECORDED)
def test_a_quoted_figure_is_the_recorded_one(page, quoted, source):
    found = values(source)
    assert found, "no such row"
    if " to " in quoted:
        flat = [number for cell in found for number in cell]
        found = [[min(flat)], [max(flat)]]
    printed = NUMBER.findall(quoted)
    assert len(printed) == len(found)
    for number, cell in zip(printed, found, strict=True):
        assert any(is_rounded(number, value) for value in (*cell, mean(cell))), (
            f"{number}, but {cell} is recorded"
        )


def quotations(page):
    for name, quoted, source in LINES:
        if name == page:
            yield from [quoted] if (name, quoted, source) in RECORDED else quoted.split(", ")


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_figure_has_a_source(page):
    listed = list(quotations(page))
    if listed == ["*"]:
        return
    assert [quoted for quoted in listed if quoted not in text(page)] == [], "no longer quoted"
    rest = text(page)
    for quoted in listed:
        rest = re.sub(rf"(?<![\d.]){re.escape(quoted)}(?!\d)", "", rest)
    assert FIGURE.findall(rest) == []
    assert in_columns(page, rest) == []


def in_columns(page, rest):
    """Return the rows of tables that have a number in a column of times, and are not quoted in full."""
    found, measured = [], []
    for line in PAGES[page].read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            measured = []
        elif not measured:
            measured = [re.search(rf"{UNIT}", each) is not None for each in cells]
        elif line in rest and any(map(NUMBER.fullmatch, compress(cells, measured))):
            found.append(line)
    return found


def test_the_readme_names_every_cell_in_which_mpi_is_faster():
    behind = {
        (label.split(",")[0], cells[0])
        for label, columns, cells in rows(TABLES)
        if "MPI ≥" in cells[-1] and numbers(cell(columns, cells, "best MPI"))[0] <= 1
    }
    (sentence,) = re.findall(r"The best MPI is faster in .*?\.(?= \[More)", text("README.md"))
    named = re.findall(r"`(\w+)` of ([\dKM, ]+)", sentence)
    assert {(name, size) for name, sizes in named for size in sizes.split(", ")} == behind
    assert f"in {len(behind)} of 82 cells" in sentence


def test_the_picture_of_the_readme_has_the_recorded_times():
    panels = speed_picture.draw().axes
    assert [panel.get_title(loc="left") for panel in panels] == list(speed_picture.OPERATIONS)
    for panel in panels:
        sized = re.compile(rf"{panel.get_title(loc='left')}, [^|]*\| \d")
        found = [row for row in rows(TABLES) if sized.match(row[0])]
        assert len(found) == 9
        for side, line in zip(speed_picture.SIDES.values(), panel.lines, strict=True):
            recorded = [numbers(cell(columns, cells, f"{side}, µs"))[0] for _, columns, cells in found]
            assert recorded == line.get_ydata().tolist()
