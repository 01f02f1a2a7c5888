"""The monitor of a group's peers: whether they live, and when a call that waits for them must fail.

A *kernel*, the compiled function that carries out an operation, returns within 50 ms if it cannot progress. Then
`Wait.look` either raises an error, or returns so that the kernel is called again. If a peer has died, left or failed,
`Wait.look` raises only after it has found this twice, with one more call of the kernel in between, because data that a
peer published before it left or died is valid, and may be all that the kernel needs.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .. import config
from ..errors import AbortedError, CollectiveTimeoutError, GroupError, PeerDiedError, encodable, message_of
from ..record import dump
from ..record.recorder import GroupRecorder
from ..system.processes import Member
from .inquiry import Inquiry, Question

_log = logging.getLogger("fastcoll")
# The states of a rank. A rank is IN_ORDER until it publishes another state. A rank that is LEAVING starts no more
# operations, but still receives messages.
IN_ORDER, LEFT, FAILED, LEAVING = range(4)
_MOST_CHARACTERS = 300  # how many characters of an exception's text an exit reason may contain


def describe_exit(error: BaseException | None, ended: bool = False) -> str:
    """Return a rank's exit reason, the text that its peers append to its name in their errors.

    Args:
        error: the exception that the rank handles while it leaves, or that has ended its program.
        ended: whether the program has ended.
    """
    ended = ended or isinstance(error, SystemExit)
    error = uncaught(error)
    if error is None:
        return "left (its program ended)" if ended else "left the group"
    return f"left: {describe_error(error)}"


def uncaught(error: BaseException | None) -> BaseException | None:
    """Return the error because of which a rank leaves: for `except ValueError: ...; sys.exit(1)` the ValueError."""
    if isinstance(error, SystemExit):
        return error.__context__ if error.code else None
    return error


def describe_error(error: BaseException) -> str:
    """Return an error's type, its first line, and the line in the user's own files that raised it (train.py:88)."""
    text = message_of(error).strip().partition("\n")[0][:_MOST_CHARACTERS]
    import sysconfig  # takes a millisecond, and few programs end with an exception

    ours = os.path.dirname(os.path.dirname(__file__)) + os.sep
    others = tuple(sysconfig.get_paths().values())
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = [entry for entry in lines if not entry[0].startswith((ours, "<frozen"))]
    own = [entry for entry in lines if not entry[0].startswith(others)] or lines
    where = f" ({os.path.basename(own[-1][0])}:{own[-1][1]})" if own else ""
    return encodable(f"{type(error).__name__}{text and ': '}{text}{where}")


class Monitor(ABC):
    """The states of a group's ranks as one rank sees them, and the state that this rank publishes.

    Attributes:
        failure: why the group failed; set once.
        on_failure: a function that is called when `failure` has been set.
        record: the group's flight record (record/), in which this rank writes what it waits for.
        inquiry: finds the ranks at fault when a call times out; None: they are those for which this rank waits.
        larger: the call of a larger group that this group carries out a part of; None: this group is not a part.
        exit_reason: the text that the peers read when this rank leaves.
    """

    def __init__(self, members: Sequence[Member], rank: int) -> None:
        self.failure: GroupError | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.record: GroupRecorder | None = None
        self.inquiry: Inquiry | None = None
        self.larger: LargerCall | None = None
        self.members = list(members)
        self.exit_reason = describe_exit(None)
        self.rank = rank
        self._lock = threading.RLock()  # reentrant, because a signal handler may leave or abort the group
        self._leaving = self._retired = False

    @abstractmethod
    def _publish(self, state: int, reason: str) -> None:
        """Publish that this rank is LEAVING, has LEFT or has FAILED the group. Not called after `leave`."""

    @abstractmethod
    def _states(self) -> list[int]:
        """Return the state that each rank has published."""

    @abstractmethod
    def _reason(self, rank: int) -> str:
        """Return the reason that a rank has published: why it FAILED the group, or why it left."""

    def _blamed(self, rank: int) -> tuple[Sequence[int], bool]:
        """Return the global ranks that a FAILED rank blames, and whether it blames them for being late.

        If it blames no ranks, the caller blames the FAILED rank itself.
        """
        return (), False

    @abstractmethod
    def _dead(self, working: Sequence[Member]) -> list[Member]:
        """Return those of the members `working` whose processes are proven dead."""

    def name(self, rank: int) -> str:
        """Name a rank for an error text: global rank, host and pid."""
        return str(self.members[rank])

    def fail(self, error: GroupError) -> None:
        """Record and publish why the group failed, unless it has failed already."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
            if not self._retired:
                self._publish(FAILED, str(error))
        try:
            if self.record is not None:
                self.record.failed(str(error), type(error).__name__)
            dump.after(error)
        finally:  # a second Ctrl-C may come while the dump is written
            self.on_failure()

    def start_to_leave(self) -> None:
        """Publish that this rank starts no more operations in the group, but still receives messages."""
        with self._lock:
            if self.failure is None and not self._retired:
                self._leaving = True
                self._publish(LEAVING, self.exit_reason)

    def leave(self) -> None:
        """Publish that this rank has left normally, without a failure. Nothing is published afterwards."""
        with self._lock:
            if self.failure is None and not self._retired:
                self._publish(LEFT, self.exit_reason)
            self._retired = True

    def has_left(self, rank: int) -> bool:
        """Whether a rank has left without a failure, or is leaving."""
        return self._states()[rank] in (LEFT, LEAVING)

    def has_failed(self) -> bool:
        """Whether a rank has published that it FAILED the group."""
        return FAILED in self._states()

    def is_leaving(self, rank: int) -> bool:
        """Whether a rank (this one or a peer) starts no more operations but still receives messages."""
        return self._leaving if rank == self.rank else self._states()[rank] == LEAVING

    def decide(self, needed: Sequence[int], doing: str) -> GroupError | None:
        """Return an error if an operation that waits for the group ranks `needed` can never complete, else None."""
        if self.failure is not None:
            return self.failure
        states = self._states()
        # A rank that failed or left has published its reason, so the later end of its process is not checked.
        others = [rank for rank in range(len(states)) if rank != self.rank]
        working = [self.members[rank] for rank in others if states[rank] in (IN_ORDER, LEAVING)]
        if dead := self._dead(working):
            # A process publishes that it fails or leaves before it ends, so the states are read once more.
            states = self._states()
            dead = [member for member in dead if states[self.members.index(member)] in (IN_ORDER, LEAVING)]
        if dead:
            names = ", ".join(map(str, dead))
            return PeerDiedError(f"{names} died; {doing}", [member.rank for member in dead])
        for rank in others:
            if states[rank] == FAILED:
                return self.passed_on(rank, self._reason(rank), *self._blamed(rank), doing)
        if gone := [rank for rank in needed if states[rank] in (LEFT, LEAVING)]:
            reasons = ", ".join(f"{self.name(rank)} {self._reason(rank)}" for rank in gone)
            return AbortedError(f"{reasons}; {doing}", [self.members[rank].rank for rank in gone])
        return None

    def passed_on(self, rank: int, reason: str, blamed: Sequence[int], late: bool, doing: str) -> GroupError:
        """Make this rank's error from a peer's failure.

        Args:
            blamed: global ranks that the peer blames.
            late: whether the peer's call has timed out while it waited for the blamed ranks. If so, this rank's error
                is a timeout as well, except if this rank is one of the blamed ranks.
        """
        text = f"{self.name(rank)} failed the group: {reason}; {doing}"
        waits = late and self.members[self.rank].rank not in blamed
        kind = CollectiveTimeoutError if waits else AbortedError
        return kind(text, blamed or [self.members[rank].rank])


