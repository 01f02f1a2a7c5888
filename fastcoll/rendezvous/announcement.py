"""What candidates of a multicast rendezvous tell one another: one datagram, as bytes.

    offset  bytes  field
    0       8      magic "FASTMC1\\n"
    8       n      JSON of an Announcement, at most 1,200 bytes
    8+n     32     HMAC-SHA256 over all of the above, when there is a job secret

A datagram that is anything else, or has another secret, is none of ours and passed over.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import asdict, dataclass

from ..core.processes import ProcessId, read_process

_MAGIC = b"FASTMC1\n"
_MAX_JSON = 1200
_MAC_SIZE = 32
MAX_DATAGRAM = len(_MAGIC) + _MAX_JSON + _MAC_SIZE
_LABEL = b"fastcoll multicast"


@dataclass(frozen=True)
class Announcement:
    """One candidate.

    Attributes:
        job: a digest of the group name; other jobs' announcements are passed over.
        nonce: 32 hex digits, fresh for each attempt; the lowest leads.
        process: who it is; others see by it when it dies.
        time: since when, in seconds since the epoch, for whoever reads the datagrams.
        world_size: how many processes it waits for, itself included.
        address, port: where its store is; port 0 while it has none.
        leaving: it does not look for others any more, and it does not matter what becomes of it.
    """

    job: str
    nonce: str
    process: ProcessId
    time: float
    world_size: int
    address: str = ""
    port: int = 0
    leaving: bool = False

    @property
    def where(self) -> str:
        """Who announces, as messages show it."""
        return self.process.where

    def to_bytes(self, secret: bytes) -> bytes:
        message = _MAGIC + json.dumps(asdict(self)).encode()
        return message + _mac(secret, message)

    @classmethod
    def from_bytes(cls, data: bytes, secret: bytes) -> Announcement | None:
        """The announcement in a datagram; None if it is none of ours."""
        end = len(data) - (_MAC_SIZE if secret else 0)
        message, mac = data[:end], data[end:]
        if not message.startswith(_MAGIC) or not hmac.compare_digest(mac, _mac(secret, message)):
            return None
        try:
            record = json.loads(message[len(_MAGIC) :])
            return _checked(cls(**record | {"process": read_process(record["process"])}))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None


def job_digest(group_name: str) -> str:
    """What keeps jobs with different group names apart at one address."""
    return hashlib.sha256(b"fastcoll group " + group_name.encode()).hexdigest()[:32]


def _checked(announcement: Announcement) -> Announcement:
    for name, kind in _TYPES.items():
        if type(getattr(announcement, name)) is not kind:
            raise ValueError(f"{name} must be {kind.__name__}")
    if not 0 <= announcement.port <= 65535 or announcement.world_size < 1:
        raise ValueError("port or world_size out of range")
    return announcement


_TYPES: dict[str, type] = {
    "job": str,
    "nonce": str,
    "time": float,
    "world_size": int,
    "address": str,
    "port": int,
    "leaving": bool,
}


def _mac(secret: bytes, message: bytes) -> bytes:
    return hmac.digest(secret, _LABEL + message, hashlib.sha256) if secret else b""
