"""`python -m fastcoll doctor`: test what fastcoll needs of this machine, and print a cure for each problem.

A check is a function that takes the number of ranks on this machine and yields findings. It tests with the same code
that a group uses.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from importlib import import_module

from .._version import __version__
from ..errors import FastcollError
from .finding import Finding
from .printing import Printer, counted

_CHECKS = ("software_checks", "machine_checks", "network_checks")
_WIDTHS = 7, 13, 80  # of the columns
_STYLES = {"ok": "good", "none": "dim", "warning": "warning", "problem": "bad"}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if something will not work."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        prog="python -m fastcoll doctor",
        description="Test what fastcoll needs of this machine, and print a cure for each problem.",
        epilog="exit code: 1 if there is a problem, else 0; warnings do not count.",
    )
    usual = max(2, cores)
    parser.add_argument(
        "-n", "--ranks", type=int, default=usual, metavar="N",
        help=f"how many ranks will run on this machine (default: one per core, at least 2; here {usual})",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    given = parser.parse_args(words)
    if given.ranks < 1:
        parser.error(f"-n must be at least 1, got {given.ranks}")
    show, host = Printer(), os.uname().nodename
    if given.json:
        findings = list(examine(given.ranks))
        fine = all(each.level != "problem" for each in findings)
        about = {"fastcoll": __version__, "host": host, "ranks": given.ranks, "fine": fine}
        show.json({**about, "findings": [each._asdict() for each in findings]})
        return 0 if fine else 1
    findings = []
    show.say(f"fastcoll {__version__} on {host}, checked for {counted(given.ranks, 'rank')} here", "bold")
    show.heading(("", "what", "found"), _WIDTHS)
    for each in examine(given.ranks):  # some checks take seconds, so each finding is shown at once
        findings.append(each)
        show.row((each.level, each.about, each.text), _WIDTHS, _STYLES[each.level])
    problems, warnings = (sum(each.level == level for each in findings) for level in ("problem", "warning"))
    if cures := [(each.about, each.cure) for each in findings if each.cure]:
        show.say()
        show.table(("what", "cure"), cures, ["bold"] * len(cures))
    show.say()
    counts = [
        f"{count} {what}" + "s" * (count > 1)
        for count, what in ((problems, "problem"), (warnings, "warning"))
        if count
    ]
    show.say(", ".join(counts) or "everything that was checked works", "bad" if problems else "good")
    return 1 if problems else 0


def examine(ranks: int) -> Iterator[Finding]:
    """Yield all findings; a check that raises is a problem, and the other checks still run."""
    reported = set()
    for room in _CHECKS:
        try:
            checks = import_module(f"{__package__}.{room}").CHECKS
        except ImportError as error:
            yield Finding("problem", room.replace("_", " "), str(error), f"pip install {error.name}")
            continue
        for check in checks:
            try:
                for found in check(ranks):
                    reported.add(found.text)
                    yield found
            except Exception as error:
                about = check.__name__.replace("_", " ")
                if str(error) in reported:
                    yield Finding("none", about, "not checked, because of a problem above")
                else:
                    text = (
                        str(error) if isinstance(error, FastcollError) else f"{type(error).__name__}: {error}"
                    )
                    yield Finding("problem", about, text, "groups would fail, too; mend what the text names")
