"""How the ranks of an elastic job meet for the first time, though some may die before they have.

They meet in the launcher's store, which outlives them, in numbered attempts. An attempt ends once: the first
`compare_set` of its outcome wins. A rank that has passed a barrier of the new world writes MADE, as every rank has the
world then. A launcher writes the loss of a process that failed: the ranks give the attempt up and go to the next one,
where the process that replaces the dead one has its rank. So each death is either one before the meeting, of which
all ranks know at once, or one that the job outlives.

Keys, under elastic/start/:

    came            a rank has come to the meeting
    outcome/<k>     how attempt k ended: MADE, ELSEWHERE (the ranks met by other means), or a loss, as JSON
    joined/<name>   this process is a rank of the job, in the first world or a later one
    dead/<name>     this process has failed, as its launcher has seen
"""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from typing import NamedTuple

from ..errors import StoreError, StoreTimeoutError, UsageError
from .store import Store
from .views import PrefixStore

MADE, ELSEWHERE = b"made", b"elsewhere"


class Place(NamedTuple):
    """What a launcher calls a process, and the rank that the process has if the ranks have not met yet."""

    name: str
    rank: int
    size: int

    def __str__(self) -> str:
        return f"{self.name}:{self.rank}/{self.size}"


def place_of(text: str) -> Place:
    """The place that `str` of it has made; a UsageError for any other text."""
    name, _, numbers = text.rpartition(":")
    rank, _, size = numbers.partition("/")
    if not (name and rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise UsageError(
            f"FASTCOLL_PLACE is {text!r}; it is set by the launcher, as NAME:RANK/SIZE: unset it"
        )
    return Place(name, int(rank), int(size))


class Loss(NamedTuple):
    """A process that has failed."""

    name: str
    rank: int
    text: str  # for people
    is_final: bool  # no process takes its place


def loss_of(outcome: bytes) -> Loss:
    """The loss that has ended an attempt."""
    try:
        return Loss(**json.loads(outcome))
    except (ValueError, TypeError) as error:
        raise StoreError(f"how an attempt to meet ended cannot be read: {outcome[:80]!r}") from error


class Standing(NamedTuple):
    """How a job stands after a process has failed."""

    has_met: bool  # before that
    has_come: bool  # whether a rank had come to the meeting
    joined: frozenset[str]  # the names of all that are, or were, ranks of the job
    is_state_lost: bool  # whether all of these have failed


class Attempts:
    """The meeting as one process sees it, in the launcher's store. StoreError: that is gone."""

    def __init__(self, store: Store) -> None:
        self._keys = PrefixStore("elastic/start", store)

    def come(self) -> None:
        """A rank has come to the meeting."""
        self._keys.set("came", b"1")

    def outcome(self, attempt: int) -> bytes | None:
        """How an attempt has ended, None while it has not. Never blocks."""
        return self._keys.peek([f"outcome/{attempt}"])[0]

    def wait(self, attempt: int, seconds: float) -> bytes | None:
        """As `outcome`, waited for so long."""
        with suppress(StoreTimeoutError):
            return self._keys.fetch([f"outcome/{attempt}"], seconds)[0]
        return None

    def decide(self, attempt: int, outcome: bytes) -> bytes:
        """How an attempt ends: so, unless it has ended before."""
        return self._keys.compare_set(f"outcome/{attempt}", b"", outcome)

    def decide_next(self, outcome: bytes) -> bytes:
        """End the first attempt that has not ended so; where the ranks have met, that outcome."""
        for attempt in itertools.count():
            if (found := self.decide(attempt, outcome)) in (outcome, MADE, ELSEWHERE):
                return found
        raise AssertionError("the attempts that have ended are finite")

    def join(self, name: str) -> None:
        """The process `name` is a rank of the job from here on."""
        self._keys.set(f"joined/{name}", b"1")

    def report(self, loss: Loss) -> Standing:
        """Publish that a process has failed, for those that wait for it in the meeting."""
        outcome = self.decide_next(json.dumps(loss._asdict()).encode())
        self._keys.set(f"dead/{loss.name}", b"1")
        keys = self._keys.list_keys()
        joined, dead = (
            frozenset(key.removeprefix(start) for key in keys if key.startswith(start))
            for start in ("joined/", "dead/")
        )
        has_met = outcome in (MADE, ELSEWHERE)
        # All ranks have joined before MADE is written; before ELSEWHERE perhaps only one.
        return Standing(has_met, "came" in keys, joined, outcome == MADE and joined <= dead)
