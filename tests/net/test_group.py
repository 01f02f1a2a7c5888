"""Groups over TCP on bad networks; and calls that are interrupted, aborted, closed or missing.

Also ranks that have returned from a call before the others made it: the data they leave, and the errors they report.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import numpy as np
import pytest
from together import together

from fastcoll import config
from fastcoll.api import objects
from fastcoll.core import monitor as monitors
from fastcoll.core import prepared
from fastcoll.core.group import ProcessGroup
from fastcoll.core.reduce_op import ReduceOp
from fastcoll.core.status import DONE
from fastcoll.errors import (
    AbortedError,
    ArrayError,
    CollectiveTimeoutError,
    MismatchError,
    NotInitializedError,
    PeerDiedError,
    ResourceError,
)
from fastcoll.net.tcp import engine_layout as words
from fastcoll.net.tcp import executor as engine
from fastcoll.net.tcp import pipe
from fastcoll.net.tcp.backend import TcpBackend
from fastcoll.rendezvous import dials
from fastcoll.rendezvous.listener import Listener
from fastcoll.store import HashStore
from fastcoll.store.opening import ConnectionKind
from net.groups import everybody, groups
from net.meshes import ProxiedStore, crew, default_settings, nothing_left, until


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with default_settings(monkeypatch), nothing_left():
        yield


def total(group: ProcessGroup, count: int = 3) -> float:
    """Return the sum over the ranks of rank + 1, the expected value of every item of an all_reduce."""
    x = np.full(count, group.rank + 1.0)
    group.fast.all_reduce(x)
    assert (x == x[0]).all()
    return float(x[0])


# ---- networks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("transfer", "count"), [(1, 40), (13, 2000), (1447, 300_000)])
def test_bytes_may_arrive_in_transfers_of_any_size(transfer: int, count: int) -> None:
    with ProxiedStore(transfer=transfer) as store, groups(3, store) as made:
        assert everybody(made, lambda group: total(group, count)) == [6.0] * 3
        assert everybody(made, lambda group: group.fast.barrier()) == [None] * 3


def test_several_streams_share_large_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCOLL_TCP_STREAMS", "3")
    config.forget()
    with ProxiedStore(transfer=30_011) as store, groups(2, store) as made:
        for count in (3, 100_000, 1_000_003):
            assert everybody(made, lambda group, count=count: total(group, count)) == [3.0] * 2
        x = [np.arange(700_001) + rank for rank in range(2)]
        everybody(made, lambda group: group.fast.broadcast(x[group.rank], 1))
        assert (x[0] == x[1]).all()


def test_a_reset_in_the_middle_ends_the_call_on_both_sides() -> None:
    with ProxiedStore(hold=1 << 20) as store, groups(2, store) as made:
        everybody(made, total)

        def reset() -> None:
            store.await_held()
            for proxy in store.proxies.values():
                proxy.reset()

        for rank, error in enumerate(everybody(made, lambda group: total(group, 1_000_000), reset)[:2]):
            assert isinstance(error, PeerDiedError), error
            assert error.ranks == (1 - rank,)
            with pytest.raises(PeerDiedError, match=f"rank {1 - rank}"):
                made[rank].barrier()


# ---- missing ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [(0, 1), (1, 3), (2, 3)])
def test_all_missing_ranks_are_named(missing: tuple[int, ...]) -> None:
    """The rank that times out first names them; it has the headers of those that wait longer. So all name them."""
    with groups(4) as made:
        everybody(made, total)
        *early, last = (group for group in made if group.rank not in missing)

        def short_of_time() -> None:
            expected = sorted((last.rank, *missing))
            until(lambda: all(group.backend._late() == expected for group in early))
            last.monitored_barrier(timeout=0.2)

        *others, found = everybody(early, lambda g: g.fast.monitored_barrier(timeout=90.0), short_of_time)
        assert isinstance(found, CollectiveTimeoutError)
        for error in (found, *others):
            assert isinstance(error, CollectiveTimeoutError | AbortedError), error
            assert error.ranks == missing, error
            assert all(f"rank {rank} " in str(error) for rank in missing)
            assert "barrier(), call 2 " in str(error)


@pytest.mark.parametrize(("missing", "first"), [((0, 1), 2), ((1,), 2), ((1, 3), 2), ((3,), 2), ((0, 2), 1)])
def test_a_groups_first_call_keeps_its_own_timeout(missing: tuple[int, ...], first: int) -> None:
    """The call makes the connections. A rank cannot know whether the ranks that it has dialed make the call.

    `first`: the rank that times out first, when all others have their connections or wait for missing ranks.
    """
    with groups(4, timeout=60.0, first_rank=10) as made:
        there = [group for group in made if group.rank not in missing]

        def has_dialed(group: ProcessGroup) -> bool:
            keys = group.backend._mesh._made
            return all((ConnectionKind.DATA, peer, 0) in keys for peer in range(group.rank + 1, 4))

        def call(group: ProcessGroup) -> None:
            others = [other for other in there if other is not group]
            if group.rank == first:
                until(lambda: all(map(has_dialed, others)) and all(map(is_there, others)))
            group.fast.monitored_barrier(timeout=0.2 if group.rank == first else 60.0)

        def is_there(group: ProcessGroup) -> bool:
            """Return whether this rank has sent its header, or waits for the connection of a missing one."""
            return group.backend.context.in_progress or any(rank < group.rank for rank in missing)

        errors = everybody(there, call)
        for error in errors:
            assert isinstance(error, CollectiveTimeoutError | AbortedError), error
            assert error.ranks
            assert {rank - 10 for rank in error.ranks} <= set(missing), error
            assert "barrier(), call 1 " in str(error)


def test_connecting_and_the_rest_of_a_call_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout passes while rank 0 connects. Then it does not wait for rank 1 for as long again."""
    passed, connected, connect = [0.0], threading.Event(), TcpBackend._connect
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    monkeypatch.setattr(monitors, "time", clock)
    with groups(2, timeout=60.0) as made:

        def slow(self: TcpBackend, *args: Any) -> None:
            connect(self, *args)
            if self.gate.rank == 0:
                until(connected.is_set)
                passed[0] = 60.0
            else:
                connected.set()
                until(lambda: made[0].failure)

        monkeypatch.setattr(TcpBackend, "_connect", slow)
        found, _ = everybody(made, total)
        assert isinstance(found, CollectiveTimeoutError)
        assert found.ranks == (1,)


