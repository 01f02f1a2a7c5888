"""The file behind a FileStore, as bytes: a magic line, then records, only ever appended to.

A record is a 16-byte header (big-endian: kind, three zeros, length of the key, length of the value,
CRC-32 of kind, key and value), the key and the value. A writer that is killed leaves at most one
record cut off at the end; nobody else was writing, as it held the lock, so the next writer cuts it
off and goes on.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from ..errors import StoreError
from .table import MAX_KEY, MAX_VALUE

MAGIC = b"fastcoll store 1\n"
_HEADER = struct.Struct("!B3xIII")


class Kind(IntEnum):
    """SET and DELETE change a key; JOIN and LEAVE tell which processes have the file open."""

    SET = 1
    DELETE = 2
    JOIN = 3
    LEAVE = 4


@dataclass(frozen=True)
class Record:
    """One change."""

    kind: Kind
    key: bytes
    value: bytes = b""

    def to_bytes(self) -> bytes:
        header = _HEADER.pack(self.kind, len(self.key), len(self.value), self.checksum())
        return header + self.key + self.value

    def checksum(self) -> int:
        return zlib.crc32(self.value, zlib.crc32(self.key, self.kind))


def read_records(data: bytes, offset: int = 0) -> Iterator[tuple[Record, int]]:
    """The whole records at the start of `data`, which begins at `offset`, each with the offset of its end.

    Ends at a record that is cut off.

    Raises:
        StoreError: the bytes are no records.
    """
    at = 0
    while at + _HEADER.size <= len(data):
        kind, key_length, value_length, checksum = _HEADER.unpack_from(data, at)
        if kind not in tuple(Kind) or key_length > MAX_KEY or value_length > MAX_VALUE:
            raise StoreError(f"byte {offset + at} of the log is no record")
        middle = at + _HEADER.size + key_length
        end = middle + value_length
        if end > len(data):
            return
        record = Record(Kind(kind), data[at + _HEADER.size : middle], data[middle:end])
        if record.checksum() != checksum:
            raise StoreError(f"the record at byte {offset + at} of the log is damaged")
        yield record, offset + end
        at = end
