"""The README's table of operations, made from the results of test runs.

    pytest tests/conformance/test_every_operation.py --junitxml=RESULTS/shm.xml       and so on, a file a column
    python tests/test_operations_table.py RESULTS                                     compares README with them

A cell has a tick where every case of test_every_operation that ran for its row and column has passed. The files are
named COLUMN.xml or COLUMN-more.xml. `.ci/run` makes and compares them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- operations -->\n", "<!-- end of operations -->"
ROWS = (
    "all_reduce, all_reduce_coalesced",
    "reduce, scan, exscan",
    "reduce_scatter",
    "broadcast",
    "all_gather, all_gather_coalesced",
    "gather, scatter",
    "all_to_all",
    "send, recv, isend, irecv",
)
# The results of a column, its heading, and the text of a cell in which all cases have passed.
COLUMNS = {
    "shm": ("`shm`", "✓"),
    "tcp": ("`tcp`", "✓"),
    "auto": ("`auto`, several hosts", "✓"),
    "mpi": ("`mpi`", "✓"),
    "simulated": ("arrays on a *simulated* GPU", "sim"),
}


def passed(files: Iterable[Path]) -> set[tuple[str, str]]:
    """Return the columns and rows of which at least one case has passed, and none has failed."""
    good: set[tuple[str, str]] = set()
    bad: set[tuple[str, str]] = set()
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            name = case.get("name", "")
            row = next((row for row in ROWS if name.endswith(f"-{row}]")), None)
            if name.startswith("test_every_operation") and row is not None:
                (bad if len(case) else good).add((file.stem.partition("-")[0], row))
    return good - bad


def table(works: set[tuple[str, str]]) -> str:
    """Return the table in the README."""
    lines = ["| operation | " + " | ".join(head for head, _ in COLUMNS.values()) + " |"]
    lines += ["|---|" + ":-:|" * len(COLUMNS)]
    for row in ROWS:
        names = ", ".join(f"`{name}`" for name in row.split(", "))
        cells = [said if (column, row) in works else " " for column, (_, said) in COLUMNS.items()]
        lines.append(f"| {names} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def in_readme() -> str:
    return (ROOT / "README.md").read_text().partition(BEGIN)[2].partition(END)[0]


def test_readme_has_a_table_of_the_rows_that_the_suite_runs() -> None:
    suite = (ROOT / "tests/conformance/test_every_operation.py").read_text()
    assert re.findall(r'^    "(.+)": \w+,$', suite, re.M) == list(ROWS)
    every = {(column, row) for column in COLUMNS for row in ROWS}
    # A cell without a tick has the same width.
    assert re.sub("✓|sim\\b", " ", in_readme()) == re.sub("✓|sim\\b", " ", table(every))


def test_cells_that_failed_or_did_not_run_get_no_tick(tmp_path: Path) -> None:
    cases = [
        ("test_every_operation[n2-broadcast]", ""),
        ("test_every_operation[n3-broadcast]", ""),
        ("test_every_operation[n2-all_to_all]", ""),
        ("test_every_operation[n3-all_to_all]", "<failure/>"),
        ("test_every_operation[n2-reduce_scatter]", "<skipped/>"),
        ("test_something_else[n2-gather, scatter]", ""),
    ]
    for name in ("tcp.xml", "mpi-openmpi-2.xml"):
        text = "".join(f'<testcase name="{case}">{how}</testcase>' for case, how in cases)
        (tmp_path / name).write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")
    works = passed(tmp_path.glob("*.xml"))
    assert works == {("tcp", "broadcast"), ("mpi", "broadcast")}
    assert table(works).count("✓") == 2


if __name__ == "__main__":
    found = table(passed(Path(sys.argv[1]).glob("*.xml")))
    if found != in_readme():
        sys.exit(f"README's table is not what the runs gave, which is:\n{found}")
    print(found)
