"""What travels between a store's client and its server, as bytes without sockets.

Opening, 64 bytes each way, client first (big-endian):

    offset  bytes  field
    0       8      magic "FASTCOLL"
    8       1      role: 1 client, 2 server
    9       1      verdict: 0 welcome, 1 other protocol version, 2 secrets do not match, 3 no more room
    10      2      protocol version
    12      4      1 when this side has a job secret, else 0
    16      32     nonce, fresh for each connection
    48      16     the server's instance (client: zeros)

With a secret the server's opening is followed by its proof and answered by the client's: 32 bytes of
HMAC-SHA256 over a label of the direction and both openings. Then come frames: a 16-byte header (code,
one zero, number of keys, length of the body, timeout in seconds as a double) and the body, whose
fields are each a 4-byte length and the bytes. This authenticates; it does not encrypt.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from ..config import MOST_SECONDS
from .secret import proof
from .table import MAX_ANSWER, MAX_KEY, SHAPES, Op, Request

MAGIC = b"FASTCOLL"
PROTOCOL = 2
HELLO = struct.Struct("!8sBBHI32s16s")
NONCE_SIZE = 32
INSTANCE_SIZE = 16
HEADER = struct.Struct("!BxHId")
LENGTH = struct.Struct("!I")
# One value of the largest size, its key, or a batch of as many bytes, with their lengths.
MAX_BODY = MAX_ANSWER + 2 * MAX_KEY


# Looking a number up in an enumeration's class takes ten times as long.
_OPERATIONS = {op.value: op for op in Op}


class ProtocolError(ValueError):
    """Bytes that no client or server of this protocol sends; the connection is dropped."""


class Role(IntEnum):
    CLIENT = 1
    SERVER = 2


class Verdict(IntEnum):
    WELCOME = 0
    PROTOCOL = 1
    SECRET = 2
    FULL = 3


class Status(IntEnum):
    """How a request ended: OK with its answer, TIMEOUT with a missing key, REFUSED with the reason."""

    OK = 0
    TIMEOUT = 1
    REFUSED = 2


@dataclass(frozen=True)
class Hello:
    """One side's opening."""

    role: Role
    nonce: bytes
    has_secret: bool
    verdict: Verdict = Verdict.WELCOME
    protocol: int = PROTOCOL
    instance: bytes = bytes(INSTANCE_SIZE)

    def to_bytes(self) -> bytes:
        return HELLO.pack(
            MAGIC, self.role, self.verdict, self.protocol, self.has_secret, self.nonce, self.instance
        )

    @classmethod
    def from_bytes(cls, data: bytes, role: Role) -> Hello:
        """The opening of a peer of `role`.

        Raises:
            ProtocolError: it is none.
        """
        magic, who, verdict, protocol, has_secret, nonce, instance = HELLO.unpack(data)
        if magic != MAGIC or who != role or has_secret > 1 or verdict not in tuple(Verdict):
            raise ProtocolError(f"not the opening of a fastcoll {role.name.lower()}: {data[:16]!r}")
        return cls(role, nonce, bool(has_secret), Verdict(verdict), protocol, instance)


def prove(secret: bytes, role: Role, client_hello: bytes, server_hello: bytes) -> bytes:
    """What the side of `role` sends to prove that it knows `secret`, on this connection only."""
    return proof(secret, f"fastcoll store, {role.name.lower()} to peer", (client_hello, server_hello))


def encode_frame(code: int, fields: Sequence[bytes], keys: int = 0, timeout: float = 0.0) -> bytes:
    """A frame ready to send."""
    parts = [part for field in fields for part in (LENGTH.pack(len(field)), field)]
    body = b"".join(parts)
    return HEADER.pack(code, keys, len(body), timeout) + body


def encode_request(request: Request) -> bytes:
    """A request as a frame: its keys, then its values."""
    return encode_frame(request.op, request.keys + request.values, len(request.keys), request.timeout)


def frame_length(header: bytes) -> int:
    """The length of the body behind a 16-byte header.

    Raises:
        ProtocolError: longer than any body may be.
    """
    length: int = HEADER.unpack(header)[2]
    if length > MAX_BODY:
        raise ProtocolError(f"a frame announces {length} bytes, at most {MAX_BODY} are allowed")
    return length


def check_request_header(header: bytes) -> int:
    """The length of the body, once the header is known to be a request's.

    Raises:
        ProtocolError: it is none; nothing need be read or kept of the body then.
    """
    code, keys, _, timeout = HEADER.unpack(header)
    op = _OPERATIONS.get(code)
    if op is None:
        raise ProtocolError(f"there is no operation {code}")
    fewest, most, _ = SHAPES[op]
    if not fewest <= keys <= most:
        raise ProtocolError(f"{op.name} takes {fewest} to {most} keys, got {keys}")
    if not (math.isfinite(timeout) and 0 <= timeout <= MOST_SECONDS):
        raise ProtocolError(f"the timeout {timeout} is not 0 to {MOST_SECONDS:g} s")
    return frame_length(header)


def decode_request(header: bytes, body: bytes) -> Request:
    """The request in a frame whose header was checked.

    Raises:
        ProtocolError: the body is not what the header says.
    """
    code, keys, _, timeout = HEADER.unpack(header)
    op = _OPERATIONS[code]
    fields = decode_fields(body)
    if len(fields) != keys * (1 + SHAPES[op][2]):
        raise ProtocolError(f"{op.name} of {keys} keys has {len(fields)} fields")
    return Request(op, tuple(fields[:keys]), tuple(fields[keys:]), timeout)


def decode_answer(header: bytes, body: bytes) -> tuple[Status, list[bytes]]:
    """The answer in a frame from the server.

    Raises:
        ProtocolError: it is none.
    """
    code = header[0]
    if code not in tuple(Status):
        raise ProtocolError(f"there is no status {code}")
    return Status(code), decode_fields(body)


def decode_fields(body: bytes) -> list[bytes]:
    """The fields of a body.

    Raises:
        ProtocolError: their lengths do not add up to the body's.
    """
    fields: list[bytes] = []
    at = 0
    while at < len(body):
        end = at + LENGTH.size
        if end > len(body):
            raise ProtocolError("a field's length is cut off")
        length = LENGTH.unpack_from(body, at)[0]
        at = end + length
        if at > len(body):
            raise ProtocolError(f"a field of {length} bytes passes the end of its frame")
        fields.append(bytes(body[end:at]))
    return fields
