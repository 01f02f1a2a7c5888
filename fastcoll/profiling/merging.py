"""Merge the logs of all ranks (record/call_log.py) into one profile: pure functions.

A call of a group has the same number on all ranks. So the rows of one call are found on all ranks, and a rank *waits*
from when it enters the call until the last rank that enters before this rank leaves. The rest of its time in the call
is *transfer*. A message is divided in the same way, by when the other end began to send or receive it.

Ranks of one machine share a clock (CLOCK_MONOTONIC). The clocks of different machines are first aligned by the time of
day. Then they are shifted by what the calls prove: no rank leaves a call of `_MEETING` before every rank has entered.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core import signature
from ..core.operations import OPERATIONS
from ..record import call_log as log
from ..record.call_log import Key, Rows

_MEETING = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier"}
_MESSAGES = {log.SEND: "send", log.RECV: "recv", log.ISEND: "isend", log.IRECV: "irecv"}
_UNKNOWN = -1

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RankLog:
    """What one rank has logged: facts and rows, as `CallLog.content` returns them."""

    about: Mapping[str, Any]
    rows: Rows

    @property
    def rank(self) -> int:
        return int(self.about["rank"])

    @property
    def seconds(self) -> float:
        """How long the profile ran on this rank; until its last call, if the process was killed."""
        last = int(self.rows[:, [log.BEGAN, log.ENDED]].max()) if len(self.rows) else self.about["began"]
        return float((self.about["ended"] or last) - self.about["began"]) / 1e9


@dataclass
class ProfileEntry:
    """The calls of one operation and size class in one group.

    Attributes:
        blocks: whether the caller was blocked for the time; False for calls beside the program.
        most_bytes: the largest size of the class; 0: no bytes.
        calls, nbytes: of each rank.
        seconds, waits: the time in the calls, and the part of it in which the rank waited, of each rank.
        awaited: the seconds that other ranks waited, by the rank that they waited for.
        timed: the share of the calls that have times.
        attributed: the share of the time that was divided into transfer and waiting.
        first: the seconds of the first call, which may compile or load functions, of each rank whose log has it.
        p50_us, p99_us: of the duration on all ranks.
        spread_us: from when the first rank enters a call until the last one does, on average; None: not known.
    """

    operation: str
    group: str
    blocks: bool
    most_bytes: int
    calls: dict[int, int] = field(default_factory=dict)
    nbytes: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    waits: dict[int, float] = field(default_factory=dict)
    awaited: dict[int, float] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    timed: float = 1.0
    attributed: float = 1.0
    p50_us: float = 0.0
    p99_us: float = 0.0
    spread_us: float | None = None


@dataclass(frozen=True)
class RankTime:
    """How one rank spent its time, in seconds; `awaited` is the time that other ranks waited for it."""

    rank: int
    host: str
    pid: int
    run: float
    transfer: float
    waiting: float
    awaited: float
    is_complete: bool

    @property
    def outside(self) -> float:
        """The time outside of calls."""
        return max(self.run - self.transfer - self.waiting, 0.0)


@dataclass(frozen=True)
class Profile:
    """A profile of all ranks.

    Attributes:
        missing: the ranks that have left no log.
        dropped: the number of calls that no log has, on all ranks.
        sampled: one of this many calls was used for waits and percentiles; 1: all.
        skew_us: how uncertain the alignment of the machines' clocks is; None: there is one machine.
        entries: those that took most time first.
        waits: seconds that one rank waited for another, by (waiter, awaited).
    """

    ranks: Sequence[RankTime]
    missing: Sequence[int]
    dropped: int
    sampled: int
    skew_us: float | None
    entries: Sequence[ProfileEntry]
    waits: Mapping[tuple[int, int], float]

    def share(self, entry: ProfileEntry) -> float:
        """Return the share of the run that an entry took, on average over ranks; 0 if it blocked no caller."""
        run = sum(each.run for each in self.ranks)
        return sum(entry.seconds.values()) / run if entry.blocks and run else 0.0


@dataclass(frozen=True)
class _Timed:
    """Timed rows of one rank in columns, with the wait that `divide_calls` and `divide_messages` find."""

    rows: Rows
    waits: NDArray[np.float64]  # ns; NaN: not known
    awaited: Ints  # global rank; _UNKNOWN: none
    spread: NDArray[np.float64]  # ns; NaN: not known


def merge(logs: Sequence[RankLog]) -> Profile:
    """Merge the logs of a job's ranks, one for each rank."""
    level = max(each.about["level"] for each in logs)
    offsets, skew = clock_offsets(logs)
    timed = {each.rank: timed_rows(each, level, offsets[each.about["machine"]]) for each in logs}
    groups = _groups(logs)
    for (_, ranks, _), members in groups.items():
        if len(members) == len(ranks) > 1:
            divide_calls(ranks, members, timed)
        divide_messages(members, timed)
    entries, waits = entries_of(logs, timed)
    return Profile(
        ranks=[rank_time(each, entries, waits) for each in logs],
        missing=sorted({*range(logs[0].about["world_size"])} - {each.rank for each in logs}),
        dropped=sum(each.about["dropped"] for each in logs),
        sampled=1 << level,
        skew_us=skew,
        entries=entries,
        waits=waits,
    )


