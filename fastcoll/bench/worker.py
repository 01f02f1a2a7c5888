"""What one rank does: join the others, measure case after case together, and on rank 0 tell."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

import fastcoll as dist

from ..errors import UsageError
from .cases import Case, cases
from .export import Run, header, in_short, write_csv, write_json
from .machine import machine, memory_speed
from .operations import Trial, prepare
from .per_element import per_element
from .places import Place, place_of
from .plot import draw
from .report import Report, SilentReport, make_report
from .table import Row, make_row, summary, total_wrong
from .timing import Schedule, Timing, estimate, measure, schedule

OK, FAILED, MISUSED = range(3)
"""Exit codes: all results right; wrong results or a failed rank; a call that cannot be."""


@dataclass(frozen=True)
class Options:
    """A run as asked for: what to measure (see `cases.cases`), how, and where the results go.

    Attributes:
        device: "cpu" or "cuda": where the arrays lie.
        seconds: time to fill for each row.
        iterations: calls a row instead.
        warmup: calls before the timed ones, which estimate how long one takes.
        check: verify every element, before and after the timed calls.
        pin: cores that ranks are pinned to in turn; empty for no pinning.
        command: the words of the command line.
    """

    operations: list[str]
    dtypes: list[str]
    redops: list[str]
    sizes: list[int]
    root: int
    backend: str
    device: str
    seconds: float
    iterations: int | None
    warmup: int
    check: bool
    pin: list[int]
    json: Path | None
    csv: Path | None
    plots: Sequence[Path]
    command: list[str]


def run_spawned(rank: int, options: Options, ranks: int, init_method: str) -> None:
    """A worker that the command started itself; ends the process with rank 0's exit code."""
    _pin(options.pin, rank)
    dist.init_process_group(options.backend, init_method, world_size=ranks, rank=rank)
    sys.exit(_run(options, rank))


def run_launched(options: Options, local_rank: int) -> int:
    """The part of a process that a launcher started; returns its exit code."""
    _pin(options.pin, local_rank)
    dist.init_process_group(options.backend)
    return _run(options, local_rank)


def _run(options: Options, local_rank: int) -> int:
    """Measure and tell. Only rank 0 returns another code than OK, after everything was written."""
    first = dist.get_rank() == 0
    try:
        run = _measure_all(options, place_of(options.device, local_rank), first)
    except UsageError as error:  # the same on every rank, e.g. a reduction that the dtype does not have
        if first:
            print(f"python -m fastcoll.bench: error: {error}", file=sys.stderr, flush=True)
        return MISUSED if first else OK
    finally:
        dist.destroy_process_group()
    if not first:
        return OK
    _write(run, options)
    return FAILED if total_wrong(run.results) else OK


def _measure_all(options: Options, place: Place, tell: bool) -> Run:
    o, ranks = options, dist.get_world_size()
    todo = list(cases(o.operations, o.dtypes, o.redops, o.sizes, o.root, ranks))
    rows: list[Row] = []
    run = _describe(options, rows)
    with make_report(len(todo)) if tell else SilentReport() as report:
        report.notes(header(run))
        rows.extend(_measure_and_show(case, options, place, report) for case in todo)
        report.notes([*per_element(rows), *summary(rows), *in_short(run)])
    return run


def _describe(options: Options, rows: list[Row]) -> Run:
    speeds = memory_speed(dist.barrier)
    slowest = np.array(list(speeds.values()))
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    devices = _devices()
    facts = machine(_cores_of(devices[0]["hostname"], devices))
    facts.update(zip(speeds, slowest.tolist(), strict=True))
    return Run(
        start_time=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=options.command,
        backend=str(dist.get_backend()),
        machine=facts,
        devices=devices,
        results=rows,
    )


def _cores_of(host: str, devices: Sequence[dict[str, Any]]) -> int:
    """How many cores the ranks on a host may use together."""
    return len({core for device in devices if device["hostname"] == host for core in device["cores"]})


def _devices() -> Sequence[dict[str, Any]]:
    here = {
        "rank": dist.get_rank(),
        "pid": os.getpid(),
        "hostname": os.uname().nodename,
        "cores": sorted(os.sched_getaffinity(0)),
    }
    devices: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(devices, here)
    return devices


def _measure_and_show(case: Case, options: Options, place: Place, report: Report) -> Row:
    report.begin(case)
    row = _measure_case(case, options, place)
    report.add(row)
    return row


def _measure_case(case: Case, options: Options, place: Place) -> Row:
    trial = prepare(case, dist.get_rank(), place)
    wrong = _verify(trial, options.check)
    settle = None if options.device == "cpu" else place.settle
    estimated = estimate(trial.call, options.warmup, settle)
    plan = _as_rank_0(schedule(estimated, options.seconds, options.iterations))
    dist.barrier()
    timing = measure(trial.call, plan, settle)
    wrong += _verify(trial, options.check)
    return make_row(case, plan, _slowest(timing), _total(wrong) if options.check else None)


def _verify(trial: Trial, check: bool) -> int:
    """One call on right inputs, which is a warm-up too; the number of wrong elements if wanted."""
    trial.reset()
    trial.call()
    return trial.wrong() if check else 0


def _as_rank_0(plan: Schedule) -> Schedule:
    numbers = np.array([plan.batches, plan.calls])
    dist.broadcast(numbers, 0)
    return Schedule(*numbers.tolist())


def _slowest(timing: Timing) -> Timing:
    numbers = np.array([timing.median, timing.p99])
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return Timing(*numbers.tolist())


def _total(wrong: int) -> int:
    number = np.array([wrong])
    dist.all_reduce(number)
    return int(number[0])


def _pin(cores: list[int], local_rank: int) -> None:
    """Before the ranks meet: they choose how to wait by the cores that they have."""
    if cores:
        os.sched_setaffinity(0, {cores[local_rank % len(cores)]})


def _write(run: Run, options: Options) -> None:
    if options.json:
        write_json(options.json, run)
    if options.csv:
        write_csv(options.csv, run.results)
    for path in options.plots:
        draw(path, run)
        print(f"# picture: {path.resolve()}", flush=True)
    if not options.plots:
        print("# a picture of it: --plot FILE.png", flush=True)
