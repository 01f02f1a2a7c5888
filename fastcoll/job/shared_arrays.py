"""`shared_arrays`: NumPy's new arrays lie in memory that the other ranks of the node read in place.

Two switches: NumPy's handler of the context, for a `with` block, and its default handler, for the whole process.
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


class shared_arrays:
    """Inside the block, NumPy's new arrays of 64 KiB and more lie in memory that the node's other ranks read in place.

    Results of expressions, copies and `np.zeros` are among them. Collectives on such arrays, on views of them and on
    `torch.from_numpy` of them stage less, whatever arrays the other ranks give, and have the same bits as ever. Each
    array stays what it is after the block, however long it lives; nothing else about it differs from other arrays.

    The block holds for this thread, and in asyncio for this task; `shared_arrays.enable()` is for all threads. Blocks
    may be nested and need no process group. Other libraries' own memory, and what NumPy grows piece by piece from a
    small beginning (`np.fromiter` without a count), stays ordinary.

    Memory comes out of /dev/shm, and up to 256 MiB of it, at most an eighth of /dev/shm, are kept for later arrays.
    Where /dev/shm is full but for a sixteenth, or missing, arrays are ordinary; the log has one warning then. A fork
    copies all shared arrays that there are.

    Example:
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
        """From now on, make the large arrays of all threads so; also by FASTCOLL_SHARED_ARRAYS=1.

        `init_process_group` looks at that setting. A thread that has set a memory handler of NumPy's keeps it.
        """
        if _is_ready():
            handler, (context, functions) = default_handler(), _arena().functions()
            malloc, calloc, realloc, free = functions
            # In this order, whatever one of the new functions makes, another one frees.
            handler.context, handler.free, handler.realloc = context, free, realloc
            handler.malloc, handler.calloc = malloc, calloc

    @staticmethod
    def disable() -> None:
        """Make new arrays ordinary again, but in blocks; arrays that there are stay as they are."""
        if _arena().exists():
            handler = default_handler()
            handler.malloc, handler.calloc = _arena().ordinary_functions()[:2]

    @staticmethod
    def contains(x: Any) -> bool:
        """Whether x is an ndarray in memory that the other ranks can read in place: such an array, or a view of one."""
        return isinstance(x, np.ndarray) and bool(_arena().is_shared(x))


def _arena() -> ModuleType:
    """The module, which brings compiled code: it is imported when it is needed."""
    from ..shm import arena

    return arena


def _is_ready() -> bool:
    """Whether there is an arena, made now if there was none."""
    try:
        _arena().create()
    except ResourceError as error:
        _say_once(f"shared arrays are made in ordinary memory: {error}")
        return False
    return True


@functools.cache
def _say_once(text: str) -> None:
    _log.warning("%s", text)


@functools.cache
def _capsule() -> Any:
    return capsule_of(b"fastcoll.shared_arrays", *_arena().functions())