def timed_rows(each: RankLog, level: int, offset: int) -> _Timed:
    """Return the timed rows that all ranks keep at this level, with times in ns of a common clock."""
    rows = each.rows[log.kept(each.rows, level) & log.is_timed(each.rows)].copy()
    rows[:, [log.BEGAN, log.ENDED]] += offset
    nothing = np.full(len(rows), np.nan)
    return _Timed(rows, nothing, np.full(len(rows), _UNKNOWN, np.int64), nothing.copy())


# ---- groups and clocks -----------------------------------------------------------------------------------

_GroupKey = tuple[str, tuple[int, ...], int]
_Members = dict[int, tuple[RankLog, int]]
"""The log of each member of a group, by group rank, and the group's GROUP word in it."""


def _groups(logs: Sequence[RankLog]) -> dict[_GroupKey, _Members]:
    """Return the members of each group that have logs. A program may make several groups of one name in turn."""
    found: dict[_GroupKey, _Members] = defaultdict(dict)
    for each in logs:
        seen = Counter[tuple[str, tuple[int, ...]]]()
        for index, group in enumerate(each.about["groups"], 1):
            key = group["name"], tuple(group["ranks"])
            found[(*key, seen[key])][group["rank"]] = each, index
            seen[key] += 1
    return found


def clock_offsets(logs: Sequence[RankLog]) -> tuple[dict[str, int], float | None]:
    """Return for each machine what is added to its times, in ns, and the uncertainty in us (None: one machine)."""
    epochs = {each.about["machine"]: int(each.about["epoch"]) for each in reversed(logs)}
    first = logs[0].about["machine"]
    offsets = {machine: epoch - epochs[first] for machine, epoch in epochs.items()}
    uncertain: float | None = None
    for machine in epochs:
        if machine == first:
            continue
        least, most = -np.inf, np.inf  # of the correction of the machine's times
        for members in _groups(logs).values():
            here, there = (
                next((member for member in members.values() if member[0].about["machine"] == each), None)
                for each in (first, machine)
            )
            if here is None or there is None:
                continue
            mine, theirs = _meetings(here), _meetings(there)
            _, a, b = np.intersect1d(mine[:, 0], theirs[:, 0], return_indices=True)
            if len(a):
                least = max(least, float((mine[a, 1] - theirs[b, 2]).max()) - offsets[machine])
                most = min(most, float((mine[a, 2] - theirs[b, 1]).min()) - offsets[machine])
        known = np.isfinite(least) and least <= most
        offsets[machine] += int((least + most) / 2) if known else 0
        width = (most - least) / 2e3 if known else np.inf
        uncertain = max(uncertain or 0.0, width)
    return offsets, uncertain


def _meetings(member: tuple[RankLog, int]) -> Ints:
    """Return number, begin and end of the calls that no rank leaves before every rank has entered."""
    each, index = member
    codes = [OPERATIONS.index(name) for name in sorted(_MEETING)]
    rows = each.rows
    of_group = (rows[:, log.GROUP] == index) & (rows[:, log.FLAVOUR] == log.SYNC) & (rows[:, log.NUMBER] > 0)
    chosen = rows[of_group & np.isin(rows[:, log.CALL] & 0xFF, codes)]
    return np.asarray(chosen[:, [log.NUMBER, log.BEGAN, log.ENDED]])


# ---- transfer and waiting --------------------------------------------------------------------------------


