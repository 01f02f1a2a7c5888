"""The memory of the slots of this process's groups.

A group's first call that writes into its slots allocates them: 2 MiB a rank, or less if /dev/shm is small. A process
keeps at most 32 MiB of slots, and at most its share of three quarters of /dev/shm. When a further group allocates its
own, or /dev/shm is full (`with_room`), the process frees the slots of the groups that have held theirs for longest.
Such a group allocates them again at its next call that needs them, which takes about 2 ms (2-core VM, Linux 6.18).

Invariant: a rank frees its slots only if no call of this rank uses them, because it owns the context, and no peer may
still read them, because every peer's CONSUMED has reached this rank's ROUND (rounds.py). A group keeps its slots if it
has failed, and if a call has let go of the context without an end (WROTE is not 0), because the group is about to fail
or to close: a peer that does not know of this may still read a round of that call.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from ..compiler.jit import entry, external
from ..core.status import DONE, LATER
from ..errors import ResourceError
from ..kernels.primitives import (
    load_acquire,
    load_word,
    store_release,
    store_word,
    swap_if_equal,
)
from ..kernels.pyobjects import Index, integer
from ..system.forks import at_fork
from . import context_layout as at
from . import layout
from .context import ShmContext
from .rounds import section
from .segment import Segment, all_bytes, allocates_later

_T = TypeVar("_T")

_MOST_BYTES = 32 << 20
_MADV_REMOVE = 9  # linux/mman.h; Python has the name only where its C library has it

_madvise = external("madvise", "int32(int64, int64, int32)")


class _Holder(NamedTuple):
    """A group whose slots are allocated, and the whole pages that they have."""

    context: ShmContext
    address: int
    nbytes: int


_holders: list[_Holder] = []  # the group that has held its slots for longest is first
at_fork("slots", _holders.clear)  # in the child they are the parent's


def allocate(segment: Segment, context: ShmContext, rank: int) -> None:
    """Allocate the memory of a rank's slots, for a call that owns the context.

    Raises:
        ResourceError: /dev/shm is full, and no other group of this process can free its slots.
    """
    if allocates_later():
        start, nbytes = segment.layout.slots_of(rank)
        most = min(_MOST_BYTES, all_bytes() * 3 // 4 // segment.layout.size)
        while sum(holder.nbytes for holder in _holders.copy()) + nbytes > most and _free_one():
            pass
        with_room(lambda: segment.allocate(start, nbytes))
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        _holders.append(_Holder(context, segment.address + first, end - first))
    context.words[at.ALLOCATED] = 1


def with_room(allocate: Callable[[], _T]) -> _T:
    """Call a function that allocates memory in /dev/shm; while that is full, free slots of this process, and repeat.

    Raises:
        ResourceError: /dev/shm is full, and no group of this process can free its slots.
    """
    while True:
        try:
            return allocate()
        except ResourceError:
            if not _free_one():
                raise


def forget(context: ShmContext) -> None:
    """Forget a group that is closing; the memory of its slots is freed with its segment."""
    for holder in _holders.copy():
        if holder.context is context:
            _drop(holder)


def _free_one() -> bool:
    """Free the slots of the group that has held them for longest, of those that can; return whether there is one."""
    for holder in _holders.copy():
        context, address, nbytes = holder
        # A group that has failed or is closing frees its slots at its end.
        if context[at.SHUT] or free.call(context.address, address, nbytes) == DONE:
            _drop(holder)
            return True
    return False


def _drop(holder: _Holder) -> None:
    with contextlib.suppress(ValueError):  # another thread has dropped it
        _holders.remove(holder)


@entry
def free(context: Index, address: Index, nbytes: Index) -> int:
    """Free a rank's slots, nbytes at an address: return DONE, or LATER if a call or a peer may still use them."""
    c = integer(context)
    if not swap_if_equal(c + 8 * at.BUSY, 0, at.FREEING):
        return LATER
    code = DONE if load_acquire(c + 8 * at.SHUT) == 0 and load_word(c, at.WROTE) == 0 else LATER
    for peer in range(load_word(c, at.SIZE)):
        word = section(c, peer) + layout.CONSUMED
        if peer != load_word(c, at.RANK) and load_acquire(word) < load_word(c, at.ROUND):
            code = LATER
    if code == DONE and _madvise(integer(address), integer(nbytes), _MADV_REMOVE) == 0:
        store_word(c, at.ALLOCATED, 0)
    else:
        code = LATER
    store_release(c + 8 * at.BUSY, 0)
    return code
