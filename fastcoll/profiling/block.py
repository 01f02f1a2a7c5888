"""`fastcoll.profile()`: profile a part of a program, in its ranks."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

from ..api import objects
from ..core import profiler
from ..core.group import ProcessGroup
from ..errors import UsageError
from ..job.groups import GroupMember, groups
from ..record.call_log import CallLog
from . import profile_page, report
from .merging import Profile, RankLog, merge


class ProfileReport:
    """What a profile has found; `str()` of it is the table that `python -m fastcoll profile` prints."""

    def __init__(self, found: Profile) -> None:
        self._found = found

    def __str__(self) -> str:
        return report.text_of(self._found)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as data for JSON; times in seconds, or in microseconds if the name ends in `_us`."""
        return report.as_data(self._found)

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """Write the result of `as_dict` to a file."""
        report.write_json(self._found, Path(path))

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page with plots, which needs no network.

        Raises:
            UnavailableError: Plotly is not installed (`pip install '.[profile]'`).
        """
        profile_page.write_html(self._found, Path(path))


class profile:
    """Profile the collectives and messages of this rank, in all groups, while a `with` block runs.

    Calls are timed from when Python makes them until they return. The profile of one rank does not show for which rank
    it waited; the merged one does. Reading the clock and writing a row adds about two microseconds to each call of the
    block, and nothing to calls outside of it.

    Examples:
        >>> with dist.profile() as profile:
        ...     train()
        >>> report = profile.merged()
        >>> if dist.get_rank() == 0:
        ...     print(report)
    """

    def __init__(self) -> None:
        self._log: CallLog | None = None

    def __enter__(self) -> profile:
        group = _whole_group()
        rank, size = (0, 1) if group is None else (group.ranks[group.rank], group.size)
        self._log = CallLog(profiler.facts(rank, size))
        profiler.start(self._log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        assert self._log is not None
        profiler.stop(self._log)

    def own(self) -> ProfileReport:
        """Return the report of this rank alone; this also works after an error of the group.

        Raises:
            UsageError: the block has not ended.
        """
        return ProfileReport(merge([RankLog(*self._content())]))

    def merged(self) -> ProfileReport:
        """Return the report of all ranks. Collective: every rank calls it, and gets the report.

        The ranks are those of the default group. Without one, as in programs of torch.distributed, they are those of
        the widest group that this process is in.

        Raises:
            UsageError: the block has not ended, or there is no group.
            GroupError: a rank has died, or the group has failed.
        """
        mine = self._content()
        group = _whole_group() or groups.world  # without a default group the latter raises
        everyone: list[Any] = [None] * group.size
        objects.all_gather_object(everyone, mine, group)
        return ProfileReport(merge([RankLog(*each) for each in everyone]))

    def _content(self) -> tuple[dict[str, Any], Any]:
        if self._log is None or not self._log.about["ended"]:
            raise UsageError("the profile runs until its `with` block ends; ask for its report after that")
        return self._log.content()


def _whole_group() -> ProcessGroup | None:
    """Return the group of all ranks: the default group, or in a program that has none the widest one."""
    return GroupMember.WORLD or profiler.widest_group()
