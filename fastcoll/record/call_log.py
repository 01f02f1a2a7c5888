"""The log of a profiled process: a row for each call and message, with its times.

The rows are in memory, or in a file that is mapped, so that they outlive a process that is killed. core/profiler.py
writes them; profiling/merging.py reads them. Room in the file is allocated before rows are written to it, because on a
full disk a write to mapped memory would end the process by SIGBUS.

When the log, or its disk, is full, it is *thinned*: of every `2 ** level` numbers of calls one is kept, and the sums of
the other rows are added to `removed`. So counts, bytes and times stay exact. Every rank keeps the same numbers, because
the choice is a hash of the number alone. A row has these words:

    GROUP     index of the group in `about["groups"]`, plus 1; 0: the row is free
    FLAVOUR   one of the flavours below
    NUMBER    of the call in its group, or of the message among those with the same peer, tag and direction; 0: unknown
    CALL      the call word (core/signature.py); for a message its tag
    NBYTES    the bytes that this rank contributes; negative: unknown
    BEGAN     in ns of CLOCK_MONOTONIC; 0: not timed
    ENDED     in ns of CLOCK_MONOTONIC; 0: not timed
    PEER      the group rank of a message's other end; -1: any, or no message
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import threading
import time
from collections.abc import Sequence
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._version import __version__
from ..system.own_files import open_own

_log = logging.getLogger("fastcoll")

FORMAT = 1
WORDS = 8
GROUP, FLAVOUR, NUMBER, CALL, NBYTES, BEGAN, ENDED, PEER = range(WORDS)
# SYNC: a collective that blocked its caller. BESIDE: one that was asynchronous, part of another call, or compiled into
# the caller. BLOCKED: the wait for an asynchronous collective. BLOCKED_MESSAGE: the wait for an isend or irecv.
SYNC, BESIDE, BLOCKED, SEND, RECV, ISEND, IRECV, BLOCKED_MESSAGE = range(1, 9)
BLOCKING = SYNC, BLOCKED, SEND, RECV, BLOCKED_MESSAGE
KIND = 0xFF | 1 << 61
"""The bits of a call word that a profile distinguishes: the operation, and whether the call is coalesced."""
MOST = 1 << 18  # rows of a log, 16 MiB
_ROOM_STEP = 1 << 14  # rows for which room on the disk is allocated at a time, 1 MiB
SUFFIX, ROWS_SUFFIX = ".profile.json", ".profile.rows"

Rows = NDArray[np.int64]
Key = tuple[int, int, int, int]
"""GROUP, FLAVOUR, the KIND bits of CALL (0 for a message), and the size class."""

_ROW = Struct(f"={WORDS}q")  # 64 bytes
_pack = _ROW.pack_into
_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2 ** 64 divided by the golden ratio
_SUMS = 4  # of a key: calls, bytes, ns of the timed calls, and the number of these


def size_classes(nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the class of each size: k for sizes above 2 ** (k - 1) and up to 2 ** k bytes; -1 for no bytes."""
    return np.where(nbytes > 0, np.ceil(np.log2(np.maximum(nbytes, 1))), -1).astype(np.int64)


def keys_of(rows: Rows) -> Rows:
    """Return the Key of each row, as an array of four columns."""
    is_message = rows[:, FLAVOUR] >= SEND
    kinds = np.where(is_message, 0, rows[:, CALL] & KIND)
    return np.stack([rows[:, GROUP], rows[:, FLAVOUR], kinds, size_classes(rows[:, NBYTES])], axis=1)


def is_timed(rows: Rows) -> NDArray[np.bool_]:
    """Return which rows have times."""
    return (rows[:, BEGAN] > 0) & (rows[:, ENDED] > 0)


def sums(rows: Rows) -> dict[Key, list[int]]:
    """Return for each Key the number of its rows, their bytes, the ns of the timed rows, and the number of these."""
    keys, places = np.unique(keys_of(rows), axis=0, return_inverse=True)
    timed = is_timed(rows)
    took = np.where(timed, rows[:, ENDED] - rows[:, BEGAN], 0)
    found = np.zeros((len(keys), _SUMS), np.int64)
    np.add.at(
        found,
        places.ravel(),
        np.stack([np.ones_like(took), np.maximum(rows[:, NBYTES], 0), took, timed], axis=1),
    )
    return {tuple(key): each for key, each in zip(keys.tolist(), found.tolist(), strict=True)}


def add_sums(to: dict[Key, list[int]], more: dict[Key, list[int]]) -> None:
    """Add the sums `more` to `to`, key by key."""
    for key, each in more.items():
        to[key] = [a + b for a, b in zip(to.get(key, [0] * len(each)), each, strict=True)]


def kept(rows: Rows, level: int) -> NDArray[np.bool_]:
    """Return which rows remain at a level: one of `2 ** level` numbers. All remain at level 0."""
    if not level:
        return np.ones(len(rows), np.bool_)
    numbers = np.where(rows[:, NUMBER] > 0, rows[:, NUMBER], rows[:, BEGAN]).astype(np.uint64)
    return numbers * _STEP >> np.uint64(64 - level) == 0  # type: ignore[no-any-return]


