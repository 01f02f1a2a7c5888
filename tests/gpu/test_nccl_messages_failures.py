"""What goes wrong around messages between GPUs becomes an error on every rank, and nothing hangs or is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from messages.worlds import until
from together import together

from fastcoll.errors import (
    AbortedError,
    CollectiveTimeoutError,
    GroupError,
    NotInitializedError,
    PeerDiedError,
)
from fastcoll.gpu.nccl import direction
from fastcoll.gpu.nccl.communicator import Communicator

from .nccl_mail_world import MailRanks, mail_world
from .nccl_world import assert_ends, ones


def meet(ranks: MailRanks) -> None:
    """A message in each direction, so that there are communicators."""

    def does(rank: int, group: Any) -> None:
        works = [group.isend(ones(ranks, rank), 1 - rank), group.irecv(ones(ranks, rank), 1 - rank)]
        for work in works:
            work.wait(timeout=60)

    ranks.run(does)


@contextmanager
def half_way(ranks: MailRanks) -> Iterator[Any]:
    """The receive of a message that is queued on both GPUs, while the sender's stream does not get there."""
    gate = threading.Event()
    stream = ranks.gpu.new_stream(0)

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


def errors_of(ranks: MailRanks, does: Any, *kinds: type[GroupError]) -> list[str]:
    """What a call raises on every rank."""
    errors = ranks.attempt(does)
    assert all(isinstance(error, kinds or (GroupError,)) for error in errors), errors
    return [str(error) for error in errors]


def exchange(ranks: MailRanks) -> Any:
    def does(rank: int, group: Any) -> None:
        if rank == 0:
            group.send(ones(ranks, 0), 1)
        else:
            group.recv(ones(ranks, 1), 0)

    return does


def test_a_communicator_that_cannot_be_made_fails_the_group() -> None:
    with mail_world(2) as ranks:
        ranks.nccl.statuses["ncclCommInitRankConfig"] = 5
        errors_of(ranks, exchange(ranks), AbortedError)
        assert "failed with status 5: error 5; what it was" in str(ranks.meeting.failures[0])
        assert all(group.failure is not None for group in ranks.groups)


def test_a_communicator_that_never_gets_ready_runs_into_the_groups_timeout() -> None:
    def gives_up() -> None:
        until(lambda: len(ranks.nccl.comms) == 2)
        ranks.give_up_after(0.5)

    with mail_world(2) as ranks:
        ranks.nccl.absent = {1}
        errors, _ = together(lambda: ranks.attempt(exchange(ranks)), gives_up)
        assert all(isinstance(error, GroupError) for error in errors), errors
        assert "making a communicator: NCCL was not through within 0.5 s" in str(ranks.meeting.failures[0])
        assert isinstance(ranks.meeting.failures[0], CollectiveTimeoutError)
        assert ranks.nccl.calls.count("ncclCommAbort") == 2


def test_a_peer_that_dies_while_the_communicator_is_made_is_named() -> None:
    with mail_world(2) as ranks:
        ranks.nccl.absent = {1}
        ranks.meeting.died = [1]
        errors = ranks.attempt(exchange(ranks))
        assert isinstance(errors[0], PeerDiedError)
        assert errors[0].ranks == (1,)


def test_a_communicator_that_comes_after_the_failure_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Communicator.make

    def late(*args: Any) -> Communicator:
        made = make(*args)
        for group in ranks.groups:
            group.abort("enough")
            group.devices().abort()
        return made

    with mail_world(2) as ranks:
        monkeypatch.setattr(Communicator, "make", late)
        errors_of(ranks, exchange(ranks), AbortedError)
        until(lambda: len(ranks.nccl.comms) == 2 and all(comm.aborted for comm in ranks.nccl.comms))


def test_a_message_that_nccl_refuses_fails_the_group() -> None:
    with mail_world(2) as ranks:
        meet(ranks)
        ranks.nccl.statuses["ncclSend"] = 4
        refused, _ = ranks.attempt(exchange(ranks))
        assert isinstance(refused, AbortedError)
        until(lambda: all(group.failure is not None for group in ranks.groups))
        assert "send failed with status 4" in str(ranks.meeting.failures[0])
        errors_of(ranks, exchange(ranks), AbortedError)


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


def test_a_message_that_hangs_on_the_gpu_runs_into_the_groups_timeout() -> None:
    with mail_world(2) as ranks, half_way(ranks) as received:
        ranks.give_up_after(0.4)
        # Whoever is first tells the other.
        assert_ends(
            received, GroupError, r"(send to rank 1|recv from rank 0) .* is not complete after 0\.4 s"
        )


def test_a_peer_that_dies_before_it_receives_is_named() -> None:
    with mail_world(2) as ranks:
        with ranks.gpu.on(0):
            work = ranks.groups[0].isend(ones(ranks, 0), 1)
        ranks.meeting.died = [1]
        with pytest.raises(PeerDiedError, match="rank 1"):
            work.wait()


def test_a_peer_that_dies_under_a_message_is_named() -> None:
    with mail_world(2) as ranks:
        meet(ranks)
        with half_way(ranks) as received:
            ranks.meeting.died = [0]
            assert_ends(received, PeerDiedError, "rank 0 .* died")


def test_an_asynchronous_error_ends_what_is_under_way() -> None:
    with mail_world(2) as ranks, half_way(ranks) as received:
        ranks.nccl.break_network()
        assert_ends(received, AbortedError, "communication failed with status 6")


def test_abort_ends_messages_in_every_state() -> None:
    with mail_world(2) as ranks:
        meet(ranks)
        with half_way(ranks) as received:
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
def test_an_interrupted_call_fails_the_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    with mail_world(2) as ranks:
        monkeypatch.setattr(direction.Message, "_order", interrupted)
        with ranks.gpu.on(0), pytest.raises(KeyboardInterrupt):
            getattr(ranks.groups[0], name)(ones(ranks, 0), 1)
        assert "rank 0: KeyboardInterrupt" in str(ranks.groups[0].failure)


def test_an_error_while_a_message_is_posted_leaves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with mail_world(2) as ranks:
        with ranks.gpu.on(0):
            x = ones(ranks, 0)
            group = ranks.groups[0]
            monkeypatch.setattr(group, "post_send", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                group.isend(x, 1)
        assert "ZeroDivisionError" in str(group.failure)
        assert not len(ranks.mail(0)._posted)


def test_destroying_waits_for_what_is_queued_and_ends_communicators_in_order() -> None:
    hosts = [np.full(5, rank + 1, np.float32) for rank in range(2)]

    def does(rank: int, group: Any) -> Any:
        x = ranks.array(rank, hosts[rank])
        group.send(x, 1) if rank == 0 else group.recv(x, 0)
        left = group.irecv(ones(ranks, rank), None, 4)
        group.send(ones(ranks, rank), rank, 8)  # which nobody takes
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


def test_destroying_with_a_message_that_hangs_ends_by_the_timeout() -> None:
    with mail_world(2) as ranks, half_way(ranks) as received:
        ranks.give_up_after(0.4)
        ranks.groups[1].close()
        assert_ends(received, GroupError, r"is not complete after 0\.4 s")


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
        assert "ncclCommAbort" not in ranks.nccl.calls  # which ends what was waited for in vain


def test_a_message_without_a_receive_ends_when_the_group_does() -> None:
    with mail_world(2) as ranks:
        with ranks.gpu.on(0):
            work = ranks.groups[0].isend(ones(ranks, 0), 1)
        ranks.groups[0].close()
        assert_ends(work, AbortedError, "destroyed before the message was complete")
