"""Every failure around NCCL becomes an error on every rank; nothing hangs or is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from messages.worlds import until
from together import together

from fastcoll import ReduceOp
from fastcoll.core.operation import Operation
from fastcoll.errors import (
    AbortedError,
    ArrayError,
    CollectiveTimeoutError,
    GroupError,
    MismatchError,
    NotInitializedError,
    PeerDiedError,
    UnavailableError,
    UsageError,
)
from fastcoll.gpu.nccl import communicator, direction
from fastcoll.gpu.nccl.communicator import Communicator, RankInfo, check_ranks

from .fake_array import FakeArray
from .nccl_mail_world import mail_world
from .nccl_world import Ranks, ThreadGroup, assert_ends, ones, world


class Calls:
    """Collectives: rank 0 makes a call that rank 1 does not join."""

    world, function = staticmethod(world), "ncclAllReduce"
    found = "all_reduce failed with status 4"
    hangs = r"all_reduce\(float32, 3 elements\) on GPU 0, call 2"

    @staticmethod
    def call(ranks: Any) -> Any:
        return lambda rank, group: group.all_reduce(ones(ranks, rank))

    @staticmethod
    def meet(ranks: Any) -> None:
        """Make the first call, so that one rank alone may then make the same."""
        ranks.run(Calls.call(ranks))

    @staticmethod
    @contextmanager
    def half_way(ranks: Any) -> Iterator[Any]:
        yield alone(ranks)


class Messages:
    """A message is queued on both GPUs, but the sender's stream does not reach it."""

    world, function = staticmethod(mail_world), "ncclSend"
    found = "send failed with status 4"
    hangs = r"(send to rank 1|recv from rank 0) .*"  # the first one to fail publishes its error to the other

    @staticmethod
    def call(ranks: Any) -> Any:
        def does(rank: int, group: Any) -> None:
            group.recv(ones(ranks, 1), 0) if rank else group.send(ones(ranks, 0), 1)

        return does

    @staticmethod
    def meet(ranks: Any) -> None:
        """Send a message in each direction, so that there are communicators."""

        def does(rank: int, group: Any) -> None:
            works = [group.isend(ones(ranks, rank), 1 - rank), group.irecv(ones(ranks, rank), 1 - rank)]
            for work in works:
                work.wait(timeout=60)

        ranks.run(does)

    @staticmethod
    @contextmanager
    def half_way(ranks: Any) -> Iterator[Any]:
        gate, stream = threading.Event(), ranks.gpu.new_stream(0)

        def does(rank: int, group: Any) -> Any:
            if rank:
                work = group.irecv(ones(ranks, 1), 0)
            else:
                ranks.gpu.queue("kernel", stream, lambda: [gate.wait(60)][:0])
                work = group.isend(ranks.array(0, np.ones(3, np.float32), stream), 1)
            work.wait()
            return work

        try:
            yield ranks.attempt(does)[1]
        finally:
            gate.set()
            ranks.gpu.end_stream(stream)


BOTH = pytest.mark.parametrize("kind", [Calls, Messages])
meet = Calls.meet


def alone(ranks: Ranks) -> Any:
    """Make rank 0's call, which no other rank joins."""
    with ranks.gpu.on(0):
        return ranks.groups[0].all_reduce(ones(ranks, 0), async_op=True)


# ---- collectives and messages alike --------------------------------------------------------------------


@BOTH
def test_a_communicator_that_cannot_be_made_fails_the_group(kind: Any) -> None:
    with kind.world(2) as ranks:
        ranks.nccl.statuses["ncclCommInitRankConfig"] = 5
        errors = ranks.attempt(kind.call(ranks))
        assert all(isinstance(error, AbortedError) for error in errors), errors
        assert "failed with status 5: error 5; what it was" in str(ranks.meeting.failures[0])
        assert all(group.failure is not None for group in ranks.groups)


@BOTH
def test_a_peer_that_dies_while_the_communicator_is_made_is_named(kind: Any) -> None:
    with kind.world(2) as ranks:
        ranks.nccl.absent = {1}
        ranks.meeting.died = [1]
        errors = ranks.attempt(kind.call(ranks))
        for error in errors if kind is Calls else errors[:1]:
            assert isinstance(error, PeerDiedError)
            assert error.ranks == (1,)


