"""PrefixStore: a view of another store in which every key carries a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from ..core.work import Timeout
from .store import Store, checked_key, checked_keys
from .torch_store import adopted


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
        if timeout is None:
            self.underlying_store.wait(self._names(keys))
        else:
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
