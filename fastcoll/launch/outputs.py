"""Where each rank's output goes: torchrun's --redirects, --tee and --local-ranks-filter."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_BITS = {"stdout": 1, "stderr": 2}
_ONE = re.compile(r"[0-3]")
_SOME = re.compile(r"\d+:[0-3](,\d+:[0-3])*")


class OutputMode(NamedTuple):
    """Where one stream of one rank goes."""

    to_console: bool
    to_file: bool


def parse(text: str) -> Mapping[int | None, int]:
    """Parse `3` or `0:1,1:2` into bits (1: stdout, 2: stderr) by local rank; the key None stands for all ranks."""
    if _ONE.fullmatch(text):
        return {None: int(text)}
    if _SOME.fullmatch(text):
        return {int(rank): int(bits) for rank, bits in (item.split(":") for item in text.split(","))}
    raise ArgumentTypeError(
        f"give 0 to 3 (1: stdout, 2: stderr, 3: both), or such by local rank, as 0:3,1:2, not {text!r}"
    )


@dataclass(frozen=True)
class Outputs:
    """The output options of a node."""

    to_files: bool = False  # whether all output also goes to files
    redirects: Mapping[int | None, int] = field(default_factory=dict)  # to files only (`parse`)
    tee: Mapping[int | None, int] = field(default_factory=dict)  # to files as well (`parse`)
    shown: frozenset[int] | None = None  # local ranks whose output goes to the console; None: all

    def mode(self, local_rank: int, stream: str) -> OutputMode:
        """Return where a rank's `stdout` or `stderr` goes."""
        moved, copied = (
            bool(each.get(local_rank, each.get(None, 0)) & _BITS[stream])
            for each in (self.redirects, self.tee)
        )
        is_shown = self.shown is None or local_rank in self.shown
        return OutputMode(is_shown and (copied or not moved), moved or copied or self.to_files)
