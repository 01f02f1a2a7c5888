"""Store, the contract of every key-value store through which ranks find one another.

The interface is torch.distributed's. A subclass must bring `set`, `get`, `add` and `check`; the base
makes `wait`, `barrier`, `multi_get` and `multi_set` from them. What cannot be made from them without a race
(`compare_set`, `append`, queues and the like) is refused by name until the subclass brings it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
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
LISTED = 16  # so many things a message names at most


class StalledError(StoreTimeoutError):
    """The store's server does not answer. It may be stopped and continue, so a read can be retried."""


class Store(ABC):
    """Keys (text) and values (bytes) that all ranks share.

    Every operation is atomic. Blocking ones (`get`, `multi_get`, `wait`, `barrier`, `queue_pop`) end with the
    store's timeout and let Ctrl-C through. After `close` every operation raises StoreError.
    """

    _timeout: float = DEFAULT_TIMEOUT.total_seconds()

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Store `value` under `key`, replacing what was there. Does not wait for others."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The value of `key`, once it is set.

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
        """Whether all `keys` are set, now."""

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        """Block until all `keys` are set.

        Args:
            timeout: seconds or timedelta; None is the store's timeout.

        Raises:
            StoreTimeoutError: some key was not set in time. A subclass's own `wait` must raise a
                TimeoutError too.
        """
        keys, limit = checked_keys(keys), limit_of(self, timeout)
        if not any(self.check(keys) for _ in tries(limit)):
            raise not_set([key for key in keys if not self.check([key])] or keys, limit)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all `keys`, once they are set."""
        keys = checked_keys(keys)
        self.wait(keys)  # which names all that are missing
        return [self.get(key) for key in keys]

    def fetch(self, keys: Sequence[str], timeout: Timeout = None) -> list[bytes]:
        """The values of all `keys`, once they are set: `wait`, then `multi_get`, in one message where it can be.

        Args:
            timeout: seconds or timedelta; None is the store's timeout.

        Raises:
            StoreTimeoutError: some key was not set in time. Of a subclass's own `wait`, a TimeoutError.
        """
        self.wait(keys, timeout)
        return self.multi_get(keys)

    def peek(self, keys: Sequence[str], timeout: Timeout = None) -> list[bytes | None]:
        """Return the values of `keys` that are set now, None for the others. Does not wait for keys to be set.

        Args:
            timeout: seconds that the server may take to answer, plus a grace of 5 s; None is the store's timeout.
        """
        return [self.get(key) if self.check([key]) else None for key in checked_keys(keys)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set each of `keys` to the value at the same place in `values`.

        Raises:
            UsageError: the lengths differ, or a key is no text.
        """
        for key, value in pairs(keys, values):
            self.set(key, value)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set `key` to `desired_value` if its value is `expected_value`; return the value after the call.

        An empty `expected_value` also stands for a missing key. A missing key with another
        `expected_value` stays missing, and that is returned.
        """
        self._refuse("compare_set")

    def append(self, key: str, value: str | bytes) -> None:
        """Put `value` behind what is under `key` (missing: nothing). Does not wait for others."""
        self._refuse("append")

    def delete_key(self, key: str) -> bool:
        """Remove `key`; whether it was there."""
        self._refuse("delete_key")

    def num_keys(self) -> int:
        """How many keys are set."""
        self._refuse("num_keys")

    def list_keys(self) -> list[str]:
        """The keys that are set, in no certain order."""
        self._refuse("list_keys")

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put `value` behind the last one in the queue `key`, which is made if need be. Does not wait for others.

        A queue is there for `wait`, `check` and `delete_key` as a key, as long as something is in it.
        """
        self._refuse("queue_push")

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value out of the queue `key`, which nobody else gets then.

        Args:
            block: whether to wait for one, the store's timeout at most.

        Raises:
            StoreTimeoutError: nothing was pushed within the store's timeout.
            QueueEmptyError: nothing is there, and `block` is False.
        """
        self._refuse("queue_pop")

    def queue_len(self, key: str) -> int:
        """How many values are in the queue `key`, now."""
        self._refuse("queue_len")

    def retire(self, prefix: str, users: int) -> bool:
        """Tell that one of so many users of the keys that begin with `prefix` is done with them; was it the last?

        They are removed then. A user's store keeps them, unless it can do that in one step. Does not wait for others.
        """
        return False

    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> None:
        """Block until `world_size` processes have called this with the same `key`, which serves once.

        Args:
            timeout: seconds or timedelta; None is the store's timeout.

        Raises:
            StoreTimeoutError: fewer came in time; the message counts them.
        """
        if whole("world_size", world_size) < 1:
            raise UsageError(f"world_size is {world_size}; a barrier is of one process or more")
        counter, last = f"{checked_key(key)}/num_members", f"{key}/last_member"
        came = f"came to the barrier {key!r}"
        count_in(self, counter, last, world_size, limit_of(self, timeout), came)

    def clone(self: S) -> S:
        """Another object for the same keys and values, with a timeout of its own; each is closed for itself."""
        self._refuse("clone")

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` are more than what the base makes of the others."""
        return False

    @property
    def timeout(self) -> timedelta:
        """How long blocking operations wait."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Let blocking operations wait for `timeout` (timedelta, or seconds)."""
        self._timeout = limit_of(self, timeout)

    def close(self) -> None:  # noqa: B027 - a store that holds nothing has nothing to close
        """Let go of what the store holds open. Closing twice is fine."""

    def leave(self, linger: float) -> None:
        """Close the store; one that serves others first waits, so many seconds at most, for them to leave."""
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
    """A place in the world, and the store that all its ranks share.

    Attributes:
        store: shared by all ranks; it belongs to the rendezvous.
        rank, world_size: this process's place.
        host: the address at which the other ranks see this node; "" where a user's handler has found them.
        handler: that handler's generator.
    """

    store: Store
    rank: int
    world_size: int
    host: str
    handler: Iterator[Any] | None = None

    def close(self, linger: float = 0.0) -> None:
        """Close the store and with it the server or file behind it. Closing twice is fine.

        Args:
            linger: seconds that the process which serves the store waits, at most, for the other
                ranks to leave first.
        """
        self.store.leave(linger)
        if isinstance(self.handler, Generator):
            self.handler.close()


