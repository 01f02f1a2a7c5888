"""rendezvous: from an init_method to a rank and a store.

The ways to meet need sockets and more; each is imported when it is taken, so that importing fastcoll
is not charged for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UsageError
from .outcome import Rendezvous

if TYPE_CHECKING:
    from .url import InitMethod


def rendezvous(
    init_method: str, rank: int, world_size: int, timeout: float, group_name: str = ""
) -> Rendezvous:
    """Find the other ranks as `init_method` says.

    Args:
        init_method: env://, tcp://host:port, tcp://<multicast address>:port or file:///path, each with
            an optional ?rank=0&world_size=4.
        rank, world_size: -1 where the URL or the environment has them, or ranks are to be assigned
            (multicast and file).
        timeout: seconds, for this and for the store's blocking operations afterwards.
        group_name: keeps jobs apart that use the same file or multicast address.

    Raises:
        UsageError: what was given is wrong, missing or contradictory.
        RendezvousError: the others did not come, or the store is gone.
        PeerDiedError: one of them came and died.
        ResourceError: a port, file or multicast group cannot be had.
    """
    from .url import parse

    method = parse(init_method, rank, world_size)
    match method.scheme:
        case "env":
            from .env_method import meet_by_environment

            found = meet_by_environment(method.rank, method.world_size, timeout)
        case "file":
            from .file_method import meet_in_file

            size = _needed_size(method)
            found = meet_in_file(method.path, method.rank, size, timeout, group_name)
        case _ if method.is_multicast:
            from .multicast_method import meet_by_multicast

            size = _needed_size(method)
            found = meet_by_multicast(method.host, method.port, method.rank, size, timeout, group_name)
        case _:
            from .tcp_method import meet_at_address

            source = f"init_method {method.url!r}"
            found = meet_at_address(method.host, method.port, method.rank, method.world_size, timeout, source)
    found.store.set_timeout(timeout)
    return found


def _needed_size(method: InitMethod) -> int:
    if method.world_size is None:
        raise UsageError(
            f"init_method {method.url!r} needs the world size: pass world_size=..., or write ?world_size=4 behind "
            "the URL"
        )
    return method.world_size
