"""What `python -m fastcoll trace` finds, as a page with plots (pages/html_page.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.signature import describe
from ..pages import html_page
from ..pages.html_page import COLOURS, PageTable, Plot
from ..record.record import ranks_of
from . import divergence
from .dumps import Dump
from .timeline import timeline

COLUMNS = "rank", "pid", "host", "in, or last call", "place"
_MOST_CALLS = 4000  # that the timeline shows, the last ones


def write_html(path: Path, dumps: Sequence[Dump]) -> None:
    """Write a page about the dumps of a job.

    Raises:
        UnavailableError: Plotly is not installed.
        OSError: the file cannot be written.
    """
    waits = divergence.waits(dumps)
    parts: list[Plot | PageTable] = [timeline_plot(dumps)]
    if waits:
        rows = [(str(wait.waiter), str(wait.awaited), wait.what) for wait in waits]
        parts.append(PageTable("Who waited for whom", "", ("rank", "waited for rank", "in"), rows))
    parts.append(PageTable("All ranks", "", COLUMNS, [row_of(dump) for dump in dumps]))
    html_page.write(path, "fastcoll trace", [divergence.summary(dumps)], parts)


def row_of(dump: Dump) -> list[str]:
    """Return the table's row for a rank: the call that it is in, or its last call in the first group with calls."""
    groups = dump.record.groups
    doing = [
        f"{describe(*g.under_way.head, ranks_of(g.members))}, call {g.under_way.number} of {g.name}"
        for g in groups
        if g.under_way
    ]
    doing += [wait.doing for g in groups for wait in g.waits if not wait.number]
    if not doing:
        doing = [
            f"{describe(*g.ring[-1].head, ranks_of(g.members))}, "
            f"call {g.ring[-1].number} of {g.name}: {g.ring[-1].state}"
            for g in groups
            if g.ring
        ]
    return [
        str(dump.rank),
        str(dump.record.pid),
        dump.record.host,
        doing[0] if doing else "-",
        dump.program_line() or "-",
    ]


def timeline_plot(dumps: Sequence[Dump]) -> Plot:
    """Return a plot with a bar for each call, in a row for each rank."""
    events = [event for event in timeline(dumps)["traceEvents"] if event["ph"] == "X"]
    events = sorted(events, key=lambda event: event["ts"])[-_MOST_CALLS:]
    start = events[0]["ts"] if events else 0.0
    # A call that hangs may be far longer than all before it.
    last = (events[-1]["ts"] - start) / 1e3 if events else 1.0
    traces: list[dict[str, Any]] = []
    for number, name in enumerate(dict.fromkeys(event["name"] for event in events)):
        calls = [event for event in events if event["name"] == name]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [f"rank {event['pid']}" for event in calls],
                "base": [(event["ts"] - start) / 1e3 for event in calls],
                "x": [event["dur"] / 1e3 for event in calls],
                "marker": {"color": COLOURS[number % len(COLOURS)], "line": {"color": "white", "width": 0.5}},
                "text": [about_call(event["args"]) for event in calls],
                "textposition": "none",
                "hovertemplate": "%{text}<br>from %{base:.3f} ms for %{x:.3f} ms",
            }
        )
    layout = {
        "barmode": "overlay",
        "xaxis": {
            "title": {"text": "milliseconds since the first call that is shown"},
            "range": [0, 1.2 * last],
        },
        "yaxis": {"autorange": "reversed", "type": "category"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "showlegend": True,
    }
    caption = (
        "A bar is a call. Drag to enlarge a part; a double click shows the calls that hang to their end. Calls that "
        "were not timed share the time between timed ones."
    )
    return Plot("Timeline", caption, traces, layout, 220 + 34 * len(dumps))


def about_call(details: dict[str, Any]) -> str:
    timed = "" if details["timed"] else ", not timed"
    return (
        f"call {details['number']} of {details['group']}: {details['state']}{timed} {details.get('site', '')}"
    )
