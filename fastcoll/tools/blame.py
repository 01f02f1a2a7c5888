"""Find the ranks that hold a job up, from the records of their calls, which running.py has read.

In a collective call, a rank waits for the members of the group that have not begun the call; in a message, it waits for
the other rank. A rank is to blame if others wait for it and it waits for no rank itself, or if its process cannot run.
Ranks that wait for one another, and whose waits no other rank can end, are to blame together. An asynchronous operation
that no thread of the program is known to wait for counts as a wait of its rank only while the rank's main thread seems
to be in `Work.wait`, because it sleeps in the same way. The records are read one after the other while the ranks run,
so one reading may combine states of different times. A wait counts only if an earlier reading of all records has it as
well: then there is a moment, between the two readings, at which all waits and all late ranks were as reported. Waits
shorter than MIN_WAIT_SECONDS are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..core.signature import describe
from ..record.record import GroupRecord, MemberRecord, Record, ranks_of
from .circles import circles, hopeless
from .printing import seconds_of
from .waits import RankWait, side, state_of, waits_in

MIN_WAIT_SECONDS = 0.5
BUSY = 0.2  # cores; a process that uses more is running, whatever its state is at the moment
GONE, LEFT, ELSEWHERE = "gone", "left", "elsewhere"
HAS_LEFT = "has left the job"
_MOST_NAMED = 8
_SLEEPS = {
    "nanosleep": "a time, as in time.sleep",
    "futex": "a lock, a queue or a thread",
    "pipe": "a pipe",
    "poll": "sockets or pipes",
    "select": "sockets or pipes",
    "sk_": "a socket",
    "inet": "a socket",
    "unix_stream": "a socket",
    "do_wait": "a child process",
    "tty": "the terminal",
}
"""The thing for which a process waits, by a part of the name of the kernel function in which the process sleeps."""
_SLOW = "a large array, a slow network, or fewer cores than ranks: run this again to see whether it goes on"


class Process(NamedTuple):
    """A process as the kernel shows it."""

    pid: int  # in the pid namespace of the process that runs this code
    state: str  # the letter in /proc/PID/stat of the main thread, or of another thread if the main thread has ended
    kernel_function: str = ""  # the function in which the thread sleeps; "": unknown
    cores: float = 0.0  # how many cores the process uses
    command: str = ""
    dumps: bool = False  # whether the process writes its stacks on SIGQUIT (record/dump.py)


@dataclass(frozen=True)
class Rank:
    """A rank whose process and record can be read here.

    `earlier` is an earlier reading of the record; None: there is only one.
    """

    record: Record
    process: Process
    earlier: Record | None = None

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.record.rank

    @property
    def where(self) -> str:
        """The rank's name in texts, for example `rank 2 (pid 123)`."""
        return f"rank {self.rank} (pid {self.process.pid})"

    @property
    def is_able(self) -> bool:
        """Whether the rank's process can run."""
        return not state_of(self.process.state).unable


Ranks = Mapping[int, Rank]
Whereabouts = Callable[[MemberRecord], str]
"""The state of a member that is not among the ranks: GONE (its process has ended), LEFT (its process runs, but is in no
group of the job) or ELSEWHERE (it is on another host, whose processes cannot be read here)."""


class Diagnosis(NamedTuple):
    """`text` names the ranks that hold the job up, `more` has lines with details, and `next` says what to do next."""

    text: str
    more: tuple[str, ...]
    next: str
    ranks: tuple[int, ...]


# ---- who waits for whom ------------------------------------------------------------------------------------


