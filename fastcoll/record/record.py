"""The flight record of a process: the layout of its memory, and how another process reads it into plain data.

The writer is recorder.py. Each process has one memfd, named `fastcoll-record`. Another process of the same user finds
the memfd in /proc/PID/fd, and can read it even if the process is stopped or its Python is stuck. All words are int64.

    file    header | table of groups | a block for each group
    header  the words HEAD_...; at TEXT, a JSON text that describes the process
    table   at TABLE, ROWS rows, one for each group: serial number (0: the row is free), offset and bytes of its block,
            and whether the group is closed (such a row is kept for metrics/ only; `parse` skips it)
    block   the words from SERIAL on; at FAILURE_AT, why the group failed; at WAITS_AT, the waits of its threads; at
            RING_AT, the *ring*, a row for each of the last RING calls; then a JSON text that describes the group, and
            the private context of the group's backend

The writer does not wait for readers, so a reader must prove that the data it has read are consistent. A block is valid
if the table's row and the block's first word have the same serial number after the block was read. A text is valid if
its checksum matches. Call n is in row n % RING of the ring. The writer first writes the group's count of calls, n, then
the other words of the row, then the row's NUMBER. So a row is valid for call n if its NUMBER, read before the row, is
n, and if the count of calls, read after the row, is less than n + RING: call n + RING is the first that overwrites the
row. Each of the three is read by its own pread. A pread copies words in any order, but it ends with an atomic operation
on the page's reference count, which is a full barrier.
"""

from __future__ import annotations

import functools
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..system.processes import living_thread, status_of

NAME = "fastcoll-record"
JOINING = "fastcoll-joining"  # an empty memfd of a process without a group, while it is in its rendezvous
MAGIC, VERSION = 0x6661737463_52, 1

# ---- the file --------------------------------------------------------------------------------------------
(
    HEAD_MAGIC, HEAD_VERSION,
    HEAD_PID, HEAD_START,  # the process's pid in its own namespace, and its start time (field 22 of /proc/PID/stat)
    HEAD_STARTED,  # when the record was made, in ns of CLOCK_MONOTONIC
    HEAD_EPOCH,  # the ns that must be added to a time of that clock to get the time of day, in ns since 1970
    HEAD_TEXT, HEAD_TEXT_CRC,  # length and checksum of the text at TEXT
) = range(8)  # fmt: skip
TEXT, TABLE, ROWS, ROW_WORDS = 512, 4096, 1024, 4
BLOCKS = TABLE + 8 * ROWS * ROW_WORDS

# ---- a block ---------------------------------------------------------------------------------------------
(
    SERIAL, BYTES,
    MEMBERS_AT, MEMBERS, MEMBERS_CRC,  # offset, length and checksum of the text that describes the group
    # The words CALLS_AT to PENDING_AT do not have these values themselves. Each has the offset in the block, in bytes,
    # of the word that has the value, which may be in the backend's context; 0: no word has this value.
    CALLS_AT,  # number of the last call begun
    FINISHED_AT,  # number of the last call that is complete
    SINCE_AT,  # when the call under way began if it is timed, else when it began to wait; 0: it has not waited
    LATE_AT,  # group rank for which the call waited at the backend's last check; -1: none
    PENDING_AT,  # operations queued or under way on the progress thread
    OWN_CALLS, OWN_FINISHED,  # the values for CALLS_AT and FINISHED_AT, if the backend's context does not have them
    FAILURE,  # bytes of the text at FAILURE_AT
    SITES_AT, SITES,  # offset and number of the call sites, SITE_BYTES each; offset 0: call sites are not recorded
    UNAWAITED,  # number of the last asynchronous call that a thread of the backend has taken over from its caller
    ERROR_COUNTS,  # the first of the words that count the group's errors, one for each of ERRORS
) = range(17)  # fmt: skip
ERRORS = "PeerDiedError", "CollectiveTimeoutError", "AbortedError", "GroupError", "MismatchError"
FAILURE_AT, WAITS_AT, RING_AT = 512, 2048, 8192
FAILURE_BYTES = WAITS_AT - FAILURE_AT

