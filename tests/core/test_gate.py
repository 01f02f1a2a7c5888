"""Schedules of the gate (core/gate.py): callers and the progress thread switch between any two steps.

Calls of a group run one at a time, and those of one thread in their order, synchronous or not.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count

import pytest
from interleaved import shaken
from together import together

import fastcoll as dist
from fastcoll.core import gate, group, work
from fastcoll.errors import AbortedError, NotInitializedError, UsageError
from fastcoll.record.recorder import own

FILES = {gate.__file__, group.__file__, work.__file__, __file__}
DEADLINE = 60.0


@pytest.fixture
def alone() -> Iterator[group.ProcessGroup]:
    """A group of one rank, whose calls wait for no peer."""
    dist.init_process_group(rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_call_does_not_overtake_one_that_waits_for_the_lock(alone: group.ProcessGroup) -> None:
    begins, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        begins.set()
        assert goes_on.wait(DEADLINE)

    assert alone.gate.is_clear()
    work = alone.run("a call", wait, (), True)
    assert begins.wait(DEADLINE)
    assert not alone.gate.is_clear()
    goes_on.set()
    assert work is not None
    work.wait()
    assert alone.gate.is_clear()


class Interrupting(set[int]):
    """A set whose `add` raises KeyboardInterrupt at its end, as Ctrl-C may."""

    def add(self, thread: int) -> None:
        super().add(thread)
        raise KeyboardInterrupt


def test_ctrl_c_as_a_call_begins_leaves_the_gate_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    one = gate.Gate("one", [0], 0, DEADLINE)
    monkeypatch.setattr(one, "_inside", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        one.run_exclusively(lambda: None)
    assert not one.is_inside()
    assert not one.is_busy()


def test_ctrl_c_while_a_group_is_closed_leaves_nothing_open(alone: group.ProcessGroup) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    made = dist.new_group([0])
    assert isinstance(made, group.ProcessGroup)
    called: list[str] = []
    made.at_the_end += [partial(called.append, "before"), interrupt, partial(called.append, "after")]
    groups_before = {each.serial for each in own().groups}
    with pytest.raises(KeyboardInterrupt):
        dist.destroy_process_group(made)
    assert called == ["before", "after"]
    assert len({each.serial for each in own().groups}) == len(groups_before) - 1
    with pytest.raises(NotInitializedError):
        made.fast.barrier()


class Log:
    """The calls that ran, as (thread, number)."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []
        self._running: list[tuple[int, int]] = []

    def call(self, thread: int, number: int) -> None:
        self._running.append((thread, number))
        assert self._running == [(thread, number)], "two calls at a time"
        time.sleep(0)
        assert self._running.pop() == (thread, number)
        self.done.append((thread, number))


def program(g: group.ProcessGroup, log: Log, thread: int, kinds: list[bool]) -> None:
    """Make calls one after the other, synchronous or asynchronous by kind; wait for some of them."""
    under_way = []
    for number, is_async in enumerate(kinds):
        work = g.run(f"call {number}", partial(log.call, thread, number), (), is_async)
        assert (work is not None) == is_async
        if not is_async:
            assert log.done.count((thread, number)) == 1
        elif number % 3 == 0:
            assert work.wait(DEADLINE)
        else:
            under_way.append(work)
    assert all(work.wait(DEADLINE) for work in under_way)


def run(seed: int, *bodies: Callable[[], None]) -> None:
    """Run each on its own thread; raise the first error."""
    with shaken(FILES, seed, 2 * DEADLINE):
        for error in together(*bodies, deadline=2 * DEADLINE):
            if error is not None:
                raise error


def check(g: group.ProcessGroup, seed: int) -> None:
    log, dice = Log(), random.Random(seed)
    kinds = [[dice.random() < 0.5 for _ in range(12)] for _ in range(3)]
    run(seed, *(partial(program, g, log, thread, kinds[thread]) for thread in range(3)))
    for thread in range(3):
        assert [number for t, number in log.done if t == thread] == list(range(12)), "out of order"
    assert not g.gate.is_busy()


@pytest.mark.parametrize("seed", range(6))
def test_calls_run_one_at_a_time_and_each_threads_in_order(alone: group.ProcessGroup, seed: int) -> None:
    check(alone, seed)


def test_a_call_inside_a_call_is_refused_and_harms_none(alone: group.ProcessGroup) -> None:
    """A signal handler makes such a call."""
    refused = []

    def nested() -> None:
        for is_async in (False, True):
            with pytest.raises(UsageError, match="signal handler"):
                alone.run("inner", lambda: None, (), is_async)
            refused.append(is_async)

    alone.run("outer", nested, (), False)
    assert alone.run("later", nested, (), True).wait(DEADLINE)
    assert refused == [False, True] * 2
    assert not alone.gate.is_busy()


@pytest.mark.parametrize("seed", range(4))
def test_every_work_ends_when_the_group_is_closed_meanwhile(seed: int) -> None:
    dist.init_process_group(rank=0, world_size=1)
    g, log = dist.new_group(), Log()
    ended = []

    def caller(thread: int) -> None:
        for number in count():  # until the group is closed
            try:
                work = g.run("call", partial(log.call, thread, number), (), number % 2 == 0)
                if work is not None:
                    work.wait(DEADLINE)
            except (AbortedError, NotInitializedError):
                ended.append(thread)
                return

    def closer() -> None:
        while len(log.done) < 5:
            time.sleep(0)
        with suppress(AbortedError):  # of a Work that its caller has not waited for yet
            dist.destroy_process_group(g)

    run(seed, partial(caller, 0), partial(caller, 1), closer)
    assert sorted(ended) == [0, 1]
    dist.destroy_process_group()
