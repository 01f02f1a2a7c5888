"""The pool of worker processes in which tests with the mark `ranks` run.

Worker i of a place is rank i in every test that runs at this place. A place is this machine or, for example, a network
namespace on it (mark.py). Workers are started on demand and reused, because an interpreter with Numba takes about a
second to start. After a failure the workers of the test are killed with their child processes. Each worker leads its
own session (setsid), so the SIGINT of a Ctrl-C reaches only pytest. When pytest ends, the kernel kills the workers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from ..launch.lifeline import describe_exit, signal_group
from ..launch.nodes import python_main
from .mark import Place, RankResult, Setup, Task, frames_of_the_test

_KEPT = 8  # the workers of ranks below this are kept between tests
_START_SECONDS = 60.0
_END_SECONDS = 2.0  # a worker that was asked to end is killed after this time
_GRACE_SECONDS = 3.0  # for the other ranks to report after a rank has failed
# A process must begin to write its stacks within this time, not counting the time in which it waits for a core.
_STACKS_SECONDS = 1.0
_WRITTEN_SECONDS = 0.05  # the stacks are complete if the process could run for this time and wrote no more
_LONGEST_SECONDS = 10.0  # to wait for the stacks of a process that gets no core
# A single wait takes at most this time. A Ctrl-C that another thread gets, or that arrives just before a wait begins,
# does not end the wait.
_LOOK_SECONDS = 1.0
_OUTPUT_BYTES = 64 << 10  # how much of the end of a rank's output is shown


class Worker:
    """One process of the pool. Its output goes to memory files, which leave nothing behind."""

    def __init__(self, rank: int, place: Place, setup: Setup) -> None:
        self.rank = rank
        self._output = os.memfd_create("fastcoll-output")
        self._stacks = os.memfd_create("fastcoll-stacks")
        self._shown = 0
        self._scratch = Path(tempfile.gettempdir()) / f"fastcoll-ranks-{uuid.uuid4().hex}"
        self.connection, theirs = Pipe()
        inherited = [theirs.fileno(), self._stacks]
        python = [*place.command, *python_main("fastcoll.testing.worker")]
        with theirs:
            self.process = subprocess.Popen(
                [*python, *map(str, [os.getpid(), *inherited])],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
                pass_fds=inherited,
                start_new_session=True,
            )
        self._pidfd = os.pidfd_open(self.process.pid)
        with contextlib.suppress(BrokenPipeError):  # the worker has ended; `Pool._start` notices that
            self.connection.send(Setup([*setup.args, f"--basetemp={self._scratch}"], setup.options))

    def waitables(self) -> list[Connection[Any, Any] | int]:
        """Return objects that become readable when the worker has answered or is dead."""
        return [self.connection, self._pidfd]

    def receive(self) -> Any:
        """Return the worker's answer, after a waitable has become readable; None: it is dead."""
        try:
            return self.connection.recv() if self.connection.poll() else None
        except (EOFError, ConnectionResetError):
            return None

    def send(self, task: Task) -> None:
        """Send the worker a task. If it has died, `receive` returns None."""
        self._shown = _size(self._output)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(task)

    def output(self) -> str:
        """Return what the worker has printed since it got its task."""
        return _text(self._output, max(self._shown, _size(self._output) - _OUTPUT_BYTES))

    def stacks(self) -> str:
        """Return the stacks of the worker's threads."""
        from ..record.dump import Asked  # imports NumPy

        asked, size, grown = Asked(self.process.pid), 0, 0.0
        self.process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + _LONGEST_SECONDS
        while (had := asked.seconds()) < _STACKS_SECONDS and time.monotonic() < end:
            time.sleep(0.01)
            if (now := _size(self._stacks)) != size:
                size, grown = now, had
            elif size and had - grown >= _WRITTEN_SECONDS:
                return frames_of_the_test(_text(self._stacks, 0))
        return "it does not say where it is (stopped, or in an uninterruptible system call)"

    def ended(self) -> str:
        """Return how the worker's process ended, after its connection has ended."""
        try:
            return describe_exit(self.process.wait(_END_SECONDS))
        except subprocess.TimeoutExpired:
            return "it closed its connection, but still runs"

    def kill(self) -> None:
        """Kill the worker and its child processes, and remove its files."""
        signal_group(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        for descriptor in (self._pidfd, self._output, self._stacks):
            os.close(descriptor)
        shutil.rmtree(self._scratch, ignore_errors=True)


def _size(file: int) -> int:
    return os.fstat(file).st_size


def _text(file: int, start: int) -> str:
    # read() would move the position at which the process writes.
    return os.pread(file, _size(file) - start, start).decode(errors="replace")


_Key = tuple[int, Place]


class Pool:
    """The workers, by rank and place.

    Args:
        setup: the configuration of the workers' pytest sessions.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._workers: dict[_Key, Worker] = {}

    def run(self, tasks: Sequence[Task]) -> list[RankResult]:
        """Run the tasks of one test, one per rank, and wait for their results.

        Returns:
            one result per rank, within the mark's timeout plus a few seconds for starting and ending.
        """
        workers = {} if tasks[0].mark.fresh else self._workers
        mine = [(task.rank, task.place) for task in tasks]
        try:
            failures = self._start([key for key in mine if key not in workers], workers)
            results = failures or _Round([workers[key] for key in mine], tasks).play()
        except BaseException:
            self._end(list(workers), workers)
            raise
        spoilt = tasks[0].mark.fresh or any(result.spoils for result in results)
        self._end([key for key in workers if (spoilt and key in mine) or key[0] >= _KEPT], workers)
        return results

    def close(self) -> None:
        for worker in self._workers.values():
            worker.connection.close()
        end = time.monotonic() + _END_SECONDS
        for worker in self._workers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, end - time.monotonic()))
        self._end(list(self._workers), self._workers)

    def _start(self, keys: Sequence[_Key], workers: dict[_Key, Worker]) -> list[RankResult]:
        for key in keys:
            workers[key] = Worker(*key, self._setup)
        end = time.monotonic() + _START_SECONDS
        failures = []
        for worker in [workers[key] for key in keys]:
            in_time = wait(worker.waitables(), max(0.0, end - time.monotonic()))
            if not in_time or worker.receive() != "ready":
                how = worker.ended() if in_time else f"not ready after {_START_SECONDS:g} s"
                summary = f"its process did not start: {how}"
                failures.append(RankResult(worker.rank, "died", summary, worker.output()))
        return failures

    @staticmethod
    def _end(keys: Sequence[_Key], workers: dict[_Key, Worker]) -> None:
        for key in keys:
            workers.pop(key).kill()


class _Round:
    """One test on its workers."""

    def __init__(self, workers: Sequence[Worker], tasks: Sequence[Task]) -> None:
        self._mark = tasks[0].mark
        self._pending = {worker.rank: worker for worker in workers}
        self._results: dict[int, RankResult] = {}
        self._end = time.monotonic() + self._mark.timeout
        self._grace_end = float("inf")
        for worker, task in zip(workers, tasks, strict=True):
            worker.send(task)

    def play(self) -> list[RankResult]:
        while self._pending and (left := min(self._end, self._grace_end) - time.monotonic()) > 0:
            waitables = [one for worker in self._pending.values() for one in worker.waitables()]
            ready = set(wait(waitables, min(left, _LOOK_SECONDS)))
            for worker in list(self._pending.values()):
                if ready.intersection(worker.waitables()):
                    self._note(worker, worker.receive() or self._death(worker))
        for worker in list(self._pending.values()):
            if self._grace_end < self._end:
                summary = f"was still in the test {_GRACE_SECONDS:g} s after another rank had failed"
                result = RankResult(worker.rank, "stranded", summary, worker.stacks(), secondary=True)
            else:
                summary = f"did not finish within {self._mark.timeout:g} s"
                result = RankResult(worker.rank, "deadline", summary, worker.stacks())
            self._note(worker, result)
        return [self._results[rank] for rank in sorted(self._results)]

    def _note(self, worker: Worker, result: RankResult) -> None:
        result.output = worker.output()
        self._results[worker.rank] = result
        del self._pending[worker.rank]
        if result.spoils:
            signal_group(worker.process.pid, signal.SIGKILL)  # so that ranks that wait for it notice
            self._grace_end = min(self._grace_end, time.monotonic() + _GRACE_SECONDS)

    def _death(self, worker: Worker) -> RankResult:
        how = worker.ended()
        if worker.rank in self._mark.may_die:
            return RankResult(worker.rank, "killed")
        return RankResult(
            worker.rank, "died", f"its process (pid {worker.process.pid}) ended during the test: {how}"
        )
