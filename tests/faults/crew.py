"""Run a function in n processes that may be killed, and collect their outcomes.

A fork server that has imported fastcoll's kernels starts the processes, so that a case takes a tenth of a second. The
outcome of a rank is its result, the exception that it raised, or the signal that killed it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from limits import unlimited
from programs import until

import fastcoll
from fastcoll.testing.worker import shm_names

SOON = 1.0
"""Seconds after which every survivor in shared memory knows of a killed rank, and Ctrl-C has ended any call."""
WITHIN = 2.0
"""The same of ranks that talk over a network of one host."""
AGAIN_WITHIN = 0.1
"""Seconds that a further call on a failed group takes to raise, not counted those without a core: it asks nobody."""
# The folder of the imported package. New processes get it in PYTHONPATH and start in another folder: Python looks in
# the working directory first, and the sources there may differ from an installed package.
_PACKAGE = str(Path(fastcoll.__file__).parents[1])
_COMPILATION_SECONDS = 1800.0  # which only ends a hang
_MESSAGE = r"\b(send to|recv from) rank"
# How an error names its call if not as "op(...), call N of group" (without the arguments while the call is not
# published).
_CALLS = {
    "send_recv": _MESSAGE,
    "batch_isend_irecv": _MESSAGE,
    "irecv": _MESSAGE,
    "all_reduce as int8": r"; all_reduce\(float32 that travels as int8, .*?\), call (\d+) of group 'WORLD'",
    "put": r"\bsymmetric\.",
    "symmetric_all_reduce": r"\ball_reduce\(.*, call \d+ of group",
}

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["faults.loaded", "faults.crew", "faults.victims"])


@dataclass
class Outcome:
    """The outcome of a rank: a result, an error (its type's names, its text and time), or an exit code."""

    rank: int
    result: Any = None
    error: str = ""
    kinds: tuple[str, ...] = ()
    ended: float = 0.0
    exitcode: int | None = None
    pid: int = 0
    died: float = 0.0  # when this process noticed its end


def run(function: Callable[..., Any], n: int, *args: Any, deadline: float = 120.0) -> list[Outcome]:
    """Call `function(rank, n, url, *args)` in n processes, and return when all have ended.

    Raises:
        AssertionError: a rank was still running at the deadline; its stacks are shown.
    """
    return run_together([(function, n, *args)], deadline)[0]


def run_together(worlds: Sequence[tuple[Any, ...]], deadline: float = 120.0) -> list[list[Outcome]]:
    """Run several worlds at once, each given by the arguments of `run`; they mostly wait."""
    _compile_with_failpoints()
    serve()
    with ExitStack() as stack:
        started = [stack.enter_context(_World(*world)) for world in worlds]
        end = time.monotonic() + deadline
        watch = threading.Thread(target=_watch, args=([world.deaths for world in started],))
        watch.start()
        found = [world.collect(end) for world in started]
        watch.join()
        for world, outcomes in zip(started, found, strict=True):
            for outcome, died in zip(outcomes, world.deaths.values(), strict=True):
                outcome.died = died
        return found


def _watch(worlds: Sequence[dict[int, float]]) -> None:
    """Note when each process ends, by its sentinel."""
    left = {sentinel: deaths for deaths in worlds for sentinel in deaths}
    end = time.monotonic() + 180
    while left and time.monotonic() < end:
        for sentinel in wait(left, 1.0):
            left.pop(sentinel)[sentinel] = time.monotonic()


class _World:
    """n running processes, which are killed at the end of the context."""

    def __init__(self, function: Callable[..., Any], n: int, *args: Any) -> None:
        self._function, self._n, self._args = function, n, args
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self.deaths: dict[int, float] = {}  # when each process has ended, by its sentinel; 0: not yet

    def __enter__(self) -> _World:
        self._folder = tempfile.TemporaryDirectory()
        url = f"file://{self._folder.name}/rendezvous"
        for rank in range(self._n):
            process, pipe = start(self._function, self._stacks(rank), rank, self._n, url, *self._args)
            self._pipes.append(pipe)
            self._processes.append(process)
            self.deaths[process.sentinel] = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()
        self._folder.cleanup()

    def collect(self, end: float) -> list[Outcome]:
        """Return the outcome of each rank."""
        try:
            return [
                collect(rank, process, pipe, end)
                for rank, (process, pipe) in enumerate(zip(self._processes, self._pipes, strict=True))
            ]
        except AssertionError as error:
            alive = [rank for rank, process in enumerate(self._processes) if process.is_alive()]
            for rank in alive:
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
            late = time.monotonic() + 60
            while time.monotonic() < late and not all(self._stacks(rank).stat().st_size for rank in alive):
                time.sleep(0.1)
            texts = [f"-- rank {rank}\n{self._stacks(rank).read_text()}" for rank in range(self._n)]
            raise AssertionError(f"{error}\n" + "\n".join(texts)) from None

    def _stacks(self, rank: int) -> Path:
        return Path(self._folder.name, f"stacks-{rank}")


@cache
def _compile_with_failpoints() -> None:
    """Compile the kernels with failpoints in a new process; half a second if they are on disk already.

    Children of the fork server must not compile them, because the Numba that they inherit may have kernels without
    failpoints. It fails if /dev/shm has no room for the locks of its processes; tests there use no failpoints. The
    first test that needs the kernels compiles them, which takes minutes on a busy machine and does not count for its
    limit.
    """
    env = {**os.environ, "FASTCOLL_FAILPOINT": "shm.barrier.enter:delay=0", "PYTHONPATH": _PACKAGE}
    command = [sys.executable, "-m", "fastcoll.warmup"]
    with unlimited():
        subprocess.run(command, env=env, cwd="/", capture_output=True, timeout=_COMPILATION_SECONDS)


def start(function: Callable[..., Any], stacks: Path, *args: Any) -> tuple[Any, Connection]:
    """Start a process that calls `function(*args)` and writes its stacks on SIGUSR1; return it and its pipe."""
    ours, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=_main, args=(theirs, stacks, function, *args))
    process.start()
    theirs.close()
    return process, ours