class CallLog:
    """The log of this process, to which any thread adds rows.

    Args:
        about: facts about the process (rank, world_size, host, machine, pid), which `content` returns, too.
        path: the file without its suffix; None: in memory.
        most: the number of rows that the log has room for.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, about: dict[str, Any], path: str | None = None, most: int = MOST) -> None:
        self._path, self._most, self._count = path, most, 0
        # Reentrant, because a signal handler may make a call while its thread adds a row.
        self._lock = threading.RLock()
        self._removed: dict[Key, list[int]] = {}
        now = time.monotonic_ns()
        self.about = about | {"format": FORMAT, "version": __version__, "began": now, "ended": 0, "level": 0}
        self.about |= {"epoch": time.time_ns() - now, "dropped": 0, "groups": [], "removed": []}
        self._fd, self._room = -1, most  # the file, and the number of rows for which it has room
        if path is not None:
            self._fd, self._room = open_own(path + ROWS_SUFFIX, os.O_RDWR, 0o600), 0
        try:
            if self._fd >= 0:
                os.ftruncate(self._fd, 0)  # the rows of an earlier process with the same name
                self._allocate()
                os.ftruncate(self._fd, _ROW.size * most)
            self._memory = mmap.mmap(self._fd, _ROW.size * most)
        except BaseException:
            self._close()
            raise
        self._save()

    def add_group(self, name: str, ranks: Sequence[int], rank: int) -> int:
        """Add a group, given its members' global ranks and this process's group rank; return its GROUP word."""
        with self._lock:
            self.about["groups"].append({"name": name, "ranks": list(ranks), "rank": rank})
            self._save()
            return len(self.about["groups"])

    def add(
        self, group: int, flavour: int, number: int, call: int, nbytes: int, began: int, ended: int, peer: int
    ) -> None:
        """Add a row, given its words."""
        with self._lock:
            place = self._count
            if place == self._room:
                place = self._make_room()
            _pack(self._memory, place << 6, group, flavour, number, call, nbytes, began, ended, peer)
            self._count = place + 1

    def drop(self, count: int) -> None:
        """Count calls that cannot be logged."""
        with self._lock:
            self.about["dropped"] += count

    def end(self) -> None:
        """Record that the profile ends now. A second call has no effect."""
        with self._lock:
            self.about["ended"] = self.about["ended"] or time.monotonic_ns()
            self._save()
            self._close()

    def disown(self) -> None:
        """In a child process made by fork: leave the file to the parent."""
        self._path = None
        self._close()

    def _close(self) -> None:
        """Close the file. It stays mapped, and does not grow after this."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def content(self) -> tuple[dict[str, Any], Rows]:
        """Return the facts, with the sums of removed rows, and a copy of the rows."""
        with self._lock:
            return self._facts(), self._rows().copy()

    def _rows(self) -> Rows:
        return np.frombuffer(self._memory, np.int64, self._count * WORDS).reshape(-1, WORDS)

    def _facts(self) -> dict[str, Any]:
        return self.about | {"removed": [[*key, *each] for key, each in self._removed.items()]}

    def _allocate(self) -> None:
        """Allocate room in the file for the next rows. OSError: the disk is full."""
        rows = min(_ROOM_STEP, self._most - self._room)
        os.posix_fallocate(self._fd, _ROW.size * self._room, _ROW.size * rows)
        self._room += rows

    def _make_room(self) -> int:
        """Make room for further rows; return how many rows the log has."""
        if self._room < self._most:
            try:
                self._allocate()
                return self._count
            except OSError as error:
                _log.warning("the profile of this rank has room for %d calls: %s", self._room, error)
                self._most = self._room
        return self.thin()

    def thin(self) -> int:
        """Remove at least half of the rows; return how many remain."""
        rows = self._rows()
        mask = kept(rows, self.about["level"])
        while mask.sum() > self._most // 2:
            self.about["level"] += 1
            mask = kept(rows, self.about["level"])
        add_sums(self._removed, sums(rows[~mask]))
        remaining = rows[mask]
        self._count = len(remaining)
        rows[: self._count] = remaining
        rows[self._count :] = 0
        self._save()
        return self._count

    def _save(self) -> None:
        if self._path is None:
            return
        draft = f"{self._path}.part"
        try:
            with os.fdopen(
                os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w"
            ) as file:
                json.dump(self._facts(), file)
            os.replace(draft, self._path + SUFFIX)
        except OSError as error:  # the folder was removed, or its disk is full
            _log.warning("the profile of this rank is incomplete: %s", error)


def load(path: str) -> tuple[dict[str, Any], Rows]:
    """Read what a process has logged into the file `path` (without its suffix), even if the process was killed.

    Raises:
        OSError: the files cannot be read.
        ValueError: they are not of this version.
    """
    with open(path + SUFFIX) as file:
        about = json.load(file)
    if about.get("format") != FORMAT:
        raise ValueError(
            f"{path}{SUFFIX} is of format {about.get('format')}, and this fastcoll reads {FORMAT}"
        )
    with open(path + ROWS_SUFFIX, "rb") as file:
        rows = np.frombuffer(file.read(), np.int64).reshape(-1, WORDS)
    return about, rows[rows[:, GROUP] > 0]
