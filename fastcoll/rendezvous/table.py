"""The keys and values behind every store of this package, as pure data.

A Request is one operation; Table.apply carries it out in memory. The in-process store, the file and
the TCP server differ only in how a request comes to a table and who is woken afterwards.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from ..errors import StoreError

MAX_KEY = 8 << 10
MAX_VALUE = 8 << 20
MAX_KEYS = 128 << 10
MAX_TOTAL = 1 << 30  # bytes of keys and values in one table
# A GET or PEEK answers with as many of its values as fit in here (the first always does).
MAX_ANSWER = MAX_VALUE + (64 << 10)
_SET = b"="  # stands before each value in the answer to PEEK; a key that is not set has an empty field

_INT64 = range(-(1 << 63), 1 << 63)


class Op(IntEnum):
    """The operations. GET, WAIT and POP need all their keys to be set; the others never wait."""

    SET = 1
    GET = 2
    WAIT = 3
    ADD = 4
    CHECK = 5
    DELETE = 6
    COMPARE_SET = 7
    APPEND = 8
    NUM_KEYS = 9
    PEEK = 10
    POP = 11  # the first item of the queue under a key; the last one takes the key along
    KEYS = 12  # those behind a key, in order, as many as fit into an answer


# Op -> (fewest keys, most keys, values for each key)
SHAPES: dict[Op, tuple[int, int, int]] = {
    Op.SET: (1, 1024, 1),
    Op.GET: (1, 1024, 0),
    Op.WAIT: (1, 1024, 0),
    Op.ADD: (1, 1, 1),
    Op.CHECK: (1, 1024, 0),
    Op.DELETE: (1, 1, 0),
    Op.COMPARE_SET: (1, 1, 2),
    Op.APPEND: (1, 1, 1),
    Op.NUM_KEYS: (0, 0, 0),
    Op.PEEK: (1, 1024, 0),
    Op.POP: (1, 1, 0),
    Op.KEYS: (1, 1, 0),
}
MAX_KEYS_PER_REQUEST = 1024
CHANGING = frozenset({Op.SET, Op.ADD, Op.DELETE, Op.COMPARE_SET, Op.APPEND, Op.POP})
# A queue is the value of its key: each item behind this mark and its length, so that a push is an APPEND.
_ITEM = struct.Struct("!4sI")
_MARK = b"\0ITM"


@dataclass(frozen=True)
class Request:
    """One operation on keys; `values` holds each key's values in turn, `timeout` is in seconds."""

    op: Op
    keys: tuple[bytes, ...] = ()
    values: tuple[bytes, ...] = ()
    timeout: float = 0.0


