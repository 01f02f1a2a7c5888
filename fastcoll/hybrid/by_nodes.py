"""The default backend of a group, by the nodes of its members.

The backends of several nodes are imported once a group has several. Their import takes a third of the processor time in
which a rank of one node starts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.backend import Backend
from ..shm.backend import ShmBackend
from ..store import Store
from ..system.processes import Member, Topology


def make_auto(
    store: Store,
    name: str,
    members: Sequence[Member],
    rank: int,
    timeout: float,
    crowd: Sequence[Member] = (),
) -> Backend:
    """Make the backend that fits the members' nodes: shared memory, TCP (or MPI), or both; collective."""
    topology = Topology(members, rank)
    if len(topology.nodes) == 1:
        return ShmBackend.make(store, name, members, rank, timeout, crowd)
    from .backend import HybridBackend, between_nodes

    if all(len(node) == 1 for node in topology.nodes):
        return between_nodes()(store, name, members, rank, timeout, crowd)
    return HybridBackend.make(store, name, members, rank, timeout, crowd)
