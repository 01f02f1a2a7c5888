"""The output of the commands.

On a terminal, tables are aligned, wrapped and coloured. Elsewhere a row is one line, with tabs between its cells.
Colours only repeat what the text says. NO_COLOR (https://no-color.org) turns them off.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

_STYLES = {"": "", "bold": "1", "dim": "2", "good": "32", "warning": "33", "bad": "1;31"}
_GAP = "  "
_NARROWEST = 40  # characters; a table's last column that would be narrower gets its own lines


class Printer:
    """Prints to `out`, by default standard output."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._terminal = self._out.isatty()
        self._has_controls = self._terminal and os.environ.get("TERM") != "dumb"
        self._coloured = self._has_controls and not os.environ.get("NO_COLOR")
        self._width = shutil.get_terminal_size().columns if self._terminal else 0
        self._has_begun = False  # whether `anew` was called before

    def say(self, text: str | None = "", style: str = "", indent: str = "") -> None:
        """Print a paragraph, or nothing if `text` is None; on a terminal, all lines of the paragraph are indented."""
        if text is None:
            return
        lines = (
            textwrap.wrap(text, self._width, initial_indent=indent, subsequent_indent=indent)
            if self._width
            else []
        )
        for line in lines or [indent + text if text else ""]:
            self._write(line, style)

    def table(self, names: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
        """Print rows under the names of the columns; `styles` has one style for each row's first cell."""
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        self.heading(names, widths)
        for number, row in enumerate(rows):
            self.row(row, widths, styles[number] if styles else "")

    def heading(self, names: Sequence[str], widths: Sequence[int]) -> None:
        """Print the names of a table's columns, for rows that are not known yet; `row` prints these."""
        if self._terminal:
            self._write(_GAP.join(map(str.ljust, names, widths)).rstrip(), "dim")
        else:
            self.row(names, widths)

    def row(self, cells: Sequence[str], widths: Sequence[int], style: str = "") -> None:
        """Print a row of a table at once; `style` is that of its first cell."""
        if not self._terminal:
            self._write("\t".join(" ".join(cell.split()) for cell in cells))
            self._out.flush()
            return
        before = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
        beside = self._width - before >= min(_NARROWEST, widths[-1])
        first, *others = [*map(str.ljust, cells[:-1], widths), ""]
        indent = before if beside else 4
        lines = textwrap.wrap(cells[-1], max(self._width - indent, _NARROWEST)) or [""]
        styled = self._styled(first, style)
        self._write((_GAP.join([styled, *others]) + (lines.pop(0) if beside else "")).rstrip())
        for line in lines:
            self._write(" " * indent + line)
        self._out.flush()

    def anew(self) -> None:
        """Begin another report: in place of the last one on a terminal, elsewhere after an empty line."""
        if self._has_controls:
            self._out.write("\033[H\033[J")  # the cursor to the first line, and clear what follows
            self._width = shutil.get_terminal_size().columns
        elif self._has_begun:
            self._write("")
        self._has_begun = True

    def json(self, value: Mapping[str, Any]) -> None:
        """Print a JSON object, for programs."""
        self._write(json.dumps(value, indent=2))

    def _styled(self, text: str, style: str) -> str:
        return f"\033[{_STYLES[style]}m{text}\033[0m" if self._coloured and style and text else text

    def _write(self, line: str, style: str = "") -> None:
        self._out.write(self._styled(line, style) + "\n")


def digits_of(number: float) -> str:
    """Format a number with three digits, or all digits before the point: `3.14`, `1023`."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def bytes_of(count: float) -> str:
    """Format a number of bytes: `3.9 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{digits_of(count)} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{digits_of(count)} TiB"


def counted(count: int, what: str) -> str:
    """Format a count: `1 rank`, `4 ranks`."""
    return f"{count} {what}{'s' * (count != 1)}"


def seconds_of(seconds: float) -> str:
    """Format a duration: `12 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    for size, unit, smaller, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if rounded >= size:
            rest = rounded % size // smaller
            return f"{rounded // size} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{rounded} s"
