"""TableStore: the whole Store surface on top of one method that carries out a Request.

Text and numbers become bytes here, once; the stores below it only move requests to their table.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

from ..errors import StoreError, UsageError
from ..work import Timeout
from .store import Store, pairs
from .table import MAX_ANSWER, MAX_KEY, MAX_KEYS_PER_REQUEST, MAX_VALUE, Op, Request


class TableStore(Store):
    """A store whose operations are requests to a table somewhere."""

    _closed = False

    @abstractmethod
    def _ask(self, request: Request) -> list[bytes]:
        """Carry out `request` and return its answer.

        Blocks for `request.timeout` seconds while keys of a GET or WAIT are missing.

        Raises:
            StoreTimeoutError: they were still missing then.
            StoreError: the table refused, or cannot be reached.
        """

    def set(self, key: str, value: str | bytes) -> None:
        self._do(Op.SET, [key], [value])

    def get(self, key: str) -> bytes:
        return self._do(Op.GET, [key])[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._do(Op.ADD, [key], [str(int(amount))])[0])

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._do(Op.CHECK, part)[0] == b"1" for part in _parts(keys))

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        deadline = time.monotonic() + self._limit(timeout)
        for part in _parts(keys):
            self._do(Op.WAIT, part, timeout=max(deadline - time.monotonic(), 0.0))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.fetch(keys)

    def fetch(self, keys: Sequence[str], timeout: Timeout = None) -> list[bytes]:
        deadline = time.monotonic() + self._limit(timeout)
        values: list[bytes] = []
        while len(values) < len(keys):
            part = keys[len(values) : len(values) + MAX_KEYS_PER_REQUEST]
            values += self._do(Op.GET, part, timeout=max(deadline - time.monotonic(), 0.0))
        return values

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        values: list[bytes | None] = []
        while len(values) < len(keys):
            part = keys[len(values) : len(values) + MAX_KEYS_PER_REQUEST]
            # Each value has a byte before it, which an empty field, a key that is not set, has not.
            values += [field[1:] if field else None for field in self._do(Op.PEEK, part)]
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        batch: list[tuple[str, str | bytes]] = []
        size = 0
        for pair in pairs(keys, values):
            # A character is at most four bytes of UTF-8.
            weight = 4 * len(pair[0]) + (4 if isinstance(pair[1], str) else 1) * len(pair[1]) + 8
            if batch and (size + weight > MAX_ANSWER or len(batch) == MAX_KEYS_PER_REQUEST):
                self._set_all(batch)
                batch, size = [], 0
            batch.append(pair)
            size += weight
        if batch:
            self._set_all(batch)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._do(Op.COMPARE_SET, [key], [expected_value, desired_value])[0]

    def append(self, key: str, value: str | bytes) -> None:
        self._do(Op.APPEND, [key], [value])

    def delete_key(self, key: str) -> bool:
        return self._do(Op.DELETE, [key])[0] == b"1"

    def num_keys(self) -> int:
        return int(self._do(Op.NUM_KEYS)[0])

    def _set_all(self, batch: Sequence[tuple[str, str | bytes]]) -> None:
        self._do(Op.SET, [key for key, _ in batch], [value for _, value in batch])

    def _do(
        self,
        op: Op,
        keys: Sequence[str] = (),
        values: Sequence[str | bytes] = (),
        timeout: float | None = None,
    ) -> list[bytes]:
        if self._closed:
            raise StoreError(f"this {type(self).__name__} is closed")
        limit = self._timeout if timeout is None else timeout
        return self._ask(Request(op, tuple(map(_key, keys)), tuple(map(_value, values)), limit))


def _parts(keys: Sequence[str]) -> list[Sequence[str]]:
    """`keys` in pieces that one request can hold."""
    if isinstance(keys, str):
        raise UsageError(f"keys is a list of keys, got the text {keys!r}; write [{keys!r}]")
    return [keys[i : i + MAX_KEYS_PER_REQUEST] for i in range(0, len(keys), MAX_KEYS_PER_REQUEST)]


def _key(key: str) -> bytes:
    if not isinstance(key, str):
        raise UsageError(f"a store's key is text, got {type(key).__name__} {key!r}")
    data = key.encode()
    if len(data) > MAX_KEY:
        raise UsageError(f"a store's key has at most {MAX_KEY} bytes, got {len(data)}: {key[:40]!r}...")
    return data


def _value(value: str | bytes) -> bytes:
    if not isinstance(value, str | bytes | bytearray | memoryview):
        raise UsageError(f"a store's value is text or bytes, got {type(value).__name__} {value!r:.80}")
    data = value.encode() if isinstance(value, str) else bytes(value)
    if len(data) > MAX_VALUE:
        raise UsageError(f"a store's value has at most {MAX_VALUE} bytes, got {len(data)}")
    return data
