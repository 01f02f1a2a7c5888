"""Watching over a group's other ranks while waiting for them: whether they live, and when to give up.

A kernel that could not go on comes back within 100 ms; `Wait.look` then decides between calling it again
and raising. A verdict is spoken only if the kernel, called once more after the evidence was seen, still
cannot go on: what a peer published before it left or died counts.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from .. import config
from ..errors import AbortedError, CollectiveTimeoutError, GroupError, PeerDiedError
from ..record import dump
from ..record.recorder import GroupRecorder
from ..system.processes import Member

_log = logging.getLogger("fastcoll")
# What a rank says of itself. LEAVING: it starts nothing more, and only takes messages that were sent to it.
IN_ORDER, LEFT, FAILED, LEAVING = range(4)
_MOST_CHARACTERS = 300  # of what an exception says


def describe_exit(error: BaseException | None, ended: bool = False) -> str:
    """What the peers read of a rank that leaves, after its name: of the error that it handles, or that has ended it."""
    if isinstance(error, SystemExit):
        ended = True
        error = error.__context__ if error.code else None  # `except ValueError: ...; sys.exit(1)`
    if error is None:
        return "left (its program ended)" if ended else "left the group"
    said = str(error).strip().partition("\n")[0][:_MOST_CHARACTERS]
    # Where in the user's own files it was raised, as in ` (train.py:88)`.
    import sysconfig  # takes a millisecond, and few programs end so

    ours = os.path.dirname(os.path.dirname(__file__)) + os.sep
    others = tuple(sysconfig.get_paths().values())
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    places = [place for place in places if not place[0].startswith((ours, "<frozen"))]
    own = [place for place in places if not place[0].startswith(others)] or places
    where = f" ({os.path.basename(own[-1][0])}:{own[-1][1]})" if own else ""
    return f"left: {type(error).__name__}{said and ': '}{said}{where}"


class Monitor(ABC):
    """The state of a group's ranks, as seen and published by one of them."""

    def __init__(self, members: Sequence[Member], rank: int) -> None:
        self.failure: GroupError | None = None  # why the group failed; set once
        self.on_failure: Callable[[], None] = lambda: None  # called when it is set
        self.record: GroupRecorder | None = None  # where it is told what this rank waits for
        self.members = list(members)
        self.exit_reason = describe_exit(None)  # what the peers read when this rank leaves
        self.rank = rank
        self._lock = threading.Lock()
        self._leaving = self._retired = False

    @abstractmethod
    def _publish(self, state: int, reason: str) -> None:
        """Tell the peers that this rank is LEAVING, has LEFT or FAILED the group; never called after `leave`."""

    @abstractmethod
    def _states(self) -> list[int]:
        """What each rank has said of itself."""

    @abstractmethod
    def _reason(self, rank: int) -> str:
        """Why a rank FAILED the group, or its farewell."""

    def _blamed(self, rank: int) -> tuple[Sequence[int], bool]:
        """The global ranks that a rank which FAILED the group blames (none: itself), and whether for being late."""
        return (), False

    @abstractmethod
    def _dead(self, working: Sequence[Member]) -> list[Member]:
        """Those members that are proven dead, of some that have neither left nor failed."""

    def name(self, rank: int) -> str:
        """A rank for an error message: global rank, host and pid."""
        return str(self.members[rank])

    def fail(self, error: GroupError) -> None:
        """Remember why the group failed, and tell the peers. The first reason stays."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
            if not self._retired:
                self._publish(FAILED, str(error))
        if self.record is not None:
            self.record.failed(str(error))
        dump.after(error)
        self.on_failure()

    def start_to_leave(self) -> None:
        """Tell the peers that this rank starts nothing more in the group, though it still takes messages."""
        with self._lock:
            if self.failure is None and not self._retired:
                self._leaving = True
                self._publish(LEAVING, self.exit_reason)

    def leave(self) -> None:
        """Tell the peers that this rank has left in order, and nothing more from then on."""
        with self._lock:
            if self.failure is None and not self._retired:
                self._publish(LEFT, self.exit_reason)
            self._retired = True

    def has_left(self, rank: int) -> bool:
        """Whether a rank has left in order, or starts nothing more."""
        return self._states()[rank] in (LEFT, LEAVING)

    def has_failed(self) -> bool:
        """Whether a rank has said that it FAILED the group."""
        return FAILED in self._states()

    def is_leaving(self, rank: int) -> bool:
        """Whether a rank, which may be this one, starts nothing more but still takes messages."""
        return self._leaving if rank == self.rank else self._states()[rank] == LEAVING

    def decide(self, needed: Sequence[int], doing: str) -> GroupError | None:
        """Why waiting for the group ranks `needed` is in vain, or None."""
        if self.failure is not None:
            return self.failure
        states = self._states()
        # Who failed or left has said why; that its process ended afterwards is no news.
        others = [rank for rank in range(len(states)) if rank != self.rank]
        working = [self.members[rank] for rank in others if states[rank] in (IN_ORDER, LEAVING)]
        if dead := self._dead(
            working
        ):  # what they said since: a process says that it fails or leaves before it ends
            states = self._states()
            dead = [member for member in dead if states[self.members.index(member)] in (IN_ORDER, LEAVING)]
        if dead:
            names = ", ".join(map(str, dead))
            return PeerDiedError(f"{names} died; {doing}", [member.rank for member in dead])
        for rank in others:
            if states[rank] == FAILED:
                return self.passed_on(rank, self._reason(rank), *self._blamed(rank), doing)
        if gone := [rank for rank in needed if states[rank] in (LEFT, LEAVING)]:
            told = ", ".join(f"{self.name(rank)} {self._reason(rank)}" for rank in gone)
            return AbortedError(f"{told}; {doing}", [self.members[rank].rank for rank in gone])
        return None

    def passed_on(self, rank: int, reason: str, blamed: Sequence[int], late: bool, doing: str) -> GroupError:
        """The failure that a peer has told. Ranks that are late for it are so for all others that wait."""
        text = f"{self.name(rank)} failed the group: {reason}; {doing}"
        waits = late and self.members[self.rank].rank not in blamed
        kind = CollectiveTimeoutError if waits else AbortedError
        return kind(text, blamed or [self.members[rank].rank])


class Wait:
    """One blocked operation: its deadline, the warning it gives, and when it is hopeless.

    `doing` is for messages: "all_reduce(float32, 4 elements, op=SUM), call 12". `late` returns the group ranks that did
    not arrive, `hint` what else may be the matter, behind a semicolon. `started` is by time.monotonic; None: now.
    `is_message`: it is no collective; the engine of messages records what those wait for.
    """

    def __init__(
        self,
        monitor: Monitor,
        doing: str,
        late: Callable[[], list[int]],
        timeout: float,
        started: float | None = None,
        is_message: bool = False,
    ) -> None:
        self._monitor, self._doing, self._late, self._timeout = monitor, doing, late, timeout
        self._is_message = is_message
        self._started = time.monotonic() if started is None else started
        self._warn_after: float = config.get("FASTCOLL_WARN_AFTER")
        self._seen = False
        self.hint: Callable[[], str] = str

    def look(self) -> None:
        """Raise GroupError when going on is hopeless, else return so that the kernel is called again."""
        late = self._late()
        if self._monitor.record is not None and not self._is_message:
            record = self._monitor.record
            record.waits(0, self._doing, late, self._started, message=not record.is_in_call)
        waited = time.monotonic() - self._started
        found = self._monitor.decide(late, f"{self._doing}, waiting for {self._names(late)}")
        if found is None and waited >= self._timeout:
            found = CollectiveTimeoutError(
                f"{self._doing}: {self._names(late)} did not arrive within the timeout of {self._timeout:g} s"
                f"{self.hint()}",
                [self._monitor.members[rank].rank for rank in late],
            )
        if found is not None and self._seen:
            # Without the tracebacks of earlier raises, which would keep their frames and arrays alive.
            raise found.with_traceback(None)
        self._seen = found is not None
        if waited >= self._warn_after:
            self._warn_after = float("inf")
            _log.warning("%s has waited %.0f s for %s%s", self._doing, waited, self._names(late), self.hint())

    def over(self) -> None:
        """What is waited for, in no call, has come; of calls the record says so itself."""
        if self._monitor.record is not None:
            self._monitor.record.waits_no_more(0)

    def worked(self) -> None:
        """As `look` for an operation that is slow but gets on: it ends by an abort here, or when its time is up."""
        self._seen = False
        if self._monitor.failure is not None:
            raise self._monitor.failure.with_traceback(None)
        if time.monotonic() - self._started >= self._timeout:
            raise CollectiveTimeoutError(f"{self._doing} is not complete after {self._timeout:g} s")

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(map(self._monitor.name, ranks)) or "nobody"
