"""What the ranks of a job did between two readings of their records: pure functions, which `top` calls.

Rates of calls are exact, since records count calls. Rates of bytes are the sum over the calls in the ring, which has
the last 1,024 calls; if there were more, the mean of these stands for all (`is_estimate`). Records do not have sums of
waits, so the share of time that a rank waits is measured by samples: the states of all ranks at random moments between
the readings. A value that the records do not have is None.

The ranks run while they are read one after the other, so a sample consists of three readings (`sample_of`). A rank that
is in a call waits for a peer if the third reading shows that the peer has not begun the call. It does not wait if
already the first reading shows that the peer has begun. Otherwise the sample does not show which of the two was first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..core.signature import UNEVEN, describe
from ..record.record import GroupRecord, Record, ranks_of
from .blame import ELSEWHERE, HAS_LEFT, Ranks, Whereabouts, blocks, names, waits_of
from .jobs_here import ProcessMemory
from .printing import counted
from .waits import state_of

ENDED = "ended"
_MOST_UNKNOWN = 0.25  # the share of samples that may be undecided; with more, the share of waits is unknown
_LEAST_SAMPLES = 5  # with fewer, the share of waits is unknown
_SLOW = 4  # a sample that takes this many times as long as the quickest is left out
# So many standard deviations, as of tossing a coin, the slowest rank differs from the second.
_DEVIATIONS = 2


class Reading(NamedTuple):
    """All ranks at one time.

    Attributes:
        time: in seconds, of any clock.
        ranks: those whose processes run.
        memory: of these, by rank.
        gone: the last records of ranks whose processes have ended, or that have left all their groups.
    """

    time: float
    ranks: Ranks
    memory: Mapping[int, ProcessMemory | None]
    gone: Mapping[int, Record]


class Sample(NamedTuple):
    """Who waited for whom at one moment.

    Attributes:
        ranks: the ranks that the sample shows.
        late: for each of them that waited, and the serial number of the group in which it did, the ranks for which it
            waited; None: it was in a call, and the records do not show whether it waited.
        took: for how long the ranks were read, in seconds.
    """

    ranks: frozenset[int]
    late: Mapping[tuple[int, int], frozenset[int] | None]
    took: float = 0.0


class RankRates(NamedTuple):
    """A rank in one of its groups.

    Attributes:
        state: of its process.
        cores: the number of cores that it uses.
        group: "": the rank is in no group, or its record cannot be read here.
        call: the call that it is in, or its last one; "": none. Without a group, the reason for that.
        number: the number of that call.
        is_in: whether it is in the call.
        failure: why the group has failed, or "".
        calls: completed calls a second.
        nbytes: the sizes of the arrays of these calls, in bytes a second.
        is_estimate: whether the ring had only some of these calls.
        waits: the share of samples in which it waited for others.
        late: the rank for which it waited most often; -1: none.
        memory: of its process.
        host: its machine.
    """

    rank: int
    pid: int
    state: str
    cores: float | None = None
    group: str = ""
    call: str = ""
    number: int = 0
    is_in: bool = False
    failure: str = ""
    calls: float | None = None
    nbytes: float | None = None
    is_estimate: bool = False
    waits: float | None = None
    late: int = -1
    memory: ProcessMemory | None = None
    host: str = ""


class View(NamedTuple):
    """What `top` shows at one time.

    Attributes:
        title: about the job.
        samples: how many samples the shares of waits are from.
        seconds: the time in which these were taken.
        slow: the result of `slowest`.
        troubles: texts about ranks that hold the job up.
        end: how the job has ended; "": it runs.
    """

    title: str
    rows: Sequence[RankRates]
    samples: int
    seconds: float
    slow: tuple[int, float] | None
    troubles: Sequence[str]
    end: str = ""

    @property
    def summary(self) -> str:
        """One sentence about the rank for which others wait."""
        measured = f"{counted(self.samples, 'sample')} in {self.seconds:.1f} s"
        if self.slow is None:
            return f"the samples do not show which rank is the slowest ({measured})"
        rank, share = self.slow
        if rank < 0:
            return f"no single rank held others up ({measured})"
        return f"slowest is rank {rank}: others waited for it {share:.0%} of the time ({measured})"


def sample_of(
    before: Ranks, ranks: Ranks, after: Ranks, whereabouts: Whereabouts, now: float, took: float = 0.0
) -> Sample:
    """Return who waited for whom when `ranks` was read, from that reading, one before it and one after it."""
    possible, certain = (waits_of(ranks, whereabouts, now, peers) for peers in (before, after))
    far = {
        p.rank for each in ranks.values() for g in each.record.groups for p in g.members if p.rank not in ranks
        and whereabouts(p) == ELSEWHERE
    }  # fmt: skip
    late: dict[tuple[int, int], frozenset[int] | None] = {}
    for earlier, wait in zip(possible, certain, strict=True):  # the same waits, with ranks that may be late
        rank, key = ranks[wait.rank], (wait.rank, wait.group.serial)
        if not earlier.late or not rank.is_able or not blocks(rank, wait, certain):
            continue
        both = frozenset(wait.late).intersection(earlier.late)
        # A call waits for all of its members on other machines, as far as can be seen from here, until it ends.
        is_known = both and not (wait.number and both <= far)
        late[key] = both if is_known else late.get(key)
    return Sample(frozenset(ranks), late, took)


def prompt(samples: Sequence[Sample]) -> list[Sample]:
    """Leave out samples that took long, because the reading process had no core: they are often undecided."""
    longest = _SLOW * min((sample.took for sample in samples), default=0.0)
    return [sample for sample in samples if sample.took <= longest]


def rates(before: Reading, after: Reading, samples: Sequence[Sample]) -> list[RankRates]:
    """Return a row for each rank and group, and one for each rank that has left all its groups."""
    rows = []
    for number in sorted({*after.ranks, *after.gone}):
        if number not in after.ranks:
            record = after.gone[number]
            row = RankRates(number, record.pid, ENDED, host=record.host)
            rows += [_in_call(row, group) for group in record.groups]
            rows += [] if record.groups else [row._replace(state="", call=HAS_LEFT)]
            continue
        rank, earlier = after.ranks[number], before.ranks.get(number)
        process = rank.process
        same = earlier is not None and earlier.process.pid == process.pid
        old = {each.serial: each for each in (earlier.record.groups if earlier and same else ())}
        row = RankRates(number, process.pid, state_of(process.state).name, process.cores if same else None)
        row = row._replace(memory=after.memory.get(number), host=rank.record.host)
        seconds = after.time - before.time
        groups = rank.record.groups
        used = [group for group in groups if group.calls or group.failure] or groups[:1]
        rows += [rates_in(row, group, old.get(group.serial), seconds, samples) for group in used]
    return rows


def _in_call(row: RankRates, group: GroupRecord) -> RankRates:
    """Add a group and its current or last call to a row."""
    last = group.under_way or (group.ring[-1] if group.ring else None)
    call = describe(*last.head, ranks_of(group.members)) if last is not None else ""
    number, is_in = last.number if last else 0, group.under_way is not None
    return row._replace(group=group.name, call=call, number=number, is_in=is_in, failure=group.failure)


def rates_in(
    row: RankRates, group: GroupRecord, old: GroupRecord | None, seconds: float, samples: Sequence[Sample]
) -> RankRates:
    """Complete a rank's row for one of its groups; `old` is an earlier reading of the group, if there is one."""
    row, own = _in_call(row, group), (row.rank, group.serial)
    late = [sample.late.get(own, frozenset[int]()) for sample in samples if row.rank in sample.ranks]
    known = [each for each in late if each is not None]
    if len(known) >= _LEAST_SAMPLES and len(late) - len(known) <= _MOST_UNKNOWN * len(late):
        row = row._replace(waits=sum(map(bool, known)) / len(known))
        row = row._replace(late=next((each for each, _ in _counted(known)), -1))
    if old is None or seconds <= 0:
        return row
    count = group.finished - old.finished
    done = [call for call in group.ring if old.finished < call.number <= group.finished]
    # Of a call whose ranks may have arrays of different sizes, the record has only the size of the largest block.
    has_sizes = bool(done or not count) and all(c.shape >= 0 and not c.call & UNEVEN for c in done)
    nbytes = sum(call.shape for call in done) * count / max(1, len(done)) / seconds
    return row._replace(
        calls=count / seconds,
        nbytes=nbytes if has_sizes else None,
        is_estimate=has_sizes and len(done) < count,
    )


