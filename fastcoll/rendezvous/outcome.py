"""What every way of finding one another ends in."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from .store import Store


@dataclass
class Rendezvous:
    """A place in the world, and the store that all its ranks share.

    Attributes:
        store: shared by all ranks; it belongs to the rendezvous.
        rank, world_size: this process's place.
        host: the address at which the other ranks see this node; "" where a user's handler has found them.
        handler: that handler's generator.
    """

    store: Store
    rank: int
    world_size: int
    host: str
    handler: Iterator[Any] | None = None

    def close(self, linger: float = 0.0) -> None:
        """Close the store and with it the server or file behind it. Closing twice is fine.

        Args:
            linger: seconds that the process which serves the store waits, at most, for the other
                ranks to leave first.
        """
        from .tcp_store import TCPStore  # it brings sockets

        if isinstance(self.store, TCPStore):
            self.store.close(linger)
        else:
            self.store.close()
        if isinstance(self.handler, Generator):
            self.handler.close()
