"""Stores that are views of other stores: one with a prefix before every key, and one of torch.distributed's.

Torch is not imported here: who has such a store has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ..core.work import Timeout
from ..errors import QueueEmptyError, StoreError, UsageError
from .store import Store, checked_key, checked_keys, limit_of, not_set, tries

_POLL_SECONDS = 0.01


def adopted(store: Any) -> Store:
    """`store` itself, or what makes a store of torch.distributed one of fastcoll's.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(store, Store):
        return store
    theirs = getattr(sys.modules.get("torch.distributed"), "Store", None)
    if theirs is not None and isinstance(store, theirs):
        return TorchStore(store)
    raise UsageError(
        f"store is {type(store).__name__}; give a fastcoll.Store or a subclass of it, or a store of torch.distributed"
    )


class TorchStore(Store):
    """`store`, any torch.distributed.Store that all members share; it stays open when this one is closed.

    Waiting is polling: torch's TCPStore writes warnings to stderr whenever a `wait` with a timeout ends without
    the key, and a wait that looks after its peers ends so every 250 ms.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.set_timeout(store.timeout)

    def set(self, key: str, value: str | bytes) -> None:
        _call(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(_call(self._store.get, key))

    def add(self, key: str, amount: int) -> int:
        return int(_call(self._store.add, key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(_call(self._store.check, list(keys)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        if not self.has_extended_api():
            return super().multi_get(keys)
        self.wait(keys)
        return list(map(bytes, _call(self._store.multi_get, list(keys))))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return bytes(_call(self._store.compare_set, key, expected_value, desired_value))

    def append(self, key: str, value: str | bytes) -> None:
        _call(self._store.append, key, value)

    def delete_key(self, key: str) -> bool:
        return bool(_call(self._store.delete_key, key))

    def num_keys(self) -> int:
        return int(_call(self._store.num_keys))

    def list_keys(self) -> list[str]:
        return list(_call(self._store.list_keys))

    def queue_push(self, key: str, value: str | bytes) -> None:
        _call(self._store.queue_push, key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        limit = limit_of(self)
        for _ in tries(limit if block else 0.0, _POLL_SECONDS, _POLL_SECONDS):
            try:
                return bytes(_call(self._store.queue_pop, key, False))
            except QueueEmptyError:
                if not block:
                    raise
        raise not_set([key], limit)

    def queue_len(self, key: str) -> int:
        return int(_call(self._store.queue_len, key))

    def clone(self) -> TorchStore:
        other = TorchStore(_call(self._store.clone))
        other.set_timeout(self.timeout)
        return other

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())


def _call(method: Callable[..., Any], *args: Any) -> Any:
    """What a method of torch's store returns; its errors, RuntimeErrors of many kinds, are StoreErrors."""
    try:
        return method(*args)
    except RuntimeError as error:
        kind = QueueEmptyError if type(error).__name__ == "QueueEmptyError" else StoreError
        of = f"({args[0]!r:.80})" if args else ""
        raise kind(f"torch's store failed in {method.__name__}{of}: {error}") from error


class PrefixStore(Store):
    """`store` with every key written as `prefix/key`, so that several users of it never meet.

    The timeout is the store's own, for all its views; `num_keys` counts all its keys, `list_keys` has the view's.
    Closing a view leaves the store open.

    Args:
        store: one of fastcoll's, or of torch.distributed's.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        self.prefix = prefix
        self.underlying_store = adopted(store)

    def set(self, key: str, value: str | bytes) -> None:
        self.underlying_store.set(self._name(key), value)

    def get(self, key: str) -> bytes:
        return self.underlying_store.get(self._name(key))

    def add(self, key: str, amount: int) -> int:
        return self.underlying_store.add(self._name(key), amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self.underlying_store.check(self._names(keys))

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        self.underlying_store.wait(self._names(keys), timeout)

    def fetch(self, keys: Sequence[str], timeout: Timeout = None) -> list[bytes]:
        return self.underlying_store.fetch(self._names(keys), timeout)

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        return self.underlying_store.peek(self._names(keys))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.underlying_store.multi_get(self._names(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self.underlying_store.multi_set(self._names(keys), values)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self.underlying_store.compare_set(self._name(key), expected_value, desired_value)

    def append(self, key: str, value: str | bytes) -> None:
        self.underlying_store.append(self._name(key), value)

    def delete_key(self, key: str) -> bool:
        return self.underlying_store.delete_key(self._name(key))

    def num_keys(self) -> int:
        return self.underlying_store.num_keys()

    def list_keys(self) -> list[str]:
        start = f"{self.prefix}/"
        return [key.removeprefix(start) for key in self.underlying_store.list_keys() if key.startswith(start)]

    def queue_push(self, key: str, value: str | bytes) -> None:
        self.underlying_store.queue_push(self._name(key), value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self.underlying_store.queue_pop(self._name(key), block)

    def queue_len(self, key: str) -> int:
        return self.underlying_store.queue_len(self._name(key))

    def clone(self) -> PrefixStore:
        return PrefixStore(self.prefix, self.underlying_store.clone())

    def has_extended_api(self) -> bool:
        return self.underlying_store.has_extended_api()

    @property
    def timeout(self) -> timedelta:
        return self.underlying_store.timeout

    def set_timeout(self, timeout: timedelta | float) -> None:
        self.underlying_store.set_timeout(timeout)

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{checked_key(key)}"

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [f"{self.prefix}/{key}" for key in checked_keys(keys)]
