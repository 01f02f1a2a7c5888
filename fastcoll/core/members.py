"""A rank of a group and the process behind it, as ranks tell one another through the store; and the ranks' nodes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .._version import __version__
from .processes import ProcessId, dead_among, forget, gone_among, this_process

__all__ = ["Member", "dead_among", "forget", "gone_among"]

_log = logging.getLogger("fastcoll")
_speaker = ""


@dataclass(frozen=True, kw_only=True)
class Member(ProcessId):
    """One rank and its process.

    Attributes:
        rank, world_size: its place, as it was started.
        backend: the backend it was asked for.
        shm_device: the device number of /dev/shm (0: there is none); ranks that can meet in shared
            memory see the same.
        network: the network namespace's name; ranks of one boot that see the same reach each other by loopback.
        version: the library's version.
    """

    called: ClassVar[str] = "a rank's registration"

    rank: int
    world_size: int
    backend: str
    shm_device: int
    network: str
    version: str

    @classmethod
    def here(cls, rank: int, world_size: int, backend: str) -> Member:
        """The calling process as `rank` of `world_size`."""
        return cls(
            **vars(this_process()),
            rank=rank,
            world_size=world_size,
            backend=backend,
            shm_device=_shm_device(),
            network=os.readlink("/proc/self/ns/net"),
            version=__version__,
        )

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.where})"

    def same_node(self, other: Member) -> bool:
        """Whether both can meet in shared memory: one boot, one /dev/shm."""
        return (self.boot_id, self.shm_device) == (other.boot_id, other.shm_device)

    def same_network(self, other: Member) -> bool:
        """Whether both have the same interfaces, loopback too: one boot, one network namespace."""
        return (self.boot_id, self.network) == (other.boot_id, other.network)


def speak_as(rank: int) -> None:
    """From now on, begin what this process logs with its global rank."""
    global _speaker
    _speaker = f"rank {rank}: "
    _log.addFilter(_name_speaker)


def _name_speaker(record: logging.LogRecord) -> bool:
    record.msg = f"{_speaker}{record.msg}"
    return True


def _shm_device() -> int:
    try:
        return os.stat("/dev/shm").st_dev
    except FileNotFoundError:
        return 0


class Topology:
    """The nodes of a group, as seen by one of its ranks.

    Attributes:
        nodes: the group ranks on each node, ascending; nodes in the order of their first ranks.
        node, local_rank: the number of this rank's node, and its place there.
        local: the ranks on this node.
        rails: how many ranks of each node talk to other nodes: as many as the smallest node has.
        rail: the ranks, one a node, that this rank shares data with; None for the surplus ranks of larger nodes.
        even: whether all nodes have as many ranks.
        in_order: whether the ranks of all nodes, one node after the other, are 0..n-1.
    """

    def __init__(self, members: Sequence[Member], rank: int) -> None:
        nodes: list[list[int]] = []
        for number, member in enumerate(members):
            home = next((node for node in nodes if members[node[0]].same_node(member)), None)
            if home is None:
                nodes.append([number])
            else:
                home.append(number)
        self.nodes = tuple(map(tuple, nodes))
        self.node, place = self.home_of(rank)
        self.local, self.local_rank = self.nodes[self.node], place
        self.rails = min(map(len, nodes))
        self.rail = tuple(node[place] for node in nodes) if place < self.rails else None
        self.even = len(set(map(len, nodes))) == 1
        self.in_order = [rank for node in nodes for rank in node] == list(range(len(members)))

    def home_of(self, rank: int) -> tuple[int, int]:
        """The number of a rank's node, and its place there."""
        for number, node in enumerate(self.nodes):
            if rank in node:
                return number, node.index(rank)
        raise ValueError(f"no rank {rank}")
