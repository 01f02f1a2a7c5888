"""What carries operations on the arrays of GPUs out, in one group; see fastcoll/gpu/."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..errors import GroupError
from ..interop.arrays import Adopted
from .backend import Backend, Messages
from .operation import COMPOSITIONS, Call, Operation
from .work import Work


class StreamCall(ABC):
    """A call that only queues work on a GPU; `ProcessGroup.run` starts it on the caller's thread, in order."""

    @abstractmethod
    def start(self, name: str, owners: Sequence[Adopted]) -> Work:
        """Queue the work behind what the arrays' streams hold, then `finish` of the owners; does not wait for a GPU.

        The Work's `wait` makes the stream that is then current in the arrays' library wait, and not the host; its
        `is_completed` asks the GPU.
        """

    def __call__(self) -> None:
        """As `start` and waiting for it on the stream, for callers that know calls only."""
        self.start("a call on a GPU", ()).wait()


class DeviceCarrier(ABC):
    """What carries operations on the arrays of GPUs out, in one group."""

    natively = Backend.natively - {"barrier", "refused"} | frozenset(COMPOSITIONS)

    @property
    @abstractmethod
    def messages(self) -> Messages:
        """What carries messages out."""

    @abstractmethod
    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        """What carries an operation out: a call that blocks, or a StreamCall.

        Checks what it can without talking to peers (UsageError, ArrayError); does not block.
        """

    @abstractmethod
    def adopt(self, x: Any, *, writable: bool, what: str) -> Adopted:
        """Take an array on a GPU in, as `arrays.adopt` does host arrays; `array` is a dense DeviceArray.

        Strided arrays are packed on their own stream.

        Raises:
            ArrayError: it cannot be used, or is read-only where the call writes.
            UnavailableError: an extra is missing.
        """

    @property
    def splits(self) -> bool:
        """Whether `split` can be called; the same on all ranks, between calls."""
        return False

    def split(self, group: Any) -> DeviceCarrier | None:
        """The carrier of a new group of some of this one's ranks, made from what this one has; collective, and blocks.

        Args:
            group: the new ProcessGroup, with its ranks in this one's order; None on ranks that are not in it, where
                the result is None too.

        Raises:
            GroupError: it cannot be made; this carrier's group has failed.
        """
        raise NotImplementedError

    @abstractmethod
    def abort(self) -> None:
        """The group has failed: end what is under way, from any thread, without waiting."""

    @abstractmethod
    def close(self, reason: GroupError | None) -> None:
        """Release everything; `reason` says why when it is not an orderly end. Called once."""
