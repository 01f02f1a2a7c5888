"""Find where the ranks of a job diverged, from dumps of their last calls, which dumps.py has read.

The calls of a group are numbered, and a call has the same number on all ranks. A group diverged at the first number
under which ranks made different calls (a mismatch), or at the first call in which some ranks wait while others have not
begun it (a wait). If several groups diverged, mismatches come before waits, and earlier calls before later ones.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..core import signature
from ..record.record import CallRecord, GroupRecord, MemberRecord, ranks_of
from .dumps import Dump
from .printing import seconds_of
from .waits import state_of, stuck_in, waits_in

_MOST_NAMED = 8
_RANK = r"rank \d+ \(pid \d+ on [^)]*\)"
_ENDED = re.compile(rf"({_RANK}(?:, {_RANK})*) (died|left(?:(?!, {_RANK})[^;])*)")  # in the text of an error


class Edge(NamedTuple):
    """The wait of one rank for another, in the call or message `what`.

    `since` is the start of the wait in seconds since 1970; 0: unknown.
    """

    waiter: int
    awaited: int
    what: str
    since: float


@dataclass
class Divergence:
    """The first thing that went wrong in one group.

    Attributes:
        number: the number of the call at which the ranks diverged.
        calls: by rank, its call with this number; ranks that have not begun it are missing.
        late: ranks that have a dump and have not begun the call.
        silent: ranks without a dump.
        since: when the first rank began the call, in seconds since 1970; 0: unknown.
    """

    group: str
    members: tuple[MemberRecord, ...]
    number: int
    calls: dict[int, CallRecord]
    late: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)
    since: float = 0.0

    @property
    def is_mismatch(self) -> bool:
        return len({_comparable(call) for call in self.calls.values() if call.call}) > 1


def _comparable(call: CallRecord) -> tuple[int, int]:
    return (call.call, 0 if call.call & signature.UNEVEN else call.shape)


def divergences(dumps: Sequence[Dump]) -> list[Divergence]:
    """Return the first divergence of each group that diverged: mismatches before waits, and earlier ones first."""
    names = dict.fromkeys(group.name for dump in dumps for group in dump.record.groups)
    found = [each for name in names if (each := _divergence(name, dumps)) is not None]
    return sorted(found, key=lambda each: (not each.is_mismatch, each.since or float("inf")))


def _divergence(name: str, dumps: Sequence[Dump]) -> Divergence | None:
    records = {dump.rank: group for dump in dumps if (group := dump.group(name)) is not None}
    members = next(iter(records.values())).members
    rows = {rank: {call.number: call for call in group.ring} for rank, group in records.items()}
    stuck = {rank: call for rank, group in records.items() if (call := stuck_in(group)) is not None}
    for rank, call in stuck.items():  # a call that is not published yet is missing in `group.ring`
        rows[rank].setdefault(call.number, call)
    # First look for a mismatch: the first call that is recorded on several ranks and differs between them.
    numbers = sorted(set().union(*rows.values()))
    for number in numbers:
        calls = {rank: rows[rank][number] for rank in rows if number in rows[rank]}
        parted = len({_comparable(call) for call in calls.values() if call.call}) > 1
        # The group stays usable after a mismatch. If all ranks have finished later calls and some rank is stuck now,
        # the program has handled the mismatch, so skip it.
        if parted and not (stuck and all(group.finished > number for group in records.values())):
            return _divergence_of(name, members, number, calls, records)
    # Else look for a wait: the first call that some ranks are in and others have not begun.
    if not stuck:
        return None
    number = min(call.number for call in stuck.values())
    if len(records) == len(members) and all(group.calls >= number for group in records.values()):
        number = max(call.number for call in stuck.values())
    calls = {rank: rows[rank][number] for rank in rows if number in rows[rank]}
    return _divergence_of(name, members, number, calls, records)


def _divergence_of(
    name: str,
    members: tuple[MemberRecord, ...],
    number: int,
    calls: dict[int, CallRecord],
    records: dict[int, GroupRecord],
) -> Divergence:
    times = [group.since for group in records.values() if group.under_way and group.since]
    times += [call.began for call in calls.values() if call.began]
    return Divergence(
        group=name,
        members=members,
        number=number,
        calls=calls,
        late=[rank for rank, group in records.items() if group.calls < number],
        silent=[peer.rank for peer in members if peer.rank not in records],
        since=min(times, default=0) / 1e9,
    )


# ---- who waits for whom ----------------------------------------------------------------------------------


def waits(dumps: Sequence[Dump]) -> list[Edge]:
    """Return which ranks waited for which at the time of their dumps."""
    records = {dump.rank: dump.record for dump in dumps}
    found: dict[tuple[int, int, str], Edge] = {}
    for dump in dumps:
        for group in dump.record.groups:
            for wait in waits_in(dump.rank, group, records, dump.time):
                what = f"call {wait.number} of {group.name}" if wait.number else wait.what
                # If all members have begun the call, take the rank that the backend recorded as late.
                last = (group.late,) if wait.number and group.late >= 0 else ()
                for rank in wait.late or last:
                    found.setdefault((dump.rank, rank, what), Edge(dump.rank, rank, what, wait.since))
    return list(found.values())


def ring(found: Sequence[Edge]) -> list[Edge]:
    """Return the waits, in order, that lead from one rank back to the same rank; empty if there is no such ring."""
    leads: dict[int, list[Edge]] = {}
    for wait in found:
        leads.setdefault(wait.waiter, []).append(wait)
    for start in sorted(leads):
        paths = [[wait] for wait in leads[start]]
        seen = set()
        while paths:
            path = paths.pop(0)  # the shortest first
            last = path[-1].awaited
            if last == start:
                return path
            if last not in seen:
                seen.add(last)
                paths += [[*path, wait] for wait in leads.get(last, [])]
    return []


# ---- the texts -------------------------------------------------------------------------------------------


def summary(dumps: Sequence[Dump]) -> str:
    """Return a paragraph about what went wrong first."""
    found = divergences(dumps)
    ended = _ended(dumps)
    parts = [_headline(found[0], dumps), *_late(found[0], dumps), *_silent(found[0], ended)] if found else []
    edges = waits(dumps)
    loop = ring(edges)
    if not found and not loop:
        parts += [*_awaited(edges, dumps)] or [_without_divergence(dumps)]
    if loop:
        steps = ", ".join(f"rank {wait.waiter} for rank {wait.awaited} ({wait.what})" for wait in loop)
        parts.append(f"Ranks wait for one another in a ring: {steps}.")
    if ended:
        texts = [*dict.fromkeys(ended.values())][:_MOST_NAMED]
        parts.append(f"Other ranks saw that {', and that '.join(texts)}.")
    reasons = [(reason.time, dump.rank, reason.why) for dump in dumps for reason in dump.reasons]
    reasons = [reason for reason in reasons if not reason[2].startswith(("SIGQUIT", "dump()"))]
    if reasons:
        _, rank, why = min(reasons)
        parts.append(f'The first error was rank {rank}\'s: "{why}".')
    if len(found) > 1:
        others = ", ".join(f"call {each.number} of {each.group}" for each in found[1:4])
        parts.append(f"Other groups have diverged as well, perhaps because of this: {others}.")
    return " ".join(parts)


def _headline(found: Divergence, dumps: Sequence[Dump]) -> str:
    where = f"call {found.number} of group {found.group!r}"
    if found.is_mismatch:
        groups: dict[tuple[int, int], list[int]] = {}
        for rank, call in found.calls.items():
            groups.setdefault(_comparable(call), []).append(rank)
        # The smallest set of ranks comes first, because these ranks have probably made the wrong call.
        sides = sorted(groups.values(), key=len)
        calls = [f"{_ranks(ranks)} called {_what(found.calls[ranks[0]], found.members)}" for ranks in sides]
        return f"At {where} the ranks diverged: {', where '.join(calls)}."
    there = sorted(found.calls)
    known = next((call for call in found.calls.values() if call.call), None)
    what = f"{_what(known, found.members)}, {where}" if known is not None else where
    newest = max(dump.time for dump in dumps)
    long = f" for {seconds_of(newest - found.since)}" if found.since and newest > found.since else ""
    missing = [*found.late, *found.silent]
    if not missing:
        return f"All ranks are in {what}, which has not finished."
    waited = _ranks(there)
    return f"{waited[0].upper()}{waited[1:]} waited{long} in {what}, which {_ranks(missing)} never called."


def _late(found: Divergence, dumps: Sequence[Dump]) -> Iterator[str]:
    """Yield a sentence about each late rank: its last call in the group, and what it does now."""
    here = {dump.rank: dump for dump in dumps}
    for rank in found.late[:_MOST_NAMED]:
        dump = here[rank]
        group = dump.group(found.group)
        assert group is not None
        last = group.ring[-1] if group.ring else None
        done = (
            f"its last call in this group was {last.number}, {signature.describe(*last.head, ranks_of(group.members))}"
            if last
            else "it made no call there"
        )
        elsewhere = [
            f"it is in {signature.describe(*call.head, ranks_of(other.members))}, "
            f"call {call.number} of group {other.name!r}"
            for other in dump.record.groups
            if other.name != found.group and (call := other.under_way) is not None
        ]
        elsewhere += [
            f"it waits in {wait.doing}"
            for other in dump.record.groups
            for wait in other.waits
            if not wait.number
        ]
        if dump.seen_by is not None:
            elsewhere.append(f"{state_of(dump.state).past} when rank {dump.seen_by} looked")
        line = dump.program_line()
        at = [f"it is in {line}"] if line and not elsewhere else []
        site = f" (called at {last.site})" if last and last.site else ""
        yield f"Rank {rank}: {'; '.join([done + site, *elsewhere, *at])}."


def _silent(found: Divergence, ended: Container[int]) -> Iterator[str]:
    """Yield a sentence about the members that left no file; those that have `ended` are not guessed about."""
    members = {peer.rank: peer for peer in found.members}
    known: list[str] = []
    unknown: list[str] = []
    for rank in found.silent:
        named = known if rank in ended else unknown
        named.append(f"{rank} (pid {members[rank].pid} on {members[rank].host})")
    guess = ": stopped, killed, or on a machine whose files are not here"
    for silent, why in ((known, ""), (unknown, guess)):
        if silent:
            more = f" and {len(silent) - _MOST_NAMED} more" if len(silent) > _MOST_NAMED else ""
            many = "s" if len(silent) > 1 else ""
            yield f"Rank{many} {', '.join(silent[:_MOST_NAMED])}{more} left no file{why}."


def _awaited(edges: Sequence[Edge], dumps: Sequence[Dump]) -> Iterator[str]:
    """Yield a sentence about each wait of a rank for another rank, if no group's calls differ.

    Such ranks wait for messages. Waits for a rank that does not wait itself come first.
    """
    waiting = {wait.waiter for wait in edges}
    here = {dump.rank: dump for dump in dumps}
    for wait in sorted(edges, key=lambda wait: (wait.awaited in waiting, wait.since))[:_MOST_NAMED]:
        line = here[wait.awaited].program_line() if wait.awaited in here else ""
        where = f", which is in {line}" if line else "" if wait.awaited in here else ", which left no file"
        yield f"Rank {wait.waiter} waits for rank {wait.awaited}{where}: {wait.what}."


def _without_divergence(dumps: Sequence[Dump]) -> str:
    sizes = {dump.record.world_size for dump in dumps}
    missing = sorted({*range(max(sizes))} - {dump.rank for dump in dumps})
    if missing:
        return f"No group's calls differ among the ranks that left a file; {_ranks(missing)} left none."
    return (
        "No group's calls differ among the ranks, and none of them is in a call that others have not begun."
    )


def _ended(dumps: Sequence[Dump]) -> dict[int, str]:
    """Return the ranks that died, or left without a dump of their own, according to other ranks' errors, and how."""
    own = {dump.rank for dump in dumps if dump.seen_by is None}
    reasons = sorted((reason for dump in dumps for reason in dump.reasons), key=lambda reason: reason.time)
    found: dict[int, str] = {}
    for ended in (ended for reason in reasons for ended in _ENDED.finditer(reason.why)):
        for rank in map(int, re.findall(r"rank (\d+) ", ended[1])):
            if ended[2] == "died" or rank not in own:
                found.setdefault(rank, ended[0])
    return found


def _ranks(ranks: Sequence[int]) -> str:
    """Format ranks: `rank 1`, `ranks 0, 2, 3`, or their number if there are many."""
    if len(ranks) > _MOST_NAMED:
        return f"{len(ranks)} ranks ({', '.join(map(str, sorted(ranks)[:_MOST_NAMED]))}, ...)"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _what(call: CallRecord, members: Sequence[MemberRecord]) -> str:
    text = signature.describe(*call.head, ranks_of(members))
    return f"{text} at {call.site}" if call.site else text
