"""What a soak did and found: figures for a table, and faults, of which there should be none."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_SHOWN_FAULTS = 100


@dataclass
class Report:
    """What one soak did and found.

    Attributes:
        done: how much of it ran, as in "2,000 kills".
        figures: what was measured, by its name.
        faults: what should not have happened, a text each.
    """

    done: str = ""
    figures: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def fail(self, text: str) -> None:
        """Note a fault, and print it now, as a soak may take hours."""
        self.faults.append(text)
        if len(self.faults) <= _SHOWN_FAULTS:
            print(f"FAULT {len(self.faults)}: {text}", flush=True)

    def row(self, name: str, command: str) -> str:
        """A row of the table in docs/robustness.md."""
        found = f"{len(self.faults)} faults" if self.faults else "nothing"
        figures = ", ".join(f"{what} {value}" for what, value in self.figures.items())
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        return f"| {name} | {self.done} | {found} | {figures} | `{command}` | {today}, {processor()} |"


def processor() -> str:
    """This machine's processor, and how many cores of it this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {len(os.sched_getaffinity(0))} cores"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of all lie; 0 of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