def waits_of(
    ranks: Ranks, whereabouts: Whereabouts, now: float, peers: Ranks | None = None
) -> list[RankWait]:
    """Return the waits of all ranks at the time `now` (seconds since 1970).

    For each group of a rank, waits in messages come first, then the wait in its call.

    Args:
        peers: another reading of the same ranks, in which late ranks are sought; None: `ranks`. Counts of calls only
            grow. So a rank that is late in a later reading was late when `ranks` was read, and a rank that is not late
            in an earlier reading was not late then.
    """
    peers = ranks if peers is None else peers
    records, found = {rank.rank: rank.record for rank in peers.values()}, []
    for rank in ranks.values():
        for group in rank.record.groups:
            for wait in sorted(waits_in(rank.rank, group, records, now), key=lambda wait: wait.number):
                if not wait.number:
                    found.append(wait)
                elif group.under_way is not None:
                    found.append(wait._replace(late=_late(peers, wait, whereabouts)))
    return found


def _late(ranks: Ranks, wait: RankWait, whereabouts: Whereabouts) -> tuple[int, ...]:
    """Return the members that a pending call waits for.

    These are the members that have not begun the call, as far as their records can be read here. If there are none:
    the members in the call whose processes cannot run, else those that the waiting rank's record lists as late, else
    those on other hosts.
    """
    group, late, unable = wait.group, {*wait.late}, set()
    for peer in group.members:
        rank = ranks.get(peer.rank)
        its = side(rank.record, group) if rank is not None and not rank.is_able else None
        if its is not None and its.calls >= wait.number > its.finished:
            unable.add(peer.rank)
    # The records of ranks on other hosts cannot be read here, but the waiting rank's record may list late ranks.
    reported = {group.late, *(rank for each in group.waits for rank in each.ranks if each.number)} - {-1}
    unknown = {p.rank for p in group.members if p.rank not in ranks and whereabouts(p) == ELSEWHERE}
    return tuple(sorted((late - unknown or unable or reported or unknown) - {wait.rank}))


def explain(ranks: Ranks, whereabouts: Whereabouts, now: float) -> list[Diagnosis]:
    """Return diagnoses of waits that have lasted MIN_WAIT_SECONDS, and of processes that cannot run."""
    lasting = lasting_waits(ranks, whereabouts, now)
    waits = [wait for wait in lasting if blocks(ranks[wait.rank], wait, lasting)]
    late = {rank for wait in waits for rank in wait.late}
    waiting: dict[int, list[RankWait]] = {}
    for wait in waits:
        if ranks[wait.rank].is_able and wait.late:
            waiting.setdefault(wait.rank, []).append(wait)
    stuck = hopeless(waiting)
    among = {rank: {other for wait in waiting[rank] for other in wait.late} for rank in stuck}
    peers = {p.rank: p for each in ranks.values() for group in each.record.groups for p in group.members}
    roots = sorted(rank for rank in late if rank not in waiting)
    unseen: dict[tuple[str, str], list[MemberRecord]] = {}
    for root in roots:
        if root not in ranks:
            unseen.setdefault((whereabouts(peers[root]), peers[root].host), []).append(peers[root])
    diagnoses = [
        _of_rank(ranks[root], [w for w in waits if root in w.late], [w for w in waits if w.rank == root])
        for root in roots
        if root in ranks
    ]
    for (where, _), lost in unseen.items():
        diagnoses.append(_of_unseen(lost, waits, where))
    diagnoses += [_of_circle(circle, waits) for circle in circles(among)]
    blamed = {rank for diagnosis in diagnoses for rank in diagnosis.ranks}
    for held in _by_call(waits):  # a call that all members are in, and that does not finish, is of nobody
        if not any(wait.late or wait.rank in blamed for wait in held):
            where, seconds = _where(held[0]), seconds_of(_seconds(held))
            text = f"{_names(held)} been in {where} for {seconds}, and no rank is late"
            diagnoses.append(Diagnosis(text, (), _SLOW, ()))
    for rank in ranks.values():
        if not rank.is_able and rank.rank not in blamed:
            state, then = condition(rank.process)
            diagnoses.append(
                Diagnosis(f"{rank.where} {state}; no rank waits for it yet", (), then, (rank.rank,))
            )
    return diagnoses