@pytest.mark.parametrize(
    ("late", "left", "named"),
    [([1, 2, 3], [3], [1, 2]), ([1, 2], [1], [1, 2]), ([3], [3], [1]), ([], [], [1])],
)
def test_late_ranks_are_named_where_headers_arrive_through_others(
    late: list[int], left: list[int], named: list[int]
) -> None:
    """In large groups. A rank that has left had completed the call, unless this rank itself waits for it."""
    backend = TcpBackend.__new__(TcpBackend)
    backend.context = cast(Any, SimpleNamespace(waited_for=[1], late_ranks=lambda: late))
    backend.monitor = cast(Any, SimpleNamespace(has_left=left.__contains__))
    assert backend._late() == named


# ---- many ranks ---------------------------------------------------------------------------------------

MANY, ODD = 18, 6


def test_many_ranks_that_make_different_first_calls_raise_a_mismatch() -> None:
    """A rank whose call needs a connection that no other call needs does not wait for it in vain."""

    def gather(group: ProcessGroup) -> list[float]:
        rows = [np.zeros(1) for _ in range(MANY)] if group.rank == 0 else None
        group.gather(np.full(1, group.rank + 1.0), rows, 0)
        return [float(row[0]) for row in rows or ()]

    with groups(MANY, timeout=20.0) as made:
        assert 0 not in made[ODD].backend.context.met
        for error in everybody(made, lambda g: gather(g) if g.rank == ODD else g.barrier()):
            assert isinstance(error, MismatchError), error
            assert re.search(rf"rank {ODD} called gather\(.*root=0\)", str(error)), error
        for _ in range(2):
            first, *others = everybody(made, gather)
            assert first == [rank + 1.0 for rank in range(MANY)]
            assert others == [[]] * (MANY - 1)


# ---- interrupted, aborted, closed ---------------------------------------------------------------------


