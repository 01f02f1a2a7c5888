"""`python -m fastcoll top`: a live view of a job's ranks, from their flight records.

The ranks do nothing for it: `Watch` reads the records of those on this machine and /proc, as `status` does, rates.py
computes, and top_view.py shows. Those of other machines are read by their launchers (other_nodes.py). The time that
reading takes limits the number of samples, so that sampling uses at most a tenth of a core.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from ..errors import install
from ..record.record import OpenRecord, Record, open_record
from .blame import LEFT, Rank
from .jobs_here import (
    ABOUT_JOB,
    JOB_COLUMNS,
    TICKS,
    RunningJob,
    glance,
    look,
    memory_of,
    no_job,
    pids_here,
    process_of,
    start_time_of,
    ticks_of,
)
from .printing import Printer
from .rates import RankRates, Reading, Sample, View, end_of, prompt, rates, sample_of, slowest

_SAMPLES_A_SECOND = 40
_SHARE_OF_A_CORE = 0.1
_WINDOW = 5.0  # a view shows the waits of the last seconds: on busy cores half a second has few samples


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 if there is not exactly one job to show."""
    parser = argparse.ArgumentParser(
        prog="python -m fastcoll top",
        description="Show what a job's ranks do, twice a second, until q, Ctrl-C or the job's end. Ranks of other "
        "machines are shown if fastcoll's launcher has started the job.",
    )
    parser.add_argument("name", nargs="?", metavar="JOB", help=ABOUT_JOB)
    parser.add_argument("--once", action="store_true", help="show it once, after one interval")
    parser.add_argument(
        "--interval", type=float, default=0.5, metavar="SECONDS", help="between two views (default: 0.5)"
    )
    given = parser.parse_args(words)
    if not 0 < given.interval < math.inf:
        parser.error(f"--interval is a number of seconds above 0, got {given.interval}")
    try:
        from . import top_screen
        from .other_nodes import OtherNodes
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "rich":
            raise
        cure = f"pip install rich, or {install('top')}"
        print(f"fastcoll: top needs rich, which is not installed: {cure}", file=sys.stderr)
        return 1
    jobs, _ = look(given.name)
    if len(jobs) != 1:
        out = Printer()
        if jobs:
            out.table(JOB_COLUMNS, [job.row(time.time()) for job in jobs])
        out.say("\ntop shows one job: python -m fastcoll top JOB" if jobs else no_job(given.name))
        return 1
    view = None
    with (
        suppress(KeyboardInterrupt), Watch(jobs[0]) as watch, OtherNodes(jobs[0]) as others,
        top_screen.opened(given.once) as screen,
    ):  # fmt: skip
        for own in views(watch, given.interval, screen.wait):
            view = others.add_to(own)
            if given.once and others.are_late(view):
                continue
            screen.show(view)
            if given.once:
                break
    if view is not None and view.end:
        screen.leave(view)
    return 0


def views(watch: Watch, interval: float, wait: Callable[[float], bool | None]) -> Iterator[View]:
    """Yield a view each `interval` seconds, until the job has ended or `wait` returns True."""
    before = watch.read()
    recent: deque[tuple[float, Sample]] = deque()
    while True:
        end = time.monotonic() + interval
        since = min(end - _WINDOW, before.time)
        while recent and recent[0][0] < since:
            recent.popleft()
        while time.monotonic() < end:
            began = time.thread_time()
            recent.append((time.monotonic(), watch.sample()))
            least = (time.thread_time() - began) / _SHARE_OF_A_CORE
            # The pauses have random lengths, so that the samples are not in step with the job.
            pause = max(1 / _SAMPLES_A_SECOND, least) * random.uniform(0.5, 1.5)
            if wait(max(0.0, min(pause, end - time.monotonic()))):
                return
        after = watch.read()
        taken_in = after.time - (recent[0][0] if recent else before.time)
        yield view_of(watch, before, after, prompt([sample for _, sample in recent]), taken_in)
        if not after.ranks:
            return
        before = after