# A slot for the wait of a thread. Python writes it when it first checks on the wait, after 50 ms.
WAITS, WAIT_WORDS, WAIT_RANKS = 4, 128, 32
# Number of the call that waits; MESSAGE: a thread waits for a message or a connection; POSTED: a message is under way
# for which no thread waits; 0: the slot is free.
WAIT_CALL = 0
WAIT_SINCE, WAIT_COUNT, WAIT_TEXT = 1, 2, 3  # start of the wait, number of ranks, bytes of the text
WAIT_RANKS_AT = 4
WAIT_TEXT_AT = WAIT_RANKS_AT + WAIT_RANKS
MESSAGE, POSTED = -1, -2

# A row of the ring: a cache line.
RING, ENTRY_WORDS = 1024, 8
NUMBER, CALL, SHAPE = 0, 1, 2  # the words that ranks compare (core/signature.py)
# Times in ns; 0: not timed. The three lowest bits of ENDED are an index into ENDS, which is 0 for a completed call.
BEGAN, ENDED = 3, 4
SITE = 5  # 65536 * the call's number + the index of its call site; written before the call (`called_from`)
SITE_BYTES, MOST_SITES = 128, 512
ENDS = "done", "mismatch", "failed", "made anew"
MEMBERS_START = RING_AT + 8 * RING * ENTRY_WORDS


def row_of(number: int) -> int:
    """Return the offset of a call's row in the block, in words."""
    return RING_AT // 8 + number % RING * ENTRY_WORDS


# ---- the record as plain data ----------------------------------------------------------------------------


class CallRecord(NamedTuple):
    """One call of a group.

    Attributes:
        number: counted from 1 in the group; the same call has the same number on all ranks.
        call, shape: the call's signature (core/signature.py); 0, 0: not published yet.
        state: one of ENDS, or "under way".
        began, ended: in ns since 1970; 0: not timed.
        site: the user's file and line, if the job records call sites; else "".
    """

    number: int
    call: int
    shape: int
    state: str
    began: int
    ended: int
    site: str = ""

    @property
    def head(self) -> tuple[int, int]:
        """The two words of the signature, a `Head` of core/signature.py."""
        return self.call, self.shape


class Waiting(NamedTuple):
    """A thread's wait, or a message that has been under way without one, for at least 50 ms.

    Attributes:
        number: the number of the call that waits; 0: the thread waits in a send or receive.
        doing: the name of the operation that error texts use.
        since: the start of the wait, in ns since 1970.
        ranks: the global ranks for which it waits; only the first WAIT_RANKS are listed. A message that lists several
            ranks may come from any one of them.
        many: the number of ranks for which it waits.
        awaited: whether a thread waits; False: the message was posted by isend or irecv, and no thread waits for it.
    """

    number: int
    doing: str
    since: int
    ranks: tuple[int, ...]
    many: int
    awaited: bool = True


@dataclass(frozen=True)
class MemberRecord:
    """A member of a group: its global rank, host and pid."""

    rank: int
    host: str
    pid: int


@dataclass(frozen=True)
class GroupRecord:
    """One group, as one of its ranks has recorded it.

    Attributes:
        name: the same on all ranks; WORLD for the default group.
        serial: 1 for the first group that this process made, 2 for the second, and so on.
        rank: this process's rank in the group.
        calls, finished: numbers of the last call that began, and of the last one that is complete.
        pending: asynchronous operations queued or under way on threads other than their callers.
        ring: the last calls, the oldest first.
        under_way: the call under way, or None.
        since: when the call under way began, or began to wait, in ns since 1970; 0: not known.
        late: global rank for which the call under way waited at the backend's last check; -1: none or not known.
        waits: this process's waits in the group that last at least 50 ms; for a failed group, those at its failure.
        failure: why the group failed, or "".
    """

    name: str
    serial: int
    backend: str
    rank: int
    members: tuple[MemberRecord, ...]
    calls: int
    finished: int
    pending: int
    ring: tuple[CallRecord, ...]
    under_way: CallRecord | None
    since: int
    late: int
    waits: tuple[Waiting, ...]
    failure: str


