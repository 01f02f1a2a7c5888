"""One rank of the benchmark: it joins the group and measures all cases; rank 0 shows and writes the results.

The second part defines for each operation the call, its arrays, and the check of its result.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np

import fastcoll as dist

from ..errors import UsageError
from ..system import load
from . import measuring as m
from . import picture, results
from .cases import Case, cases, format_size
from .measuring import Call, Schedule, Tile, Timing, pin
from .results import Row, Run

OK, FAILED, MISUSED = range(3)
"""Exit codes: all results are right; wrong results or a failed rank; invalid options."""


def run(local_rank: int, meeting: dict[str, Any], options: Namespace) -> int:
    """Run all cases of a run on one rank; return the exit code, which is always OK on ranks other than 0."""
    pin(options.cores, local_rank)
    dist.init_process_group(options.backend, **meeting)
    first = dist.get_rank() == 0
    try:
        done = _measure_all(options, Host() if options.device == "cpu" else Cuda(local_rank), first)
    except UsageError as error:  # raised on every rank, e.g. a reduction that the dtype does not support
        if first:
            print(f"python -m fastcoll.bench: error: {error}", file=sys.stderr, flush=True)
        return MISUSED if first else OK
    except MemoryError as error:
        print(f"python -m fastcoll.bench: rank {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
        return FAILED
    finally:
        dist.destroy_process_group()
    if not first:
        return OK
    if options.json:
        results.write_json(options.json, done)
    if options.csv:
        results.write_csv(options.csv, done.results)
    if options.html:
        picture.write_html(
            options.html,
            done,
            [results.describe(done.machine), *(each[2:] for each in results.load_of(done))],
        )
        print(f"# page: {options.html.resolve()}", flush=True)
    for path in options.plot:
        picture.draw(path, done)
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
        before = load.read(), time.monotonic(), time.process_time()
        for case in todo:
            report.begin(case)
            rows.append(_measure(case, options, place))
            report.add(rows[-1])
        run.machine["cores_of_others"] = used_by_others(run, *before)
        # After the cases, as it takes longer than a start.
        speeds = results.memory_speed(dist.barrier)
        slowest = np.array(list(speeds.values()))
        dist.all_reduce(slowest, dist.ReduceOp.MIN)
        run.machine.update(zip(speeds, slowest.tolist(), strict=True))
        report.notes([*results.per_element(rows), *results.summary(rows), *results.in_short(run)])
        report.notes(results.load_of(run))
    return run


def used_by_others(run: Run, stat: str, began: float, used: float) -> float:
    """Return how many of the cores of rank 0's host other processes have used, on average. Collective."""
    seconds = [0.0] * dist.get_world_size()
    dist.all_gather_object(seconds, time.process_time() - used)
    after, took = load.read(), time.monotonic() - began
    here = [device for device in run.devices if device["hostname"] == run.devices[0]["hostname"]]
    cores = set().union(*(device["cores"] for device in here))
    return load.used_by_others(stat, after, cores, sum(seconds[device["rank"]] for device in here), took)


def _describe(options: Namespace, rows: list[Row]) -> Run:
    here = {"rank": dist.get_rank(), "pid": os.getpid(), "hostname": os.uname().nodename}
    devices: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(devices, {**here, "cores": sorted(os.sched_getaffinity(0))})
    together = [set(device["cores"]) for device in devices if device["hostname"] == devices[0]["hostname"]]
    facts = results.machine(len(set().union(*together)))
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
    """Time a collective call; return the schedule and the slowest rank's times.

    Rank 0 chooses the schedule after `warmup` calls, and ends it early after twice the time: beside other programs
    later calls may take far longer.
    """
    plan = np.array(m.schedule(m.estimate(call, warmup, settle), seconds, iterations))
    dist.broadcast(plan, 0)
    agreed = Schedule(*plan.tolist())
    dist.barrier()
    began = time.monotonic()

    def is_over() -> bool:
        over = np.array(time.monotonic() - began > 2 * seconds)
        dist.broadcast(over, 0)
        return bool(over)

    done, timing = m.measure(call, agreed, settle, None if iterations else is_over)
    slowest = np.array(timing)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return done, Timing(*slowest.tolist())


