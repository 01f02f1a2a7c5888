"""What an element costs in each dtype and reduction, against float32's sum of as many bytes."""

from __future__ import annotations

from collections.abc import Sequence

from .table import Row, digits

_WIDTHS = (12, 12, 10, 8, 14, 14, 11)
_HEADING = ("operation", "size", "type", "redop", "ps/element", "per element", "per byte")


def per_element(rows: Sequence[Row]) -> list[str]:
    """The lines below the tables of a run, of operations in which there is something to compare float32's sum with.

    `per element` and `per byte` are factors: of float32's sum, at the same size of the same operation. Rows without
    elements are left out.
    """
    rows = [row for row in rows if row.count]
    compared = [(row, base) for row in rows if (base := _base(rows, row)) is not None]
    several = {row.operation for row, base in compared if row is not base}
    lines = [_line(_cells(row, base)) for row, base in compared if row.operation in several]
    return ["#", "# against float32's sum", _line(_HEADING), *lines] if lines else []


def _base(rows: Sequence[Row], row: Row) -> Row | None:
    wanted = (row.operation, row.size, "float32", "sum")
    found = [other for other in rows if (other.operation, other.size, other.type, other.redop) == wanted]
    return found[0] if found else None


def _cells(row: Row, base: Row) -> tuple[str, ...]:
    per_element = row.time_us / row.count
    return (
        row.operation,
        str(row.size),
        row.type,
        row.redop,
        digits(per_element * 1e6),
        f"{per_element / (base.time_us / base.count):.2f}",
        f"{row.time_us / base.time_us:.2f}",
    )


def _line(cells: Sequence[str]) -> str:
    return "# " + " ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
