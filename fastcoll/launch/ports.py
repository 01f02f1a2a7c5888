"""A TCP port on which nobody listens, for a job's rendezvous, and whose neighbour for fastcoll's store is free too.

Taken from below the kernel's range for outgoing connections, so that none of those can take the port
before rank 0 listens on it. Two jobs may still draw the same one: rank 0 then says who holds it.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

from ..errors import ResourceError
from ..rendezvous.detect import port_beside

_LOWEST = 10000
_ATTEMPTS = 200
_PROC_NET = Path("/proc/net")
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def ports_in_use(table: str) -> set[int]:
    """The local ports in the text of /proc/net/tcp or /proc/net/tcp6."""
    fields = (line.split() for line in table.splitlines()[1:])
    return {int(field[1].rpartition(":")[2], 16) for field in fields if len(field) > 1}


def free_port() -> int:
    """A random port that no socket of this machine uses now, nor the port beside it.

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
