"""How a connection begins, of two ranks or of a store's client and server: both sides as bytes without sockets.

Opening, 112 bytes each way, the dialing side first (big-endian):

    offset  bytes  field
    0       8      magic "FASTMESH"
    8       2      protocol version
    10      1      role: 1 dials, 2 answers
    11      1      verdict: 0 welcome, 1 other protocol, 2 other version, 3 secrets differ, 4 no more room,
                   5 the client has dialed another address
    12      16     version of fastcoll, ASCII, filled up with zeros
    28      1      kind: 1 control, 2 data, 3 mail, 4 store, 5 recovery endpoint, 6 rpc
    29      1      1 when this side has a job secret, 0 with FASTCOLL_INSECURE=1 alone
    30      2      stream: the number of this connection among those of its kind
    32      16     group: drawn by its first member when the group is made, so it identifies the job as well; of a
                   store its instance; from a store's client, the store's name as the client has it
    48      4      the sender's rank in the group; of a store 0 is the server and 1 any client
    52      4      the rank that it means to talk to
    56      4      size of the group; of a store 2
    60      20     from a store's client, a digest of the address and port that it has dialed; else zero
    80      32     nonce, fresh for each connection

The answering side's opening is followed by its proof and answered by the dialing side's: 32 bytes of
HMAC-SHA256 over the direction and both openings, keyed with the group's token and the job's secret. A dialing side
that rejects the answering side's proof sends zeros in place of its own: the secrets differ. A store's key is the
secret alone. With FASTCOLL_INSECURE=1 a group's key is only its token, which goes through the store, and a store
exchanges no proofs. All fields have fixed sizes; nothing else is read before the proofs are right. This
authenticates; it does not encrypt.

Each side says how many bytes it `wants` next (0: it is through), takes what came, split in any way, and
returns what is to be sent. Never more than one opening and one proof are held.

A proof cannot be relayed to another job. The openings of a group identify the group, and so the job. A store's job is
identified by its secret, if the job was given one. The user's own secret opens all jobs of the user; there the client's
opening has the address that it dialed, and a server with another address refuses it, unless both have the same name.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from .._version import __version__
from ..system.address import NAME_SIZE, PLACE_SIZE
from .secret import PROOF_SIZE, SAME_SECRET, is_proof, proof

MAGIC = b"FASTMESH"
PROTOCOL = 4
NONCE_SIZE = 32
GROUP_SIZE = NAME_SIZE
TOKEN_SIZE = 16
_FORMAT = struct.Struct("!8sHBB16sBBH16sIII20s32s")
OPENING_SIZE = _FORMAT.size
VERSION = __version__.encode()[:16]
_NOWHERE = bytes(PLACE_SIZE)
_REFUSAL = bytes(PROOF_SIZE)
_SECRETS = f"its secret is another one; {SAME_SECRET}"


class OpeningError(ValueError):
    """Bytes that no rank of this group sends; the connection is dropped."""


class Role(IntEnum):
    DIALS = 1
    ANSWERS = 2


class ConnectionKind(IntEnum):
    """What a connection is for: notices, the bytes of collectives, messages, requests to a store, to learn where the
    survivors of a failure meet, or remote calls."""

    CONTROL = 1
    DATA = 2
    MAIL = 3
    STORE = 4
    RECOVERY = 5
    RPC = 6


class OpeningResult(IntEnum):
    WELCOME = 0
    PROTOCOL = 1
    VERSION = 2
    SECRET = 3
    FULL = 4
    PLACE = 5


@dataclass(frozen=True)
class Endpoint:
    """A rank's place in one group, by its name on the wire, and what proves it.

    `key`: see `derive_key`; b"", of a store without a secret, is for everybody and takes no proofs.
    """

    group: bytes
    rank: int
    size: int
    key: bytes = field(repr=False)
    has_secret: bool


class Opening(NamedTuple):
    """One side's opening, in the order of its bytes."""

    protocol: int
    role: Role
    result: OpeningResult
    version: bytes
    kind: ConnectionKind
    has_secret: bool
    stream: int
    group: bytes
    rank: int
    peer: int
    size: int
    place: bytes
    nonce: bytes

    @classmethod
    def of(
        cls,
        endpoint: Endpoint,
        role: Role,
        kind: ConnectionKind,
        stream: int,
        peer: int,
        result: OpeningResult,
        place: bytes = _NOWHERE,
    ) -> Opening:
        """What a rank says to a peer."""
        named = (endpoint.group, endpoint.rank, peer, endpoint.size)
        nonce = os.urandom(NONCE_SIZE)
        return cls(PROTOCOL, role, result, VERSION, kind, endpoint.has_secret, stream, *named, place, nonce)

    def to_bytes(self) -> bytes:
        return _FORMAT.pack(MAGIC, *self)

    @classmethod
    def from_bytes(cls, data: bytes, role: Role) -> Opening:
        """The opening of a side of `role`, or OpeningError; of another protocol's only verdict and version are read."""
        magic, *fields = _FORMAT.unpack(data)
        found = cls._make(fields)
        if magic != MAGIC or found.role != role or found.result not in tuple(OpeningResult):
            raise OpeningError(f"not the opening of a side that {role.name.lower()}: {data[:16]!r}")
        found = found._replace(
            role=role, result=OpeningResult(found.result), version=found.version.rstrip(b"\0")
        )
        if found.protocol != PROTOCOL:
            return found._replace(
                kind=ConnectionKind.CONTROL, has_secret=False, stream=0, rank=0, peer=0, size=1
            )
        possible = (
            found.kind in tuple(ConnectionKind)
            and found.has_secret <= 1
            and found.rank < found.size > found.peer
        )
        has_place = found.kind == ConnectionKind.STORE and role is Role.DIALS
        if not possible or (any(found.place) and not has_place):
            raise OpeningError(f"an opening with a field that cannot be: {data[28:80]!r}")
        return found._replace(kind=ConnectionKind(found.kind), has_secret=bool(found.has_secret))

    def answer(self, endpoint: Endpoint, result: OpeningResult) -> Opening:
        """What the rank of `endpoint` answers."""
        return Opening.of(endpoint, Role.ANSWERS, self.kind, self.stream, self.rank, result)


