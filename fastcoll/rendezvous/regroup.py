"""How the survivors of a failure meet: the lowest surviving rank serves a store, and the others connect to it.

Each survivor connects to the member with the lowest rank that it does not know to be dead; if it is that member itself,
it serves the store. The server waits until each member has come or is dead, and then writes the list of survivors into
the store. The server alone decides, so all survivors read the same list. If the server dies, the next survivor serves a
store, and the others connect to this one.

The server publishes its port at its recovery endpoint (core/backend.py), where the other members look for it. While the
survivors make a new group, another rank may fail: then some survivors have made the new group, and others have only the
failed group. So until a new group is known to be complete, survivors look for one another at the recovery endpoints of
the failed group and of all groups made since (`Level`), and the server publishes its port at all of these.

Keys in the store: here/PROCESS, set by each survivor that has come; `missing`, a JSON list of the members that have not
come yet; `left`, a JSON list of the survivors.
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
    """The failed group, or a group made since, at whose recovery endpoints survivors look for one another."""

    members: Sequence[Member]
    recovery_endpoint: RecoveryEndpoint
    gone: Callable[[], Sequence[int]]
    """Returns the group ranks that are known to have died or left; never blocks."""


class Regrouped(NamedTuple):
    """The survivors, and the store that the first of them serves."""

    members: list[Member]
    store: TCPStore


class Regroup:
    """The meeting of survivors, seen from one rank, within `timeout` seconds; error messages begin with `doing`.

    Attributes:
        levels: the failed group, and then the groups made since that are not known to be complete, in the order in
            which they were made. The last one has the fewest members.
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
            CollectiveTimeoutError: a member has neither come nor died.
            StoreError: there is no port for a store.
        """
        while True:
            first = self._survivors()[0]
            found = self._serve() if first is self._me else self._connect_to(first)
            if found is not None:
                return found

    def _survivors(self) -> list[Member]:
        """Return the members of the newest group that are not known to be dead."""
        for level in self.levels:
            self._gone.update(level.members[rank] for rank in level.gone())
        return [member for member in self.levels[-1].members if member not in self._gone]

    def _check_time(self, missing: Sequence[Member]) -> None:
        """Raise CollectiveTimeoutError after the timeout; warn once if members are late."""
        names = ", ".join(map(str, missing))
        if time.monotonic() > self._deadline:
            raise CollectiveTimeoutError(
                f"{self._doing}: {names} neither died nor came in time", [member.rank for member in missing]
            )
        self._late_warning.look(self._doing, lambda: names)

    # ---- the server --------------------------------------------------------------------------------------------

    def _serve(self) -> Regrouped:
        store = TCPStore(
            self.levels[0].recovery_endpoint.host, 0, is_master=True, timeout=self._left_seconds()
        )
        try:
            self._offer(store.port)
            store.set(_key(self._me), b"")
            published: list[Member] = []
            while True:
                left = self._survivors()
                values = store.peek([_key(member) for member in left])
                missing = [member for member, value in zip(left, values, strict=True) if value is None]
                if not missing:
                    store.set("left", _keys(left))
                    return Regrouped(left, store)
                if missing != published:
                    store.set("missing", _keys(published := missing))
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

    # ---- the other survivors -----------------------------------------------------------------------------------

    def _connect_to(self, first: Member) -> Regrouped | None:
        """Wait for the other survivors at the store of `first`; None: try again, perhaps with another first member."""
        for level in self.levels:
            if first not in level.members:
                continue
            try:
                address = level.recovery_endpoint.seek(level.members.index(first))
            except ConnectionRefusedError:
                self._gone.add(first)
                return None
            if address is not None:
                return self._await_survivors(first, *address)
        self._check_time([first])
        time.sleep(_POLL_SECONDS)
        return None

    def _await_survivors(self, first: Member, host: str, port: int) -> Regrouped | None:
        with suppress(StoreError):  # the server has died, or has closed this store
            store = TCPStore(host, port, timeout=min(self._left_seconds(), 1.0))
            try:
                store.set(_key(self._me), b"")
                everyone = {_key(member): member for member in self.levels[-1].members}
                while first in self._survivors():
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
    """Return a key that names the process and not its rank, which changes from group to group."""
    return f"here/{member.boot_id}/{member.pid_namespace}/{member.pid}/{member.start_time}"


def _keys(members: Sequence[Member]) -> str:
    return json.dumps([_key(member) for member in members])
