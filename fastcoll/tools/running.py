"""`python -m fastcoll status`: the jobs of this user on this machine, and the ranks that hold them up."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress

from .._version import __version__
from ..core.signature import describe
from ..record.record import GroupRecord, ranks_of
from .blame import MIN_WAIT_SECONDS, Rank, blocks
from .jobs_here import ABOUT_JOB, JOB_COLUMNS, Outside, RunningJob, look, no_job
from .printing import Printer, seconds_of
from .waits import RankWait, state_of

_WATCH_SECONDS = 1.0
_MOST_DIAGNOSES = 8
_OUTSIDE = "its own code, with an asynchronous operation under way"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 if it names no job."""
    parser = argparse.ArgumentParser(
        prog="python -m fastcoll status",
        description="Show this user's jobs on this machine: the ranks that hold each job up, and each rank's call.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("name", nargs="?", metavar="JOB", help=ABOUT_JOB)
    which.add_argument("--job", metavar="JOB", help="the same")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    parser.add_argument(
        "--watch", action="store_true", help="show it again every second, until Ctrl-C or the end of the job"
    )
    given = parser.parse_args(words)
    name, show, code = given.job if given.name is None else given.name, Printer(), 0
    with suppress(KeyboardInterrupt) if given.watch else nullcontext():
        found = look(name)
        code = int(name is not None and not any(found))
        while True:
            if given.watch:
                show.anew()
            _print(*found, name, given.json, show)
            sys.stdout.flush()
            if not (given.watch and any(found)):
                break
            time.sleep(_WATCH_SECONDS)
            found = look(name)
    return code


def _print(
    jobs: Sequence[RunningJob], alone: Sequence[Outside], name: str | None, as_json: bool, show: Printer
) -> None:
    now = time.time()
    if as_json:
        about = {"fastcoll": __version__, "host": os.uname().nodename}
        outside = [each.as_dict(now) for each in alone]
        show.json({**about, "jobs": [job.as_dict(now) for job in jobs], "in_no_group": outside})
        return
    if len(jobs) > 1:
        show.table(JOB_COLUMNS, [job.row(now) for job in jobs])
        show.say("")
    for number, job in enumerate(jobs):
        show.say("" if number else None)
        _show(job, now, show)
    if alone:
        show.say("" if jobs else None)
        show.say(
            "in no group of fastcoll: ranks that join a job, and other processes that launchers have started",
            "bold",
        )
        columns = ("rank", "pid", "state", "cores", "joining for", "kernel", "command")
        show.table(columns, [each.row(now) for each in alone])
    if not jobs and not alone:
        show.say(no_job(name))


# ---- showing jobs ------------------------------------------------------------------------------------------


def _show(job: RunningJob, now: float, show: Printer) -> None:
    show.say(job.title(now), "bold")
    diagnoses = job.diagnoses(now)
    for diagnosis in diagnoses[:_MOST_DIAGNOSES]:
        show.say(diagnosis.text, "bad", indent="  ")
        for line in diagnosis.more:
            show.say(line, indent="    ")
        show.say(f"next: {diagnosis.next}", indent="    ")
    if len(diagnoses) > _MOST_DIAGNOSES:
        show.say(f"and {len(diagnoses) - _MOST_DIAGNOSES} more, marked below", "bad", indent="  ")
    if not diagnoses:
        show.say(f"no rank has waited for longer than {MIN_WAIT_SECONDS:g} s", "good", indent="  ")
    blamed = {rank for diagnosis in diagnoses for rank in diagnosis.ranks}
    waits = job.waits(now)
    rows = [row for rank in sorted(job.ranks) for row in _rows(job.ranks[rank], waits)]
    for peer in job.unseen():
        cells = str(peer.rank), str(peer.pid), job.whereabouts(peer)
        rows.append((*cells, "", "", "", "", "", job.absence(peer)))
    marked = [("-->" if int(row[0]) in blamed else "", *row) for row in rows]
    columns = ("", "rank", "pid", "state", "cores", "group", "call", "since", "waits for", "in")
    show.table(columns, marked, ["bad"] * len(marked))


def _rows(rank: Rank, waits: Sequence[RankWait]) -> list[tuple[str, ...]]:
    """Return a row for each call or message that a rank is in, or one row about its last call."""
    process = rank.process
    about = (str(rank.rank), str(process.pid), state_of(process.state).name, f"{process.cores:.2f}")
    rows: list[tuple[str, ...]] = []
    for wait in waits:
        if wait.rank == rank.rank:
            late = ", ".join(map(str, sorted(wait.late)))
            since = seconds_of(wait.seconds) if wait.seconds else ""
            what = wait.what if blocks(rank, wait, waits) else f"{_OUTSIDE}: {wait.what}"
            rows.append((*about, wait.group.name, str(wait.number or ""), since, late, what))
    failed = (group for group in rank.record.groups if group.failure)
    rows += [(*about, group.name, str(group.calls), "", "", f"failed: {group.failure}") for group in failed]
    return rows or [(*about, *_idle(rank.record.groups))]


def _idle(groups: Sequence[GroupRecord]) -> tuple[str, ...]:
    """Return the last cells of the row of a rank that is in no call.

    They show the rank's last call in the group in which it has made most calls.
    """
    used = max(groups, key=lambda group: group.calls, default=None)
    if used is None or not used.calls:
        return "", "", "", "", "no call yet"
    last = f"; the last was {describe(*used.ring[-1].head, ranks_of(used.members))}" if used.ring else ""
    return used.name, str(used.calls), "", "", f"no call{last}"