def test_a_death_must_be_seen_twice_in_a_row_while_a_communicator_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(communicator, "_LOOK", 0.0)
    death = PeerDiedError("rank 1 died", [1])
    found = iter([death, None, death, death])
    group: Any = SimpleNamespace(failure=None, timeout=60.0)
    backoff = communicator.Backoff(group, lambda doing: next(found))
    for _ in range(3):
        backoff("creating a communicator", 0.0)
    with pytest.raises(PeerDiedError):
        backoff("creating a communicator", 0.0)


@BOTH
def test_a_communicator_that_never_gets_ready_runs_into_the_groups_timeout(kind: Any) -> None:
    def gives_up() -> None:
        until(lambda: len(ranks.nccl.comms) == 2)
        ranks.give_up_after(0.5)

    with kind.world(2) as ranks:
        ranks.nccl.absent = {1}
        errors, _ = together(lambda: ranks.attempt(kind.call(ranks)), gives_up)
        assert all(isinstance(error, GroupError) for error in errors), errors
        first = ranks.meeting.failures[0]
        assert isinstance(first, CollectiveTimeoutError)
        assert "creating a communicator: NCCL was not complete within 0.5 s" in str(first)
        assert ranks.nccl.calls.count("ncclCommAbort") == 2


@BOTH
def test_an_operation_that_nccl_refuses_fails_the_group_on_all_ranks(kind: Any) -> None:
    with kind.world(2) as ranks:
        kind.meet(ranks)
        ranks.nccl.statuses[kind.function] = 4
        errors = ranks.attempt(kind.call(ranks))
        assert isinstance(errors[0], AbortedError)
        until(lambda: all(group.failure is not None for group in ranks.groups))
        assert kind.found in str(ranks.meeting.failures[0])
        errors = ranks.attempt(kind.call(ranks))
        assert all(isinstance(error, AbortedError) for error in errors), errors


@BOTH
def test_an_asynchronous_error_ends_outstanding_work(kind: Any) -> None:
    with kind.world(2) as ranks:
        kind.meet(ranks)
        with kind.half_way(ranks) as work:
            assert not work.is_completed()
            ranks.nccl.break_network()
            assert_ends(work, AbortedError, "communication failed with status 6")
            with pytest.raises(AbortedError):
                alone(ranks)


@BOTH
def test_a_lost_peer_is_named(kind: Any) -> None:
    with kind.world(2) as ranks:
        kind.meet(ranks)
        with kind.half_way(ranks) as work:
            ranks.meeting.died = [1 if kind is Calls else 0]
            assert_ends(work, PeerDiedError, f"rank {ranks.meeting.died[0]} .*died")


@BOTH
def test_hanging_work_fails_at_the_groups_timeout(kind: Any) -> None:
    with kind.world(2) as ranks:
        kind.meet(ranks)
        with kind.half_way(ranks) as work:
            with pytest.raises(CollectiveTimeoutError, match=r"not complete after 0.01 s"):
                work.wait(timeout=0.01)
            assert all(group.failure is None for group in ranks.groups)
            ranks.give_up_after(0.3)
            assert_ends(
                work, GroupError, kind.hangs + " is not complete after 0.3 s: a rank has not called it"
            )
            assert isinstance(ranks.meeting.failures[0], CollectiveTimeoutError)


@BOTH
def test_destroying_with_hanging_work_ends_at_the_timeout(kind: Any) -> None:
    with kind.world(2) as ranks:
        kind.meet(ranks)
        with kind.half_way(ranks) as work:
            ranks.give_up_after(0.3)
            assert together(ranks.groups[0 if kind is Calls else 1].close) == [None]
            assert_ends(work, GroupError, "is not complete after 0.3 s")


# ---- collectives ---------------------------------------------------------------------------------------


def test_abort_ends_outstanding_work_and_twice_is_fine() -> None:
    with world(2) as ranks:
        meet(ranks)
        work = alone(ranks)
        for _ in range(2):
            ranks.groups[0].abort("enough")
        assert_ends(work, AbortedError, "enough")
        assert ranks.nccl.calls.count("ncclCommAbort") == 1


