"""How the survivors of a failure meet: the lowest of them serves a store, and the others come there.

Each survivor goes to the lowest member that it does not know to be gone; that is this one itself in the end, or one
that serves. The one that serves waits until each member has come or is gone, and then says in the store who is
left: it alone decides, so all that learn of it learn the same. If it dies, the next one serves, and all come there.

A group that was made of survivors may fail before all of them know that it was made: some have it then, others have
only the one before. So until a new group is known to be complete, its members are sought in the refuges of all groups
from the failed one on (`Level`), and whoever serves says so in all of them.

Keys: here/PROCESS, of each that has come; missing, who has not, and left, the members that are left, both as JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..core.backend import RecoveryEndpoint
from ..errors import CollectiveTimeoutError, StoreError, StoreTimeoutError
from ..store.tcp_store import TCPStore
from ..store.waiting import LateWarning
from ..system.processes import Member

_POLL_SECONDS = 0.002
_LOOK_SECONDS = 0.05


class Level(NamedTuple):
    """A group whose members seek one another."""

    members: Sequence[Member]
    recovery_endpoint: RecoveryEndpoint
    gone: Callable[[], Sequence[int]]
    """The group ranks of those that have died or left, as far as it is known; never blocks."""


class Regrouped(NamedTuple):
    """Who is left, and the store of the first of them."""

    members: list[Member]
    store: TCPStore


class Regroup:
    """One rank's part in it; `doing` begins messages, `timeout` is for all of it, in seconds.

    Attributes:
        levels: the group that has failed, and those that have been made since of which it is not known that all have
            them; the newest last, which has the fewest members.
    """

    def __init__(self, failed: Level, rank: int, timeout: float, doing: str) -> None:
        self.levels = [failed]
        self._me = failed.members[rank]
        self._deadline, self._doing = time.monotonic() + timeout, doing
        self._gone: set[Member] = set()
        self._late_warning = LateWarning()

    def meet(self) -> Regrouped:
        """Wait for the other survivors.

        Raises:
            CollectiveTimeoutError: a member neither came nor is gone.
            StoreError: there is no port for a store.
        """
        while True:
            first = self._left()[0]
            found = self._serve() if first is self._me else self._come_to(first)
            if found is not None:
                return found

    def _left(self) -> list[Member]:
        """The members of the newest group that are not known to be gone."""
        for level in self.levels:
            self._gone.update(level.members[rank] for rank in level.gone())
        return [member for member in self.levels[-1].members if member not in self._gone]

    def _check_time(self, missing: Sequence[Member]) -> None:
        """Raise when it is too late, else warn when it is late."""
        names = ", ".join(map(str, missing))
        if time.monotonic() > self._deadline:
            raise CollectiveTimeoutError(
                f"{self._doing}: {names} neither died nor came in time", [member.rank for member in missing]
            )
        self._late_warning.look(self._doing, lambda: names)

    # ---- the one that serves -----------------------------------------------------------------------------------

    def _serve(self) -> Regrouped:
        store = TCPStore(
            self.levels[0].recovery_endpoint.host, 0, is_master=True, timeout=self._left_seconds()
        )
        try:
            self._offer(store.port)
            store.set(_key(self._me), b"")
            told: list[Member] = []
            while True:
                left = self._left()
                came = store.peek([_key(member) for member in left])
                missing = [member for member, here in zip(left, came, strict=True) if here is None]
                if not missing:
                    store.set("left", _keys(left))
                    return Regrouped(left, store)
                if missing != told:
                    store.set("missing", _keys(told := missing))
                self._check_time(missing)
                time.sleep(_POLL_SECONDS)
        except BaseException:
            store.close()
            raise
        finally:
            self._offer(0)

    def _offer(self, port: int) -> None:
        for level in self.levels:
            level.recovery_endpoint.offer(port)

    def _left_seconds(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    # ---- those that come ---------------------------------------------------------------------------------------

    def _come_to(self, first: Member) -> Regrouped | None:
        """Wait for what the first member says; None: it has died, or is sought anew."""
        for level in self.levels:
            if first not in level.members:
                continue
            try:
                address = level.recovery_endpoint.seek(level.members.index(first))
            except ConnectionRefusedError:
                self._gone.add(first)
                return None
            if address is not None:
                return self._hear(first, *address)
        self._check_time([first])
        time.sleep(_POLL_SECONDS)
        return None

    def _hear(self, first: Member, host: str, port: int) -> Regrouped | None:
        with suppress(StoreError):  # it has died, or has closed this store
            store = TCPStore(host, port, timeout=min(self._left_seconds(), 1.0))
            try:
                store.set(_key(self._me), b"")
                everyone = {_key(member): member for member in self.levels[-1].members}
                while first in self._left():
                    with suppress(StoreTimeoutError):
                        left = json.loads(store.fetch(["left"], _LOOK_SECONDS)[0])
                        return Regrouped([everyone[key] for key in left], store)
                    missing = json.loads(store.peek(["missing"])[0] or "[]")
                    self._check_time([everyone[key] for key in missing if key in everyone] or [first])
            except BaseException:
                store.close()
                raise
            store.close()
        time.sleep(_POLL_SECONDS)
        return None


def _key(member: Member) -> str:
    """Names a process; ranks change."""
    return f"here/{member.boot_id}/{member.pid_namespace}/{member.pid}/{member.start_time}"


def _keys(members: Sequence[Member]) -> str:
    return json.dumps([_key(member) for member in members])
