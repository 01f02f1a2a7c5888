"""Work and ProgressQueue: timeouts, forks, Ctrl-C with handlers of libraries, threads that cannot be started."""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures as cf
import importlib.util
import math
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from net.meshes import until

import fastcoll as dist
from fastcoll.api.p2p import _Received
from fastcoll.core.work import ENDLESS, ProgressQueue, UnobservedWorks, Work, WorkFuture, seconds
from fastcoll.errors import CollectiveTimeoutError, UsageError


def refuse(start: Callable[[Any], None], thread: Any) -> None:
    raise RuntimeError("can't start new thread")


def interrupt(start: Callable[[Any], None], thread: Any) -> None:
    """Raise, as Ctrl-C does when the thread has begun."""
    start(thread)
    raise KeyboardInterrupt


@pytest.mark.parametrize(("trouble", "kind"), [(refuse, RuntimeError), (interrupt, KeyboardInterrupt)])
def test_a_thread_that_did_not_start_leaves_the_queue_usable(
    monkeypatch: pytest.MonkeyPatch, trouble: Callable[..., None], kind: type[BaseException]
) -> None:
    queue, start, ran = ProgressQueue("troubled"), threading.Thread.start, []
    before = threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", lambda thread: trouble(start, thread))
    with pytest.raises(kind):
        queue.submit("first", lambda: ran.append("first"))
    assert queue.pending == 0
    monkeypatch.undo()
    assert queue.submit("second", lambda: ran.append("second") or "done").result() == "done"
    assert ran == ["second"]
    queue.close()
    until(lambda: threading.active_count() <= before)


def test_a_callback_that_exits_does_not_end_the_thread_that_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, go_on = ProgressQueue("exits"), threading.Event()
    first = queue.submit("first", go_on.wait)
    first.add_done_callback(lambda _: sys.exit(3))
    go_on.set()
    assert queue.submit("second", lambda: "done").result(timeout=60) == "done"
    queue.close()
    called: list[Any] = []
    printed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.append(args.exc_type))
    future = WorkFuture(first)
    future.add_done_callback(lambda _: sys.exit(3))
    future.add_done_callback(called.append)
    with cf.ThreadPoolExecutor(1) as pool:
        assert pool.submit(future.complete, None, None).result()
    assert (called, printed) == ([future], [SystemExit])
    for done in (first, future):
        with pytest.raises(SystemExit):
            done.add_done_callback(lambda _: sys.exit(3))


def test_ctrl_c_ends_a_wait_even_if_a_handler_restarts_system_calls() -> None:
    work, main = Work("what never ends"), threading.get_ident()

    def is_waiting() -> bool:
        stack = [frame.f_code for frame, _ in traceback.walk_stack(sys._current_frames()[main])]
        return stack[0] is threading.Condition.wait.__code__ and Work.wait.__code__ in stack

    def interrupt_the_wait() -> None:
        until(is_waiting)
        signal.pthread_kill(main, signal.SIGINT)

    signal.siginterrupt(signal.SIGINT, False)
    thread = threading.Thread(target=interrupt_the_wait)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            work.wait(timeout=90)
        assert not work.is_completed()
    finally:
        signal.siginterrupt(signal.SIGINT, True)
        thread.join()


@pytest.mark.parametrize("long", [math.inf, 1e12, 10**400, timedelta.max])
def test_a_timeout_is_limited_to_the_longest_that_the_system_allows(long: Any) -> None:
    assert seconds(long, 1.0) == ENDLESS


@pytest.mark.parametrize("wrong", [math.nan, "x", [1]])
def test_an_invalid_timeout_is_refused(wrong: Any) -> None:
    done, pending = Work("done"), Work("pending")
    done.complete()
    for work in (done, pending):
        with pytest.raises(UsageError, match="give seconds as a number, or a timedelta"):
            work.wait(wrong)
    with pytest.raises(CollectiveTimeoutError):
        pending.wait(0)


@pytest.mark.parametrize(("result", "source"), [(None, None), (2, 2), (np.int64(2), 2), (np.ones(1), None)])
def test_only_a_receive_has_a_source(result: Any, source: int | None) -> None:
    work = Work("operation")
    work.complete(result)
    assert work.source_rank() == source


def test_concurrent_futures_wait_for_works() -> None:
    fine, wrong, inner = Work("fine"), Work("wrong"), Work("recv")
    received = _Received(inner, (0, 5))
    works = [fine, wrong, received]
    assert cf.wait(works, timeout=0) == (set(), set(works))
    with cf.ThreadPoolExecutor(2) as pool:
        first_error = pool.submit(cf.wait, works, 60, cf.FIRST_EXCEPTION)
        all_of_them = pool.submit(lambda: set(cf.as_completed(works, 60)))
        fine.complete()
        wrong.complete(error=ValueError("bad"))
        inner.complete(1)
        assert first_error.result().done >= {wrong}
        assert all_of_them.result() == cf.wait(works, 60).done == set(works)
    assert received.result(0) == 5
    assert not any(work.cancel() or work.cancelled() or work.running() for work in works)

    async def in_asyncio() -> Any:
        return await asyncio.wrap_future(received)

    assert asyncio.run(in_asyncio()) == 5


