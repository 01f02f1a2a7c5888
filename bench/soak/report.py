"""The report of a soak: figures for a table, and faults (ideally none)."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_SHOWN_FAULTS = 100


@dataclass
class Report:
    """The report of one soak.

    Attributes:
        done: the amount that ran, as in "2,000 kills".
        figures: measured values, by name.
        faults: descriptions of faults.
    """

    done: str = ""
    figures: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def fail(self, text: str) -> None:
        """Add a fault, and print it at once, because a soak may take hours."""
        self.faults.append(text)
        if len(self.faults) <= _SHOWN_FAULTS:
            print(f"FAULT {len(self.faults)}: {text}", flush=True)

    def row(self, name: str, command: str) -> str:
        """Return a row for the table in docs/robustness.md."""
        found = f"{len(self.faults)} faults" if self.faults else "nothing"
        figures = ", ".join(f"{what} {value}" for what, value in self.figures.items())
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        return f"| {name} | {self.done} | {found} | {figures} | `{command}` | {today}, {processor()} |"


def processor() -> str:
    """Return this machine's processor, and how many cores this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {len(os.sched_getaffinity(0))} cores"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of all values lie; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