class LargerCall(NamedTuple):
    """The call of a larger group, of which an internal group carries out a part.

    The part ends at the deadline of the call. Its errors name the call, and the ranks at fault in the larger group.

    Attributes:
        monitor: the larger group's.
        ranks: the internal group's members, as ranks of the larger group.
        doing: returns the name of the call, for error texts.
        number: the call's number in the larger group.
        started: when the call started, by time.monotonic.
        timeout: seconds that the call may take.
    """

    monitor: Monitor
    ranks: Sequence[int]
    doing: Callable[[], str]
    number: int
    started: float
    timeout: float


class Wait:
    """One blocked operation: its deadline, its warning in the log, and the check whether it can still complete.

    In an internal group, the operation is a part of a call of the larger group (LargerCall), whose deadline it has.

    Args:
        doing: the call, for error texts: "all_reduce(float32, 4 elements, op=SUM), call 12".
        late: returns the group ranks that have not arrived.
        started: when the operation started, by time.monotonic; None: now.
        is_message: whether the operation is a message. Then p2p/checks.py records the wait, and `look` does not.
        number: the number of the collective call in its group. With a number, the rank takes part in inquiries.

    Attributes:
        hint: a function that returns a text with another possible cause of the delay. The text begins with "; ", or is
            empty.
    """

    def __init__(
        self,
        monitor: Monitor,
        doing: str,
        late: Callable[[], list[int]],
        timeout: float,
        started: float | None = None,
        is_message: bool = False,
        number: int | None = None,
    ) -> None:
        self._monitor, self._late, self._is_message = monitor, late, is_message
        self._began = time.monotonic() if started is None else started
        self._larger = larger = monitor.larger
        if larger is None:
            self._judge, self._doing, self._part = monitor, doing, doing
            self._started, self._timeout = self._began, timeout
        else:
            self._judge, self._doing, self._part = larger.monitor, larger.doing(), doing
            self._started, self._timeout, number = larger.started, larger.timeout, larger.number
        inquiry = self._judge.inquiry
        self._question = None if inquiry is None or number is None else Question(inquiry, number)
        self._warn_after: float = config.get("FASTCOLL_WARN_AFTER")
        self._seen = False
        self.hint: Callable[[], str] = str

    def look(self) -> None:
        """Raise GroupError if the operation can never complete; else return, so that the kernel is called again."""
        members = self._late()
        if self._monitor.record is not None and not self._is_message:
            record = self._monitor.record
            record.waits(0, self._part, members, self._began, message=not record.is_in_call)
        late = members if self._larger is None else [self._larger.ranks[member] for member in members]
        now = time.monotonic()
        waiting = f"{self._doing}, waiting for {self._names(late)}"
        found = self._decide(late, members, waiting)
        is_over = now - self._started >= self._timeout
        at_fault: Sequence[int] | None = late if is_over else None
        if self._question is not None:
            at_fault = self._question.at_fault(late, is_over, now)
        if found is None and at_fault is not None:
            within = f"within the timeout of {self._timeout:g} s"
            if not is_over:
                within = "before the call timed out on another rank"
            found = CollectiveTimeoutError(
                f"{self._doing}: {self._names(at_fault)} did not arrive {within}{self.hint()}",
                [self._judge.members[rank].rank for rank in at_fault],
            )
            self._seen |= self._question is not None  # the kernel has been called again since the timeout
        if found is not None and self._seen:
            # Raise without the tracebacks of earlier raises, which would keep their frames and arrays alive.
            raise found.with_traceback(None)
        self._seen = found is not None
        if (waited := now - self._began) >= self._warn_after:
            self._warn_after = float("inf")
            _log.warning("%s has waited %.0f s for %s%s", self._doing, waited, self._names(late), self.hint())

    def over(self) -> None:
        """Record that a wait outside a collective call has ended.

        A wait inside a call needs no record of its own end, since the end of the call is recorded.
        """
        if self._monitor.record is not None:
            self._monitor.record.waits_no_more(0)

    def worked(self) -> None:
        """Raise an error if the group has failed or the timeout is over.

        Called instead of `look` for an operation that has made progress. The peers are checked only after the timeout.
        """
        self._seen = False
        if (failure := self._judge.failure or self._monitor.failure) is not None:
            raise failure.with_traceback(None)
        if self._question is not None:
            self._question.answer()
        if time.monotonic() - self._started >= self._timeout:
            # If this rank was stopped, its peers have failed the group meanwhile.
            raise self._decide([], [], self._doing) or CollectiveTimeoutError(
                f"{self._doing} is not complete after {self._timeout:g} s"
            )

    def _decide(self, late: Sequence[int], members: Sequence[int], doing: str) -> GroupError | None:
        """Return an error if the operation can never complete, else None.

        It waits for the ranks `late`, which are `members` in an internal group.
        """
        found = self._judge.decide(late, doing)
        if found is None and self._larger is not None:
            found = self._monitor.decide(members, doing)
        return found

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(map(self._judge.name, ranks)) or "nobody"
