"""A call of a group over several nodes ends at its one deadline, and its error names the rank at fault.

Each rank has a clock of its own, which stands still until what the rank needs has happened. So it makes no difference
how long the ranks wait for cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from net.meshes import until

import fastcoll as dist
from fastcoll import AbortedError, CollectiveTimeoutError
from fastcoll.core import monitor as monitors
from fastcoll.core.group import ProcessGroup
from fastcoll.core.inquiry import REASON_SECONDS, Question
from fastcoll.hybrid import backend as hybrid
from fastcoll.net.tcp.plans.relayed import RELAYED
from fastcoll.system import processes

EVEN, UNEVEN = [0, 0, 1, 1], [0, 0, 0, 1, 1]
TIMEOUT = 500.0


class Clock:
    """The clock of the waits of one rank: it stands still until the call times out."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.has_timed_out = False

    def monotonic(self) -> float:
        return self._began + 2 * TIMEOUT * self.has_timed_out


def question_for(others: set[int]) -> type[Question]:
    """Return a Question whose time for answers passes when all `others` have answered, after it has begun."""

    class Patient(Question):
        def at_fault(self, late: Sequence[int], is_over: bool, now: float) -> Sequence[int] | None:
            has_begun, (_, told) = self._since is not None, self._inquiry.look(self._number)
            return super().at_fault(
                late, is_over, REASON_SECONDS / 2 if has_begun and told >= others else 0.0
            )

    return Patient


class Job:
    """This rank's part of a test: one rank is held, and another one's timeout passes."""

    def __init__(self, rank: int, homes: list[int], folder: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(processes, "_shm_device", lambda: 1_000_000 + homes[rank])
        self.rank, self._folder, self._patch, self._size = rank, folder, patch, len(homes)

    def start(self) -> ProcessGroup:
        dist.init_process_group()
        dist.barrier()
        self.group = dist.new_group()
        return self.group

    def hold(self) -> None:
        """Wait until all other ranks have given up."""
        until(lambda: len([*self._folder.iterdir()]) == self._size - 1)

    def at_part(self, do: Callable[[], object]) -> None:
        """Call `do` when the ranks have met for a call, before its first part."""

        def reach(name: str, kind: str) -> None:
            if name.endswith("after_meeting"):
                do()

        self._patch.setattr(hybrid, "reach", reach)

    def use_clock(self, victim: int) -> Clock:
        self.group.timeout = TIMEOUT
        clock = Clock()
        self._patch.setattr(monitors, "time", SimpleNamespace(monotonic=clock.monotonic))
        self._patch.setattr(monitors, "Question", question_for({*range(self._size)} - {self.rank, victim}))
        return clock

    def check(self, call: Callable[[], object], name: str, victim: int) -> None:
        """Check that a call names the victim, and the call itself."""
        with pytest.raises(
            CollectiveTimeoutError, match=rf"{name}\(.*, call 3 of .*: rank {victim} "
        ) as caught:
            call()
        assert caught.value.ranks == (victim,)
        assert "node" not in str(caught.value)
        assert "rail" not in str(caught.value)
        (self._folder / str(self.rank)).touch()


@pytest.fixture
def start(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[int]], Job]]:
    monkeypatch.setattr(hybrid, "FLAT", 0)

    def begin(homes: list[int]) -> Job:
        folder = tmp_path / "given-up"
        folder.mkdir(exist_ok=True)
        job = Job(rank, homes, folder, monkeypatch)
        job.start()
        return job

    yield begin
    dist.destroy_process_group()


CALLS: dict[str, Callable[[ProcessGroup, int], object]] = {
    "all_reduce": lambda group, count: group.fast.all_reduce(np.ones(count)),
    "reduce": lambda group, count: group.fast.reduce(np.ones(count), 1),
    "broadcast": lambda group, count: group.fast.broadcast(np.ones(count), 0),
}
LARGE = RELAYED  # elements; fewer bytes are relayed, and then a call has no parts


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize(
    ("name", "victim", "first"),
    [
        ("all_reduce", 0, 3),  # rank 3 waits for rank 1, which is in the victim's node
        ("all_reduce", 1, 2),
        ("all_reduce", 2, 1),
        ("all_reduce", 3, 0),
        ("reduce", 2, 1),
        ("broadcast", 0, 2),
    ],
)
def test_a_rank_that_stops_in_a_part_of_a_call_is_named_by_all(
    rank: int,
    world_size: int,
    start: Callable[[list[int]], Job],
    name: str,
    victim: int,
    first: int,
) -> None:
    """Rank `first` times out. It waits for a rank that waits for the victim, itself or through a third one."""
    job, call = start(EVEN), CALLS[name]
    for _ in range(2):  # makes the connections
        call(job.group, LARGE)
    if rank == victim:
        job.at_part(job.hold)
        with suppress(AbortedError):  # its part may not need the others
            call(job.group, LARGE)
        assert until(lambda: job.group.monitor.decide([], "testing")).ranks == (victim,)
        return
    clock = job.use_clock(victim)
    if rank == first:
        job.at_part(lambda: setattr(clock, "has_timed_out", True))
    job.check(lambda: call(job.group, LARGE), name, victim)


@pytest.mark.ranks(5, init=False)
@pytest.mark.parametrize(("victim", "first"), [(0, 4), (2, 4), (3, 2), (4, 1)])
def test_a_rank_that_does_not_make_a_call_is_named_by_all(
    rank: int, world_size: int, start: Callable[[list[int]], Job], victim: int, first: int
) -> None:
    """A rank of another node, and a rank that waits for its node's result, cannot see which rank is late."""
    job = start(UNEVEN)
    for _ in range(2):
        job.group.barrier()
    if rank == victim:
        job.hold()
        return
    job.use_clock(victim).has_timed_out = rank == first
    job.check(job.group.barrier, "barrier", victim)