def ranks_of(members: Sequence[MemberRecord]) -> list[int]:
    """Return the global ranks of a group's members, in the order of their ranks in the group."""
    return [member.rank for member in members]


@dataclass(frozen=True)
class Record:
    """One process and its groups.

    `pid` is that in the process's own pid namespace, `start_time` is in clock ticks since boot, and `started`, when the
    record was made, is in seconds since 1970.
    """

    job: str
    rank: int
    world_size: int
    host: str
    pid: int
    start_time: int
    started: float
    version: str
    groups: tuple[GroupRecord, ...]

    def as_dict(self) -> dict[str, Any]:
        """Convert to data for JSON; `record_of` is the inverse."""
        return asdict(self)


def record_of(data: dict[str, Any]) -> Record:
    """Make a Record from the result of `as_dict`, also after JSON. Raises KeyError or TypeError for other data."""
    groups = []
    for group in data["groups"]:
        under_way = group["under_way"]
        parts = {
            "members": tuple(MemberRecord(**peer) for peer in group["members"]),
            "ring": tuple(CallRecord(*call) for call in group["ring"]),
            "under_way": None if under_way is None else CallRecord(*under_way),
            "waits": tuple(Waiting(*wait)._replace(ranks=tuple(wait[3])) for wait in group["waits"]),
        }
        groups.append(GroupRecord(**(group | parts)))
    return Record(**(data | {"groups": tuple(groups)}))


# ---- reading ---------------------------------------------------------------------------------------------

Read = Callable[[int, int], bytes]
"""Reads from the file: `read(nbytes, offset)`."""


def read(pid: int) -> Record | None:
    """Return the record of a process of this user; None if it has no fastcoll group, or has ended. Never blocks.

    Raises:
        PermissionError: the process belongs to another user.
    """
    if (found := open_record(pid)) is None:
        return None
    with found:
        return found.read()


