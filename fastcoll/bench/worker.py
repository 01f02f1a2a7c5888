"""What one rank does: join the others, measure case after case together, and on rank 0 show and write."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from datetime import datetime
from typing import Any

import numpy as np

import fastcoll as dist

from ..errors import UsageError
from . import results
from .cases import Case, cases
from .machine import machine, memory_speed
from .operations import Host, Trial, place_of, prepare
from .results import Row, Run
from .show import Report, draw
from .timing import Schedule, Timing, estimate, measure, schedule

OK, FAILED, MISUSED = range(3)
"""Exit codes: all results right; wrong results or a failed rank; a call that cannot be."""


def run_spawned(rank: int, options: Namespace, ranks: int, init_method: str) -> None:
    """A worker that the command started itself; ends the process with rank 0's exit code.

    `options` are a run as asked for: the command line's, completed by `command`.
    """
    _pin(options.cores, rank)
    dist.init_process_group(options.backend, init_method, world_size=ranks, rank=rank)
    sys.exit(_run(options, rank))


def run_launched(options: Namespace, local_rank: int) -> int:
    """The part of a process that a launcher started; returns its exit code."""
    _pin(options.cores, local_rank)
    dist.init_process_group(options.backend)
    return _run(options, local_rank)


def _pin(cores: list[int], local_rank: int) -> None:
    """Before the ranks meet: they choose how to wait by the cores that they have."""
    if cores:
        os.sched_setaffinity(0, {cores[local_rank % len(cores)]})


def _run(options: Namespace, local_rank: int) -> int:
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
    if options.json:
        results.write_json(options.json, run)
    if options.csv:
        results.write_csv(options.csv, run.results)
    for path in options.plot:
        draw(path, run)
        print(f"# picture: {path.resolve()}", flush=True)
    if not options.plot:
        print("# a picture of it: --plot FILE.png", flush=True)
    return FAILED if results.total_wrong(run.results) else OK


def _measure_all(options: Namespace, place: Host, tell: bool) -> Run:
    o, rows = options, list[Row]()
    todo = list(cases(o.operations, o.dtype, o.op, o.sizes, o.root, dist.get_world_size()))
    run = _describe(options, rows)
    with Report(len(todo), tell) as report:
        report.notes(results.header(run))
        for case in todo:
            report.begin(case)
            rows.append(_measure(case, options, place))
            report.add(rows[-1])
        report.notes([*results.per_element(rows), *results.summary(rows), *results.in_short(run)])
    return run


def _describe(options: Namespace, rows: list[Row]) -> Run:
    speeds = memory_speed(dist.barrier)
    slowest = np.array(list(speeds.values()))
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    here = {"rank": dist.get_rank(), "pid": os.getpid(), "hostname": os.uname().nodename}
    devices: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(devices, {**here, "cores": sorted(os.sched_getaffinity(0))})
    together = [set(device["cores"]) for device in devices if device["hostname"] == devices[0]["hostname"]]
    facts = machine(len(set().union(*together))) | dict(zip(speeds, slowest.tolist(), strict=True))
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
