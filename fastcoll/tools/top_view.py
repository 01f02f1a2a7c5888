"""What `top` shows: the rows of rates.py as cells of text, and these as a table of rich."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .printing import bytes_of
from .rates import ENDED, RankRates, View

_WIDE = 120  # columns of the terminal, from which on all columns are shown, and calls with their arguments
_UNKNOWN = "-"
_MOST_DIAGNOSES = 3
_LEGEND = "waits: share of samples; ~: from the last 1,024 calls; -: unknown; q: end"
_AROUND = 6  # lines above and below the table
_STYLES = dict.fromkeys(
    ("stopped", "debugged", "zombie", ENDED), "bold red"
)  # of states that are no usual ones


def count_of(value: float) -> str:
    """Format a number in at most five characters: `0.4`, `87`, `9400`, `12.3k`, `4.2M`."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= 10 * size or (unit == "M" and value >= size):
            return f"{value / size:.1f}{unit}" if value < 100 * size else f"{value / size:.0f}{unit}"
    return f"{value:.1f}" if 0 < value < 10 else f"{value:.0f}"


def doing(row: RankRates, wide: bool) -> str:
    """Return what a rank does; with the arguments of its call if the view is `wide`."""
    if row.failure:
        text = f"failed: {row.failure}"
    elif not row.group:
        text = row.call
    elif not row.call:
        text = "no call yet"
    else:
        text = ("in " if row.is_in else "after ") + (row.call if wide else row.call.partition("(")[0])
    return f"{row.state}, {text}" if row.state in _STYLES else text


class Column(NamedTuple):
    """A column of the table.

    Attributes:
        cell: makes its cell of a row; None: unknown.
        wide: whether only wide views have it.
        right: whether it is aligned to the right.
        of_rank: whether all rows of a rank have the same cell.
    """

    name: str
    cell: Callable[[RankRates], str | None]
    wide: bool = False
    right: bool = True
    of_rank: bool = False


COLUMNS = (
    Column("rank", lambda row: str(row.rank), of_rank=True),
    Column("host", lambda row: row.host or None, wide=True, right=False, of_rank=True),
    Column("pid", lambda row: str(row.pid), wide=True, of_rank=True),
    Column("state", lambda row: row.state or None, wide=True, right=False, of_rank=True),
    Column("cores", lambda row: None if row.cores is None else f"{row.cores:.2f}", wide=True, of_rank=True),
    Column("group", lambda row: row.group or None, right=False),
    Column(
        "call", lambda row: None, right=False
    ),  # `doing` makes its cell, which depends on the view's width
    Column("number", lambda row: str(row.number) if row.number else None),
    Column("calls/s", lambda row: None if row.calls is None else count_of(row.calls)),
    Column(
        "bytes/s", lambda row: None if row.nbytes is None else "~" * row.is_estimate + bytes_of(row.nbytes)
    ),
    Column("waits", lambda row: None if row.waits is None else f"{row.waits:.0%}"),
    Column("for", lambda row: str(row.late) if row.late >= 0 else None),
    Column("RSS", lambda row: None if row.memory is None else bytes_of(row.memory.resident), of_rank=True),
    Column("shared", lambda row: None if row.memory is None else bytes_of(row.memory.shared), of_rank=True),
)


def cells(row: RankRates, wide: bool) -> list[str]:
    """Return the cells of a row, one for each column that such a view has."""
    return [
        doing(row, wide) if column.name == "call" else column.cell(row) or _UNKNOWN
        for column in COLUMNS
        if wide or not column.wide
    ]


def table(rows: Sequence[RankRates], slow: int, wide: bool) -> Table:
    """Return a table of rows; `slow` is the rank that is marked as the slowest, -1: none."""
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=True, header_style="dim")
    columns = [column for column in COLUMNS if wide or not column.wide]
    for column in columns:
        made.add_column(
            column.name,
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if column.name == "call" else None,
            max_width=12 if column.name == "group" else None,
        )
    before = -1
    for row in rows:
        shown = zip(columns, cells(row, wide), strict=True)
        texts = ("" if column.of_rank and row.rank == before else cell for column, cell in shown)
        made.add_row(*map(Text, texts), style=_STYLES.get(row.state, "yellow" if row.rank == slow else ""))
        before = row.rank
    return made


def render(view: View, width: int, height: int | None = None) -> RenderableType:
    """Return a view for a terminal; with a `height`, leave out the last rows if they do not fit."""
    width, troubles = max(1, width), view.troubles[:_MOST_DIAGNOSES]
    rows = view.rows
    if height is not None:
        rows = rows[
            : max(1, height - _AROUND - len(troubles) * (1 + max(map(len, troubles), default=0) // width))
        ]
    left_out, slow = len(view.rows) - len(rows), view.slow[0] if view.slow else -1
    parts: list[RenderableType] = [
        Text(view.title, style="bold", no_wrap=True, overflow="ellipsis"),
        Text(view.summary, style="yellow" if slow >= 0 else ""),
        *(Text(trouble, style="bold red") for trouble in troubles),
        table(rows, slow, width >= _WIDE),
    ]
    if left_out:
        parts.append(Text(f"and {left_out} rows more, for which the terminal has no room"))
    parts.append(Text(view.end, style="bold") if view.end else Text(_LEGEND, style="dim"))
    return Group(*parts)
