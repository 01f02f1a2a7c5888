"""One node's share of a job: the ranks that the launcher starts, the environment of each rank, and free ports.

| variable | meaning |
|---|---|
| RANK, WORLD_SIZE | the rank, and the number of ranks in the job |
| LOCAL_RANK, LOCAL_WORLD_SIZE | the rank among the ranks of this node, and their number |
| GROUP_RANK | the node's number |
| MASTER_ADDR, MASTER_PORT | where rank 0 listens |
| ROLE_*, GROUP_WORLD_SIZE, TORCHELASTIC_* | as torchrun sets them for its programs (options.py, restarts.py) |
| FASTCOLL_SECRET | the job's secret; if none is given for a job of one node, the launcher makes one |
| OMP_NUM_THREADS, NUMBA_NUM_THREADS | unless set already: the cores of a bound rank; else 1 if ranks share the node |
| FASTCOLL_ELASTIC | HOST:PORT of a store that outlives the ranks; set if the job may go on without failed ranks |
| FASTCOLL_JOINER | 1 for a process that replaces a failed rank; the process has no RANK and no WORLD_SIZE |
| FASTCOLL_METRICS_SOCKET | where the ranks hand over their records, if the launcher serves metrics |
| FASTCOLL_LAUNCHERS | HOST:PORT of the store at which the launchers of several nodes meet |
| FASTCOLL_PLACE | with FASTCOLL_ELASTIC: the process's name, and its rank if the ranks have not all met before |
"""

from __future__ import annotations

import json
import random
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ResourceError
from ..rendezvous.attempts import ProcessName
from ..rendezvous.detect import port_beside
from .binding import Share
from .generations import RankRange

if TYPE_CHECKING:
    pass

_LOWEST = 10000
_ATTEMPTS = 200
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Ranks do not inherit these variables, because the launcher's values would be wrong for the ranks.
_OF_LAUNCHERS = (
    "FASTCOLL_ELASTIC",
    "FASTCOLL_JOINER",
    "FASTCOLL_LAUNCHERS",
    "FASTCOLL_PLACE",
    "FASTCOLL_METRICS",
    "FASTCOLL_METRICS_SOCKET",
    # Those of an mpiexec that has started the launcher: with them, MPI would take each rank for the launcher.
    *("PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_PORT", "PMIX_RANK", "PMIX_NAMESPACE"),
    *(f"{mpi}_COMM_WORLD_{what}" for mpi in ("OMPI", "MV2") for what in ("RANK", "SIZE")),
)
_THREADS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")


def python_main(module: str) -> tuple[str, ...]:
    """Return the command that calls `main` of a module in a new interpreter.

    The new interpreter has this interpreter's sys.path and options, such as -O and -W.

    The caller appends integers, which are the arguments of `main`.
    """
    boot = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        f"from {module} import main; sys.exit(main(*map(int, sys.argv[2:])))"
    )
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    return sys.executable, *options, "-u", "-c", boot, json.dumps(sys.path)