def view_of(
    watch: Watch, before: Reading, after: Reading, samples: Sequence[Sample], taken_in: float
) -> View:
    """Return what two readings show, and samples that were taken in the last seconds before the second one."""
    job, now = watch.job, time.time()
    rows = rates(before, after, samples)
    read = {row.rank for row in rows}
    rows += [
        RankRates(peer.rank, peer.pid, "", call=job.absence(peer))
        for peer in job.unseen()
        if peer.rank not in read
    ]
    rows.sort(key=lambda row: row.rank)
    troubles = [diagnosis.text for diagnosis in job.diagnoses(now)]
    end = "" if after.ranks else end_of(rows)
    return View(watch.whole.title(now), rows, len(samples), taken_in, slowest(samples), troubles, end)


class Watch:
    """The ranks of a job on this machine, which are read again and again.

    Attributes:
        job: the ranks as `read` has read them last; if it has found none, as it has read them before.
        whole: the job when it had most ranks.
    """

    def __init__(self, job: RunningJob) -> None:
        self.job = self.whole = job
        self._open: dict[int, tuple[OpenRecord, int]] = {}  # by pid: its record and its start time
        self._used: dict[int, tuple[float, int]] = {}  # by pid: a time, and the CPU time in ticks until then
        self._gone: dict[int, Record] = {}  # by rank: the last record
        self._find(rank.process.pid for rank in job.ranks.values())

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for opened, _start_time in self._open.values():
            opened.close()
        self._open.clear()

    def read(self) -> Reading:
        """Read all ranks completely; look for new ones if ranks are missing."""
        if any(self.job.whereabouts(peer) == LEFT for peer in self.job.unseen()):
            self._find(pids_here())
        before, ranks, memory, now = self.job.ranks, {}, {}, time.monotonic()
        for pid in self._running():
            record, used = self._open[pid][0].read(), ticks_of(pid)
            if record is None or not record.groups or used is None:
                self._close(pid)  # it has left; if it makes groups again, `_find` finds their record
                continue
            since, earlier = self._used.get(pid, (now, 0))
            self._used[pid] = now, used
            cores = (used - earlier) / TICKS / (now - since) if now > since else 0.0
            old = before.get(record.rank)
            was = old.record if old is not None and old.process.pid == pid else None
            with suppress(OSError):  # it has ended
                ranks[record.rank] = Rank(record, process_of(pid, cores), was)
                memory[record.rank] = memory_of(pid)
        if ranks:
            self.job = RunningJob(self.job.name, ranks)
        if len(ranks) > len(self.whole.ranks):
            self.whole = self.job
        return Reading(now, ranks, memory, {rank: r for rank, r in self._gone.items() if rank not in ranks})

    def sample(self) -> Sample:
        """Find out who waits for whom at this moment."""
        pids, began = self._running(), time.monotonic()
        readings = [{pid: self._open[pid][0].read(1) for pid in pids} for _ in range(3)]
        took, processes = time.monotonic() - began, {}
        for pid in pids:
            with suppress(OSError):
                processes[pid] = glance(pid)
        before, ranks, after = (
            {
                record.rank: Rank(record, process)
                for pid, process in processes.items()
                if (record := reading[pid])
            }
            for reading in readings
        )
        return sample_of(before, ranks, after, self.job.whereabouts, time.time(), took)

    def _running(self) -> list[int]:
        """Return the pids of the processes that run; close the records of the others."""
        for pid, (_, start_time) in list(self._open.items()):
            if start_time_of(pid) != start_time:
                self._close(pid)
        return list(self._open)

    def _close(self, pid: int) -> None:
        """Close the record of a process that has ended or left, and keep what it has now."""
        opened, _ = self._open.pop(pid)
        if (record := opened.read(1)) is not None:
            self._gone[record.rank] = record
        opened.close()

    def _find(self, pids: Iterable[int]) -> None:
        """Open the records of those processes that belong to the job."""
        for pid in pids:
            with suppress(OSError):
                if pid in self._open or (opened := open_record(pid)) is None:
                    continue
                record = opened.read(1)
                if record is not None and record.job == self.job.name and record.groups:
                    self._open[pid] = opened, record.start_time
                else:
                    opened.close()
