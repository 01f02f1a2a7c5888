"""TorchStore: a store of torch.distributed, used as one of fastcoll's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import StoreError
from ..rendezvous import Store


class TorchStore(Store):
    """`store`, any torch.distributed.Store that all members share; it stays open when this one is closed.

    Waiting is polling: torch's TCPStore writes warnings to stderr whenever a `wait` with a timeout ends without
    the key, and a wait that looks after its peers ends so every 250 ms.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, value: str | bytes) -> None:
        with _translated(f"set({key!r})"):
            self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        with _translated(f"get({key!r})"):
            return bytes(self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        with _translated(f"add({key!r})"):
            return int(self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        with _translated("check"):
            return bool(self._store.check(list(keys)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        if not self._store.has_extended_api():
            return super().multi_get(keys)
        self.wait(keys)
        with _translated("multi_get"):
            return [bytes(value) for value in self._store.multi_get(list(keys))]


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Errors of torch's stores, RuntimeErrors of many kinds, as StoreError."""
    try:
        yield
    except RuntimeError as error:
        raise StoreError(f"torch's store failed in {doing}: {error}") from error