def test_an_interrupt_after_a_mismatch_and_before_its_headers_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with groups(2) as made:
        everybody(made, total)

        everybody(made, lambda group: total(group, 3 + group.rank))  # compile after_mismatch now
        forget, interrupted = engine.after_mismatch.call, made[0].backend.context.address

        def call(context: int) -> int:
            if context == interrupted:
                raise KeyboardInterrupt
            return forget(context)

        monkeypatch.setattr(engine.after_mismatch, "call", call)
        errors = everybody(made, lambda group: total(group, 3 + group.rank))
        assert [type(error) for error in errors] == [KeyboardInterrupt, MismatchError]
        again = everybody(made, total)
        assert all(isinstance(error, AbortedError) and error.ranks == (0,) for error in again), again
        assert "KeyboardInterrupt" in str(again[1])


def test_an_interrupt_while_connections_are_made_fails_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with groups(2) as made:

        def interrupted(*_: object) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr(made[0].backend._mesh, "data", interrupted)
        errors = everybody(made, total)
        assert type(errors[0]) is KeyboardInterrupt
        assert isinstance(errors[1], AbortedError)
        assert errors[1].ranks == (0,)


def test_an_exception_after_a_complete_call_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler's exception is raised by the first line after the compiled call."""
    run = engine.collective.call
    with groups(2) as made:
        everybody(made, total)
        address = made[0].backend.context.address

        def then_interrupted(context: int, *rest: object) -> int:
            code = run(context, *rest)
            if context & ~(words.RESUMED | words.MAY_RETURN_EARLY) == address and code == DONE:
                raise KeyboardInterrupt
            return code

        monkeypatch.setattr(engine.collective, "call", then_interrupted)
        errors = everybody(made, total)
        monkeypatch.setattr(engine.collective, "call", run)
        if type(errors[0]) is KeyboardInterrupt:
            assert errors[1] == 3.0
        assert everybody(made, total) == [3.0] * 2


@pytest.mark.parametrize("count", [3, 1_000_000])
def test_abort_from_another_thread_ends_the_call_everywhere(count: int) -> None:
    """While a rank is missing, and in the middle of the data."""
    with ProxiedStore(hold=1 << 20) as store, groups(3, store) as made:
        everybody(made, total)
        waiting = made if count > 3 else made[:2]

        def abort() -> None:
            store.await_held() if count > 3 else until(lambda: all(group.gate.is_busy() for group in waiting))
            made[0].abort("had enough")

        for error in everybody(waiting, lambda group: total(group, count), abort)[:-1]:
            assert isinstance(error, AbortedError), error
            assert "had enough" in str(error)
            assert "rank 0" in str(error)


def test_close_while_another_thread_is_in_a_call() -> None:
    with groups(2) as made:
        everybody(made, total)
        errors = together(lambda: total(made[0]), lambda: until(made[0].gate.is_busy) and made[0].close())
        assert isinstance(errors[0], AbortedError)
        with pytest.raises((AbortedError, NotInitializedError)):
            made[0].fast.barrier()
        # Rank 0 had sent its data, so the other rank may succeed.
        with pytest.raises(AbortedError, match="rank 0"):
            [total(made[1]) for _ in range(2)]


# ---- calls that are prepared once ---------------------------------------------------------------------


def test_the_oldest_prepared_calls_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_MOST", 5)
    with groups(2) as made:
        for _ in range(2):
            for count in range(1, 9):
                assert everybody(made, lambda group, count=count: total(group, count)) == [3.0] * 2
        for group in made:
            assert [key[4] for key in group.backend._prepared] == [(8 * count,) for count in range(4, 9)]


def test_threads_prepare_while_others_call() -> None:
    with groups(2) as made:

        def several(group: ProcessGroup) -> list[float]:
            """Run two threads of a rank, whose calls are alike, so that their order does not matter."""
            return together(*[lambda: [total(group, 50_000) for _ in range(10)]] * 2)

        assert everybody(made, several) == [[[3.0] * 10] * 2] * 2


def test_elements_too_large_to_be_reduced_are_refused() -> None:
    huge = np.dtype([("numbers", "f8", (40_000,))])
    with groups(2) as made:
        errors = everybody(made, lambda group: group.fast.all_reduce(np.zeros(1, huge), ReduceOp.custom(max)))
        assert all(isinstance(error, ArrayError) and "320000 bytes" in str(error) for error in errors), errors
        assert everybody(made, total) == [3.0] * 2


