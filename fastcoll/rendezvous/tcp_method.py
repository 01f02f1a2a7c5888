"""tcp://host:port with ranks given: rank 0 serves the store, the others come to it.

The store is at the port beside that one, for in a program that uses torch.distributed too, and under torchrun, torch's
store is at the port itself, whichever of the two comes first.
"""

from __future__ import annotations

from ..core.members import speak_as
from ..errors import ResourceError, StoreTimeoutError, UsageError
from .address import own_address
from .descriptors import make_room
from .detect import port_beside
from .join import check_rank
from .outcome import Rendezvous
from .tcp_store import TCPStore


def meet_at_address(
    host: str, port: int, rank: int | None, world_size: int | None, timeout: float, source: str
) -> Rendezvous:
    """Open the store of the job that meets at `host`:`port`, as its server on rank 0.

    Args:
        source: where host and port come from, for messages.

    Raises:
        UsageError: rank, world size or port is missing or out of range.
        ResourceError: the port is in use, or rank 0 may not open a connection for each rank.
        StoreTimeoutError: rank 0 does not serve it in time.
    """
    if rank is None or world_size is None:
        missing = [name for name, value in (("rank", rank), ("world_size", world_size)) if value is None]
        raise UsageError(
            f"{source} needs {' and '.join(missing)}: pass {' and '.join(f'{name}=...' for name in missing)}, or "
            "write ?rank=0&world_size=4 behind the URL; only a multicast address or file:// assigns ranks"
        )
    check_rank(rank, world_size)
    speak_as(rank)
    if port == 0 and world_size > 1:
        raise UsageError(f"{source} has port 0; the ranks can only meet at a port that all know")
    if rank == 0:
        make_room(world_size, f"the store for {world_size} ranks")
    beside = port and port_beside(port)
    try:
        store = TCPStore(host, beside, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    except (ResourceError, StoreTimeoutError) as error:
        raise type(error)(f"{error} ({beside} is the store's port beside {port}, from {source})") from error
    seen_at = own_address() if host in ("0.0.0.0", "::") else store.local_address
    return Rendezvous(store, rank, world_size, seen_at)
