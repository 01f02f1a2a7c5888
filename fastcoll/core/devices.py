"""What carries a group's operations on the arrays of GPUs: made with the first such array, or refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..arrays.arrays import OnDeviceError
from ..errors import UsageError
from .backend import DeviceCarrier


class Devices:
    """The DeviceCarrier of one group.

    Args:
        group: the ProcessGroup.
        name: the group's.

    Attributes:
        carrier: None until an array on a GPU has come.
    """

    def __init__(self, group: Any, name: str) -> None:
        self.carrier: DeviceCarrier | None = None
        self._group, self._name = group, name
        self._make: Callable[[Any], DeviceCarrier] | None = None
        self._making = threading.Lock()

    def serve(self, make: Callable[[Any], DeviceCarrier]) -> None:
        """Have `make(group)` make the carrier when the first array on a GPU comes; without it they are refused."""
        self._make = make

    def get(self, refused: OnDeviceError | None = None) -> DeviceCarrier:
        """Return the carrier.

        Raises:
            OnDeviceError, UsageError: the group serves no GPUs; `refused` if it is given.
        """
        with self._making:
            if self.carrier is None:
                if self._make is None:
                    raise refused or UsageError(f"the group {self._name} serves no GPUs")
                self.carrier = self._make(self._group)
            return self.carrier

    def splits(self) -> bool:
        """Whether `split` can be called; the same on all ranks, between calls."""
        return self.carrier is not None and self.carrier.splits

    def split(self, group: Any) -> None:
        """Make the carrier of a new group of some of this group's ranks from this one. Collective.

        Args:
            group: the new ProcessGroup; None on ranks that are not in it.
        """
        made = self.get().split(group)
        if group is not None:
            group.gpus.carrier = made
