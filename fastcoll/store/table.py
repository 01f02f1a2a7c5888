"""The table of keys and values behind HashStore, FileStore and TCPStore, and the base class of these stores.

A StoreRequest is one operation; Table.apply executes it in memory. TableStore, the base class, turns calls of Store's
methods into requests, and text and numbers into bytes. The three stores differ only in how a request reaches the table
(in this process's memory, in a file, on a server), and in how calls that wait for a key notice that it is set.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from abc import abstractmethod
from collections.abc import ItemsView, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from ..core.operands import whole
from ..core.work import Timeout
from ..errors import QueueEmptyError, StoreError, StoreTimeoutError, UsageError
from .store import LISTED, StalledError, Store, checked_key, checked_keys, limit_of, not_set, pairs

MAX_KEY = 8 << 10
MAX_VALUE = 8 << 20
MAX_KEYS = 128 << 10
MAX_KEYS_PER_REQUEST = 1024
MAX_TOTAL = 1 << 30  # bytes of keys and values in one table
# The answer to a GET, PEEK or KEYS has only as many values or keys as fit into this many bytes, but at least the first.
# The client then requests the rest.
MAX_ANSWER = MAX_VALUE + (64 << 10)
# In the answer to PEEK and SET_NEW: precedes each value. A key that is not set, or was not, has an empty field.
_SET = b"="
# A queue is stored as the value of one key: for each item _MARK, the item's length and its bytes. So a push is an
# APPEND. A value that begins with _MARK is a queue, and APPEND refuses to join a queue and another value.
_ITEM = struct.Struct("!4sI")
_MARK = b"\0ITM"
_DONE = b"\0done"  # the key `prefix + _DONE` counts the RETIRE requests for this prefix
_RETIRE_SECONDS = 1.0  # timeout of RETIRE; short, because the caller is leaving and the server may be stopped


class Op(IntEnum):
    """The operations. Those in WAITING wait until their keys are set; the others never wait."""

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
    POP = 11  # removes the first item of the queue under a key, and returns it; with the last item the key is removed
    # Returns the keys in order, as many as fit into an answer. If a key is given, only those that sort after it.
    KEYS = 12
    # The server sets this key when the client's connection ends, unless the key is set by then. A WILL without a key
    # withdraws the client's earlier WILL.
    WILL = 13
    # Counts these requests for a prefix. When the count reaches the value, removes all keys with the prefix.
    RETIRE = 14
    # Sets each key that is not set; returns the values that the other keys have.
    SET_NEW = 15
    # Sets the first key, and then is a GET of the second, whose value in the request is empty. Servers execute it as
    # these two requests (`StoreRequest.parts`), so a table never gets it.
    EXCHANGE = 16


# Op -> (fewest keys, most keys, values for each key)
SHAPES: dict[Op, tuple[int, int, int]] = {
    Op.NUM_KEYS: (0, 0, 0),
    Op.WILL: (0, 1, 1),
    Op.RETIRE: (1, 1, 1),
    Op.SET: (1, MAX_KEYS_PER_REQUEST, 1),
    **dict.fromkeys((Op.GET, Op.WAIT, Op.CHECK, Op.PEEK), (1, MAX_KEYS_PER_REQUEST, 0)),
    Op.KEYS: (0, 1, 0),
    **dict.fromkeys((Op.DELETE, Op.POP), (1, 1, 0)),
    **dict.fromkeys((Op.ADD, Op.APPEND), (1, 1, 1)),
    Op.COMPARE_SET: (1, 1, 2),
    Op.SET_NEW: (1, 2, 1),  # two of the largest values fit into an answer
    Op.EXCHANGE: (2, 2, 1),
}
CHANGING = frozenset({Op.SET, Op.ADD, Op.DELETE, Op.COMPARE_SET, Op.APPEND, Op.POP, Op.RETIRE, Op.SET_NEW})
WAITING = frozenset({Op.GET, Op.WAIT, Op.POP, Op.EXCHANGE})


@dataclass(frozen=True)
class StoreRequest:
    """One operation on keys; `values` has the values of each key in order, `timeout` is in seconds."""

    op: Op
    keys: tuple[bytes, ...] = ()
    values: tuple[bytes, ...] = ()
    timeout: float = 0.0

    def parts(self) -> tuple[StoreRequest, StoreRequest]:
        """Return the SET and the GET of which an EXCHANGE consists."""
        (key, wanted), (value, _) = self.keys, self.values
        return StoreRequest(Op.SET, (key,), (value,)), StoreRequest(Op.GET, (wanted,), (), self.timeout)


class Missing(NamedTuple):
    """The keys that were still missing at a request's timeout: their number, and the first LISTED of them."""

    number: int
    first: Sequence[bytes]


