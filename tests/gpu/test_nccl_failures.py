"""What goes wrong around NCCL becomes an error on every rank, and nothing hangs or is left behind."""

from __future__ import annotations

from collections.abc import Callable
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
    MismatchError,
    NotInitializedError,
    PeerDiedError,
    UnavailableError,
    UsageError,
)
from fastcoll.gpu.nccl.communicator import Seat, check_seats

from .nccl_world import Ranks, ThreadGroup, assert_ends, ones, world


def meet(ranks: Ranks) -> None:
    """The first call, so that the same may be made by one rank alone."""
    ranks.run(lambda rank, group: group.all_reduce(ones(ranks, rank)))


def alone(ranks: Ranks) -> Any:
    """Rank 0's call, which no other rank joins."""
    with ranks.gpu.on(0):
        return ranks.groups[0].all_reduce(ones(ranks, 0), async_op=True)


def test_a_communicator_that_cannot_be_made_fails_the_group() -> None:
    def does(rank: int, group: ThreadGroup) -> None:
        with pytest.raises(AbortedError, match="failed with status 5: error 5; what it was"):
            group.all_reduce(ones(ranks, rank))
        assert group.failure is not None

    with world(2) as ranks:
        ranks.nccl.statuses["ncclCommInitRankConfig"] = 5
        ranks.run(does)


def test_a_peer_that_dies_while_the_communicator_is_made_is_named() -> None:
    with world(2) as ranks:
        ranks.nccl.absent = {1}
        ranks.meeting.died = [1]
        for error in ranks.attempt(lambda rank, group: group.all_reduce(ones(ranks, rank))):
            assert isinstance(error, PeerDiedError)
            assert error.ranks == (1,)
        assert ranks.nccl.calls.count("ncclCommAbort") == 2


def test_a_communicator_that_never_gets_ready_runs_into_the_groups_timeout() -> None:
    def does(rank: int, group: ThreadGroup) -> None:
        group.all_reduce(ones(ranks, rank))

    def gives_up() -> None:
        until(lambda: len(ranks.nccl.comms) == 2)
        ranks.give_up_after(0.2)

    with world(2) as ranks:
        ranks.nccl.absent = {1}
        errors, _ = together(lambda: ranks.attempt(does), gives_up)
        for error in errors:
            assert isinstance(error, CollectiveTimeoutError)
            assert "making a communicator: NCCL was not through within 0.2 s" in str(error)


def test_an_operation_that_nccl_refuses_fails_the_group_on_all_ranks() -> None:
    with world(2) as ranks:
        meet(ranks)
        ranks.nccl.statuses["ncclAllReduce"] = 4
        errors = ranks.attempt(lambda rank, group: group.all_reduce(ones(ranks, rank)))
        assert all(isinstance(error, AbortedError) for error in errors)
        assert "all_reduce failed with status 4" in str(ranks.meeting.failures[0])
        for rank, group in enumerate(ranks.groups):
            with pytest.raises(AbortedError):
                group.all_reduce(ones(ranks, rank))


def test_an_asynchronous_error_ends_what_is_under_way() -> None:
    with world(2) as ranks:
        meet(ranks)
        work = alone(ranks)
        assert not work.is_completed()
        ranks.nccl.break_network()
        assert_ends(work, AbortedError, "communication failed with status 6")
        assert ranks.nccl.calls.count("ncclCommAbort") == 1
        with pytest.raises(AbortedError):
            alone(ranks)


def test_a_lost_peer_is_named() -> None:
    with world(2) as ranks:
        meet(ranks)
        work = alone(ranks)
        ranks.meeting.died = [1]
        assert_ends(work, PeerDiedError, r"rank 1 died; all_reduce\(float32, 3 elements\) on GPU 0, call 2")


def test_a_call_that_nobody_joins_runs_into_the_groups_timeout() -> None:
    with world(2) as ranks:
        meet(ranks)
        work = alone(ranks)
        with pytest.raises(CollectiveTimeoutError, match=r"not complete after 0.01 s"):
            work.wait(timeout=0.01)
        assert ranks.groups[0].failure is None
        ranks.give_up_after(0.3)
        assert_ends(work, CollectiveTimeoutError, "not complete after 0.3 s: a rank has not called it")
        assert isinstance(ranks.groups[0].failure, CollectiveTimeoutError)


def test_abort_ends_what_is_under_way_and_twice_is_fine() -> None:
    with world(2) as ranks:
        meet(ranks)
        work = alone(ranks)
        for _ in range(2):
            ranks.groups[0].abort("enough")
        assert_ends(work, AbortedError, "enough")
        assert ranks.nccl.calls.count("ncclCommAbort") == 1


