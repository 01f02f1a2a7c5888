"""RRefs between processes: values, errors, messages; a value is dropped after its last RRef, and not before."""

from __future__ import annotations

import gc
import operator
import pickle
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from together import together

import fastcoll
from fastcoll import AbortedError, PeerDiedError, ResourceError, RpcTimeoutError, UsageError, rpc
from fastcoll.rpc import references
from fastcoll.rpc.references import References
from rpc.victims import LIMIT, die, let, until

ended: queue.SimpleQueue[Any] = queue.SimpleQueue()  # on each worker: the names of the values that ended
seen: list[str] = []  # the names that were taken out of `ended`
made: list[str] = []  # the names of all values that this worker made
kept: list[Any] = []
reads_until_death: list[None] = []
may_go_on = threading.Semaphore(0)


class Value:
    """A value that records its end."""

    def __init__(self, name: str, number: int = 0) -> None:
        self.name, self.number = name, number
        made.append(name)

    def __reduce__(self) -> Any:
        return Copy, (self.name, self.number)

    def __del__(self) -> None:
        ended.put(self.name)

    def add(self, number: int, times: int = 1) -> int:
        self.number += number * times
        return self.number

    def fail(self) -> None:
        raise KeyError(self.name)

    def itself(self) -> Value:
        return self

    @rpc.functions.async_execution
    def added_elsewhere(self, worker: str, number: int) -> Any:
        return rpc.rpc_async(worker, operator.add, (self.number, number))


@dataclass
class Copy:
    name: str
    number: int


@contextmanager
def workers(rank: int, graceful: bool = True) -> Iterator[None]:
    """Make this rank the worker w0, w1, ..."""
    seen.clear()
    made.clear()
    rpc.init_rpc(f"w{rank}")
    try:
        yield
        rpc.shutdown(graceful)
    finally:
        if References.current is not None:
            rpc.shutdown(graceful=False)
        kept.clear()
        while may_go_on.acquire(blocking=False):
            pass


def run_by_worker_0(*sizes: int) -> Any:
    """Run the test on worker 0 of worlds of these sizes; the others serve it."""

    def made(test: Any) -> Any:
        @pytest.mark.ranks(*sizes)
        @wraps(test)
        def run(**arguments: Any) -> None:
            with workers(fastcoll.get_rank()):
                if fastcoll.get_rank() == 0:
                    test(**arguments)

        return run

    return made


def await_end(name: str, count: int = 1) -> None:
    """Wait until so many values of a name have ended on this worker."""
    while seen.count(name) < count:
        seen.append(ended.get(timeout=LIMIT))


def collect_until_ended(workers: Iterable[int], **counts: int) -> None:
    """Collect garbage on all workers until so many values of each name have ended on this worker.

    One collection is not enough: a thread that has answered a call may still refer to its arguments, or to an
    exception, when that collection runs.
    """
    while any(seen.count(name) < count for name, count in counts.items()):
        for worker in workers:
            rpc.rpc_sync(worker, gc.collect)
        with suppress(queue.Empty):
            seen.append(ended.get(timeout=0.01))


def keep(*values: Any) -> None:
    kept.extend(values)


def let_go() -> None:
    kept.clear()


def kept_one() -> Any:
    return kept[0]


def kept_number() -> int:
    return kept[0].to_here().number


def has_ended(name: str) -> bool:
    while not ended.empty():
        seen.append(ended.get())
    return name in seen


def local_name(rref: Any) -> str:
    return rref.local_value().name


def unwrap(rref: Any) -> Any:
    return rref.to_here().number


def made_on(worker: str, name: str) -> Any:
    return rpc.remote(worker, Value, (name,))


def boom(number: int) -> None:
    raise ValueError(f"boom {number}")


def go_on(times: int = 1) -> None:
    may_go_on.release(times)


def await_go_on(result: Any = None) -> Any:
    """Wait for one `go_on`, and return the argument."""
    assert may_go_on.acquire(timeout=LIMIT)
    return result


@run_by_worker_0(3)
def test_a_remote_value_and_its_owner() -> None:
    for owner in range(3):
        rref = rpc.remote(f"w{owner}", operator.mul, args=(np.arange(3.0), 2))
        assert rref.to_here().tolist() == [0, 2, 4]
        assert (rref.owner().id, rref.owner_name()) == (owner, f"w{owner}")
        assert rref.is_owner() == (owner == 0)
        assert rref.confirmed_by_owner()
        assert f"of w{owner}" in str(rref)
    with pytest.raises(UsageError, match=r"w0 .*to_here"):
        rref.local_value()
    own = rpc.RRef([5])
    assert own.to_here() is own.local_value()
    assert own.is_owner()
    assert rpc.remote(1, Value, ("keyword",), {"number": 3}).to_here() == Copy("keyword", 3)


