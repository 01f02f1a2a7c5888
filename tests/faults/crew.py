"""Runs a function in n processes that may be killed, and collects what became of each.

Processes come from a fork server that has fastcoll's kernels imported already, so that a case takes a tenth of a
second. Every rank ends with its result, with the exception it raised, or with the signal that killed it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["fastcoll", "fastcoll.shm.group", "fastcoll.net.group", "faults.victims"])


@dataclass
class Outcome:
    """What became of a rank: a result, a raised error (its type's names, text and time), or an exit code."""

    rank: int
    result: Any = None
    error: str = ""
    kinds: tuple[str, ...] = ()
    ended: float = 0.0
    exitcode: int | None = None
    pid: int = 0


def run(function: Callable[..., Any], n: int, *args: Any, deadline: float = 40.0) -> list[Outcome]:
    """Call `function(rank, n, url, *args)` in n processes; all are gone when this returns.

    Raises:
        AssertionError: a rank was still running at the deadline; its stacks are shown.
    """
    with tempfile.TemporaryDirectory() as directory:
        url = f"file://{directory}/rendezvous"
        pipes, processes = [], []
        for rank in range(n):
            ours, theirs = _context.Pipe(duplex=False)
            stacks = Path(directory, f"stacks-{rank}")
            process = _context.Process(target=_main, args=(theirs, stacks, function, rank, n, url, *args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return [
                _collect(r, p, c, time.monotonic() + deadline)
                for r, (p, c) in enumerate(zip(processes, pipes, strict=True))
            ]
        except AssertionError as error:
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)
            texts = [f"-- rank {r}\n{Path(directory, f'stacks-{r}').read_text()}" for r in range(n)]
            raise AssertionError(f"{error}\n" + "\n".join(texts)) from None
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                process.kill()
                process.join()
                process.close()
                pipe.close()


def _collect(rank: int, process: Any, pipe: Connection, end: float) -> Outcome:
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


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if /dev/shm has names afterwards that it did not have before.

    A name that goes away by itself within moments is that of another job's group, just being made.
    """
    before = set(os.listdir("/dev/shm"))
    yield
    end = time.monotonic() + 2
    while left := {name for name in os.listdir("/dev/shm") if name.startswith("fastcoll")} - before:
        assert time.monotonic() < end, f"left in /dev/shm: {left}"
        time.sleep(0.05)
