"""How ranks of an MPI job find one another without being told where: rank 0 serves a store, MPI tells the others."""

from __future__ import annotations

import os
import time

import numpy as np

from ...errors import StoreTimeoutError, UsageError
from ...rendezvous import HashStore, Rendezvous, TCPStore
from ...rendezvous.address import own_address
from ...rendezvous.descriptors import make_room
from ...rendezvous.detect import detect
from .library import Library, load
from .requests import Requests

# In the communicator of all, where a user's program may send messages of its own; the last but a few of the tags that
# every MPI has.
_TAG = 32749
_BYTES = 128
_LOOPBACK = "127.0.0.1"


def meet_through_mpi(rank: int, world_size: int, timeout: float) -> Rendezvous:
    """Meet the other ranks of the MPI job in a store that rank 0 serves; collective over all of them.

    Args:
        rank, world_size: as MPI has them, or -1.

    Raises:
        UsageError: MPI has another rank or world size.
        UnavailableError: there is no MPI here.
        StoreTimeoutError: rank 0 did not come within `timeout` seconds.
    """
    library = load()
    world = library.MPI.COMM_WORLD
    for name, given, there in (("rank", rank, world.rank), ("world_size", world_size, world.size)):
        if given not in (-1, there):
            raise UsageError(f"{name} is {given}, but MPI started this process with {there}; leave it out")
    if world.size == 1:
        return Rendezvous(HashStore(), 0, 1, _LOOPBACK)
    if world.rank == 0:
        return _serve(library, timeout)
    host, port = _hear(library, timeout)
    store = TCPStore(host, port, timeout=timeout)
    return Rendezvous(store, world.rank, world.size, store.local_address)


def _serve(library: Library, timeout: float) -> Rendezvous:
    world = library.MPI.COMM_WORLD
    make_room(world.size, f"the store for {world.size} ranks")
    host = _LOOPBACK if detect(os.environ).on_one_node else own_address()
    store = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
    try:
        _tell(library, f"{host} {store.port}".encode().ljust(_BYTES), timeout)
    except BaseException:
        store.close()
        raise
    return Rendezvous(store, 0, world.size, host)


def _tell(library: Library, text: bytes, timeout: float) -> None:
    """Send it to all other ranks: a first message needs a connection, on which MPI works while it is called."""
    deadline = time.monotonic() + timeout
    requests, world = Requests(library, dedicated=False), library.MPI.COMM_WORLD

    def look() -> None:
        if time.monotonic() > deadline:
            late = ", ".join(str(1 + place) for place in requests.open())
            raise StoreTimeoutError(f"rank(s) {late} did not call init_process_group within {timeout:g} s")

    with library.lock:
        sent = [world.Isend([text, library.MPI.BYTE], peer, _TAG) for peer in range(1, world.size)]
    requests.finish(sent, look, 0, text)


def _hear(library: Library, timeout: float) -> tuple[str, int]:
    """Where rank 0 serves the store; what it said last, if earlier starts have failed."""
    data = np.zeros(_BYTES, np.uint8)
    deadline = time.monotonic() + timeout
    requests = Requests(library, dedicated=False)

    def look() -> None:
        if time.monotonic() > deadline:
            raise StoreTimeoutError(f"rank 0 did not call init_process_group within {timeout:g} s")

    world = library.MPI.COMM_WORLD
    while True:
        with library.lock:
            request = world.Irecv([data, library.MPI.BYTE], 0, _TAG)
        try:
            requests.finish([request], look, 0, data)
        except BaseException:
            with library.lock:
                request.Cancel()
                request.Wait()
            raise
        with library.lock:
            if not world.Iprobe(0, _TAG):
                break
    host, port = data.tobytes().decode().split()
    return host, int(port)