class Table:
    """A bounded dictionary of bytes. Not thread safe: the owner must hold a lock."""

    def __init__(self) -> None:
        self._data: dict[bytes, bytes] = {}
        self._bytes = 0

    @property
    def size(self) -> int:
        """The bytes of all keys and values."""
        return self._bytes

    def get(self, key: bytes) -> bytes | None:
        return self._data.get(key)

    def items(self) -> ItemsView[bytes, bytes]:
        return self._data.items()

    def first_missing(self, request: StoreRequest) -> bytes | None:
        """Return the first key that `request` still has to wait for, or None."""
        if request.op not in WAITING:
            return None
        return next((key for key in request.keys if key not in self._data), None)

    def missing(self, request: StoreRequest) -> Missing:
        """Return the keys that `request` still has to wait for."""
        keys = [key for key in request.keys if key not in self._data]
        return Missing(len(keys), keys[:LISTED])

    def apply(self, request: StoreRequest) -> list[bytes]:
        """Execute a request whose keys are not missing; return its answer.

        Raises:
            StoreError: a limit would be exceeded, or a value is not what the operation needs (an integer for ADD, a
                queue for POP and for the APPEND of an item, no queue for another APPEND). The key that failed keeps its
                value; in a SET or SET_NEW of several keys the keys before it are set.
        """
        data = self._data
        key = request.keys[0] if request.keys else b""
        value = request.values[0] if request.values else b""
        match request.op:
            case Op.SET:
                for name, new in zip(request.keys, request.values, strict=True):
                    self.put(name, new)
                return []
            case Op.SET_NEW:
                answer = []
                for name, new in zip(request.keys, request.values, strict=True):
                    answer.append(_SET + data[name] if name in data else b"")
                    if name not in data:
                        self.put(name, new)
                return answer
            case Op.GET:
                return _those_that_fit(data[name] for name in request.keys)
            case Op.PEEK:
                return _those_that_fit(_SET + data[name] if name in data else b"" for name in request.keys)
            case Op.WAIT | Op.WILL:
                return []
            case Op.ADD:
                total = _whole_number(data.get(key, b"0"), key) + _whole_number(value, key)
                if not -(1 << 63) <= total < 1 << 63:
                    raise StoreError(f"adding to {shown(key)} would exceed 64 bits: {total}")
                self.put(key, b"%d" % total)
                return [data[key]]
            case Op.CHECK:
                return [b"1" if all(name in data for name in request.keys) else b"0"]
            case Op.DELETE:
                return [b"1" if self.remove(key) else b"0"]
            case Op.COMPARE_SET:
                old, desired = data.get(key), request.values[1]
                if old == value or (old is None and not value):
                    self.put(key, desired)
                    return [desired]
                return [value if old is None else old]
            case Op.APPEND:
                old = data.get(key)
                if old is not None and old.startswith(_MARK) != value.startswith(_MARK):
                    if value.startswith(_MARK):
                        raise _not_a_queue(key, old)
                    raise StoreError(
                        f"{shown(key)} is a queue; add to it with queue_push, or use another key"
                    )
                self.put(key, (old or b"") + value)
                return []
            case Op.RETIRE:
                return [b"1" if self._retire(key, _whole_number(value, key)) else b"0"]
            case Op.NUM_KEYS:
                return [b"%d" % len(data)]
            case Op.POP:
                queue = data[key]
                _, end = next(_items(queue, key))
                if end < len(queue):
                    self.put(key, queue[end:])
                else:
                    self.remove(key)
                return [queue[_ITEM.size : end]]
            case Op.KEYS:
                return _those_that_fit(sorted(name for name in data if name > key or not request.keys))
            case Op.EXCHANGE:
                raise StoreError("a table executes the parts of an EXCHANGE only")

    def put(self, key: bytes, value: bytes) -> None:
        """Set one key; StoreError: a limit would be exceeded."""
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

    def _retire(self, prefix: bytes, users: int) -> bool:
        done = prefix + _DONE
        self.put(done, b"%d" % (_whole_number(self._data.get(done, b"0"), done) + 1))
        if int(self._data[done]) < users:
            return False
        for key in [key for key in self._data if key.startswith(prefix)]:
            self.remove(key)
        return True

    def remove(self, key: bytes) -> bool:
        """Remove one key; return whether it was set."""
        old = self._data.pop(key, None)
        if old is None:
            return False
        self._bytes -= len(key) + len(old)
        return True


