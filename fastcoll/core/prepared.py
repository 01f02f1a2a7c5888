"""What a backend has prepared for calls, by their operation, dtype and sizes, so that the next such call reuses it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

_MOST = 1024
_T = TypeVar("_T")


class PreparedCalls(dict[Any, _T]):
    """The latest 1024 of one group; any thread may use it."""

    def __init__(self) -> None:
        self._adding = threading.Lock()

    def get_or_make(self, key: Any, make: Callable[[], _T]) -> _T:
        """Return what is prepared for `key`; make it first if there is none."""
        found = self.get(key)
        if found is None:
            found = make()
            with self._adding:
                while len(self) >= _MOST:  # the oldest one goes
                    del self[next(iter(self))]
                self[key] = found
        return found