class Table:
    """A bounded dictionary of bytes. Not thread safe: the owner brings the lock."""

    def __init__(self) -> None:
        self._data: dict[bytes, bytes] = {}
        self._bytes = 0

    def get(self, key: bytes) -> bytes | None:
        """The value of `key`, or None."""
        return self._data.get(key)

    def first_missing(self, request: Request) -> bytes | None:
        """The first key that `request` still has to wait for, or None."""
        if request.op not in (Op.GET, Op.WAIT, Op.POP):
            return None
        return next((key for key in request.keys if key not in self._data), None)

    def apply(self, request: Request) -> list[bytes]:
        """Carry out a request whose keys are not missing; its answer.

        Raises:
            StoreError: a limit would be passed, or ADD meets what is no whole number; that key is
                as before (of a SET of several keys, the ones ahead of it are set).
        """
        key = request.keys[0] if request.keys else b""
        value = request.values[0] if request.values else b""
        match request.op:
            case Op.SET:
                for name, new in zip(request.keys, request.values, strict=True):
                    self.put(name, new)
                return []
            case Op.GET:
                return _those_that_fit(self._data[name] for name in request.keys)
            case Op.PEEK:
                return _those_that_fit(
                    _SET + self._data[name] if name in self._data else b"" for name in request.keys
                )
            case Op.WAIT:
                return []
            case Op.ADD:
                return [self._add(key, value)]
            case Op.CHECK:
                return [b"1" if all(name in self._data for name in request.keys) else b"0"]
            case Op.DELETE:
                return [b"1" if self.remove(key) else b"0"]
            case Op.COMPARE_SET:
                return [self._compare_set(key, value, request.values[1])]
            case Op.APPEND:
                self.put(key, self._data.get(key, b"") + value)
                return []
            case Op.NUM_KEYS:
                return [b"%d" % len(self._data)]
            case Op.POP:
                return [self._pop(key)]
            case Op.KEYS:
                return _those_that_fit(sorted(name for name in self._data if name > key))

    def put(self, key: bytes, value: bytes) -> None:
        """Set one key.

        Raises:
            StoreError: a limit would be passed.
        """
        old = self._data.get(key)
        growth = len(value) - len(old) if old is not None else len(key) + len(value)
        if len(key) > MAX_KEY:
            raise StoreError(f"a key has {len(key)} bytes, at most {MAX_KEY} are allowed: {key[:40]!r}...")
        if len(value) > MAX_VALUE:
            raise StoreError(
                f"the value of {shown(key)} has {len(value)} bytes, at most {MAX_VALUE} are allowed"
            )
        if old is None and len(self._data) >= MAX_KEYS:
            raise StoreError(f"the store holds {MAX_KEYS} keys and takes no more: {shown(key)}; delete some")
        if self._bytes + growth > MAX_TOTAL:
            raise StoreError(f"the store holds {self._bytes} bytes, {shown(key)} would pass {MAX_TOTAL}")
        self._data[key] = value
        self._bytes += growth

    def remove(self, key: bytes) -> bool:
        """Remove one key; whether it was there."""
        old = self._data.pop(key, None)
        if old is None:
            return False
        self._bytes -= len(key) + len(old)
        return True

    def _add(self, key: bytes, amount: bytes) -> bytes:
        total = whole_number(self._data.get(key, b"0"), key) + whole_number(amount, key)
        if total not in _INT64:
            raise StoreError(f"adding to {shown(key)} would pass 64 bits: {total}")
        self.put(key, b"%d" % total)
        return self._data[key]

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        old = self._data.get(key)
        if old == expected or (old is None and not expected):
            self.put(key, desired)
            return desired
        return expected if old is None else old

    def _pop(self, key: bytes) -> bytes:
        queue = self._data[key]
        _, end = next(items(queue, key))
        if end < len(queue):
            self.put(key, queue[end:])
        else:
            self.remove(key)
        return queue[_ITEM.size : end]


def item(value: bytes) -> bytes:
    """What appends `value` to a queue."""
    return _ITEM.pack(_MARK, len(value)) + value


def items(queue: bytes, key: bytes) -> Iterator[tuple[int, int]]:
    """Where each item of the queue under `key` starts and ends, its mark and length included.

    Raises:
        StoreError: this is no queue.
    """
    start = 0
    while start < len(queue) or not queue:
        mark, length = _ITEM.unpack_from(queue, start) if len(queue) - start >= _ITEM.size else (b"", 0)
        end = start + _ITEM.size + length
        if mark != _MARK or end > len(queue):
            raise StoreError(f"{shown(key)} holds {queue[:40]!r}, which is no queue")
        yield start, end
        start = end


def _those_that_fit(values: Iterable[bytes]) -> list[bytes]:
    fitting: list[bytes] = []
    total = 0
    for value in values:
        total += len(value) + 4
        if fitting and total > MAX_ANSWER:
            break
        fitting.append(value)
    return fitting


def whole_number(text: bytes, key: bytes) -> int:
    """The number that `add` finds under `key`.

    Raises:
        StoreError: it is no whole number of 64 bits.
    """
    if len(text) <= 20 and text.removeprefix(b"-").isdigit():
        return int(text)
    raise StoreError(f"{shown(key)} holds {text[:40]!r}, which is no whole number to add to")


def shown(key: bytes) -> str:
    """A key as messages show it."""
    text = repr(key[:80].decode(errors="replace"))
    return text if len(key) <= 80 else text + "..."
