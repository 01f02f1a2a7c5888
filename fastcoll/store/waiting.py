"""Waits for keys of a store, which end with an error if another process dies, and warn if one is late."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

from .. import config
from ..errors import PeerDiedError, StoreError, StoreTimeoutError
from ..system.processes import Member, ProcessId, describe_gone, gone_among
from .store import StalledError, Store, listed

logger = logging.getLogger("fastcoll")

SLICE_SECONDS = 0.25  # a long wait is a sequence of short waits, each at least this long
# All processes that are in the same wait together poll at most this many times a second. A poll is two requests, and a
# store's server answers about 30,000 requests a second (bench/results/2026-11-21-startup-scale.md).
LOOKS_PER_SECOND = 1000
# The kernel closes a dying process's sockets shortly before it reports the process as dead. On a full machine the
# process may wait for a core in between.
_DYING_SECONDS = 2.0


class LateWarning:
    """Logs one warning if a wait takes longer than FASTCOLL_WARN_AFTER seconds times `part`.

    All steps of a wait share one object of this class. The time counts from the object's construction.
    """

    def __init__(self, part: float = 1.0) -> None:
        self._started = time.monotonic()
        self._after: float = part * config.get("FASTCOLL_WARN_AFTER")

    def look(self, doing: str, missing: Callable[[], str]) -> None:
        """Warn, once, if the wait takes too long.

        `doing` is the purpose of the wait; `missing` returns what it still waits for.
        """
        waited = time.monotonic() - self._started
        if waited >= self._after:
            self.silence()
            logger.warning("%s: has waited %.1f s for %s", doing, waited, missing())

    def silence(self) -> None:
        """Log no warning from now on."""
        self._after = math.inf


def fetch_for(
    store: Store,
    keys: Sequence[str],
    members: Sequence[ProcessId],
    timeout: float,
    doing: str,
    between: Callable[[], None] | None = None,
    missing: Callable[[], str] | None = None,
    late: LateWarning | None = None,
    crowd: int | None = None,
    limit: float | None = None,
    first: Callable[[timedelta], list[bytes]] | None = None,
) -> list[bytes]:
    """Wait for all `keys` and return their values; check between short waits that `members` are alive.

    Args:
        members: processes whose death ends the wait; a process whose state is unknown counts as alive. The caller may
            append to the list meanwhile.
        timeout: seconds in all; if the store's server is stopped, the call may take a few seconds longer.
        doing: the purpose of the wait, with which every error text begins.
        between: called after each short wait that ended without the keys; any exception except StalledError ends the
            whole wait.
        missing: returns what is still missing, for the warning and the timeout's error; None: the missing keys.
        late: the LateWarning of the longer wait that this one is a part of; None: a new one.
        crowd: how many processes are in the same wait (None: the number of `members`). The more there are, the longer
            are the short waits of each.
        limit: the whole timeout, for error texts, if `timeout` is only what is left of it; None: `timeout`.
        first: makes the first request for the keys, with the given timeout, and is repeated if the store does not
            answer; None: `store.fetch`, which makes all others.

    Raises:
        PeerDiedError: a member's process has ended.
        StoreTimeoutError: a key was not set in time.
        StalledError: the store's server did not answer, and the time is over. Before that, a request without an answer
            is repeated, because the server's process may be stopped for a while.
        StoreError: the store is gone, and no member is proven dead.
    """
    deadline = time.monotonic() + timeout
    late = late or LateWarning()
    missing = missing or partial(_unset, store, keys)
    fetch = partial(store.fetch, keys)
    ask = first or fetch
    longest = max(SLICE_SECONDS, (len(members) if crowd is None else crowd) / LOOKS_PER_SECOND)
    while True:
        try:
            left = deadline - time.monotonic()
            try:
                return ask(timedelta(seconds=max(0.0, min(left, longest))))
            except StalledError:
                raise
            except TimeoutError:
                ask, died = fetch, death_among(members, doing)
            except StoreError as error:
                raise_if_dying(members, doing, error)
                raise
            # `between` runs after the death check. A process publishes before it exits, so whatever a dead process has
            # published is visible now. If that is the reason of its failure, `between` raises it, which is more precise
            # than `died`. If it is the keys, there is no error.
            if between is not None:
                between()
            if died is not None:
                with suppress(StoreError):  # the store is gone with the process
                    if store.check(keys):
                        continue
                raise died
            late.look(doing, missing)
            if left <= longest:
                names = missing()  # before the last check, so that the error has at least one name
                if not store.check(keys):
                    raise StoreTimeoutError(f"{doing}: {names} did not come within {limit or timeout:g} s")
        except StalledError as error:
            raise_if_dead(members, doing)
            late.look(doing, partial("an answer: {}".format, error))
            if time.monotonic() >= deadline:
                raise StalledError(f"{doing}: {error}") from error


def _unset(store: Store, keys: Sequence[str]) -> str:
    values = store.peek(keys, 0)
    return listed([repr(key) for key, value in zip(keys, values, strict=True) if value is None])


def death_among(members: Sequence[ProcessId], doing: str) -> PeerDiedError | None:
    """Return the error that names the members whose process has ended, or None. Never blocks."""
    gone = gone_among(members)
    if not gone:
        return None
    ranks = [process.rank for process in gone if isinstance(process, Member)]
    return PeerDiedError(f"{doing}: {describe_gone(gone)}", ranks)


def raise_if_dead(members: Sequence[ProcessId], doing: str) -> None:
    """Raise the error that names the members whose process has ended, if there are any. Never blocks."""
    died = death_among(members, doing)
    if died is not None:
        raise died


def raise_if_dying(members: Sequence[ProcessId], doing: str, cause: StoreError) -> None:
    """Raise PeerDiedError if members are dead, or are found dead within 2 s. Called after the loss of a store."""
    deadline = time.monotonic() + _DYING_SECONDS
    while time.monotonic() < deadline:
        died = death_among(members, doing)
        if died is not None:
            raise died from cause
        time.sleep(0.02)
