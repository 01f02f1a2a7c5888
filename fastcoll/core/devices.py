"""Devices: holds a group's DeviceCarrier, which is made when the group gets its first array on a GPU."""

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
        name: the group's name.

    Attributes:
        carrier: the DeviceCarrier; None before the first array on a GPU.
    """

    def __init__(self, group: Any, name: str) -> None:
        self.carrier: DeviceCarrier | None = None
        self._group, self._name = group, name
        self._make: Callable[[Any], DeviceCarrier] | None = None
        self._making = threading.Lock()

    def serve(self, make: Callable[[Any], DeviceCarrier]) -> None:
        """Set the function `make(group)` that makes the carrier. Without it, arrays on GPUs are refused."""
        self._make = make

    def get(self, refused: OnDeviceError | None = None) -> DeviceCarrier:
        """Return the carrier; make it on the first call.

        Raises:
            OnDeviceError, UsageError: the group cannot use GPUs. If `refused` is given, it is the error.
        """
        with self._making:
            if self.carrier is None:
                if self._make is None:
                    raise refused or UsageError(f"the group {self._name} serves no GPUs")
                self.carrier = self._make(self._group)
            return self.carrier

    def splits(self) -> bool:
        """Whether `split` can be called. While no call is in progress, the answer is the same on all ranks."""
        return self.carrier is not None and self.carrier.splits

    def split(self, group: Any) -> None:
        """Make the carrier of a new group, whose ranks are some of this group's, from this group's carrier. Collective.

        Args:
            group: the new ProcessGroup; None on ranks that are not in it.
        """
        made = self.get().split(group)
        if group is not None:
            group.gpus.carrier = made
