"""Read the files that ranks have written (record/dump.py); a Dump has one rank's calls and stacks as plain data."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..record.dump import FORMAT, STACKS_SUFFIX, SUFFIX
from ..record.record import GroupRecord, Record, record_of

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_PYTHONS = re.compile(r"/lib(?:64)?/python3[.\d]*/(?!site-packages|dist-packages)|^<frozen")
# Of the installation that wrote the file, which need not be this one. Its folders bench and testing run code of users.
_OURS = re.compile(
    r"/fastcoll/(?:api|arrays|callers|compiler|core|elastic|gpu|hybrid|jax|job|kernels|launch|metrics|net|p2p|record|"
    r"rendezvous|rpc|shm|store|system|torch)/"
)


@dataclass(frozen=True)
class Reason:
    """Why a rank wrote a dump: the time in seconds since 1970, the reason, and the stacks of its threads."""

    time: float
    why: str
    stacks: str


@dataclass(frozen=True)
class Dump:
    """The dump of one rank.

    Attributes:
        record: the rank's calls.
        reasons: why the dump was written, oldest first.
        threads: names of threads by their ids.
        time: when the dump was written, in seconds since 1970.
        seen_by: None if the rank wrote the dump itself; otherwise the rank that wrote it while it waited for this rank.
        state: if another rank wrote the dump, the state of this rank's process, a letter of /proc/PID/stat.
    """

    path: Path
    record: Record
    reasons: tuple[Reason, ...]
    threads: dict[int, str]
    time: float
    seen_by: int | None = None
    state: str = ""

    @property
    def rank(self) -> int:
        return self.record.rank

    def group(self, name: str) -> GroupRecord | None:
        """Return the newest of this rank's groups with this name, or None."""
        return next((group for group in reversed(self.record.groups) if group.name == name), None)

    def program_line(self, which: int = -1) -> str:
        """Return where the main thread was in the user's program, for example `step (train.py:12)`; "" if unknown.

        `which` is the index of the reason whose stacks to take.
        """
        stacks = self.reasons[which].stacks if self.reasons else ""
        starts = [*_THREAD.finditer(stacks)]
        for k, start in enumerate(starts):
            if self.threads.get(int(start[1], 16)) != "MainThread":
                continue
            end = starts[k + 1].start() if k + 1 < len(starts) else len(stacks)
            for file, line, function in _FRAME.findall(stacks[start.start() : end]):
                if not (file.startswith(_PACKAGE) or _PYTHONS.search(file) or _OURS.search(file)):
                    return f"{function} ({os.path.basename(file)}:{line})"
        return ""


def load(folder: Path, left_out: Callable[[Path], object] = lambda path: None) -> list[Dump]:
    """Return the dumps of the newest job in a folder, ordered by rank.

    For each rank, return the newest dump that the rank wrote itself, or else the newest that another rank wrote. Leave
    out files of another version of fastcoll, and files that are no dumps.

    Args:
        left_out: called with the path of each file of a rank that is left out.
    """
    found: list[Dump] = []
    others: list[Dump] = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            data = json.loads(path.read_text())
            if data.get("format") == FORMAT and data["record"] is None:  # a process in no group
                continue
            if data["format"] != FORMAT:
                raise ValueError("another version's")
            reasons = [Reason(**reason) for reason in data["reasons"]]
            # If the file with stacks is newer than the dump, SIGQUIT came later, while Python was stuck.
            beside = path.with_name(path.name.removesuffix(SUFFIX) + STACKS_SUFFIX)
            if beside.exists() and beside.stat().st_mtime > data["time"] and beside.stat().st_size:
                reasons.append(Reason(beside.stat().st_mtime, "SIGQUIT", beside.read_text(errors="replace")))
            threads = {int(number): name for number, name in data["threads"].items()}
            mine = Dump(path, record_of(data["record"]), tuple(reasons), threads, data["time"])
            found.append(mine)
            for seen in data["seen"]:
                theirs = record_of(seen["record"])
                others.append(Dump(path, theirs, (), {}, seen["time"], mine.rank, seen["state"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            if path.name.startswith("rank-"):
                left_out(path)
    if not found:
        return []
    job = max(found, key=lambda dump: dump.time).record.job
    newest: dict[int, Dump] = {}
    for dump in sorted(others, key=lambda dump: dump.time) + sorted(found, key=lambda dump: dump.time):
        if dump.record.job == job:
            newest[dump.rank] = dump
    return [newest[rank] for rank in sorted(newest)]
