"""Turn dumps into pictures: a timeline for Chrome's or Perfetto's viewer, and a drawing of the ranks' waits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from ..core.signature import describe
from ..record.record import CallRecord, GroupRecord, ranks_of
from .divergence import Edge
from .dumps import Dump


def timeline(dumps: Sequence[Dump]) -> dict[str, Any]:
    """Return the calls of all ranks in the Trace Event Format; times in microseconds.

    The viewer shows a process for each rank, and in it a thread for each group. Ranks measure the times of some calls
    only. The untimed calls between two timed ones get equal parts of the time between these, and are marked as not
    timed.
    """
    events: list[dict[str, Any]] = []
    for dump in dumps:
        record = dump.record
        about = f"rank {record.rank} (pid {record.pid} on {record.host})"
        events.append({"ph": "M", "pid": record.rank, "name": "process_name", "args": {"name": about}})
        order = {"sort_index": record.rank}
        events.append({"ph": "M", "pid": record.rank, "name": "process_sort_index", "args": order})
        for group in record.groups:
            row, ranks = {"pid": record.rank, "tid": group.serial}, ranks_of(group.members)
            events.append({"ph": "M", **row, "name": "thread_name", "args": {"name": group.name}})
            for call, began, ended, timed in _times(group, int(dump.time * 1e9)):
                details = {"number": call.number, "group": group.name, "state": call.state, "timed": timed}
                if call.site:
                    details["site"] = call.site
                shown = {"name": describe(*call.head, ranks), "cat": group.backend, "args": details}
                events.append({"ph": "X", **row, **shown, "ts": began / 1e3, "dur": (ended - began) / 1e3})
        for reason in dump.reasons:
            event = {"ph": "i", "s": "p", "pid": record.rank, "tid": 0, "ts": reason.time * 1e6}
            events.append({**event, "name": reason.why})
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _times(group: GroupRecord, now: int) -> Iterator[tuple[CallRecord, int, int, bool]]:
    """Yield each call from the first timed one on, with its begin and end in ns and whether these were measured."""
    between: list[CallRecord] = []
    before = 0
    since = {wait.number: wait.since for wait in group.waits if wait.number}  # also of the call that failed
    for call in group.ring:
        under_way = group.under_way is not None and call.number == group.under_way.number
        began = call.began or (group.since if under_way else since.get(call.number, 0))
        if not began:
            between.append(call)
            continue
        if before:
            yield from _spread(between, before, began)
        between = []
        ended = now if under_way else max(call.ended, began)
        yield call, began, ended, under_way or bool(call.ended)
        before = ended
    if before and between:  # these calls have no timed call after them, so each gets 1 us
        yield from _spread(between, before, min(before + 1000 * len(between), max(now, before)))


def _spread(calls: Sequence[CallRecord], start: int, end: int) -> Iterator[tuple[CallRecord, int, int, bool]]:
    share = max(end - start, 0) / max(len(calls), 1)
    for k, call in enumerate(calls):
        yield call, int(start + k * share), int(start + (k + 1) * share), False


# ---- who waited for whom ---------------------------------------------------------------------------------

_SIZE, _MARGIN = 640, 90
_MOST_DRAWN = 64


def picture(waits: Sequence[Edge], world_size: int, silent: Sequence[int]) -> str:
    """Return an SVG with a circle for each rank and an arrow from each waiting rank to the ranks that it waits for.

    A rank for which others wait and which does not wait itself is red; a rank without a dump is grey. In a world of
    more than 64 ranks, the SVG has at most 64 ranks, all of which wait, are waited for, or have no dump.
    """
    waiting, awaited = {wait.waiter for wait in waits}, {wait.awaited for wait in waits}
    ranks = sorted(waiting | awaited | {*silent}) if world_size > _MOST_DRAWN else list(range(world_size))
    ranks = ranks[:_MOST_DRAWN]
    middle, radius = _SIZE / 2, _SIZE / 2 - _MARGIN
    dot = max(8.0, min(24.0, math.pi * radius / max(len(ranks), 1) * 0.7))
    places = {}
    for k, rank in enumerate(ranks):
        angle = 2 * math.pi * k / len(ranks) - math.pi / 2
        places[rank] = (middle + radius * math.cos(angle), middle + radius * math.sin(angle))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIZE} {_SIZE + 40}" font-family="sans-serif">',
        '<defs><marker id="a" viewBox="0 0 10 10" refX="10" refY="5" markerWidth="9" markerHeight="9" '
        'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="#345"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    parts += [
        _arrow(places[wait.waiter], places[wait.awaited], dot, wait)
        for wait in waits
        if wait.waiter in places and wait.awaited in places and wait.waiter != wait.awaited
    ]
    for rank, (x, y) in places.items():
        fill = "#bbb" if rank in silent else "#d33" if rank in awaited - waiting else "#dbe7f3"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{dot:.1f}" fill="{fill}" stroke="#345"/>'
            f'<text x="{x:.1f}" y="{y + dot / 3:.1f}" font-size="{dot:.0f}" text-anchor="middle">{rank}</text>'
        )
    legend = "arrow: waits for; red: is waited for and does not wait; grey: left no file"
    parts.append(
        f'<text x="{middle}" y="{_SIZE + 20}" font-size="14" text-anchor="middle" fill="#345">{legend}</text></svg>'
    )
    return "\n".join(parts)


def _arrow(start: tuple[float, float], end: tuple[float, float], dot: float, wait: Edge) -> str:
    """Draw an arrow from circle to circle, shifted a little to its right, so that opposite arrows do not overlap."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    long = math.hypot(dx, dy)
    ux, uy = dx / long, dy / long
    aside = dot / 4
    x1, y1 = start[0] + ux * dot - uy * aside, start[1] + uy * dot + ux * aside
    x2, y2 = end[0] - ux * (dot + 2) - uy * aside, end[1] - uy * (dot + 2) + ux * aside
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#345" marker-end="url(#a)">'
        f"<title>rank {wait.waiter} waits for rank {wait.awaited}: {escape(wait.what)}</title></line>"
    )
