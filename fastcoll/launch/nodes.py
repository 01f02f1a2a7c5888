"""What is to be started on this node, the environment of each rank, the port of a job, and how its nodes end together.

| variable | meaning |
|---|---|
| RANK, WORLD_SIZE | among all ranks of the job |
| LOCAL_RANK, LOCAL_WORLD_SIZE | among those of this node |
| GROUP_RANK | the node's number |
| MASTER_ADDR, MASTER_PORT | where rank 0 listens |
| ROLE_*, GROUP_WORLD_SIZE, TORCHELASTIC_* | as torchrun sets them (command.py), for programs made for it |
| FASTCOLL_SECRET | the job's secret, which the launcher makes for a job of one node that was given none |
| OMP_NUM_THREADS, NUMBA_NUM_THREADS | 1 when several ranks share the node, unless set already |
| FASTCOLL_ELASTIC | HOST:PORT of a store that outlives the ranks, where some may fail and others go on |
| FASTCOLL_NEWCOMER | 1 for a process in the place of a rank that has failed; it has no RANK and no WORLD_SIZE |
| FASTCOLL_PLACE | with FASTCOLL_ELASTIC: the process's name, and the rank it has if the ranks have not met yet |

The launchers of a job's nodes tell one another that a rank has failed, so that all of them end. They meet in a store,
as ranks do, which node 0's launcher serves on a port of its own, with the job's secret. The first failure is set there.
A launcher that ends without a word, as by SIGKILL, is a failure as well: each leaves a last will with the store; and
where the store goes without saying that the job is over, it went with node 0's launcher. A launcher that cannot reach
the store goes on without: its ranks then end when their groups fail. The store is served until node 0's ranks have
ended, and after a failure until all nodes have read it, those included that are started a little later.
"""

from __future__ import annotations

import json
import random
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ResourceError
from ..rendezvous.attempts import Place
from ..rendezvous.detect import port_beside
from .generations import Share

if TYPE_CHECKING:
    pass

_LOWEST = 10000
_ATTEMPTS = 200
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_OF_LAUNCHERS = (
    "FASTCOLL_ELASTIC",
    "FASTCOLL_NEWCOMER",
    "FASTCOLL_PLACE",
)  # the launcher's own value would be wrong for its ranks
_THREADS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")


def python_main(module: str) -> tuple[str, ...]:
    """The command of a new interpreter with this one's sys.path: `main` of a module, with whole numbers to follow."""
    boot = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        f"from {module} import main; sys.exit(main(*map(int, sys.argv[2:])))"
    )
    return sys.executable, "-u", "-c", boot, json.dumps(sys.path)


@dataclass(frozen=True)
class Job:
    """One node's share of a job."""

    program: tuple[str, ...]  # what every rank runs
    local_size: int  # the ranks on this node
    nodes: int  # how many there are, each with as many ranks
    node_rank: int  # which one this is
    master_addr: str  # where rank 0 listens
    master_port: int
    arguments: tuple[str, ...] = ()  # the program's own
    pass_local_rank: bool = False  # whether `--local_rank=N` comes before them
    descriptors: tuple[int, ...] = ()  # of files that the ranks inherit
    elastic: str = ""  # where the store is that outlives the ranks
    assigned: Share | None = None  # the numbers of its ranks; None: all nodes have as many
    variables: Mapping[str, str] = field(default_factory=dict)  # further variables, torchrun's among them
    _secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    @property
    def share(self) -> Share:
        """The numbers of this node's ranks."""
        first, size = self.node_rank * self.local_size, self.nodes * self.local_size
        return self.assigned or Share(self.node_rank, first, size, first, size)

    def rank(self, local_rank: int) -> int:
        """The rank in the whole job of one of this node's ranks."""
        return self.share.first + local_rank

    def place(self, local_rank: int, newcomer: int) -> Place:
        """Return the name in an elastic job of one of this node's ranks, or of its replacement, and the rank."""
        name = f"{self.node_rank}.new{newcomer}" if newcomer else f"{self.node_rank}.{local_rank}"
        return Place(name, self.rank(local_rank), self.share.world_size)

    def command(self, local_rank: int) -> list[str]:
        """The command line of one of this node's ranks."""
        option = [f"--local_rank={local_rank}"] if self.pass_local_rank else []
        return [*self.program, *option, *self.arguments]

    def single_threaded(self, inherited: Mapping[str, str]) -> list[str]:
        """The variables that are set to 1, so that the ranks of this node do not crowd its cores."""
        return [name for name in _THREADS if self.local_size > 1 and name not in inherited]

    def secret(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The variable with the secret that is made for the job, if one is. Launchers of several nodes could not agree
        on one, so they and their ranks take the user's own where none is given.
        """
        has_one = inherited.get("FASTCOLL_SECRET") or inherited.get("FASTCOLL_SECRET_FILE")
        return {} if has_one or self.nodes > 1 else {"FASTCOLL_SECRET": self._secret}

    def environment(self, local_rank: int, inherited: Mapping[str, str], newcomer: int = 0) -> dict[str, str]:
        """Return the whole environment of one rank, or of its replacement number `newcomer`."""
        elastic = {"FASTCOLL_ELASTIC": self.elastic, "FASTCOLL_PLACE": str(self.place(local_rank, newcomer))}
        made = {
            **{name: value for name, value in inherited.items() if name not in _OF_LAUNCHERS},
            **self.secret(inherited),
            **{name: "1" for name in self.single_threaded(inherited)},
            **(elastic if self.elastic else {}),
            "RANK": str(self.rank(local_rank)),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.share.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            **self.variables,
        }
        if self.variables:
            made["ROLE_RANK"] = str(self.share.role_first + local_rank)
            made["ROLE_WORLD_SIZE"] = str(self.share.role_size)
            made["GROUP_WORLD_SIZE"] = str(self.nodes)
        if newcomer:
            made["FASTCOLL_NEWCOMER"] = "1"
            for name in ("RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"):
                made.pop(name, None)
        return made


def free_port() -> int:
    """A random port that no socket of this machine uses now, nor the port beside it, for fastcoll's store."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """As free_port, so many, or ResourceError.

    They are below the kernel's range for outgoing connections: none of those can take one before rank 0 listens.
    Two jobs may still draw the same one: rank 0 then says who holds it.
    """
    from ..system.address import tcp_sockets  # with sockets

    used = {port for port, _, _ in tcp_sockets()}
    highest = _first_outgoing_port()
    pick = random.SystemRandom()  # a seeded `random` would give every job the same port
    ports: list[int] = []
    for _ in range(_ATTEMPTS * count):
        port = pick.randrange(_LOWEST, highest)
        if not used & {port, port_beside(port)}:
            ports.append(port)
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
    """Where launchers meet by default."""
    return port_beside(master_port, away=10000)
