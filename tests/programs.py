"""Programs that tests run to their end with this Python: one alone, or one process for each rank; and waiting."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from fastcoll.launch.nodes import free_port

LIMIT = 600.0  # s, which only ends a hang
# A program that prints the name of a segment that it has made, and then is killed.
DIES_WITH_A_SEGMENT = (
    "import os; from fastcoll.shm import segment as s; from fastcoll.shm.layout import plan; n = s.new_name(); "
    "s.Segment.create(n, plan(2, 1 << 17)); print(n, flush=True); os.kill(os.getpid(), 9)"
)


def python(
    *words: object, environ: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; `environ` is added to this process's environment."""
    command, env = [sys.executable, *map(str, words)], {**os.environ, **(environ or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=env, **options)


def torchrun(*words: str) -> tuple[str, ...]:
    """Return Python's arguments for torchrun on one machine, followed by `words`.

    Its --standalone would take any port. A connection of another test could then have the port beside it, which
    fastcoll's store needs.
    """
    endpoint = f"--rdzv-endpoint=localhost:{free_port()}"
    return ("-m", "torch.distributed.run", "--rdzv-backend=c10d", endpoint, *words)


def at_once(commands: Sequence[Sequence[object]], **options: Any) -> list[subprocess.CompletedProcess[str]]:
    """Run commands at the same time, and kill those that are still running if one takes too long."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ExitStack() as started:
        processes = []
        for command in commands:
            processes.append(
                started.enter_context(subprocess.Popen([*map(str, command)], **pipes, **options))
            )
            started.callback(processes[-1].kill)
        outputs = [process.communicate(timeout=LIMIT) for process in processes]
    ends = zip(processes, outputs, strict=True)
    return [subprocess.CompletedProcess(p.args, p.returncode, *output) for p, output in ends]


def python_ranks(size: int, *words: object, **options: Any) -> list[subprocess.CompletedProcess[str]]:
    """Run Python with these arguments and a rank, for each rank."""
    return at_once([[sys.executable, *words, rank] for rank in range(size)], **options)


def until(
    so: Callable[[], Any],
    otherwise: Callable[[], object] = lambda: "it does not happen",
    seconds: float = LIMIT,
) -> Any:
    """Return the first true result of `so`; fail with the result of `otherwise` if there is none in time.

    The limit only ends a test that hangs. Looking takes at most a fifth of a processor.
    """
    end, used = time.monotonic() + seconds, time.process_time()
    while not (found := so()):
        assert time.monotonic() < end, otherwise()
        time.sleep(max(0.001, 4 * (time.process_time() - used)))
        used = time.process_time()
    return found


def last_table(text: str) -> list[dict[str, str]]:
    """Return the rows of the last table of ranks in what a command has printed into a pipe, by the columns' names."""
    found = [line.split("\t") for line in text.splitlines() if "\t" in line]
    start = max((n for n, row in enumerate(found) if row[0] == "rank"), default=len(found))
    return [dict(zip(found[start], row, strict=True)) for row in found[start + 1 :]]
