"""Start, watch and end the ranks of one side for one round, and find the rank at fault.

All sides run under fastcoll's launcher, which ends all their processes when a rank fails or the launcher is signalled.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
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
_ON_HOSTS = Path(__file__).with_name("on_hosts.py")
# Between hosts that are namespaces. By default UCX, which MPICH uses, sees one machine, and sends nothing over TCP.
_OVER_TCP = {"GLOO_SOCKET_IFNAME": "eth0", "UCX_TLS": "tcp,self", "FI_PROVIDER": "tcp"}
_GRACE_SECONDS = 2.0
_SHOWN_LINES = 40


class SideFailedError(FastcollError):
    """The ranks of a side failed.

    The message has the call of each rank, and the stderr of the side.
    """


@dataclass(frozen=True)
class Launch:
    """The command that starts a side.

    Attributes:
        side: the side's name, a key of `loop.SIDES`.
        words: the command; its last argument is the job's folder.
        shown: the part of the command that results show, without this machine's paths.
    """

    side: str
    words: tuple[str, ...]
    shown: str


def ours(side: str, ranks: int, hosts: int) -> Launch:
    """Return the command for fastcoll or the limit, in this Python."""
    return _launched(side, ranks, hosts, (str(_START), side))


def peers(found: Found, ranks: int, cores: int, hosts: int) -> Launch:
    """Return the command for a peer, in its own Python."""
    name = found.peer.name
    worker = (str(found.python), str(_START), name)
    if not found.peer.is_mpi:
        return _launched(name, ranks, hosts, ("--no_python", *worker))
    general = _open_mpi_options(ranks, cores) if found.peer.home == "openmpi" else ()
    places = _host_options(found.peer.home, ranks, hosts) if hosts > 1 else ()
    options = [*general, *found.peer.options, *places, "-n", str(ranks)]
    before = (sys.executable, str(_ON_HOSTS), str(hosts), "first") if hosts > 1 else ()
    words = (*before, *_launcher(1), "--no_python", str(found.mpiexec), *options, *worker)
    return Launch(name, words, shlex.join(["mpiexec", *options]))


def run(launch: Launch, job: Job, folder: Path, timeout: float) -> list[list[dict[str, Any]]]:
    """Run a side to its end.

    Returns:
        for each rank the lines that it wrote (see `loop`).

    Raises:
        SideFailedError: a rank failed, or they took longer than `timeout` seconds.
    """
    job.write(folder)
    command = [*_tied(), *launch.words, str(folder)]
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            env=_environment(folder, job.hosts), start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise SideFailedError(_blame(launch, job, folder, f"no end after {timeout:g} s")) from None
        finally:
            _end(process)
    results = [_read(folder / f"{rank}.jsonl") for rank in range(job.ranks)]
    if code or not all(lines and lines[-1].get("ends") == len(job.cells) - 1 for lines in results):
        raise SideFailedError(_blame(launch, job, folder, lifeline.describe_exit(code)))
    return results


def _launched(side: str, ranks: int, hosts: int, program: Sequence[str]) -> Launch:
    """Return the command that starts a program under fastcoll's launcher, with one launcher on each host."""
    if hosts == 1:
        return Launch(side, (*_launcher(ranks), *program), f"python -m fastcoll.launch -n {ranks}")
    each = ("--nnodes", str(hosts), "--node_rank", "{node}", "--master_addr", "host0")
    words = (*_launcher(ranks // hosts), *each, *program)
    shown = shlex.join(["python", "-m", "fastcoll.launch", "-n", str(ranks // hosts), *each])
    return Launch(side, (sys.executable, str(_ON_HOSTS), str(hosts), "each", *words), shown)


def _launcher(ranks: int) -> tuple[str, ...]:
    return (
        sys.executable, "-m", "fastcoll.launch", "--no_prefix", "--grace", f"{_GRACE_SECONDS:g}", "-n", str(ranks),
    )  # fmt: skip


def _host_options(mpi: str, ranks: int, hosts: int) -> Sequence[str]:
    """Return mpiexec's options for ranks on several hosts, each with as many neighbouring ranks."""
    names, each = [f"host{host}" for host in range(hosts)], ranks // hosts
    if mpi == "openmpi":
        return ["--mca", "plm_ssh_agent", "{agent}", "--host", ",".join(f"{name}:{each}" for name in names)]
    return ["-launcher", "ssh", "-launcher-exec", "{agent}", "-hosts", ",".join(names), "-ppn", str(each)]


def _open_mpi_options(ranks: int, cores: int) -> Sequence[str]:
    """Return options for Open MPI.

    mpiexec pins no ranks, because ranks pin themselves, and waiting ranks yield if they share a core.
    """
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    crowded = ["--mca", "mpi_yield_when_idle", "1"] if ranks > cores else []
    return [*root, "--bind-to", "none", "--oversubscribe", *crowded]


def _tied() -> list[str]:
    """Return the beginning of a command that is ended when this process is killed."""
    return [sys.executable, lifeline.__file__, str(os.getpid())]


def _environment(folder: Path, hosts: int) -> dict[str, str]:
    """Return the environment of all sides.

    Ranks have one thread for computing, and temporary files go to `folder`, which is removed. Intel MPI pins no ranks,
    because ranks pin themselves.
    """
    one_thread = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "I_MPI_PIN": "0"}
    network = {"FASTCOLL_SECRET": secrets.token_hex(32), **_OVER_TCP} if hosts > 1 else {}
    return {**one_thread, **network, **os.environ, "TMPDIR": str(folder)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the launcher to end all its processes, and kill it if it does not."""
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
    places: dict[str, list[int]] = {}
    for rank in range(job.ranks):
        places.setdefault(_place(job, folder, rank), []).append(rank)
    lines = (folder / "stderr").read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
    return "\n".join(
        [
            f"{launch.side} failed: {end}",
            *(f"  rank {', '.join(map(str, ranks))}: {place}" for place, ranks in places.items()),
            f"  command: {shlex.join([*launch.words, str(folder)])}",
            "  its stderr:",
        ]
        + [f"    {line}" for line in lines or ["(nothing)"]]
    )


def _place(job: Job, folder: Path, rank: int) -> str:
    """Return in which cell a rank was when it ended, in words."""
    lines = _read(folder / f"{rank}.jsonl")
    if not lines:
        return "had not joined the others"
    last = lines[-1]
    if "begins" not in last:
        return "was between two operations, or done"
    cell = job.cells[last["begins"]]
    return f"was in {cell.operation} of {cell.size} bytes"
