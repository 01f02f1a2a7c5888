"""How a meeting in a store ends: once, and for all alike, with a list of everybody, a failure, or elsewhere.

The first to decide writes the end; everybody waits for it alone, so that a failure comes as soon as success.
Keys, under the meeting's name:

    decided     a counter: who makes it 1 writes the end
    end         one byte, MET, FAILED or MOVED, and the list or the failure
"""

from __future__ import annotations

import contextlib
import json
from typing import NoReturn

from ..errors import FastcollError, PeerDiedError, StoreError, StoreTimeoutError, UsageError
from .store import Store

MET, FAILED, MOVED = b"L", b"F", b"M"

_KINDS: dict[str, type[FastcollError]] = {
    kind.__name__: kind for kind in (UsageError, PeerDiedError, StoreTimeoutError)
}


class Ending:
    """The end of the meeting `name` in `store`.

    Attributes:
        key: under which the end is written.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.key = f"{name}/end"
        self._decided = f"{name}/decided"
        self._store = store

    def decide(self, kind: bytes, content: bytes = b"") -> bool:
        """End the meeting so, unless it has ended; whether this was the end."""
        if self._store.add(self._decided, 1) != 1:
            return False
        self._store.set(self.key, kind + content)
        return True

    def fail(self, error: FastcollError) -> None:
        """Let all who still wait raise `error`. Says nothing where the store is lost, too."""
        ranks = error.ranks if isinstance(error, PeerDiedError) else ()
        record = {"kind": type(error).__name__, "text": str(error), "ranks": list(ranks)}
        with contextlib.suppress(StoreError):
            self.decide(FAILED, json.dumps(record).encode())


def raise_failure(record: bytes) -> NoReturn:
    """Raise the error that `Ending.fail` published.

    Raises:
        StoreError: it is something else.
    """
    try:
        found = json.loads(record)
        kind, text = _KINDS[found["kind"]], str(found["text"])
        ranks = [int(rank) for rank in found["ranks"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(f"why the meeting failed cannot be read: {record[:80]!r}") from error
    if kind is PeerDiedError:
        raise PeerDiedError(text, ranks)
    raise kind(text)
