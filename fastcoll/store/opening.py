"""The handshake of a connection between two ranks, or between a store's client and server. This module does no I/O.

Each side first sends an *opening* of 112 bytes, the dialing side before the answering side (big-endian):

    offset  bytes  field
    0       8      magic "FASTMESH"
    8       2      protocol version
    10      1      role: 1 dials, 2 answers
    11      1      result: 0 welcome, 1 other protocol, 2 other version, 3 secrets differ, 4 full,
                   5 the client has dialed another address, 6 one side encrypts and the other does not
    12      16     version of fastcoll, ASCII, padded with zeros
    28      1      kind: 1 control, 2 data, 3 mail, 4 store, 5 recovery endpoint, 6 rpc
    29      1      1 if this side has a job secret, 0 with FASTCOLL_INSECURE=1 and no secret
    30      1      1 if this side encrypts its connections (FASTCOLL_ENCRYPT=1)
    31      1      stream: the number of this connection among the connections of its kind between these two ranks
    32      16     group: between ranks, the random name that the group's first member has drawn for it (it identifies
                   the job, too); from a store's server, the server's random name; from a store's client, a digest of
                   the host name and port that the client was given (address.name_of)
    48      4      the sender's rank in the group; for a store, 0 is the server and 1 any client
    52      4      the rank of the other side
    56      4      size of the group; for a store 2
    60      20     from a store's client, a digest of the IP address and port that it has dialed (address.place_of);
                   else zero
    80      32     nonce, new for each connection

The answering side sends its proof after its opening; the dialing side then sends its own proof. A proof is 32 bytes of
HMAC-SHA256 over the direction and both openings. Between ranks, the key is derived from the job's secret and the
group's token, random bytes that the group's first member publishes in the store. Between a store's client and server,
the key is the secret. If the secrets differ, the dialing side rejects the answering side's proof, and sends zeros
instead of its own proof. With FASTCOLL_INSECURE=1 and no secret, a group's key is derived from its token only, and a
store's client and server exchange no proofs. Openings and proofs have fixed sizes, and nothing else is read before the
proofs are verified. The handshake authenticates a connection. If both sides have FASTCOLL_ENCRYPT=1, all later bytes
are those of TLS (encryption.py); both sides derive its key from the endpoint's key and both openings.

Each side has an object, `Dialing` or `Answering`. `wants` is the number of bytes that the object still needs (0: the
handshake is complete). `take` consumes received bytes, split in any way, and returns the bytes to send. The object
buffers at most one opening and one proof.

An attacker cannot relay the proof of one job to another job, because a proof depends on the job. Between ranks, the
proof covers the group's random name, which is in both openings. For a store, the proof depends on the job's secret, if
the job was given one. Otherwise client and server use the user's own secret, which is the same for all jobs of the
user. Then the server checks the address that the client has dialed. If this is not the address at which the server has
accepted the connection, it refuses the client, except if both were given the same host name and port for the store.
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
PROTOCOL = 6
NONCE_SIZE = 32
SEED_SIZE = 32
GROUP_SIZE = NAME_SIZE
TOKEN_SIZE = 16
_FORMAT = struct.Struct("!8sHBB16sBBBB16sIII20s32s")
OPENING_SIZE = _FORMAT.size
VERSION = __version__.encode()[:16]
_NOWHERE = bytes(PLACE_SIZE)
_REFUSAL = bytes(PROOF_SIZE)
SAME_ENCRYPTION = "give every rank of the job the same FASTCOLL_ENCRYPT"
_SECRETS = f"its secret differs; {SAME_SECRET}"


def unlike_encryption(theirs: bool) -> str:
    """Return why one side is refused of which one encrypts its connections; `theirs`: the other end does."""
    does, does_not = ("it", "this process") if theirs else ("this process", "it")
    return f"{does} encrypts its connections, and {does_not} does not; {SAME_ENCRYPTION}"


class OpeningError(ValueError):
    """The bytes are not from a rank of this group; the connection is dropped."""


class Role(IntEnum):
    DIALS = 1
    ANSWERS = 2


class ConnectionKind(IntEnum):
    """The use of a connection.

    CONTROL: notices that a rank leaves or fails. DATA: the bytes of collectives. MAIL: messages. STORE: requests to a
    store. RECOVERY: the port of the store at which the survivors of a failure meet. RPC: remote calls.
    """

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
    ENCRYPTION = 6


# Lookups in these take a tenth of the time of OpeningResult(number), or of a search in the members.
_RESULTS = {result.value: result for result in OpeningResult}
_KINDS = {kind.value: kind for kind in ConnectionKind}


@dataclass(frozen=True)
class Endpoint:
    """One rank of a group: the fields that identify it in openings, and the key of its proofs.

    `key`: see `derive_key`; b"" for a store without a secret, which any process may open without a proof. `encrypts`:
    its connections are encrypted, which needs a key.
    """

    group: bytes
    rank: int
    size: int
    key: bytes = field(repr=False)
    has_secret: bool
    encrypts: bool = False


class Opening(NamedTuple):
    """One side's opening; the fields are those of the table above, in its order, after the magic."""

    protocol: int
    role: Role
    result: OpeningResult
    version: bytes
    kind: ConnectionKind
    has_secret: bool
    encrypts: bool
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
        """Return the opening that the rank of `endpoint` sends to a peer."""
        named = (endpoint.group, endpoint.rank, peer, endpoint.size)
        nonce = os.urandom(NONCE_SIZE)
        secret, encrypts = endpoint.has_secret, endpoint.encrypts
        return cls(PROTOCOL, role, result, VERSION, kind, secret, encrypts, stream, *named, place, nonce)

    def to_bytes(self) -> bytes:
        return _FORMAT.pack(MAGIC, *self)

    @classmethod
    def from_bytes(cls, data: bytes, role: Role) -> Opening:
        """Parse the opening of the side that has `role`, or raise OpeningError.

        If the protocol version differs, only the protocol, the result and the version of fastcoll are valid.
        """
        magic, *fields = _FORMAT.unpack(data)
        found = cls._make(fields)
        result, kind = _RESULTS.get(found.result), _KINDS.get(found.kind)
        if magic != MAGIC or found.role != role or result is None:
            raise OpeningError(f"not the opening of a side that {role.name.lower()}: {data[:16]!r}")
        found = found._replace(role=role, result=result, version=found.version.rstrip(b"\0"))
        if found.protocol != PROTOCOL:
            return found._replace(
                kind=ConnectionKind.CONTROL,
                has_secret=False,
                encrypts=False,
                stream=0,
                rank=0,
                peer=0,
                size=1,
            )
        possible = found.encrypts <= found.has_secret <= 1 and found.rank < found.size > found.peer
        has_place = kind is ConnectionKind.STORE and role is Role.DIALS
        if kind is None or not possible or (any(found.place) and not has_place):
            raise OpeningError(f"an opening with an invalid field: {data[28:80]!r}")
        has_secret, encrypts = bool(found.has_secret), bool(found.encrypts)
        return found._replace(kind=kind, has_secret=has_secret, encrypts=encrypts)

    def answer(self, endpoint: Endpoint, result: OpeningResult) -> Opening:
        """Return the opening with which the rank of `endpoint` answers this opening."""
        return Opening.of(endpoint, Role.ANSWERS, self.kind, self.stream, self.rank, result)


