"""The first meeting of an elastic job, in which ranks may die before all have met.

The ranks meet in the launcher's store, which outlives them, in numbered attempts. The first write of an attempt's
outcome (by `compare_set`) ends the attempt. A rank writes MADE after a barrier of the new world, because then every
rank has that world. A launcher writes the loss of a process that has failed; the ranks then abandon the attempt and
start the next one, in which a new process has the rank of the failed process. So all ranks agree on each failure: if
the outcome is the loss, the process failed before the ranks met; if the outcome is MADE, the process failed afterwards,
and the job continues without it.

Keys, under elastic/start/; elastic/over is one of job/joining.py:

    came            set when a rank has arrived at the meeting
    outcome/<k>     how attempt k ended: MADE, ELSEWHERE (the ranks met by other means), or a loss, as JSON
    joined/<name>   set when the process `name` is a rank of the job, in the first world or a later one
    dead/<name>     set by the launcher when the process `name` has failed
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from ..errors import StoreError, StoreTimeoutError, UsageError
from ..store.store import Store
from ..store.views import PrefixStore

MADE, ELSEWHERE = b"made", b"elsewhere"


class ProcessName(NamedTuple):
    """The launcher's name for a process, and the rank and world size that the process has in the first meeting."""

    name: str
    rank: int
    size: int

    def __str__(self) -> str:
        return f"{self.name}:{self.rank}/{self.size}"


def place_of(text: str) -> ProcessName:
    """Parse the `str` of a ProcessName; UsageError for any other text."""
    name, _, numbers = text.rpartition(":")
    rank, _, size = numbers.partition("/")
    if not (name and rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise UsageError(
            f"FASTCOLL_PLACE is {text!r}; it is set by the launcher, as NAME:RANK/SIZE: unset it"
        )
    return ProcessName(name, int(rank), int(size))


class Loss(NamedTuple):
    """A process that has failed."""

    name: str
    rank: int
    text: str  # for messages
    is_final: bool  # the process is not replaced


def loss_of(outcome: bytes) -> Loss:
    """Parse the outcome of an attempt that ended with a loss."""
    try:
        return Loss(**json.loads(outcome))
    except (ValueError, TypeError) as error:
        raise StoreError(f"the outcome of an attempt cannot be read: {outcome[:80]!r}") from error


class Standing(NamedTuple):
    """The state of a job after the failure of a process."""

    has_met: bool  # the ranks had met before the failure
    has_come: bool  # a rank had arrived at the meeting
    joined: frozenset[str]  # names of all present and former ranks of the job
    is_state_lost: bool  # the ranks met here (MADE), and all of `joined` have failed


class Attempts:
    """The first meeting in the launcher's store, as one process sees it. StoreError: the store is gone."""

    def __init__(self, store: Store) -> None:
        self._store, self._keys = store, PrefixStore("elastic/start", store)

    def come(self) -> None:
        """Record that a rank has arrived at the meeting."""
        self._keys.set("came", b"1")

    def outcome(self, attempt: int) -> bytes | None:
        """Return the outcome of an attempt; None: it has not ended. Never blocks."""
        return self._keys.peek([f"outcome/{attempt}"])[0]

    def wait(self, attempt: int, seconds: float) -> bytes | None:
        """Wait for the outcome of an attempt; None: it has not ended within `seconds`."""
        with suppress(StoreTimeoutError):
            return self._keys.fetch([f"outcome/{attempt}"], seconds)[0]
        return None

    def decide(self, attempt: int, outcome: bytes) -> bytes:
        """End an attempt with this outcome unless it has ended; return its outcome."""
        return self._keys.compare_set(f"outcome/{attempt}", b"", outcome)

    def decide_next(self, outcome: bytes) -> bytes:
        """Write `outcome` as the end of the first attempt that has not ended, and return it.

        If an earlier attempt has ended with the same outcome, write nothing, and return that outcome. If the ranks have
        met, write nothing, and return MADE or ELSEWHERE.
        """
        for attempt in itertools.count():
            if (found := self.decide(attempt, outcome)) in (outcome, MADE, ELSEWHERE):
                return found
        raise AssertionError("the attempts that have ended are finite")

    def join(self, name: str) -> None:
        """Record that the process `name` is a rank of the job."""
        self._keys.set(f"joined/{name}", b"1")

    def have_joined(self, names: Iterable[str]) -> bool:
        """Return whether any of these processes is a rank of the job. Never blocks."""
        return any(self._keys.peek([f"joined/{name}" for name in names]))

    def end(self) -> None:
        """Mark the job as ended, so that every process that waits to join it raises JobEndedError (job/joining.py)."""
        self._store.set("elastic/over", b"1")

    def report(self, loss: Loss) -> Standing:
        """Publish that a process has failed, so that no rank waits for the process; return the job's state."""
        outcome = self.decide_next(json.dumps(loss._asdict()).encode())
        self._keys.set(f"dead/{loss.name}", b"1")
        keys = self._keys.list_keys()
        joined, dead = (
            frozenset(key.removeprefix(start) for key in keys if key.startswith(start))
            for start in ("joined/", "dead/")
        )
        has_met = outcome in (MADE, ELSEWHERE)
        # Before MADE is written, all ranks have joined. Before ELSEWHERE is written, perhaps only one has, so `joined`
        # may lack living ranks.
        return Standing(has_met, "came" in keys, joined, outcome == MADE and joined <= dead)
