"""Every failure around NCCL becomes an error on every rank; nothing hangs or is left behind."""

from __future__ import annotations

import re
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
from fastcoll.core.group import ProcessGroup
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

from .nccl_world import NcclRanks, assert_ends, world
from .thread_ranks import ones


class Calls:
    """Collectives: rank 0 makes a call that rank 1 does not join."""

    function = "ncclAllReduce"
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

    function = "ncclSend"
    found = "send failed with status 4"
    hangs = r"(send to rank 1|recv from rank 0) .*"  # the first one to fail publishes its error to the other

    @staticmethod
    def call(ranks: Any) -> Any:
        return lambda rank, group: (group.recv if rank else group.send)(ones(ranks, rank), 1 - rank)

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
        with ranks.gpu.on(0):
            ranks.gpu.queue("kernel", stream, lambda: [gate.wait(60)][:0])
        late = ranks.array(0, np.ones(3, np.float32), stream)

        def does(rank: int, group: Any) -> Any:
            work = group.irecv(ones(ranks, 1), 0) if rank else group.isend(late, 1)
            work.wait()
            return work

        try:
            yield ranks.attempt(does)[1]
        finally:
            gate.set()
            ranks.gpu.end_stream(stream)


BOTH = pytest.mark.parametrize("kind", [Calls, Messages])
meet = Calls.meet


@contextmanager
def met(kind: Any = Calls, size: int = 2) -> Iterator[Any]:
    """A world whose ranks have made a call, or sent messages."""
    with world(size) as ranks:
        kind.meet(ranks)
        yield ranks


def alone(ranks: NcclRanks) -> Any:
    """Make rank 0's call, which no other rank joins."""
    with ranks.gpu.on(0):
        return ranks.groups[0].all_reduce(ones(ranks, 0), async_op=True)


def sent(ranks: NcclRanks, tag: int = 0) -> Any:
    """Send a message from rank 0, which rank 1 does not receive."""
    with ranks.gpu.on(0):
        return ranks.groups[0].isend(ones(ranks, 0), 1, tag)


def fail_all(ranks: NcclRanks, kind: Any) -> list[Any]:
    """Make a call on each rank; return the errors with which the group fails."""
    errors = ranks.attempt(kind.call(ranks))
    assert all(isinstance(error, GroupError) for error in errors), errors
    return errors


# ---- collectives and messages alike --------------------------------------------------------------------


@BOTH
def test_a_communicator_that_cannot_be_made_fails_the_group(kind: Any) -> None:
    with world(2) as ranks:
        ranks.nccl.statuses["ncclCommInitRankConfig"] = 5
        assert {type(error) for error in fail_all(ranks, kind)} == {AbortedError}
        assert "failed with status 5: error 5; what it was" in ranks.failure(AbortedError)
        assert all(group.failure is not None for group in ranks.groups)


@BOTH
def test_a_peer_that_dies_while_the_communicator_is_made_is_named(kind: Any) -> None:
    with world(2) as ranks:
        ranks.nccl.absent, ranks.died = {1}, [1]
        error, _ = ranks.attempt(kind.call(ranks))
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
        ranks.give_up_after(0.1)

    with world(2) as ranks:
        ranks.nccl.absent = {1}
        together(lambda: fail_all(ranks, kind), gives_up)
        text = ranks.failure(CollectiveTimeoutError)
        assert "creating a communicator: NCCL was not complete within 0.1 s" in text
        assert ranks.nccl.calls.count("ncclCommAbort") == 2


@BOTH
def test_an_operation_that_nccl_refuses_fails_the_group_on_all_ranks(kind: Any) -> None:
    with met(kind) as ranks:
        ranks.nccl.statuses[kind.function] = 4
        assert isinstance(ranks.attempt(kind.call(ranks))[0], AbortedError)
        until(lambda: all(group.failure is not None for group in ranks.groups))
        assert kind.found in ranks.failure(AbortedError)
        assert {type(error) for error in fail_all(ranks, kind)} == {AbortedError}


@BOTH
def test_an_asynchronous_error_ends_outstanding_work(kind: Any) -> None:
    with met(kind) as ranks, kind.half_way(ranks) as work:
        assert not work.is_completed()
        ranks.nccl.break_network()
        assert_ends(work, AbortedError, "communication failed with status 6")
        with pytest.raises(AbortedError):
            alone(ranks)


@BOTH
def test_a_lost_peer_is_named(kind: Any) -> None:
    with met(kind) as ranks, kind.half_way(ranks) as work:
        ranks.died = [1 if kind is Calls else 0]
        assert_ends(work, PeerDiedError, f"rank {ranks.died[0]} .*died")