def serve() -> None:
    """Start the fork server, unless it runs. Its preloaded modules are searched in PYTHONPATH, not in sys.path."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in (_PACKAGE, str(Path(__file__).parents[1])):
            patch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
        patch.chdir("/")
        forkserver.ensure_running()


def collect(rank: int, process: Any, pipe: Connection, end: float) -> Outcome:
    """Return the outcome of a process of `start`; an AssertionError if it still runs at the `end`."""
    outcome = Outcome(rank, pid=process.pid)
    if not wait([pipe, process.sentinel], max(0.0, end - time.monotonic())):
        raise AssertionError(f"rank {rank} hangs")
    with contextlib.suppress(EOFError):
        if pipe.poll(1):
            outcome = pipe.recv()
    process.join(max(1.0, end - time.monotonic()))
    if process.exitcode is None:
        raise AssertionError(f"rank {rank} does not end")
    outcome.exitcode = process.exitcode
    return outcome


def _main(
    pipe: Connection, stacks: Path, function: Callable[..., Any], rank: int, n: int, url: str, *args: Any
) -> None:
    file = stacks.open("w")
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    outcome = Outcome(rank, pid=os.getpid())
    try:
        outcome.result = function(rank, n, url, *args)
    except BaseException as error:
        outcome.error = f"{error}\n{traceback.format_exc()}"
        outcome.kinds = tuple(kind.__name__ for kind in type(error).__mro__)
    outcome.ended = time.monotonic()
    pipe.send(outcome)
    sys.stdout.flush()


def survivors(outcomes: Sequence[Outcome], victim: int) -> list[Any]:
    """Return the results of all ranks but the victim, which SIGKILL has ended."""
    dead = outcomes[victim]
    assert dead.exitcode == -9, dead.error or dead.result
    return results(outcome for outcome in outcomes if outcome is not dead)


def results(outcomes: Iterable[Outcome]) -> list[Any]:
    """Return the results of all ranks; fail with the error of a rank that raised."""
    found = list(outcomes)
    assert all(outcome.result is not None for outcome in found), [outcome.error for outcome in found]
    return [outcome.result for outcome in found]


def see(
    worlds: Sequence[tuple[Any, ...]], within: float = math.inf, calls: Sequence[Sequence[int]] = ()
) -> None:
    """Run worlds of `die` together, because they mostly wait, and check the survivors' reports."""
    with nothing_left():
        ends = run_together(worlds)
    for number, (world, outcomes) in enumerate(zip(worlds, ends, strict=True)):
        check(outcomes, world[5], world[2], within, calls[number] if calls else ())


def check(
    outcomes: Sequence[Outcome], victim: int, op: str, within: float = math.inf, calls: Sequence[int] = ()
) -> None:
    """Check that every survivor of `work_until_failpoint` named rank, host, pid, operation and call, and went on.

    Args:
        within: promised seconds from the death to the error, for tests with the mark `timed`; later calls on the group
            then have a promised time as well. Without it, an error other than a timeout proves that death was noticed.
        calls: the numbers of the calls that may fail.
    """
    dead, n = outcomes[victim], len(outcomes)
    for saw in survivors(outcomes, victim):
        assert (saw["kind"], saw["ranks"]) == ("PeerDiedError", (victim,)), saw
        assert f"rank {victim} (pid {dead.pid} on {socket.gethostname()}) died" in saw["error"], saw
        called = re.search(_CALLS.get(op, rf"; {op}\(.*?\), call (\d+) of group 'WORLD'"), saw["error"])
        assert called, saw
        assert not calls or int(called[1]) in calls, saw
        assert saw["raised"] - dead.died < within, saw
        assert saw["again"] == {saw["error"]}
        assert within == math.inf or saw["again_after"] < AGAIN_WITHIN, saw
        assert saw["others"] == sum(range(1, n + 1)) - (victim + 1)


def check_interrupted(first: Outcome, others: Sequence[Outcome]) -> None:
    """Check that Ctrl-C ended rank 0's call, and that all others raised because of it."""
    saw, *reports = results([first, *others])
    assert saw["kind"] == "KeyboardInterrupt"
    for each in reports:
        assert (each["kind"], each["ranks"]) == ("AbortedError", (0,)), each
        assert "KeyboardInterrupt" in each["error"]


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Fail if /dev/shm has new names of this session afterwards.

    A name that disappears by itself within moments belongs to a group of another job that is being made.
    """
    before = shm_names()
    yield
    until(lambda: shm_names() <= before, lambda: f"left in /dev/shm: {shm_names() - before}")
