"""The test whether a group's ranks can read one another's memory. Each rank does it when the group meets.

Linux allows process_vm_readv between processes of one user in one pid namespace, unless seccomp (Docker before Linux
4.8, many sandboxes) or Yama (Ubuntu: only ancestors may) forbids it. Each rank has a test word in its memory, and
publishes the word's address in the segment. It then reads the test words of all others, and publishes whether their
values are right. A value is wrong if the pid of a peer in another pid namespace belongs to another process here.

To map an arena of shared arrays, a rank opens a descriptor of the owner's process. Neither seccomp nor Yama forbids
that.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import operator
import os
from collections.abc import Sequence
from contextlib import suppress

from ..core.monitor import Monitor
from ..errors import AbortedError
from ..system.processes import Member, in_sight
from .autotune import DIRECT
from .layout import ALGORITHMS, REACH
from .segment import Segment

_log = logging.getLogger("fastcoll")
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
# Bits of a rank's result. READS: it can read the memory of all others; MAPS: it can map their arenas.
TESTED, READS, MAPS = 1, 2, 4


class Vector(ctypes.Structure):
    """struct iovec"""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_read = _libc.process_vm_readv
_vectors = ctypes.POINTER(Vector), ctypes.c_ulong
_read.argtypes = [ctypes.c_int, *_vectors, *_vectors, ctypes.c_ulong]
_read.restype = ctypes.c_ssize_t


class Reach:
    """One rank's part of the test. Keep the object until all ranks have read its test word."""

    def __init__(self, segment: Segment, members: Sequence[Member], rank: int) -> None:
        self._segment, self._members, self._rank = segment, members, rank
        self._word = ctypes.c_int64(segment.nonce ^ rank)
        self._wanted = bool(segment.words[ALGORITHMS] >> DIRECT & 1)
        if self._wanted:
            let_peers_read()
        segment.reach(rank)[0] = ctypes.addressof(self._word)

    def probe(self) -> None:
        """Read the test words of all others, and publish the result. Called after all ranks have attached."""
        how, why = TESTED | READS | MAPS if self._wanted else TESTED, ""
        for peer, member in enumerate(self._members if self._wanted else ()):
            try:
                if read_word(member.pid, int(self._segment.reach(peer)[0])) != self._segment.nonce ^ peer:
                    why = "that pid is another process here"
            except OSError as error:
                why = str(error.strerror)
            if why and how & READS:
                _log.debug("the memory of %s cannot be read by process_vm_readv: %s", member, why)
                how &= ~READS
            if not in_sight(member) or not descriptors_are_open(member.pid):
                how &= ~MAPS
        self._segment.publish(self._rank, REACH + 8, how)

    def unsure(self) -> list[int]:
        """Return the ranks that have not published their result yet."""
        return [rank for rank in range(len(self._members)) if not self._segment.acquire(rank, REACH + 8)]

    def of_all(self) -> int:
        """Return the bits of READS and MAPS that all ranks have published. Called when `unsure` returns no rank."""
        results = (int(self._segment.reach(rank)[1]) for rank in range(len(self._members)))
        return functools.reduce(operator.and_, results)


def unreadable(monitor: Monitor, rank: int, doing: str = "") -> AbortedError:
    """Make the error of a call that cannot read the array of a group rank that is alive.

    `doing` describes the call; "" if it is not known.
    """
    return AbortedError(
        f"the array of {monitor.name(rank)} could not be read; it must stay as it is until its call has returned"
        + (f"; {doing}" if doing else ""),
        [monitor.members[rank].rank],
    )


def read_word(pid: int, address: int) -> int:
    """Read the int64 at an address of another process; raise OSError if it cannot be read."""
    found = ctypes.c_int64()
    here, there = Vector(ctypes.addressof(found), 8), Vector(address, 8)
    if _read(pid, here, 1, there, 1, 0) != 8:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return found.value


def descriptors_are_open(pid: int) -> bool:
    """Whether this process may open another process's descriptors, which is needed to map its arena."""
    return os.access(f"/proc/{pid}/fd", os.R_OK | os.X_OK)


def let_peers_read() -> None:
    """Allow all processes of this user to read this process's memory, if Yama allows that to ancestors only."""
    with suppress(OSError), open("/proc/sys/kernel/yama/ptrace_scope") as file:
        if file.read().strip() == "1":
            _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