@BOTH
@pytest.mark.parametrize("destroyed", [False, True])
def test_hanging_work_fails_at_the_groups_timeout(kind: Any, destroyed: bool) -> None:
    with met(kind) as ranks, kind.half_way(ranks) as work:
        with pytest.raises(CollectiveTimeoutError, match=r"not complete after 0.01 s"):
            work.wait(timeout=0.01)
        assert all(group.failure is None for group in ranks.groups)
        ranks.give_up_after(0.1)
        if destroyed:
            assert together(ranks.groups[0 if kind is Calls else 1].close) == [None]
        assert_ends(work, GroupError, kind.hangs + " is not complete after 0.1 s: a rank has not called it")
        assert "not complete" in ranks.failure(CollectiveTimeoutError)


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["all_reduce", "send", "recv"])
def test_an_interrupted_call_fails_the_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with met() as ranks:
        monkeypatch.setattr(Communicator, "queue", interrupted)
        monkeypatch.setattr(direction.NcclMessage, "order_streams", interrupted)
        with ranks.gpu.on(0), pytest.raises(KeyboardInterrupt):
            getattr(ranks.groups[0], name)(ones(ranks, 0), *([] if name == "all_reduce" else [1]))
        assert "rank 0: KeyboardInterrupt" in str(ranks.groups[0].failure)


@BOTH
def test_cancelled_work_never_counts_as_finished(kind: Any) -> None:
    with met(kind) as ranks, kind.half_way(ranks) as work:
        abort = ranks.nccl.ncclCommAbort

        def end_the_work_first(handle: Any) -> int:
            status = int(abort(handle))
            until(work.is_completed)
            return status

        ranks.nccl.ncclCommAbort = end_the_work_first
        for group in ranks.groups:
            group.abort("enough")
        assert_ends(work, AbortedError, "enough")


# ---- collectives ---------------------------------------------------------------------------------------


def test_abort_ends_outstanding_work_and_twice_is_fine() -> None:
    with met() as ranks:
        work = alone(ranks)
        for _ in range(2):
            ranks.groups[0].abort("enough")
        assert_ends(work, AbortedError, "enough")
        # The work ends first, so that it never looks finished.
        until(lambda: ranks.nccl.calls.count("ncclCommAbort") == 1)


def test_destroying_waits_for_outstanding_work() -> None:
    hosts = [np.full(5, rank + 1.0, np.float32) for rank in range(2)]

    def does(rank: int, group: ProcessGroup) -> None:
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
    with met() as ranks:
        monkeypatch.setattr(communicator, "_FINALIZE_SECONDS", 0.05)
        ranks.groups[0].close()
        assert ranks.nccl.calls.count("ncclCommAbort") == 1


def test_a_signal_handler_may_not_use_the_group_whose_call_it_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = Communicator.queue

    def handler(*args: Any) -> None:
        with pytest.raises(UsageError, match="a signal handler may not use the group"):
            alone(ranks)
        before(*args)

    with met(Calls, 1) as ranks:
        monkeypatch.setattr(Communicator, "queue", handler)
        alone(ranks).wait(timeout=60)


def test_communicators_are_aborted_at_the_same_time() -> None:
    """An abort may wait for the GPU until another communicator is aborted."""
    with met() as ranks:
        Messages.meet(ranks)
        # A rank has a communicator for collectives, and two for messages.
        own, abort = threading.Barrier(3), ranks.nccl.ncclCommAbort

        def wait_for_others(handle: Any) -> int:
            own.wait(60)
            return int(abort(handle))

        ranks.nccl.ncclCommAbort = wait_for_others
        ranks.groups[0].devices().abort()
        assert ranks.nccl.calls.count("ncclCommAbort") == 3
        ranks.nccl.ncclCommAbort = abort
        ranks.groups[1].devices().abort()


# ---- messages -----------------------------------------------------------------------------------------


def test_a_communicator_created_after_the_failure_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Communicator.make

    def late(*args: Any) -> Communicator:
        made = make(*args)
        for group in ranks.groups:
            group.abort("enough")
            group.devices().abort()
        return made

    with world(2) as ranks:
        monkeypatch.setattr(Communicator, "make", late)
        assert {type(error) for error in fail_all(ranks, Messages)} == {AbortedError}
        until(lambda: len(ranks.nccl.comms) == 2 and all(comm.aborted for comm in ranks.nccl.comms))


def test_a_message_that_nobody_receives_runs_into_the_groups_timeout() -> None:
    with world(2) as ranks:
        ranks.give_up_after(0.1)
        assert_ends(
            sent(ranks, 6), CollectiveTimeoutError, r"send to rank 1 .*, tag 6.* within the timeout of 0\.1 s"
        )


def test_a_peer_that_dies_before_it_receives_is_named() -> None:
    with world(2) as ranks:
        work = sent(ranks)
        ranks.died = [1]
        assert_ends(work, PeerDiedError, "rank 1")


def test_abort_ends_messages_in_every_state() -> None:
    with met(Messages) as ranks, Messages.half_way(ranks) as received:
        group = ranks.groups[1]
        with ranks.gpu.on(1):
            works = [received, group.isend(ones(ranks, 1), 0), group.irecv(ones(ranks, 1), None, 5)]
            works.append(group.isend(ones(ranks, 1), 1, 9))  # to itself
        for _ in range(2):
            group.abort("enough")
        for work in works:
            assert_ends(work, AbortedError, "enough")
        for rank, group in enumerate(ranks.groups):
            until(lambda group=group: group.failure is not None)
            with pytest.raises(AbortedError, match="enough"):
                group.isend(ones(ranks, rank), 1 - rank)


