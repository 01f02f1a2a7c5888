"""Farewell: how workers that call `shutdown` find out that nothing is under way any more.

In a round each worker waits until its own calls are answered, or given up, and tells worker 0 how many it has made and
served, and which it still serves. When two rounds have the same sums, and as many served as made, nothing is under way
(Mattern's four counters), and worker 0 tells all to go on. While the sums stay the same and more were made than served,
what is served has no caller any more; worker 0 ends the waiting when that takes longer than a call may.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..core.work import ENDLESS
from ..errors import AbortedError, FastcollError, RpcTimeoutError
from .agent import Agent
from .futures import Future, all_done
from .handlers import UNCOUNTED as ROUND
from .worker_info import WorkerInfo

_PAUSE_SECONDS, _LONGEST_PAUSE = 0.001, 0.05  # between two rounds; it doubles
_ASK_SECONDS = 2.0  # for worker 0 to say who is late


class _Told(NamedTuple):
    """What a worker says in a round."""

    number: int
    made: int
    served: int
    serves: Sequence[str]


class Rounds:
    """The graceful end, as each worker and worker 0 see it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._number = 0
        # At worker 0: who has told what in the round under way, and of the one before the sums, since when they are so.
        self._lock = threading.Lock()
        self._told: dict[int, tuple[_Told, Future[bool]]] = {}
        self._sums, self._since = (-1, -1), 0.0
        self._serving = ""
        self._error: FastcollError | None = None
        agent.on(ROUND, self._take)
        agent.on_death(self._died)

    def finish(self, limit: float) -> None:
        """Wait until nothing is under way anywhere, for so many seconds; 0: without limit."""
        until = time.monotonic() + (limit or ENDLESS)
        try:
            for worker in self._agent.workers[1:] if self._agent.me.id == 0 else ():
                self._agent.connect(worker, until)
            self._await_all(until)
            self._agent.run_shutdown_callbacks(until)
            self._await_all(until)
            end = time.monotonic() + _ASK_SECONDS
            while self._agent.handlers.has(ROUND) and time.monotonic() < end:
                time.sleep(_PAUSE_SECONDS)  # worker 0 leaves when all others have been told
        except (
            AbortedError
        ) as error:  # who has seen a death first may have left, and its own error is the cause
            raise self._agent.death() or error from None
        except RpcTimeoutError as error:
            if time.monotonic() < until:
                raise
            raise RpcTimeoutError(f"shutdown was not over after {limit:g} s: {self._why_late()}") from error

    def _await_all(self, until: float) -> None:
        pause = _PAUSE_SECONDS
        while not self._round(until):
            if time.monotonic() > until:  # a round may be faster than any time that is left for it
                raise RpcTimeoutError("calls are still under way")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _round(self, until: float) -> bool:
        """Whether it was the last one."""
        agent = self._agent
        all_done(agent.futures(except_kind=ROUND)).wait(max(until - time.monotonic(), 0.0))
        told = _Told(self._number, *agent.counts.read(), agent.handlers.under_way())
        self._number += 1
        return bool(agent.call(0, ROUND, told, max(until - time.monotonic(), 0.001)).wait())

    def _why_late(self) -> str:
        if own := self._agent.waits_for():
            return f"this worker waits for {own}"
        try:
            return str(self._agent.call(0, ROUND, None, _ASK_SECONDS).wait())
        except FastcollError as error:
            return str(error)

    # ---- at worker 0 -----------------------------------------------------------------------------------------

    def _take(self, worker: WorkerInfo, told: _Told | None) -> Future[bool] | str:
        """What another one says in a round, or, of None, who is late."""
        with self._lock:
            if told is None:
                return self._late()
            if self._error is not None:
                raise self._error
            answer: Future[bool] = Future()
            self._told[worker.id] = told, answer
            if len(self._told) < len(self._agent.workers):
                return answer
            all_told, self._told = self._told, {}
            over, error = self._is_over([each for each, _ in all_told.values()]), self._overdue()
        for _told, each in all_told.values():
            each.complete(over, None if over else error)
        return answer

    def _is_over(self, all_told: Sequence[_Told]) -> bool:
        sums = sum(each.made for each in all_told), sum(each.served for each in all_told)
        before, self._sums = self._sums, sums
        if sums != before:
            self._since = time.monotonic()
        self._serving = "; ".join(call for each in all_told for call in each.serves)
        return before == sums and sums[0] == sums[1]

    def _overdue(self) -> FastcollError | None:
        limit = self._agent.timeout or ENDLESS
        if time.monotonic() - self._since < limit:
            return None
        left = f"calls that nobody waits for were not over after {limit:g} s: {self._serving}"
        return RpcTimeoutError(f"shutdown: {left}")

    def _late(self) -> str:
        missing = ", ".join(worker.name for worker in self._agent.workers if worker.id not in self._told)
        if missing:
            missing += " did not call shutdown, or still waits for a call"
        return "; ".join(filter(None, [self._serving, missing]))

    def _died(self, _: int, error: FastcollError) -> None:
        with self._lock:
            self._error = error
            all_told, self._told = self._told, {}
        for _told, answer in all_told.values():
            answer.complete(None, error)
