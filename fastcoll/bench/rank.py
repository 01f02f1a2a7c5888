"""What one rank does: join the others, measure case after case together, and on rank 0 show and write."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from datetime import datetime
from typing import Any

import numpy as np

import fastcoll as dist

from ..errors import UsageError
from . import results
from .cases import Case, cases, format_size
from .measuring import Call, Schedule, Timing, estimate, measure, schedule
from .operations import Host, Trial, place_of, prepare
from .results import Row, Run

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
    report = Report(len(todo), tell)
    with report.bar or nullcontext():
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
    plan, timing = timed(trial.call, options.warmup, options.seconds, options.iters, settle)
    total = np.array([wrong + _verify(trial, options.check)])
    dist.all_reduce(total)
    return results.make_row(case, plan, timing, int(total[0]) if options.check else None)


def timed(
    call: Call, warmup: int, seconds: float, iterations: int | None = None, settle: Call | None = None
) -> tuple[Schedule, Timing]:
    """How often a collective call was made, which rank 0 decides after `warmup` calls, and the slowest rank's times."""
    plan = np.array(schedule(estimate(call, warmup, settle), seconds, iterations))
    dist.broadcast(plan, 0)
    agreed = Schedule(*plan.tolist())
    dist.barrier()
    slowest = np.array(measure(call, agreed, settle))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return agreed, Timing(*slowest.tolist())


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

    def __init__(self, total: int, tell: bool) -> None:
        self._tell, self._operation, self.bar = tell, "", None
        if tell and sys.stdout.isatty():
            with suppress(ImportError):
                from rich import progress as p

                shown = p.BarColumn(), p.MofNCompleteColumn(), p.TimeElapsedColumn()
                text = p.TextColumn("{task.description}")
                self.bar = p.Progress(*shown, text, transient=True, auto_refresh=False)
                self.bar.add_task("", total=total)

    def notes(self, lines: Sequence[str], style: str = "dim") -> None:
        """Show what is not a row: the header, the summary."""
        for text in lines if self._tell else ():
            if self.bar:
                from rich.text import Text

                # A Text has its style to itself; `style=` would be the bar's too.
                self.bar.console.print(Text(text, style), no_wrap=True, overflow="ignore", crop=False)
            else:
                print(text, flush=True)

    def begin(self, case: Case) -> None:
        """A case is being measured; a heading where the operation changes."""
        if case.operation != self._operation:
            self._operation = case.operation
            self.notes(results.heading(case.operation), "bold")
        if self.bar:
            size = f" {format_size(case.size)}" if case.size else ""
            self.bar.update(self.bar.task_ids[0], description=f"{case.operation}{size}", refresh=True)

    def add(self, row: Row) -> None:
        """It has been measured."""
        self.notes([results.line(row)], "bold red" if row.wrong else "")
        if self.bar:
            self.bar.advance(self.bar.task_ids[0])
