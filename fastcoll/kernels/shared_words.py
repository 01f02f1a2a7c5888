"""Words that Python shares with other processes, or with compiled code that runs without the GIL.

A store by Python through a memoryview or an ndarray is a plain store, and a read is a plain load. x86 keeps the order
of stores and the order of loads; Arm keeps neither. So Python writes a word that publishes data by `publish`, and reads
a word that a peer publishes by `read`. Plain accesses suffice in three cases:

- Every thread that accesses the word holds the GIL, or the lock BUSY of its table. A lock orders all accesses.
- The word is a flag that publishes no data, such as a bell. An aligned word is never half written or half read.
- Other processes learn of the word from a message through the kernel (a socket, a new process).

docs/architecture-shm.md, "The order of shared words", lists the words.
"""

from __future__ import annotations

import numpy as np

from ..compiler.jit import locked_entry
from .primitives import address_of, full_fence, load_acquire, store_release
from .pyobjects import Index, integer


@locked_entry
def publish(address: Index, value: Index) -> int:
    """Write the word at `address`, after all earlier accesses of this thread and before all later ones."""
    store_release(integer(address), integer(value))
    full_fence()
    return 0


@locked_entry
def read(address: Index) -> int:
    """Return the word at `address`; all writes that its writer made before it are then visible."""
    return load_acquire(integer(address))


def publish_in(table: np.ndarray, index: int, value: int) -> None:
    """`publish` word `index` of a contiguous table of int64, which stays alive meanwhile."""
    publish.call(address_of(table) + 8 * index, value)


def read_in(table: np.ndarray, index: int) -> int:
    """`read` word `index` of a contiguous table of int64, which stays alive meanwhile."""
    return read.call(address_of(table) + 8 * index)
