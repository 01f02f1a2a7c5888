"""Up to how many bytes all_reduce and reduce go one-shot, by number of ranks: measured, here or on the user's machine.

One-shot: every rank reduces everything, one synchronisation. Beyond it two-shot: each rank reduces its slice, two
synchronisations, less to read. Two ranks always go one-shot. Results are the same bits either way.

`python -m fastcoll.bench --tune` writes a table for its machine. Rank 0 of a group reads it and puts the number into
the segment, so that all ranks go alike. The table, as JSON:

    machine    "AMD EPYC, 2 CPUs": where it holds
    command    what measured it
    one_shot   {"4": 32768, "8": 16384}: bytes, by number of ranks
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import config

_log = logging.getLogger("fastcoll")


@dataclass(frozen=True)
class Table:
    """Bytes up to which one-shot is the faster one, for worlds up to so many ranks."""

    machine: str
    command: str
    one_shot: Mapping[int, int]


BUILT_IN = Table(
    machine="AMD EPYC, 2 CPUs",
    command="python -m fastcoll.bench --tune -n 4; -n 8; -n 16; -n 32",
    one_shot={4: 32 << 10, 8: 16 << 10, 16: 16 << 10, 32: 4 << 10},
)


def one_shot_limit(size: int) -> int:
    """Bytes for a group of `size` ranks: this machine's own number where there is one."""
    known = {**BUILT_IN.one_shot, **_tuned(table_path())}
    # Smaller groups go as the next larger one that was measured, larger ones as the largest.
    return known[min((ranks for ranks in known if ranks >= size), default=max(known))]


def table_path() -> Path:
    """Where this machine's table is, or would be: FASTCOLL_TUNING, or the user's configuration directory."""
    named: str = config.get("FASTCOLL_TUNING")
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(named) if named else Path(home) / "fastcoll" / "tuning.json"


def machine() -> str:
    """The machine's processor and number of CPUs, which a table must have been measured on."""
    with open("/proc/cpuinfo") as file:
        lines = file.read(4096).splitlines()
    named = (
        line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model", "cpu\t"))
    )
    return f"{next(named, os.uname().machine)}, {os.cpu_count()} CPUs"


@functools.cache
def _tuned(path: Path) -> Mapping[int, int]:
    """What a file's table says, read once; nothing, and a warning, where it cannot be used: it is about speed only."""
    try:
        table = parse(path.read_text())
    except FileNotFoundError:
        why = "is not there" if config.get("FASTCOLL_TUNING") else ""
    except (OSError, ValueError) as error:
        why = f"cannot be used: {error}"
    else:
        if table.machine == machine():
            return table.one_shot
        why = f"was measured on another machine, {table.machine}; this is {machine()}"
    if why:
        _log.warning("the tuning table %s %s; python -m fastcoll.bench --tune writes one", path, why)
    return {}


def parse(text: str) -> Table:
    """A table's JSON.

    Raises:
        ValueError: it is none, or not all there, or has impossible numbers.
    """
    try:
        values: dict[str, Any] = json.loads(text)
        one_shot = {int(ranks): int(nbytes) for ranks, nbytes in values["one_shot"].items()}
        table = Table(str(values["machine"]), str(values["command"]), one_shot)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is not a table of machine, command and one_shot ({error!r})") from error
    if bad := [item for item in one_shot.items() if item[0] < 3 or not 0 <= item[1] < 1 << 62]:
        raise ValueError(f"one_shot has {bad[0][1]} bytes for {bad[0][0]} ranks")
    return table


def write(path: Path, ranks: int, nbytes: int, command: str) -> None:
    """Put a measured number into this machine's table, beside what it has for other numbers of ranks."""
    try:
        old = parse(path.read_text())
    except (OSError, ValueError):
        old = Table("", "", {})
    kept = dict(old.one_shot) if old.machine == machine() else {}
    table = Table(machine(), command, dict(sorted({**kept, ranks: nbytes}.items())))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps(asdict(table), indent=2) + "\n")
    part.replace(path)
