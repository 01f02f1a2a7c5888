"""What is to be started on this node, and the environment that each rank gets. The port, too, at which the ranks meet.

| variable | meaning |
|---|---|
| RANK, WORLD_SIZE | among all ranks of the job |
| LOCAL_RANK, LOCAL_WORLD_SIZE | among those of this node |
| GROUP_RANK | the node's number |
| MASTER_ADDR, MASTER_PORT | where rank 0 listens |
| FASTCOLL_SECRET | the job's secret, if the launcher made one |
| OMP_NUM_THREADS, NUMBA_NUM_THREADS | 1 when several ranks share the node, unless set already |
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ResourceError
from ..rendezvous.detect import port_beside

_LOWEST = 10000
_ATTEMPTS = 200
_PROC_NET = Path("/proc/net")
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
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
    """One node's share of a job.

    Attributes:
        program: what every rank runs.
        local_size: the ranks on this node.
        nodes, node_rank: how many nodes there are, each with as many ranks, and which one this is.
        master_addr, master_port: where rank 0 listens.
        arguments: the program's own.
        pass_local_rank: whether `--local_rank=N` comes before them.
        descriptors: of files that the ranks inherit.
    """

    program: tuple[str, ...]
    local_size: int
    nodes: int
    node_rank: int
    master_addr: str
    master_port: int
    arguments: tuple[str, ...] = ()
    pass_local_rank: bool = False
    descriptors: tuple[int, ...] = ()
    _secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    @property
    def world_size(self) -> int:
        """The ranks of the whole job."""
        return self.nodes * self.local_size

    def rank(self, local_rank: int) -> int:
        """The rank in the whole job of one of this node's ranks."""
        return self.node_rank * self.local_size + local_rank

    def command(self, local_rank: int) -> list[str]:
        """The command line of one of this node's ranks."""
        told = [f"--local_rank={local_rank}"] if self.pass_local_rank else []
        return [*self.program, *told, *self.arguments]

    def single_threaded(self, inherited: Mapping[str, str]) -> list[str]:
        """The variables that are set to 1, so that the ranks of this node do not crowd its cores."""
        return [name for name in _THREADS if self.local_size > 1 and name not in inherited]

    def environment(self, local_rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of one rank.

        The secret is made for jobs of one node only: several launchers could not agree on one.
        """
        made = {name: "1" for name in self.single_threaded(inherited)}
        has_secret = inherited.get("FASTCOLL_SECRET") or inherited.get("FASTCOLL_SECRET_FILE")
        if self.nodes == 1 and not has_secret:
            made["FASTCOLL_SECRET"] = self._secret
        return {
            **inherited,
            **made,
            "RANK": str(self.rank(local_rank)),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def ports_in_use(table: str) -> set[int]:
    """The local ports in the text of /proc/net/tcp or /proc/net/tcp6."""
    fields = (line.split() for line in table.splitlines()[1:])
    return {int(field[1].rpartition(":")[2], 16) for field in fields if len(field) > 1}


def free_port() -> int:
    """A random port that no socket of this machine uses now, nor the port beside it, for fastcoll's store.

    It is below the kernel's range for outgoing connections, so that none of those can take it before rank 0 listens.
    Two jobs may still draw the same one: rank 0 then says who holds it.

    Raises:
        ResourceError: none was found.
    """
    used: set[int] = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # no IPv6 in this kernel
            used |= ports_in_use((_PROC_NET / name).read_text())
    highest = _first_outgoing_port()
    pick = random.SystemRandom()  # a seeded `random` would give every job the same port
    for _ in range(_ATTEMPTS):
        port = pick.randrange(_LOWEST, highest)
        if not used & {port, port_beside(port)}:
            return port
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