def _verify(trial: Trial, check: bool) -> int:
    """Call once on fresh inputs; return the number of wrong elements.

    The call is also a warm-up. If `check` is not set, the result is 0.
    """
    trial.reset()
    trial.call()
    return trial.wrong() if check else 0


class Report:
    """Shows a run's lines on stdout as soon as they are known.

    On a terminal, if rich is installed, the lines have colours (unless NO_COLOR is set) and scroll above a progress
    bar. The bar is drawn between cases only, because a thread that redraws it would disturb the timing.

    Args:
        total: the number of cases.
        tell: whether this rank shows lines.
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
        """Show lines that are no rows: the header and the summary."""
        for text in lines if self._tell else ():
            if self.bar:
                from rich.text import Text

                # The argument `style=` would change the style of the bar too.
                self.bar.console.print(Text(text, style), no_wrap=True, overflow="ignore", crop=False)
            else:
                print(text, flush=True)

    def begin(self, case: Case) -> None:
        """Show that a case is being measured, after a heading if the operation changes."""
        if case.operation != self._operation:
            self._operation = case.operation
            self.notes(results.heading(case.operation), "bold")
        if self.bar:
            size = f" {format_size(case.size)}" if case.size else ""
            self.bar.update(self.bar.task_ids[0], description=f"{case.operation}{size}", refresh=True)

    def add(self, row: Row) -> None:
        """Show the row of a case that was measured."""
        self.notes([results.line(row)], "bold red" if row.wrong else "")
        if self.bar:
            self.bar.advance(self.bar.task_ids[0])


class Host:
    """Makes, fills and checks arrays in host memory (see `measuring`)."""

    def zeros(self, count: int, dtype: np.dtype[Any]) -> Any:
        return np.zeros(count, dtype)

    fill, count_wrong = staticmethod(m.fill), staticmethod(m.count_wrong)

    def settle(self) -> None:
        """Wait for queued work at the end of each timed batch; calls on NumPy arrays queue none."""


class Cuda(Host):
    """CuPy arrays on GPU number `local_rank` modulo the number of GPUs, on CuPy's current stream."""

    def __init__(self, local_rank: int) -> None:
        from ..gpu import runtime

        self._cupy = cupy = runtime.cupy()  # UnavailableError without CuPy or a GPU
        cupy.cuda.Device(local_rank % cupy.cuda.runtime.getDeviceCount()).use()

    def zeros(self, count: int, dtype: np.dtype[Any]) -> Any:
        return self._cupy.zeros(count, dtype)

    def fill(self, x: Any, tile: Tile, start: int = 0) -> None:
        host = np.empty(x.shape, x.dtype)
        m.fill(host, tile, start)
        x.set(host)

    def count_wrong(self, x: Any, tile: Tile, start: int = 0) -> int:
        return m.count_wrong(x.get(), tile, start)

    def settle(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()


@dataclass(frozen=True)
class Trial:
    """One rank's part of a case."""

    place: Host
    call: Call  # calls the operation once
    given: Sequence[tuple[Any, Tile]] = ()  # arrays that the call reads, with their patterns
    # Arrays that the call writes, with the expected pattern and its start.
    expected: Sequence[tuple[Any, Tile, int]] = ()

    def reset(self) -> None:
        """Set the outputs to wrong values and fill the inputs."""
        for x, *_ in self.expected:
            x.fill(0)
        for x, tile in self.given:
            self.place.fill(x, tile)

    def wrong(self) -> int:
        """Return the number of wrong elements after `reset` and `call`."""
        return sum(self.place.count_wrong(*each) for each in self.expected)


def prepare(case: Case, rank: int, place: Host) -> Trial:
    """Return the trial of a rank, with allocated arrays."""
    return (_movement if case.redop == "none" else _reduction)(case, rank, place)


def _reduction(case: Case, rank: int, place: Host) -> Trial:
    op, count, dtype = reduce_op(case.redop), case.count, case.dtype
    given = m.reduced_input(case.redop, rank, case.ranks, dtype)
    total = m.reduced_output(case.redop, case.ranks, dtype)
    if case.operation == "reduce_scatter":
        x, out = place.zeros(case.ranks * count, dtype), place.zeros(count, dtype)
        call = partial(dist.reduce_scatter_tensor, out, x, op)
        return Trial(place, call, [(x, given)], [(out, total, rank * count)])
    symmetric = case.operation == "update_symmetric_all_reduce"
    x = dist.symmetric.empty(count, dtype) if symmetric else place.zeros(count, dtype)
    if case.operation == "reduce":
        after = total if rank == case.root else given
        return Trial(place, partial(dist.reduce, x, case.root, op), [(x, given)], [(x, after, 0)])

    def update() -> None:
        # Programs write all of an array before they reduce it. Without this write, only the reducing core would write
        # a symmetric array, and the measured time would be too short.
        np.multiply(x, dtype.type(1), out=x)
        dist.all_reduce(x, op)

    once: Call = partial(dist.all_reduce, x, op) if case.operation == "all_reduce" else update
    return Trial(place, once, [(x, given)], [(x, total, 0)])


def _movement(case: Case, rank: int, place: Host) -> Trial:
    """Return the trial of an operation that moves data.

    Block number i of a rank or the root holds `m.moved(i)`; in all_to_all i is sender * ranks + receiver.
    """
    n, root, is_root = case.ranks, case.root, rank == case.root

    def array(blocks: int = 1) -> Any:
        return place.zeros(blocks * case.count, case.dtype)

    def parts(x: Any) -> list[Any]:
        return list(x.reshape(n, case.count))

    def trial(call: Call, given: dict[int, Any], expected: dict[int, Any]) -> Trial:
        """Return a trial; the keys are the numbers of the blocks that the arrays hold."""
        inputs = [(x, m.moved(i, case.dtype)) for i, x in given.items()]
        return Trial(place, call, inputs, [(x, m.moved(i, case.dtype), 0) for i, x in expected.items()])

    match case.operation:
        case "broadcast":
            x = array()
            return trial(partial(dist.broadcast, x, root), {root: x} if is_root else {}, {root: x})
        case "all_gather":
            x, out = array(), array(n)
            call = partial(dist.all_gather_into_tensor, out, x)
            return trial(call, {rank: x}, dict(enumerate(parts(out))))
        case "gather":
            x, outs = array(), parts(array(n)) if is_root else []
            return trial(partial(dist.gather, x, outs or None, root), {rank: x}, dict(enumerate(outs)))
        case "scatter":
            xs, out = parts(array(n)) if is_root else [], array()
            return trial(partial(dist.scatter, out, xs or None, root), dict(enumerate(xs)), {rank: out})
        case "all_to_all":
            x, out = array(n), array(n)
            sent = {rank * n + peer: part for peer, part in enumerate(parts(x))}
            got = {peer * n + rank: part for peer, part in enumerate(parts(out))}
            return trial(partial(dist.all_to_all_single, out, x), sent, got)
        case "sendrecv":  # to the next rank and from the one before, at the same time
            x, out, after, before = array(), array(), (rank + 1) % n, (rank - 1) % n
            both = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, out, before)]

            def exchange() -> None:
                for work in dist.batch_isend_irecv(both):
                    work.wait()

            return trial(exchange, {rank: x}, {before: out})
        case _:
            return Trial(place, dist.barrier)


# A reduction such as a user may define: of two elements, take the one further from 0.
_ABSMAX = dist.ReduceOp.custom(lambda a, b: a if abs(a) >= abs(b) else b, "absmax")


def reduce_op(name: str) -> dist.ReduceOp:
    """Return the ReduceOp for a name in `cases.REDOPS`."""
    return _ABSMAX if name == "custom" else getattr(dist.ReduceOp, name.upper())