def _check_start(data: bytes) -> None:
    """Raise OpeningError if these first bytes cannot be the start of an opening."""
    start = data[: len(MAGIC)]
    if not MAGIC.startswith(start):
        raise OpeningError(f"not a rank of fastcoll: {start!r}")


def _fits(theirs: Opening, kind: ConnectionKind) -> bool:
    """Return whether both ends have compatible versions.

    A store accepts other versions of fastcoll, because ranks compare their versions through the store when they join.
    """
    return theirs.protocol == PROTOCOL and (theirs.version == VERSION or kind is ConnectionKind.STORE)


def derive_key(secret: bytes, token: bytes) -> bytes:
    """Return the key of a group's proofs, derived from the secret and the group's token."""
    return hmac.digest(secret, b"fastcoll group " + token, hashlib.sha256)


def prove(key: bytes, role: Role, dialed: bytes, answered: bytes) -> bytes:
    """Return the proof that the side of `role` has the key; it is valid on this connection only."""
    return proof(key, f"fastcoll connection, the side that {role.name.lower()}", (dialed, answered))


def derive_seed(key: bytes, dialed: bytes, answered: bytes) -> bytes:
    """Return the SEED_SIZE bytes from which both sides make the TLS key of this connection (encryption.py)."""
    return proof(key, "fastcoll connection, the seed of its TLS key", (dialed, answered))


class RefusedError(OpeningError):
    """The two ends are incompatible, so a retry does not help. `answer`: bytes to send to the other end."""

    def __init__(self, result: OpeningResult, reason: str, answer: bytes = b"") -> None:
        super().__init__(reason)
        self.result, self.answer = result, answer


class Turned(OpeningError):
    """The answering side rejects the dialing side; `answer` is an opening whose `result` is the reason."""

    def __init__(self, reason: str, answer: bytes) -> None:
        super().__init__(reason)
        self.answer = answer