def slowest(samples: Sequence[Sample]) -> tuple[int, float] | None:
    """Return the rank for which others waited in most samples, and the share of samples; None: unknown.

    A rank that waited for others itself does not count. The rank is -1 if there is none, or if its lead over the rank
    that comes second may be chance in so few samples: on busy cores, each rank of a healthy job is late now and then.
    """
    awaited = []
    for sample in samples:
        waiting = {rank for (rank, _), late in sample.late.items() if late}
        late = frozenset[int]().union(*(late for late in sample.late.values() if late))
        if waiting or None not in sample.late.values():
            awaited.append(late - waiting)
    if len(awaited) < _LEAST_SAMPLES or len(samples) - len(awaited) > _MOST_UNKNOWN * len(samples):
        return None
    (rank, most), (_, second), *_ = [*_counted(awaited), (-1, 0), (-1, 0)]
    if (most - second) ** 2 <= _DEVIATIONS**2 * (most + second):
        return -1, 0.0
    return rank, most / len(awaited)


def _counted(late: Iterable[frozenset[int]]) -> list[tuple[int, int]]:
    """Return the ranks with the numbers of sets that they are in, the most frequent first, of several the lowest."""
    counts = Counter(rank for each in late for rank in each)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def end_of(rows: Sequence[RankRates]) -> str:
    """Describe how a job has ended: first the ranks whose processes have ended in a group that had not failed."""
    ended = [row for row in rows if row.state == ENDED and row.group]
    failed: dict[str, list[int]] = {}
    for row in ended:
        if row.failure:
            failed.setdefault(row.failure, []).append(row.rank)
    victims = {rank for ranks in failed.values() for rank in ranks}
    # A rank in several groups is named once: in the group whose call it is in, if there is one.
    last = {row.rank: row for row in sorted(ended, key=lambda row: row.is_in) if row.rank not in victims}
    texts = [
        f"rank {rank} (pid {row.pid}) ended {'in' if row.is_in else 'after'} {row.call or 'no call'}, "
        f"call {row.number} of group {row.group}"
        for rank, row in sorted(last.items(), key=lambda item: (item[1].is_in, item[0]))
    ]
    texts += [f"{names(ranks)} failed: {why}" for why, ranks in failed.items()]
    if left := [row.rank for row in rows if row.call == HAS_LEFT]:
        texts.append(f"{names(left)} left it")
    return f"the job has ended: {'; '.join(texts)}"
