"""Which ranks are to blame, on made-up records of all kinds of hangs; without processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastcoll.core import signature
from fastcoll.core.reduce_op import ReduceOp
from fastcoll.record.record import CallRecord, GroupRecord, MemberRecord, Record, Waiting
from fastcoll.tools.blame import ELSEWHERE, GONE, LEFT, Process, Rank, explain, names, waits_of
from fastcoll.tools.circles import circles

NOW = 1000.0
SECOND = 10**9
ALL_REDUCE = signature.encode("all_reduce", np.dtype(np.float32), op=ReduceOp.SUM)
BARRIER = signature.encode("barrier")


def group(
    rank: int, calls: int, under_way: bool, *, name: str = "WORLD", members: Sequence[int] = range(4),
    waited: float = 12, call: int = ALL_REDUCE, hosts: str = "aaaa", **more: Any,
) -> GroupRecord:  # fmt: skip
    """Return a rank's record of a group, in or after its call number `calls`."""
    peers = tuple(MemberRecord(member, hosts[member], 100 + member) for member in members)
    last = CallRecord(calls, call, 16, "under way" if under_way else "done", 0, 0)
    since = int((NOW - waited) * SECOND) if under_way else 0
    return GroupRecord(
        name=name, serial=1, backend="shm", members=peers,
        rank=peers.index(MemberRecord(rank, hosts[rank], 100 + rank)),
        calls=calls, finished=calls - under_way, ring=(last,) if calls else (), failure="",
        under_way=last if under_way else None, since=since, **{"late": -1, "waits": (), "pending": 0, **more},
    )  # fmt: skip


def rank(
    number: int, *groups: GroupRecord, state: str = "S", cores: float = 0.0, kernel_function: str = ""
) -> Rank:
    record = Record(
        job="a:100:1", rank=number, world_size=4, host="a", pid=100 + number, start_time=1, started=NOW - 100,
        version="1", groups=groups,
    )  # fmt: skip
    return Rank(record, Process(100 + number, state, kernel_function, cores))


def diagnoses(*ranks: Rank, where: str = GONE) -> list:
    return explain({each.rank: each for each in ranks}, lambda peer: where, NOW)


def three(calls: int = 57, **given) -> list[Rank]:
    """Return ranks 0, 1 and 3 in the same call."""
    return [rank(number, group(number, calls, True, **given)) for number in (0, 1, 3)]


CALLED = "all_reduce(float32, 4 elements, op=SUM), call 57 of group WORLD"
WAITED = f"{CALLED}, that ranks 0, 1 and 3 have waited in for 12 s"


@pytest.mark.parametrize(
    ("state", "cores", "says", "cure"),
    [
        ("T", 0.0, "it is stopped, by SIGSTOP or Ctrl-Z", "kill -CONT 102"),
        ("t", 0.0, "it is stopped by a debugger", "continue it"),
        ("R", 0.98, "it runs its own code, a loop or a long computation (0.98 cores)", "py-spy dump --pid 1"),
        ("S", 0.5, "it runs its own code", "py-spy dump"),
        ("S", 0.0, "it sleeps in its own code, for a lock, a queue or a thread (futex_wait)", "py-spy dump"),
        ("D", 0.0, "it waits in the kernel (futex_wait)", "py-spy dump"),
        ("Z", 0.0, "it has ended, and its parent has not collected it", "stderr"),
    ],
)
def test_a_rank_that_has_not_called_is_named_with_what_it_does_instead(state, cores, says, cure):
    late = rank(2, group(2, 56, False, call=BARRIER), state=state, cores=cores, kernel_function="futex_wait")
    (diagnosis,) = diagnoses(*three(), late)
    assert diagnosis.text.startswith(f"rank 2 (pid 102) has not called {WAITED}; {says}")
    assert diagnosis.more == ("its last call there was barrier(), call 56",)
    assert cure in diagnosis.next
    assert diagnosis.ranks == (2,)


def test_a_stopped_rank_that_has_finished_the_call_holds_no_rank_up_yet():
    (diagnosis,) = diagnoses(*three(), rank(2, group(2, 57, True), state="T"))
    assert diagnosis.text == f"rank 2 (pid 102) holds up {WAITED}; it is stopped, by SIGSTOP or Ctrl-Z"
    assert diagnosis.ranks == (2,)
    first, second = diagnoses(*three(), rank(2, group(2, 57, False), state="T"))
    assert "no rank is late" in first.text
    assert second.text == "rank 2 (pid 102) is stopped, by SIGSTOP or Ctrl-Z; no rank waits for it yet"