def test_an_error_while_a_message_is_posted_leaves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with world(2) as ranks:
        group = ranks.groups[0]
        with ranks.gpu.on(0):
            monkeypatch.setattr(group.p2p, "post_send", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sent(ranks)
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

    with world(2) as ranks:
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

    with world(4) as ranks:
        ranks.run(does)
        ranks.close()
        assert ranks.nccl.calls.count("ncclCommDestroy") == 24
        assert "ncclCommAbort" not in ranks.nccl.calls  # no wait had to be aborted


def test_a_message_without_a_receive_ends_when_the_group_does() -> None:
    with world(2) as ranks:
        work = sent(ranks)
        ranks.groups[0].close()
        assert_ends(work, AbortedError, "destroyed before the message was complete")


# ---- calls that do not match ---------------------------------------------------------------------------


def both(ranks: NcclRanks, call: Callable[[int, Any], Any]) -> str:
    """Make a different call on each rank; return their errors."""
    errors = ranks.attempt(call)
    assert all(isinstance(error, MismatchError) for error in errors), errors
    return "\n".join(map(str, errors))


def all_gather(ranks: NcclRanks, rank: int, count: int) -> Any:
    outs = [ones(ranks, rank, count) for _ in range(2)]
    return ranks.groups[rank].all_gather(outs, ones(ranks, rank, count))


def all_to_all(ranks: NcclRanks, rank: int, sent: int, taken: int) -> Any:
    gives, takes = ([ones(ranks, rank, 1 if p == rank else n) for p in range(2)] for n in (sent, taken))
    return ranks.groups[rank].all_to_all(takes, gives)


DIFFERENT: dict[str, tuple[Callable[[Any, int, Any], Any], str]] = {
    "operation": (
        lambda ranks, rank, group: group.broadcast(ones(ranks, 1), 0) if rank else group.all_reduce(ones(ranks, 0)),
        r"(?s)(.*rank 0 called all_reduce\(float32, 3 elements, op=SUM\).*"
        r"rank 1 called broadcast\(float32, 3 elements, root=0\)){2}",
    ),
    "size": (lambda ranks, rank, group: group.all_reduce(ones(ranks, rank, 4 + rank)), "4 elements"),
    "of a known operation": (
        lambda ranks, rank, _: all_gather(ranks, rank, 4 + rank), "rank 1 sends 20 bytes to rank 0, which expects 16"
    ),
    "of a block": (
        lambda ranks, rank, _: all_to_all(ranks, rank, 2 + rank, 2),
        "all_to_all: rank 1 sends 12 bytes to rank 0, which expects 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
def test_calls_that_differ_are_found_on_all_ranks_and_the_group_goes_on(what: str) -> None:
    call, text = DIFFERENT[what]
    with world(2) as ranks:
        ranks.run(lambda rank, group: all_gather(ranks, rank, 3))
        assert re.search(text, both(ranks, lambda rank, group: call(ranks, rank, group)))
        meet(ranks)


def test_a_skipped_call_is_detected_at_the_next_new_one() -> None:
    with met() as ranks:
        work = alone(ranks)
        text = both(ranks, lambda rank, group: group.broadcast(ones(ranks, rank), 0))
        assert "is rank 0 its call 3, rank 1 its call 2: a rank has skipped an earlier call" in text
        ranks.give_up_after(0.1)
        assert_ends(work, CollectiveTimeoutError, "not complete")


def test_calls_of_a_known_kind_do_not_meet_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with met() as ranks:
        for group in ranks.groups:
            monkeypatch.setattr(group.backend, "plan", None)
        meet(ranks)


def test_a_call_may_be_part_of_one_of_the_groups_own() -> None:
    """For example when a carrier chooses NCCL in the middle of its first call."""
    hosts = [np.ones(3, np.float32) for _ in range(2)]

    def does(rank: int, group: ProcessGroup) -> None:
        x = group.import_array(ranks.array(rank, hosts[rank]), writable=True)
        call: Any = group.planned(Operation("all_reduce", (x.array,), (x.array,), ReduceOp.SUM))
        group.run("outer", lambda: call.start("inner", ()).join(), (), False)
        assert hosts[rank].tolist() == [2, 2, 2]

    with world(2) as ranks:
        ranks.run(does)


# ---- GPUs ----------------------------------------------------------------------------------------------


def test_ranks_that_share_a_gpu_are_refused_with_the_cure() -> None:
    def does(rank: int, group: ProcessGroup) -> None:
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
        with pytest.raises(ArrayError, match="works on GPU 0, that of its first array"):
            ranks.groups[0].all_reduce(ones(ranks, 1))