def limit_of(store: Store, timeout: Timeout = None) -> float:
    """Seconds that a call of the store waits; None is the store's own timeout."""
    limit = seconds(timeout, store.timeout.total_seconds())
    if not 0 <= limit <= MOST_SECONDS:
        raise UsageError(f"a store's timeout is 0 to {MOST_SECONDS:g} s, got {timeout!r}")
    return limit


def tries(limit: float, first: float = 0.001, most: float = 0.05, growth: float = 2.0) -> Iterator[None]:
    """Pace a polling loop: yield now, then after pauses that grow from `first` to `most`, and at the limit."""
    deadline, pause = time.monotonic() + limit, first
    while True:
        yield
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(pause, left))
        pause = min(growth * pause, most)


def count_in(store: Store, counter: str, last: str, size: int, limit: float | None, came: str) -> None:
    """Count this process in, and wait at most `limit` seconds until all `size` are there; None does not wait."""
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
    """The key; a UsageError where it is no text."""
    if not isinstance(key, str):
        raise UsageError(f"a store's key is text, got {type(key).__name__} {key!r:.80}")
    return key


def checked_keys(keys: Any) -> list[str]:
    """The keys in a list of them; a UsageError where it is a text, as for one key, or holds something else."""
    return [checked_key(key) for key in _items("keys", keys)]


def pairs(keys: Any, values: Any) -> list[tuple[str, str | bytes]]:
    """Keys with their values; a UsageError where the lengths differ, or one of the two is no list."""
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
    """The error for `count` keys, the first of which are `keys`, that nobody set within `limit` seconds."""
    names = listed([repr(key) for key in keys], count)
    were = "was" if (len(keys) if count is None else count) == 1 else "were"
    return StoreTimeoutError(f"{names} {were} not set in the store within {limit:g} s")


def listed(items: Sequence[object], count: int | None = None) -> str:
    """The first of `count` items, which begin with `items`, as messages show them."""
    more = (len(items) if count is None else count) - LISTED
    return ", ".join(map(str, items[:LISTED])) + (f" and {more} more" if more > 0 else "")