@run_by_worker_0(3)
def test_an_exception_of_the_function_is_raised_by_to_here() -> None:
    rref = rpc.remote("w1", boom, args=(7,))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^boom 7$") as caught:
            rref.to_here()
    assert "On w1" in str(caught.value.__cause__)
    assert "in boom" in str(caught.value.__cause__)
    for worker, function in (("w1", local_name), ("w2", unwrap)):
        with pytest.raises(ValueError, match=r"^boom 7$"):
            rpc.rpc_sync(worker, function, args=(rref,))
    for use in (rref.rpc_sync().add, rpc.remote("w0", boom, args=(7,)).local_value):
        with pytest.raises(ValueError, match=r"^boom 7$"):
            use()


@run_by_worker_0(3)
def test_a_function_that_the_owner_lacks_fails_all_waiting_workers() -> None:
    module = ModuleType("only_on_rank_0")
    sys.modules[module.__name__] = module
    exec("def f():\n    pass", module.__dict__)
    rref = rpc.remote("w1", module.f)
    del sys.modules[module.__name__]
    for use in (partial(rpc.rpc_sync, "w2", unwrap, args=(rref,)), rref.to_here):
        with pytest.raises(RuntimeError, match="only_on_rank_0"):
            use()


@run_by_worker_0(2)
def test_misuse_is_refused() -> None:
    for use, message in (
        (partial(rpc.remote, "w9", boom), "could not find destination 'w9'"),
        (partial(rpc.remote, "w1", 3), "func is 3"),
        (partial(rpc.remote, "w1", lambda: 3), "cannot be pickled"),
        (partial(pickle.dumps, rpc.RRef(3)), "argument or result of a remote call"),
    ):
        with pytest.raises(UsageError, match=message):
            use()


@run_by_worker_0(2)
def test_time_limits() -> None:
    late = rpc.remote("w1", await_go_on, args=(1,), timeout=0.1)
    slow = rpc.remote("w1", await_go_on, args=(2,))
    own = rpc.remote("w0", await_go_on, args=(3,))
    for rref in (slow, own):
        with pytest.raises(RpcTimeoutError):
            rref.to_here(timeout=0.05)
    with pytest.raises(RpcTimeoutError):
        late._made.wait(LIMIT)
    with pytest.raises(RpcTimeoutError, match=r"remote\(\) timed out"):
        late.to_here()
    rpc.rpc_sync("w1", go_on, args=(2,))
    go_on()
    assert (slow.to_here(), own.to_here(), own.local_value()) == (2, 3, 3)


@run_by_worker_0(2)
def test_an_rref_ends_although_its_owner_was_not_reached_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any) -> None:
        raise RpcTimeoutError("worker w1 was not reached in time")

    with monkeypatch.context() as patch:
        patch.setattr(rpc.agent.current_agent(), "_dial", late)
        rref = rpc.remote("w1", Value, ("never",))
    with pytest.raises(RpcTimeoutError, match=r"remote\(\) timed out"):
        rref.to_here()
    with pytest.raises(RpcTimeoutError, match="w1 was not reached in time"):
        rpc.rpc_sync("w1", local_name, (rref,))
    del rref
    references = References.current
    assert references is not None
    until(references._ledger.is_settled)


