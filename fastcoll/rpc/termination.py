"""Termination detection: how workers that call `shutdown` find out that no call is under way.

F. Mattern, "Algorithms for distributed termination detection", 1987: the four-counter method. In each round a worker
waits until its own calls are answered or timed out, and then reports to worker 0 how many calls it has made and served,
and which calls it still serves. Worker 0 adds up the calls made and the calls served by all workers. When two rounds in
a row have the same sums, and as many calls served as made, no call is under way, and worker 0 lets all workers leave.
If two rounds have the same sums, but more calls were made than served, some calls have timed out at their callers, but
their handlers still run. Worker 0 fails the shutdown when the sums stay the same for longer than the default timeout of
calls.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from ..core.work import ENDLESS
from ..errors import AbortedError, FastcollError, RpcTimeoutError
from .agent import Agent
from .futures import Future, all_done
from .handlers import UNCOUNTED as ROUND
from .worker_info import WorkerInfo

_PAUSE_SECONDS, _LONGEST_PAUSE = 0.001, 0.05  # between two rounds; the pause doubles up to the longest
_ASK_SECONDS = 2.0  # how long worker 0 may take to name the late workers, or to answer all workers at the end


class CallCounts(NamedTuple):
    """One worker's report for a round."""

    made: int
    served: int
    serving: list[str]  # descriptions of the calls that it still serves


class Termination:
    """This worker's part in a graceful shutdown. On worker 0 it also collects the reports."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        # On worker 0: the reports of this round; the sums of the last complete round, and when they last changed; the
        # calls that are still served.
        self._lock = threading.Lock()
        self._reports: dict[int, tuple[CallCounts, Future[bool]]] = {}
        self._sums, self._since = (-1, -1), 0.0
        self._serving = ""
        self._error: FastcollError | None = None
        agent.on(ROUND, self._receive)
        agent.on_death(self._died)

    def finish(self, limit: float) -> None:
        """Wait until no call is under way on any worker, for up to `limit` seconds; 0: without limit."""
        until = time.monotonic() + (limit or ENDLESS)
        try:
            for worker in self._agent.workers[1:] if self._agent.me.id == 0 else ():
                self._agent.connect(worker, until)
            self._run_rounds(until)
            self._agent.run_shutdown_callbacks(until)
            self._run_rounds(until)
            end = time.monotonic() + _ASK_SECONDS
            while self._agent.handlers.serves(ROUND) and time.monotonic() < end:
                time.sleep(_PAUSE_SECONDS)  # worker 0 must not leave before it has answered all workers
        except AbortedError as error:
            # A worker has left, perhaps because it noticed a third worker's death first. Then raise that death's error.
            raise self._agent.death() or error from None
        except RpcTimeoutError as error:
            if time.monotonic() < until:
                raise
            raise RpcTimeoutError(f"shutdown was not over after {limit:g} s: {self._why_late()}") from error

    def _run_rounds(self, until: float) -> None:
        """Take part in rounds until worker 0 ends them."""
        agent, pause = self._agent, _PAUSE_SECONDS
        while True:
            all_done(agent.futures(except_kind=ROUND)).wait(max(until - time.monotonic(), 0.0))
            report = CallCounts(*agent.counts.read(), agent.handlers.under_way())
            if agent.call(0, ROUND, report, max(until - time.monotonic(), 0.001)).wait():
                return
            if time.monotonic() > until:  # check, because the call above may take 1 ms even after `until`
                raise RpcTimeoutError("calls are still under way")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _why_late(self) -> str:
        if own := self._agent.waits_for():
            return f"this worker waits for {own}"
        try:
            return str(self._agent.call(0, ROUND, None, _ASK_SECONDS).wait())
        except FastcollError as error:
            return str(error)

    # ---- on worker 0 -----------------------------------------------------------------------------------------

    def _receive(self, worker: WorkerInfo, report: CallCounts | None) -> Future[bool] | str:
        """Take a worker's report; return a future of True if the rounds are over, else of False.

        If `report` is None, return a text that names the late workers and calls.
        """
        with self._lock:
            if report is None:
                return self._name_late()
            if self._error is not None:
                raise self._error
            answer: Future[bool] = Future()
            self._reports[worker.id] = report, answer
            if len(self._reports) < len(self._agent.workers):
                return answer
            round, self._reports = list(self._reports.values()), {}
            is_over, error = self._is_over([each for each, _ in round]), self._overdue()
        for _, each in round:
            each.complete(is_over, None if is_over else error)
        return answer

    def _is_over(self, reports: list[CallCounts]) -> bool:
        """Compare the sums of this round with those of the round before; return whether the rounds are over."""
        sums = sum(each.made for each in reports), sum(each.served for each in reports)
        before, self._sums = self._sums, sums
        if sums != before:
            self._since = time.monotonic()
        self._serving = "; ".join(call for each in reports for call in each.serving)
        return before == sums and sums[0] == sums[1]

    def _overdue(self) -> FastcollError | None:
        """Return an error if the sums have stayed the same for longer than a call may take."""
        limit = self._agent.timeout or ENDLESS
        if time.monotonic() - self._since < limit:
            return None
        return RpcTimeoutError(
            f"shutdown: calls whose callers have given up did not end within {limit:g} s: {self._serving}"
        )

    def _name_late(self) -> str:
        missing = ", ".join(worker.name for worker in self._agent.workers if worker.id not in self._reports)
        if missing:
            missing += " did not call shutdown, or still waits for a call"
        return "; ".join(filter(None, [self._serving, missing]))

    def _died(self, _: int, error: FastcollError) -> None:
        with self._lock:
            self._error = error
            round, self._reports = list(self._reports.values()), {}
        for _report, answer in round:
            answer.complete(None, error)
