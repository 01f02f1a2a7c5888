"""What this machine is known to do best: one file a user, in JSON, read by rank 0 of each group and kept up by it.

Rank 0 gives what it reads to all ranks as they meet, so that all of them begin alike. When its group closes it puts
what the group has found out beside it; `python -m fastcoll.bench --tune` does so for all operations and sizes at once.
Results are the same bits whatever it says, so no trouble with the file is an error, and no job waits for it.

    format      2; the other fields are of this format, and a file of another one is replaced
    sections    a list; each is what was found under the same conditions:
        machine                     "AMD EPYC, family 26, model 2, 2 CPUs"
        ranks, cores, slot          of the group: ranks; "own" where each of the job's has a core, else "shared";
                                    bytes of a slot
        command, date, calls        what found it out last, and from how many calls
        ns_per_mib                  {operation: {smallest bytes of a class: {way: nanoseconds a MiB}}} (tuning_table.py)
        one_shot                    bytes up to which all_reduce and reduce go one-shot; only from --tune

Names that this version does not know stay as they are.

One-shot: every rank reduces everything, one synchronisation. Beyond it two-shot: each rank reduces its slice, two
synchronisations, less to read. Two ranks always go one-shot.
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
"""How long each way took: {operation: {class: {way: number}}}."""

FORMAT = 2
RUNNING = "learned while running"
_NOTHING = "none"  # FASTCOLL_TUNING: read and keep nothing
_MOST_SECTIONS = 64  # the oldest leave: 5 KB each
_LARGEST = 1 << 40  # ns a MiB: 18 minutes

# One-shot limits by number of ranks, where --tune found none. AMD EPYC, 2 CPUs:
# python -m fastcoll.bench --tune -n 4; -n 8; -n 16; -n 32
ONE_SHOT = {4: 32 << 10, 8: 16 << 10, 16: 16 << 10, 32: 4 << 10}


class Conditions(NamedTuple):
    """Under which a group's ranks work: see the table above."""

    ranks: int
    cores: str
    slot: int


def path() -> Path | None:
    """Where the file is, or would be: FASTCOLL_TUNING, or in the user's configuration directory; None: nowhere."""
    named: str = config.get("FASTCOLL_TUNING")
    if named == _NOTHING:
        return None
    folder = config.user_folder()
    return Path(named) if named else None if folder is None else folder / "tuning.json"


@functools.cache
def machine() -> str:
    """The machine's processor and number of CPUs, for which a section holds."""
    with open("/proc/cpuinfo") as file:
        lines = [line.partition(":") for line in file.read(4096).splitlines()]
    found = {name.strip(): value.strip() for name, _, value in reversed(lines)}
    model = next(
        (found[name] for name in ("model name", "Model", "cpu") if name in found), os.uname().machine
    )
    # Virtual machines call processors of several generations "AMD EPYC", or "Intel Xeon Processor".
    which = (
        f", {name} {found[key]}"
        for name, key in (("family", "cpu family"), ("model", "model"))
        if key in found
    )
    return f"{model}{''.join(which)}, {os.cpu_count()} CPUs"


# ---- what is known -----------------------------------------------------------------------------------------

_read_files: dict[Path, list[dict[str, Any]]] = {}


def sections() -> list[dict[str, Any]]:
    """This machine's sections, with what this process has found out; the file is read once."""
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
            _log.warning("what is known of this machine, in %s, cannot be used: %s", file, error)
    return [section for section in _read_files[file] if section["machine"] == machine()]


def _read(file: Path) -> str:
    """Return a file's text. Opened without blocking: another user who can write to the folder may put a pipe there."""
    with open(file, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no file")
        return opened.read()


def one_shot_limit(size: int) -> int:
    """Bytes for a group of `size` ranks: this machine's own number where there is one."""
    tuned: dict[int, int] = {s["ranks"]: s["one_shot"] for s in sections() if "one_shot" in s}
    known = {**ONE_SHOT, **tuned}
    # Smaller groups go as the next larger one that was measured, larger ones as the largest.
    return known[min((ranks for ranks in known if ranks >= size), default=max(known))]


def parse(text: str) -> list[dict[str, Any]]:
    """A file's sections, with those fields that can be used.

    Raises:
        ValueError: it is none of this format.
    """
    values = json.loads(text)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    found = values.get("sections")
    return [s for s in map(_usable, found) if s] if isinstance(found, list) else []


def _usable(section: Any) -> dict[str, Any] | None:
    """A section without what is impossible in it; None: there is nothing left."""
    try:
        usable = {**section, "machine": str(section["machine"]), **_conditions(section)._asdict()}
    except (KeyError, TypeError, ValueError):
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
    """What of a table of tables, so many deep, are possible times."""
    items = table.items() if isinstance(table, dict) else ()
    if depth == 1:
        return {key: value for key, value in items if _is_number(value, 1, _LARGEST)}
    return {key: usable for key, value in items if (usable := _numbers_in(value, depth - 1))}


# ---- what is learned ---------------------------------------------------------------------------------------


def save(
    conditions: Conditions, times: Times, calls: int, command: str = RUNNING, one_shot: int | None = None
) -> Path | None:
    """Put what was found out here into the file; where it was written, or None: there is nothing new in it.

    What a run for this purpose finds, by a `command`, replaces what was known.

    Raises:
        OSError: the file cannot be written, or another process writes it now. In this process it is known all the same.
    """
    file = path()

    def put(old: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        return with_section(old, conditions, times, calls, command, one_shot)

    mine = put(sections())
    if file is None or mine is None:
        return None
    _read_files[file] = mine
    # Into the file's own sections: other processes have written since this one has read it.
    _read_files[file] = _write(file, put)
    return file


def _write(
    file: Path, put: Callable[[list[dict[str, Any]]], list[dict[str, Any]] | None]
) -> list[dict[str, Any]]:
    """Replace the file by what `put` makes of its sections, and return that.

    The new file is also the lock (flock): only its holder writes it. A file that a killed process has left is
    overwritten, but only if this user owns it: another user who can write to the folder may put a link there.

    Raises:
        OSError: another process writes it now, or nobody can.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".new")
    with open(open_own(part, os.O_RDWR, 0o644), "r+") as new:
        fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who had the lock may have renamed what was opened here: then it is the file itself.
        if os.fstat(new.fileno()).st_ino != part.stat().st_ino:
            raise BlockingIOError("another process has just written it")
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
    """The sections with what was found out put into the one of these conditions; None: there is nothing new in it."""
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
    """What was known with what was found out: quick to believe good news, slow to believe bad, but for `fresh` ones."""
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
    """Whether a time is new, or an eighth off what was known: less is no reason to write a file."""
    return any(
        8 * abs(time - known.get(operation, {}).get(size, {}).get(algorithm, 0)) > time
        for operation, classes in updated.items()
        for size, algorithms in classes.items()
        for algorithm, time in algorithms.items()
    )