def open_record(pid: int) -> OpenRecord | None:
    """Open the record of a process of this user; None if it has no fastcoll group, or has ended. Never blocks.

    Raises:
        PermissionError: the process belongs to another user.
    """
    for path in _files(pid, NAME):
        with suppress(FileNotFoundError, ProcessLookupError):
            found = OpenRecord(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            # Just after a fork, the child still has its parent's memfd; the parent's record has another start time.
            if (record := found.read(1)) is not None and record.start_time == int(status_of(pid)[19]):
                return found
            found.close()
    return None


class OpenRecord:
    """The record of a process that can be read again and again, even after the process has ended.

    Reading never blocks. When the process leaves its last group, the record has no groups left. Groups that the process
    makes later are in another record.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, last: int = RING) -> Record | None:
        """Read the record, with the `last` calls of each group; None if the file has none."""
        return parse(lambda nbytes, offset: os.pread(self._fd, nbytes, offset), last)

    def detach(self) -> int:
        """Return the file, which the caller must close."""
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> OpenRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def joining_since(pid: int) -> float | None:
    """Return when a process of this user began its rendezvous, in seconds since 1970; None if it is not in one.

    Raises:
        PermissionError: the process belongs to another user.
    """
    for path in _files(pid, JOINING):
        with suppress(FileNotFoundError, ProcessLookupError):
            return os.stat(path).st_mtime
    return None


def _files(pid: int, name: str) -> Iterator[str]:
    """Yield the paths of a process's memfds with this name."""
    with suppress(FileNotFoundError, ProcessLookupError, NotADirectoryError):
        folder = f"/proc/{living_thread(pid)}/fd"
        for fd in os.listdir(folder):
            with suppress(FileNotFoundError):
                if os.readlink(f"{folder}/{fd}").startswith(f"/memfd:{name}"):
                    yield f"{folder}/{fd}"


def parse(read: Read, last: int = RING) -> Record | None:
    """Return the record in a file, with the `last` calls of each group, at least 1; None if the file has none."""
    head = _words(read(8 * 8, 0))
    if head.size < 8 or head[HEAD_MAGIC] != MAGIC or head[HEAD_VERSION] != VERSION:
        return None
    about = _text(read, TEXT, head[HEAD_TEXT], head[HEAD_TEXT_CRC], TABLE - TEXT)
    if about is None:
        return None
    epoch = int(head[HEAD_EPOCH])
    groups = []
    table = _words(read(8 * ROW_WORDS * ROWS, TABLE)).reshape(-1, ROW_WORDS)
    for row in np.flatnonzero((table[:, 0] != 0) & (table[:, 3] == 0)).tolist():
        _, offset, nbytes, _ = table[row].tolist()
        # These errors mean that the group is being made or closed at this moment, so it is left out.
        with suppress(ValueError, KeyError, TypeError, IndexError, struct.error):
            found = _group(read, offset, nbytes, epoch, last)
            if found.serial == _words(read(8, TABLE + 8 * ROW_WORDS * row))[0]:
                groups.append(found)
    return Record(
        **about,
        pid=int(head[HEAD_PID]),
        start_time=int(head[HEAD_START]),
        started=(int(head[HEAD_STARTED]) + epoch) / 1e9,
        groups=tuple(sorted(groups, key=lambda group: group.serial)),
    )


def _words(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data[: len(data) // 8 * 8], np.int64)


def _text(read: Read, at: int, nbytes: int, crc: int, most: int) -> Any:
    """Decode a JSON text; None if its checksum is wrong."""
    data = read(int(nbytes), at) if 0 < nbytes <= most else b""
    return _decode(data) if data and zlib.crc32(data) == crc else None


# A text never changes, so a reader that reads again decodes nothing. Ranks with the same members share one tuple of
# them, which compares with itself at once.
_decode = functools.lru_cache(4096)(json.loads)


@functools.lru_cache(256)
def _members(
    ranks: tuple[int, ...], hosts: tuple[str, ...], places: tuple[int, ...], pids: tuple[int, ...]
) -> tuple[MemberRecord, ...]:
    """Return the members of a group; each member's host is hosts[place]."""
    return tuple(map(MemberRecord, ranks, [hosts[place] for place in places], pids))


def _group(read: Read, offset: int, nbytes: int, epoch: int, last: int) -> GroupRecord:
    ring = _words(read(8 * RING * ENTRY_WORDS, offset + RING_AT))
    data = read(nbytes, offset)
    block, after = _words(data), _words(read(RING_AT, offset))

    def word(at: int, words: NDArray[np.int64] = block, missing: int = 0) -> int:
        """Return the word whose offset is in word `at` of the block; `missing` if that offset is 0."""
        place = int(block[at])
        if not place:
            return missing
        if words is block:
            return struct.unpack_from("q", data, place)[0]  # type: ignore[no-any-return]
        return struct.unpack("q", read(8, offset + place))[0]  # type: ignore[no-any-return]

    about = _text(
        lambda n, at: data[at : at + n],
        int(block[MEMBERS_AT]),
        int(block[MEMBERS]),
        int(block[MEMBERS_CRC]),
        nbytes,
    )
    if about is None or block[SERIAL] != after[SERIAL]:
        raise ValueError("the block is not consistent")
    members = _members(*(tuple(about[name]) for name in ("ranks", "hosts", "host", "pids")))

    def time(stamp: int) -> int:
        return stamp + epoch if stamp else 0

    calls, finished = word(CALLS_AT), word(FINISHED_AT)
    oldest = max(1, word(CALLS_AT, after) - RING + 1, calls - last + 1)
    entries = _calls(data, block, ring, range(oldest, calls + 1), finished, time)
    under_way = _under_way(entries, calls, finished)
    late = word(LATE_AT, missing=-1)
    why = data[FAILURE_AT : FAILURE_AT + min(int(block[FAILURE]), FAILURE_BYTES)]
    waited_in = calls if under_way or (why and calls > finished) else 0
    waits = tuple(_waits(data, members, waited_in, time))
    return GroupRecord(
        name=about["name"],
        serial=int(block[SERIAL]),
        backend=about["backend"],
        rank=about["rank"],
        members=members,
        calls=calls,
        finished=finished,
        pending=word(PENDING_AT) + (under_way is not None and int(block[UNAWAITED]) == calls),
        ring=tuple(entries),
        under_way=under_way,
        since=0 if under_way is None else time(word(SINCE_AT)) or under_way.began,
        late=members[late].rank if under_way and late != about["rank"] and 0 <= late < len(members) else -1,
        waits=waits,
        failure=why.decode(errors="replace"),
    )


def _calls(
    data: bytes,
    block: NDArray[np.int64],
    earlier: NDArray[np.int64],
    numbers: range,
    finished: int,
    time: Callable[[int], int],
) -> list[CallRecord]:
    """Return the calls of `numbers` that are in the ring; the last one may be under way.

    Args:
        earlier: the ring as it was before the block was read.
    """
    # A row that still has an older call has another NUMBER. No row has a newer call, because the caller computed the
    # start of `numbers` from a count of calls that was read after the rows, and so has left out all calls whose rows
    # the writer may have overwritten.
    start = int(block[SITES_AT])
    places = range(start, start + SITE_BYTES * min(int(block[SITES]), MOST_SITES), SITE_BYTES)
    sites = [data[at : at + SITE_BYTES].rstrip(b"\0").decode(errors="replace") for at in places]
    found = []
    for number in numbers:
        if earlier[row_of(number) - RING_AT // 8] != number:
            continue
        row = block[row_of(number) : row_of(number) + ENTRY_WORDS].tolist()
        ended = row[ENDED] & 7
        state = "under way" if number == numbers[-1] > finished and ended == 0 else ENDS[ended]
        # The SITE word has the number of the call for which it was written, above the site's place in `sites`.
        which = row[SITE] & 0xFFFF
        is_its = row[SITE] != 0 and row[SITE] >> 16 == number and which < len(sites)
        site = sites[which] if is_its else ""
        found.append(
            CallRecord(number, row[CALL], row[SHAPE], state, time(row[BEGAN]), time(row[ENDED] & ~7), site)
        )
    return found


def _under_way(entries: Sequence[CallRecord], calls: int, finished: int) -> CallRecord | None:
    """Return call number `calls`, the last one, if it is under way; it may be missing in `entries`."""
    if entries and entries[-1].number == calls:
        return entries[-1] if entries[-1].state == "under way" else None
    return CallRecord(calls, 0, 0, "under way", 0, 0) if calls > finished else None


def _waits(
    data: bytes, members: Sequence[MemberRecord], call: int, time: Callable[[int], int]
) -> list[Waiting]:
    """Return the waits in a block that are of a message or of `call`, the call under way (0: there is none)."""
    found = []
    for slot in range(WAITS):
        at = WAITS_AT + 8 * WAIT_WORDS * slot
        words = _words(data[at : at + 8 * WAIT_WORDS])
        number, count = int(words[WAIT_CALL]), int(words[WAIT_COUNT])
        if number in (MESSAGE, POSTED) or (number == call and call):
            listed = words[WAIT_RANKS_AT : WAIT_RANKS_AT + min(count, WAIT_RANKS)]
            ranks = tuple(members[rank].rank for rank in map(int, listed) if 0 <= rank < len(members))
            start = at + 8 * WAIT_TEXT_AT
            doing = data[start : start + min(int(words[WAIT_TEXT]), 8 * (WAIT_WORDS - WAIT_TEXT_AT))]
            since = time(int(words[WAIT_SINCE]))
            text, is_awaited = doing.decode(errors="replace"), number != POSTED
            found.append(Waiting(max(number, 0), text, since, ranks, count, is_awaited))
    return found
