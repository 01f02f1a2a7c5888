"""From the results of the ranks to one verdict and one text: root cause first, equal failures merged."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .mark import RankResult

_THREAD = re.compile(r"^(Current thread|Thread) .*\(most recent call first\):$")


def name_ranks(ranks: Sequence[int], world_size: int) -> str:
    """`rank 2 of 4`, `ranks 0, 1 and 3 of 4`, `all 4 ranks`."""
    if len(ranks) == world_size > 1:
        return f"all {world_size} ranks"
    if len(ranks) == 1:
        return f"rank {ranks[0]} of {world_size}"
    listed = ", ".join(map(str, ranks[:-1]))
    return f"ranks {listed} and {ranks[-1]} of {world_size}"


def failure_text(results: Sequence[RankResult], world_size: int) -> str:
    """What to show of a test that has failed; empty when it has not.

    Failures of a rank's own come first and in full. Those that only follow from another rank's are
    one line each, unless there is nothing else to show.
    """
    primary = [result for result in results if result.failed and not result.secondary]
    secondary = [result for result in results if result.failed and result.secondary]
    if not primary:
        return "\n\n".join(_in_full(secondary, world_size)) or _uneven(results, world_size)
    blocks = _in_full(primary, world_size)
    blocks += [
        f"rank {result.rank} of {world_size}, as a consequence: {result.summary}" for result in secondary
    ]
    return "\n\n".join(blocks)


def skip_reason(results: Sequence[RankResult]) -> str | None:
    """Why the test is skipped, or None; it is only if all ranks that live skipped it."""
    living = [result for result in results if result.outcome != "killed"]
    skipped = [result.summary for result in living if result.outcome == "skipped"]
    return skipped[0] if skipped and len(skipped) == len(living) else None


def frames_of_the_test(stacks: str) -> str:
    """The stacks of faulthandler without addresses and without the frames of pytest below the test."""
    lines: list[str] = []
    below = False
    for line in stacks.splitlines():
        if thread := _THREAD.match(line):
            below = False
            line = f"{thread[1]} (most recent call first):"
        below = below or line.endswith(" in pytest_pyfunc_call")
        if not below:
            lines.append(line)
    return "\n".join(lines)


def _in_full(failures: Sequence[RankResult], world_size: int) -> list[str]:
    merged: dict[str, list[RankResult]] = {}
    for failure in failures:
        merged.setdefault(failure.cause or failure.summary + failure.text, []).append(failure)
    return [_block(same, world_size) for same in merged.values()]


def _block(same: Sequence[RankResult], world_size: int) -> str:
    who = name_ranks([failure.rank for failure in same], world_size)
    return f"{who}: {same[0].summary}\n{same[0].text}".rstrip()


def _uneven(results: Sequence[RankResult], world_size: int) -> str:
    """The complaint about ranks of which none failed, but which did not do the same; or nothing."""
    outcomes = {result.outcome for result in results}
    if outcomes == {"killed"}:
        return "every rank died as the mark's may_die allows, so nobody has checked anything"
    if outcomes >= {"passed", "skipped"}:
        skipped = [result for result in results if result.outcome == "skipped"]
        who = name_ranks([result.rank for result in skipped], world_size)
        return f"{who} skipped the test ({skipped[0].summary}), others ran it; skip on every rank or on none"
    return ""