def test_destroying_waits_for_outstanding_work() -> None:
    hosts = [np.full(5, rank + 1.0, np.float32) for rank in range(2)]

    def does(rank: int, group: ThreadGroup) -> None:
        group.all_reduce(ranks.array(rank, hosts[rank]))
        group.close()
        group.close()
        with pytest.raises(NotInitializedError):
            group.all_reduce(ones(ranks, rank))

    with world(2) as ranks:
        ranks.run(does)
        assert ranks.nccl.calls.count("ncclCommDestroy") == 2
        assert "ncclCommAbort" not in ranks.nccl.calls
    assert all((host == 3).all() for host in hosts)


def test_destroying_does_not_wait_for_peers_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "_FINALIZE_SECONDS", 0.05)
    with world(2) as ranks:
        meet(ranks)
        ranks.groups[0].close()
        assert ranks.nccl.calls.count("ncclCommAbort") == 1


def test_an_interrupted_call_fails_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with world(1) as ranks:
        meet(ranks)
        monkeypatch.setattr(Communicator, "queue", interrupted)
        with pytest.raises(KeyboardInterrupt):
            alone(ranks)
        assert "KeyboardInterrupt" in str(ranks.groups[0].failure)


def test_a_signal_handler_may_not_use_the_group_whose_call_it_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with world(1) as ranks:
        meet(ranks)
        before = Communicator.queue

        def interrupted(*args: Any) -> None:
            with pytest.raises(UsageError, match="a signal handler may not use the group"):
                alone(ranks)
            before(*args)

        monkeypatch.setattr(Communicator, "queue", interrupted)
        alone(ranks).wait(timeout=60)


# ---- messages -----------------------------------------------------------------------------------------


def test_a_communicator_created_after_the_failure_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Communicator.make

    def late(*args: Any) -> Communicator:
        made = make(*args)
        for group in ranks.groups:
            group.abort("enough")
            group.devices().abort()
        return made

    with mail_world(2) as ranks:
        monkeypatch.setattr(Communicator, "make", late)
        errors = ranks.attempt(Messages.call(ranks))
        assert all(isinstance(error, AbortedError) for error in errors), errors
        until(lambda: len(ranks.nccl.comms) == 2 and all(comm.aborted for comm in ranks.nccl.comms))


def test_a_message_that_nobody_receives_runs_into_the_groups_timeout() -> None:
    with mail_world(2, timeout=0.3) as ranks:
        with ranks.gpu.on(0):
            work = ranks.groups[0].isend(ones(ranks, 0), 1, 6)
        with pytest.raises(
            CollectiveTimeoutError, match=r"send to rank 1 .*, tag 6.* within the timeout of 0\.3 s"
        ):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()


def test_a_peer_that_dies_before_it_receives_is_named() -> None:
    with mail_world(2) as ranks:
        with ranks.gpu.on(0):
            work = ranks.groups[0].isend(ones(ranks, 0), 1)
        ranks.meeting.died = [1]
        with pytest.raises(PeerDiedError, match="rank 1"):
            work.wait()


def test_abort_ends_messages_in_every_state() -> None:
    with mail_world(2) as ranks:
        Messages.meet(ranks)
        with Messages.half_way(ranks) as received:
            with ranks.gpu.on(1):
                unmatched = [
                    ranks.groups[1].isend(ones(ranks, 1), 0),
                    ranks.groups[1].irecv(ones(ranks, 1), None, 5),
                ]
                itself = ranks.groups[1].isend(ones(ranks, 1), 1, 9)
            for _ in range(2):
                ranks.groups[1].abort("enough")
            for work in (received, *unmatched, itself):
                assert_ends(work, AbortedError, "enough")
            for group, rank in zip(ranks.groups, range(2), strict=True):
                until(lambda group=group: group.failure is not None)
                with pytest.raises(AbortedError, match="enough"):
                    group.isend(ones(ranks, rank), 1 - rank)


