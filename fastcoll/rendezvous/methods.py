"""The rendezvous methods env://, tcp://host:port and file://.

Over TCP, rank 0 serves the store and the others connect to it. The store does not listen at the given port, but at one
that is computed from it (`detect.port_beside`), because torch's store uses the given port under torchrun, and in
programs that use torch.distributed as well.
"""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..errors import ResourceError, StoreTimeoutError, UsageError
from ..store.encryption import descriptors
from ..store.file_store import FileStore
from ..store.store import Rendezvous, tries
from ..store.table import HashStore
from ..store.tcp_store import TCPStore
from ..store.waiting import raise_if_dead
from ..system.address import make_room, own_address
from ..system.processes import forget, set_process_rank, status_of, this_process
from .detect import TORCH, Detected, derived_port, detect, port_beside
from .join import FullError, arrive, check_rank

# How long to wait for the removal of a file in which another world has met: the processes of that world may be about to
# end. If this process itself is one of them, it waits for the whole timeout.
_FULL_SECONDS = 2.0
_LOOK_AGAIN_SECONDS = 0.5


class WorldSettings(NamedTuple):
    """The world according to the environment: this process's rank, and a file or an address to meet at."""

    rank: int
    world_size: int
    path: str = ""  # of a file; empty: the ranks meet at an address
    host: str = ""
    port: int = 0


def meet_by_environment(rank: int | None, world_size: int | None, timeout: float) -> Rendezvous:
    """Meet the other ranks according to the environment variables; without any of them the world has one rank.

    UsageError: variables are missing, contradict one another, or are not numbers.
    """
    place = place_of(detect(os.environ, rank, world_size))
    rank, world_size, path, host, port = place
    if world_size == 1:
        return Rendezvous(HashStore(), 0, 1, "127.0.0.1")
    if path:
        return meet_in_file(path, rank, world_size, timeout)
    return meet_at_address(host, port, rank, world_size, timeout, f"MASTER_ADDR={host} MASTER_PORT={port}")


def place_of(detected: Detected) -> WorldSettings:
    """Return where the ranks meet, from the variables that `detect` has found.

    If all ranks are on this machine, according to the launcher, and MASTER_PORT is not set, they meet in a file named
    after the launcher. Under Slurm or Open MPI on several nodes, the port is derived from the job's name. UsageError:
    variables are missing.
    """
    rank, world_size = detected.rank, detected.world_size
    if rank is None and world_size is None and not detected.found:
        rank, world_size = 0, 1
    if rank is None or world_size is None:
        raise _missing(detected, {TORCH.rank: rank, TORCH.size: world_size})
    check_rank(rank, world_size)
    if world_size == 1:
        return WorldSettings(0, 1)
    if detected.master_port is None and detected.on_one_node and detected.is_by_mpi_or_slurm:
        return WorldSettings(rank, world_size, shared_path(detected))
    port = detected.master_port
    if port is None and detected.job_id is not None:
        port = derived_port(detected.job_id)
    host = detected.master_addr
    if host is None and rank == 0 and detected.is_by_mpi_or_slurm:
        host = "0.0.0.0"  # rank 0 need not know which of its addresses the others use
    if host is None or port is None:
        raise _missing(detected, {"MASTER_ADDR": host, "MASTER_PORT": port})
    return WorldSettings(rank, world_size, host=host, port=port)


def _missing(detected: Detected, needed: Mapping[str, object]) -> UsageError:
    """Return the error that names the missing variables and those that were found."""
    missing = ", ".join(name for name, value in needed.items() if value is None)
    return UsageError(
        f"env:// misses {missing} (set: {', '.join(detected.found) or 'none'}); start with python -m fastcoll.launch, "
        "set them for every rank, or pass rank, world_size and init_method"
    )


