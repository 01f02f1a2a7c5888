"""Tuning cache of a machine: one JSON file for each user, which rank 0 of each group reads and updates.

Rank 0 publishes the cached times when a group meets, so that all ranks begin with the same ones. When the group closes,
rank 0 merges the group's own times into the file; `python -m fastcoll.bench --tune` measures all operations and sizes
at once. The cache does not influence results, so no problem with the file is an error, and no job waits for it.

    format      2, the number of this format; a file of another format is replaced
    sections    a list; each section has the measurements under one set of conditions:
        machine                     "AMD EPYC, family 26, model 2, 2 CPUs"
        ranks, cores, slot          of the group: number of ranks; "own" if each rank of the job has a core, else
                                    "shared"; bytes of a slot
        command, date, calls        of the last measurement: the command that made it, when, and from how many calls
        ns_per_mib                  {operation: {smallest bytes of a class: {algorithm: nanoseconds a MiB}}}
        one_shot                    bytes up to which all_reduce and reduce are one-shot; only from --tune

Names in the file that this version does not know are kept.

In a *one-shot* reduction ranks synchronise once, and every rank reduces the complete arrays. In a *two-shot* reduction,
for arrays above the limit, ranks synchronise twice: each rank reduces only its slice, and so reads less data. Two ranks
always use one-shot.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import functools
import json
import logging
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .. import config
from ..system.own_files import open_own

_log = logging.getLogger("fastcoll")

Times = dict[str, dict[str, dict[str, int]]]
"""Times of algorithms: {operation: {class: {algorithm: number}}}."""

FORMAT = 2
RUNNING = "learned while running"
_MOST_SECTIONS = 64  # a section has 5 KB; beyond this number the oldest sections are dropped
_LARGEST = 1 << 40  # ns a MiB: 18 minutes

# One-shot limits by number of ranks, used if --tune has measured none. AMD EPYC, 2 CPUs:
# python -m fastcoll.bench --tune -n 4; -n 8; -n 16; -n 32
ONE_SHOT = {4: 32 << 10, 8: 16 << 10, 16: 16 << 10, 32: 4 << 10}


class Conditions(NamedTuple):
    """Conditions of a group's measurements; see the fields in the module's docstring."""

    ranks: int
    cores: str
    slot: int


def path() -> Path | None:
    """Return the path of the file: FASTCOLL_TUNING, or in the user's configuration directory; None: no file is used."""
    named: str = config.get("FASTCOLL_TUNING")
    if named == config.NO_FILE:
        return None
    folder = config.user_folder()
    return Path(named) if named else None if folder is None else folder / "tuning.json"


@functools.cache
def machine() -> str:
    """Describe the machine's processor and number of CPUs, as a section's `machine`."""
    with open("/proc/cpuinfo") as file:
        lines = [line.partition(":") for line in file.read(4096).splitlines()]
    found = {name.strip(): value.strip() for name, _, value in reversed(lines)}
    model = next(
        (found[name] for name in ("model name", "Model", "cpu") if name in found), os.uname().machine
    )
    # On virtual machines processors of several generations have the name "AMD EPYC" or "Intel Xeon Processor".
    which = (
        f", {name} {found[key]}"
        for name, key in (("family", "cpu family"), ("model", "model"))
        if key in found
    )
    return f"{model}{''.join(which)}, {os.cpu_count()} CPUs"


# ---- reading --------------------------------------------------------------------------------------------

_read_files: dict[Path, list[dict[str, Any]]] = {}


def sections() -> list[dict[str, Any]]:
    """Return this machine's sections, updated by this process's own measurements. The file is read only once."""
    file = path()
    if file is None:
        return []
    if file not in _read_files:
        try:
            _read_files[file] = parse(_read(file))
        except FileNotFoundError:
            _read_files[file] = []
        except (OSError, ValueError) as error:
            _read_files[file] = []
            _log.warning("the tuning cache %s cannot be used: %s", file, error)
    return [section for section in _read_files[file] if section["machine"] == machine()]