def test_destroying_waits_for_what_is_under_way() -> None:
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


def test_destroying_with_a_call_that_nobody_joins_ends_by_the_timeout() -> None:
    with world(2) as ranks:
        meet(ranks)
        ranks.give_up_after(0.3)
        work = alone(ranks)
        assert together(ranks.groups[0].close) == [None]
        assert isinstance(work.exception(), CollectiveTimeoutError)


def test_destroying_does_not_wait_for_peers_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastcoll.gpu.nccl import communicator

    monkeypatch.setattr(communicator, "_FINALIZE_SECONDS", 0.05)
    with world(2) as ranks:
        meet(ranks)
        ranks.groups[0].close()
        assert ranks.nccl.calls.count("ncclCommAbort") == 1


def test_an_interrupted_call_fails_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastcoll.gpu.nccl.communicator import Communicator

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
    from fastcoll.gpu.nccl.communicator import Communicator

    with world(1) as ranks:
        meet(ranks)
        before = Communicator.queue

        def interrupted(*args: Any) -> None:
            with pytest.raises(UsageError, match="a signal handler may not use the group"):
                alone(ranks)
            before(*args)

        monkeypatch.setattr(Communicator, "queue", interrupted)
        alone(ranks).wait(timeout=60)


# ---- calls that do not match ---------------------------------------------------------------------------


def both(ranks: Ranks, *calls: Callable[[ThreadGroup], Any]) -> list[str]:
    """Each rank makes a call of its own; what they raise."""
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


def test_sizes_that_do_not_fit_are_named() -> None:
    def exchange(rank: int, sent: int) -> Callable[[ThreadGroup], Any]:
        gives = [ones(ranks, rank, 1 if peer == rank else sent) for peer in range(2)]
        takes = [ones(ranks, rank, 1 if peer == rank else 2) for peer in range(2)]
        return lambda group: group.all_to_all(takes, gives)

    with world(2) as ranks:
        texts = both(ranks, exchange(0, 2), exchange(1, 3))
        assert "all_to_all: rank 1 gives rank 0 12 bytes, which expects 8" in texts[0]


def test_a_call_that_was_left_out_is_found_at_the_next_new_one() -> None:
    with world(2) as ranks:
        meet(ranks)
        work = alone(ranks)
        texts = both(ranks, *[lambda group, r=r: group.broadcast(ones(ranks, r), 0) for r in range(2)])
        assert "is rank 0 its call 3, rank 1 its call 2: a rank has left out a call before" in texts[0]
        ranks.give_up_after(0.3)
        assert_ends(work, CollectiveTimeoutError, "not complete")


def test_calls_of_a_known_kind_do_not_meet_on_the_host() -> None:
    with world(2) as ranks:
        meet(ranks)
        before = [group.backend.calls for group in ranks.groups]
        meet(ranks)
        assert [group.backend.calls for group in ranks.groups] == before


def test_a_call_may_be_part_of_one_of_the_groups_own() -> None:
    """As that of a carrier which chooses NCCL in the middle of its first call."""
    hosts = [np.ones(3, np.float32) for _ in range(2)]

    def does(rank: int, group: ThreadGroup) -> None:
        x = group.adopt(ranks.array(rank, hosts[rank]), writable=True)
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


def test_seats() -> None:
    def seat(gpu: int, version: int = 22005, host: bytes = b"", shares: bool = False) -> Seat:
        return Seat(bytes([gpu]) * 16, host.ljust(8), version, shares, b"\1" * 128)

    assert Seat.from_row(seat(3, shares=True).to_row()) == seat(3, shares=True)
    check_seats([seat(1), seat(2), seat(1, host=b"other")], [0, 1, 2], "g")
    check_seats([seat(1, shares=True), seat(1, shares=True)], [0, 1], "g")
    with pytest.raises(UnavailableError, match="ranks 4 and 9 of g use one GPU"):
        check_seats([seat(1), seat(2), seat(1)], [4, 7, 9], "g")
    with pytest.raises(UnavailableError, match=r"different versions of NCCL \(rank 0 22005, rank 1 22108\)"):
        check_seats([seat(1), seat(2, 22108)], [0, 1], "g")


def test_a_group_works_on_one_gpu_of_a_process() -> None:
    with world(1, devices=2) as ranks:
        meet(ranks)
        x = np.ones(3, np.float32)
        ranks._kept.append(x)
        ranks.gpu.place(x, 1)
        from .fake_array import FakeArray

        with pytest.raises(ArrayError, match="works on GPU 0, that of its first array"):
            ranks.groups[0].all_reduce(FakeArray(x))