def test_the_repr_of_a_work_has_operation_and_state() -> None:
    queue, go_on = ProgressQueue("shown"), threading.Event()
    running, waiting = queue.submit("all_reduce", go_on.wait), queue.submit("barrier", lambda: 1 / 0)
    until(running.running)
    assert (repr(running), repr(waiting)) == ("<Work all_reduce: running>", "<Work barrier: pending>")
    go_on.set()
    assert cf.wait([running, waiting], 60).done == {running, waiting}
    assert repr(running) == "<Work all_reduce: done>"
    assert repr(waiting) == "<Work barrier: failed with ZeroDivisionError: division by zero>"
    queue.close()


def test_the_first_failures_that_no_thread_has_checked_are_kept() -> None:
    unobserved, works = UnobservedWorks(), [Work(f"call {number}") for number in range(40)]
    for work in works:
        unobserved.note(work).complete(error=ValueError(work.describe))
    assert [what for what, _ in unobserved.lost()] == [f"call {number}" for number in range(16)]
    works[3].exception()
    assert "call 3" not in dict(unobserved.lost())


FORK = """
import asyncio, os, signal
from fastcoll.errors import AbortedError
from fastcoll.api.p2p import _Received
from fastcoll.core.work import Work

async def wait_for(work):
    await work

done, pending = Work("done"), Work("recv from rank 1")
done.complete(1)
child = os.fork()
if child == 0:
    signal.alarm(90)
    for work in (pending, _Received(pending, (0, 5))):
        for wait in (work.wait, work.result, lambda: asyncio.run(wait_for(work))):
            try:
                wait()
            except AbortedError as error:
                assert f"recv from rank 1 is under way in the process from which process {os.getpid()}" in str(error)
            else:
                raise SystemExit("it came to an end")
    assert done.result() == 1 and _Received(done, (0, 5)).result() == 5
    own = Work("own")
    own.complete(3)
    assert own.result() == 3
    raise SystemExit
assert os.waitpid(child, 0)[1] == 0
pending.complete(2)
assert pending.result() == 2
"""


def test_a_child_of_fork_does_not_wait_for_operations_of_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.ranks(2)
def test_a_future_has_torchs_methods_and_the_output_arrays(rank: int) -> None:
    x = np.full(3, rank + 1.0)
    future = dist.all_reduce(x, async_op=True).get_future()
    halves = future.then(lambda done: done.value()[0] / 2).then(lambda done: done.wait().tolist())
    assert halves.wait() == [1.5] * 3
    assert future.done()
    assert future.value()[0] is x
    works = [dist.isend(x, 1 - rank), dist.irecv(np.empty(3))]
    assert [work.get_future().wait() for work in works] == [[], [1 - rank]]
    gathered = dist.all_gather(np.full(1, rank), async_op=True).get_future().wait()
    assert [array.tolist() for array in gathered] == [[0], [1]]
    work = dist.barrier(async_op=True)
    work.synchronize()
    assert work.is_completed()


def test_a_future_without_a_value_raises() -> None:
    work = Work("all_reduce")
    future = work.get_future()
    seen: list[Any] = []
    future.add_done_callback(seen.append)
    following = future.then(lambda done: done.value())
    with pytest.raises(UsageError, match="the future of <Work all_reduce: pending> is not done"):
        future.value()
    work.complete(error=CollectiveTimeoutError("rank 1 did not come"))
    assert seen == [future]
    for ask in (future.wait, future.value, following.wait, following.value):
        with pytest.raises(CollectiveTimeoutError, match="rank 1 did not come"):
            ask()


def test_a_wait_for_a_failed_operation_gives_what_the_callback_made_of_it() -> None:
    class FailsLater(Work):
        def await_end(self, limit: float) -> bool:
            self.complete(error=CollectiveTimeoutError("rank 1 did not come"))
            return True

    future = FailsLater("all_reduce").get_future()
    assert future.then(lambda done: type(done.exception())).wait() is CollectiveTimeoutError
    pending = Work("barrier").get_future()
    with pytest.raises(CollectiveTimeoutError, match="barrier is not complete after 0 s"):
        pending.then(lambda done: 1).wait(0)


def test_a_future_has_every_method_of_torchs() -> None:
    """As torch's source has them, because importing torch takes seconds."""
    torch = importlib.util.find_spec("torch")
    if torch is None:
        pytest.skip("could not import 'torch'")
    source = ast.parse((Path(str(torch.origin)).parent / "futures" / "__init__.py").read_text())
    (future,) = (each for each in source.body if isinstance(each, ast.ClassDef))
    theirs = {each.name for each in future.body if isinstance(each, ast.FunctionDef)}
    assert {name for name in theirs if not name.startswith("_")} - set(dir(WorkFuture)) == set()
