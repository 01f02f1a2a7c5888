"""`shared_arrays`: allocate NumPy's new arrays in memory that the other ranks of the node read in place.

A `with` block sets NumPy's memory handler for the current context, which is a thread or an asyncio task; `enable`
changes NumPy's default handler, for the whole process.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.numpy_memory import capsule_of, default_handler, set_handler
from ..errors import ResourceError

if TYPE_CHECKING:
    from types import ModuleType

_log = logging.getLogger("fastcoll")
_has_warned = False


class shared_arrays:
    """Allocate NumPy's new arrays of 64 KiB and more, inside the block, in memory that the node's other ranks can read.

    This includes results of expressions, copies and `np.zeros`. Collectives copy less if this rank passes such arrays,
    their views, or tensors made of them by `torch.from_numpy`, even if other ranks pass ordinary arrays. The results
    have the same bits. An array stays shared after the block, for as long as it lives. In all other respects it is an
    ordinary ndarray.

    The block applies to this thread, and in asyncio to this task; `shared_arrays.enable()` applies to all threads.
    Blocks may be nested and need no process group. Memory of other libraries, and arrays that NumPy grows from a small
    size (`np.fromiter` without a count), stay ordinary.

    The memory comes from /dev/shm. Up to 256 MiB of freed memory, at most an eighth of /dev/shm, are kept for later
    arrays. If less than a sixteenth of /dev/shm is free, or /dev/shm is missing, arrays are ordinary, and the log has
    one warning. A child made by fork gets copies of all shared arrays.

    Examples:
        >>> with fastcoll.shared_arrays():
        ...     x = np.ones(1 << 20, np.float32)
        ...     y = 2 * x  # shared as well
        >>> fastcoll.all_reduce(y)
    """

    def __init__(self) -> None:
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before.append(set_handler(_capsule()) if _is_ready() else None)

    def __exit__(self, *error: object) -> None:
        before = self._before.pop()
        if before is not None:
            set_handler(before)

    @staticmethod
    def enable() -> None:
        """Share the new large arrays of all threads, from now on.

        With FASTCOLL_SHARED_ARRAYS=1, `init_process_group` calls this. A thread that has set its own NumPy memory
        handler keeps it.
        """
        if _is_ready():
            handler, (context, functions) = default_handler(), _arena().functions()
            malloc, calloc, realloc, free = functions
            # Set `free` and `realloc` first, because the new ones must handle all memory that the new `malloc` returns.
            handler.context, handler.free, handler.realloc = context, free, realloc
            handler.malloc, handler.calloc = malloc, calloc

    @staticmethod
    def disable() -> None:
        """Make new arrays ordinary again, except in `with` blocks; existing arrays stay shared."""
        if _arena().exists():
            handler = default_handler()
            handler.malloc, handler.calloc = _arena().ordinary_functions()[:2]

    @staticmethod
    def contains(x: Any) -> bool:
        """Return whether x is a shared array or a view of one."""
        return isinstance(x, np.ndarray) and bool(_arena().is_shared(x))


def _arena() -> ModuleType:
    """Import shm/arena.py, from which shared arrays get memory, only when it is needed: it imports compiled code."""
    from ..shm import arena

    return arena


def _is_ready() -> bool:
    """Create the memory for shared arrays if there is none yet; if that fails, warn once and return False."""
    global _has_warned
    try:
        _arena().create()
    except ResourceError as error:
        if not _has_warned:  # whatever the error says: it has the free memory, which changes
            _has_warned = True
            _log.warning("shared arrays are made in ordinary memory: %s", error)
        return False
    return True


@functools.cache
def _capsule() -> Any:
    return capsule_of(b"fastcoll.shared_arrays", *_arena().functions())
