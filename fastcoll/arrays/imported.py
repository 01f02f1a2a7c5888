"""ImportedArray: the result of importing a caller's array."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import ArrayError

Array = np.ndarray[Any, Any]


class OnDeviceError(ArrayError):
    """The array is not in host memory; a group that supports GPUs imports it by its GPU code (gpu/)."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(
            f"{what} is on a GPU ({where}), and this call takes host arrays: copy it there first"
        )


class ImportedArray:
    """A C-contiguous array for the backends: the caller's memory, or a packed copy of it.

    A packed copy is copied back by `owner[...] = array`.
    """

    __slots__ = ("_owner", "array")

    def __init__(self, array: Array, owner: Any = None) -> None:
        self.array = array
        self._owner = owner

    @property
    def arrays(self) -> list[Array]:
        """The array that the call works on, as a list."""
        return [self.array]

    @property
    def target(self) -> Any:
        """The caller's array, which gets the result."""
        return self.array if self._owner is None else self._owner

    @property
    def needs_copy_back(self) -> bool:
        """Whether `finish` has work to do."""
        return self._owner is not None

    def put(self, address: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from an address to the beginning of the array."""
        ctypes.memmove(self.array.ctypes.data, address, nbytes)

    def received(self, nbytes: int) -> None:
        """Make `finish` change only the first `nbytes` bytes of the caller's array.

        In host memory nothing needs to be done, because a packed copy also contains the caller's other elements.
        """

    def finish(self) -> Any:
        """Copy a packed copy back; return the new array that replaces an immutable one, else None."""
        if self._owner is not None:
            self._owner[...] = self.array
        return None


class FunctionalResult(ImportedArray):
    """The host array of a call that returns a new array, because the caller's is immutable."""

    __slots__ = ("_make",)
    needs_copy_back = True

    def __init__(self, array: Array, make: Callable[[Array], Any]) -> None:
        super().__init__(array)
        self._make = make

    def finish(self) -> Any:
        return self._make(self.array)


def finish_all(owners: Sequence[ImportedArray]) -> Any:
    """Finish every array; return the new array that replaces an immutable one, if any."""
    new = [owner.finish() for owner in owners]
    return next((array for array in new if array is not None), None)
