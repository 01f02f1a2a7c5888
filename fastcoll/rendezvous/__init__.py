"""How ranks find one another: init_method URLs, environment detection, and the stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .file_store import FileStore
from .init_method import has_handler, meet, register_rendezvous_handler, rendezvous
from .store import Rendezvous, Store
from .table import HashStore
from .views import PrefixStore, adopted

if TYPE_CHECKING:
    from .tcp_store import TCPStore

__all__ = [
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Rendezvous",
    "Store",
    "TCPStore",
    "adopted",
    "has_handler",
    "meet",
    "register_rendezvous_handler",
    "rendezvous",
]


def __getattr__(name: str) -> Any:
    if name != "TCPStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Sockets are for those who meet over the network.
    from .tcp_store import TCPStore

    return TCPStore