class Dialing:
    """The dialing side: the rank of `endpoint` dials the group rank `peer`.

    `theirs` is the peer's opening, or None until it has been read. `seed`: see `derive_seed`; empty if the connection
    is not encrypted. `place`: for a store's client, the digest of the address that the client has dialed
    (address.place_of).
    """

    def __init__(
        self, endpoint: Endpoint, peer: int, kind: ConnectionKind, stream: int, place: bytes = _NOWHERE
    ) -> None:
        self._endpoint = endpoint
        self._mine = Opening.of(endpoint, Role.DIALS, kind, stream, peer, OpeningResult.WELCOME, place)
        self.opening = self._mine.to_bytes()
        self._buffer = b""
        self.theirs: Opening | None = None
        self.seed = b""
        self.wants = OPENING_SIZE

    def take(self, data: bytes) -> bytes:
        """Consume at most `wants` received bytes; return the bytes to send.

        OpeningError: the other end is not the peer; a retry may help. RefusedError: a retry does not help.
        """
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
        if self._endpoint.encrypts:
            self.seed = derive_seed(self._endpoint.key, self.opening, theirs)
        return prove(self._endpoint.key, Role.DIALS, self.opening, theirs)

    def _check(self, theirs: Opening) -> None:
        if theirs.result is OpeningResult.FULL:
            raise RefusedError(OpeningResult.FULL, "it accepts no more connections")
        if not _fits(theirs, self._mine.kind):
            raise RefusedError(
                OpeningResult.VERSION,
                f"it runs fastcoll {theirs.version.decode(errors='replace')} (protocol {theirs.protocol}), this rank "
                f"{VERSION.decode()} (protocol {PROTOCOL}); run one version on all ranks",
            )
        if theirs.result is OpeningResult.SECRET or theirs.has_secret != self._mine.has_secret:
            raise RefusedError(OpeningResult.SECRET, _SECRETS)
        if theirs.result is OpeningResult.ENCRYPTION or theirs.encrypts != self._mine.encrypts:
            raise RefusedError(OpeningResult.ENCRYPTION, unlike_encryption(theirs.encrypts))
        if theirs.result is OpeningResult.PLACE:
            raise RefusedError(OpeningResult.PLACE, "its address is not the one that this side has dialed")
        mine = self._mine
        group = theirs.group if mine.kind is ConnectionKind.STORE else mine.group
        expected = (mine.kind, mine.stream, group, mine.peer, mine.rank, mine.size)
        got = (theirs.kind, theirs.stream, theirs.group, theirs.rank, theirs.peer, theirs.size)
        if got != expected or theirs.result is not OpeningResult.WELCOME:
            raise OpeningError("another process has taken over its address")


class Answering:
    """The answering side.

    `find` returns the endpoint that an opening is for, or None if this process does not have that endpoint. `is_here`
    returns whether an opening was dialed to this side, and not to another address from which it was relayed. `theirs`
    is the other side's opening, or None until it has been accepted. `seed`: as for `Dialing`.
    """

    def __init__(
        self,
        find: Callable[[Opening], Endpoint | None],
        is_here: Callable[[Opening], bool] = lambda theirs: True,
    ) -> None:
        self._find, self._is_here = find, is_here
        self._buffer = b""
        self._expected = self.seed = b""
        self.theirs: Opening | None = None
        self.wants = OPENING_SIZE

    def take(self, data: bytes) -> bytes:
        """Consume at most `wants` received bytes; return the bytes to send.

        OpeningError: drop the connection. Turned: send its `answer`, then drop the connection.
        """
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
        """Return the reason to log if the peer disconnects now; empty if it has sent nothing, like a port scan."""
        if self.theirs is None:
            return "closed before its opening was complete" if self._buffer else ""
        return "closed before it sent its proof: its process ended, or stopped waiting for this one"

    def _open(self) -> bytes:
        theirs = Opening.from_bytes(self._buffer, Role.DIALS)
        if not _fits(theirs, theirs.kind):
            result = OpeningResult.PROTOCOL if theirs.protocol != PROTOCOL else OpeningResult.VERSION
            nobody = Endpoint(theirs.group, theirs.peer, theirs.size, b"", False)
            raise Turned("another version of fastcoll", theirs.answer(nobody, result).to_bytes())
        endpoint = self._find(theirs)
        if endpoint is None or theirs.size != endpoint.size or theirs.rank == endpoint.rank:
            raise OpeningError("it is for a group or rank that this process does not have")
        if theirs.has_secret != endpoint.has_secret:
            answer = theirs.answer(endpoint, OpeningResult.SECRET).to_bytes()
            raise Turned("it has a job secret and this rank has none, or the other way round", answer)
        if theirs.encrypts != endpoint.encrypts:
            answer = theirs.answer(endpoint, OpeningResult.ENCRYPTION).to_bytes()
            raise Turned(unlike_encryption(theirs.encrypts), answer)
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
        if endpoint.encrypts:
            self.seed = derive_seed(endpoint.key, dialed, mine)
        return mine + prove(endpoint.key, Role.ANSWERS, dialed, mine)
