"""What rank 0 shows while it runs: plain lines, or on a terminal coloured ones above a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from . import table
from .cases import Case
from .sizes import format_size
from .table import Row

if TYPE_CHECKING:
    from rich.progress import Progress


class Report(Protocol):
    """A context manager that shows a run."""

    def __enter__(self) -> Report: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def notes(self, lines: Sequence[str]) -> None:
        """Show what is not a row: the header, the summary."""

    def begin(self, case: Case) -> None:
        """A case is being measured."""

    def add(self, row: Row) -> None:
        """It has been measured."""


def make_report(total: int) -> Report:
    """The report for `total` cases: live on a terminal where rich is installed, else plain."""
    if not sys.stdout.isatty():
        return PlainReport()
    try:
        import rich.progress
    except ImportError:
        return PlainReport()
    columns = (
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.description}"),
    )
    return LiveReport(rich.progress.Progress(*columns, transient=True, auto_refresh=False), total)


class PlainReport:
    """Lines on stdout, each as soon as it is known; a heading where the operation changes."""

    def __init__(self) -> None:
        self._operation = ""

    def __enter__(self) -> PlainReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def notes(self, lines: Sequence[str]) -> None:
        for text in lines:
            self._show(text, "dim")

    def begin(self, case: Case) -> None:
        if case.operation != self._operation:
            self._operation = case.operation
            for text in table.heading(case.operation):
                self._show(text, "bold")

    def add(self, row: Row) -> None:
        self._show(table.line(row), "bold red" if row.wrong else "")

    def _show(self, text: str, style: str) -> None:
        print(text, flush=True)


class SilentReport(PlainReport):
    """What the other ranks show: nothing."""

    def _show(self, text: str, style: str) -> None:
        pass


class LiveReport(PlainReport):
    """The same lines in colour (unless NO_COLOR is set), scrolling above a bar that says what runs now.

    The bar is drawn between cases only: a thread that redraws it would be timed with the calls.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        super().__init__()
        self._progress = progress
        self._task = progress.add_task("", total=total)

    def __enter__(self) -> LiveReport:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, case: Case) -> None:
        super().begin(case)
        size = f" {format_size(case.size)}" if case.size else ""
        self._progress.update(self._task, description=f"{case.operation}{size}", refresh=True)

    def add(self, row: Row) -> None:
        super().add(row)
        self._progress.advance(self._task)

    def _show(self, text: str, style: str) -> None:
        from rich.text import Text

        # A Text has its style to itself; `style=` would be the bar's too.
        self._progress.console.print(Text(text, style), no_wrap=True, overflow="ignore", crop=False)
