"""The process that shows this node's ranks to `top` on other nodes; a launcher starts it (launch/node_views.py)."""

from __future__ import annotations

import time

from .. import config
from ..launch.lifeline import die_with_parent
from ..launch.node_views import ASKED, view_key
from ..store import Store
from ..store.tcp_store import client_of
from .jobs_here import look
from .other_nodes import encode
from .top import Watch, views

_STORE_SECONDS = 10.0  # for each request to the launchers' store
_INTERVAL = 0.5  # between two views, in seconds
_ASKED_SECONDS = 5.0  # it ends if nobody has asked for that long


def main(launcher: int, number: int) -> int:
    """Show the ranks of the launcher with this pid, under its number; return 0."""
    die_with_parent(launcher)
    with client_of("FASTCOLL_LAUNCHERS", config.get("FASTCOLL_LAUNCHERS"), _STORE_SECONDS) as store:
        show(store, launcher, number)
    return 0


def show(store: Store, launcher: int, number: int) -> None:
    """Write views of the ranks into the store until their job has ended, or until nobody asks."""
    asked = _Asked(store)
    while asked.still():
        jobs, _ = look(str(launcher))
        if len(jobs) != 1:  # the ranks have no group yet
            time.sleep(_INTERVAL)
            continue
        with Watch(jobs[0]) as watch:
            for count, view in enumerate(views(watch, _INTERVAL, time.sleep)):
                store.set(view_key(number), encode(view, count))
                if view.end or not asked.still():
                    return


class _Asked:
    """Whether a `top` runs that counts up the key."""

    def __init__(self, store: Store) -> None:
        self._store, self._value, self._changed = store, b"", time.monotonic()

    def still(self) -> bool:
        """Return whether the key has changed in the last seconds; if not, delete it, so that launchers wait for it.

        The process of another node may have deleted it first.
        """
        value, now = self._store.peek([ASKED])[0], time.monotonic()
        if value is None:
            return False
        if value != self._value:
            self._value, self._changed = value, now
        if now - self._changed < _ASKED_SECONDS:
            return True
        self._store.delete_key(ASKED)
        return False
