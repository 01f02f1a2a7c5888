"""What the border makes of an array."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Adopted:
    """An array as the backends use it, and what is owed to the caller's.

    Attributes:
        array: C-contiguous; the caller's own memory, or a packed copy of it.
    """

    __slots__ = ("_owner", "array")

    def __init__(self, array: Array, owner: Any = None) -> None:
        """`owner`: what the copy goes back to by `owner[...] = array`."""
        self.array = array
        self._owner = owner

    @property
    def arrays(self) -> list[Array]:
        """What the call works on."""
        return [self.array]

    @property
    def target(self) -> Any:
        """Where the result goes: the caller's array."""
        return self.array if self._owner is None else self._owner

    @property
    def owes(self) -> bool:
        """Whether `finish` has anything to do."""
        return self._owner is not None

    def put(self, address: int, nbytes: int) -> None:
        """Copy so many bytes at an address to the beginning of the array."""
        ctypes.memmove(self.array.ctypes.data, address, nbytes)

    def finish(self) -> Any:
        """Write the packed copy of a writable array back; nothing to do for any other.

        Returns:
            None, or the new array that stands for an immutable one.
        """
        if self._owner is not None:
            self._owner[...] = self.array
        return None


class Renewed(Adopted):
    """An immutable array, for which the call returns a new one."""

    __slots__ = ("_renew",)
    owes = True

    def __init__(self, array: Array, renew: Callable[[Array], Any]) -> None:
        super().__init__(array)
        self._renew = renew

    def finish(self) -> Any:
        """The array after the call, in its own library's form."""
        return self._renew(self.array)


def finish_all(owners: Sequence[Adopted]) -> Any:
    """Finish every one; the new array of the one that is immutable, if one is."""
    new = [owner.finish() for owner in owners]
    return next((array for array in new if array is not None), None)
