"""When a call times out, every rank names the ranks that wait for nobody, whichever rank times out first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace

import pytest

from fastcoll.core import monitor as monitors
from fastcoll.core.inquiry import ANSWER_SECONDS, REASON_SECONDS, Inquiry
from fastcoll.core.monitor import LargerCall, Wait
from fastcoll.errors import AbortedError, CollectiveTimeoutError, GroupError
from fastcoll.rendezvous.control import MOST_WAITING
from net.meshes import nothing_left, until
from net.test_monitor import FIRST_RANK, Network

CALL, TIMEOUT = 7, 30.0


class Ranks(Network):
    """Ranks whose clock stands still, unless a test changes `now`."""

    now = 0.0

    def __init__(self, n: int, pairs: Iterable[tuple[int, int]] | None = None) -> None:
        super().__init__(n, pairs)
        for monitor in self.monitors:
            monitor.inquiry = Inquiry()
            monitor.inquiry.listen(monitor, range(n))

    def wait(self, rank: int, *late: int, since: float = 0.0, number: int = CALL) -> Wait:
        """Return the wait of a rank in a call, for some late ranks."""
        return Wait(self.monitors[rank], "all_reduce", lambda: [*late], TIMEOUT, since, number=number)

    def await_told(self, rank: int, *peers: int, number: int = CALL) -> None:
        """Wait until a rank has read the notices of some peers, that they wait."""
        inquiry = self.monitors[rank].inquiry
        assert inquiry is not None
        until(lambda: inquiry.look(number)[1] >= {*peers})


@contextlib.contextmanager
def ranks(
    monkeypatch: pytest.MonkeyPatch, n: int, pairs: Sequence[tuple[int, int]] | None = None
) -> Iterator[Ranks]:
    with nothing_left(), contextlib.closing(Ranks(n, pairs)) as made:
        monkeypatch.setattr(monitors, "time", SimpleNamespace(monotonic=lambda: made.now))
        yield made


def error_of(wait: Wait) -> GroupError:
    """Return the error that a wait raises, which may need a second look."""

    def look_twice() -> None:
        wait.look()
        wait.look()

    with pytest.raises(GroupError) as caught:
        look_twice()
    return caught.value


def test_a_rank_that_waits_for_a_late_rank_names_it_and_is_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 waits for rank 1, which waits for rank 2 since a moment ago. Rank 0 has timed out."""
    with ranks(monkeypatch, 3) as world:
        world.now = TIMEOUT
        first, second = world.wait(0, 1), world.wait(1, 2, since=TIMEOUT - 1.0)
        second.look()
        first.look()
        world.await_told(1, 0)
        second.look()
        world.await_told(0, 1)
        world.now += ANSWER_SECONDS
        first.look()
        found = error_of(second)
        assert isinstance(found, CollectiveTimeoutError)
        assert found.ranks == (FIRST_RANK + 2,)
        assert "rank 12" in str(found)
        assert "did not arrive before the call timed out on another rank" in str(found)
        world.monitors[1].fail(found)
        until(lambda: world.decide(0))
        passed_on = error_of(first)
        assert isinstance(passed_on, CollectiveTimeoutError)
        assert passed_on.ranks == (FIRST_RANK + 2,)


def test_only_the_silent_ones_of_several_late_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(monkeypatch, 4) as world:
        world.now = TIMEOUT
        wait = world.wait(0, 1, 2, 3)
        wait.look()
        world.await_told(2, 0)
        world.wait(2, 1, 3).look()
        world.await_told(0, 2)
        world.now += ANSWER_SECONDS / 2
        wait.look()  # answers may still arrive
        world.now += ANSWER_SECONDS / 2
        found = error_of(wait)
        assert found.ranks == (FIRST_RANK + 1, FIRST_RANK + 3)
        assert "within the timeout of 30 s" in str(found)


