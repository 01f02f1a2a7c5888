"""One side's ranks for one round: started, watched, ended; and who was at fault.

All sides run under fastcoll's launcher, which ends whatever they have started when one fails or it is told to.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcoll.errors import FastcollError
from fastcoll.launch import lifeline

from .peers import Found
from .plan import Job

_START = Path(__file__).with_name("start.py")
_LAUNCHED = "python -m fastcoll.launch -n {}"
_GRACE_SECONDS = 2.0
_SHOWN_LINES = 40


class SideFailedError(FastcollError):
    """A side's ranks failed; the message names the rank, what it did, and has what was written on stderr."""


@dataclass(frozen=True)
class Launch:
    """How a side is started.

    Attributes:
        side: its name, a key of `loop.SIDES`.
        words: the command; takes the job's folder as its last argument.
        told: what matters of it, without this machine's paths.
    """

    side: str
    words: tuple[str, ...]
    told: str


def ours(side: str, ranks: int) -> Launch:
    """fastcoll's own side, or the limit's, in this Python."""
    return Launch(side, (*_launcher(ranks), str(_START), side), _LAUNCHED.format(ranks))


def peers(found: Found, ranks: int, cores: int) -> Launch:
    """A peer's side, in its own Python."""
    name = found.peer.name
    worker = (str(found.python), str(_START), name)
    if not found.peer.is_mpi:
        return Launch(name, (*_launcher(ranks), "--no_python", *worker), _LAUNCHED.format(ranks))
    general = _open_mpi_options(ranks, cores) if found.peer.home == "openmpi" else ()
    options = [*general, *found.peer.options, "-n", str(ranks)]
    words = (*_launcher(1), "--no_python", str(found.mpiexec), *options, *worker)
    return Launch(name, words, shlex.join(["mpiexec", *options]))


def run(launch: Launch, job: Job, folder: Path, timeout: float) -> list[list[dict[str, Any]]]:
    """Run a side to its end.

    Returns:
        for each rank what it said (see `loop`).

    Raises:
        SideFailedError: a rank failed, or they took longer than `timeout` seconds.
    """
    job.write(folder)
    command = [*_tied(), *launch.words, str(folder)]
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            env=_environment(folder), start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise SideFailedError(_blame(launch, job, folder, f"no end after {timeout:g} s")) from None
        finally:
            _end(process)
    said = [_read(folder / f"{rank}.jsonl") for rank in range(job.ranks)]
    if code or not all(lines and lines[-1].get("ends") == len(job.cells) - 1 for lines in said):
        raise SideFailedError(_blame(launch, job, folder, lifeline.describe_exit(code)))
    return said


def _launcher(ranks: int) -> tuple[str, ...]:
    return (
        sys.executable, "-m", "fastcoll.launch", "--no_prefix", "--grace", f"{_GRACE_SECONDS:g}", "-n", str(ranks),
    )  # fmt: skip


def _open_mpi_options(ranks: int, cores: int) -> Sequence[str]:
    """The ranks pin themselves; ranks that wait must yield where they share a core."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    crowded = ["--mca", "mpi_yield_when_idle", "1"] if ranks > cores else []
    return [*root, "--bind-to", "none", "--oversubscribe", *crowded]


def _tied() -> list[str]:
    """Have the launcher end when this process is killed."""
    return [sys.executable, lifeline.__file__, str(os.getpid())]


def _environment(folder: Path) -> dict[str, str]:
    """One thread a rank for all; files that a library makes go where they are removed."""
    return {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", **os.environ, "TMPDIR": str(folder)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the launcher, which then ends all that it has started, and make sure."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(4 * _GRACE_SECONDS)
    lifeline.signal_group(process.pid, signal.SIGKILL)
    process.wait()


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]


def _blame(launch: Launch, job: Job, folder: Path, end: str) -> str:
    places = [f"  rank {rank}: {_place(job, folder, rank)}" for rank in range(job.ranks)]
    said = (folder / "stderr").read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
    return "\n".join(
        [
            f"{launch.side} failed: {end}",
            *places,
            f"  command: {shlex.join([*launch.words, str(folder)])}",
            "  its stderr:",
        ]
        + [f"    {line}" for line in said or ["(nothing)"]]
    )


def _place(job: Job, folder: Path, rank: int) -> str:
    """Where a rank was when it ended."""
    lines = _read(folder / f"{rank}.jsonl")
    if not lines:
        return "had not joined the others"
    last = lines[-1]
    if "begins" not in last:
        return "was between two operations, or done"
    cell = job.cells[last["begins"]]
    return f"was in {cell.operation} of {cell.size} bytes"