def divide_calls(ranks: Sequence[int], members: _Members, timed: Mapping[int, _Timed]) -> None:
    """Find the waits in the calls that all members of a group have timed; `ranks` are their global ranks."""
    owners = [timed[members[k][0].rank] for k in range(len(ranks))]
    places, common = [], None
    for k, owner in enumerate(owners):
        flavour, number = owner.rows[:, log.FLAVOUR], owner.rows[:, log.NUMBER]
        is_call = (flavour == log.SYNC) | (flavour == log.BESIDE)
        at = np.flatnonzero((owner.rows[:, log.GROUP] == members[k][1]) & is_call & (number > 0))
        places.append(at[np.unique(number[at], return_index=True)[1]])
        numbers = number[places[k]]
        common = numbers if common is None else np.intersect1d(common, numbers)
    if common is None or not len(common):
        return
    chosen = [
        at[np.searchsorted(owner.rows[at, log.NUMBER], common)]
        for owner, at in zip(owners, places, strict=True)
    ]
    began = np.stack([owner.rows[at, log.BEGAN] for owner, at in zip(owners, chosen, strict=True)])
    spread = began.max(axis=0) - began.min(axis=0)
    for k, (owner, at) in enumerate(zip(owners, chosen, strict=True)):
        # A rank may leave a call before others enter it, such as its own broadcast; then it has not waited for them.
        entered = np.where(began <= owner.rows[at, log.ENDED], began, np.iinfo(np.int64).min)
        waits = entered.max(axis=0) - began[k]
        owner.waits[at], owner.spread[at] = waits, spread
        owner.awaited[at] = np.where(waits > 0, np.asarray(ranks)[entered.argmax(axis=0)], _UNKNOWN)


def divide_messages(members: _Members, timed: Mapping[int, _Timed]) -> None:
    """Find the waits in the messages whose two ends are known.

    Messages between two ranks with one tag are received in the order in which they were sent. If numbers or sizes of
    the two ends differ, because compiled code or `recv` with ANY_TAG has some of them, these messages are not divided.
    """
    ends: dict[tuple[int, int, int], dict[bool, tuple[RankLog, Ints]]] = defaultdict(dict)
    for group_rank, (each, index) in members.items():
        rows = timed[each.rank].rows
        flavour = rows[:, log.FLAVOUR]
        for sends, flavours in ((True, (log.SEND, log.ISEND)), (False, (log.RECV, log.IRECV))):
            at = np.flatnonzero(
                (rows[:, log.GROUP] == index) & np.isin(flavour, flavours) & (rows[:, log.NUMBER] > 0)
            )
            for peer, tag in np.unique(rows[at][:, [log.PEER, log.CALL]], axis=0).tolist():
                mine = at[(rows[at, log.PEER] == peer) & (rows[at, log.CALL] == tag)]
                pair = (group_rank, peer, tag) if sends else (peer, group_rank, tag)
                ends[pair][sends] = each, mine[np.argsort(rows[mine, log.NUMBER], kind="stable")]
    for both in ends.values():
        if len(both) == 2:
            divide_channel(*both[True], *both[False], timed)


def divide_channel(
    sender: RankLog, sent: Ints, receiver: RankLog, received: Ints, timed: Mapping[int, _Timed]
) -> None:
    there, here = timed[sender.rank], timed[receiver.rank]
    count = min(len(sent), len(received))
    sent, received = sent[:count], received[:count]
    out, into = there.rows[sent], here.rows[received]
    if (out[:, log.NUMBER] != into[:, log.NUMBER]).any() or (out[:, log.NBYTES] > into[:, log.NBYTES]).any():
        return
    for mine, at, rows, others, peer in (
        (here, received, into, out, sender.rank),
        (there, sent, out, into, receiver.rank),
    ):
        # A send may complete before the receiver has begun; then the sender has not waited for it.
        entered = np.where(
            others[:, log.BEGAN] <= rows[:, log.ENDED], others[:, log.BEGAN], rows[:, log.BEGAN]
        )
        waits = np.maximum(entered - rows[:, log.BEGAN], 0)
        is_blocking = np.isin(rows[:, log.FLAVOUR], log.BLOCKING)
        mine.waits[at[is_blocking]] = waits[is_blocking]
        mine.awaited[at[is_blocking]] = np.where(waits > 0, peer, _UNKNOWN)[is_blocking]


# ---- entries ---------------------------------------------------------------------------------------------


def operation_of(flavour: int, kind: int) -> str:
    """Return the name under which a profile shows the calls of a flavour and of the KIND bits `kind`."""
    if flavour == log.BLOCKED_MESSAGE:
        return "wait for isend or irecv"
    if flavour in _MESSAGES:
        return _MESSAGES[flavour]
    name = signature.operation_of(kind)
    return {log.BLOCKED: f"wait for {name}", log.BESIDE: f"{name} (beside)"}.get(flavour, name)