def lasting_waits(ranks: Ranks, whereabouts: Whereabouts, now: float) -> list[RankWait]:
    """Return the waits of MIN_WAIT_SECONDS that both readings of the records have, each with the ranks late in both."""
    before = {number: replace(rank, record=rank.earlier or rank.record) for number, rank in ranks.items()}
    earlier = {_identity(wait): wait for wait in waits_of(before, whereabouts, now)}
    found = []
    for wait in waits_of(ranks, whereabouts, now):
        same = earlier.get(_identity(wait))
        if same is not None and wait.seconds >= MIN_WAIT_SECONDS:
            late = tuple(rank for rank in wait.late if rank in same.late)
            if late or not wait.late:
                found.append(wait._replace(late=late))
    return found


def _identity(wait: RankWait) -> tuple[object, ...]:
    """Return what two readings of one wait have in common. A message has no number, but its time of posting."""
    return wait.rank, wait.group.serial, wait.number, None if wait.number else (wait.what, wait.since)


def blocks(rank: Rank, wait: RankWait, waits: Iterable[RankWait]) -> bool:
    """Return whether a wait holds its rank up; `waits` are those of all ranks.

    A wait for which a thread of the program waits does. An asynchronous operation does if the rank has no such wait,
    unless the rank's main thread runs code.
    """
    if not wait.posted:
        return True
    if any(other.rank == wait.rank and not other.posted for other in waits):
        return False
    process = rank.process
    # Work.wait sleeps in a futex, so a main thread that runs or sleeps elsewhere is not in Work.wait.
    runs = process.state == "R" or (process.kernel_function and "futex" not in process.kernel_function)
    return not (runs and rank.is_able)


def _by_call(waits: Iterable[RankWait]) -> list[list[RankWait]]:
    """Return one list of waits for each call, and one for each wait in a message."""
    calls: dict[tuple[object, ...], list[RankWait]] = {}
    for wait in waits:
        key = wait.group.name, wait.group.members, wait.number, -1 if wait.number else (wait.rank, wait.what)
        calls.setdefault(key, []).append(wait)
    return list(calls.values())


def _seconds(held: Sequence[RankWait]) -> float:
    return max(wait.seconds for wait in held)


# ---- the texts ---------------------------------------------------------------------------------------------


def _of_rank(rank: Rank, waits: Sequence[RankWait], own: Sequence[RankWait]) -> Diagnosis:
    """Describe a rank to blame: others wait for it, and it waits for no rank itself or cannot run.

    `waits` are the other ranks' waits for this rank; the text begins with the longest. `own` are its own waits.
    """
    held, *others = sorted(_by_call(waits), key=_seconds, reverse=True)
    first, who = held[0], f"{_names(held)} waited in for {seconds_of(_seconds(held))}"
    its, more = side(rank.record, first.group), []
    if not first.number:
        text = f"has not begun the message that {who}: {_where(first)}"
    elif its is None:
        text = f"has left {_called(first.group)}, whose call {first.number}, {first.what}, {who}"
    elif its.calls >= first.number:
        text = f"holds up {_where(first)}, that {who}"
    else:
        text = f"has not called {_where(first)}, that {who}"
        if its.ring:
            more = [
                f"its last call there was {describe(*its.ring[-1].head, ranks_of(its.members))}, call {its.calls}"
            ]
    more += [f"{_names(o)} waited for it for {seconds_of(_seconds(o))} in {_where(o[0])}" for o in others]
    state, then = condition(rank.process)
    if own and rank.is_able:
        state = f"has been in {_where(own[0])} for {seconds_of(own[0].seconds)}, and no rank is late there"
        then = _SLOW
    return Diagnosis(f"{rank.where} {text}; it {state}", tuple(more), then, (rank.rank,))


