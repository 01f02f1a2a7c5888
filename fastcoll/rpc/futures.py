"""Future: the result of a call that may still be under way, as torch.futures.Future.

Who completes a future runs its callbacks, on its own thread. All fields change under the GIL alone: a waiter first
appends its lock and then looks whether the future is done; who completes it first marks it done and then releases the
locks. So one of them sees the other.
"""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

from ..core.work import ENDLESS, Timeout, seconds
from ..errors import ArgumentTypeError, RpcError, RpcTimeoutError, UsageError
from .readers import before_blocking

_TWICE = "Future can only be marked completed once, and has a result already"
T = TypeVar("T")
S = TypeVar("S")
E = TypeVar("E", bound=BaseException)


class Answers(Protocol):
    """A connection on which answers arrive."""

    def lead(self, number: int, until: float) -> None:
        """Help to receive an answer, until a time."""


class Future(Generic[T]):
    """A result that comes later.

    Example:
        >>> future = rpc.rpc_async("worker1", math.factorial, args=(20,))
        >>> future.wait()
        2432902008176640000
    """

    __slots__ = (
        "__weakref__", "_callbacks", "_error", "_is_done", "_once", "_value", "_waiters", "deadline", "link",
        "number",
    )  # fmt: skip

    def __init__(self, *, devices: Any = None) -> None:
        self._is_done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._once = [True]  # who pops it completes the future
        self._waiters: list[threading.Lock] = []
        self._callbacks: list[Callable[[Future[T]], Any]] = []
        self.link: Answers | None = None  # the connection on which the result arrives, as answer `number`
        self.number = 0
        self.deadline = ENDLESS

    def done(self) -> bool:
        """Whether it has a result or an exception."""
        return self._is_done

    def wait(self, timeout: Timeout = None) -> T:
        """The result, waited for, or raise the exception.

        Args:
            timeout: seconds or timedelta to wait here; None: as long as the call itself may take.

        Raises:
            RpcTimeoutError: it did not come in time.
        """
        if not self._is_done and not self._await(seconds(timeout, ENDLESS)):
            raise RpcTimeoutError(f"the result did not come within {seconds(timeout, 0.0):g} s")
        return self.value()

    def value(self) -> T:
        """The result of a future that is done, or raise its exception."""
        if not self._is_done:
            raise UsageError("the future is not done; call wait() first")
        if self._error is not None:
            raise anew(self._error)
        return cast(T, self._value)

    def exception(self) -> BaseException | None:
        """The exception of a future that is done; None: it has a result."""
        return self._error

    def set_result(self, result: T) -> None:
        """Complete the future; its callbacks run now, on this thread."""
        if not self.complete(result, None):
            raise UsageError(_TWICE)

    def set_exception(self, result: BaseException) -> None:
        """Complete the future by an exception."""
        if not isinstance(result, BaseException):
            raise UsageError(f"{result!r} is set as an exception, but is none")
        if not self.complete(None, result):
            raise UsageError(_TWICE)

    def complete(self, value: Any, error: BaseException | None) -> bool:
        """Complete it unless it is; whether it was not."""
        try:
            self._once.pop()
        except IndexError:
            return False
        self._value, self._error = value, error
        self._is_done = True
        for waiter in self._waiters:
            waiter.release()
        self._run_callbacks()
        return True

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """Return a future of the result of `callback`, called with this future when it is done (now, if it is done).

        Raises:
            ArgumentTypeError: `callback` is not callable.

        If the callback raises, the returned future raises a RuntimeError with that exception as its cause.
        """
        if not callable(callback):
            raise ArgumentTypeError(f"then(): incompatible function arguments: {callback!r} is no function")
        following: Future[S] = Future()

        def follow(done: Future[T]) -> None:
            try:
                result = callback(done)
            except BaseException as error:
                following.complete(None, _of_callback(error))
            else:
                following.complete(result, None)

        self.add_done_callback(follow)
        return following

    def add_done_callback(self, callback: Callable[[Future[T]], Any]) -> None:
        """Call `callback` with this future when it is done (now, if it is); its exceptions are printed."""
        self._callbacks.append(callback)
        if self._is_done:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # another thread has taken it
                return
            try:
                callback(self)
            except Exception:
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

    def _await(self, limit: float) -> bool:
        until = time.monotonic() + limit
        before_blocking(self.link)
        if self.link is not None:
            self.link.lead(self.number, min(until, self.deadline))
            if self._is_done:
                return True
        lock = threading.Lock()
        lock.acquire()
        self._waiters.append(lock)
        if self._is_done:
            return True
        return lock.acquire(timeout=max(until - time.monotonic(), 0.0)) or self._is_done

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "Can not pickle torch.futures.Future or a Future of rpc; wait for it, or have the function that returns it "
            "marked by rpc.functions.async_execution"
        )

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio

        loop = asyncio.get_running_loop()
        over = loop.create_future()

        def wake() -> None:
            if not over.done():
                over.set_result(None)

        self.add_done_callback(lambda _: loop.call_soon_threadsafe(wake))
        yield from over
        return self.value()


def anew(error: E) -> E:
    """A copy of an exception that is kept, to be raised.

    An exception that is raised has the frames that it goes through, and with them the arguments of calls.
    """
    try:
        copied = copy.copy(error)
    except Exception:  # its class takes other arguments than the exception tells
        return error.with_traceback(None)
    copied.__cause__ = error.__cause__
    return copied


def _of_callback(error: BaseException) -> BaseException:
    """Return the exception of a callback's future for the callback's `error`: a RuntimeError, as in torch."""
    if isinstance(error, RuntimeError) or not isinstance(error, Exception):
        return error
    failed = RpcError(f"a callback raised {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


def collect_all(futures: Sequence[Future[Any]]) -> Future[list[Future[Any]]]:
    """Return a future of this list, done when all of them are; the first exception completes it at once."""
    return _collected(futures, ends_early=True)


def wait_all(futures: Sequence[Future[Any]]) -> list[Any]:
    """Return the results of all; raise the first exception as soon as it arrives, as torch does."""
    return [future.value() for future in collect_all(futures).wait()]


def all_done(futures: Sequence[Future[Any]]) -> Future[list[Future[Any]]]:
    """Return a future of this list, done when all of them have results or exceptions."""
    return _collected(futures, ends_early=False)


def _collected(futures: Sequence[Future[Any]], ends_early: bool) -> Future[list[Future[Any]]]:
    listed: list[Future[Any]] = list(futures)
    whole: Future[list[Future[Any]]] = Future()
    left = [None] * len(listed)  # each that is done pops one; popping is atomic

    def count(done: Future[Any]) -> None:
        left.pop()
        if ends_early and (error := done.exception()) is not None:
            whole.complete(None, error)
        elif not left:
            whole.complete(listed, None)

    if not listed:
        whole.complete(listed, None)
    for future in listed:
        future.add_done_callback(count)
    return whole


def adopted(future: Any) -> Future[Any]:
    """A future, or one of torch's, as one of ours."""
    if isinstance(future, Future):
        return future
    ours: Future[Any] = Future()

    def complete(done: Any) -> None:
        try:
            ours.complete(done.value(), None)
        except Exception as error:
            ours.complete(None, error)

    future.add_done_callback(complete)
    return ours