def _check_start(data: bytes) -> None:
    """Refuse the first bytes of an opening as soon as they are wrong."""
    start = data[: len(MAGIC)]
    if not MAGIC.startswith(start):
        raise OpeningError(f"not a rank of fastcoll: {start!r}")


def _fits(theirs: Opening, kind: ConnectionKind) -> bool:
    """Whether we can talk to the other end; that ranks run one version is also found when they join by a store."""
    return theirs.protocol == PROTOCOL and (theirs.version == VERSION or kind is ConnectionKind.STORE)


def derive_key(secret: bytes, token: bytes) -> bytes:
    """The key of a group's proofs; it takes both the secret and the token to make it."""
    return hmac.digest(secret, b"fastcoll group " + token, hashlib.sha256)


def prove(key: bytes, role: Role, dialed: bytes, answered: bytes) -> bytes:
    """What the side of `role` sends to prove that it has the key, on this connection only."""
    return proof(key, f"fastcoll connection, the side that {role.name.lower()}", (dialed, answered))


class RefusedError(OpeningError):
    """The two ends do not fit together, and a retry does not help. `answer` gives the other end the reason."""

    def __init__(self, result: OpeningResult, reason: str, answer: bytes = b"") -> None:
        super().__init__(reason)
        self.result, self.answer = result, answer


class Turned(OpeningError):
    """A dialing rank does not fit; `answer` tells it why."""

    def __init__(self, reason: str, answer: bytes) -> None:
        super().__init__(reason)
        self.answer = answer


