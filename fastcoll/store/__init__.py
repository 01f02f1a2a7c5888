"""Key-value stores, the protocol of TCPStore, and the handshake that authenticates every connection (opening.py)."""

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
    # tcp_store.py imports `socket`. It is imported at first use, to keep `import fastcoll` fast.
    from .tcp_store import TCPStore

    return TCPStore
