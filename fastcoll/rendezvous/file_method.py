"""file://: the processes meet in a file, with ranks given or in the order in which they come."""

from __future__ import annotations

import hashlib
import os
import time
from functools import partial

from ..core.processes import this_process
from ..errors import UsageError
from .address import own_address
from .arrivals import FullError, arrive
from .file_store import FileStore
from .outcome import Rendezvous
from .waiting import death_among

# How long a file that another world has filled may take to go away: its processes may be just about
# to end. One that this very process still has open has the whole timeout.
_FULL_SECONDS = 2.0
_LOOK_AGAIN_SECONDS = 0.5


def meet_in_file(
    path: str, rank: int | None, world_size: int, timeout: float, group_name: str = ""
) -> Rendezvous:
    """Meet the other processes of the world in `path`, which exists while they have it open.

    `group_name` keeps jobs apart that name the same path: each has a file of its own beside it.

    Raises:
        UsageError: the path cannot be used, another world has filled it, two processes ask for one
            rank, or world sizes differ.
        PeerDiedError: a process that had come has ended.
        StoreTimeoutError: not all came in time.
    """
    if group_name:
        path = f"{path}.{hashlib.sha256(group_name.encode()).hexdigest()[:16]}"
    started = time.monotonic()
    while True:
        left = max(started + timeout - time.monotonic(), 0.0)
        store = FileStore(path, timeout=left)
        try:
            assigned = arrive(store, rank, world_size, left, partial(_look_for_dead, store))
            store.set_timeout(timeout)
            return Rendezvous(store, assigned, world_size, own_address())
        except FullError as error:
            ours = any(arrival.process == this_process() for arrival in error.arrivals)
            if time.monotonic() - started > min(timeout, timeout if ours else _FULL_SECONDS):
                store.close()
                raise UsageError(
                    f"{path} belongs to another world, {error}; choose another path or group_name, or remove the "
                    "file if that job is over"
                ) from error
            _close_and_wait_for_removal(store)
        except BaseException:
            store.close()
            raise


def _look_for_dead(store: FileStore) -> None:
    died = death_among(store.participants(), f"meeting in {store.path}")
    if died is not None:
        raise died


def _close_and_wait_for_removal(store: FileStore) -> None:
    """Leave a full file and wait a little for it to go.

    Those who wait are no participants, or they would keep the file alive for one another.
    """
    fd = os.open(store.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        store.close()
        deadline = time.monotonic() + _LOOK_AGAIN_SECONDS
        while os.fstat(fd).st_nlink and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        os.close(fd)
