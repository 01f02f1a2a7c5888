"""Key-value stores, their protocol, and the authenticated opening of every connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .file_store import FileStore
from .store import Rendezvous, Store
from .table import HashStore
from .views import PrefixStore, imported

if TYPE_CHECKING:
    from .tcp_store import TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Rendezvous", "Store", "TCPStore", "imported"]


def __getattr__(name: str) -> Any:
    if name != "TCPStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # TCPStore imports sockets, so it is imported when it is needed.
    from .tcp_store import TCPStore

    return TCPStore