class Dialing:
    """The dialing side: the rank of `endpoint` dials the group rank `peer`, whose opening becomes `theirs`.

    `place`: from a store's client, the address that it has dialed (address.py).
    """

    def __init__(
        self, endpoint: Endpoint, peer: int, kind: ConnectionKind, stream: int, place: bytes = _NOWHERE
    ) -> None:
        self._endpoint = endpoint
        self._mine = Opening.of(endpoint, Role.DIALS, kind, stream, peer, OpeningResult.WELCOME, place)
        self.opening = self._mine.to_bytes()
        self._buffer = b""
        self.theirs: Opening | None = None
        self.wants = OPENING_SIZE

    def take(self, data: bytes) -> bytes:
        """Take at most `wants` bytes; what to send now. OpeningError, RefusedError: the other end is not the peer."""
        self._buffer += data
        self.wants -= len(data)
        if len(self._buffer) <= OPENING_SIZE:
            _check_start(self._buffer)
            if not self.wants:
                self.theirs = Opening.from_bytes(self._buffer, Role.ANSWERS)
                self._check(self.theirs)
                self.wants = PROOF_SIZE if self._endpoint.key else 0
            return b""
        if self.wants:
            return b""
        theirs, given = self._buffer[:OPENING_SIZE], self._buffer[OPENING_SIZE:]
        if not is_proof(given, prove(self._endpoint.key, Role.ANSWERS, self.opening, theirs)):
            raise RefusedError(OpeningResult.SECRET, _SECRETS, _REFUSAL)
        return prove(self._endpoint.key, Role.DIALS, self.opening, theirs)

    def _check(self, theirs: Opening) -> None:
        if theirs.result is OpeningResult.FULL:
            raise RefusedError(OpeningResult.FULL, "it takes no more connections")
        if not _fits(theirs, self._mine.kind):
            raise RefusedError(
                OpeningResult.VERSION,
                f"it runs fastcoll {theirs.version.decode(errors='replace')} (protocol {theirs.protocol}), this rank "
                f"{VERSION.decode()} (protocol {PROTOCOL}); run one version on all ranks",
            )
        if theirs.result is OpeningResult.SECRET or theirs.has_secret != self._mine.has_secret:
            raise RefusedError(OpeningResult.SECRET, _SECRETS)
        if theirs.result is OpeningResult.PLACE:
            raise RefusedError(OpeningResult.PLACE, "it is not where this side has dialed")
        mine = self._mine
        group = theirs.group if mine.kind is ConnectionKind.STORE else mine.group
        expected = (mine.kind, mine.stream, group, mine.peer, mine.rank, mine.size)
        got = (theirs.kind, theirs.stream, theirs.group, theirs.rank, theirs.peer, theirs.size)
        if got != expected or theirs.result is not OpeningResult.WELCOME:
            raise OpeningError("another process has taken over its address")


class Answering:
    """The side that is dialed.

    `find` returns the endpoint for an opening; None: it is not here. `is_here`: whether an opening was dialed to this
    address. `theirs` is the other side's opening, once it has arrived.
    """

    def __init__(
        self,
        find: Callable[[Opening], Endpoint | None],
        is_here: Callable[[Opening], bool] = lambda theirs: True,
    ) -> None:
        self._find, self._is_here = find, is_here
        self._buffer = b""
        self._expected = b""
        self.theirs: Opening | None = None
        self.wants = OPENING_SIZE

    def take(self, data: bytes) -> bytes:
        """Take at most `wants` bytes; what to send now. OpeningError: drop it; Turned: after its `answer`."""
        self._buffer += data
        self.wants -= len(data)
        if self.theirs is None:
            _check_start(self._buffer)
            return b"" if self.wants else self._open()
        if not self.wants and not is_proof(self._buffer, self._expected):
            refused = f"it refused this side's proof: {_SECRETS}"
            unproven = f"rank {self.theirs.rank} does not prove that it belongs to the group"
            raise OpeningError(refused if self._buffer == _REFUSAL else unproven)
        return b""

    def ended(self) -> str:
        """Why a connection that ends now is dropped; empty: nothing has come, as from a probe for who listens."""
        if self.theirs is None:
            return "closed before its opening was complete" if self._buffer else ""
        return "closed before its proof came: its process ended, or gave up the wait for this one"

    def _open(self) -> bytes:
        theirs = Opening.from_bytes(self._buffer, Role.DIALS)
        if not _fits(theirs, theirs.kind):
            result = OpeningResult.PROTOCOL if theirs.protocol != PROTOCOL else OpeningResult.VERSION
            nobody = Endpoint(theirs.group, theirs.peer, theirs.size, b"", False)
            raise Turned("another version of fastcoll", theirs.answer(nobody, result).to_bytes())
        endpoint = self._find(theirs)
        if endpoint is None or theirs.size != endpoint.size or theirs.rank == endpoint.rank:
            raise OpeningError("it is for a group or a rank that is not here")
        if theirs.has_secret != endpoint.has_secret:
            answer = theirs.answer(endpoint, OpeningResult.SECRET).to_bytes()
            raise Turned("it and this rank do not both have a secret", answer)
        if not self._is_here(theirs):
            answer = theirs.answer(endpoint, OpeningResult.PLACE).to_bytes()
            raise Turned(
                "it has dialed another address, so its connection was forwarded or relayed here", answer
            )
        mine = theirs.answer(endpoint, OpeningResult.WELCOME).to_bytes()
        dialed, self._buffer, self.theirs = self._buffer, b"", theirs
        if not endpoint.key:
            return mine
        self.wants, self._expected = PROOF_SIZE, prove(endpoint.key, Role.DIALS, dialed, mine)
        return mine + prove(endpoint.key, Role.ANSWERS, dialed, mine)
