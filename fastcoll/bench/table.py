"""A row of results, and the table of nccl-tests that shows it, as lines of text.

time, p99       microseconds a call: every rank's median (99th percentile) over its batches of
                calls; the slowest rank's
algbw           size / time, GB/s (10**9 bytes)
busbw           algbw times the operation's bus factor: what each rank's link would have to carry
#wrong          elements that were not what they must be, over all ranks; N/A when not checked
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .cases import SHAPES, Case
from .timing import Schedule, Timing


@dataclass(frozen=True)
class Row:
    """The result of one case; bytes, microseconds and GB/s. `wrong` is None when not checked."""

    operation: str
    size: int
    count: int
    type: str
    redop: str
    root: int
    iterations: int
    time_us: float
    p99_us: float
    algbw: float
    busbw: float
    wrong: int | None


def make_row(case: Case, plan: Schedule, timing: Timing, wrong: int | None) -> Row:
    """The row of a case, of all ranks' timings combined and their wrong elements added."""
    algbw = case.size / timing.median / 1e9
    return Row(
        operation=case.operation,
        size=case.size,
        count=case.count,
        type=case.dtype.name if SHAPES[case.operation].moves else "none",
        redop=case.redop,
        root=case.root,
        iterations=plan.batches * plan.calls,
        time_us=timing.median * 1e6,
        p99_us=timing.p99 * 1e6,
        algbw=algbw,
        busbw=algbw * SHAPES[case.operation].bus_factor(case.ranks),
        wrong=wrong,
    )


@dataclass(frozen=True)
class Column:
    """A column: its heading, unit, width and a row's text in it."""

    heading: str
    unit: str
    width: int
    text: Callable[[Row], str]


COLUMNS = (
    Column("size", "(B)", 12, lambda row: str(row.size)),
    Column("count", "(elements)", 12, lambda row: str(row.count)),
    Column("type", "", 10, lambda row: row.type),
    Column("redop", "", 8, lambda row: row.redop),
    Column("root", "", 5, lambda row: str(row.root)),
    Column("time", "(us)", 11, lambda row: digits(row.time_us)),
    Column("p99", "(us)", 11, lambda row: digits(row.p99_us)),
    Column("algbw", "(GB/s)", 8, lambda row: f"{row.algbw:.2f}"),
    Column("busbw", "(GB/s)", 8, lambda row: f"{row.busbw:.2f}"),
    Column("#wrong", "", 8, lambda row: "N/A" if row.wrong is None else str(row.wrong)),
)


def digits(value: float) -> str:
    """Four significant digits without an exponent, at most two decimals."""
    decimals = 2 if value < 100 else 1 if value < 1000 else 0
    return f"{value:.{decimals}f}"


def heading(operation: str) -> list[str]:
    """The lines above an operation's rows."""
    return [
        "#",
        f"# {operation}",
        _line("#", [column.heading for column in COLUMNS]),
        _line("#", [column.unit for column in COLUMNS]),
    ]


def line(row: Row) -> str:
    """A row's line."""
    return _line(" ", [column.text(row) for column in COLUMNS])


def summary(rows: Sequence[Row]) -> list[str]:
    """The lines below the table."""
    wrong = total_wrong(rows)
    checked = any(row.wrong is not None for row in rows)
    verdict = "not checked" if not checked else f"{wrong} {'FAILED' if wrong else 'OK'}"
    data = [row for row in rows if row.size]
    mean = f"{sum(row.busbw for row in data) / len(data):.4f} GB/s" if data else "N/A"
    return ["#", f"# Out of bounds values : {verdict}", f"# Avg bus bandwidth    : {mean}"]


def total_wrong(rows: Sequence[Row]) -> int:
    """The wrong elements of all rows."""
    return sum(row.wrong or 0 for row in rows)


def _line(start: str, texts: Sequence[str]) -> str:
    cells = (text.rjust(column.width) for text, column in zip(texts, COLUMNS, strict=True))
    return (start + " ".join(cells)[1:]).rstrip()
