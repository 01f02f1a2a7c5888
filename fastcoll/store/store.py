"""Store, the interface of every key-value store through which ranks find one another.

The interface is torch.distributed's. A subclass must implement `set`, `get`, `add` and `check`; the base class builds
`wait`, `barrier`, `multi_get` and `multi_set` from them. Operations that cannot be built from them without a race
(`compare_set`, `append`, queues and others) raise UnavailableError unless the subclass implements them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from ..config import MOST_SECONDS
from ..core.operands import whole
from ..core.work import Timeout, seconds
from ..errors import StoreTimeoutError, UnavailableError, UsageError

S = TypeVar("S", bound="Store")

DEFAULT_TIMEOUT = timedelta(seconds=300)
LISTED = 16  # an error or log text names at most this many items


class StalledError(StoreTimeoutError):
    """The store's server does not answer, or the lock of the store's file is not free.

    The process that serves the store or holds the lock may be stopped and continue later, so a retry may succeed.
    """


class Store(ABC):
    """Keys (text) and values (bytes) that all ranks share.

    Every operation is atomic. Blocking operations (`get`, `multi_get`, `wait`, `barrier`, `queue_pop`) end after the
    store's timeout, and Ctrl-C interrupts them. After `close` every operation raises StoreError.
    """

    _timeout: float = DEFAULT_TIMEOUT.total_seconds()

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Store `value` under `key`, replacing an earlier value. Does not wait for others."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Wait until `key` is set, and return its value.

        Raises:
            StoreTimeoutError: it was not set within the store's timeout.
        """

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the whole number under `key` (missing: 0) and return the sum.

        The value is kept as decimal text. Does not wait for others.
        """

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` are set now."""

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        """Block until all `keys` are set.

        Args:
            timeout: seconds or timedelta; None is the store's timeout.

        Raises:
            StoreTimeoutError: a key was not set in time. The `wait` of a subclass must raise a TimeoutError, too.
        """
        keys, limit = checked_keys(keys), limit_of(self, timeout)
        if not any(self.check(keys) for _ in tries(limit)):
            raise not_set([key for key in keys if not self.check([key])] or keys, limit)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all `keys` are set, and return their values."""
        keys = checked_keys(keys)
        self.wait(keys)  # its error names all missing keys
        return [self.get(key) for key in keys]

    def fetch(self, keys: Sequence[str], timeout: Timeout = None) -> list[bytes]:
        """Wait until all `keys` are set, and return their values, in one request if the store supports it.

        Args:
            timeout: seconds or timedelta; None is the store's timeout.

        Raises:
            StoreTimeoutError: a key was not set in time. (A subclass's `wait` may raise another TimeoutError.)
        """
        self.wait(keys, timeout)
        return self.multi_get(keys)

    def peek(self, keys: Sequence[str], timeout: Timeout = None) -> list[bytes | None]:
        """Return the value of each key, or None if it is not set now. Does not wait for keys.

        Args:
            timeout: how many seconds the server may take to answer, not counting a grace of 5 s; None is the store's
                timeout.
        """
        return [self.get(key) if self.check([key]) else None for key in checked_keys(keys)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set each of `keys` to the value at the same index of `values`.

        Raises:
            UsageError: the lengths differ, or a key is not a str.
        """
        for key, value in pairs(keys, values):
            self.set(key, value)

    def set_new(self, keys: Sequence[str], values: Sequence[str | bytes]) -> list[bytes | None]:
        """Set each of `keys`, one or two, that is not set. A key that two processes set so is set by one of them.

        Returns:
            for each key its value before the call, or None if this call has set it.
        """
        found: list[bytes | None] = []
        for key, value in pairs(keys, values):
            is_new = self.add(f"{key}/new", 1) == 1
            if is_new:
                self.set(key, value)
            found.append(None if is_new else self.get(key))  # `get` waits for the process that sets it
        return found

    def exchange(self, key: str, value: str | bytes, wanted: str, timeout: Timeout = None) -> bytes:
        """Set `key`, wait until `wanted` is set, and return its value, in one request if the store supports it.

        Args:
            timeout: seconds or timedelta, for the wait; None is the store's timeout.

        Raises:
            StoreTimeoutError: `wanted` was not set in time; `key` is set.
        """
        self.set(key, value)
        return self.fetch([wanted], timeout)[0]

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set `key` to `desired_value` if its value is `expected_value`; return the value after the call.

        If the key is missing and `expected_value` is empty, the key is set, too. If the key is missing and
        `expected_value` is not empty, the key stays missing, and `expected_value` is returned.
        """
        self._refuse("compare_set")

    def append(self, key: str, value: str | bytes) -> None:
        """Append `value` to the value of `key` (missing: empty). Does not wait for others."""
        self._refuse("append")

    def delete_key(self, key: str) -> bool:
        """Remove `key`; return whether it was set."""
        self._refuse("delete_key")

    def num_keys(self) -> int:
        """Return how many keys are set."""
        self._refuse("num_keys")

    def list_keys(self) -> list[str]:
        """Return the keys that are set, in no particular order."""
        self._refuse("list_keys")

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append `value` to the queue `key`, which is created if needed. Does not wait for others.

        For `wait`, `check` and `delete_key` a queue is a key that is set while the queue is not empty.
        """
        self._refuse("queue_push")

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove the first value from the queue `key`, and return it. Each value is returned to one caller only.

        Args:
            block: whether to wait for a value, up to the store's timeout.

        Raises:
            StoreTimeoutError: no value was pushed within the store's timeout.
            QueueEmptyError: the queue is empty, and `block` is False.
        """
        self._refuse("queue_pop")

    def queue_len(self, key: str) -> int:
        """Return how many values are in the queue `key` now."""
        self._refuse("queue_len")

    def retire(self, prefix: str, users: int) -> bool:
        """Record that one of `users` users no longer needs the keys that begin with `prefix`.

        The last of the `users` calls removes the keys and returns True; the earlier calls return False. A store that
        does not implement this method keeps the keys, because count and removal must be one atomic step. Does not wait
        for others.
        """
        return False

    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> None:
        """Block until `world_size` processes have called this with the same `key`; use each key for one barrier only.

        Args:
            timeout: seconds or timedelta; None is the store's timeout.

        Raises:
            StoreTimeoutError: fewer processes came in time; the message has their number.
        """
        if whole("world_size", world_size) < 1:
            raise UsageError(f"world_size is {world_size}; a barrier needs at least one process")
        counter, last = f"{checked_key(key)}/num_members", f"{key}/last_member"
        came = f"came to the barrier {key!r}"
        count_in(self, counter, last, world_size, limit_of(self, timeout), came)

    def clone(self: S) -> S:
        """Return another object for the same keys and values, with its own timeout; each is closed separately."""
        self._refuse("clone")

    def has_extended_api(self) -> bool:
        """Return whether the store implements `append`, `multi_get` and `multi_set` itself."""
        return False

    @property
    def timeout(self) -> timedelta:
        """The timeout of blocking operations."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set the timeout of blocking operations (timedelta, or seconds)."""
        self._timeout = limit_of(self, timeout)

    def close(self) -> None:  # noqa: B027 - a store that holds nothing has nothing to close
        """Release the resources of the store. Closing twice is fine."""

    def leave(self, linger: float) -> None:
        """Close the store; a server first waits at most `linger` seconds for the others to disconnect."""
        self.close()

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refuse(self, method: str) -> NoReturn:
        name = type(self).__name__
        raise UnavailableError(f"{name} has no {method}; override Store.{method} in {name} to use it")


@dataclass
class Rendezvous:
    """The result of a rendezvous: a store that all ranks share, this process's rank, and the world size.

    Attributes:
        store: shared by all ranks; owned by this object.
        rank, world_size: this process's rank, and the number of ranks.
        host: this node's address, as the other ranks see it; "" if a user's handler has found the other ranks.
        handler: the generator of the user's handler, if there is one.
    """

    store: Store
    rank: int
    world_size: int
    host: str
    handler: Iterator[Any] | None = None

    def close(self, linger: float = 0.0) -> None:
        """Close the store, and the server or file behind it. Closing twice is fine.

        Args:
            linger: how many seconds the process that serves the store waits, at most, for the others to disconnect.
        """
        self.store.leave(linger)
        if isinstance(self.handler, Generator):
            self.handler.close()


def limit_of(store: Store, timeout: Timeout = None) -> float:
    """Return a timeout in seconds; None: the store's timeout."""
    limit = seconds(timeout, store.timeout.total_seconds())
    if not 0 <= limit <= MOST_SECONDS:
        raise UsageError(f"a store's timeout is 0 to {MOST_SECONDS:g} s, got {timeout!r}")
    return limit


@contextmanager
def limited(store: Store, most: float) -> Iterator[None]:
    """Limit the store's timeout to `most` seconds in a `with` block, for a process that leaves."""
    before = store.timeout
    store.set_timeout(min(before.total_seconds(), most))
    try:
        yield
    finally:
        store.set_timeout(before)


def tries(limit: float, first: float = 0.001, most: float = 0.05, growth: float = 2.0) -> Iterator[None]:
    """Pace a polling loop: yield at once, then after pauses that grow from `first` to `most` seconds.

    The last yield is `limit` seconds after the first.
    """
    deadline, pause = time.monotonic() + limit, first
    while True:
        yield
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(pause, left))
        pause = min(growth * pause, most)


