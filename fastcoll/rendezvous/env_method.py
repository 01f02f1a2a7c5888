"""env://: rank, size and meeting place from the environment that a launcher set, arguments winning."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..errors import UsageError
from .detect import TORCH, Detected, derived_port, detect
from .file_method import meet_in_file
from .hash_store import HashStore
from .join import check_rank
from .launcher import shared_path
from .outcome import Rendezvous
from .tcp_method import meet_at_address


def meet_by_environment(rank: int | None, world_size: int | None, timeout: float) -> Rendezvous:
    """Meet as the environment says. With nothing said at all, this is a world of one.

    Where the launcher says that all ranks are on this machine and no MASTER_PORT is set, they meet in
    a file named after the launcher; under Slurm or Open MPI on several nodes the port is derived from
    the job.

    Raises:
        UsageError: variables are missing (they are named), contradict one another, or are no numbers.
    """
    said = detect(os.environ, rank, world_size)
    if said.rank is None and said.world_size is None and not said.found:
        return Rendezvous(HashStore(), 0, 1, "127.0.0.1")
    _require(said, {TORCH.rank: said.rank, TORCH.size: said.world_size})
    assert said.rank is not None
    assert said.world_size is not None
    check_rank(said.rank, said.world_size)
    if said.world_size == 1:
        return Rendezvous(HashStore(), 0, 1, "127.0.0.1")
    if said.master_port is None and said.on_one_node and said.rank_variable not in ("", TORCH.rank):
        return meet_in_file(shared_path(said.rank_variable), said.rank, said.world_size, timeout)
    return _meet_at_master(said, timeout)


def _meet_at_master(said: Detected, timeout: float) -> Rendezvous:
    port = said.master_port
    if port is None and said.job_id is not None:
        port = derived_port(said.job_id)
    host = said.master_addr
    if host is None and said.rank == 0:
        host = "0.0.0.0"  # rank 0 need not know by which of its addresses the others come
    _require(said, {"MASTER_ADDR": host, "MASTER_PORT": port})
    assert host is not None
    assert port is not None
    return meet_at_address(
        host, port, said.rank, said.world_size, timeout, f"MASTER_ADDR={host} MASTER_PORT={port}"
    )


def _require(said: Detected, needed: Mapping[str, object]) -> None:
    """Refuse with the names of what is missing and of what was found."""
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise UsageError(
            f"env:// misses {', '.join(missing)} (set: {', '.join(said.found) or 'none'}); start with python -m "
            "fastcoll.launch, set them for every rank, or pass rank, world_size and init_method"
        )