def shared_path(detected: Detected) -> str:
    """Return a path that is the same for all ranks of one job that a launcher has started here, and for no others.

    The path has the pid and start time of the nearest ancestor process without the rank's variable. That is the
    launcher's daemon, even if a shell or a wrapper is in between. A rank in its own container cannot see the daemon.
    Open MPI's daemon may start several jobs (MPI_Comm_spawn, prun), so the path also has a checksum of the job's name.
    """
    import tempfile  # imports random and the compression modules, which few programs need at start

    rank_variable, pid = detected.rank_variable, os.getppid()
    with suppress(PermissionError):  # another user's: a daemon such as slurmstepd
        while pid > 0 and any(
            entry.startswith(f"{rank_variable}=".encode())
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ):
            pid = int(status_of(pid)[1])
    if pid <= 0:
        raise UsageError(
            f"{rank_variable} is set, but the launcher that set it is not visible from here; set MASTER_ADDR and "
            "MASTER_PORT for all ranks"
        )
    name = f"fastcoll-{os.geteuid()}-{pid}-{int(status_of(pid)[19])}"
    if detected.job_id is not None:
        name += f"-{zlib.crc32(detected.job_id.encode()):08x}"
    return os.path.join(tempfile.gettempdir(), name)


def meet_in_file(
    path: str, rank: int | None, world_size: int, timeout: float, group_name: str = ""
) -> Rendezvous:
    """Meet the other processes of the world in the file `path`, which exists while they have it open.

    With a `group_name`, a digest of it is appended to `path`, so jobs with different group names may share a path.
    Raises the errors of `arrive` and FileStore, and UsageError if another world has met in the file and keeps it.
    """
    if group_name:
        path = f"{path}.{hashlib.sha256(group_name.encode()).hexdigest()[:16]}"
    started = time.monotonic()
    while True:
        left = max(started + timeout - time.monotonic(), 0.0)
        store = FileStore(path, timeout=left)
        try:
            assigned = arrive(
                store, rank, world_size, timeout, partial(_look_at_participants, store), started
            )
            store.set_timeout(timeout)
            return Rendezvous(store, assigned, world_size, own_address())
        except FullError as error:
            ours = any(arrival.is_process(this_process()) for arrival in error.arrivals)
            if time.monotonic() - started > min(timeout, timeout if ours else _FULL_SECONDS):
                store.close()
                raise UsageError(
                    f"{path} belongs to another world, {error}; choose another path or group_name, or remove the "
                    "file if that job is over"
                ) from error
        except BaseException:
            store.close()
            raise
        # A process that waits until another world's file is removed must not be a participant of the file, or the file
        # would never be removed. So it closes the store, and polls the number of links of the open file.
        with open(path, "rb") as file:
            store.close()
            for _ in tries(_LOOK_AGAIN_SECONDS, 0.01, 0.01):
                if not os.fstat(file.fileno()).st_nlink:
                    break


def _look_at_participants(store: FileStore) -> None:
    """Raise PeerDiedError if a process that has the file open has died; close the pidfds in any case."""
    there = store.participants()
    try:
        raise_if_dead(there, f"meeting in {store.path}")
    finally:
        forget(there)


def meet_at_address(
    host: str, port: int, rank: int | None, world_size: int | None, timeout: float, source: str
) -> Rendezvous:
    """Open the store of the job that meets at `host`:`port`; rank 0 serves it.

    `source` is where host and port come from, for error texts. ResourceError: the port is in use, or rank 0's limit of
    descriptors is too low for a connection with each rank. StoreTimeoutError: rank 0 was not reached.
    """
    if rank is None or world_size is None:
        missing = [name for name, value in (("rank", rank), ("world_size", world_size)) if value is None]
        raise UsageError(
            f"{source} needs {' and '.join(missing)}: pass {' and '.join(f'{name}=...' for name in missing)}, or "
            "write ?rank=0&world_size=4 behind the URL; only a multicast address or file:// assigns ranks"
        )
    check_rank(rank, world_size)
    set_process_rank(rank)
    if port == 0 and world_size > 1:
        raise UsageError(f"{source} has port 0; the ranks can only meet at a port that all know")
    if rank == 0:
        make_room(world_size * descriptors(), f"the store for {world_size} ranks")
    beside = port and port_beside(port)
    note = f"; port {beside} is the store's, beside {port} of {source}: firewalls must let both through"
    try:
        store = TCPStore(host, beside, None, rank == 0, timeout, wait_for_workers=False, port_note=note)
    except (ResourceError, StoreTimeoutError) as error:
        raise type(error)(f"{error} ({beside} is the store's port beside {port}, from {source})") from error
    seen_at = own_address() if host in ("0.0.0.0", "::") else store.local_address
    return Rendezvous(store, rank, world_size, seen_at)