def _items(queue: bytes, key: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each item in `queue`, the value of `key`; an item begins with its mark."""
    start = 0
    while start < len(queue) or not queue:
        mark, length = _ITEM.unpack_from(queue, start) if len(queue) - start >= _ITEM.size else (b"", 0)
        end = start + _ITEM.size + length
        if mark != _MARK or end > len(queue):
            raise _not_a_queue(key, queue)
        yield start, end
        start = end


def _not_a_queue(key: bytes, value: bytes) -> StoreError:
    return StoreError(f"{shown(key)} holds {value[:40]!r}, which is not a queue; give the queue another key")


def _those_that_fit(values: Iterable[bytes]) -> list[bytes]:
    fitting: list[bytes] = []
    total = 0
    for value in values:
        total += len(value) + 4
        if fitting and total > MAX_ANSWER:
            break
        fitting.append(value)
    return fitting


def _values_in(fields: Iterable[bytes]) -> list[bytes | None]:
    """Return the values in the answer to PEEK or SET_NEW."""
    return [field[1:] if field else None for field in fields]


def _whole_number(text: bytes, key: bytes) -> int:
    """Return `text` as an integer. StoreError, which names `key`: it is not an integer."""
    if len(text) <= 20 and text.removeprefix(b"-").isdigit():
        return int(text)
    raise StoreError(f"{shown(key)} holds {text[:40]!r}, which is not an integer")


def shown(key: bytes) -> str:
    """Return a key as text for messages."""
    text = repr(key[:80].decode(errors="replace"))
    return text if len(key) <= 80 else text + "..."


class TableStore(Store):
    """A store whose operations are requests to a table, which is in this process, in a file or on a server."""

    _closed = False

    @abstractmethod
    def _ask(self, request: StoreRequest) -> list[bytes] | Missing:
        """Execute `request` and return its answer, or the keys that are still missing at its timeout.

        While keys of a GET, WAIT or POP are missing, block, for at most `request.timeout` seconds.
        """

    def set(self, key: str, value: str | bytes) -> None:
        self._do(Op.SET, [key], [value])

    def get(self, key: str) -> bytes:
        return self._do(Op.GET, [key])[0]

    def add(self, key: str, amount: int) -> int:
        number = whole("amount", amount)
        if not -(1 << 63) <= number < 1 << 63:
            raise UsageError(f"amount is {amount}; a store's numbers have 64 bits")
        return int(self._do(Op.ADD, [key], [f"{number:d}"])[0])

    def check(self, keys: Sequence[str]) -> bool:
        keys = checked_keys(keys)
        parts = (keys[i : i + MAX_KEYS_PER_REQUEST] for i in range(0, len(keys), MAX_KEYS_PER_REQUEST))
        return all(self._do(Op.CHECK, part)[0] == b"1" for part in parts)

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        self._fields(Op.WAIT, keys, timeout)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.fetch(keys)

    def fetch(self, keys: Sequence[str], timeout: Timeout = None) -> list[bytes]:
        return self._fields(Op.GET, keys, timeout)

    def peek(self, keys: Sequence[str], timeout: Timeout = None) -> list[bytes | None]:
        return _values_in(self._fields(Op.PEEK, keys, timeout))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        batch: dict[str, bytes] = {}
        size = 0
        for key, data in [(key, _value(value)) for key, value in pairs(keys, values)]:
            weight = 4 * len(key) + len(data) + 8  # a character is at most four bytes of UTF-8
            if batch and (size + weight > MAX_ANSWER or len(batch) == MAX_KEYS_PER_REQUEST):
                self._do(Op.SET, [*batch], [*batch.values()])
                batch, size = {}, 0
            batch[key] = data
            size += weight
        if batch:
            self._do(Op.SET, [*batch], [*batch.values()])

    def set_new(self, keys: Sequence[str], values: Sequence[str | bytes]) -> list[bytes | None]:
        return _values_in(self._do(Op.SET_NEW, keys, values))

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
        while more := self._do(Op.KEYS, [key.decode() for key in keys[-1:]]):
            keys += more
        return [key.decode() for key in keys]

    def queue_push(self, key: str, value: str | bytes) -> None:
        data = _value(value)
        self._do(Op.APPEND, [key], [_ITEM.pack(_MARK, len(data)) + data])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        try:
            return self._do(Op.POP, [key], (), None if block else 0.0)[0]
        except StoreTimeoutError as error:
            if block or isinstance(error, StalledError):
                raise
            raise QueueEmptyError(f"the queue {key!r} is empty") from error

    def queue_len(self, key: str) -> int:
        queue = self.peek([key])[0]
        return 0 if queue is None else sum(1 for _ in _items(queue, key.encode()))

    def retire(self, prefix: str, users: int) -> bool:
        return self._do(Op.RETIRE, [prefix], [str(users)], min(limit_of(self), _RETIRE_SECONDS))[0] == b"1"

    def has_extended_api(self) -> bool:
        return True

    def _fields(self, op: Op, keys: Sequence[str], timeout: Timeout = None) -> list[bytes]:
        """Return the answer's fields, one for each key (none for WAIT), by as many requests as needed."""
        keys, limit = checked_keys(keys), limit_of(self, timeout)
        deadline = time.monotonic() + limit
        found: list[bytes] = []
        missing, count, at = list[bytes](), 0, 0
        while at < len(keys):
            part = keys[at : at + MAX_KEYS_PER_REQUEST]
            # If a key was missing, the timeout has passed. The error names all missing keys, so the remaining keys are
            # checked, by WAIT requests that do not block.
            answer = self._request(
                op if not count else Op.WAIT, part, (), max(deadline - time.monotonic(), 0.0)
            )
            if isinstance(answer, Missing):
                count, missing = count + answer.number, [*missing, *answer.first]
            else:
                found += answer
            at += len(part) if isinstance(answer, Missing) or op is Op.WAIT or count else len(answer)
        if count:
            raise not_set([key.decode() for key in missing], limit, count)
        return found

    def _do(
        self,
        op: Op,
        keys: Sequence[str] = (),
        values: Sequence[str | bytes] = (),
        timeout: float | None = None,
    ) -> list[bytes]:
        """Execute one request, and return the fields of its answer; `timeout` None is the store's timeout."""
        limit = limit_of(self, timeout)
        answer = self._request(op, keys, values, limit)
        if isinstance(answer, Missing):
            raise not_set([key.decode() for key in answer.first], limit, answer.number)
        return answer

    def _request(
        self, op: Op, keys: Sequence[str], values: Sequence[str | bytes], timeout: float
    ) -> list[bytes] | Missing:
        if self._closed:
            raise StoreError(f"this {type(self).__name__} is closed")
        return self._ask(StoreRequest(op, tuple(map(_key, keys)), tuple(map(_value, values)), timeout))


def closed_meanwhile(store: Store) -> StoreError:
    """Return the error for a call that was waiting when another thread closed the store."""
    return StoreError(f"this {type(store).__name__} was closed while a call waited in it")


def check_process(store: Store, pid: int) -> None:
    """Raise UsageError if this process is a forked child of `pid`, the process that opened the store."""
    if pid != os.getpid():
        name = type(store).__name__
        raise UsageError(
            f"this {name} belongs to process {pid} and came here by a fork; open a {name} of its own in process "
            f"{os.getpid()}, or start processes with the spawn method"
        )


def _key(key: str) -> bytes:
    data = _utf8("key", checked_key(key))
    if len(data) > MAX_KEY:
        raise UsageError(f"a store's key has at most {MAX_KEY} bytes, got {len(data)}: {key[:40]!r}...")
    return data


def _value(value: str | bytes) -> bytes:
    if not isinstance(value, str | bytes | bytearray | memoryview):
        raise UsageError(f"a store's value is text or bytes, got {type(value).__name__} {value!r:.80}")
    data = _utf8("value", value) if isinstance(value, str) else bytes(value)
    if len(data) > MAX_VALUE:
        raise UsageError(f"a store's value has at most {MAX_VALUE} bytes, got {len(data)}")
    return data


def _utf8(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"a store's {what} is text that UTF-8 can encode, got {text!r:.80}") from error


class HashStore(TableStore):
    """A store in this process's memory. Thread safe; other processes do not see it.

    Examples:
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
        return copy(self)  # both share the table and the lock

    def _ask(self, request: StoreRequest) -> list[bytes] | Missing:
        deadline = time.monotonic() + request.timeout
        with self._changed:
            while self._table.first_missing(request) is not None:
                if self._closed:
                    raise closed_meanwhile(self)
                left = deadline - time.monotonic()
                if left <= 0:
                    return self._table.missing(request)
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            if request.op in CHANGING:
                self._changed.notify_all()
            return self._table.apply(request)
