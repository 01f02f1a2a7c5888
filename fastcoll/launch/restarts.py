"""The main loop of a launcher in a job with generations: it carries out the leader's orders until the job is over.

A generation is a set of ranks that start together. If a rank fails, the launchers end the others and start the next
generation (generations.py). The leader is the launcher that decides this for all launchers (gathering.py).

Only the main thread starts ranks, because the kernel kills a rank when the thread that started it ends. Received
signals are handled by the supervisor while ranks run, and by `Restarts.run` between generations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .console import Console
from .failures import Failure, left, not_run
from .gathering import Gathering, secret_of
from .generations import End, Over, RankRange, Start, range_of
from .nodes import NodeShare
from .supervisor import Supervisor

if TYPE_CHECKING:
    from ..metrics.http_server import MetricsServer


class _Generation:
    """The job's other launchers, as the supervisor of one generation sees them (`Others` in supervisor.py)."""

    def __init__(self, gathering: Gathering, number: int) -> None:
        self._gathering, self._number = gathering, number
        self.has_failed = False  # whether the supervisor has published a failure
        self.logged = ""  # the reason for which the generation ended, if the supervisor has logged the reason

    def failure(self) -> Failure | None:
        failure = self._gathering.failure()
        if failure is not None:
            self.logged = failure.text
        return failure

    def publish(self, failure: Failure) -> None:
        self.has_failed, self.logged = True, failure.text
        if failure.leaves:
            self._gathering.leave(failure)
        else:
            self._gathering.failed(self._number, failure)


class Restarts:
    """Runs the ranks of this node, generation after generation.

    Args:
        job: the part of this node's share that is the same in all generations.
        supervise: makes the supervisor of one generation. Like `Supervisor`, it takes this node's share of the
            generation, `logs` and `nodes`.
        tick: seconds between two checks for signals and orders while no ranks run here.
        metrics: counts the generations after the first.
    """

    def __init__(
        self,
        gathering: Gathering,
        job: NodeShare,
        supervise: Callable[..., Supervisor],
        logs: Path | None,
        console: Console,
        tick: float,
        metrics: MetricsServer | None = None,
    ) -> None:
        self._metrics = metrics
        self._gathering, self._job, self._supervise, self._logs = gathering, job, supervise, logs
        self._console, self._signals, self._tick = console, console.signals, tick
        self._say = partial(console.say, has_to_act=lambda: gathering.failure() is not None)
        self._last: Start | None = None  # the generation that ran here last
        self._logged = ""  # the reason for which that generation ended, if the reason was logged
        self._waits = False  # whether the current generation runs without this node

    def run(self) -> int:
        """Carry out orders until the job is over; return the exit code, 0 for success."""
        self._gathering.ready()
        while True:
            if self._signals:
                number = self._signals.pop(0)
                self._gathering.leave(left(number))
                return 128 + number
            order = self._gathering.take()
            if isinstance(order, Start):
                number = self._run(order)
                if number:
                    return 128 + number
            elif isinstance(order, End):
                if self._last is not None and self._last.generation == order.generation:
                    self._gathering.ready()
            elif isinstance(order, Over) and order.only in ("", self._gathering.key):
                if order.text not in ("", self._logged):
                    self._console.say(order.text, lambda: True)
                return order.code
            elif order is None:
                time.sleep(self._tick)

    def _run(self, order: Start) -> int:
        """Run this node's ranks of a generation, if it has any; return the signal that ended this launcher, or 0."""
        ranks = range_of(order.members, self._gathering.key)
        if ranks is None:
            if not self._waits:
                self._say(f"generation {order.generation} runs without this node, which waits for room")
            self._waits = True
            return 0
        self._waits = False
        self._last = order
        link = _Generation(self._gathering, order.generation)
        code, interrupted = 1, 0
        try:
            logs = self._logs
            if logs is not None and order.generation:
                logs = logs / f"generation-{order.generation}"
                logs.mkdir(exist_ok=True)
            if order.generation:
                if self._metrics is not None:
                    self._metrics.restarted()
                self._say(
                    f"generation {order.generation} starts: {ranks.world_size} ranks on {len(order.members)} "
                    f"node{'s' * (len(order.members) > 1)}, {order.restarts} of "
                    f"{self._job.variables['TORCHELASTIC_MAX_RESTARTS']} restarts used"
                )
            supervisor = self._supervise(self._share(order, ranks), logs=logs, nodes=link)
            code, interrupted = supervisor.run(), supervisor.interrupted
        except OSError as error:
            failure = not_run(error)
            self._say(failure.text)
            link.publish(failure)
        self._logged = link.logged
        if code == 0 and not link.has_failed:
            self._gathering.done(order.generation)
        return interrupted

    def _share(self, order: Start, ranks: RankRange) -> NodeShare:
        """Return this node's share of a generation."""
        run_id = self._job.variables["TORCHELASTIC_RUN_ID"]
        return replace(
            self._job,
            nodes=len(order.members),
            node_rank=ranks.node_rank,
            assigned=ranks,
            master_addr=order.members[0].address,
            master_port=order.members[0].port,
            variables={
                **self._job.variables,
                "TORCHELASTIC_RESTART_COUNT": str(order.restarts),
                "FASTCOLL_SECRET": secret_of(order.generation, run_id),
            },
        )
