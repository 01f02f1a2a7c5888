"""A profile as text, and as data for JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..tools.printing import bytes_of, counted, digits_of
from .merging import Profile, ProfileEntry, RankTime

COLUMNS = (
    "operation", "size", "calls", "bytes", "share", "transfer", "waiting", "mostly for", "p50", "p99", "spread"
)  # fmt: skip
RANK_COLUMNS = "rank", "pid", "host", "run", "outside calls", "transfer", "waiting", "others waited for it"
MEANING = (
    "share: of the run, on average over ranks. transfer, waiting: time, on average over ranks; a rank waits until the "
    "last rank enters the call. spread: from the first rank's entry to the last one's, on average."
)
_MOST = 20
_MUCH = 0.05  # the share of the time in calls above which first calls are mentioned


def text_of(profile: Profile) -> str:
    """Return the profile as tables and sentences, in lines of text."""
    lines = [*summary(profile), ""]
    shown = list(profile.entries[:_MOST])
    if shown:
        lines += aligned(columns_of(profile), [row_of(profile, entry) for entry in shown])
        if rest := len(profile.entries) - len(shown):
            lines.append(f"and {counted(rest, 'row')} with less time, which --json and --html have")
        lines += ["", MEANING, ""]
    lines += aligned(RANK_COLUMNS, [rank_row(each) for each in profile.ranks])
    return "\n".join(lines) + "\n"


def summary(profile: Profile) -> list[str]:
    """Return sentences about the whole profile, and about what it lacks."""
    run = sum(each.run for each in profile.ranks)
    transfer, waiting = (
        sum(getattr(each, name) for each in profile.ranks) for name in ("transfer", "waiting")
    )
    calls = max(
        (sum(e.calls.get(each.rank, 0) for e in profile.entries) for each in profile.ranks), default=0
    )
    hosts = {each.host for each in profile.ranks}
    where = next(iter(hosts)) if len(hosts) == 1 else f"{len(hosts)} hosts"
    longest = max((each.run for each in profile.ranks), default=0.0)
    ranks, most = counted(len(profile.ranks), "rank"), counted(calls, "call")
    parts = [f"{ranks} on {where}, {digits_of(longest)} s, up to {most} a rank"]
    if run:
        parts.append(f"{_percent(transfer / run)} of the time in transfer, {_percent(waiting / run)} waiting")
    lines = ["; ".join(parts)]
    if waiting > 0:
        worst = max(profile.ranks, key=lambda each: each.awaited)
        lines.append(
            f"{_percent(worst.awaited / waiting)} of the waiting was for rank {worst.rank}; {imbalance(profile)}"
        )
    return lines + notes(profile)


def imbalance(profile: Profile) -> str:
    outside = [each.outside for each in profile.ranks]
    mean = sum(outside) / len(outside)
    most = max(profile.ranks, key=lambda each: each.outside)
    above = most.outside / mean - 1 if mean else 0.0
    return f"outside of calls, rank {most.rank} spent most time, {_percent(above)} above the mean"


def notes(profile: Profile) -> list[str]:
    """Return sentences about what the profile lacks."""
    found = []
    if profile.missing:
        ranks = ", ".join(map(str, profile.missing))
        found.append(
            f"no profile of ranks {ranks}: they made no group, or write to a folder that is not seen here"
        )
    if killed := [each.rank for each in profile.ranks if not each.is_complete]:
        found.append(
            f"ended without their exit handlers, so shown until their last call: ranks {', '.join(map(str, killed))}"
        )
    first = sum(sum(entry.first.values()) for entry in profile.entries if entry.blocks)
    blocked = sum(sum(entry.seconds.values()) for entry in profile.entries if entry.blocks)
    if first > _MUCH * blocked:
        each = _seconds(first / len(profile.ranks))
        found.append(
            f"the first call of each row loads or compiles functions: {each} a rank, counted as transfer"
        )
    if profile.dropped:
        found.append(
            f"{counted(profile.dropped, 'call')} of compiled code or in the background were not seen"
        )
    if profile.sampled > 1:
        found.append(
            f"calls, bytes and times are of all calls; waits and percentiles are of one call in {profile.sampled}"
        )
    if profile.skew_us is not None:
        found.append(
            f"the clocks of the machines agree within {profile.skew_us:.3g} us, as calls of all ranks show"
            if profile.skew_us < float("inf")
            else "the clocks of the machines are aligned by the time of day only, so waits may be wrong"
        )
    return found


def columns_of(profile: Profile) -> Sequence[str]:
    """Return the names of an entry's columns; the group is a column if there are several."""
    return ("group", *COLUMNS) if _has_groups(profile) else COLUMNS