@pytest.mark.parametrize("name", ["send", "recv"])
def test_an_interrupted_message_fails_the_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    with mail_world(2) as ranks:
        monkeypatch.setattr(direction.NcclMessage, "_order", interrupted)
        with ranks.gpu.on(0), pytest.raises(KeyboardInterrupt):
            getattr(ranks.groups[0], name)(ones(ranks, 0), 1)
        assert "rank 0: KeyboardInterrupt" in str(ranks.groups[0].failure)


def test_an_error_while_a_message_is_posted_leaves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with mail_world(2) as ranks:
        with ranks.gpu.on(0):
            x = ones(ranks, 0)
            group = ranks.groups[0]
            monkeypatch.setattr(group.p2p, "post_send", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                group.isend(x, 1)
        assert "ZeroDivisionError" in str(group.failure)
        assert not len(ranks.mail(0)._posted)


def test_destroying_waits_for_queued_work_and_ends_communicators_in_order() -> None:
    hosts = [np.full(5, rank + 1, np.float32) for rank in range(2)]

    def does(rank: int, group: Any) -> Any:
        x = ranks.array(rank, hosts[rank])
        group.send(x, 1) if rank == 0 else group.recv(x, 0)
        left = group.irecv(ones(ranks, rank), None, 4)
        group.send(ones(ranks, rank), rank, 8)  # never received
        group.close()
        group.close()
        with pytest.raises(NotInitializedError):
            group.isend(ones(ranks, rank), 1 - rank)
        return left

    with mail_world(2) as ranks:
        for work in ranks.attempt(does):
            assert_ends(work, AbortedError, "destroyed before the message was complete")
        assert ranks.nccl.calls.count("ncclCommDestroy") == 2
        assert "ncclCommAbort" not in ranks.nccl.calls
    assert (hosts[1] == 1).all()


def test_destroying_many_directions_does_not_wait_one_after_the_other() -> None:
    def does(rank: int, group: Any) -> None:
        peers = [peer for peer in range(4) if peer != rank]
        works = [group.isend(ones(ranks, rank), peer) for peer in peers]
        works += [group.irecv(ones(ranks, rank), peer) for peer in peers]
        for work in works:
            work.wait()

    with mail_world(4) as ranks:
        ranks.run(does)
        ranks.close()
        assert ranks.nccl.calls.count("ncclCommDestroy") == 24
        assert "ncclCommAbort" not in ranks.nccl.calls  # no wait had to be aborted


def test_a_message_without_a_receive_ends_when_the_group_does() -> None:
    with mail_world(2) as ranks:
        with ranks.gpu.on(0):
            work = ranks.groups[0].isend(ones(ranks, 0), 1)
        ranks.groups[0].close()
        assert_ends(work, AbortedError, "destroyed before the message was complete")


# ---- calls that do not match ---------------------------------------------------------------------------


def both(ranks: Ranks, *calls: Callable[[ThreadGroup], Any]) -> list[str]:
    """Make a different call on each rank; return their errors."""
    errors = ranks.attempt(lambda rank, group: calls[rank](group))
    assert all(isinstance(error, MismatchError) for error in errors), errors
    return [str(error) for error in errors]


def test_calls_that_differ_are_found_on_all_ranks_and_the_group_goes_on() -> None:
    with world(2) as ranks:
        texts = both(
            ranks,
            lambda group: group.all_reduce(ones(ranks, 0)),
            lambda group: group.broadcast(ones(ranks, 1), 0),
        )
        for text in texts:
            assert "rank 0 called all_reduce(float32, 3 elements, op=SUM)" in text
            assert "rank 1 called broadcast(float32, 3 elements, root=0)" in text
        texts = both(
            ranks,
            lambda group: group.all_reduce(ones(ranks, 0, 4)),
            lambda group: group.all_reduce(ones(ranks, 1, 5)),
        )
        assert "4 elements" in texts[0]
        meet(ranks)


def test_a_known_operation_of_other_sizes_is_compared_again() -> None:
    def gather(rank: int, count: int) -> Callable[[ThreadGroup], Any]:
        return lambda group: group.all_gather(
            [ones(ranks, rank, count) for _ in range(2)], ones(ranks, rank, count)
        )

    with world(2) as ranks:
        ranks.run(lambda rank, group: gather(rank, 3)(group))
        texts = both(ranks, gather(0, 4), gather(1, 5))
        assert "rank 1 sends 20 bytes to rank 0, which expects 16" in texts[0]


def test_sizes_that_do_not_fit_are_named() -> None:
    def exchange(rank: int, sent: int) -> Callable[[ThreadGroup], Any]:
        gives = [ones(ranks, rank, 1 if peer == rank else sent) for peer in range(2)]
        takes = [ones(ranks, rank, 1 if peer == rank else 2) for peer in range(2)]
        return lambda group: group.all_to_all(takes, gives)

    with world(2) as ranks:
        texts = both(ranks, exchange(0, 2), exchange(1, 3))
        assert "all_to_all: rank 1 sends 12 bytes to rank 0, which expects 8" in texts[0]


def test_a_skipped_call_is_detected_at_the_next_new_one() -> None:
    with world(2) as ranks:
        meet(ranks)
        work = alone(ranks)
        texts = both(ranks, *[lambda group, r=r: group.broadcast(ones(ranks, r), 0) for r in range(2)])
        assert "is rank 0 its call 3, rank 1 its call 2: a rank has skipped an earlier call" in texts[0]
        ranks.give_up_after(0.3)
        assert_ends(work, CollectiveTimeoutError, "not complete")


def test_calls_of_a_known_kind_do_not_meet_on_the_host() -> None:
    with world(2) as ranks:
        meet(ranks)
        before = [group.backend.calls for group in ranks.groups]
        meet(ranks)
        assert [group.backend.calls for group in ranks.groups] == before


def test_a_call_may_be_part_of_one_of_the_groups_own() -> None:
    """For example when a carrier chooses NCCL in the middle of its first call."""
    hosts = [np.ones(3, np.float32) for _ in range(2)]

    def does(rank: int, group: ThreadGroup) -> None:
        x = group.import_array(ranks.array(rank, hosts[rank]), writable=True)
        call: Any = group.planned(Operation("all_reduce", (x.array,), (x.array,), ReduceOp.SUM))
        group.run("outer", lambda: call.start("inner", ()).join(), (), False)
        assert hosts[rank].tolist() == [2, 2, 2]

    with world(2) as ranks:
        ranks.run(does)


# ---- GPUs ----------------------------------------------------------------------------------------------


def test_ranks_that_share_a_gpu_are_refused_with_the_cure() -> None:
    def does(rank: int, group: ThreadGroup) -> None:
        for _ in range(2):
            with pytest.raises(UnavailableError, match=r"ranks 0 and 1 of .* use one GPU.*'auto' or 'shm'"):
                group.all_reduce(ones(ranks, rank))
        assert group.failure is None

    with world(2, devices=1) as ranks:
        ranks.run(does)


def test_rank_infos() -> None:
    def info(gpu: int, version: int = 22005, host: bytes = b"", shares: bool = False) -> RankInfo:
        return RankInfo(bytes([gpu]) * 16, host.ljust(8), version, shares, b"\1" * 128)

    assert RankInfo.from_array(info(3, shares=True).to_array()) == info(3, shares=True)
    check_ranks([info(1), info(2), info(1, host=b"other")], [0, 1, 2], "g")
    check_ranks([info(1, shares=True), info(1, shares=True)], [0, 1], "g")
    with pytest.raises(UnavailableError, match="ranks 4 and 9 of g use one GPU"):
        check_ranks([info(1), info(2), info(1)], [4, 7, 9], "g")
    with pytest.raises(UnavailableError, match=r"different versions of NCCL \(rank 0 22005, rank 1 22108\)"):
        check_ranks([info(1), info(2, 22108)], [0, 1], "g")


def test_a_group_works_on_one_gpu_of_a_process() -> None:
    with world(1, devices=2) as ranks:
        meet(ranks)
        x = np.ones(3, np.float32)
        ranks._kept.append(x)
        ranks.gpu.place(x, 1)
        with pytest.raises(ArrayError, match="works on GPU 0, that of its first array"):
            ranks.groups[0].all_reduce(FakeArray(x))
