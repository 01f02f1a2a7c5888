"""A profile as a page with plots (pages/html_page.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..pages import html_page
from ..pages.html_page import COLOURS, PageTable, Plot
from .merging import Profile
from .report import MEANING, RANK_COLUMNS, columns_of, rank_row, row_of, size_of, summary

_MOST_BARS, _MOST_RANKS = 16, 128
_OUTSIDE, _TRANSFER, _WAITING = "#BBBBBB", COLOURS[0], COLOURS[1]


def write_html(profile: Profile, path: Path) -> None:
    """Write a page with the profile's plots and tables.

    Raises:
        UnavailableError: Plotly is not installed.
        OSError: the file cannot be written.
    """
    html_page.write(path, "fastcoll profile", summary(profile), parts(profile))


def parts(profile: Profile) -> list[Plot | PageTable]:
    """Return the page's plots and tables."""
    found: list[Plot | PageTable] = [of_ranks(profile)]
    if profile.entries:
        found += [of_operations(profile), of_durations(profile)]
    if profile.waits:
        found.append(of_waits(profile))
    rows = [row_of(profile, entry) for entry in profile.entries]
    found.append(PageTable("All operations", MEANING, columns_of(profile), rows))
    found.append(PageTable("All ranks", "", RANK_COLUMNS, [rank_row(each) for each in profile.ranks]))
    return found


def _bar(name: str, x: Sequence[Any], y: Sequence[Any], colour: str) -> dict[str, Any]:
    """Return a trace of horizontal bars; y has the names of the bars."""
    return {"type": "bar", "orientation": "h", "name": name, "x": x, "y": y, "marker": {"color": colour}}


def _stacked(title: str, names: Sequence[str]) -> dict[str, Any]:
    longest = max(map(len, names), default=0)
    return {
        "barmode": "stack",
        "xaxis": {"title": {"text": title}},
        "yaxis": {"autorange": "reversed", "type": "category"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "margin": {"l": 30 + 7 * longest, "r": 20, "t": 50, "b": 60},
    }


def of_ranks(profile: Profile) -> Plot:
    ranks = profile.ranks[:_MOST_RANKS]
    names = [f"rank {each.rank}" for each in ranks]
    traces = [
        _bar("outside of calls", [each.outside for each in ranks], names, _OUTSIDE),
        _bar("transfer", [each.transfer for each in ranks], names, _TRANSFER),
        _bar("waiting", [each.waiting for each in ranks], names, _WAITING),
    ]
    caption = "A rank that spends more time outside of calls than the others makes the others wait."
    return Plot("Time of each rank", caption, traces, _stacked("seconds", names), 160 + 24 * len(names))


def of_operations(profile: Profile) -> Plot:
    shown = [entry for entry in profile.entries if entry.blocks][:_MOST_BARS]
    count = len(profile.ranks)
    names = _names(shown, profile)
    waiting = [sum(entry.waits.values()) / count for entry in shown]
    total = [sum(entry.seconds.values()) / count for entry in shown]
    traces = [
        _bar("transfer", [t - w for t, w in zip(total, waiting, strict=True)], names, _TRANSFER),
        _bar("waiting", waiting, names, _WAITING),
    ]
    caption = "Seconds in calls that blocked the program, on average over ranks."
    return Plot(
        "Time of each operation and size", caption, traces, _stacked("seconds", names), 160 + 28 * len(names)
    )


def _names(entries: Sequence[Any], profile: Profile) -> list[str]:
    several = len({entry.group for entry in profile.entries}) > 1
    return [f"{e.operation} {size_of(e)}" + (f" in {e.group}" if several else "") for e in entries]


def of_durations(profile: Profile) -> Plot:
    shown = [entry for entry in profile.entries if entry.timed > 0][:_MOST_BARS]
    names = _names(shown, profile)
    points = {"type": "scatter", "mode": "markers", "y": names}
    traces = [
        points | {"name": "p50", "x": [e.p50_us for e in shown], "marker": {"color": COLOURS[0], "size": 11}},
        points
        | {
            "name": "p99",
            "x": [e.p99_us for e in shown],
            "marker": {"color": COLOURS[1], "size": 11, "symbol": "diamond"},
        },
    ]
    layout = _stacked("microseconds", names)
    layout["xaxis"] |= {"type": "log", "dtick": "D2"}  # ticks at 1, 2 and 5 of each power of ten
    caption = "The median and the 99th percentile of a call, waits included, over all ranks."
    return Plot("How long a call takes", caption, traces, layout, 160 + 28 * len(names))


def of_waits(profile: Profile) -> Plot:
    ranks = [each.rank for each in profile.ranks][:_MOST_RANKS]
    names = [str(rank) for rank in ranks]
    cells = [[profile.waits.get((waiter, awaited), 0.0) for awaited in ranks] for waiter in ranks]
    heat: dict[str, Any] = {"type": "heatmap", "z": cells, "x": names, "y": names, "colorscale": "Blues"}
    heat["colorbar"] = {"title": {"text": "seconds"}}
    if len(ranks) <= 16:
        heat |= {"texttemplate": "%{z:.3g}"}
    layout = {
        "xaxis": {"title": {"text": "the rank that was waited for"}, "type": "category"},
        "yaxis": {"title": {"text": "the rank that waited"}, "type": "category", "autorange": "reversed"},
    }
    caption = "A dark column is a rank that holds the others up."
    return Plot("Who waited for whom", caption, [heat], layout, 200 + 34 * min(len(ranks), 16))
