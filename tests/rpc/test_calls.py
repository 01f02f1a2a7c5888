"""Remote calls between processes: values, errors, timeouts, many at once, shutdown."""

from __future__ import annotations

import gc
import math
import operator
import os
import pickle
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from together import together

import fastcoll
from fastcoll import (
    AbortedError,
    RemoteError,
    RendezvousError,
    RpcTimeoutError,
    UnavailableError,
    UsageError,
    config,
    rpc,
)
from fastcoll.rpc import pickling, start
from fastcoll.rpc.agent import Agent
from fastcoll.rpc.references import References
from fastcoll.rpc.wire import INLINE, MessageType, RpcMessage, encode
from fastcoll.system.processes import Member
from rpc.test_link import Interrupted
from rpc.victims import LIMIT, until

SLOT = 256 << 10
released = threading.Event()
inside = threading.Semaphore(0)
calls_out = threading.Event()
kept: list[Any] = []


@pytest.fixture
def worker(rank: int) -> Iterator[int]:
    """Make this rank a worker; afterwards no descriptor and no thread is left over."""
    open_before, threads_before = descriptors(), threading.active_count()
    released.clear()  # before others can call
    calls_out.clear()
    kept.clear()
    while inside.acquire(blocking=False):
        pass
    rpc.init_rpc(f"w{rank}")
    yield rank
    if rpc.agent._current is not None:
        rpc.shutdown(timeout=LIMIT)
    until(lambda: threading.active_count() <= threads_before, "threads are left")
    until(lambda: len(descriptors()) <= len(open_before), f"more is open than {open_before}")


def descriptors() -> dict[str, str]:
    """Return the open descriptors, except those by which the job watches its ranks."""
    found = {}
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            found[each] = os.readlink(f"/proc/self/fd/{each}")
    return {each: what for each, what in found.items() if "pidfd" not in what}


def next_of(rank: int, world_size: int) -> str:
    return f"w{(rank + 1) % world_size}"


