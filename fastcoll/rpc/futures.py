"""Future: the result of a call that may still be under way, with the API of torch.futures.Future."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..core import future as core
from ..core.work import ENDLESS, Timeout, forks, seconds
from ..errors import AbortedError, RpcError, RpcTimeoutError, UsageError, message_of
from .link import Link
from .readers import Readers, before_blocking

T = TypeVar("T")
S = TypeVar("S")


class Future(core.Future[T]):
    """A result that comes later.

    Examples:
        >>> future = rpc.rpc_async("worker1", math.factorial, args=(20,))
        >>> future.wait()
        2432902008176640000
    """

    __slots__ = ("_forks", "answer")

    def __init__(self, *, devices: Any = None) -> None:
        super().__init__()
        self._forks = forks()
        # Where the result's message arrives: readers, link, number of the call, deadline. None: the result is local.
        self.answer: tuple[Readers, Link, int, float] | None = None

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """Return a future for the result of `callback`.

        `callback` is called with this future when this future is done, or now if it is done already.

        Raises:
            ArgumentTypeError: `callback` is not callable.

        If the callback raises, the returned future raises a RuntimeError with that exception as its cause.
        """
        following: Future[S] = super().then(callback)
        return following

    def await_end(self, timeout: Timeout) -> None:
        if self._forks != forks():
            raise AbortedError(
                f"{self} is not done in the process from which process {os.getpid()} was forked; wait for it there"
            )
        limit = seconds(timeout, ENDLESS)
        until = time.monotonic() + limit
        if self.answer is None:
            before_blocking()
        else:
            readers, link, number, deadline = self.answer
            before_blocking(link)
            readers.read_answer(link, number, min(until, deadline))
        if not self.done() and not self.block(max(until - time.monotonic(), 0.0)):
            raise RpcTimeoutError(f"the result did not arrive within {limit:g} s")

    def new_future(self) -> Future[Any]:
        return Future()

    def callback_error(self, error: BaseException) -> BaseException:
        """Return the exception with which a future of `then` fails if its callback raised `error`.

        This is a RuntimeError, as in torch, or `error` itself if that is a KeyboardInterrupt or another BaseException.
        """
        if isinstance(error, RuntimeError) or not isinstance(error, Exception):
            return error
        failed = RpcError(f"a callback raised {type(error).__name__}: {message_of(error)}")
        failed.__cause__ = error
        return failed

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "Can not pickle torch.futures.Future or a Future of rpc; wait for its result, or put the decorator "
            "rpc.functions.async_execution on the function that returns it"
        )


def collect_all(futures: Sequence[Future[Any]]) -> Future[list[Future[Any]]]:
    """Return a future of the list `futures`. It is done when all of these are, and fails as soon as one fails."""
    return _collected(futures, ends_early=True)


def wait_all(futures: Sequence[Future[Any]]) -> list[Any]:
    """Return the results of all futures; raise the first exception as soon as it arrives, like torch."""
    return [future.value() for future in collect_all(futures).wait()]


def all_done(futures: Sequence[Future[Any]]) -> Future[list[Future[Any]]]:
    """Return a future of the list `futures`: it is done when all of them have results or exceptions."""
    return _collected(futures, ends_early=False)


def _collected(futures: Sequence[Future[Any]], ends_early: bool) -> Future[list[Future[Any]]]:
    listed: list[Future[Any]] = list(futures)
    combined: Future[list[Future[Any]]] = Future()
    left = [None] * len(listed)  # each future that is done pops one item; popping is atomic

    def count(done: Future[Any]) -> None:
        left.pop()
        if ends_early and (error := done.exception()) is not None:
            combined.complete(None, error)
        elif not left:
            combined.complete(listed, None)

    if not listed:
        combined.complete(listed, None)
    for future in listed:
        future.add_done_callback(count)
    return combined


def as_future(future: Any) -> Future[Any]:
    """Return a Future of this module with the result or exception of `future`, which may be a future of torch."""
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
