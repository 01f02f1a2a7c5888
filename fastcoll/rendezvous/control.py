"""The control connections of one rank in a group: the notices that its peers send, and the decisions based on them.

Notices are sent without blocking, and read when the monitor polls; no thread waits for them. A rank sends at most two
notices that it leaves or fails, and MOST_WAITING that it waits, for which the kernel's buffers always have room.

Every notice has 1,312 bytes, so that the receiver need not trust a length that a peer sends (big-endian):

    offset  bytes  field
    0       8      magic "FASTNOTE"
    8       1      state of the sender: 1 has left without a failure, 2 has failed the group, 3 is leaving it, 4 waits
                   in a call that has timed out (core/inquiry.py)
    9       1      cause: 1 a process died or cannot be reached, 2 a process did not come in time, 0 otherwise
    10      2      number of ranks at fault
    12      4      group rank of the first sender (other ranks may forward the notice)
    16      4      length of the text
    20      8      state 4: number of the call; else zero
    28      4      zero
    32      256    global ranks at fault, 4 bytes each
    288     1024   text, UTF-8
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core.monitor import FAILED, IN_ORDER, LEAVING, LEFT, Monitor
from ..errors import CollectiveTimeoutError, GroupError, PeerDiedError
from ..store.encryption import carrier, failure, holds_bytes
from ..system.interfaces import watch
from ..system.processes import Member, dead_among, describe_gone

_MAGIC = b"FASTNOTE"
MOST_RANKS = 64
TEXT_BYTES = 1024
WAITING = 4  # the state in a notice; the other states are those of core/monitor.py
MOST_WAITING = 8
"""How many notices a rank sends that it waits. More than one is rare: a call that has timed out must complete yet."""
_DIED, _LATE = 1, 2
_FORMAT = struct.Struct(f"!8sBBHIIQ4s{MOST_RANKS}I{TEXT_BYTES}s")
NOTICE_SIZE = _FORMAT.size


class NoticeError(ValueError):
    """The bytes are not a notice."""


@dataclass(frozen=True)
class Notice:
    """The message that a rank has left the group, has failed it, is leaving it, or waits in a call.

    `state` is LEFT, FAILED or LEAVING (core/monitor.py), or WAITING.
    """

    state: int
    origin: int  # group rank of the first sender; other ranks forward the notice
    ranks: tuple[int, ...] = ()  # global ranks at fault, at most MOST_RANKS
    died: bool = False  # whether the ranks at fault died or cannot be reached
    late: bool = False  # whether the ranks at fault did not come in time
    text: str = ""  # the reason
    number: int = 0  # of the call in which a rank is WAITING

    def to_bytes(self) -> bytes:
        """Return the notice as bytes, with at most 1 KiB of text and MOST_RANKS ranks."""
        text = self.text.encode()[:TEXT_BYTES].decode(errors="ignore").encode()
        ranks = self.ranks[:MOST_RANKS]
        filled = (*ranks, *[0] * (MOST_RANKS - len(ranks)))
        what = _DIED if self.died else _LATE if self.late else 0
        head = self.state, what, len(ranks), self.origin, len(text)
        return _FORMAT.pack(_MAGIC, *head, self.number, bytes(4), *filled, text)

    @classmethod
    def from_bytes(cls, data: bytes, size: int) -> Notice:
        """Parse a notice of a rank in a group of `size`, or raise NoticeError."""
        magic, state, what, count, origin, length, number, zero, *ranks, text = _FORMAT.unpack(data)
        known = magic == _MAGIC and state in (LEFT, FAILED, LEAVING, WAITING) and what in (0, _DIED, _LATE)
        known &= (number > 0) == (state == WAITING)
        bounded = count <= MOST_RANKS and origin < size and length <= TEXT_BYTES
        if not known or not bounded or any(zero):
            raise NoticeError(f"not a notice: {data[:32]!r}")
        why = text[:length].decode(errors="replace")
        return cls(state, origin, tuple(ranks[:count]), what == _DIED, what == _LATE, why, number)


logger = logging.getLogger("fastcoll")
_LOOK_AGAIN_SECONDS = 0.002  # `look` reads at most once in this time
_SENT_SECONDS = 0.2  # how long `send` waits until encrypted notices are in TCP
_NOTICES_AT_ONCE = 4  # how many times `look` polls the connections


class Control:
    """The control connections of a rank. Thread-safe; a signal handler may call `look` while `look` is running.

    Attributes:
        received: group rank -> its first notice or, if that was LEAVING, the next one.
        lost: group rank -> how its connection ended, for error texts; also set if the rank has left or failed before.
        peers: group ranks to which there is, or was, a connection.
        waiting: group rank -> the highest number of a call in its notices that it waits.
    """

    def __init__(self, size: int) -> None:
        self.received: dict[int, Notice] = {}
        self.lost: dict[int, str] = {}
        self.peers: set[int] = set()
        self.waiting: dict[int, int] = {}
        self._told: list[int] = []  # the numbers that `tell_waiting` has sent
        self._size = size
        self._lock = threading.RLock()
        # True while a `look` is reading, which a signal handler that also calls `look` may have interrupted.
        self._looking = False
        self._looked = 0.0
        # Descriptor -> peer, socket, and the received part of an incomplete notice.
        self._links: dict[int, tuple[int, socket.socket, bytearray]] = {}
        self._poller = select.poll()
        self._notices: list[bytes] = []  # those that `send` has sent; `add` sends them on a new connection

    def add(self, peer: int, connection: socket.socket) -> None:
        """Take ownership of a connection to a peer. There may be several connections to a peer."""
        with self._lock:
            self.peers.add(peer)
            with contextlib.suppress(OSError):  # if the connection is broken, the next `look` detects that
                watch(carrier(connection))
            self._links[connection.fileno()] = (peer, connection, bytearray())
            self._poller.register(connection, select.POLLIN)
            for data in self._notices:
                _send(connection, data)

    def send(self, notice: Notice) -> None:
        """Send a notice to all peers, also on connections that are added later."""
        data = notice.to_bytes()
        with self._lock:
            self._notices.append(data)
            connections = [connection for _, connection, _ in list(self._links.values())]
            for connection in connections:
                _send(connection, data)
            # The process may end by os._exit as soon as this returns; without encryption, TCP has the notice already.
            end = time.monotonic() + _SENT_SECONDS
            while any(map(holds_bytes, connections)) and time.monotonic() < end:
                time.sleep(0.0005)

    def tell_waiting(self, rank: int, number: int) -> None:
        """Send all peers the notice that this rank waits in a call, or in an earlier one, unless it was sent before."""
        with self._lock:
            if len(self._told) < MOST_WAITING and number > max(self._told, default=0):
                self._told.append(number)
                data = Notice(WAITING, rank, number=number).to_bytes()
                for _, connection, _ in list(self._links.values()):
                    _send(connection, data)

    def look(self, again: bool = False) -> None:
        """Read the notices that have come. Never blocks.

        If the last read was less than 2 ms ago, this does nothing, except with `again`.
        """
        if not again and time.monotonic() - self._looked < _LOOK_AGAIN_SECONDS:
            return
        if not self._lock.acquire(blocking=False):
            return  # another thread is reading
        try:
            if not self._looking:
                self._looking = True
                try:
                    self._read()
                finally:
                    self._looking = False
        finally:
            self._lock.release()

    def close(self) -> None:
        """Read the notices that have come, and close all connections.

        A close with unread data would reset the connection, and the peer might lose this rank's notice.
        """
        with self._lock:
            self.look(again=True)
            for _, connection, _ in self._links.values():
                self._poller.unregister(connection)
                connection.close()
            self._links.clear()

    def close_inherited(self) -> None:
        """In a child process made by fork: close the copies of all connections."""
        for _, connection, _ in list(self._links.values()):
            connection.close()

    def _read(self) -> None:
        # Poll several times, because a notice may come in pieces, and the end of the connection may follow it.
        for _ in range(_NOTICES_AT_ONCE):
            for fd, _ in self._poller.poll(0):
                if fd in self._links:
                    self._read_from(fd)
        self._looked = time.monotonic()

    def _read_from(self, fd: int) -> None:
        peer, connection, buffer = self._links[fd]
        try:
            data = connection.recv(NOTICE_SIZE - len(buffer))
            buffer += data
            if not data:
                if error := failure(connection):
                    raise error
                self._lose(fd, peer, "it closed the connection")
            elif len(buffer) == NOTICE_SIZE:
                self._receive(peer, Notice.from_bytes(bytes(buffer), self._size))
                buffer.clear()
        except BlockingIOError:
            return
        except NoticeError as error:
            logger.warning("group rank %d sent an invalid notice: %s", peer, error)
            self._lose(fd, peer, str(error))
        except OSError as error:
            vanished = error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
            self._lose(fd, peer, "its host cannot be reached" if vanished else str(error.strerror))

    def _receive(self, peer: int, notice: Notice) -> None:
        if notice.state == WAITING:
            self.waiting[peer] = max(notice.number, self.waiting.get(peer, 0))
        elif peer not in self.received or self.received[peer].state == LEAVING:
            self.received[peer] = notice

    def _lose(self, fd: int, peer: int, how: str) -> None:
        if fd in self._links:  # else a signal handler has closed all connections meanwhile
            self._poller.unregister(fd)
            self._links.pop(fd)[1].close()
            self.lost.setdefault(peer, how)


def _send(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # if the connection is broken, the next `look` detects that
        connection.send(data)


class NetMonitor(Monitor):
    """The monitor of a rank that observes the other ranks through its control connections.

    A peer whose connection ends without a notice is treated as dead, because it has died or cannot be reached. If a
    notice of a failed rank names ranks at fault, this rank blames the same ranks and not the sender. The reason is that
    the first survivor that detects a death may be gone before the others poll, and these must still name the dead rank.
    """

    def __init__(self, members: Sequence[Member], rank: int, control: Control) -> None:
        super().__init__(members, rank)
        self._control = control
        # Called before this rank publishes that it leaves; waits until its data has arrived at the peers' hosts.
        self.let_arrive: Callable[[], None] = lambda: None
        self._broken: dict[int, str] = {}  # group rank -> how a connection for data or messages broke
        # This rank's failure, and the notice that caused it.
        self._taken: tuple[GroupError, Notice] | None = None
        # Whether all peers can send this rank a notice. If not, a process that has ended may have left before, unless
        # it has, or had, a control connection with this rank.
        self.hears_all = True

    def lost(self, rank: int, how: str) -> None:
        """Record how a connection to a rank, for data or messages, broke.

        The rank is declared dead unless it has left or failed.
        """
        self._broken.setdefault(rank, how)

    def start_to_leave(self) -> None:
        self.let_arrive()
        super().start_to_leave()

    def leave(self) -> None:
        self.let_arrive()
        super().leave()

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank no longer receives: it has left or failed, or a connection to it is lost."""
        self._control.look()
        return self._state(rank) in (LEFT, FAILED) or rank in {**self._broken, **self._control.lost}

    def lost_processes(self) -> dict[Member, str]:
        """Return the members with a broken connection that have neither left nor failed; for `gone_among`."""
        self._control.look()
        return self._suspects()

    def tell_waiting(self, number: int) -> None:
        """See core/inquiry.py, as for the two methods below."""
        self._control.tell_waiting(self.rank, number)

    def told_waiting(self) -> dict[int, int]:
        self._control.look()
        return self._control.waiting.copy()

    def hears(self, rank: int) -> bool:
        return rank in self._control.peers

    def has_left(self, rank: int) -> bool:
        self._control.look()
        return self._state(rank) in (LEFT, LEAVING)

    def decide(self, needed: Sequence[int], doing: str) -> GroupError | None:
        if self.failure is not None:
            return self.failure
        # Look for dead processes before reading the notices: a process that leaves sends LEFT before it ends. So if the
        # process is found dead here, its notice is read here too, and its death is not taken for a failure.
        proven = set(self._dead(self.members))
        self._control.look(again=bool(proven))
        if proven:
            proven -= {member for rank, member in enumerate(self.members) if not self._is_present(rank)}
        if error := self._death(proven, doing):
            return error
        for notice in list(self._control.received.values()):
            # At fault are the ranks that the notice names, or else its first sender.
            if notice.state == FAILED:
                passed_on = self.passed_on(notice.origin, notice.text, notice.ranks, notice.late, doing)
                self._taken = (passed_on, notice)
                return passed_on
        return super().decide(needed, doing)

    def _death(self, proven: set[Member], doing: str) -> PeerDiedError | None:
        """Return the error for the members that died, as far as this rank and the notices show; None: none died."""
        suspects = self._suspects()
        # The first notice that reports the death of a rank other than this one.
        notices, me = list(self._control.received.values()), self.members[self.rank].rank
        report = next((each for each in notices if each.died and set(each.ranks) - {me}), None)
        reported = set(report.ranks) if report is not None else set()
        reported_members = {member for member in self.members if member.rank in reported}
        culprits = sorted(proven | set(suspects) | reported_members, key=lambda member: member.rank)
        if not culprits:
            return None
        gone = {member: None if member in proven else suspects.get(member, "") for member in culprits}
        error = PeerDiedError(f"{describe_gone(gone)}; {doing}", [member.rank for member in culprits])
        if report is not None and reported == set(error.ranks):
            self._taken = (error, report)
        return error

    def _suspects(self) -> dict[Member, str]:
        """Return {member: how a connection to it broke}, without the members that have left or failed."""
        broken = {**self._broken, **self._control.lost}
        return {self.members[rank]: how for rank, how in broken.items() if self._is_present(rank)}

    def _publish(self, state: int, reason: str) -> None:
        notice = Notice(state, self.rank, text=reason)
        if state == FAILED and self.failure is not None:
            if self._taken is not None and self._taken[0] is self.failure:
                notice = self._taken[1]  # forwarded unchanged, without another "failed the group"
            else:
                died = isinstance(self.failure, PeerDiedError)
                late = isinstance(self.failure, CollectiveTimeoutError)
                notice = Notice(FAILED, self.rank, self.failure.ranks, died, late, reason)
        self._control.send(notice)

    def _state(self, rank: int) -> int:
        notice = self._control.received.get(rank)
        return IN_ORDER if notice is None else notice.state

    def _is_present(self, rank: int) -> bool:
        return self._state(rank) in (IN_ORDER, LEAVING)

    def _states(self) -> list[int]:
        return [self._state(rank) for rank in range(len(self.members))]

    def _reason(self, rank: int) -> str:
        return self._control.received[rank].text

    def _dead(self, working: Sequence[Member]) -> list[Member]:
        dead = dead_among(working)
        if self.hears_all:
            return dead
        return [member for member in dead if self.members.index(member) in self._control.peers]
