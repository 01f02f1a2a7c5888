"""Find the ranks for which each rank waits, from the records of the ranks' calls.

The command `status` reads the records from running processes, `trace` from dumps. In a collective call a rank waits for
the members of the group that have not begun the call. In a message it waits for the other rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..core.signature import describe
from ..record.record import CallRecord, GroupRecord, Record, ranks_of

_STUCK = ("under way", "failed", "mismatch")
_AFTERWARDS = 4  # calls: one that does not match, and the calls after it by which ranks exchange the mismatch


class ProcessState(NamedTuple):
    """The texts for a process state of /proc/PID/stat.

    Attributes:
        name: the state, for a table.
        past: the state, for a sentence about a dump.
        unable: why a process in this state cannot run; empty: it can.
        cure: how to make the process run again, or, if that is impossible, what to look at.
    """

    name: str
    past: str = "it ran"
    unable: str = ""
    cure: str = ""


_ENDED = "has ended, and its parent has not collected it", "look at its last lines on stderr"
_STATES = {
    "R": ProcessState("running", "it was computing"),
    "S": ProcessState("sleeping", "it was asleep"),
    "D": ProcessState("disk", "it was waiting for a disk"),
    "T": ProcessState(
        "stopped", "its process was stopped (SIGSTOP)", "is stopped, by SIGSTOP or Ctrl-Z",
        "kill -CONT {pid} resumes it",
    ),
    "t": ProcessState(
        "debugged", "its process was stopped by a debugger", "is stopped by a debugger", "continue it there"
    ),
    "Z": ProcessState("zombie", "it ran", *_ENDED),
    "X": ProcessState("X", "it ran", *_ENDED),
}  # fmt: skip


def state_of(letter: str) -> ProcessState:
    """Return the process state for its letter in /proc/PID/stat."""
    return _STATES.get(letter, ProcessState(letter))


class RankWait(NamedTuple):
    """A rank's wait in a call of a group, or in a message.

    Attributes:
        number: the number of the call; 0 for a message.
        what: a description of the call or the message.
        late: the ranks for which this rank waits.
        since: when the wait began, in seconds since 1970; 0: unknown.
        now: when the record was read.
        posted: whether the call or the message is asynchronous and, as far as the record shows, no thread of the
            program waits for it.
        any: whether any one of the ranks in `late` can end the wait.
    """

    rank: int
    group: GroupRecord
    number: int
    what: str
    late: tuple[int, ...]
    since: float
    now: float
    posted: bool = False
    any: bool = False

    @property
    def seconds(self) -> float:
        """How long the wait has lasted; 0: unknown."""
        return self.now - self.since if self.since else 0.0


def side(record: Record | None, group: GroupRecord) -> GroupRecord | None:
    """Return the record of a group in one rank's `record`, or None; `group` is another rank's record of this group."""
    same = (group.name, group.members)
    groups = record.groups if record is not None else ()
    return next((each for each in reversed(groups) if (each.name, each.members) == same), None)


def stuck_in(group: GroupRecord) -> CallRecord | None:
    """Return the call that a rank is in; else the oldest of its last calls that failed or did not match; or None."""
    if group.under_way is not None:
        return group.under_way
    return next((call for call in group.ring[-_AFTERWARDS:] if call.state in _STUCK), None)


def waits_in(rank: int, group: GroupRecord, records: Mapping[int, Record], now: float) -> Iterator[RankWait]:
    """Yield the waits of a rank in a group: in messages, and in its call if that call is not a mismatch."""
    call = stuck_in(group)
    if call is not None and call.state != "mismatch":
        sides = {
            peer.rank: side(records.get(peer.rank), group) for peer in group.members if peer.rank != rank
        }
        late = tuple(other for other, its in sides.items() if its is None or its.calls < call.number)
        # If the description of this rank's call is not in its record yet, take that of another member in the same call.
        published = (its.under_way for its in sides.values() if its is not None and its.under_way is not None)
        same = (its for its in published if its.call and its.number == call.number)
        since = (group.since or call.began, *(each.since for each in group.waits if each.number))
        began = min((each for each in since if each), default=0) / 1e9
        what = describe(*(call if call.call else next(same, call)).head, ranks_of(group.members))
        yield RankWait(rank, group, call.number, what, late, began, now, bool(group.pending))
    for message in group.waits:
        if not message.number:
            late = tuple(dict.fromkeys(message.ranks))
            ends = not message.awaited, message.many > 1
            yield RankWait(rank, group, 0, message.doing, late, message.since / 1e9, now, *ends)
