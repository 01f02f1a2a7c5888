"""WorkerInfo: the name and the id of a worker."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import UsageError

_NAME_LENGTH, _NAME = 128, re.compile(r"[A-Za-z0-9\-_:]*")  # torch's limits


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's name and id, which is its rank.

    Raises:
        UsageError: the name is empty or too long, or has characters other than letters, digits, -, _ and :.
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("a worker's name must be non-empty")
        if len(self.name) >= _NAME_LENGTH:
            raise UsageError(
                f"a worker's name must be shorter than {_NAME_LENGTH} characters: {self.name!r:.150}"
            )
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"Worker name must match {_NAME.pattern}, but is {self.name!r}")

    def __str__(self) -> str:
        return f"{self.name} (rank {self.id})"


Worker: TypeAlias = WorkerInfo | str | int
