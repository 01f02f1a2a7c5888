"""Futures in one process: results, errors, callbacks, many at once."""

from __future__ import annotations

import asyncio
import pickle
import threading
from typing import Any

import pytest

from fastcoll.errors import RpcTimeoutError, UsageError
from fastcoll.rpc import Future, collect_all, wait_all


def test_a_result_is_set_once() -> None:
    future: Future[int] = Future()
    assert not future.done()
    with pytest.raises(UsageError, match="not done"):
        future.value()
    future.set_result(3)
    assert (future.done(), future.value(), future.wait()) == (True, 3, 3)
    with pytest.raises(UsageError, match="can only be marked completed once"):
        future.set_exception(KeyError())


def test_an_exception_is_raised_each_time() -> None:
    future: Future[int] = Future()
    future.set_exception(KeyError("x"))
    for ask in (future.wait, future.value):
        with pytest.raises(KeyError, match="x"):
            ask()


def test_wait_raises_after_its_timeout() -> None:
    with pytest.raises(RpcTimeoutError, match=r"timed out: .*0.01 s"):
        Future().wait(0.01)


def test_callbacks_run_in_order_and_then_has_their_result() -> None:
    future: Future[int] = Future()
    seen: list[Any] = []
    future.add_done_callback(lambda done: seen.append(done.value()))
    doubled = future.then(lambda done: done.value() * 2).then(lambda done: done.value() + 1)
    failed = future.then(lambda done: 1 // 0)
    future.set_result(4)
    future.add_done_callback(lambda done: seen.append("late"))
    assert (seen, doubled.wait()) == ([4, "late"], 9)
    with pytest.raises(RuntimeError, match="a callback raised ZeroDivisionError") as raised:
        failed.wait()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        future.then(None)  # type: ignore[arg-type]


def test_the_first_exception_of_many_ends_wait_all() -> None:
    futures: list[Future[int]] = [Future() for _ in range(3)]
    whole = collect_all(futures)
    futures[1].set_exception(KeyError("first"))
    assert whole.done()
    for ask in (whole.value, lambda: wait_all(futures)):
        with pytest.raises(KeyError, match="first"):
            ask()
    assert not futures[0].done()


def test_a_future_cannot_be_pickled() -> None:
    with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
        pickle.dumps(Future())


def test_many_are_collected_and_waited_for() -> None:
    futures: list[Future[int]] = [Future() for _ in range(8)]
    whole = collect_all(futures)
    threads = [threading.Thread(target=futures[k].set_result, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    assert [each.value() for each in whole.wait(60)] == wait_all(futures) == list(range(8))
    for thread in threads:
        thread.join()
    assert collect_all([]).wait() == []


def test_a_future_can_be_awaited() -> None:
    future: Future[int] = Future()

    async def ask() -> int:
        threading.Timer(0.01, future.set_result, args=(5,)).start()
        return await future

    assert asyncio.run(ask()) == 5