@run_by_worker_0(3)
def test_a_value_stays_while_descriptors_are_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 cannot connect to worker 2 at first, to which it has to send that it holds an RRef."""
    failed, agent = threading.Event(), rpc.agent.current_agent()
    dial = agent._dial

    def dial_later(to: int, until: float) -> Any:
        if to == 2 and not failed.is_set():
            failed.set()
            raise ResourceError("no file descriptor is left")
        return dial(to, until)

    monkeypatch.setattr(agent, "_dial", dial_later)
    rref = rpc.rpc_sync("w1", made_on, ("w2", "kept"))
    assert failed.wait(LIMIT)
    assert rref.to_here() == Copy("kept", 0)
    assert rpc.rpc_sync("w2", local_name, (rref,)) == "kept"
    del rref
    rpc.rpc_sync("w2", await_end, ("kept",))


@run_by_worker_0(3)
def test_methods_of_the_value_are_called_on_its_owner() -> None:
    for owner in ("w1", "w0"):
        rref = rpc.remote(owner, Value, ("counter", 1))
        assert rref.rpc_sync().add(2, times=3) == 7
        assert rref.rpc_async().add(1).wait() == 8
        assert rref.remote().add(1).to_here() == 9
        assert rref.rpc_sync().added_elsewhere("w2", 5) == 14
        assert rref.rpc_async().added_elsewhere("w2", 6).wait() == 15
        assert rref.remote().added_elsewhere("w2", 7).to_here() == 16
        for call in (rref.rpc_sync().fail, lambda r=rref: r.rpc_async().fail().wait()):
            with pytest.raises(KeyError, match="counter"):
                call()
        for proxy in (rref.rpc_sync(), rref.rpc_async(), rref.remote()):
            with pytest.raises(AttributeError, match="nothing"):
                proxy.nothing()
        assert rref.remote().itself().to_here().number == rref.to_here().number == 9


@run_by_worker_0(3)
def test_an_rref_can_be_sent_in_containers_and_the_value_stays() -> None:
    rref = rpc.remote("w1", Value, ("here", 4))
    rpc.rpc_sync("w2", keep, args=({"a": [rref, (rref,)], "b": rref},))
    back = rpc.rpc_sync("w2", kept_one)
    assert back["a"][0] is back["a"][1][0] is back["b"]
    assert back["b"].to_here() == Copy("here", 4)
    assert rpc.rpc_sync("w1", local_name, args=(back["b"],)) == "here"
    assert rpc.rpc_sync("w0", unwrap, args=(rref,)) == 4
    assert rpc.remote("w2", unwrap, args=(rref,)).to_here() == 4
    assert rpc.remote("w2", rpc.RRef, args=(7,)).to_here().to_here() == 7
    own = rpc.RRef(Value("own", 5))
    assert rpc.rpc_sync("w2", unwrap, args=(own,)) == 5


@run_by_worker_0(3)
def test_a_value_is_dropped_with_the_last_rref_and_not_before() -> None:
    rref = rpc.remote("w1", Value, ("shared", 1))
    rpc.rpc_sync("w2", keep, args=(rref,))
    del rref
    assert rpc.rpc_sync("w2", kept_number) == 1
    back = rpc.rpc_sync("w2", kept_one)
    rpc.rpc_sync("w2", let_go)
    assert back.to_here().number == 1
    assert not rpc.rpc_sync("w1", has_ended, args=("shared",))
    del back
    rpc.rpc_sync("w1", await_end, args=("shared",))
    own = rpc.RRef(Value("of w0"))
    rpc.rpc_sync("w2", keep, args=(own,))
    del own
    assert rpc.rpc_sync("w2", kept_number) == 0
    assert not has_ended("of w0")
    rpc.rpc_sync("w2", let_go)
    await_end("of w0")


class FailedError(Exception):
    """An exception that refers to a value."""


def fail_with_a_value(name: str) -> None:
    raise FailedError(Value(name))


@pytest.mark.ranks(2)
def test_messages_of_rrefs_that_end_together_are_sent_together(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause after the first message ends when the test sets `over`."""
    waits, over = threading.Event(), threading.Event()

    def moment(seconds: float) -> None:
        waits.set()
        assert over.wait(LIMIT)

    with workers(rank):
        if rank == 0:
            rrefs = [rpc.remote("w1", Value, ("one of many",)) for _ in range(200)]
            for each in rrefs:
                each.to_here()
            assert References.current is not None
            agent, sent = References.current.agent, list[Any]()
            notify = agent.notify
            monkeypatch.setattr(agent, "notify", lambda *args: (sent.append(args), notify(*args)))
            monkeypatch.setattr(references, "time", SimpleNamespace(monotonic=time.monotonic, sleep=moment))
            del each, rrefs[0]
            assert waits.wait(LIMIT)
            rrefs.clear()
            over.set()
            rpc.rpc_sync("w1", await_end, args=("one of many", 200))
            assert len(sent) == 2


@run_by_worker_0(2)
def test_a_raised_exception_is_dropped_with_the_last_rref() -> None:
    rref = rpc.remote("w1", fail_with_a_value, args=("raised",))
    for use in (
        rref.to_here,
        partial(rpc.rpc_sync, "w1", local_name, args=(rref,)),
        rref.rpc_sync().itself,
    ):
        with pytest.raises(FailedError):
            use()
    del rref, use  # the exception on w1 is part of a cycle: a frame of its traceback refers to it
    rpc.rpc_sync("w1", collect_until_ended, args=([1],), kwargs={"raised": 1})


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


