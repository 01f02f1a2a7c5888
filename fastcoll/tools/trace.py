"""`python -m fastcoll trace`: what went wrong first in a job, from the dumps of its ranks in FASTCOLL_TRACE_DIR."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.signature import describe
from ..errors import UnavailableError
from ..record.record import ranks_of
from ..system.own_files import open_anew
from . import divergence
from .dumps import Dump, load
from .printing import Printer
from .timeline import picture, timeline
from .trace_page import COLUMNS, row_of, write_html


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 if there are no dumps."""
    options = _parser().parse_args(arguments)
    folder = Path(options.folder)
    dumps = load(folder, lambda path: print(f"fastcoll trace: {path} cannot be read", file=sys.stderr))
    if not dumps:
        cure = "ranks write there when FASTCOLL_TRACE_DIR names it: on errors, SIGQUIT and fastcoll.dump()"
        print(f"fastcoll trace: no rank has left a file in {folder}; {cure}", file=sys.stderr)
        return 1
    if options.json:
        Printer().json(_as_data(dumps))
        return 0
    if options.html is not None:
        try:
            write_html(options.html, dumps)
        except (UnavailableError, OSError) as error:
            print(f"fastcoll trace: {options.html} cannot be written: {error}", file=sys.stderr)
            return 1
    out = Printer()
    size = dumps[0].record.world_size
    out.say(divergence.summary(dumps))
    out.say()
    out.table(COLUMNS, [row_of(dump) for dump in dumps])
    out.say()
    waits = divergence.waits(dumps)
    silent = sorted({*range(size)} - {dump.rank for dump in dumps})
    for path, what, content in (
        (folder / "timeline.json", "the timeline, for https://ui.perfetto.dev", json.dumps(timeline(dumps))),
        (folder / "waits.svg", "who waited for whom", picture(waits, size, silent)),
    ):
        try:
            with open_anew(path) as file:
                file.write(content.encode())
        except OSError as error:
            print(f"fastcoll trace: {path} cannot be written: {error.strerror}", file=sys.stderr)
            return 1
        out.say(f"{path}: {what}")
    if options.html is not None:
        out.say(f"{options.html}: both of them and the table, as one page")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fastcoll trace",
        description="Say what went wrong first in a job, from the files that its ranks have written. Write two files "
        "into the same folder: timeline.json, for Perfetto or chrome://tracing, and waits.svg, a drawing of who waited "
        "for whom.",
    )
    given = os.environ.get("FASTCOLL_TRACE_DIR", "")
    parser.add_argument(
        "folder",
        nargs="?" if given else None,
        default=given,
        help="the folder with the files of all ranks (default: FASTCOLL_TRACE_DIR)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, for programs; write no files"
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write one page with plots, which opens without a network",
    )
    return parser


def _as_data(dumps: Sequence[Dump]) -> dict[str, Any]:
    return {
        "summary": divergence.summary(dumps),
        "divergences": [
            {
                "group": each.group,
                "number": each.number,
                "mismatch": each.is_mismatch,
                "calls": {
                    str(rank): describe(*call.head, ranks_of(each.members))
                    for rank, call in each.calls.items()
                },
                "late": each.late,
                "silent": each.silent,
                "since": each.since,
            }
            for each in divergence.divergences(dumps)
        ],
        "waits": [wait._asdict() for wait in divergence.waits(dumps)],
        "ranks": [dump.rank for dump in dumps],
    }
