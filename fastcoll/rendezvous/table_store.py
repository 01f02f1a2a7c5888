"""TableStore: the whole Store surface on top of one method that carries out a Request; HashStore, for threads.

Text and numbers become bytes here, once; the stores below only move requests to their table.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from copy import copy

from ..core.arguments import whole
from ..core.work import Timeout
from ..errors import QueueEmptyError, StoreError, StoreTimeoutError, UsageError
from .store import LISTED, Store, checked_key, checked_keys, not_set, pairs
from .table import (
    CHANGING,
    MAX_ANSWER,
    MAX_KEY,
    MAX_KEYS_PER_REQUEST,
    MAX_VALUE,
    Op,
    Request,
    Table,
    item,
    items,
)


class TableStore(Store):
    """A store whose operations are requests to a table somewhere."""

    _closed = False

    @abstractmethod
    def _ask(self, request: Request) -> list[bytes] | bytes:
        """Carry out `request` and return its answer, or the first key that is still missing in the end.

        Blocks for `request.timeout` seconds while keys of a GET or WAIT are missing.
        """

    def set(self, key: str, value: str | bytes) -> None:
        self._do(Op.SET, [key], [value])

    def get(self, key: str) -> bytes:
        return self._do(Op.GET, [key])[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._do(Op.ADD, [key], [f"{whole('amount', amount):d}"])[0])

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._do(Op.CHECK, part)[0] == b"1" for part in _parts(checked_keys(keys)))

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        limit = self._limit(timeout)
        deadline = time.monotonic() + limit
        for part in _parts(checked_keys(keys)):
            self._do(Op.WAIT, part, limit=limit, deadline=deadline)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.fetch(keys)

    def fetch(self, keys: Sequence[str], timeout: Timeout = None) -> list[bytes]:
        keys = checked_keys(keys)
        limit = self._limit(timeout)
        deadline = time.monotonic() + limit
        values: list[bytes] = []
        while len(values) < len(keys):
            part = keys[len(values) : len(values) + MAX_KEYS_PER_REQUEST]
            values += self._do(Op.GET, part, limit=limit, deadline=deadline)
        return values

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        keys = checked_keys(keys)
        values: list[bytes | None] = []
        while len(values) < len(keys):
            part = keys[len(values) : len(values) + MAX_KEYS_PER_REQUEST]
            # Each value has a byte before it, which an empty field, a key that is not set, has not.
            values += [field[1:] if field else None for field in self._do(Op.PEEK, part)]
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        batch: list[tuple[str, bytes]] = []
        size = 0
        for key, data in [(key, _value(value)) for key, value in pairs(keys, values)]:
            weight = 4 * len(key) + len(data) + 8  # a character is at most four bytes of UTF-8
            if batch and (size + weight > MAX_ANSWER or len(batch) == MAX_KEYS_PER_REQUEST):
                self._set_all(batch)
                batch, size = [], 0
            batch.append((key, data))
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

    def list_keys(self) -> list[str]:
        keys: list[bytes] = []
        while more := self._do(Op.KEYS, [keys[-1].decode() if keys else ""]):
            keys += more
        return [key.decode() for key in keys]

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._do(Op.APPEND, [key], [item(_value(value))])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        try:
            return self._do(Op.POP, [key], limit=None if block else 0.0)[0]
        except StoreTimeoutError as error:
            if block:
                raise
            raise QueueEmptyError(f"the queue {key!r} is empty") from error

    def queue_len(self, key: str) -> int:
        queue = self.peek([key])[0]
        return 0 if queue is None else sum(1 for _ in items(queue, key.encode()))

    def has_extended_api(self) -> bool:
        return True

    def _set_all(self, batch: Sequence[tuple[str, bytes]]) -> None:
        self._do(Op.SET, [key for key, _ in batch], [value for _, value in batch])

    def _do(
        self,
        op: Op,
        keys: Sequence[str] = (),
        values: Sequence[str | bytes] = (),
        limit: float | None = None,
        deadline: float | None = None,
    ) -> list[bytes]:
        """The answer to one request.

        Args:
            limit: the timeout of the call that this is a part of; None: the store's.
            deadline: when that has passed; None: `limit` seconds from now.
        """
        if self._closed:
            raise StoreError(f"this {type(self).__name__} is closed")
        limit = self._timeout if limit is None else limit
        left = limit if deadline is None else max(deadline - time.monotonic(), 0.0)
        answer = self._ask(Request(op, tuple(map(_key, keys)), tuple(map(_value, values)), left))
        if isinstance(answer, bytes):
            raise not_set(self._missing(keys) or [answer.decode()], limit)
        return answer

    def _missing(self, keys: Sequence[str]) -> list[str]:
        """Those of a few keys that are not set. Of many none: waits in short steps would ask this every time."""
        if not 1 < len(keys) <= LISTED:
            return []
        found: list[bytes] = []
        while len(found) < len(keys):
            found += self._do(Op.PEEK, keys[len(found) :], limit=0.0)
        return [key for key, field in zip(keys, found, strict=True) if not field]


def _parts(keys: list[str]) -> list[list[str]]:
    """`keys` in pieces that one request can hold."""
    return [keys[i : i + MAX_KEYS_PER_REQUEST] for i in range(0, len(keys), MAX_KEYS_PER_REQUEST)]


def _key(key: str) -> bytes:
    data = checked_key(key).encode()
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


class HashStore(TableStore):
    """Keys and values in this process's memory. Thread safe; other processes do not see it.

    Example:
        >>> store = HashStore()
        >>> store.set("first", "1")
        >>> store.get("first")
        b'1'
    """

    def __init__(self) -> None:
        self._table = Table()
        self._changed = threading.Condition()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def clone(self) -> HashStore:
        return copy(self)  # with the table and the lock in common

    def _ask(self, request: Request) -> list[bytes] | bytes:
        deadline = time.monotonic() + request.timeout
        with self._changed:
            while (missing := self._table.first_missing(request)) is not None:
                left = deadline - time.monotonic()
                if self._closed:
                    raise StoreError("this HashStore was closed while a call waited in it")
                if left <= 0:
                    return missing
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            if request.op in CHANGING:
                self._changed.notify_all()
            return self._table.apply(request)