def back(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


@pytest.mark.ranks(1, 2)
def test_values_there_and_back(worker: int, world_size: int) -> None:
    to = next_of(worker, world_size)
    source = np.random.default_rng(worker)
    for count in (0, 1, INLINE, INLINE + 1, SLOT - 1, SLOT, SLOT + 1, 20 * SLOT + 3):
        x = source.integers(0, 255, count, np.uint8)
        values = {"x": x, "twice": [x, x], "half": x[::2], "text": "a" * (count // 100), "f": x.astype(">f4")}
        (args, kwargs) = rpc.rpc_sync(to, back, args=(values,), kwargs={"x": x})
        assert (kwargs["x"] == x).all()
        got = args[0]
        assert got["twice"][0] is got["twice"][1]
        for name in ("x", "half", "f"):
            assert got[name].dtype == values[name].dtype
            assert (got[name] == values[name]).all()
            assert got[name].flags.writeable
        assert got["text"] == values["text"]
    fortran = np.asfortranarray(source.random((300, 200)))
    got = rpc.rpc_sync(to, back, args=(fortran,))[0][0]
    assert got.flags.f_contiguous
    assert (got == fortran).all()


@pytest.mark.ranks(1, 3)
def test_workers_are_called_by_name_id_or_info(worker: int, world_size: int) -> None:
    info = rpc.get_worker_info(next_of(worker, world_size))
    assert info == rpc.WorkerInfo(f"w{info.id}", info.id)
    for to in (info, info.id, info.name):
        assert rpc.rpc_sync(to, rpc.get_worker_info) == info
    assert rpc.get_worker_info().id == worker
    for unknown in ("w9", 9, -1, None):
        with pytest.raises(UsageError, match="there is no worker"):
            rpc.rpc_sync(unknown, back)


def down(depth: int, world_size: int) -> int:
    if depth == 0:
        return 0
    to = next_of(rpc.get_worker_info().id, world_size)
    return 1 + rpc.rpc_sync(to, down, args=(depth - 1, world_size))


@pytest.mark.ranks(1, 3)
def test_calls_nested_64_deep_on_all_ranks_at_the_same_time(worker: int, world_size: int) -> None:
    assert rpc.rpc_sync(next_of(worker, world_size), down, args=(64, world_size)) == 64


def hold() -> bool:
    inside.release()
    return released.wait(LIMIT)


def let_go(expected: int) -> None:
    for _ in range(expected):
        assert inside.acquire(timeout=LIMIT)
    released.set()


@pytest.mark.ranks(1, 2)
def test_blocking_calls_do_not_delay_others(worker: int, world_size: int) -> None:
    """All 40 calls must be under way at the same time before another call ends them."""
    to = next_of(worker, world_size)
    for _ in range(5):
        held = [rpc.rpc_async(to, hold) for _ in range(40)]
        rpc.rpc_sync(to, let_go, args=(40,))
        assert rpc.wait_all(held) == [True] * 40
        fastcoll.barrier()
        released.clear()
        fastcoll.barrier()


@pytest.mark.ranks(3)
def test_many_threads_call_at_the_same_time(worker: int, world_size: int) -> None:
    def calls(number: int) -> None:
        for k in range(30):
            x = np.full(k * 40, number)
            assert rpc.rpc_sync((worker + k) % world_size, np.sum, args=(x,)) == number * x.size

    assert together(*[partial(calls, number) for number in range(8)]) == [None] * 8


class OwnError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.one = one

    def __reduce__(self) -> Any:
        return type(self), (1, 2)


class MissingError(KeyError, TimeoutError):
    """The constructor makes the message, and takes other arguments than `args`."""

    def __init__(self, *, key: str) -> None:
        super().__init__(f"no key {key}")
        self.key = key


class UnbuildableError(Exception):
    def __reduce__(self) -> Any:
        return int, ("x",)


class SilentError(Exception):
    def __str__(self) -> str:
        raise AttributeError("no text")


class _Lacking:
    """Unpickles like a function that the module lacks."""

    def __reduce__(self) -> Any:
        return _lack, ()


def _lack() -> Any:
    raise AttributeError("module 'train' has no attribute 'step'")


def fail(kind: str) -> Any:
    if kind == "own":
        raise OwnError(1, 2)
    if kind == "unbuildable":
        raise UnbuildableError("unbuildable")
    if kind == "missing":
        raise MissingError(key="a") from MissingError(key="b")
    if kind == "silent":
        raise SilentError
    if kind == "silent, unpicklable":
        error = SilentError()
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error
    if kind == "unpicklable":
        return threading.Lock()
    return int(kind)


@pytest.mark.ranks(1, 2)
def test_exceptions_come_back(worker: int, world_size: int) -> None:
    to = next_of(worker, world_size)
    with pytest.raises(OwnError, match="1 and 2") as own:
        rpc.rpc_sync(to, fail, args=("own",))
    assert own.value.one == 1
    assert f"On {rpc.get_worker_info(to)}:\nTraceback" in str(own.value.__cause__)
    assert "raise OwnError(1, 2)" in str(own.value.__cause__)
    with pytest.raises(ValueError, match="invalid literal"):
        rpc.rpc_sync(to, fail, args=("x",))
    with pytest.raises(MissingError) as missing:
        rpc.rpc_sync(to, fail, args=("missing",))
    assert (missing.value.args, missing.value.key) == (("no key a",), "a")
    with pytest.raises(SilentError):
        rpc.rpc_sync(to, fail, args=("silent",), timeout=LIMIT)
    for function, args, kind, message in (
        (fail, ("unbuildable",), RemoteError, rf"UnbuildableError on worker {to} .*: unbuildable"),
        (
            fail,
            ("silent, unpicklable",),
            RemoteError,
            r"SilentError on worker .*: <exception str\(\) failed>. .* cannot be pickled",
        ),
        (fail, ("unpicklable",), UsageError, r"cannot be pickled: .*lock"),
        (back, (threading.Lock(),), UsageError, "cannot be pickled"),
        (lambda: 1, (), UsageError, r"cannot be pickled: .*lambda"),
        (back, (_Lacking(),), RuntimeError, r"no attribute 'step'.* does not serialize the code"),
        (3, (), UsageError, "without calling it"),
    ):
        with pytest.raises(kind, match=message):
            rpc.rpc_sync(to, function, args=args)
    assert rpc.rpc_sync(to, math.factorial, args=(5,)) == 120


@pytest.mark.ranks(1, 2)
def test_time_limits(worker: int, world_size: int) -> None:
    to = next_of(worker, world_size)
    rpc.rpc_sync(to, rpc.get_worker_info)  # after this, calls reach the worker within any timeout
    late = rpc.rpc_async(to, hold, timeout=0.05)
    with pytest.raises(
        RpcTimeoutError, match=r"timed out: .*call of hold was not answered by .* within 0.05 s"
    ):
        late.wait()
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync(to, hold, timeout=0.05)
    rpc.rpc_sync(to, let_go, args=(2,), timeout=0)  # 0: without limit; the late answers are dropped
    assert rpc.rpc_sync(to, operator.add, args=(1, 2)) == 3


@pytest.fixture
def ends() -> Iterator[tuple[Agent, socket.socket, socket.socket, list[Any]]]:
    """An agent that calls the worker "far", both ends of its connection, and what its dials do first."""
    near, far = socket.socketpair()
    near.setblocking(False)
    dialing = list[Callable[[float], Any]]()

    def dial(_: int, until: float) -> socket.socket:
        for step in dialing:
            step(until)
        return near

    workers = [rpc.WorkerInfo("near", 0), rpc.WorkerInfo("far", 1)]
    agent = Agent(workers, [Member.here(rank, 2, "auto") for rank in range(2)], 0, dial, 60.0, 2)
    agent.on(1, lambda *_: None)
    yield agent, near, far, dialing
    agent.close("left", AbortedError("over"))
    far.close()


def test_a_timeout_before_the_worker_is_reached(ends: Any) -> None:
    agent, _, _, dialing = ends
    dialing.append(lambda end: until(lambda: time.monotonic() > end))
    with pytest.raises(RpcTimeoutError, match=r"not answered by far .* within 0.05 s"):
        agent.call("far", 1, None, timeout=0.05).wait(LIMIT)


def test_a_context_may_be_added_while_a_call_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        """While a thread encodes its value, another thread imports a module that adds a context."""

        def encode(self, to: rpc.WorkerInfo) -> bytes:
            pickling.contexts["added"] = self
            return b"value"

    monkeypatch.setattr(pickling, "contexts", {"first": Context()})
    assert pickle.loads(pickling.context_for(rpc.WorkerInfo("w1", 1))) == {"first": b"value"}


def test_a_late_answer_is_read_without_a_waiting_thread(ends: Any) -> None:
    agent, near, far, _ = ends
    late = agent.call("far", 1, None, timeout=0.05, waits=True)
    until(late.done)  # before the caller waits
    (number,) = agent._out[1].abandoned
    far.sendall(encode(RpcMessage(MessageType.RESULT, 0, number, pickle.dumps(1)))[0])
    until(lambda: not select.select([near], [], [], 0)[0], "nobody reads it")
    until(lambda: not agent._out[1].abandoned)


def test_calls_are_added_during_the_search_for_late_ones(ends: Any) -> None:
    agent, _, _, _ = ends
    agent.call("far", 1, None)
    pending = agent._out[1].pending
    (call,) = pending.values()
    pending.update((-number, call) for number in range(1, 1000))

    class Dropped:
        """Collected during the search, as any garbage may be: another thread may make a call at that time."""

        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            pending[-1000] = call

    threshold = gc.get_threshold()
    gc.collect()
    Dropped()
    gc.set_threshold(100)
    try:
        agent._fail_late(0.0)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert -1000 in pending


def test_a_sender_that_notices_the_end_first_gets_the_exit_reason(ends: Any) -> None:
    agent, _, far, _ = ends
    calls = [agent.call("far", 1, None)]
    link = agent._out[1]
    with link.reading:  # no thread reads the link
        far.sendall(encode(RpcMessage(MessageType.GOODBYE, 0, 0, b"left"))[0])
        far.close()
        until(lambda: not link.armed)
    calls.append(agent.call("far", 1, None))
    for call in calls:
        with pytest.raises(AbortedError, match=r"worker far, .* left"):
            call.wait(LIMIT)


def test_an_interrupted_message_is_not_taken_for_the_workers_death(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, _, far, _ = ends
    call = agent.call("far", 1, None, waits=True)
    monkeypatch.setattr(agent._out[1], "_received", Mock(side_effect=KeyboardInterrupt))
    far.sendall(encode(RpcMessage(MessageType.RESULT, 0, 1, pickle.dumps(1)))[0])
    with pytest.raises(KeyboardInterrupt):
        call.wait(LIMIT)
    for waiting in (call, agent.call("far", 1, None)):
        with pytest.raises(
            AbortedError, match=r"worker far, .* KeyboardInterrupt interrupted a message here"
        ):
            waiting.wait(LIMIT)


def test_an_error_of_a_signal_handler_while_a_message_is_sent_is_raised(ends: Any) -> None:
    """The error may be an OSError, as that of a lost connection is."""
    agent, *_ = ends
    agent.call("far", 1, None)
    agent._out[1]._socket = Interrupted(agent._out[1]._socket, TimeoutError("the alarm"))
    with pytest.raises(TimeoutError, match="the alarm"):
        agent.call("far", 1, np.zeros(1 << 20))
    with pytest.raises(AbortedError, match=r"worker far, .* TimeoutError interrupted a message here"):
        agent.call("far", 1, None).wait(LIMIT)


@rpc.functions.async_execution
def chained(to: str, x: Any, y: Any) -> Any:
    return rpc.rpc_async(to, operator.add, args=(x, y)).then(lambda sum_: sum_.value() * 2)


@rpc.functions.async_execution
def broken() -> int:
    return 3


def unmarked() -> Any:
    return rpc.Future()


@pytest.mark.ranks(1, 3)
def test_functions_that_return_futures(worker: int, world_size: int) -> None:
    to, other = next_of(worker, world_size), next_of(worker + 1, world_size)
    futures = [rpc.rpc_async(to, chained, args=(other, np.arange(3), k)) for k in range(50)]
    for k, future in enumerate(futures):
        assert future.wait().tolist() == [2 * k, 2 * k + 2, 2 * k + 4]
    with pytest.raises(RuntimeError, match="can only concatenate str"):  # raised by the callback
        rpc.rpc_sync(to, chained, args=(other, "x", 1j))
    with pytest.raises(UsageError, match=r"must return a torch\.futures\.Future object, .* returned 3"):
        rpc.rpc_sync(to, broken)
    with pytest.raises(UsageError, match=r"mark it by rpc.functions.async_execution"):
        rpc.rpc_sync(to, unmarked)


@rpc.functions.async_execution
def later() -> Any:
    future: rpc.Future[bool] = rpc.Future()
    kept.append(future)
    return future


def answer(expected: int) -> None:
    """Complete the futures that `later` has returned, all at once."""
    until(lambda: len(kept) >= expected)
    for k in range(expected):
        kept[k].set_result(True)
    kept.clear()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("by_event", [False, True])
def test_a_callback_may_wait_for_an_answer_received_with_its_own(
    worker: int, world_size: int, by_event: bool
) -> None:
    to = next_of(worker, world_size)
    for _ in range(20):
        came, seen = threading.Event(), []
        futures = [rpc.rpc_async(to, later) for _ in range(4)]
        futures[3].add_done_callback(lambda _, came=came: came.set())

        def follow(done: Any, futures: Any = futures, came: Any = came, seen: Any = seen) -> None:
            seen.append(came.wait(LIMIT / 2) if by_event else futures[3].wait(LIMIT / 2))

        for each in futures[:3]:
            each.add_done_callback(follow)
        rpc.rpc_sync(to, answer, args=(4,))
        rpc.wait_all(futures)
        until(lambda seen=seen: len(seen) == 3, "a callback is stuck")  # type: ignore[misc]
        assert all(seen)


@pytest.mark.ranks(1, 2)
def test_callbacks_run_without_a_waiting_thread_and_may_call_and_time_out(
    worker: int, world_size: int
) -> None:
    """Those of a call that was answered, and of one that timed out."""
    to, came, seen = next_of(worker, world_size), threading.Event(), threading.Event()

    def follow(done: Any) -> None:
        assert rpc.rpc_sync(to, operator.neg, args=(done.value(),)) == -3
        came.set()

    def follow_late(done: Any) -> None:
        assert rpc.rpc_sync(to, operator.neg, args=(3,)) == -3
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync(to, hold, timeout=0.05)
        seen.set()

    rpc.rpc_async(to, operator.add, args=(1, 2)).add_done_callback(follow)
    assert came.wait(LIMIT)  # after this, calls reach the worker within any timeout
    rpc.rpc_async(to, hold, timeout=0.05).add_done_callback(follow_late)
    assert seen.wait(LIMIT)
    rpc.rpc_sync(to, let_go, args=(2,))


def serve_this_alone(caller: str) -> None:
    """Wait until this worker serves only this call: those that were answered are served no more."""
    served = [f"{rpc.get_worker_info().name} is in the call of serve_this_alone by {caller}"]
    until(lambda: rpc.agent.current_agent().handlers.under_way() == served)


@pytest.mark.ranks(1, 2)
def test_an_answered_call_is_not_listed_as_served(worker: int, world_size: int) -> None:
    to = next_of(worker, world_size)
    for _ in range(3):
        rpc.rpc_sync(to, serve_this_alone, args=(f"w{worker}",))


def keep_later(to: str, depth: int) -> None:
    await_other()
    kept.append(depth)
    if depth:
        rpc.rpc_async(to, keep_later, args=(rpc.get_worker_info().name, depth - 1))


@pytest.mark.ranks(3)
def test_a_graceful_shutdown_waits_for_calls_of_calls(worker: int, world_size: int) -> None:
    to = next_of(worker, world_size)
    future = rpc.rpc_async(to, keep_later, args=(f"w{worker}", 5))
    calls_out.set()
    rpc.shutdown(timeout=LIMIT)
    assert sorted(kept) == [0, 1, 2, 3, 4, 5]
    assert future.wait() is None
    with pytest.raises(fastcoll.NotInitializedError, match="init_rpc"):
        rpc.rpc_sync(to, back)
    with pytest.raises(fastcoll.NotInitializedError):
        rpc.shutdown()
    fastcoll.barrier()
    rpc.init_rpc(f"again{worker}")
    assert rpc.rpc_sync("again0", os.getpid) > 0


def await_one() -> None:
    assert inside.acquire(timeout=LIMIT)


def await_other() -> None:
    """Wait until this worker has a call under way."""
    assert calls_out.wait(LIMIT)


@pytest.mark.ranks(2)
def test_shutdown_that_is_not_graceful_fails_calls_of_and_to_the_worker(worker: int, world_size: int) -> None:
    held = rpc.rpc_async(f"w{1 - worker}", hold)
    calls_out.set()
    if worker == 0:
        rpc.rpc_sync("w1", await_one)
        rpc.rpc_sync("w1", await_other)
        rpc.shutdown(graceful=False)
        with pytest.raises(AbortedError, match="rpc was shut down"):
            held.wait()
    else:
        left = r"worker w0, rank 0 \(pid \d+ on .*\), left; the call of hold is lost"
        with pytest.raises(AbortedError, match=left):
            held.wait()
        with pytest.raises(AbortedError, match="w0"):
            rpc.rpc_sync("w0", back)
        rpc.shutdown(graceful=False)
    released.set()


@pytest.mark.ranks(2)
def test_a_child_of_fork_is_no_worker(worker: int, world_size: int) -> None:
    assert rpc.rpc_sync(next_of(worker, world_size), operator.add, args=(1, 2)) == 3
    pid = os.fork()
    if pid == 0:
        with suppress(fastcoll.NotInitializedError):
            rpc.rpc_sync("w0", os.getpid)
            os._exit(1)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert rpc.rpc_sync(next_of(worker, world_size), operator.add, args=(1, 2)) == 3


@pytest.mark.ranks(2)
def test_a_child_of_fork_gets_neither_answers_nor_values(worker: int, world_size: int) -> None:
    to = next_of(worker, world_size)
    pending, rref, own = rpc.rpc_async(to, hold), rpc.remote(to, operator.add, (1, 2)), rpc.RRef(3)
    assert rref.to_here() == 3
    references = References.current
    assert references is not None
    with references._lock:  # as another thread may, at the moment of the fork
        pid = os.fork()
        if pid == 0:
            signal.alarm(math.ceil(LIMIT))
            try:
                with pytest.raises(AbortedError, match="wait for it there"):
                    pending.wait()
                for use in (rref.to_here, own.to_here, own.local_value):
                    with pytest.raises(fastcoll.NotInitializedError, match="was forked"):
                        use()
                os._exit(0)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    rpc.rpc_sync(to, let_go, args=(1,))
    assert pending.wait(LIMIT)


def call_back() -> Any:
    return rpc.rpc_sync("w0", os.getpid, timeout=0)


@pytest.mark.ranks(2)
def test_a_call_of_a_worker_whose_init_rpc_fails_ends(
    rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other worker has joined before, and has called this one, whose handler makes a call."""
    threads = threading.active_count()

    def fail(*arguments: Any) -> None:
        roster = gather(*arguments)
        until(rpc.agent.current_agent()._dialing[0].locked)
        roster.leave(0.0)
        raise RendezvousError("a worker did not join")

    if rank == 0:
        rpc.init_rpc("w0")
        with pytest.raises(AbortedError):
            rpc.rpc_sync("w1", call_back)
        rpc.shutdown(graceful=False)
    else:
        gather = start.gather
        monkeypatch.setattr(start, "gather", fail)
        with pytest.raises(RendezvousError, match="did not join"):
            rpc.init_rpc("w1")
    until(lambda: threading.active_count() <= threads, "threads are left")


@pytest.mark.ranks(2)
def test_a_thread_that_connects_to_a_stopped_worker_ends_with_shutdown(rank: int, world_size: int) -> None:
    pids = [0, 0]
    fastcoll.all_gather_object(pids, os.getpid())
    rpc.init_rpc(f"w{rank}")
    fastcoll.barrier()
    if rank == 0:
        agent = rpc.agent.current_agent()
        os.kill(pids[1], signal.SIGSTOP)
        try:

            def leave() -> None:
                until(agent._dialing[1].locked)
                rpc.shutdown(graceful=False)

            error, left = together(lambda: rpc.rpc_sync("w1", os.getpid, timeout=0), leave)
        finally:
            os.kill(pids[1], signal.SIGCONT)
            fastcoll.barrier()
        assert isinstance(error, AbortedError), error
        assert left is None
    else:
        fastcoll.barrier()  # until then rank 0 must not see that this worker leaves
        rpc.shutdown(graceful=False)


def test_init_rpc_without_any_settings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("MASTER_", "RANK", "WORLD_", "LOCAL_", "SLURM_", "OMPI_", "PMI")):
            monkeypatch.delenv(name)
    with pytest.raises(ValueError, match="environment variable RANK expected, but not set"):
        rpc.init_rpc("alone")
    rpc.init_rpc("alone", rank=0, world_size=1)
    rpc.shutdown(timeout=LIMIT)


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("group_first", [True, False])
def test_rpc_and_a_group_meet_in_one_file(
    rank: int, world_size: int, tmp_path: Path, group_first: bool
) -> None:
    url = f"file://{tmp_path}/met"
    options = rpc.RpcBackendOptions(init_method=url)
    for group in (group_first, not group_first):
        if group:
            fastcoll.init_process_group(init_method=url, rank=rank, world_size=world_size)
        else:
            rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    fastcoll.barrier()  # now both ranks have the group
    assert rpc.rpc_sync(f"w{1 - rank}", fastcoll.get_rank) == 1 - rank
    rpc.shutdown(timeout=LIMIT)
    fastcoll.destroy_process_group()


@pytest.mark.ranks(2)
def test_an_exception_of_a_function_is_logged_by_the_callee(
    worker: int, caplog: pytest.LogCaptureFixture
) -> None:
    if worker == 0:
        with pytest.raises(ValueError, match="invalid literal"):
            rpc.rpc_sync("w1", fail, args=("x",))
        with pytest.raises(ValueError, match="invalid literal"):
            rpc.remote("w1", fail, args=("y",)).to_here()
    rpc.shutdown(timeout=LIMIT)
    texts = [record.getMessage().strip() for record in caplog.records]
    assert [text[-3:] for text in texts if "Traceback" in text] == (["'x'", "'y'"] if worker == 1 else [])


@pytest.mark.ranks(2)
def test_wrong_arguments_of_init_rpc(rank: int) -> None:
    for wrong, message in (
        ({"name": 3}, "name is 3"),
        ({"backend": "GRPC"}, "Argument backend must be a member of BackendType"),
        ({"rpc_backend_options": {}}, "rpc_backend_options must be an instance of RpcBackendOptions"),
    ):
        with pytest.raises(TypeError, match=message):
            rpc.init_rpc(**{"name": "x"} | wrong)  # type: ignore[arg-type]
    for name, message in (("", "be non-empty"), ("a" * 200, "shorter than 128"), ("a b", "name must match")):
        with pytest.raises(RuntimeError, match=message):
            rpc.init_rpc(name)
        with pytest.raises(RuntimeError, match=message):
            rpc.WorkerInfo(name, 0)
    with pytest.raises(UsageError, match="num_worker_threads"):
        rpc.TensorPipeRpcBackendOptions(num_worker_threads=0)
    with pytest.raises(fastcoll.UnavailableError, match="move them to the CPU"):
        rpc.TensorPipeRpcBackendOptions(device_maps={"w1": {0: 0}})
    with pytest.raises(UsageError, match=r"'same' is not unique, .*: rank 0 \(.*\) and rank 1 \("):
        rpc.init_rpc("same")
    assert rpc.is_available()
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        rpc.get_rpc_timeout()
    options = rpc.RpcBackendOptions(rpc_timeout=7)
    rpc.init_rpc(f"w{rank}", rpc.BackendType.TENSORPIPE, rpc_backend_options=options)
    assert rpc.get_rpc_timeout() == 7
    with pytest.raises(UsageError, match="already initialized"):
        rpc.init_rpc(f"w{rank}")
    info = pickle.loads(pickle.dumps(rpc.get_worker_info()))
    assert info == rpc.get_worker_info(f"w{rank}")
    rpc.shutdown(timeout=LIMIT)


@pytest.mark.ranks(1)
def test_a_job_without_a_secret_has_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTCOLL_SECRET", raising=False)
    monkeypatch.delenv("FASTCOLL_SECRET_FILE", raising=False)
    monkeypatch.setenv("FASTCOLL_INSECURE", "1")
    config.forget()
    try:
        why = r"runs the functions .* FASTCOLL_INSECURE=1 .* give every rank"
        with pytest.raises(UnavailableError, match=why):
            rpc.init_rpc("w0")
        monkeypatch.setenv("FASTCOLL_SECRET", "one that all workers have")
        config.forget()
        rpc.init_rpc("w0")
        rpc.shutdown(timeout=LIMIT)
    finally:
        config.forget()
