"""`python -m fastcoll.bench --start`: how long ranks take to start.

It measures the start of the interpreter, the import, `init_process_group`, and these three together. The first and the
second all_reduce are timed separately.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ..errors import UsageError
from .command import read_study, temporary_folder

_RANK = """
import json, sys, time
began, rank, ranks, meeting = json.loads(sys.argv[1])
marks = [began, time.monotonic()]
import fastcoll as dist, numpy as np
marks.append(time.monotonic())
dist.init_process_group(init_method="file://" + meeting, world_size=ranks, rank=rank)
marks.append(time.monotonic())
x = np.ones(1024, np.float32)
for _ in range(2):
    since = time.monotonic()
    dist.all_reduce(x)
    marks.append(time.monotonic() - since)
print(json.dumps(marks))
dist.destroy_process_group()
"""
STEPS = ("interpreter", "import", "init_process_group", "all three", "first all_reduce", "second all_reduce")


def main(words: Sequence[str]) -> int:
    """Time the start of ranks, as a command line asks; return the exit code."""
    parser, _, _, ranks = read_study(words, "--start", starts_ranks=True)
    try:
        run(ranks)
    except UsageError as error:
        parser.error(str(error))
    return 0


def run(ranks: int, times: int = 10) -> None:
    """Start `ranks` processes `times` times, after a first start that fills the caches, and print the medians."""
    _start(ranks)
    rows = [_start(ranks) for _ in range(times)]
    print(f"{ranks} ranks, {times} starts, milliseconds of the slowest rank")
    print(f"{'':20} {'median':>10} {'longest':>10}")
    for step, values in zip(STEPS, zip(*rows, strict=True), strict=True):
        print(f"{step:20} {statistics.median(values) * 1e3:10.4g} {max(values) * 1e3:10.4g}")


def _start(ranks: int) -> list[float]:
    """Return the time of each of STEPS in seconds, of the slowest rank."""
    with temporary_folder() as folder, ExitStack() as started:
        meeting = str(Path(folder) / "meeting")
        processes = []
        for rank in range(ranks):
            given = json.dumps([time.monotonic(), rank, ranks, meeting])
            command = [sys.executable, "-c", _RANK, given]
            process = started.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            started.callback(process.kill)  # ends the process if this function is interrupted, as by Ctrl-C
            processes.append(process)
        texts = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise UsageError("a rank could not start; its error is above")
    return [max(values) for values in zip(*map(_steps, texts), strict=True)]


def _steps(text: str) -> list[float]:
    began, interpreter, imported, ready, first, second = json.loads(text)
    return [interpreter - began, imported - interpreter, ready - imported, ready - began, first, second]
