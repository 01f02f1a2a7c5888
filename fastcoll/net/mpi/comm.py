"""Communicators: one for each group, made by its members alone, freed when all of them have left.

A communicator must not be freed while a message in it is still to come: MPI would use its number again and
give the message to another one. So it is laid down when its rank leaves, and freed at a later making or laying
down, once every member has said that it left. One of a group that failed stays until MPI is finalized.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Sequence
from typing import Any

from ...core.members import Member
from ...errors import UnavailableError
from ...rendezvous import Store
from ...rendezvous.compact import compact, expand
from ...rendezvous.waiting import fetch_for
from .control import MpiControl
from .library import Library

_BYTES_PER_RANK = 32
_LEAST_TAG_LIMIT = 32767  # what every MPI allows

_laid_down: list[tuple[Any, MpiControl]] = []
_given_up: list[tuple[Any, MpiControl]] = []  # MPI may still read the notices
_lock = threading.Lock()


def make_comm(
    library: Library, store: Store, name: str, members: Sequence[Member], rank: int, timeout: float
) -> tuple[Any, bool]:
    """The communicator of a group's members, group ranks in the order of `members`; collective over them.

    Returns:
        It, and whether the MPI library of every member is CUDA-aware.

    Raises:
        UnavailableError: the members are not ranks of one MPI job.
        PeerDiedError, StoreTimeoutError: a member died or did not come.
    """
    world = library.MPI.COMM_WORLD
    free_finished(library)
    mine = [world.rank, world.size, int(library.cuda_aware)]
    places = _places(store, f"making the group {name!r}", members, rank, mine, timeout)
    _check(library, members, places)
    # All members are here, or have been a moment ago: from here on MPI may block.
    with library.lock:
        chosen = world.Get_group().Incl([place for place, _, _ in places])
        comm = world.Create_group(chosen, zlib.crc32(name.encode()) % _LEAST_TAG_LIMIT)
        chosen.Free()
        comm.Set_errhandler(library.MPI.ERRORS_RETURN)
    return comm, all(aware for _, _, aware in places)


def _places(
    store: Store, doing: str, members: Sequence[Member], rank: int, mine: list[int], timeout: float
) -> list[list[int]]:
    """What every member says, rank and size of MPI's world and more; the first collects it for all."""
    store.set(f"mpi/{rank}", json.dumps(mine))
    if rank == 0:
        keys = [f"mpi/{other}" for other in range(len(members))]
        values = fetch_for(store, keys, members, timeout, doing, crowd=1)
        store.set("mpi", compact([json.loads(value) for value in values]))
    (value,) = fetch_for(store, ["mpi"], members, timeout, doing)
    places: list[list[int]] = expand(value, _BYTES_PER_RANK * len(members))
    return places


def _check(library: Library, members: Sequence[Member], places: Sequence[Sequence[int]]) -> None:
    size = library.MPI.COMM_WORLD.size
    ranks = [place for place, _, _ in places]
    if len(set(ranks)) < len(ranks) or any(other != size for _, other, _ in places):
        shown = ", ".join(
            f"{member} is rank {place} of {other}"
            for member, (place, other, _) in zip(members, places, strict=True)
        )
        raise UnavailableError(
            f"the ranks are not ranks of one MPI job: by MPI, {shown}; start all of them with one mpiexec or srun, "
            f"of {library.name}"
        )


def lay_down(library: Library, comm: Any, control: MpiControl, failed: bool) -> None:
    """Give a communicator up; nothing of this rank's is under way in it, unless the group failed."""
    with _lock:
        (_given_up if failed else _laid_down).append((comm, control))
    free_finished(library)


def free_finished(library: Library) -> None:
    """Free the communicators that every member has left, unless a message in them was never received."""
    with _lock:
        for comm, control in list(_laid_down):
            if control.is_over():
                _laid_down.remove((comm, control))
                with library.lock:
                    if not comm.Iprobe():
                        comm.Free()
