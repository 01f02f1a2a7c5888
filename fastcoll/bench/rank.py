"""What one rank does: join the others, measure case after case together, and on rank 0 show and write."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

import fastcoll as dist

from ..errors import UsageError
from . import results
from .cases import Case, cases, format_size
from .operations import Host, Trial, place_of, prepare
from .results import Row, Run
from .timing import Schedule, Timing, estimate, measure, schedule

if TYPE_CHECKING:
    from rich.progress import Progress

OK, FAILED, MISUSED = range(3)
"""Exit codes: all results right; wrong results or a failed rank; a call that cannot be."""


def run(local_rank: int, meeting: dict[str, Any], options: Namespace) -> int:
    """One rank's part of a run as `command` completed it; returns its exit code, OK on all ranks but rank 0."""
    if options.cores:  # before the ranks meet: they choose how to wait by the cores that they have
        os.sched_setaffinity(0, {options.cores[local_rank % len(options.cores)]})
    dist.init_process_group(options.backend, **meeting)
    first = dist.get_rank() == 0
    try:
        done = _measure_all(options, place_of(options.device, local_rank), first)
    except UsageError as error:  # the same on every rank, e.g. a reduction that the dtype does not have
        if first:
            print(f"python -m fastcoll.bench: error: {error}", file=sys.stderr, flush=True)
        return MISUSED if first else OK
    finally:
        dist.destroy_process_group()
    if not first:
        return OK
    if options.json:
        results.write_json(options.json, done)
    if options.csv:
        results.write_csv(options.csv, done.results)
    for path in options.plot:
        results.draw(path, done)
        print(f"# picture: {path.resolve()}", flush=True)
    if not options.plot:
        print("# a picture of it: --plot FILE.png", flush=True)
    return FAILED if any(row.wrong for row in done.results) else OK


def _measure_all(options: Namespace, place: Host, tell: bool) -> Run:
    o, rows = options, list[Row]()
    todo = list(cases(o.operations, o.dtype, o.op, o.sizes, o.root, dist.get_world_size()))
    run = _describe(options, rows)
    bar = _bar(len(todo)) if tell and sys.stdout.isatty() else None
    report = Report(bar, tell)
    with bar or nullcontext():
        report.notes(results.header(run))
        for case in todo:
            report.begin(case)
            rows.append(_measure(case, options, place))
            report.add(rows[-1])
        report.notes([*results.per_element(rows), *results.summary(rows), *results.in_short(run)])
    return run


def _describe(options: Namespace, rows: list[Row]) -> Run:
    speeds = results.memory_speed(dist.barrier)
    slowest = np.array(list(speeds.values()))
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    here = {"rank": dist.get_rank(), "pid": os.getpid(), "hostname": os.uname().nodename}
    devices: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(devices, {**here, "cores": sorted(os.sched_getaffinity(0))})
    together = [set(device["cores"]) for device in devices if device["hostname"] == devices[0]["hostname"]]
    facts = results.machine(len(set().union(*together))) | dict(zip(speeds, slowest.tolist(), strict=True))
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    return Run(now, options.command, str(dist.get_backend()), facts, devices, rows)


def _measure(case: Case, options: Namespace, place: Host) -> Row:
    trial = prepare(case, dist.get_rank(), place)
    wrong = _verify(trial, options.check)
    settle = None if options.device == "cpu" else place.settle
    plan = np.array(schedule(estimate(trial.call, options.warmup, settle), options.seconds, options.iters))
    dist.broadcast(plan, 0)
    agreed = Schedule(*plan.tolist())
    dist.barrier()
    seconds = np.array(measure(trial.call, agreed, settle))
    total = np.array([wrong + _verify(trial, options.check)])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return results.make_row(case, agreed, Timing(*seconds.tolist()), int(total[0]) if options.check else None)


def _verify(trial: Trial, check: bool) -> int:
    """One call on right inputs, which is a warm-up too; the number of wrong elements if wanted."""
    trial.reset()
    trial.call()
    return trial.wrong() if check else 0


class Report:
    """Shows a run: lines on stdout, each as soon as it is known. Ranks that do not `tell` show nothing.

    On a terminal where rich is installed the lines have colours (unless NO_COLOR is set) and scroll above a bar that
    says what runs now. The bar is drawn between cases only: a thread that redraws it would be timed with the calls.
    """

    def __init__(self, bar: Progress | None, tell: bool) -> None:
        self._bar, self._tell, self._operation = bar, tell, ""

    def notes(self, lines: Sequence[str], style: str = "dim") -> None:
        """Show what is not a row: the header, the summary."""
        for text in lines if self._tell else ():
            if self._bar:
                from rich.text import Text

                # A Text has its style to itself; `style=` would be the bar's too.
                self._bar.console.print(Text(text, style), no_wrap=True, overflow="ignore", crop=False)
            else:
                print(text, flush=True)

    def begin(self, case: Case) -> None:
        """A case is being measured; a heading where the operation changes."""
        if case.operation != self._operation:
            self._operation = case.operation
            self.notes(results.heading(case.operation), "bold")
        if self._bar:
            size = f" {format_size(case.size)}" if case.size else ""
            self._bar.update(self._bar.task_ids[0], description=f"{case.operation}{size}", refresh=True)

    def add(self, row: Row) -> None:
        """It has been measured."""
        self.notes([results.line(row)], "bold red" if row.wrong else "")
        if self._bar:
            self._bar.advance(self._bar.task_ids[0])


def _bar(total: int) -> Progress | None:
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, transient=True, auto_refresh=False)
    bar.add_task("", total=total)
    return bar
