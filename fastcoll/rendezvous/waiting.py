"""Waiting for keys of a store while watching that those who should set them live."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from ..errors import PeerDiedError, StoreError, StoreTimeoutError
from ..members import Member
from ..processes import ProcessId, dead_among
from .store import Store, not_set

SLICE_SECONDS = 0.25
# A dying process closes its sockets a little before it counts as dead.
_DYING_SECONDS = 0.3


def wait_for(
    store: Store,
    keys: Sequence[str],
    members: Sequence[ProcessId],
    timeout: float,
    doing: str,
    between: Callable[[], None] | None = None,
) -> None:
    """Block until all `keys` are set, in short waits between which `members` are looked at.

    Args:
        members: those whose death makes waiting pointless (ranks, or processes without a rank yet);
            one that cannot be seen from here counts as alive. It is read anew each time.
        timeout: seconds in all; a stopped store may add a few.
        doing: what this is for, the start of every message.
        between: called after each short wait that ended without the keys; what it raises ends all.

    Raises:
        PeerDiedError: a member's process has ended.
        StoreTimeoutError: a key was not set in time.
        StoreError: the store is gone, and no member is proven dead.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            store.wait(keys, timedelta(seconds=max(0.0, min(left, SLICE_SECONDS))))
            return
        except TimeoutError:
            died = death_among(members, doing)
        except StoreError as error:
            _raise_if_dying(members, doing, error)
            raise
        # After the look: what a process tells before it ends is the better reason.
        if between is not None:
            between()
        if died is not None:
            raise died
        if left <= SLICE_SECONDS:
            missing = [key for key in keys if not store.check([key])]
            if missing:
                raise StoreTimeoutError(f"{doing}: {not_set(missing, timeout)}")


def death_among(members: Sequence[ProcessId], doing: str) -> PeerDiedError | None:
    """The error that names the members whose process has ended, if there are any. Never blocks."""
    dead = dead_among(members)
    if not dead:
        return None
    ranks = [process.rank for process in dead if isinstance(process, Member)]
    return PeerDiedError(f"{doing}: {', '.join(map(str, dead))} died", ranks)


def _raise_if_dying(members: Sequence[ProcessId], doing: str, cause: StoreError) -> None:
    deadline = time.monotonic() + _DYING_SECONDS
    while time.monotonic() < deadline:
        died = death_among(members, doing)
        if died is not None:
            raise died from cause
        time.sleep(0.02)
