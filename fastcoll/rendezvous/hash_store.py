"""HashStore: a store inside one process, for its threads."""

from __future__ import annotations

import threading
import time
from copy import copy

from ..errors import StoreError
from .table import CHANGING, Request, Table
from .table_store import TableStore


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
