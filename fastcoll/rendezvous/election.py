"""What candidates of a multicast rendezvous tell one another, and who leads, as a pure function of that.

An announcement is one datagram:

    offset  bytes  field
    0       8      magic "FASTMC1\\n"
    8       n      JSON of an Announcement, at most 1,200 bytes
    8+n     32     HMAC-SHA256 over all of the above, when there is a job secret

A datagram that is anything else, or has another secret, is none of ours and passed over.

Only the leader matters: it offers a TCP store, the others go there, and ranks are assigned in the store, where nothing
is lost. A candidate that hears an offer follows the lowest one. Without an offer, once a candidate hears as many as the
world has ranks, the lowest nonce leads at once, and the next lowest ones after a pause each, in case those before them
are dead or were never there. Two may so come to lead; the one that hears a lower offer before its world is full calls
its own off.
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


FRESH_SECONDS = 1.5  # a candidate that was silent for longer does not count
STEP_SECONDS = 1.0  # how long each lower nonce is given to lead


class Election:
    """What one candidate knows. Times are seconds of any one clock."""

    def __init__(self, nonce: str, world_size: int) -> None:
        self.nonce = nonce
        self.world_size = world_size
        self._heard: dict[str, tuple[Announcement, float]] = {}
        self._left: dict[str, Announcement] = {}
        self._passed_over: set[str] = set()
        self._enough_since: float | None = None

    def hear(self, announcement: Announcement, now: float) -> None:
        """Take note of an announcement of this job."""
        if announcement.leaving:
            self._left[announcement.nonce] = announcement
            self._heard.pop(announcement.nonce, None)
        elif announcement.nonce != self.nonce and announcement.nonce not in self._left:
            self._heard[announcement.nonce] = (announcement, now)

    def names(self, now: float) -> list[str]:
        """Who was heard, for messages."""
        left = [f"{announcement.where} (which has left)" for announcement in self._left.values()]
        return [announcement.where for announcement in self.fresh(now)] + left

    def processes(self) -> list[ProcessId]:
        """Those heard that have not left; the world cannot be without them."""
        return [announcement.process for announcement, _ in self._heard.values()]

    def pass_over(self, nonce: str) -> None:
        """Count a candidate out: its store cannot be reached, or is full."""
        self._passed_over.add(nonce)
        self._enough_since = None

    def fresh(self, now: float) -> list[Announcement]:
        """The other candidates that are there, the lowest nonce first."""
        return sorted(
            (
                announcement
                for nonce, (announcement, at) in self._heard.items()
                if now - at <= FRESH_SECONDS and nonce not in self._passed_over
            ),
            key=lambda announcement: announcement.nonce,
        )

    def offer(self, now: float) -> Announcement | None:
        """The offer to follow: the lowest one."""
        return next((candidate for candidate in self.fresh(now) if candidate.port), None)

    def lower_offer(self, now: float) -> Announcement | None:
        """An offer that a leader gives way to."""
        offer = self.offer(now)
        return offer if offer is not None and offer.nonce < self.nonce else None

    def should_lead(self, now: float) -> bool:
        """Whether it is this candidate's turn to offer a store."""
        others = self.fresh(now)
        if len(others) + 1 < self.world_size:
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        place = sum(other.nonce < self.nonce for other in others)
        return now - self._enough_since >= place * STEP_SECONDS
