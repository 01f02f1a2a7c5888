"""What is read of a record: each call once, by operation, whatever happens to its group between two readings."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from fastcoll import config, errors
from fastcoll.core import signature
from fastcoll.core.reduce_op import ReduceOp
from fastcoll.metrics.reading import UNSEEN, News, Position, RecordReader
from fastcoll.metrics.totals import OTHERS, Totals, waiting
from fastcoll.record import record as r
from fastcoll.record import recorder
from fastcoll.record.recorder import GroupRecorder
from fastcoll.system.processes import Member

REDUCE = signature.encode("all_reduce", np.dtype(np.float32), op=ReduceOp.SUM)
GATHER = signature.encode("all_gather", np.dtype(np.float32))
COALESCED = signature.encode("all_reduce", np.dtype(np.float32), op=ReduceOp.SUM, parts=(1, 2))


def members(count: int) -> list[Member]:
    me = Member.here(0, count, "cpu:auto")
    return [Member(**(vars(me) | {"rank": rank, "pid": me.pid + rank})) for rank in range(count)]


def made(name: str = "WORLD") -> GroupRecorder:
    return GroupRecorder(name, members(2), 0, "tcp", words=8)


def call(group: GroupRecorder, word: int = REDUCE, nbytes: int = 8, end: str = "done") -> None:
    group.end(group.begin(word, nbytes), end)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[GroupRecorder]:
    monkeypatch.setenv("FASTCOLL_METRICS", "9464")
    config.forget()
    group = made()
    yield group
    group.close()
    config.forget()


@pytest.fixture
def reader(group: GroupRecorder) -> Iterator[RecordReader]:
    found = r.open_record(os.getpid())
    assert found is not None
    reader = RecordReader(found.detach())
    yield reader
    reader.close()


def counts(news: list[News]) -> Counter[tuple[str, str]]:
    """Return the number of new calls, by group and operation."""
    found = Counter[tuple[str, str]]()
    for each in news:
        found.update({(each.group, calls.operation): calls.number for calls in each.calls})
    return found


def test_each_call_is_read_once_with_its_operation_and_size(
    group: GroupRecorder, reader: RecordReader
) -> None:
    assert counts(reader.news()) == {}
    for nbytes in (8, 100):
        call(group, REDUCE, nbytes)
    call(group, GATHER, 64)
    call(group, COALESCED, 12)
    group.begin(REDUCE, 8)  # not complete
    (news,) = reader.news()
    found = {each.operation: (each.number, each.nbytes, each.uneven) for each in news.calls}
    assert found == {"all_reduce": (2, 108, 0), "all_gather": (1, 64, 64), "all_reduce_coalesced": (1, 12, 0)}
    assert reader.rank == 0
    assert counts(reader.news()) == {}
    group.end(5)
    assert counts(reader.news()) == {("WORLD", "all_reduce"): 1}


def test_a_group_that_was_read_before_its_backend_had_a_context_is_counted(
    group: GroupRecorder, reader: RecordReader
) -> None:
    assert counts(reader.news()) == {}
    group.follow(calls=2, finished=3)
    call(group)
    assert counts(reader.news()) == {("WORLD", "all_reduce"): 1}


def test_calls_that_have_left_the_ring_are_counted_as_unseen(
    group: GroupRecorder, reader: RecordReader
) -> None:
    call(group)
    reader.news()
    for _ in range(r.RING + 10):
        call(group)
    found = counts(reader.news())
    assert found["WORLD", UNSEEN] >= 10
    assert found.total() == r.RING + 10


def test_the_sum_is_exact_while_another_thread_calls(group: GroupRecorder, reader: RecordReader) -> None:
    many, found = 20_000, Counter[tuple[str, str]]()
    writer = threading.Thread(target=lambda: [call(group) for _ in range(many)])
    writer.start()
    while writer.is_alive():
        found += counts(reader.news())
    writer.join()
    found += counts(reader.news())
    assert found.total() == many
    assert found["WORLD", "all_reduce"] > 0


def test_a_closed_group_is_read_to_its_end_and_only_once(group: GroupRecorder, reader: RecordReader) -> None:
    for name in ("seen", "unseen"):
        short = made(name)
        call(short)
        if name == "seen":
            reader.news()
            call(short)
        short.close()
    assert counts(reader.news()) == {("seen", "all_reduce"): 1, ("unseen", "all_reduce"): 1}
    assert counts(reader.news()) == {}
    own = recorder.own()
    assert own is not None
    assert [each.name for each in own.groups] == ["WORLD"], "other readers do not see closed groups"


def test_rows_of_closed_groups_are_used_again(group: GroupRecorder, reader: RecordReader) -> None:
    found = Counter[tuple[str, str]]()
    for k in range(r.ROWS + 10):
        short = made("short")
        call(short)
        short.close()
        if k % 32 == 0:
            found += counts(reader.news())
    found += counts(reader.news())
    assert found == {("short", "all_reduce"): r.ROWS + 10}


def test_without_metrics_a_closed_group_is_not_kept(
    group: GroupRecorder, reader: RecordReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTCOLL_METRICS")
    config.forget()
    short = made("short")
    call(short)
    short.close()
    assert counts(reader.news()) == {}


def test_the_last_calls_of_a_process_are_read_after_it_has_left_all_groups(
    group: GroupRecorder, reader: RecordReader
) -> None:
    call(group)
    group.close()
    assert counts(reader.news()) == {("WORLD", "all_reduce"): 1}


def test_errors_are_counted_by_class_and_failed_calls_are_not_completed_calls(
    group: GroupRecorder, reader: RecordReader
) -> None:
    group.begin(REDUCE, 8)
    group.broken_off("mismatch")
    call(group)
    group.did_not_match(2)
    group.begin(REDUCE, 8)
    group.broken_off("made anew")
    call(group)
    group.begin(REDUCE, 8)
    group.failed("rank 1 died", "PeerDiedError")
    (news,) = reader.news()
    assert news.errors == {"MismatchError": 2, "PeerDiedError": 1}
    assert counts([news]) == {("WORLD", "all_reduce"): 1}
    assert reader.news()[0].errors == {}


def test_every_class_by_which_a_group_can_fail_has_a_counter() -> None:
    kinds = {errors.GroupError, *errors.GroupError.__subclasses__(), errors.MismatchError}
    assert {kind.__name__ for kind in kinds if kind.__module__ == "fastcoll.errors"} == set(r.ERRORS)


# ---- totals ------------------------------------------------------------------------------------------------


def place(rank: int, begun: int, finished: int, waits: bool = False, name: str = "WORLD") -> Position:
    return Position((name, (7, 8)), rank, begun, finished, waits)


@pytest.mark.parametrize(
    ("before", "after", "waits"),
    [
        ({0: [place(0, 3, 2)], 1: [place(1, 2, 2)]}, {0: [place(0, 3, 2)], 1: [place(1, 2, 2)]}, {0}),
        # The peer has begun the call meanwhile.
        ({0: [place(0, 3, 2)], 1: [place(1, 2, 2)]}, {0: [place(0, 3, 3)], 1: [place(1, 3, 3)]}, set()),
        # Both are in the call.
        ({0: [place(0, 3, 2)], 1: [place(1, 3, 2)]}, {0: [place(0, 3, 2)], 1: [place(1, 3, 2)]}, set()),
        # In another group of the same members, calls have other numbers.
        ({0: [place(0, 3, 2)], 1: [place(1, 1, 1, name="b")]}, {1: [place(1, 1, 1, name="b")]}, set()),
        # The peer is on another machine, and the record shows a wait.
        ({0: [place(0, 3, 2, True)]}, {0: [place(0, 3, 2, True)]}, {0}),
    ],
)
def test_a_rank_waits_for_a_peer_that_has_not_begun_the_call(
    before: dict[int, list[Position]], after: dict[int, list[Position]], waits: set[int]
) -> None:
    assert {rank for rank, _ in waiting(before, after)} == waits


def test_the_number_of_groups_with_own_counters_is_bounded() -> None:
    totals = Totals()
    for k in range(300):
        totals.add(0, [News(f"group{k}", [], {})])
    groups = {
        sample.labels["group"] for each in totals.metrics(False) for sample in each.samples if sample.labels
    }
    assert len(groups) == 257
    assert OTHERS in groups