def test_a_rank_without_descriptors_fails_all_ranks_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a collective, for which the lower rank dials, and in a message."""

    def exhausted(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(dials, "PORTLESS_SECONDS", 0.0)
    monkeypatch.setattr(dials, "raise_limit", lambda what: False)
    calls: list[Callable[[ProcessGroup], Any]] = [
        lambda group: group.fast.all_reduce(np.ones(4)),
        lambda group: group.fast.recv(np.ones(4), 0) if group.rank else group.fast.send(np.ones(4), 1),
    ]
    for call in calls:
        with groups(2) as made, monkeypatch.context() as patch:
            patch.setattr(dials.Dial, "_try", exhausted)
            first, second = everybody(made, call)
        assert isinstance(first, ResourceError)
        assert isinstance(second, AbortedError)
        for error in (first, second):
            assert "no file descriptor is left to process" in str(error)
            assert "raise it before the start (ulimit -n" in str(error)


@pytest.mark.parametrize("is_raised", [True, False])
def test_a_group_lacks_a_last_descriptor(is_raised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that lacks it raises its limit. If it cannot, it tells the other rank, which has made the group."""
    lacks, make = iter([True]), os.eventfd

    def eventfd(*args: int) -> int:
        if next(lacks, False):
            raise OSError(errno.EMFILE, "Too many open files")
        return make(*args)

    monkeypatch.setattr(os, "eventfd", eventfd)
    monkeypatch.setattr(pipe, "raise_limit", lambda what: is_raised)
    if is_raised:
        with groups(2) as made:
            assert everybody(made, lambda group: group.fast.barrier()) == [None, None]
        return
    shared, known = HashStore(), crew(2)
    made = together(*(lambda r=r: TcpBackend.make(shared, "WORLD", known, r, 60.0) for r in range(2)))
    assert sorted(type(each).__name__ for each in made) == ["ResourceError", "TcpBackend"]
    group = next(ProcessGroup(each) for each in made if isinstance(each, TcpBackend))
    with pytest.raises(AbortedError, match="no file descriptor is left"):
        group.fast.barrier()
    group.close()


def test_a_rank_that_cannot_accept_a_connection_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = ResourceError("cannot take a connection: no file descriptor is left")
    with groups(2) as made:
        monkeypatch.setattr(Listener, "lack", lambda listener: lacking)
        with pytest.raises(ResourceError, match="cannot take a connection"):
            made[1].fast.all_reduce(np.ones(4))  # rank 0, which dials, does not make this call
        with pytest.raises(AbortedError, match="no file descriptor is left"):
            made[0].fast.all_reduce(np.ones(4))


# ---- ranks that run ahead of the others ------------------------------------------------------------------


def spread(group: ProcessGroup, value: float) -> float:
    """Return the contents of the array after a broadcast from rank 0."""
    x = np.full(3, float(value) if group.rank == 0 else -1.0)
    group.fast.broadcast(x, 0)
    return float(x[0])


