"""Which ranks of a group share a node, and with whom of the other nodes each rank talks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .members import Member


@dataclass(frozen=True)
class Topology:
    """The nodes of a group, as seen by one of its ranks.

    Attributes:
        nodes: the group ranks on each node, ascending; nodes in the order of their first ranks.
        rank: whose view this is.
    """

    nodes: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def of(cls, members: Sequence[Member], rank: int) -> Topology:
        """Group members by node; ranks on one node see the same /dev/shm."""
        nodes: list[list[int]] = []
        for number, member in enumerate(members):
            home = next((node for node in nodes if members[node[0]].same_node(member)), None)
            if home is None:
                nodes.append([number])
            else:
                home.append(number)
        return cls(tuple(map(tuple, nodes)), rank)

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return next(number for number, node in enumerate(self.nodes) if self.rank in node)

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks on this node."""
        return self.nodes[self.node]

    @property
    def local_rank(self) -> int:
        """This rank's place on its node."""
        return self.local.index(self.rank)

    @property
    def rails(self) -> int:
        """How many ranks of each node talk to other nodes: as many as the smallest node has."""
        return min(map(len, self.nodes))

    @property
    def rail(self) -> tuple[int, ...] | None:
        """The ranks, one a node, that this rank shares data with; None for the surplus ranks of larger nodes."""
        place = self.local_rank
        return tuple(node[place] for node in self.nodes) if place < self.rails else None

    @property
    def even(self) -> bool:
        """Whether all nodes have as many ranks."""
        return len(set(map(len, self.nodes))) == 1

    @property
    def in_order(self) -> bool:
        """Whether the ranks of all nodes, one node after the other, are 0..n-1."""
        return [rank for node in self.nodes for rank in node] == list(range(sum(map(len, self.nodes))))

    def home_of(self, rank: int) -> tuple[int, int]:
        """The number of a rank's node, and its place there."""
        for number, node in enumerate(self.nodes):
            if rank in node:
                return number, node.index(rank)
        raise ValueError(f"no rank {rank}")
