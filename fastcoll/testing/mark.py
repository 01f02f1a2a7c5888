"""The arguments of `@pytest.mark.ranks(...)`, the messages between pytest and its workers, and a test's result.

A worker is a process that runs one rank of each test. The report of a failed test begins with the root cause. Equal
failures of several ranks are merged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import UsageError

Outcome = Literal[
    "passed", "skipped", "killed", "xfailed", "failed", "leaked", "died", "deadline", "stranded"
]
WORKER_PLUGIN = "fastcoll-rank-worker"  # the name of the plugin that makes a pytest session a worker
_THREAD = re.compile(r"^(Current thread|Thread) .*\(most recent call first\):$")
OPTIONS = ("init", "backend", "timeout", "fresh", "may_die")


@dataclass(frozen=True)
class RanksMark:
    """The arguments of the mark of one test."""

    sizes: tuple[int, ...]  # the world sizes to run the test with
    init: bool = (
        True  # whether each rank calls init_process_group before and destroy_process_group after the test
    )
    backend: str | None = None  # for init_process_group; None: the default
    timeout: float = 60.0  # seconds from the start of the test until all ranks have finished
    fresh: bool = False  # whether the test runs in new processes, which are ended afterwards
    may_die: frozenset[int] = frozenset()  # ranks that the test kills on purpose

    @staticmethod
    def parse(sizes: tuple[Any, ...], options: Mapping[str, Any]) -> RanksMark:
        """Parse the arguments of the mark.

        Raises:
            UsageError: an argument is wrong; the message names valid ones.
        """
        if not sizes or any(type(n) is not int or n < 1 for n in sizes) or len(set(sizes)) < len(sizes):
            shown = ", ".join(map(repr, sizes))
            raise UsageError(
                f"ranks({shown}): give different world sizes from 1 up, as in ranks(2) or ranks(1, 2)"
            )
        unknown = [name for name in options if name not in OPTIONS]
        if unknown:
            raise UsageError(f"ranks: unknown option {unknown[0]!r}; known are {', '.join(OPTIONS)}")
        timeout = options.get("timeout", 60.0)
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise UsageError(f"ranks: timeout is a number of seconds above 0, got {timeout!r}")
        value, any_rank = options.get("may_die", ()), range(max(sizes))
        ranks = list(any_rank) if value is True else value
        ranks = list(ranks) if isinstance(ranks, Iterable) else None  # an iterator can be read only once
        if ranks is None or any(type(r) is not int or r not in any_rank for r in ranks):
            raise UsageError(
                f"ranks: may_die takes ranks from 0 to {max(sizes) - 1} or True for any, got {value!r}"
            )
        if ranks and not options.get("fresh", False):
            raise UsageError(
                "ranks: may_die needs fresh=True, as a killed process cannot be used by the next test"
            )
        return RanksMark(sizes=tuple(sizes), **{**options, "may_die": frozenset(ranks)})


@dataclass(frozen=True)
class Place:
    """Where a rank runs. Ranks with equal places are on one node."""

    # The prefix of the command that starts the rank. It must replace its own process by that command (exec), as
    # `nsenter --net=...` does, and not start a child process.
    command: tuple[str, ...] = ()
    address: str = "127.0.0.1"  # the address at which other ranks reach rank 0 if it runs here
    shm: Path = Path("/dev/shm")  # the path under which this process sees the place's /dev/shm


@dataclass(frozen=True)
class Setup:
    """The arguments and options with which a worker runs pytest as its parent does."""

    args: list[str]
    # Pickled values by name; the worker loads them after the conftest files, which may define their classes.
    options: dict[str, bytes]


@dataclass(frozen=True)
class Task:
    file: str  # the file of the test; the worker collects it once for all tests in it
    nodeid: str  # the collected test to run
    rank: int
    mark: RanksMark
    environment: dict[str, str]  # variables that are set during the test (RANK, WORLD_SIZE, MASTER_ADDR, ...)
    place: Place
    tmp_path: str | None  # the directory that all ranks share, if the test requests one


@dataclass
class RankResult:
    """The result of one rank's part of a test.

    "killed" is an expected death (may_die), "xfailed" an expected failure (pytest's xfail). "stranded": the rank was
    still in the test some seconds after another rank had failed. "deadline": the rank was still in the test at the
    mark's timeout.
    """

    rank: int
    outcome: Outcome
    summary: str = ""  # the failure, or the reason of the skip or xfail, in one line
    text: str = ""  # details: a traceback, or the stacks
    cause: str = (
        ""  # where the failure was raised, and its message; equal on ranks that failed in the same way
    )
    secondary: bool = False  # whether another rank's failure caused this one (`follows`); shown last
    output: str = ""  # the rank's output on stdout and stderr

    @property
    def failed(self) -> bool:
        """Whether this rank's result makes the test fail."""
        return self.outcome != "xfailed" and self.spoils

    @property
    def spoils(self) -> bool:
        """Whether later tests must not use this rank's process and group, even if the process is alive."""
        return self.outcome not in ("passed", "skipped", "killed")


def name_ranks(ranks: Sequence[int], world_size: int) -> str:
    """Format ranks: `rank 2 of 4`, `ranks 0, 1 and 3 of 4`, `all 4 ranks`."""
    if len(ranks) == world_size > 1:
        return f"all {world_size} ranks"
    if len(ranks) == 1:
        return f"rank {ranks[0]} of {world_size}"
    listed = ", ".join(map(str, ranks[:-1]))
    return f"ranks {listed} and {ranks[-1]} of {world_size}"


def failure_text(results: Sequence[RankResult], world_size: int) -> str:
    """Return the report of a failed test; empty: the test has not failed.

    Primary failures come first and in full. Failures that follow from another rank's failure take one line each,
    unless all failures are of this kind.
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
    """Return why the test is skipped, or None. It is skipped only if all ranks that were not killed skipped it."""
    living = [result for result in results if result.outcome != "killed"]
    skipped = [result.summary for result in living if result.outcome == "skipped"]
    return skipped[0] if skipped and len(skipped) == len(living) else None


def xfail_reason(results: Sequence[RankResult]) -> str | None:
    """Return why the test has failed as expected, or None; other failures must be consequences of the expected one."""
    expected = [result.summary for result in results if result.outcome == "xfailed"]
    return expected[0] if expected and all(result.secondary for result in results if result.failed) else None


def frames_of_the_test(stacks: str) -> str:
    """Return faulthandler's stacks without addresses and without the frames that called the test."""
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
    return [
        f"{name_ranks([each.rank for each in same], world_size)}: {same[0].summary}\n{same[0].text}".rstrip()
        for same in merged.values()
    ]


def _uneven(results: Sequence[RankResult], world_size: int) -> str:
    """Return an error text if no rank failed, but only some ranks skipped the test, or all were killed; else ""."""
    outcomes = {result.outcome for result in results}
    if outcomes == {"killed"}:
        return "every rank died as the mark's may_die allows, so no rank has checked anything"
    if outcomes >= {"passed", "skipped"}:
        skipped = [result for result in results if result.outcome == "skipped"]
        who = name_ranks([result.rank for result in skipped], world_size)
        return f"{who} skipped the test ({skipped[0].summary}), others ran it; skip on every rank or on none"
    return ""
