"""A comparison as tables: aligned text for a terminal, Markdown for a page."""

from __future__ import annotations

from collections.abc import Sequence

from fastcoll.bench.cases import format_size
from fastcoll.bench.results import digits

from .outcome import MPIS, Comparison, Key, lost

_NOTHING = "–"


def headings(comparison: Comparison) -> list[str]:
    """The columns that this run has."""
    names = [side.name for side in comparison.peers]
    titles = ["size", *(f"{side.label} (µs)" for side in comparison.sides)]
    if any(name in MPIS for name in names):
        titles.append("best MPI / fastcoll")
    if "gloo" in names:
        titles.append("Gloo / fastcoll")
    return [*titles, "limit (µs)", "of the limit"]


def rows(comparison: Comparison, operation: str) -> list[list[str]]:
    """One operation's cells, in the order of `headings`."""
    return [_row(comparison, (operation, size)) for size in comparison.sizes(operation)]


def text(comparison: Comparison, operation: str) -> list[str]:
    """One operation's table for a terminal."""
    table = [headings(comparison), *rows(comparison, operation)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return ["#", f"# {title(comparison, operation)}", f"# {lines[0]}", *(f"  {line}" for line in lines[1:])]


def markdown(comparison: Comparison, operation: str) -> list[str]:
    """One operation's table for a page."""
    table = [headings(comparison), *rows(comparison, operation)]
    lines = [f"| {' | '.join(row)} |" for row in table]
    return [lines[0], "|--:" * len(table[0]) + "|", *lines[1:]]


def title(comparison: Comparison, operation: str) -> str:
    """An operation with what was special about it."""
    if operation == "barrier":
        return operation
    if operation == "custom":
        return f"all_reduce with a user-defined reduction, {comparison.dtype}"
    return f"{operation}, {comparison.dtype}"


def verdict(comparison: Comparison) -> list[str]:
    """A sentence for each peer: where it is faster than fastcoll."""
    lines = []
    for side in comparison.peers:
        where = [
            operation if operation == "barrier" else f"{operation} of {', '.join(map(format_size, sizes))}"
            for operation, sizes in lost(comparison, side).items()
        ]
        lines.append(f"{side.label} is faster at: {'; '.join(where) or 'nothing'}.")
    return lines


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know besides: who failed, and where numbers of calls differ."""
    fewer: dict[str, list[str]] = {}
    for label, (operation, size) in comparison.shortened():
        fewer.setdefault(label, []).append(f"{operation} {format_size(size) if size else ''}".strip())
    return [
        *(f"Left out: {text.splitlines()[0]}." for text in comparison.failed),
        *(f"{label} made fewer calls, to save time, at: {', '.join(keys)}." for label, keys in fewer.items()),
    ]


def _row(comparison: Comparison, key: Key) -> list[str]:
    names = [side.name for side in comparison.peers]
    cells = [format_size(key[1]) if key[1] else _NOTHING]
    cells += [_micros(side.typical(key)) for side in comparison.sides]
    if any(name in MPIS for name in names):
        cells.append(_times(comparison.mpi_ratio(key)))
    if "gloo" in names:
        cells.append(_times(comparison.ratio("gloo", key)))
    share = comparison.share(key)
    return [
        *cells,
        _micros(comparison.limit_seconds(key)),
        _NOTHING if share is None else f"{100 * share:.0f} %",
    ]


def _micros(seconds: float | None) -> str:
    return _NOTHING if seconds is None else digits(seconds * 1e6)


def _times(ratio: float | None) -> str:
    if ratio is None:
        return _NOTHING
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"


def join(blocks: Sequence[Sequence[str]]) -> list[str]:
    """Blocks of lines with an empty one between them."""
    return [line for number, block in enumerate(blocks) for line in (["", *block] if number else block)]
