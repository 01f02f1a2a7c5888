"""Checks of the operations under way (group failure, deadlines, dead peers), and the record of what they wait for.

Only the holder of the lock (lock.py) calls `check` and `check_peers`. Any thread that has waited may call `record`.
"""

from __future__ import annotations

import time

from ..core.monitor import Monitor
from ..record.record import WAITS
from .events import BUDGET
from .exchange import Exchange
from .pipe import Pipe
from .transfers import Probe


class Checks:
    """The checks of the operations under way.

    Attributes:
        next: the time of the next check, by time.monotonic.
        recorded: how many waiting operations are in the group's record.
    """

    def __init__(self, exchange: Exchange, routes: list[tuple[Pipe, int]], monitor: Monitor) -> None:
        self.next = 0.0
        self.recorded = 0
        self._exchange, self._routes, self._monitor = exchange, routes, monitor
        self._pipes = list(dict.fromkeys(pipe for pipe, _ in routes))
        self._next_of_peers = 0.0

    def check(self) -> None:
        """Check the oldest operation of each kind with each peer, at most every BUDGET seconds.

        Newer operations of the same kind with the same peer wait for the same rank and have later deadlines, so they
        are not checked. The group's failure is checked in every call.

        Raises:
            GroupError: the group has failed, an operation is late, or no live peer can complete an operation.
        """
        now = time.monotonic()
        if self._monitor.failure is not None:
            raise self._monitor.failure.with_traceback(None)
        if now < self.next:
            return
        self.next = now + BUDGET
        self.record(now - BUDGET)
        seen = set()
        for transfer in list(self._exchange.live):
            key = (type(transfer), transfer.peer)
            if key not in seen:
                seen.add(key)
                transfer.watch.look()
                self._check_connections(transfer.peer)

    def check_peers(self, probe: Probe) -> None:
        """Check the peers for a probe that does not wait, at most every BUDGET seconds.

        A program may repeat such a probe until there is a message. That the peer has left is no error.

        Raises:
            GroupError: a peer has died or failed the group. Messages that arrived before may not have been seen yet.
        """
        now = time.monotonic()
        if now < self._next_of_peers:
            return
        if (found := self._monitor.decide([], probe.describe)) is not None:
            raise found.with_traceback(None)
        self._check_connections(probe.peer)
        self._next_of_peers = now + BUDGET

    def _check_connections(self, peer: int | None) -> None:
        if peer is None:
            for pipe in self._pipes:
                pipe.check(None)
        elif peer != self._exchange.rank:
            pipe, number = self._routes[peer]
            pipe.check(number)

    def record(self, before: float) -> None:
        """Write to the group's flight record the oldest operations that were posted before a time and still wait."""
        record = self._monitor.record
        if record is None:
            return
        waiting = [transfer for transfer in list(self._exchange.live) if transfer.posted <= before]
        # The record has room for few: first those that threads wait for, then the oldest.
        waiting.sort(key=lambda transfer: not transfer.is_awaited)
        for slot in range(1, WAITS):
            if slot <= len(waiting):
                transfer = waiting[slot - 1]
                about = transfer.describe, transfer.needed(), transfer.posted
                record.waits(slot, *about, message=True, awaited=transfer.is_awaited)
            elif slot <= self.recorded:
                record.waits_no_more(slot)
        self.recorded = min(len(waiting), WAITS - 1)