def test_short_waits_are_ignored():
    late = rank(2, group(2, 56, False), state="R")
    assert diagnoses(*three(waited=0.3), late) == []
    unmeasured = [rank(each.rank, replace(each.record.groups[0], since=0)) for each in three()]
    assert diagnoses(*unmeasured, late) == []
    waits = waits_of({each.rank: each for each in (*three(waited=0.3), late)}, lambda peer: GONE, NOW)
    assert [wait.late for wait in waits] == [(2,)] * 3


@pytest.mark.parametrize(
    ("where", "says", "cure"),
    [
        (GONE, "it has ended", "stderr"),
        (LEFT, "it has left the job, though its process lives", "py-spy"),
        (ELSEWHERE, "it cannot be seen from here", "python -m fastcoll status on b"),
    ],
)
def test_a_rank_that_cannot_be_read_is_reported_with_its_host(where, says, cure):
    (diagnosis,) = diagnoses(*three(hosts="aaba"), where=where)
    assert diagnosis.text == f"rank 2 (pid 102 on b) is missing in {WAITED}; {says}"
    assert cure in diagnosis.next


def test_ranks_of_another_machine_are_named_together_after_the_ranks_here():
    here = [rank(number, group(number, 57, True, hosts="aabb")) for number in (0, 1)]
    (diagnosis,) = diagnoses(*here, where=ELSEWHERE)
    assert diagnosis.text.startswith("ranks 2 and 3 (on b) are missing in all_reduce(")
    assert diagnosis.ranks == (2, 3)
    late = rank(1, group(1, 56, False, hosts="aabb"), state="R")
    assert [diagnosis.ranks for diagnosis in diagnoses(here[0], late, where=ELSEWHERE)] == [(1,)]
    named = [rank(number, group(number, 57, True, hosts="aabb", late=3)) for number in (0, 1)]
    assert [diagnosis.ranks for diagnosis in diagnoses(*named, where=ELSEWHERE)] == [(3,)]


def test_a_rank_that_has_left_the_group_is_named():
    other = group(2, 5, False, name="other")
    (diagnosis,) = diagnoses(*three(), rank(2, other))
    assert diagnosis.text.startswith("rank 2 (pid 102) has left group WORLD, whose call 57, all_reduce(")


def test_the_blame_is_with_the_end_of_a_chain():
    """0 waits for 1 in one group, 1 for 2 in another, and 2 runs its own code."""
    pair, others = (0, 1), (1, 2)
    first = rank(0, group(0, 3, True, name="pair", members=pair))
    behind = group(1, 2, False, name="pair", members=pair)
    second = rank(1, behind, group(1, 9, True, name="others", members=others))
    third = rank(2, group(2, 8, False, name="others", members=others), state="R")
    (diagnosis,) = diagnoses(first, second, third)
    assert diagnosis.ranks == (2,)
    assert "call 9 of group others, that rank 1 has waited in" in diagnosis.text


def test_ranks_that_wait_for_one_another_are_reported_with_both_calls():
    """Rank 2 has skipped a call of the group `pair`, and is in the next call of WORLD."""
    pair = (0, 2)
    ranks = [rank(0, group(0, 15, False), group(0, 8, True, name="pair", members=pair))]
    ranks += [rank(number, group(number, 16, True, call=BARRIER)) for number in (1, 3)]
    ranks += [rank(2, group(2, 16, True, call=BARRIER), group(2, 7, False, name="pair", members=pair))]
    (diagnosis,) = diagnoses(*ranks)
    assert diagnosis.text == "ranks 0 and 2 wait for one another"
    assert sorted(diagnosis.more) == [
        "rank 0 has waited for 12 s in all_reduce(float32, 4 elements, op=SUM), call 8 of group pair, "
        "which rank 2 has not called",
        "ranks 1, 2 and 3 have waited for 12 s in barrier(), call 16 of group WORLD, which rank 0 has not called",
    ]
    assert diagnosis.ranks == (0, 2)


def test_a_rank_that_waits_for_a_circle_outside_of_it_is_not_blamed():
    """Rank 3 waits for rank 1, rank 1 for rank 0; ranks 0 and 2 wait for each other."""
    ranks = [
        rank(0, group(0, 8, True, name="a", members=(0, 2)), group(0, 15, False, name="b", members=(0, 1))),
        rank(1, group(1, 16, True, name="b", members=(0, 1)), group(1, 3, False, name="c", members=(1, 3))),
        rank(2, group(2, 5, True, name="d", members=(0, 2)), group(2, 7, False, name="a", members=(0, 2))),
        rank(3, group(3, 4, True, name="c", members=(1, 3))),
    ]
    ranks[0] = rank(0, *ranks[0].record.groups, group(0, 4, False, name="d", members=(0, 2)))
    (diagnosis,) = diagnoses(*ranks)
    assert diagnosis.text == "ranks 0 and 2 wait for one another"
    assert diagnosis.ranks == (0, 2)
    assert len(diagnosis.more) == 3  # the ranks of the circle, and the rank that waits for it