def condition(process: Process) -> tuple[str, str]:
    """Return two texts: what a process does outside of fastcoll's calls, or why it cannot run; and what to do next."""
    pid, kernel_function = process.pid, f" ({process.kernel_function})" if process.kernel_function else ""
    stack = f"py-spy dump --pid {pid} shows the line"
    if process.dumps:
        stack = f"kill -QUIT {pid} writes the stacks of its threads to FASTCOLL_TRACE_DIR"
    if (state := state_of(process.state)).unable:
        return state.unable, state.cure.format(pid=pid)
    if process.state == "D":
        return f"waits in the kernel{kernel_function}, mostly for a disk or a network file system", stack
    if process.state == "R" or process.cores >= BUSY:
        return f"runs its own code, a loop or a long computation ({process.cores:.2f} cores)", stack
    what = next((what for part, what in _SLEEPS.items() if part in process.kernel_function), "")
    return f"sleeps in its own code{what and f', for {what}'}{kernel_function}", stack


def _of_unseen(lost: Sequence[MemberRecord], waits: Sequence[RankWait], where: str) -> Diagnosis:
    """Describe the late members on one host, if their records cannot be read here."""
    first, late = lost[0], {peer.rank for peer in lost}
    held = max(_by_call(wait for wait in waits if late.intersection(wait.late)), key=_seconds)
    texts = {
        GONE: ("has ended", "have ended", "look at its last lines on stderr"),
        LEFT: (
            "has left the job, though its process lives", "have left the job, though their processes live",
            f"py-spy dump --pid {first.pid} shows the line",
        ),
        ELSEWHERE: (
            "cannot be seen from here", "cannot be seen from here", f"python -m fastcoll status on {first.host}"
        ),
    }  # fmt: skip
    one, several, then = texts[where]
    who = f"rank {first.rank} (pid {first.pid} on {first.host}) is"
    if len(lost) > 1:
        who = f"{names(peer.rank for peer in lost)} (on {first.host}) are"
    text = (
        f"{who} missing in {_where(held[0])}, that {_names(held)} waited in for {seconds_of(_seconds(held))}"
    )
    state = f"it {one}" if len(lost) == 1 else f"they {several}"
    return Diagnosis(f"{text}; {state}", (), then, tuple(peer.rank for peer in lost))


def _of_circle(circle: Sequence[int], waits: Sequence[RankWait]) -> Diagnosis:
    """Describe ranks that wait for one another in different calls, and all waits for these ranks."""
    lines = []
    for held in _by_call(wait for wait in waits if {*circle}.intersection(wait.late)):
        first, theirs = held[0], sorted({rank for wait in held for rank in wait.late})
        missed = (
            f", which {names(theirs)} {'has' if len(theirs) == 1 else 'have'} not called"
            if first.number
            else ""
        )
        lines.append(f"{_names(held)} waited for {seconds_of(_seconds(held))} in {_where(first)}{missed}")
    then = "one of them skips a call or makes one too many, or they make their calls in different orders"
    if not any(wait.number for wait in waits if wait.rank in circle):
        then = "let one of them send while the other receives, or post the messages by isend and irecv first"
    what = "wait for one another" if len(circle) > 1 else "waits for itself"
    return Diagnosis(f"{names(circle)} {what}", tuple(lines), then, tuple(circle))


def _where(wait: RankWait) -> str:
    """Format a call, `all_reduce(float32, 4 elements, op=SUM), call 57 of group WORLD`, or a message."""
    return f"{wait.what}, call {wait.number} of {_called(wait.group)}" if wait.number else wait.what


def _called(group: GroupRecord) -> str:
    """Return `group WORLD`, or `group0` for a group without a name."""
    return group.name if group.name.startswith("group") else f"group {group.name}"


def _names(held: Sequence[RankWait]) -> str:
    return f"{names(wait.rank for wait in held)} {'has' if len(held) == 1 else 'have'}"


def names(ranks: Iterable[int]) -> str:
    """Format ranks: `rank 2`, `ranks 0, 1 and 3`, or for many `ranks 0-6 and 8`."""
    ordered = sorted(set(ranks))
    parts = [str(rank) for rank in ordered]
    if len(ordered) > _MOST_NAMED:
        runs: list[list[int]] = []
        for rank in ordered:
            if runs and runs[-1][1] == rank - 1:
                runs[-1][1] = rank
            else:
                runs.append([rank, rank])
        parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    return "ranks " + (f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0])