@pytest.mark.parametrize("n", [2, 3])
def test_data_that_a_root_sent_before_it_left_arrives(n: int) -> None:
    with groups(n) as made:
        everybody(made, lambda group: spread(group, 7))  # from the second call on, the root returns early
        for value in range(5):
            spread(made[0], value)
        found = everybody(made[1:], lambda group: [spread(group, -1) for _ in range(5)], made[0].close)
        assert found == [[0.0, 1.0, 2.0, 3.0, 4.0]] * (n - 1) + [None]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_data_of_ranks_that_left_arrives_at_ranks_that_are_later_still(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that left have not waited for the others; the first bytes that a late rank sends reset the connections."""
    monkeypatch.setattr("fastcoll.net.tcp.backend._CLOSE_SECONDS", 0.0)

    def sums(group: ProcessGroup) -> list[float]:
        made = [np.full(1, group.rank + 10.0 * turn) for turn in range(3)]
        for x in made:
            group.fast.reduce(x, 0)
        return [float(x[0]) for x in made]

    def spreads(group: ProcessGroup) -> list[float]:
        return [spread(group, value) for value in range(3)]

    with groups(n) as made:
        everybody(made, sums)  # from the second call on, the senders return early
        everybody(made[1:], lambda group: (sums(group), group.close()))
        assert sums(made[0]) == [sum(rank + 10.0 * turn for rank in range(n)) for turn in range(3)]
    with groups(n) as made:
        everybody(made, spreads)
        spreads(made[0])
        made[0].close()
        assert everybody(made[1:], spreads) == [[0.0, 1.0, 2.0]] * (n - 1)


@pytest.mark.parametrize("n", [2, 3])
def test_a_mismatch_that_is_found_late_interrupts_no_operation_of_several_calls(n: int) -> None:
    """The other ranks, which have raised it before, carry out all calls of the operation, and wait for this one."""

    def reduced(group: ProcessGroup) -> tuple[list[float], MismatchError | None]:
        tree = [np.ones(3), np.ones(3, "i8")]  # one call for each dtype
        error = None
        try:
            group.fast.all_reduce(tree)
        except MismatchError as caught:
            error = caught
        return [float(x[0]) for x in tree], error

    with groups(n) as made:
        everybody(made, lambda group: spread(group, 7))
        *reported, _ = everybody(made[1:], lambda group: group.fast.barrier(), lambda: spread(made[0], 1))
        (first, late), *others = everybody(made, reduced)
        assert [first, *others] == [[n, n], *[([n, n], None)] * (n - 1)]
        assert str(late).startswith(str(reported[0]))
        assert everybody(made, lambda group: len(group.fast.all_gather(np.ones(2)))) == [n] * n


@pytest.mark.parametrize(
    "call",
    [
        lambda group, found: objects.all_gather_object(found, "x", group),
        lambda group, found: objects.gather_object(
            "x", None if group.rank else found, group=group, group_dst=0
        ),
        lambda group, found: objects.broadcast_object_list(found, group=group, group_src=0),
        lambda group, found: objects.scatter_object_list(
            found, None if group.rank else "xy", group=group, group_src=0
        ),
    ],
    ids=["all_gather", "gather", "broadcast", "scatter"],
)
def test_a_mismatch_that_is_found_late_interrupts_no_operation_on_objects(call: Callable[..., None]) -> None:
    with groups(2) as made:
        everybody(made, lambda group: spread(group, 7))
        everybody(made[1:], lambda group: group.fast.barrier(), lambda: spread(made[0], 1))
        late, right = everybody(made, lambda group: call(group, [None, None]))
        assert isinstance(late, MismatchError)
        assert right is None
        assert everybody(made, lambda group: call(group, [None, None])) == [None, None]


@pytest.mark.parametrize("n", [2, 3])
def test_a_root_reports_a_mismatch_after_the_others_have_left(n: int) -> None:
    with groups(n) as made:
        everybody(made, lambda group: spread(group, 7))
        *reported, right = everybody(made[1:], lambda group: group.fast.barrier(), lambda: spread(made[0], 1))
        assert right == 1.0
        assert all(isinstance(error, MismatchError) for error in reported), reported
        everybody(made[1:], lambda group: group.close())
        with pytest.raises(MismatchError) as caught:
            made[0].fast.barrier()
        assert str(caught.value) == str(reported[0])
        assert "rank 0 called broadcast(float64, 3 elements, root=0)" in str(reported[0])
        with pytest.raises(AbortedError, match="left"):
            made[0].fast.barrier()


@pytest.mark.parametrize("n", [2, 3])
def test_a_root_reports_a_refused_call_with_its_reason(n: int) -> None:
    with groups(n) as made:
        everybody(made, lambda group: spread(group, 7))

        everybody(made[1:], lambda group: group.fast.broadcast(np.zeros(3), n), lambda: spread(made[0], 1))
        errors = everybody(made, lambda group: group.fast.barrier())
        assert isinstance(errors[0], MismatchError)
        assert f"rank 1's broadcast was refused: UsageError: src is {n}" in str(errors[0])
        assert errors[1:] == [None] * (n - 1)
        assert everybody(made, lambda group: spread(group, 2)) == [2.0] * n
