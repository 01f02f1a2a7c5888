"""Both sides of a connection's opening as state machines: bytes in, bytes out, no sockets.

Each side says how many bytes it `wants` next (0: it is through), takes what came, split in any way, and
returns what is to be sent. Never more than one opening and one proof are held.
"""

from __future__ import annotations

from collections.abc import Callable

from ...rendezvous.secret import is_proof
from .opening import (
    OPENING_SIZE,
    PROOF_SIZE,
    PROTOCOL,
    VERSION,
    Kind,
    Opening,
    OpeningError,
    Role,
    Seat,
    Verdict,
    check_start,
    prove,
)


class RefusedError(OpeningError):
    """The two ranks do not fit together; trying again does not help."""


class Turned(OpeningError):
    """A dialing rank does not fit; `answer` tells it why."""

    def __init__(self, reason: str, answer: bytes) -> None:
        super().__init__(reason)
        self.answer = answer


class Dialing:
    """The side that dials.

    Args:
        seat: this rank's.
        peer: the group rank that is dialed.
        kind, stream: of the connection.
    """

    def __init__(self, seat: Seat, peer: int, kind: Kind, stream: int) -> None:
        self._seat = seat
        self._mine = Opening(
            Role.DIALS, kind, stream, seat.group, seat.rank, peer, seat.size, seat.has_secret
        )
        self.opening = self._mine.to_bytes()
        self._buffer = b""
        self.wants = OPENING_SIZE

    def take(self, data: bytes) -> bytes:
        """Take at most `wants` bytes; what to send now.

        Raises:
            RefusedError: the other end is not the peer that was meant, or does not fit.
            OpeningError: what came is no opening.
        """
        self._buffer += data
        self.wants -= len(data)
        if len(self._buffer) <= OPENING_SIZE:
            check_start(self._buffer)
            if not self.wants:
                self._check(Opening.from_bytes(self._buffer, Role.ANSWERS))
                self.wants = PROOF_SIZE
            return b""
        if self.wants:
            return b""
        theirs, given = self._buffer[:OPENING_SIZE], self._buffer[OPENING_SIZE:]
        if not is_proof(given, prove(self._seat.key, Role.ANSWERS, self.opening, theirs)):
            raise RefusedError(_SECRETS)
        return prove(self._seat.key, Role.DIALS, self.opening, theirs)

    def _check(self, theirs: Opening) -> None:
        if theirs.protocol != PROTOCOL or theirs.version != VERSION:
            raise RefusedError(
                f"it runs fastcoll {theirs.version.decode(errors='replace')} (protocol {theirs.protocol}), this rank "
                f"{VERSION.decode()} (protocol {PROTOCOL}); run one version on all ranks"
            )
        if theirs.verdict is Verdict.SECRET or theirs.has_secret != self._mine.has_secret:
            raise RefusedError(_SECRETS)
        mine = self._mine
        expected = (mine.kind, mine.stream, mine.group, mine.peer, mine.rank, mine.size, Verdict.WELCOME)
        got = (
            theirs.kind, theirs.stream, theirs.group, theirs.rank, theirs.peer, theirs.size, theirs.verdict,
        )  # fmt: skip
        if got != expected:
            raise OpeningError("another process has taken over its address")


class Answering:
    """The side that is dialed.

    Args:
        find: the seat in the group of a given name that is of a given rank; None: it is not here.

    Attributes:
        theirs: the dialing side's opening, once it has come.
    """

    def __init__(self, find: Callable[[bytes, int], Seat | None]) -> None:
        self._find = find
        self._buffer = b""
        self._expected = b""
        self.theirs: Opening | None = None
        self.wants = OPENING_SIZE

    def take(self, data: bytes) -> bytes:
        """Take at most `wants` bytes; what to send now.

        Raises:
            OpeningError: the connection is to be dropped; as Turned, after sending its `answer`.
        """
        self._buffer += data
        self.wants -= len(data)
        if self.theirs is None:
            check_start(self._buffer)
            return b"" if self.wants else self._open()
        if not self.wants and not is_proof(self._buffer, self._expected):
            raise OpeningError(f"rank {self.theirs.rank} does not prove that it belongs to the group")
        return b""

    def _open(self) -> bytes:
        theirs = Opening.from_bytes(self._buffer, Role.DIALS)
        if theirs.protocol != PROTOCOL or theirs.version != VERSION:
            verdict = Verdict.PROTOCOL if theirs.protocol != PROTOCOL else Verdict.VERSION
            nobody = Seat(theirs.group, theirs.peer, theirs.size, b"", False)
            raise Turned("another version of fastcoll", theirs.answer(nobody, verdict).to_bytes())
        seat = self._find(theirs.group, theirs.peer)
        if seat is None or theirs.size != seat.size or theirs.rank == seat.rank:
            raise OpeningError("it is for a group or a rank that is not here")
        if theirs.has_secret != seat.has_secret:
            answer = theirs.answer(seat, Verdict.SECRET).to_bytes()
            raise Turned("it and this rank do not both have a secret", answer)
        mine = theirs.answer(seat, Verdict.WELCOME).to_bytes()
        self._expected = prove(seat.key, Role.DIALS, self._buffer, mine)
        reply = mine + prove(seat.key, Role.ANSWERS, self._buffer, mine)
        self.theirs, self._buffer, self.wants = theirs, b"", PROOF_SIZE
        return reply


_SECRETS = (
    "its secret is another one; give every rank of the job the same FASTCOLL_SECRET or FASTCOLL_SECRET_FILE"
)
