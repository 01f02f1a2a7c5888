"""Views of other stores: PrefixStore puts a prefix before every key, TorchStore adapts a store of torch.distributed.

This module does not import torch, because a program that passes a store of torch has already imported torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from ..config import MOST_SECONDS
from ..core.work import Timeout
from ..errors import QueueEmptyError, StoreError, UsageError
from .store import Store, checked_key, checked_keys, limit_of, not_set, tries

T = TypeVar("T")

_POLL_SECONDS = 0.01  # the pause between two polls of a queue of torch
_FIRST_LOOK_SECONDS = 0.0002  # the first pause between two polls for keys; a request takes 0.05 ms


def imported(store: Any) -> Store:
    """Return `store`, wrapped in a TorchStore if it is torch.distributed's; UsageError if it is no store."""
    if isinstance(store, Store):
        return store
    theirs = getattr(sys.modules.get("torch.distributed"), "Store", None)
    if theirs is not None and isinstance(store, theirs):
        return TorchStore(store)
    raise UsageError(
        f"store is {type(store).__name__}; give a fastcoll.Store or a subclass of it, or a store of torch.distributed"
    )


class _View(Store):
    """A view of another store; `_name` returns the name that a key of the view has in the other store."""

    def __init__(self, store: Store) -> None:
        self.underlying_store = store

    def _name(self, key: str) -> str:
        return key

    def _names(self, keys: Sequence[str]) -> list[str]:
        return list(map(self._name, checked_keys(keys)))

    def _call(self, method: Callable[..., T], *args: Any) -> T:
        return method(*args)

    def set(self, key: str, value: str | bytes) -> None:
        self._call(self.underlying_store.set, self._name(key), value)

    def get(self, key: str) -> bytes:
        return self._call(self.underlying_store.get, self._name(key))

    def add(self, key: str, amount: int) -> int:
        return self._call(self.underlying_store.add, self._name(key), amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._call(self.underlying_store.check, self._names(keys))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._call(self.underlying_store.compare_set, self._name(key), expected_value, desired_value)

    def append(self, key: str, value: str | bytes) -> None:
        self._call(self.underlying_store.append, self._name(key), value)

    def delete_key(self, key: str) -> bool:
        return self._call(self.underlying_store.delete_key, self._name(key))

    def num_keys(self) -> int:
        return self._call(self.underlying_store.num_keys)

    def list_keys(self) -> list[str]:
        start = self._name("")
        keys = self._call(self.underlying_store.list_keys)
        return [key.removeprefix(start) for key in keys if key.startswith(start)]

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._call(self.underlying_store.queue_push, self._name(key), value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._call(self.underlying_store.queue_pop, self._name(key), block)

    def queue_len(self, key: str) -> int:
        return self._call(self.underlying_store.queue_len, self._name(key))

    def has_extended_api(self) -> bool:
        return self._call(self.underlying_store.has_extended_api)


class TorchStore(_View):
    """A view of any torch.distributed.Store that all members share; closing the view leaves torch's store open.

    This class polls for keys, and does not call torch's `wait`: torch's TCPStore writes a warning to stderr whenever a
    `wait` times out, and fastcoll's waits are made of short ones of 250 ms, to check the peers in between. Pauses grow
    slowly, because a group's meeting has six waits in a row, and with doubling pauses a wait of 8 ms would take 15 ms.
    """

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.set_timeout(min(store.timeout, timedelta(seconds=MOST_SECONDS)))

    def _call(self, method: Callable[..., T], *args: Any) -> T:
        """Call a method of torch's store, and raise its errors (RuntimeErrors of many kinds) as StoreErrors."""
        try:
            return method(*args)
        except RuntimeError as error:
            kind = QueueEmptyError if type(error).__name__ == "QueueEmptyError" else StoreError
            of = f"({args[0]!r:.80})" if args else ""
            raise kind(f"torch's store failed in {method.__name__}{of}: {error}") from error

    def get(self, key: str) -> bytes:
        self.wait([key])
        return super().get(key)

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        keys, limit = checked_keys(keys), limit_of(self, timeout)
        if not any(self.check(keys) for _ in tries(limit, _FIRST_LOOK_SECONDS, growth=1.25)):
            raise not_set([key for key in keys if not self.check([key])] or keys, limit)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        if not self.has_extended_api():
            return super().multi_get(keys)
        self.wait(keys)
        return self._call(self.underlying_store.multi_get, list(keys))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        limit = limit_of(self)
        for _ in tries(limit if block else 0.0, _POLL_SECONDS, _POLL_SECONDS):
            try:
                return super().queue_pop(key, False)
            except QueueEmptyError:
                if not block:
                    raise
        raise not_set([key], limit)

    def clone(self) -> TorchStore:
        other = TorchStore(self._call(self.underlying_store.clone))
        other.set_timeout(self.timeout)
        return other


class PrefixStore(_View):
    """A view of `store` in which every key is stored as `prefix/key`, so that users with different prefixes are apart.

    All views share the timeout of the store. `num_keys` counts all keys of the store; `list_keys` returns only the keys
    of the view. Closing a view leaves the store open.

    Args:
        store: a store of fastcoll or torch.distributed.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(imported(store))
        self.prefix = prefix

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{checked_key(key)}"

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        self.underlying_store.wait(self._names(keys), timeout)

    def fetch(self, keys: Sequence[str], timeout: Timeout = None) -> list[bytes]:
        return self.underlying_store.fetch(self._names(keys), timeout)

    def peek(self, keys: Sequence[str], timeout: Timeout = None) -> list[bytes | None]:
        return self.underlying_store.peek(self._names(keys), timeout)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.underlying_store.multi_get(self._names(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self.underlying_store.multi_set(self._names(keys), values)

    def set_new(self, keys: Sequence[str], values: Sequence[str | bytes]) -> list[bytes | None]:
        return self.underlying_store.set_new(self._names(keys), values)

    def exchange(self, key: str, value: str | bytes, wanted: str, timeout: Timeout = None) -> bytes:
        return self.underlying_store.exchange(self._name(key), value, self._name(wanted), timeout)

    def retire(self, prefix: str, users: int) -> bool:
        return self.underlying_store.retire(self._name(prefix), users)

    def clone(self) -> PrefixStore:
        return PrefixStore(self.prefix, self.underlying_store.clone())

    @property
    def timeout(self) -> timedelta:
        return self.underlying_store.timeout

    def set_timeout(self, timeout: timedelta | float) -> None:
        self.underlying_store.set_timeout(timeout)


def local_address(store: Store) -> str:
    """Return the address by which this process reaches the store's server; "" if the store has none."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "local_address", ""))
