"""The picture of a start-up study: seconds, and messages and bytes, over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from startup_crowd import Tally
from startup_model import Outcome

_BLUE, _ORANGE, _GREEN = "#0072B2", "#D55E00", "#009E73"


def draw(path: Path, measured: dict[int, Tally], here: dict[int, Outcome], far: dict[int, Outcome]) -> None:
    """Write the picture to `path`; its ending says the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    times, amounts = figure.subplots(1, 2)
    cluster = sorted(far)
    times.plot(
        list(measured),
        [max(tally.joined) for tally in measured.values()],
        "o",
        color=_ORANGE,
        label="measured here",
    )
    times.plot(
        list(here),
        [outcome.seconds for outcome in here.values()],
        "-",
        color=_ORANGE,
        label="simulated, this machine",
    )
    times.plot(
        cluster,
        [far[n].seconds for n in cluster],
        "s-",
        color=_BLUE,
        markersize=4,
        label="simulated, cluster",
    )
    times.plot(
        cluster, [far[n].server_busy for n in cluster], ":", color=_BLUE, label="thereof the server's work"
    )
    _dress(times, "seconds until every rank has its default group")
    _amounts(amounts, measured, far)
    figure.suptitle("Start-up through one TCP store", fontsize=11)
    figure.savefig(path, dpi=150)


def _amounts(axes: Any, measured: dict[int, Tally], far: dict[int, Outcome]) -> None:
    cluster, ranks = sorted(far), list(measured)
    axes.plot(
        ranks,
        [tally.messages.total() for tally in measured.values()],
        "o",
        color=_GREEN,
        label="messages, measured",
    )
    axes.plot(
        cluster, [far[n].messages.total() for n in cluster], "-", color=_GREEN, label="messages, simulated"
    )
    axes.plot(
        ranks,
        [tally.received / 1e3 for tally in measured.values()],
        "^",
        color=_ORANGE,
        label="kB from the server, measured",
    )
    axes.plot(
        cluster,
        [far[n].received / 1e3 for n in cluster],
        "-",
        color=_ORANGE,
        label="kB from the server, simulated",
    )
    _dress(axes, "messages and kilobytes, all ranks together")


def _dress(axes: Any, title: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("ranks")
    axes.set_title(title, loc="left", fontsize=10)
    axes.xaxis.set_major_formatter(lambda n, _: f"{n:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.grid(True, which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
