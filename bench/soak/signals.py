"""A launcher gets one or two signals at a random moment and must leave nothing.

The launcher must end all its processes and log that. Each of its ranks starts a process that never ends, joins the
group, and then reduces and prints for ever. The signal arrives before the ranks start, while they meet, or while they
work. Some launchers would restart failed ranks.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fastcoll.launch.nodes import free_port
from fastcoll.testing.worker import shm_names

from .fleet import left_in_shm, marked
from .report import Report, percentile

_RANKS = 3
_PROGRAM = """
import subprocess, sys
import numpy as np
import fastcoll as dist
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
dist.init_process_group(sys.argv[1])
x = np.ones(100_000)
while True:
    dist.all_reduce(x, dist.ReduceOp.MAX)
    print("here", flush=True)
"""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_END_SECONDS = 10.0  # 5 for the grace, 2 for processes that outlive ranks, the rest for a loaded machine


def run(amount: int, seed: int) -> Report:
    """Send signals to `amount` launchers."""
    report, dice = Report(), random.Random(seed)
    took, early, ignored = list[float](), 0, 0
    # Under nohup a launcher would inherit that SIGHUP is ignored, and rightly ignore it.
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(_PROGRAM)
        for number in range(amount):
            command, signals = _draw(dice, str(program))
            case = f"{' '.join(command[3:-2])} {command[-1]}, {'+'.join(each.name for each in signals)}"
            mark, before = f"SOAK-{os.getpid()}-{number}-", shm_names()
            with tempfile.TemporaryFile() as output:
                launcher = subprocess.Popen(
                    command, env={**os.environ, "SOAK": mark}, stdout=output, stderr=output
                )
                _let_it_come(output.fileno(), dice)
                for each in signals:
                    launcher.send_signal(each)
                began = time.monotonic()
                ignored += _await_end(launcher, output.fileno(), signals[0])
                took.append(time.monotonic() - began)
                ran = b"fastcoll.launch: " in os.pread(output.fileno(), 4096, 0)
            first, code = signals[0], launcher.poll()
            early += not ran
            # The launcher had not installed its handlers yet, so Python's took effect.
            is_python = not ran and code in (-first, 1)
            if code != 128 + first and not is_python:
                report.fail(f"{case}: exit code {code}")
            if took[-1] > _END_SECONDS:
                report.fail(f"{case}: ended after {took[-1]:.1f} s")
            if left := marked(mark):
                report.fail(f"{case}: {list(left.values())} are left")
            if names := left_in_shm(before):
                report.fail(f"{case}: {names} in shared memory are left")
            launcher.kill()
            launcher.wait()
    report.done = f"{amount} launchers, {early} of them before they ran"
    report.figures = {"ended after (p50, longest)": f"{percentile(took, 0.5):.2f}, {max(took):.2f} s"}
    report.figures["ignored by Python"] = str(ignored)
    return report


def _await_end(launcher: subprocess.Popen[bytes], output: int, number: int) -> bool:
    """Wait for a launcher's end; return whether a first SIGINT was ignored, and sent again.

    Before the launcher's own code runs, Python prints and ignores a KeyboardInterrupt in a callback of an import.
    """
    is_again, end = False, time.monotonic() + 4 * _END_SECONDS
    while launcher.poll() is None and time.monotonic() < end:
        if not is_again and b"Exception ignored in" in os.pread(output, 4096, 0):
            is_again = True
            launcher.send_signal(number)
        time.sleep(0.002)
    return is_again


def _let_it_come(output: int, dice: random.Random) -> None:
    """Wait until a random moment.

    It is before the launcher runs, while it starts ranks and they meet, or while they work.
    """
    lines = dice.choice([0, 1, 1, 2])  # lines of output to wait for; the first line is the launcher's
    end = time.monotonic() + 60
    while os.pread(output, 4096, 0).count(b"\n") < lines and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(dice.uniform(0, 1.0 if lines == 1 else 0.1))


def _draw(dice: random.Random, program: str) -> tuple[list[str], list[signal.Signals]]:
    """Return a launcher's command, and the signals that it gets."""
    nodes = [f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--nnodes=1:2", "--rdzv_conf=last_call_timeout=0"]
    again = dice.choice(
        [[], ["--max_restarts=3"], ["--min_ranks=1", "--max_restarts=3"], ["--rdzv_backend=c10d", *nodes]]
    )
    command = [sys.executable, "-m", "fastcoll.launch", "-n", str(_RANKS), *again, program]
    return [*command, dice.choice(["shm", "tcp"])], [dice.choice(_SIGNALS)] * dice.choice([1, 1, 2])