def count_in(store: Store, counter: str, last: str, size: int, limit: float | None, came: str) -> None:
    """Count this process, and wait at most `limit` seconds until `size` processes are counted; None: do not wait.

    `came` is what these processes do, for the error text: "3 of 4 processes CAME within 5 s".
    """
    if store.add(counter, 1) == size:
        store.set(last, b"")
    if limit is None:
        return
    try:
        store.wait([last], limit)
    except TimeoutError as error:
        raise StoreTimeoutError(
            f"{store.add(counter, 0)} of {size} processes {came} within {limit:g} s"
        ) from error


def checked_key(key: Any) -> str:
    """Return the key; UsageError if it is not a str."""
    if not isinstance(key, str):
        raise UsageError(f"a store's key is text, got {type(key).__name__} {key!r:.80}")
    return key


def checked_keys(keys: Any) -> list[str]:
    """Return `keys` as a list; UsageError if it is a str or no sequence, or if an item is not a str."""
    return [checked_key(key) for key in _items("keys", keys)]


def pairs(keys: Any, values: Any) -> list[tuple[str, str | bytes]]:
    """Return pairs of keys and values; UsageError if the lengths differ, or an argument is not a list."""
    names, items = checked_keys(keys), _items("values", values)
    if len(names) != len(items):
        raise UsageError(
            f"multi_set got {len(names)} keys and {len(items)} values; give a value for each key"
        )
    return list(zip(names, items, strict=True))


def _items(what: str, items: Any) -> list[Any]:
    if isinstance(items, str | bytes):
        raise UsageError(f"{what} is a list of {what}, got {items!r:.80}; write [{items!r:.80}]")
    if not isinstance(items, Iterable):
        raise UsageError(f"{what} is a list of {what}, got {type(items).__name__} {items!r:.80}")
    return list(items)


def not_set(keys: Sequence[str], limit: float, count: int | None = None) -> StoreTimeoutError:
    """Return the error for keys that were not set within `limit` seconds.

    `count` is their number, if `keys` has only the first of them.
    """
    names = listed([repr(key) for key in keys], count)
    were = "was" if (len(keys) if count is None else count) == 1 else "were"
    return StoreTimeoutError(f"{names} {were} not set in the store within {limit:g} s")


def listed(items: Sequence[object], count: int | None = None) -> str:
    """Return a text that has the first LISTED of `items` and the number of the others.

    `count` is the number of all items, if `items` has only the first of them.
    """
    more = (len(items) if count is None else count) - LISTED
    return ", ".join(map(str, items[:LISTED])) + (f" and {more} more" if more > 0 else "")