class NotToBeBuilt:
    def __reduce__(self) -> Any:
        return boom, (3,)


@run_by_worker_0(3)
def test_an_rref_in_a_failed_message_keeps_no_value() -> None:
    """The message cannot be pickled or unpickled, as an argument or as a result, or arrives too late."""
    for owner in ("w0", "w1"):
        rref = rpc.remote(owner, Value, ("kept",))
        rref.to_here()
        for call, function, args, error in (
            (rpc.rpc_sync, keep, (rref, Unpicklable()), "not this one"),
            (rpc.remote, keep, (rref, Unpicklable()), "not this one"),
            (rpc.rpc_sync, beside, (rref, Unpicklable), "not this one"),
            (rpc.rpc_sync, keep, (NotToBeBuilt(), rref), "boom 3"),
            (rpc.rpc_sync, beside, (rref, NotToBeBuilt), "boom 3"),
        ):
            with pytest.raises((UsageError, ValueError), match=error):
                call("w2", function, args=args)
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("w2", await_go_on, args=(rref,), timeout=0.05)
        rpc.rpc_sync("w2", go_on)
        del rref, args
        rpc.rpc_sync(owner, await_end, args=("kept",))


@pytest.mark.ranks(1)
def test_a_late_answer_of_a_call_to_oneself_keeps_no_value(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    with workers(rank):
        rref = rpc.RRef(Value("kept"))
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("w0", await_go_on, args=(rref,), timeout=0.05)
        go_on()
        del rref
        await_end("kept")
    assert not caplog.records


def beside(rref: Any, kind: Callable[[], Any]) -> Any:
    return rref, kind()


@pytest.mark.ranks(3)
def test_shutdown_ends_the_remaining_rrefs(
    rank: int, world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    rpc.init_rpc(f"w{rank}")
    rrefs = [rpc.remote(f"w{other}", Value, (f"from {rank}",)) for other in range(world_size)]
    rpc.rpc_sync(f"w{(rank + 1) % world_size}", keep, args=rrefs)
    rpc.shutdown()
    for other in range(world_size):
        await_end(f"from {other}")
    assert not caplog.records
    with pytest.raises(UsageError, match="shut down"):
        rrefs[0].to_here()
    kept.clear()
    with workers(rank):
        with pytest.raises(UsageError, match="shut down"):
            rpc.rpc_sync("w0", keep, args=(rrefs[0],))
        assert rpc.remote("w0", operator.add, (1, 2)).to_here() == 3


@pytest.mark.ranks(2)
def test_rrefs_may_end_at_any_time_and_on_any_thread(rank: int) -> None:
    """The garbage collector runs after every few new objects, so also while a lock is held."""
    with workers(rank):
        before = gc.get_threshold()
        gc.set_threshold(7)
        try:
            assert together(*[partial(make_garbage, f"w{1 - rank}", 25)] * 3) == [None] * 3
        finally:
            gc.set_threshold(*before)
        collect_until_ended(range(2), a=75, b=75)
        fastcoll.barrier()


def make_garbage(to: str, count: int) -> None:
    for _ in range(count):
        circle: list[Any] = [rpc.remote(to, Value, ("a",)), rpc.RRef(Value("b"))]
        circle.append(circle)
        rpc.rpc_sync(to, operator.length_hint, args=(circle,))


def wander(seed: int) -> None:
    """Make values on several workers and pass them along the workers, each of which reads them; w3 may die."""
    rng = random.Random(seed)
    for number in range(20):
        with suppress(PeerDiedError):
            rref = rpc.remote(rng.randrange(4), Value, ("wanders", number))
            route = [rng.randrange(4) for _ in range(3)]
            assert rpc.rpc_sync(route[0], pass_along, args=(rref, route[1:])) == [number] * 3


def pass_along(rref: Any, route: list[int]) -> list[int]:
    """Pass an RRef on, and read its value; a worker with a limited number of calls dies in the last of them."""
    if reads_until_death and (reads_until_death.pop() or not reads_until_death):
        die()
    if not route:
        return [rref.to_here().number]
    rest = rpc.rpc_async(route[0], pass_along, args=(rref, route[1:]))
    seen = rref.to_here().number
    del rref
    return [seen, *rest.wait()]


# ---- deaths --------------------------------------------------------------------------------------------------------


def hold(name: str) -> Any:
    """Hold the only reference to a value of worker 0."""
    keep(rpc.remote("w0", Value, (name, 8)))
    kept[0].to_here()
    return kept[0]


@pytest.mark.timed
@pytest.mark.ranks(2, 3, fresh=True, may_die=[1])
def test_values_of_a_dead_user_are_dropped_within_two_seconds(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    death = tmp_path / "death"
    with workers(rank, graceful=False):
        if rank == 1:
            hold("lonely")
            for other in {0, world_size - 1}:
                rpc.rpc_sync(other, go_on)
            death.write_text(f"{time.monotonic()}")
            die()
        await_go_on()
        if rank == 0:
            await_end("lonely")
            assert time.monotonic() - float(death.read_text()) < 2
            if world_size > 2:
                let("w2", go_on)
        else:
            await_go_on()


@pytest.mark.long
@pytest.mark.ranks(3, fresh=True, may_die=[1])
def test_the_value_stays_when_the_worker_that_passed_it_on_dies(rank: int) -> None:
    with workers(rank, graceful=False):
        if rank == 1:
            rref = hold("inherited")
            rpc.rpc_sync("w2", keep, args=(rref,))
            rpc.rpc_async("w2", keep, args=(rref,))
            rpc.rpc_async("w0", go_on)
            rpc.rpc_sync("w2", go_on)
            die()
        await_go_on()
        if rank == 2:
            await_death("w1")
            assert kept[0].to_here().number == 8
            assert not rpc.rpc_sync("w0", has_ended, args=("inherited",))
            kept.clear()
            rpc.rpc_sync("w0", await_end, args=("inherited",))
            let("w0", go_on)
        else:
            await_go_on()


@pytest.mark.ranks(1)
def test_waiting_for_a_value_fails_when_its_maker_dies_first(rank: int) -> None:
    """The calls of two makers, 5 and 6, have not arrived, and this worker waits for both values."""
    with workers(rank):
        here = References.current
        assert here is not None
        lost, awaited = here.value_of((5, 1)), here.value_of((6, 1))
        here._died(5, PeerDiedError("worker w5 died", [5]))
        for value in (lost, here.value_of((5, 2))):
            with pytest.raises(
                PeerDiedError, match="w5 died, before its call that makes the RRef's value arr"
            ):
                value.wait(LIMIT)
        assert not awaited.done()


def await_death(worker: str) -> None:
    def call_until_it_dies() -> None:
        while True:
            rpc.rpc_sync(worker, operator.not_, args=(1,))

    with pytest.raises(PeerDiedError):
        call_until_it_dies()


@pytest.mark.long
@pytest.mark.ranks(3, fresh=True, may_die=[0])
def test_the_owner_dies_and_is_named(rank: int) -> None:
    with workers(rank, graceful=False):
        if rank == 1:
            rref = rpc.remote("w0", Value, ("lost",))
            rref.to_here()
            rpc.rpc_sync("w2", keep, args=(rref,))
            rpc.rpc_async("w0", die)
            await_death("w0")
            for use in (
                rref.to_here,
                rref.rpc_sync().itself,
                lambda: rpc.remote("w0", Value).to_here(),
                partial(rpc.rpc_sync, "w2", kept_number),
                partial(rpc.rpc_sync, "w2", unwrap, args=(rref,)),
            ):
                with pytest.raises(PeerDiedError, match="w0"):
                    use()
            let("w2", go_on)
        elif rank == 0:
            threading.Event().wait()
        else:
            await_go_on()


@pytest.mark.long
@pytest.mark.ranks(4, fresh=True, may_die=[3])
@pytest.mark.parametrize("served", [pytest.param(1, marks=pytest.mark.long), 6, 15])  # the first: 8 s
def test_a_worker_dies_while_rrefs_are_under_way_everywhere(rank: int, world_size: int, served: int) -> None:
    """The survivors have their values as long as they refer to them, and then all values end."""
    with workers(rank, graceful=False):
        reads_until_death.extend([None] * served if rank == 3 else [])
        assert together(*[partial(wander, 10 * rank + seed) for seed in range(3)]) == [None] * 3
        await_death("w3")
        meet(range(3))  # all calls of the survivors are served, except those without a waiting thread
        collect_until_ended(range(3), wanders=made.count("wanders"))
        with suppress(AbortedError):  # the worker has met all others, and left before it answered
            meet(range(3))


def meet(ranks: range) -> None:
    """Wait for the others by calls to them, not by a default group, which would fail."""
    for other in ranks:
        rpc.rpc_sync(other, go_on)
    for _ in ranks:
        await_go_on()
