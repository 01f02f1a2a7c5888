"""Future: a result that will be set later, with the methods of torch.futures.Future.

The thread that completes a future runs its callbacks. Only the GIL protects the fields: a waiter appends its lock
before it checks `_is_done`, and the completing thread sets `_is_done` before it releases the locks. So a waiter either
sees that the future is done, or has its lock released.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

from ..errors import ArgumentTypeError, UsageError, rebuilt, reduced

_TWICE = "Future can only be marked completed once, and has a result already"
T = TypeVar("T")
F = TypeVar("F", bound="Future[Any]")
E = TypeVar("E", bound=BaseException)


class Future(Generic[T]):
    """A result that will be set later. A subclass defines how to wait for it (`await_end`)."""

    __slots__ = ("__weakref__", "_callbacks", "_error", "_is_done", "_once", "_value", "_waiters")

    def __init__(self) -> None:
        self._is_done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._once = [True]  # the thread that pops this completes the future
        self._waiters: list[threading.Lock] = []
        self._callbacks: list[Callable[[Any], Any]] = []

    def __str__(self) -> str:
        return "the future"

    def done(self) -> bool:
        """Return whether the future has a result or an exception."""
        return self._is_done

    def wait(self, timeout: float | timedelta | None = None) -> T:
        """Wait until the future is done, then return its result or raise its exception.

        Args:
            timeout: the longest wait, in seconds or as a timedelta; None: until the operation or call has ended.

        Raises:
            TimeoutError: the future is not done after `timeout`; the operation or call goes on.
        """
        if not self._is_done:
            self.await_end(timeout)
        return self.value()

    def value(self) -> T:
        """Return the result of a future that is done, or raise its exception.

        Raises:
            UsageError: the future is not done.
        """
        if not self._is_done:
            raise UsageError(f"{self} is not done and has no value yet; call wait() first")
        if self._error is not None:
            raise anew(self._error)
        value: T = self._value
        return value

    def exception(self) -> BaseException | None:
        """Return the exception of a future that is done; None if it has a result. Never blocks."""
        return self._error

    def set_result(self, result: T) -> None:
        """Complete the future; its callbacks run now, on this thread."""
        if not self.complete(result, None):
            raise UsageError(_TWICE)

    def set_exception(self, result: BaseException) -> None:
        """Complete the future with an exception."""
        if not isinstance(result, BaseException):
            raise UsageError(f"{result!r} is set as an exception, but is none")
        if not self.complete(None, result):
            raise UsageError(_TWICE)

    def complete(self, value: Any, error: BaseException | None) -> bool:
        """Complete the future unless it is done; return whether this call completed it."""
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

    def then(self: F, callback: Callable[[F], Any]) -> Any:
        """Return a future for the result of `callback`.

        `callback` is called with this future when this future is done, or now if it is done already.

        Raises:
            ArgumentTypeError: `callback` is not callable.
        """
        if not callable(callback):
            raise ArgumentTypeError(f"then(): incompatible function arguments: {callback!r} is no function")
        following = self.new_future()

        def follow(done: F) -> None:
            try:
                result = callback(done)
            except BaseException as error:
                following.complete(None, self.callback_error(error))
            else:
                following.complete(result, None)

        self.add_done_callback(follow)
        return following

    def add_done_callback(self: F, callback: Callable[[F], Any]) -> None:
        """Call `callback` with this future when it is done, or now if it is done already.

        If `callback` raises an exception, the exception is printed.
        """
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
            except BaseException as error:
                if ends_program(error):
                    raise
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

    def __await__(self) -> Generator[Any, None, T]:
        yield from until_done(self)
        return self.value()

    # ---- for subclasses --------------------------------------------------------------------------------------

    def await_end(self, timeout: float | timedelta | None) -> None:
        """Block until the future is done; raise TimeoutError after `timeout`, which may be None."""
        raise NotImplementedError

    def new_future(self) -> Future[Any]:
        """Return the new future that `then` returns."""
        raise NotImplementedError

    def callback_error(self, error: BaseException) -> BaseException:
        """Return the exception to set in the future that `then` has returned, after its callback raised `error`."""
        return error

    def block(self, seconds: float) -> bool:
        """Block until the future is done, for at most `seconds`; return whether it is done."""
        lock = threading.Lock()
        lock.acquire()
        self._waiters.append(lock)
        return self._is_done or lock.acquire(timeout=seconds) or self._is_done


class Callbacks(Protocol):
    """An object that calls callbacks when it is done: a Future or a Work."""

    def add_done_callback(self, callback: Callable[[Any], object]) -> None: ...


def until_done(future: Callbacks) -> Generator[Any, None, None]:
    """Suspend the asyncio task that awaits `future` until it is done."""
    import asyncio  # takes a quarter of the time of importing this package, and few programs await

    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not over.done():  # the task may have been cancelled meanwhile
            over.set_result(None)

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle)

    future.add_done_callback(wake)
    yield from over


def ends_program(error: BaseException) -> bool:
    """Whether the thread that has called a callback raises the callback's exception: Ctrl-C, on the main thread.

    SystemExit is raised there, too. On any other thread it would only end that thread, on which operations may depend.
    """
    return not isinstance(error, Exception) and threading.current_thread() is threading.main_thread()


def anew(error: E) -> E:
    """Return a copy of an exception, so that the copy can be raised and the original kept.

    If the original were raised, it would refer to the frames that it passes through, and so keep the arguments of these
    calls alive.
    """
    copying = reduced(error)
    try:
        copied = copy.copy(error) if copying is None else rebuilt(*copying)
    except Exception:
        return error.with_traceback(None)
    copied.__cause__ = error.__cause__
    return copied
