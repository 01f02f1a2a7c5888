"""How ranks find one another: init_method URLs, environment detection, and the stores."""

from .file_store import FileStore
from .hash_store import HashStore
from .methods import rendezvous
from .outcome import Rendezvous
from .prefix_store import PrefixStore
from .store import Store
from .tcp_store import TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Rendezvous", "Store", "TCPStore", "rendezvous"]
