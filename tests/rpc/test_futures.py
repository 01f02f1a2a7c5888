"""Futures in one process: results, errors, callbacks, many at once."""

from __future__ import annotations

import asyncio
import pickle
import threading
from functools import partial
from typing import Any

import pytest
from together import together

from fastcoll.errors import RpcTimeoutError, UsageError
from fastcoll.rpc import Future, collect_all, wait_all


def test_a_result_is_set_once() -> None:
    future: Future[int] = Future()
    assert not future.done()
    with pytest.raises(UsageError, match="not done"):
        future.value()
    with pytest.raises(RpcTimeoutError, match=r"timed out: .*0.01 s"):
        future.wait(0.01)
    with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
        pickle.dumps(future)
    future.set_result(3)
    assert (future.done(), future.value(), future.wait()) == (True, 3, 3)
    with pytest.raises(UsageError, match="can only be marked completed once"):
        future.set_exception(KeyError())


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


def test_a_callback_whose_exception_has_no_text_ends_the_future() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise AttributeError("no text")

    def fail(_: object) -> None:
        raise SilentError

    future: Future[int] = Future()
    following = future.then(fail)
    future.set_result(1)
    assert following.done()
    with pytest.raises(RuntimeError, match=r"raised SilentError: <exception str\(\) failed>"):
        following.wait(0)


def test_an_exception_is_raised_with_its_message_whatever_its_constructor_does() -> None:
    class MissingError(KeyError):
        def __init__(self, key: str) -> None:
            super().__init__(f"no key {key}")
            self.key = key

    future: Future[int] = Future()
    future.set_exception(MissingError("a"))
    for _ in range(2):
        with pytest.raises(MissingError) as raised:
            future.wait()
        assert (raised.value.args, raised.value.key) == (("no key a",), "a")


def test_the_first_exception_of_many_ends_wait_all() -> None:
    futures: list[Future[int]] = [Future() for _ in range(3)]
    whole = collect_all(futures)
    futures[1].set_exception(KeyError("first"))
    assert whole.done()
    for ask in (whole.value, whole.wait, futures[1].wait, lambda: wait_all(futures)):
        with pytest.raises(KeyError, match="first"):
            ask()
    assert not futures[0].done()


def test_many_are_collected_and_waited_for() -> None:
    futures: list[Future[int]] = [Future() for _ in range(8)]
    whole = collect_all(futures)
    assert together(*[partial(each.set_result, k) for k, each in enumerate(futures)]) == [None] * 8
    assert [each.value() for each in whole.wait(60)] == wait_all(futures) == list(range(8))
    assert collect_all([]).wait() == []


def test_a_future_can_be_awaited() -> None:
    future: Future[int] = Future()

    async def ask() -> int:
        setter = threading.Thread(target=future.set_result, args=(5,))
        asyncio.get_running_loop().call_soon(setter.start)  # once this coroutine waits
        return await future

    assert asyncio.run(ask()) == 5
