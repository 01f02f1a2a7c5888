"""The supervisor of one node's ranks: it starts and ends them, relays their output, and names the rank at fault.

The supervisor runs on one thread. One selector waits for output in the ranks' pipes and for the ends of the ranks'
processes, each by a pidfd. Every rank leads its own session. The launcher, which is the process of the supervisor, is
the subreaper of all its descendants: it adopts processes that outlive their rank, reaps those that end, and kills the
others at the end.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .. import config, failpoints
from ..record import dump
from ..rendezvous.attempts import Loss, Standing
from . import lifeline
from .console import Console
from .failures import Failure, left
from .nodes import NodeShare
from .outputs import Outputs
from .pauses import Pauses
from .ranks import RankProcess, Relay, Sink, follows

if TYPE_CHECKING:
    from ..metrics.http_server import MetricsServer

CAUSE_SECONDS = 1.0
"""How long the launcher waits for the rank at fault to exit after another rank has failed because of it.

The rank at fault closes its groups while it exits. This makes the other ranks fail, so they may exit before it.
"""

TICK_SECONDS = 0.1
_INTERRUPTED_SECONDS = 0.5  # for ranks of `run` to exit by themselves after Ctrl-C, before they are killed
_LEFTOVER_SECONDS = 1.0  # for processes that outlive their rank, such as multiprocessing's tracker, to exit
_MOST_SHOWN = 8  # failed ranks that are logged after the first
_NOT_MET = "; the ranks had not all met, and no restart is left"


class Others(Protocol):
    """The job's other launchers, as a supervisor sees them. Neither call blocks."""

    def failure(self) -> Failure | None:
        """Return a failure on any node because of which the ranks here must end, or None."""

    def publish(self, failure: Failure) -> None:
        """Publish the failure of a rank of this node, or the end of this launcher."""


@dataclass(eq=False)
class _Lost:
    """A rank that failed while the job may go on without it."""

    rank: RankProcess
    description: str  # the failure, for the log
    joiner: tuple[float, int] | None  # seconds until its replacement starts, and the replacement's number
    report: Future[Standing | None] | None

    def cannot_go_on(self, standing: Standing) -> str:
        """Return why the other ranks cannot go on without this rank; empty: they can."""
        if standing.is_state_lost:
            return "; every rank that had the state has failed, so the state is lost: joiners have none"
        if self.joiner is None and standing.has_come and not standing.has_met:
            return _NOT_MET
        return ""