def test_a_rank_that_cannot_be_heard_is_named_only_if_no_other_rank_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In large groups, not every two ranks have a connection for notices."""
    with ranks(monkeypatch, 3, [(0, 1), (1, 2)]) as world:
        world.now = TIMEOUT
        first, second = world.wait(0, 1, 2), world.wait(1, 2)
        first.look()
        second.look()
        world.await_told(0, 1)
        world.now += ANSWER_SECONDS
        first.look()
        assert error_of(second).ranks == (FIRST_RANK + 2,)
        world.now += REASON_SECONDS
        assert error_of(first).ranks == (FIRST_RANK + 1, FIRST_RANK + 2)


def test_a_notice_of_an_earlier_call_neither_excuses_its_rank_nor_begins_an_inquiry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ranks(monkeypatch, 2) as world:
        world.now = TIMEOUT
        world.wait(1, 0, number=CALL - 1).look()
        world.await_told(0, 1, number=CALL - 1)
        wait = world.wait(0, 1, since=TIMEOUT)
        for _ in range(3):
            wait.look()
            world.now += ANSWER_SECONDS
        world.now += TIMEOUT
        wait.look()
        world.now += ANSWER_SECONDS
        assert error_of(wait).ranks == (FIRST_RANK + 1,)


def test_a_rank_in_an_earlier_call_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits in call 6 for a rank at fault, while a rank that has completed call 6 waits for it in call 7."""
    with ranks(monkeypatch, 3) as world:
        world.now = TIMEOUT
        first = world.wait(0, 1)
        first.look()
        world.await_told(1, 0)
        second = world.wait(1, 2, since=TIMEOUT, number=CALL - 1)
        second.look()
        world.await_told(0, 1)
        world.now += ANSWER_SECONDS
        first.look()
        assert error_of(second).ranks == (FIRST_RANK + 2,)


def test_a_rank_whose_data_moves_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(monkeypatch, 2) as world:
        world.now = TIMEOUT
        world.wait(0, 1).look()
        world.await_told(1, 0)
        world.wait(1, 0, since=TIMEOUT).worked()
        world.await_told(0, 1)


def test_a_rank_that_was_stopped_and_goes_on_reads_why_its_peers_have_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ranks(monkeypatch, 2) as world:
        wait = world.wait(1, 0)
        world.now = TIMEOUT
        with pytest.raises(CollectiveTimeoutError, match="all_reduce is not complete after 30 s"):
            wait.worked()
        world.monitors[0].fail(CollectiveTimeoutError("rank 11 did not arrive", [FIRST_RANK + 1]))
        until(lambda: world.decide(1))
        with pytest.raises(AbortedError, match="rank 11 did not arrive") as caught:
            wait.worked()
        assert caught.value.ranks == (FIRST_RANK + 1,)


def test_a_rank_tells_each_call_once_and_only_a_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """More notices might not fit into a connection that the peer does not read."""
    with ranks(monkeypatch, 2) as world:
        for number in range(1, 2 * MOST_WAITING):
            for _ in range(3):
                world.monitors[0].tell_waiting(number)
        world.await_told(1, 0, number=MOST_WAITING)
        world.monitors[0].leave()
        until(lambda: world.monitors[1].has_left(0))
        assert world.controls[1].waiting == {0: MOST_WAITING}


def test_a_part_of_a_call_has_the_deadline_of_the_call_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 1 and 2 are an internal group, which carries out the part. The call began a while before it."""
    with ranks(monkeypatch, 3) as world:
        part = Network(2, [])
        part.monitors[0].larger = LargerCall(
            world.monitors[1], (1, 2), lambda: "broadcast of all", CALL, -20.0, TIMEOUT
        )
        wait = Wait(part.monitors[0], "a part", lambda: [1], TIMEOUT)
        wait.look()
        world.now = TIMEOUT - 20.0
        wait.look()
        world.await_told(0, 1)
        world.now += ANSWER_SECONDS
        found = error_of(wait)
        assert str(found).startswith("timed out: broadcast of all: rank 12 ")
        assert found.ranks == (FIRST_RANK + 2,)


def test_a_failure_of_the_larger_group_ends_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(monkeypatch, 3) as world:
        part = Network(2, [])
        part.monitors[0].larger = LargerCall(
            world.monitors[1], (1, 2), lambda: "broadcast of all", CALL, 0.0, TIMEOUT
        )
        wait = Wait(part.monitors[0], "a part", lambda: [1], TIMEOUT)
        wait.look()
        world.kill(0)
        until(lambda: world.decide(1))
        assert error_of(wait).ranks == (FIRST_RANK,)