def test_each_circle_is_reported_beside_late_ranks():
    ranks = []
    for members in ((0, 1), (2, 3)):
        for mine, other in (members, members[::-1]):
            own = group(mine, 2, True, name=f"of {mine}", members=members)
            ranks.append(rank(mine, own, group(mine, 1, False, name=f"of {other}", members=members)))
    assert [diagnosis.ranks for diagnosis in diagnoses(*ranks)] == [(0, 1), (2, 3)]
    idle = [replace(each, under_way=None, since=0) for each in ranks[3].record.groups]
    ranks[3] = rank(3, *idle, state="R")
    assert [diagnosis.ranks for diagnosis in diagnoses(*ranks)] == [(3,), (0, 1)]


@pytest.mark.parametrize(
    ("state", "kernel_function", "blamed"),
    [
        ("R", "", (0,)),  # running its own code
        ("S", "hrtimer_nanosleep", (0,)),  # time.sleep
        ("S", "futex_wait", (0, 1)),  # Work.wait
        ("S", "", (0, 1)),  # the kernel hides the function
    ],
)
def test_a_pending_operation_does_not_make_a_busy_rank_wait(state, kernel_function, blamed):
    """Rank 0 has begun an operation with rank 1, which waits for rank 0 in WORLD like all others."""
    pair = group(0, 1, True, name="pair", members=(0, 1), pending=1)
    ranks = [rank(0, group(0, 15, False), pair, state=state, kernel_function=kernel_function)]
    ranks += [rank(1, group(1, 16, True), group(1, 0, False, name="pair", members=(0, 1)))]
    ranks += [rank(number, group(number, 16, True)) for number in (2, 3)]
    (diagnosis,) = diagnoses(*ranks)
    assert diagnosis.ranks == blamed
    # If rank 0 blocks in another call, that call counts.
    other = group(0, 4, True, name="other", members=(0, 2))
    ranks[0] = rank(0, *ranks[0].record.groups, other, state=state, kernel_function=kernel_function)
    ranks[2] = rank(2, group(2, 15, False), group(2, 3, False, name="other", members=(0, 2)), state="R")
    (diagnosis,) = diagnoses(*ranks)
    assert diagnosis.ranks == (2,)


def test_a_rank_in_a_call_without_late_ranks_is_no_circle():
    """Ranks 0 and 1 are in a call of their own group, and the other ranks wait for both."""
    pairs = [group(number, 9, True, name="group0", members=(0, 1)) for number in (0, 1)]
    ranks = [rank(number, pair, group(number, 15, False)) for number, pair in enumerate(pairs)]
    ranks += [rank(number, group(number, 16, True)) for number in (2, 3)]
    first, second = diagnoses(*ranks)
    assert (first.ranks, second.ranks) == ((0,), (1,))
    assert first.text.startswith("rank 0 (pid 100) has not called all_reduce(")
    assert first.text.endswith(
        "; it has been in all_reduce(float32, 4 elements, op=SUM), call 9 of group0 for 12 s, "
        "and no rank is late there"
    )


def test_a_message_to_itself_that_is_not_sent():
    waiting = Waiting(0, "recv of 4 bytes from rank 0", int((NOW - 30) * SECOND), (0,), 1)
    (diagnosis,) = diagnoses(rank(0, group(0, 5, False, members=(0,), waits=(waiting,))))
    assert diagnosis.text == "rank 0 waits for itself"
    assert diagnosis.more == ("rank 0 has waited for 30 s in recv of 4 bytes from rank 0",)


def test_circles():
    assert circles({}) == []
    waits = {0: {1}, 1: {2}, 2: {1, 9}, 3: {0}, 4: {4}, 5: {6}, 6: {7}, 7: {5, 0}}
    assert circles(waits) == [[1, 2], [4], [5, 6, 7]]
    many = range(20_000)  # deeper than Python's recursion limit
    assert circles({rank: {(rank + 1) % 20_000} for rank in many}) == [list(many)]


def test_a_message_that_no_rank_sends():
    waiting = Waiting(0, "recv of 4 bytes from rank 1", int((NOW - 30) * SECOND), (1,), 1)
    ranks = [rank(0, group(0, 5, False, waits=(waiting,))), rank(1, group(1, 5, False), state="R")]
    (diagnosis,) = diagnoses(*ranks)
    assert diagnosis.text.startswith(
        "rank 1 (pid 101) has not begun the message that rank 0 has waited in for 30 s: recv of 4 bytes from rank 1; "
    )
    both = [rank(n, group(n, 5, False, waits=(waiting._replace(ranks=(1 - n,)),))) for n in (0, 1)]
    (diagnosis,) = diagnoses(*both)
    assert diagnosis.text == "ranks 0 and 1 wait for one another"


