"""Why a group cannot be made: told by the rank that finds out, through the group's store, and raised by all."""

from __future__ import annotations

import contextlib
import json
import time

from ...core.members import Member
from ...errors import (
    FastcollError,
    PeerDiedError,
    RendezvousError,
    ResourceError,
    StoreError,
    StoreTimeoutError,
    UsageError,
)
from ...rendezvous import Store

_KEY = "net/refused"
_KINDS: dict[str, type[FastcollError]] = {
    kind.__name__: kind
    for kind in (UsageError, ResourceError, RendezvousError, StoreTimeoutError, PeerDiedError)
}
_CHECK_SECONDS = 0.25


class Refusal:
    """The refusal of a group while it is made, as one rank sees it."""

    def __init__(self, store: Store, me: Member) -> None:
        self._store, self._me = store, me
        self._is_known = False
        self._checked = time.monotonic()

    def tell(self, error: BaseException) -> None:
        """Let all ranks raise this error, unless it came from one or they find it themselves."""
        if not isinstance(error, FastcollError):  # Ctrl-C, for one
            error = RendezvousError(f"it was ended by {type(error).__name__}")
        kind = type(error).__name__
        if self._is_known or kind not in _KINDS:
            return
        ranks = error.ranks if isinstance(error, PeerDiedError) else []
        record = {"kind": kind, "text": f"{self._me}: {error}", "ranks": list(ranks)}
        with contextlib.suppress(StoreError):  # whoever serves it is gone, which all will see
            self._store.set(_KEY, json.dumps(record))

    def check(self) -> None:
        """Raise what another rank has told; asks the store every 0.25 s, however often it is called.

        Raises:
            UsageError, ResourceError, RendezvousError, StoreTimeoutError, PeerDiedError: as told.
        """
        if time.monotonic() - self._checked < _CHECK_SECONDS:
            return
        self._checked = time.monotonic()
        if self._store.check([_KEY]):
            self._is_known = True
            raise _read(self._store.get(_KEY))


def _read(data: bytes) -> FastcollError:
    try:
        record = json.loads(data)
        kind, text = _KINDS[record["kind"]], str(record["text"])
        return PeerDiedError(text, [int(r) for r in record["ranks"]]) if kind is PeerDiedError else kind(text)
    except (ValueError, KeyError, TypeError, RecursionError):
        return StoreError(f"why a rank refused cannot be read: {data[:80]!r}")
