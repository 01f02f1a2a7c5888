"""Who leads a multicast rendezvous, as a pure function of what was heard when.

Only the leader matters: it offers a TCP store, the others go there, and ranks are assigned in the
store, where nothing is lost. A candidate that hears an offer follows the lowest one. Without an offer,
once a candidate hears as many as the world has ranks, the lowest nonce leads at once, and the next
lowest ones after a pause each, in case those before them are dead or were never there. Two may so come
to lead; the one that hears a lower offer before its world is full calls its own off.
"""

from __future__ import annotations

from ..core.processes import ProcessId
from .announcement import Announcement

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