@dataclass(frozen=True)
class NodeShare:
    """One node's share of a job."""

    program: tuple[str, ...]  # the command that every rank runs
    local_size: int  # the number of ranks on this node
    nodes: int  # the number of nodes; each has `local_size` ranks unless `assigned` is given
    node_rank: int  # this node's number
    master_addr: str  # where rank 0 listens
    master_port: int
    arguments: tuple[str, ...] = ()  # the program's arguments
    pass_local_rank: bool = False  # whether `--local_rank=N` precedes the arguments
    descriptors: tuple[int, ...] = ()  # of files that the ranks inherit
    elastic: str = ""  # HOST:PORT of the store that outlives the ranks
    launchers: str = ""  # HOST:PORT of the store at which the launchers of several nodes meet
    metrics: str = ""  # the name of the socket at which the launcher takes the ranks' records
    assigned: RankRange | None = (
        None  # the ranks of this node in a generation; None: all nodes have `local_size`
    )
    variables: Mapping[str, str] = field(default_factory=dict)  # further environment variables of the ranks
    shares: Sequence[Share] = ()  # the processors of each local rank; empty: all ranks may use all
    _secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    @property
    def ranks(self) -> RankRange:
        """The ranks of this node."""
        first, size = self.node_rank * self.local_size, self.nodes * self.local_size
        return self.assigned or RankRange(self.node_rank, first, size, first, size)

    def rank(self, local_rank: int) -> int:
        """Return the global rank of a local rank."""
        return self.ranks.first + local_rank

    def process_name(self, local_rank: int, joiner: int) -> ProcessName:
        """Return the value of FASTCOLL_PLACE for a local rank, or for its replacement number `joiner`."""
        name = f"{self.node_rank}.new{joiner}" if joiner else f"{self.node_rank}.{local_rank}"
        return ProcessName(name, self.rank(local_rank), self.ranks.world_size)

    def command(self, local_rank: int) -> list[str]:
        """Return the command line of a local rank."""
        option = [f"--local_rank={local_rank}"] if self.pass_local_rank else []
        return [*self.program, *option, *self.arguments]

    def share(self, local_rank: int) -> Share | None:
        """Return the processors to which a local rank is bound; None: it is not bound."""
        return self.shares[local_rank] if self.shares else None

    def thread_counts(self, local_rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that limit a local rank's threads, so that ranks do not oversubscribe the cores."""
        if not self.shares and self.local_size == 1:
            return {}
        share = self.share(local_rank)
        return {name: str(share.threads if share else 1) for name in _THREADS if name not in inherited}

    def secret(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return a variable FASTCOLL_SECRET with a new secret for the job, or no variable.

        No secret is made if the environment has one. None is made for several nodes either, because their launchers
        could not agree on it; without a given secret, these launchers and their ranks use the user's secret
        (store/secret.py).
        """
        has_one = inherited.get("FASTCOLL_SECRET") or inherited.get("FASTCOLL_SECRET_FILE")
        return {} if has_one or self.nodes > 1 else {"FASTCOLL_SECRET": self._secret}

    def environment(self, local_rank: int, inherited: Mapping[str, str], joiner: int = 0) -> dict[str, str]:
        """Return the complete environment of one rank, or of its replacement number `joiner`."""
        elastic = {
            "FASTCOLL_ELASTIC": self.elastic,
            "FASTCOLL_PLACE": str(self.process_name(local_rank, joiner)),
        }
        made = {
            **{name: value for name, value in inherited.items() if name not in _OF_LAUNCHERS},
            **self.secret(inherited),
            **self.thread_counts(local_rank, inherited),
            **(elastic if self.elastic else {}),
            **({"FASTCOLL_LAUNCHERS": self.launchers} if self.launchers else {}),
            **({"FASTCOLL_METRICS_SOCKET": self.metrics} if self.metrics else {}),
            "RANK": str(self.rank(local_rank)),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.ranks.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            **self.variables,
        }
        if self.variables:
            made["ROLE_RANK"] = str(self.ranks.role_first + local_rank)
            made["ROLE_WORLD_SIZE"] = str(self.ranks.role_size)
            made["GROUP_WORLD_SIZE"] = str(self.nodes)
        if joiner:
            made["FASTCOLL_JOINER"] = "1"
            for name in ("RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"):
                made.pop(name, None)
        return made


def free_port() -> int:
    """Return a random port that is free now.

    The port beside it (`port_beside`), which fastcoll's store uses, is free as well.
    """
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return several different ports, each free as `free_port` describes.

    No outgoing connection takes such a port before rank 0 listens, because the ports are below the kernel's range for
    outgoing connections. Two jobs may still draw the same port; rank 0's error then names the process that uses it.

    Raises:
        ResourceError: too few ports are free.
    """
    from ..system.address import tcp_sockets  # imported here, because it imports sockets

    used = {port for port, _, _ in tcp_sockets()}
    taken = set(used)
    highest = _first_outgoing_port()
    pick = random.SystemRandom()  # a seeded global generator would give every job the same port
    ports: list[int] = []
    for _ in range(_ATTEMPTS * count):
        port = pick.randrange(_LOWEST, highest)
        if not taken & {port, port_beside(port)}:
            ports.append(port)
            taken |= {port, port_beside(port)}
            if len(ports) == count:
                return ports
    raise ResourceError(
        f"no free TCP port in {_LOWEST}..{highest - 1} after {_ATTEMPTS} attempts ({len(used)} are in use); "
        "close some, or choose one with --master_port"
    )


def _first_outgoing_port() -> int:
    try:
        first = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32768  # Linux's default
    return first if first >= _LOWEST + 1000 else 65536


def default_port(master_port: int) -> int:
    """Return the port of the launchers' store if --nodes_port is not given."""
    return port_beside(master_port, away=10000)