class Supervisor:
    """Runs one node's ranks until all have exited.

    Args:
        grace: seconds between asking the ranks to end and killing them.
        prefix: whether each line of output gets its rank in front.
        logs: a directory for one file per rank and stream.
        nodes: the launchers of the other nodes.
        console: receives signals, and writes the output of the ranks and the log lines.
        tick: the longest time in seconds until a signal, or a failure on another node, is handled.
        sinks: functions that take the ranks' stdout and stderr; None: the console writes them.
        is_guest: whether this process is the user's program (`run`). If so, the supervisor logs no failure, and ends no
            child process that it has not started.
        followed: returns whether a rank failed because of another one; None: the rank's last lines on stderr decide.
        min_ranks: a failed rank ends the others only if fewer ranks than this are left on this node; None: a failed
            rank always ends the others.
        max_restarts: how many failed ranks are replaced by joiners, which are new processes. A rank whose failure ends
            the others is not replaced.
        report: publishes the failure of a process, in a job that may go on without failed ranks (an elastic job); the
            result is the job's state after that failure.
        end_joining: in an elastic job of one node, ends the wait of these joiners when only they still run, unless one
            of them is a rank by now.
        metrics: counts failed ranks and their replacements.

    Attributes:
        first: the rank that failed first, as soon as the supervisor has decided which it is.
        interrupted: the signal that has ended this launcher, or 0.
    """

    def __init__(
        self,
        job: NodeShare,
        grace: float,
        prefix: bool = True,
        logs: Path | None = None,
        nodes: Others | None = None,
        sinks: tuple[Sink, Sink] | None = None,
        is_guest: bool = False,
        followed: Callable[[RankProcess], bool] | None = None,
        min_ranks: int | None = None,
        max_restarts: int = 0,
        console: Console | None = None,
        tick: float = TICK_SECONDS,
        outputs: Outputs | None = None,
        report: Callable[[Loss], Future[Standing | None]] | None = None,
        end_joining: Callable[[Sequence[str]], None] | None = None,
        metrics: MetricsServer | None = None,
    ) -> None:
        self.ranks: list[RankProcess] = []
        self.first: RankProcess | None = None
        self._console = console or Console()
        self._signals = self._console.signals
        self._say = partial(self._console.say, has_to_act=self._has_to_act)
        write = partial(self._console.write, has_to_act=self._has_to_act)
        self._sinks = sinks or (partial(write, sys.__stdout__), partial(write, sys.__stderr__))
        self._followed = followed or (lambda rank: follows(rank.last_output()))
        self._job, self._grace, self._prefix, self._logs, self._nodes = job, grace, prefix, logs, nodes
        self._is_guest = is_guest
        self._min_ranks = job.local_size if min_ranks is None else min_ranks
        self._running: set[RankProcess] = set()
        self._max_restarts, self._pauses = max_restarts, Pauses()
        self._report, self._end_joining, self._metrics = report, end_joining, metrics
        self._lost: list[_Lost] = []  # failed ranks whose reports are pending
        self._missing: list[RankProcess] = []  # ranks that failed before all had met, and are not replaced
        # The joiners to start: for each, the time of its start, its local rank and its number.
        self._joiners: list[tuple[float, int, int]] = []
        self._restarts = 0
        self._earlier = _children()
        self._selector = selectors.DefaultSelector()
        self._tick, self._outputs = tick, outputs or Outputs(to_files=logs is not None)
        self.interrupted = 0
        self._others_failed: list[RankProcess] = []  # ranks that failed before any rank was asked to end
        self._exit_code = 0
        self._failed: RankProcess | None = None  # the rank that failed first, as far as is known now
        self._name_at = 0.0  # when to name `_failed` in the log; until then, the rank at fault may still exit
        self._why = ""  # why the other ranks cannot go on
        self._kill_at: float | None = None  # when the grace ends; None: the ranks were not asked to end
        self._hurries = False  # whether the next signal to this launcher ends the grace at once

    def run(self) -> int:
        """Start the ranks, and return the launcher's exit code when all ranks have exited.

        The code is 0 if no failure ended the job; else it is the exit code of the first rank that failed on any node,
        or 128+n if signal n ended that rank. If signal n ended the launcher, the code is 128+n.
        """
        try:
            for local_rank in range(self._job.local_size):
                self._start(local_rank)
            failpoints.reach("launch.after_start")
            self._watch()
        finally:
            self._end()
        return self._exit_code

    def _start(self, local_rank: int, joiner: int = 0) -> None:
        rank = RankProcess(
            self._job, local_rank, self._prefix, self._logs, self._sinks, self._outputs, joiner
        )
        self.ranks.append(rank)
        self._running.add(rank)
        self._selector.register(rank.pidfd, selectors.EVENT_READ, partial(self._reap, rank))
        for relay in (rank.out, rank.err):
            self._selector.register(relay.source, selectors.EVENT_READ, partial(self._pump, relay))

    def _pump(self, relay: Relay) -> None:
        if not relay.pump():
            self._selector.unregister(relay.source)
            relay.finish()

    def _elsewhere(self) -> Failure | None:
        return self._nodes.failure() if self._nodes else None

    def _has_to_act(self) -> bool:
        return self._kill_at is not None or self._elsewhere() is not None

    def _reap(self, rank: RankProcess) -> None:
        self._selector.unregister(rank.pidfd)
        self._running.discard(rank)
        code = rank.reap()
        has_succeeded = any(other.process.returncode == 0 for other in self.ranks)
        if self._end_joining and has_succeeded and self._running and all(r.is_joiner for r in self._running):
            # If none of them is a rank yet, each would wait for its whole timeout.
            self._end_joining([joiner.process_name.name for joiner in self._running])
        if code == 0 or self._kill_at is not None:
            return
        if self._metrics is not None:
            self._metrics.failed(code)
        rank.err.pump_all()
        # A joiner that fails after other ranks have succeeded was too late to join; its failure does not fail the job.
        if (rank.is_joiner and has_succeeded) or len(self._running) >= self._min_ranks:
            self._lose(rank)
            return
        self._others_failed.append(rank)
        at_fault = not self._followed(rank)
        self._settle_losses()
        if self._failed is None and self._missing and not at_fault:
            self._failed, self._why, self._name_at = self._missing[0], _NOT_MET, time.monotonic()
            return
        if self._failed is None or (at_fault and self._followed(self._failed)):
            self._failed = rank
            self._name_at = time.monotonic() + (0 if at_fault else CAUSE_SECONDS)

    def _lose(self, rank: RankProcess) -> None:
        """Report a failed rank and choose its replacement; the answer to the report decides whether the job goes on."""
        joiner = None
        if self._restarts < self._max_restarts:
            self._restarts += 1
            joiner = self._pauses.after(time.monotonic() - rank.started), self._restarts
        end = lifeline.describe_exit(rank.process.returncode)
        description = f"{rank.name} (pid {rank.process.pid}) failed: {end}"
        loss = Loss(rank.process_name.name, rank.rank, f"{description}, before all had met", joiner is None)
        report = None if self._report is None else self._report(loss)
        self._lost.append(_Lost(rank, description, joiner, report))
        self._settle_losses()

    def _settle_losses(self) -> None:
        """For each failed rank whose report is answered, go on without the rank, or end the job."""
        for lost in [lost for lost in self._lost if lost.report is None or lost.report.done()]:
            self._lost.remove(lost)
            standing = None if lost.report is None else lost.report.result()
            if self._kill_at is not None or self._failed is not None:
                continue
            if standing is not None and (why := lost.cannot_go_on(standing)):
                self._failed = [*self._missing, lost.rank][0]
                self._others_failed.append(lost.rank)
                self._why, self._name_at = why, time.monotonic()
            else:
                self._go_on_without(lost, standing)

    def _go_on_without(self, lost: _Lost, standing: Standing | None) -> None:
        """Log a rank's failure, and schedule its replacement if there is one."""
        met = standing is not None and standing.has_met
        if standing is not None and not met and lost.joiner is None:
            self._missing.append(lost.rank)
        joined = standing.joined if standing is not None else frozenset()
        waiting = [
            rank for rank in self._running if met and rank.is_joiner and rank.process_name.name not in joined
        ]
        left = len(self._running) - len(waiting)
        text = f"{lost.description}; {left} {'goes' if left == 1 else 'go'} on here"
        if waiting:
            text += f", {len(waiting)} {'waits' if len(waiting) == 1 else 'wait'} to be admitted"
        if lost.joiner is not None:
            pause, number = lost.joiner
            self._joiners.append((time.monotonic() + pause, lost.rank.local_rank, number))
            text += f"; joiner {number} of {self._max_restarts} " + (
                f"starts in {pause:g} s" if pause else "starts"
            )
        self._say(text)

    def _start_joiners(self) -> None:
        """Start the joiners whose pause is over, unless the ranks are ending."""
        while self._joiners and self._kill_at is None and time.monotonic() >= min(self._joiners)[0]:
            first = min(self._joiners)
            self._joiners.remove(first)
            try:
                self._start(*first[1:])
                if self._metrics is not None:
                    self._metrics.restarted()
            except OSError as error:
                self._say(f"joiner {first[2]} cannot be started: {error.strerror or error}")

    def _watch(self) -> None:
        while self._running or self._failed:
            for key, _ in self._selector.select(self._next()):
                key.data()
            if not self._is_guest:
                for pid in self._adopted():
                    os.waitpid(pid, os.WNOHANG)
            if self._kill_at is None and (elsewhere := self._elsewhere()):
                self._failed = None
                self._say(f"{'on another node ' if elsewhere.code else ''}{elsewhere.text}")
                self._ask_to_end(signal.SIGTERM, elsewhere.code)
            self._settle_losses()
            self._start_joiners()
            nobody_else = not self._running and self._nodes is None
            if self._failed and (self._signals or nobody_else or time.monotonic() >= self._name_at):
                self._name(self._failed)
            while self._signals:
                self._pass_on(self._signals.pop(0))
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._signal_running(signal.SIGKILL)
                self._kill_at = math.inf

    def _next(self) -> float:
        """Return the seconds until this supervisor must act even if no rank writes or ends; at most a tick."""
        times = [self._name_at] if self._failed else []
        if self._kill_at is None:
            times += [start for start, *_ in self._joiners]
        else:
            times.append(self._kill_at)
        return min([self._tick, *(max(0.0, at - time.monotonic()) for at in times)])

    def _name(self, rank: RankProcess) -> None:
        """Log and publish how the first rank failed, and end the others."""
        self.first, self._failed, self._hurries = rank, None, True
        code = rank.process.returncode
        exit_code = code if code > 0 else 128 - code
        if not self._is_guest:
            where = f"{rank.name} (pid {rank.process.pid} on {os.uname().nodename})"
            text = f"{where} failed first: {lifeline.describe_exit(code)}{self._why}"
            if self._nodes is not None:
                self._nodes.publish(Failure(exit_code, text))
            self._say(f"{text}{_quoted(rank)}")
            for other in [other for other in self._others_failed if other is not rank][:_MOST_SHOWN]:
                how = lifeline.describe_exit(other.process.returncode)
                self._say(f"{other.name} (pid {other.process.pid}) failed, too: {how}{_quoted(other)}")
        self._ask_to_end(signal.SIGTERM, exit_code)

    def _pass_on(self, number: int) -> None:
        # SIGPIPE: the reader of the output, such as tee, has ended. If the ranks are ending already, the Ctrl-C that
        # ends them has probably ended the reader, too, so do nothing.
        if number == signal.SIGPIPE and self._kill_at is not None:
            return
        self.interrupted = number
        if self._nodes is not None:
            self._nodes.publish(left(number))
        if number == signal.SIGPIPE:  # Python ignores SIGPIPE, so the ranks get SIGTERM
            self._ask_to_end(signal.SIGTERM, 128 + number)
            return
        if self._hurries:  # the second request
            self._kill_at = 0.0
            return
        # If another launcher got the same signal first, `_watch` may have asked the ranks to end already. It does not
        # set `_hurries`, so the signal to this launcher does not kill them at once.
        self._hurries = True
        self._ask_to_end(number, 128 + number)

    def _ask_to_end(self, number: int, exit_code: int) -> None:
        self._exit_code = exit_code
        if number == signal.SIGTERM and config.get("FASTCOLL_TRACE_DIR"):
            # Ask ranks that handle SIGQUIT to write their calls and stacks to files (record/dump.py).
            pids = [rank.process.pid for rank in self._running]
            dump.ask([pid for pid in pids if lifeline.catches(pid, signal.SIGQUIT)])
        self._kill_at = time.monotonic() + self._grace
        self._signal_running(number)

    def _signal_running(self, number: int) -> None:
        """Send a signal to the ranks and the processes in their sessions."""
        for rank in self._running:
            lifeline.signal_group(rank.process.pid, number)

    def _end(self) -> None:
        try:
            if self._is_guest and self._running:  # Ctrl-C, or the user's stdout has failed
                self._kill_at = math.inf
                self._signal_running(signal.SIGINT)
                end = time.monotonic() + _INTERRUPTED_SECONDS
                while self._running and time.monotonic() < end:
                    for key, _ in self._selector.select(0.02):
                        key.data()
        finally:
            failpoints.reach("launch.before_end")
            self._signal_running(signal.SIGKILL)
            for rank in self._running:
                rank.reap()
            if not self._is_guest:
                self._end_leftovers()
            # If all ranks ended while they were making a shared memory segment, the segment is left. Delete it.
            if any(Path("/dev/shm").glob("fastcoll-*")):
                from ..shm.segment import sweep  # imports NumPy, and is rarely needed

                sweep()
            with contextlib.ExitStack() as closing:  # a sink of `run` may raise
                for rank in reversed(self.ranks):
                    closing.callback(rank.close)
                closing.callback(self._selector.close)

    def _adopted(self) -> set[int]:
        """Return the pids of the processes that have outlived their ranks and are now children of this launcher."""
        return _children() - self._earlier - {rank.process.pid for rank in self._running}

    def _end_leftovers(self) -> None:
        """End the processes that have outlived their ranks and are now children of this launcher."""
        start, killed = time.monotonic(), math.inf
        while children := self._adopted():
            now = time.monotonic()
            for pid in children:
                if now - start >= _LEFTOVER_SECONDS:
                    with contextlib.suppress(PermissionError):  # another user's process
                        os.kill(pid, signal.SIGKILL)
                    killed = min(killed, now)
                os.waitpid(pid, os.WNOHANG)
            if now - killed >= _LEFTOVER_SECONDS:
                self._say(f"SIGKILL has not ended {sorted(children)}, look at them with ps")
                return
            time.sleep(0.01)


def _children() -> set[int]:
    """Return the pids of the children of the main thread. Other threads wait for the processes that they start."""
    return {*lifeline.children_of_thread(os.getpid(), os.getpid())}


def _quoted(rank: RankProcess) -> str:
    """Return the end of the log line about a failed rank, which quotes the rank's last output."""
    quoted = "".join(f"\n    {line}" for line in rank.last_output().splitlines())
    return f"; its last lines on stderr:{quoted}" if quoted else "; it wrote nothing on stderr"