def _read(file: Path) -> str:
    """Return a file's text. A user who can write to the folder may put a pipe there, so opening must not block."""
    with open(file, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return opened.read()


def one_shot_limit(size: int) -> int:
    """Return the one-shot limit in bytes for a group of `size` ranks: one that --tune has measured, or a default."""
    tuned: dict[int, int] = {s["ranks"]: s["one_shot"] for s in sections() if "one_shot" in s}
    known = {**ONE_SHOT, **tuned}
    # A group size without a limit uses the limit of the next larger size that has one, or else of the largest.
    return known[min((ranks for ranks in known if ranks >= size), default=max(known))]


def parse(text: str) -> list[dict[str, Any]]:
    """Parse a file, and return its sections without invalid fields.

    Raises:
        ValueError: the text is not of this format.
    """
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    found = values.get("sections")
    return [s for s in map(_usable, found) if s] if isinstance(found, list) else []


def _usable(section: Any) -> dict[str, Any] | None:
    """Return a section without its invalid fields; None if the fields of its conditions are invalid."""
    try:
        usable = {**section, "machine": str(section["machine"]), **_conditions(section)._asdict()}
    except (KeyError, TypeError, ValueError, OverflowError):  # OverflowError: a number is infinite
        return None
    limit = usable.pop("one_shot", None)
    if _is_number(limit, 0, 1 << 62):
        usable["one_shot"] = limit
    usable["ns_per_mib"] = _numbers_in(section.get("ns_per_mib"), 3)
    return usable


def _conditions(section: Mapping[str, Any]) -> Conditions:
    return Conditions(int(section["ranks"]), str(section["cores"]), int(section["slot"]))


def _is_number(value: Any, least: int, end: int) -> bool:
    return type(value) is int and least <= value < end


def _numbers_in(table: Any, depth: int) -> dict[str, Any]:
    """Return a table of tables, `depth` levels deep, without invalid times."""
    items = table.items() if isinstance(table, dict) else ()
    if depth == 1:
        return {key: value for key, value in items if _is_number(value, 1, _LARGEST)}
    return {key: usable for key, value in items if (usable := _numbers_in(value, depth - 1))}


# ---- writing -------------------------------------------------------------------------------------------


def save(
    conditions: Conditions, times: Times, calls: int, command: str = RUNNING, one_shot: int | None = None
) -> Path | None:
    """Merge a group's times into the file; return the file's path, or None if nothing has changed.

    Times that `--tune` has measured replace the cached ones. `command` is RUNNING for all other times.

    Raises:
        OSError: the file cannot be written, or another process is writing it. This process uses the times anyway.
    """
    file = path()

    def put(old: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        return with_section(old, conditions, times, calls, command, one_shot)

    mine = put(sections())
    if file is None or mine is None:
        return None
    _read_files[file] = mine
    # Merge into the file's current sections: other processes may have written the file since this process read it.
    _read_files[file] = _write(file, put)
    return file


def _write(
    file: Path, put: Callable[[list[dict[str, Any]]], list[dict[str, Any]] | None]
) -> list[dict[str, Any]]:
    """Replace the file's sections by the result of `put`, and return the new sections.

    The text is written to a new file, which then replaces the file. The new file is also the lock (flock): only the
    process that holds the lock writes. If a killed process has left a new file, it is overwritten, but only if this
    user owns it, because another user who can write to the folder might put a link there.

    Raises:
        OSError: another process is writing the file, or it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".new")
    with open(open_own(part, os.O_RDWR, 0o644), "r+") as new:
        fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder of the lock may have renamed the opened file: then the opened file is the cache itself.
        if os.fstat(new.fileno()).st_ino != part.stat().st_ino:
            raise BlockingIOError("another process has just written the file")
        try:
            old = parse(_read(file))
        except (OSError, ValueError):
            old = []
        updated = put(old)
        if updated is None:
            part.unlink()
            return old
        new.truncate()
        json.dump({"format": FORMAT, "sections": updated}, new, indent=1)
        new.flush()
        part.replace(file)
    return updated


def with_section(
    old: Iterable[dict[str, Any]],
    conditions: Conditions,
    times: Times,
    calls: int,
    command: str,
    one_shot: int | None = None,
) -> list[dict[str, Any]] | None:
    """Return the sections with times merged into the section of `conditions`; None: nothing has changed."""
    others: list[dict[str, Any]] = []
    mine: dict[str, Any] = {"machine": machine(), **conditions._asdict(), "ns_per_mib": {}}
    for section in old:
        same = section["machine"] == machine() and _conditions(section) == conditions
        mine, others = (section, others) if same else (mine, [*others, section])
    known = mine["ns_per_mib"]
    updated = merged(known, times, fresh=command != RUNNING)
    if command == RUNNING and not _differs(known, updated):
        return None
    today = datetime.date.today().isoformat()
    mine = {**mine, "command": command, "date": today, "calls": calls, "ns_per_mib": updated}
    if one_shot is not None:
        mine["one_shot"] = one_shot
    return [*others, mine][-_MOST_SECTIONS:]


def merged(known: Times, times: Times, fresh: bool) -> Times:
    """Merge new times into the `known` ones.

    A shorter time replaces the known one, and a longer time counts by a quarter. With `fresh` every new time replaces
    the known one.
    """
    updated = {
        operation: {size: {**algorithms} for size, algorithms in known[operation].items()}
        for operation in known
    }
    for operation, classes in times.items():
        for size, algorithms in classes.items():
            row = updated.setdefault(operation, {}).setdefault(size, {})
            for algorithm, time in algorithms.items():
                before = row.get(algorithm, time)
                row[algorithm] = time if fresh or time < before else before + (time - before) // 4
    return updated


def _differs(known: Times, updated: Times) -> bool:
    """Whether a time is new or differs from the cached one by an eighth; less is not worth writing the file."""
    return any(
        8 * abs(time - known.get(operation, {}).get(size, {}).get(algorithm, 0)) > time
        for operation, classes in updated.items()
        for size, algorithms in classes.items()
        for algorithm, time in algorithms.items()
    )
