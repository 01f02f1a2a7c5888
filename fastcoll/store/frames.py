"""The wire format of requests and answers, between a store's client and server and in a FileStore's file.

A frame is a 16-byte header and a body. The header has, big-endian:

    1 byte   code: the operation (table.Op) of a request, or the status (ReplyStatus) of an answer
    1 byte   zero
    2 bytes  number of keys; 0 in an answer
    4 bytes  length of the body
    8 bytes  timeout of a request, in seconds, as a double; 0 in an answer

The body is a sequence of fields. Each field is a 4-byte length and that many bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import pairwise

from ..config import MOST_SECONDS
from .table import MAX_ANSWER, MAX_KEY, MAX_VALUE, SHAPES, WAITING, Op, StoreRequest

HEADER = struct.Struct("!BxHId")
LENGTH = struct.Struct("!I")
# Enough for the two values of a COMPARE_SET with their key and the lengths, or for a batch of smaller values.
MAX_BODY = MAX_ANSWER + MAX_VALUE + 2 * MAX_KEY
# Op(number) takes ten times as long as a lookup in this dict, and ReplyStatus(number) as one in _STATUSES.
_OPERATIONS = {op.value: op for op in Op}


class ProtocolError(ValueError):
    """The peer's bytes violate the protocol; its connection is dropped."""


class ReplyStatus(IntEnum):
    """The outcome of a request, which also determines the fields of the answer.

    OK: the result. TIMEOUT: the number of missing keys, then the first of them. REFUSED: the reason, as text.
    """

    OK = 0
    TIMEOUT = 1
    REFUSED = 2


_STATUSES = {status.value: status for status in ReplyStatus}


def encode_frame(code: int, fields: Sequence[bytes], keys: int = 0, timeout: float = 0.0) -> bytes:
    """Return a frame, ready to send."""
    body = b"".join(part for each in fields for part in (LENGTH.pack(len(each)), each))
    return HEADER.pack(code, keys, len(body), timeout) + body


def encode_request(request: StoreRequest) -> bytes:
    """Return a request as a frame: its keys, then its values."""
    frame = encode_frame(request.op, request.keys + request.values, len(request.keys), request.timeout)
    assert len(frame) <= HEADER.size + MAX_BODY, "no server, and no participant of a FileStore, would read it"
    return frame


def frame_length(header: bytes) -> int:
    """Return the length of the body after a header; ProtocolError: it is longer than allowed."""
    length: int = HEADER.unpack(header)[2]
    if length > MAX_BODY:
        raise ProtocolError(f"a frame announces {length} bytes, at most {MAX_BODY} are allowed")
    return length


def check_request_header(header: bytes) -> int:
    """Return the length of the body; ProtocolError: this is not the header of a valid request."""
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


def decode_request(header: bytes, body: bytes) -> StoreRequest:
    """Return the request in a frame with a checked header; ProtocolError: the body does not fit the header."""
    code, keys, _, timeout = HEADER.unpack(header)
    op = _OPERATIONS[code]
    fields = decode_fields(body)
    if len(fields) != keys * (1 + SHAPES[op][2]):
        raise ProtocolError(f"{op.name} of {keys} keys has {len(fields)} fields")
    return StoreRequest(op, tuple(fields[:keys]), tuple(fields[keys:]), timeout)


def decode_answer(header: bytes, body: bytes) -> tuple[ReplyStatus, list[bytes]]:
    """Return the answer in a frame from the server; ProtocolError: it is not an answer."""
    status = _STATUSES.get(header[0])
    if status is None:
        raise ProtocolError(f"there is no status {header[0]}")
    return status, decode_fields(body)


def check_answer(request: StoreRequest, status: ReplyStatus, fields: Sequence[bytes]) -> None:
    """Check that an answer fits its request; ProtocolError: no server that works gives this answer."""
    op, first = request.op, fields[0] if fields else b""
    if status is ReplyStatus.REFUSED:
        sound = len(fields) == 1
    elif status is ReplyStatus.TIMEOUT:
        sound = op in WAITING and _is_number(first) and set(fields[1:]) <= set(request.keys)
    elif op is Op.KEYS:
        check_texts(fields)
        sound = all(low < high for low, high in pairwise([*request.keys, *fields]))
    else:
        sound = _SOUND[op](len(request.keys), fields)
    if not sound:
        raise ProtocolError(f"{status.name} with {len(fields)} fields is no answer to {op.name}")


def check_texts(keys: Sequence[bytes]) -> None:
    """Check that keys are text, because other clients may list them."""
    try:
        for key in keys:
            str(key, "utf-8")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"the key {error.object[:40]!r} is not UTF-8") from error


def _is_number(text: bytes) -> bool:
    return len(text) <= 20 and text.removeprefix(b"-").isdigit()


# For each operation: whether the fields of an OK answer to a request of so many keys are possible.
_SOUND: dict[Op, Callable[[int, Sequence[bytes]], bool]] = {
    **dict.fromkeys((Op.SET, Op.APPEND, Op.WAIT, Op.WILL), lambda keys, fields: not fields),
    Op.GET: lambda keys, fields: 1 <= len(fields) <= keys,
    Op.PEEK: lambda keys, fields: 1 <= len(fields) <= keys,
    **dict.fromkeys((Op.CHECK, Op.DELETE, Op.RETIRE), lambda keys, fields: [*fields] in ([b"0"], [b"1"])),
    **dict.fromkeys((Op.ADD, Op.NUM_KEYS), lambda keys, fields: len(fields) == 1 and _is_number(fields[0])),
    Op.SET_NEW: lambda keys, fields: len(fields) == keys,
    **dict.fromkeys((Op.COMPARE_SET, Op.POP, Op.EXCHANGE), lambda keys, fields: len(fields) == 1),
}


def decode_fields(body: bytes) -> list[bytes]:
    """Return the fields of a body; ProtocolError: the last field does not end where the body ends."""
    fields: list[bytes] = []
    at = 0
    while at < len(body):
        end = at + LENGTH.size
        if end > len(body):
            raise ProtocolError("a field's length is truncated")
        length = LENGTH.unpack_from(body, at)[0]
        at = end + length
        if at > len(body):
            raise ProtocolError(f"a field of {length} bytes exceeds its frame")
        fields.append(bytes(body[end:at]))
    return fields