def entries_of(
    logs: Sequence[RankLog], timed: Mapping[int, _Timed]
) -> tuple[list[ProfileEntry], dict[tuple[int, int], float]]:
    found: dict[tuple[str, str, int, int], ProfileEntry] = {}
    parts: dict[tuple[str, str, int, int], list[tuple[NDArray[np.float64], ...]]] = defaultdict(list)
    waits: dict[tuple[int, int], float] = defaultdict(float)
    for each in logs:
        totals: dict[Key, list[int]] = {}
        for *key, calls, nbytes, ns, count in each.about["removed"]:
            totals[(key[0], key[1], key[2], key[3])] = [calls, nbytes, ns, count]
        log.add_sums(totals, log.sums(each.rows))
        mine = timed[each.rank]
        keys = log.keys_of(mine.rows)
        for key, (calls, nbytes, ns, count) in totals.items():
            index, flavour, kind, size_class = key
            name = each.about["groups"][index - 1]["name"]
            label = operation_of(flavour, kind), name, flavour, size_class
            if label not in found:
                blocks = flavour in log.BLOCKING
                found[label] = ProfileEntry(label[0], name, blocks, 1 << size_class if size_class >= 0 else 0)
                found[label].timed = 0.0
            at = np.flatnonzero((keys == key).all(axis=1))
            took = (mine.rows[at, log.ENDED] - mine.rows[at, log.BEGAN]).astype(float)
            parts[label].append((took, mine.waits[at], mine.spread[at]))
            add_rank(found[label], each.rank, (calls, nbytes, ns, count), took, mine, at, waits)
    for label, entry in found.items():
        took, waited, spread = (np.concatenate(column) for column in zip(*parts[label], strict=True))
        entry.timed /= sum(entry.calls.values())
        if len(took):
            entry.p50_us, entry.p99_us = (float(x) / 1e3 for x in np.percentile(took, (50, 99)))
            known = ~np.isnan(waited)
            entry.attributed = float(took[known].sum() / took.sum()) if took.sum() else 1.0
            if (~np.isnan(spread)).any():
                entry.spread_us = float(np.nanmean(spread)) / 1e3
    return sorted(found.values(), key=lambda entry: (not entry.blocks, -sum(entry.seconds.values()))), dict(
        waits
    )


def add_rank(
    entry: ProfileEntry,
    rank: int,
    totals: tuple[int, int, int, int],
    took: NDArray[np.float64],
    mine: _Timed,
    at: Ints,
    waits: dict[tuple[int, int], float],
) -> None:
    """Add one rank's calls to an entry. Waits of the rows that are left stand for those of rows that were removed."""
    calls, nbytes, ns, count = totals
    entry.calls[rank] = entry.calls.get(rank, 0) + calls
    entry.nbytes[rank] = entry.nbytes.get(rank, 0) + nbytes
    entry.seconds[rank] = entry.seconds.get(rank, 0.0) + ns / 1e9
    entry.timed += count
    if len(took) == count:  # no row was removed
        entry.first[rank] = max(entry.first.get(rank, 0.0), float(took[0]) / 1e9 if count else 0.0)
    scale = ns / took.sum() / 1e9 if took.sum() else 0.0
    known = ~np.isnan(mine.waits[at])
    entry.waits[rank] = entry.waits.get(rank, 0.0) + scale * float(mine.waits[at][known].sum())
    for awaited in np.unique(mine.awaited[at]).tolist():
        if awaited != _UNKNOWN:
            seconds = scale * float(mine.waits[at][mine.awaited[at] == awaited].sum())
            entry.awaited[awaited] = entry.awaited.get(awaited, 0.0) + seconds
            if entry.blocks:
                waits[rank, awaited] += seconds


def rank_time(
    each: RankLog, entries: Sequence[ProfileEntry], waits: Mapping[tuple[int, int], float]
) -> RankTime:
    rank = each.rank
    blocked = sum(entry.seconds.get(rank, 0.0) for entry in entries if entry.blocks)
    waiting = sum(entry.waits.get(rank, 0.0) for entry in entries if entry.blocks)
    return RankTime(
        rank=rank,
        host=str(each.about["host"]),
        pid=int(each.about["pid"]),
        run=each.seconds,
        transfer=blocked - waiting,
        waiting=waiting,
        awaited=sum(seconds for (_, awaited), seconds in waits.items() if awaited == rank),
        is_complete=bool(each.about["ended"]),
    )