def test_a_call_that_a_waiting_rank_has_not_published_is_known_from_its_peers():
    ranks = three()
    silent = replace(ranks[0].record.groups[0], under_way=CallRecord(57, 0, 0, "under way", 0, 0), ring=())
    ranks[0] = rank(0, silent)
    (diagnosis,) = diagnoses(*ranks, rank(2, group(2, 56, False), state="R"))
    assert WAITED in diagnosis.text


def test_a_long_call_without_late_ranks():
    (diagnosis,) = diagnoses(*three(), rank(2, group(2, 57, True)))
    assert diagnosis.text.startswith("ranks 0, 1, 2 and 3 have been in all_reduce(")
    assert diagnosis.ranks == ()


def test_the_call_with_the_longest_wait_is_reported():
    ranks = [rank(0, group(0, 57, True), group(0, 3, True, name="pair", members=(0, 2), waited=40))]
    ranks += [rank(2, group(2, 56, False), group(2, 2, False, name="pair", members=(0, 2)), state="R")]
    (diagnosis,) = (each for each in diagnoses(*ranks) if each.ranks == (2,))
    assert "call 3 of group pair, that rank 0 has waited in for 40 s" in diagnosis.text
    assert diagnosis.more[-1] == f"rank 0 has waited for it for 12 s in {CALLED}"


def test_many_ranks_are_named_in_short():
    assert names([2]) == "rank 2"
    assert names([3, 1]) == "ranks 1 and 3"
    assert names(range(100)) == "ranks 0-99"
    assert names([*range(6), 8, *range(10, 13)]) == "ranks 0-5, 8 and 10-12"


def posted(number: int, *groups: GroupRecord) -> Rank:
    """Return a rank that computes."""
    return rank(number, *groups, state="R", cores=1.0)


def irecv(*ranks: int, awaited: bool = False) -> Waiting:
    since = int((NOW - 30) * SECOND)
    return Waiting(0, f"recv from rank {ranks[0]}", since, ranks, len(ranks), awaited)


def test_a_posted_receive_does_not_make_a_busy_rank_wait():
    """Rank 0 has posted a receive from rank 1 and computes; all others wait for rank 0 in a call."""
    others = [rank(number, group(number, 16, True)) for number in (1, 2, 3)]
    busy = posted(0, group(0, 15, False, waits=(irecv(1),)))
    (diagnosis,) = diagnoses(busy, *others)
    assert diagnosis.ranks == (0,)
    assert "; it runs its own code" in diagnosis.text
    # If a thread waits for the receive, ranks 0 and 1 wait for one another.
    (diagnosis,) = diagnoses(posted(0, group(0, 15, False, waits=(irecv(1, awaited=True),))), *others)
    assert diagnosis.ranks == (0, 1)


def test_a_receive_from_any_rank_waits_for_no_circle_that_one_rank_can_end():
    """Rank 0 receives from any rank; rank 2 waits for ranks 0 and 1 in a call, and rank 1 computes."""
    first = rank(0, group(0, 15, False, waits=(irecv(1, 2, 3, awaited=True),)))
    others = [rank(number, group(number, 16, True)) for number in (2, 3)]
    (diagnosis,) = diagnoses(first, posted(1, group(1, 15, False)), *others)
    assert diagnosis.ranks == (1,)
    # If rank 1 is in the call as well, no rank can end the wait of rank 0.
    (diagnosis,) = diagnoses(first, rank(1, group(1, 16, True)), *others)
    assert diagnosis.ranks == (0, 1, 2, 3)


def test_ranks_that_wait_for_one_another_in_messages_are_told_to_receive_first():
    both = [rank(n, group(n, 5, False, waits=(irecv(1 - n, awaited=True),))) for n in (0, 1)]
    (diagnosis,) = diagnoses(*both)
    assert diagnosis.next == (
        "let one of them send while the other receives, or post the messages by isend and irecv first"
    )


def test_waits_and_late_ranks_of_one_reading_alone_are_no_verdict():
    """The records are read one after the other, so a late rank may have begun the call since."""
    late = rank(2, group(2, 56, False), state="R")
    for number, (earlier, found) in enumerate(
        [
            (group(2, 56, False), 1),  # late in both readings
            (group(2, 57, True), 0),  # in the call in the earlier reading, so this record is inconsistent
        ]
    ):
        ranks = [replace(late, earlier=replace(late.record, groups=(earlier,))), *three()]
        assert len(diagnoses(*ranks)) == found, number
    before = group(0, 56, True)  # the ranks that wait were in another call
    ranks = [replace(each, earlier=replace(each.record, groups=(before,))) for each in three()]
    assert diagnoses(*ranks, late) == []