def _has_groups(profile: Profile) -> bool:
    return len({entry.group for entry in profile.entries}) > 1


def row_of(profile: Profile, entry: ProfileEntry) -> list[str]:
    """Return an entry's cells, in the order of `columns_of`."""
    count = len(profile.ranks)
    waiting = sum(entry.waits.values())
    transfer = sum(entry.seconds.values()) - waiting
    is_known, is_timed = entry.attributed > 0.5, entry.timed > 0
    late, seconds = max(entry.awaited.items(), key=lambda each: each[1], default=(-1, 0.0))
    mostly = f"rank {late} ({_percent(seconds / waiting)})" if is_known and late >= 0 and waiting else "-"
    cells = [
        entry.operation,
        size_of(entry),
        str(max(entry.calls.values())),
        bytes_of(max(entry.nbytes.values())),
        _percent(profile.share(entry)) if entry.blocks else "-",
        _seconds(transfer / count) if is_timed else "-",
        _seconds(waiting / count) if is_known and is_timed else "-",
        mostly,
        _microseconds(entry.p50_us) if is_timed else "-",
        _microseconds(entry.p99_us) if is_timed else "-",
        "-" if entry.spread_us is None else _microseconds(entry.spread_us),
    ]
    return [entry.group, *cells] if _has_groups(profile) else cells


def rank_row(each: RankTime) -> list[str]:
    """Return a rank's cells, in the order of RANK_COLUMNS."""
    times = each.run, each.outside, each.transfer, each.waiting, each.awaited
    return [str(each.rank), str(each.pid), each.host, *map(_seconds, times)]


def size_of(entry: ProfileEntry) -> str:
    """Return the upper end of an entry's size class."""
    return f"<= {bytes_of(entry.most_bytes)}" if entry.most_bytes > 1 else bytes_of(entry.most_bytes)


def aligned(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; the first column is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if k else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (names, *rows)
    ]


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.995 else f"{share:.0%}"


def _seconds(seconds: float) -> str:
    return f"{digits_of(seconds)} s" if seconds >= 1 else f"{digits_of(seconds * 1e3)} ms"


def _microseconds(microseconds: float) -> str:
    return f"{digits_of(microseconds)} us" if microseconds < 1e3 else _seconds(microseconds / 1e6)


def as_data(profile: Profile) -> dict[str, Any]:
    """Return the profile as data for JSON; times in seconds, or in microseconds if the name ends in _us."""
    entries = [asdict(entry) | {"share": profile.share(entry)} for entry in profile.entries]
    return {
        "ranks": [asdict(each) | {"outside": each.outside} for each in profile.ranks],
        "missing": list(profile.missing),
        "dropped": profile.dropped,
        "sampled": profile.sampled,
        "skew_us": profile.skew_us,
        "entries": entries,
        "waits": [
            {"waiter": waiter, "awaited": awaited, "seconds": seconds}
            for (waiter, awaited), seconds in sorted(profile.waits.items())
        ],
    }


def write_json(profile: Profile, path: Path) -> None:
    """Write the profile as a JSON object."""
    path.write_text(json.dumps(as_data(profile), indent=2) + "\n")
