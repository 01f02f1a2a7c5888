"""The contract of backends: what carries a group's operations out. A group holds one for arrays in host memory.

A backend is made by all members together, with a gate that it shares with its group. `plan` and `fast` are all that an
operation needs; messages are the p2p engine's, life and death the monitor's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from ..errors import GroupError, UnavailableError
from ..interop.arrays import Adopted
from .gate import Gate
from .memory import SymmetricMemory
from .monitor import Monitor
from .operation import Call, Operation
from .work import Work

if TYPE_CHECKING:
    from .group import ProcessGroup


class Messages(Protocol):
    """Point-to-point between the ranks of a group; arrays are adopted, arguments right."""

    def send(self, x: Adopted, dst: int, tag: int) -> None:
        """As `isend` and waiting for it; to oneself, returns once the message is buffered."""

    def recv(self, x: Adopted, src: int | None, tag: int) -> int:
        """As `irecv` and waiting for it; the sender's rank."""

    def isend(self, x: Adopted, dst: int, tag: int) -> Work:
        """Post a message. Complete when the receiver has taken it."""

    def irecv(self, x: Adopted, src: int | None, tag: int) -> Work:
        """Post a receive, from any rank when src is None; the result is the sender's rank."""


class HostMessages(Messages, Protocol):
    """Messages of a host backend, which its group asks more."""

    def is_entered(self) -> bool:
        """Whether this thread is in the middle of a message: then this is a signal handler."""

    def is_in_vain(self, work: Any) -> bool:
        """Whether no rank is left that could send the message which one of the operations needs."""

    def abort(self) -> None:
        """The group has failed: end what is under way, from any thread."""


class Backend(ABC):
    """What carries operations on contiguous ndarrays out, in one group.

    Attributes:
        name: as in `backend=`.
        natively: the kinds that it plans itself; of the others it is given compositions of these.
        gate: of its group.
        monitor: of its ranks.
        messages: between them.
    """

    name: ClassVar[str]
    natively: ClassVar[frozenset[str]] = frozenset(
        "all_reduce reduce scan exscan reduce_scatter broadcast all_gather gather scatter all_to_all barrier "
        "refused".split()
    )
    gate: Gate
    monitor: Monitor
    messages: HostMessages

    @abstractmethod
    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        """What carries an operation of one of its kinds out, by the thread that has the turn.

        Does not block, and talks to no peer. The arrays belong to the call until it has returned; the call blocks.

        Args:
            timeout: seconds for this call; None for the group's own.

        Raises:
            UsageError, ArrayError: it cannot be done here; the peers are told.
        """

    def fast(self, group: ProcessGroup) -> Mapping[str, Callable[..., Any]]:
        """Functions that stand in for the group's methods of these names.

        Each does the plain case with the least that it takes, one compiled call, and leaves the rest to the method.
        """
        return {}

    def learn(self, dtype: np.dtype[Any]) -> None:  # noqa: B027 - most have no need
        """Let short cuts of messages know a dtype, where these have a memory."""

    def symmetric_memory(self, group: ProcessGroup, nbytes: int, label: str) -> SymmetricMemory:
        """Memory of `nbytes` for each rank that all ranks map; collective. See symmetric.py.

        Args:
            label: the shape and dtype that it is for, which all ranks must agree in.

        Raises:
            UnavailableError: this backend has none.
        """
        raise UnavailableError(
            f"the group {self.gate.name} runs on {self.name}, which has no symmetric arrays; make one of the ranks of "
            "one node with new_group(ranks, backend='shm')"
        )

    def begin_at_once(self) -> None:  # noqa: B027 - most have none
        """Let asynchronous operations begin on their callers' threads, where progress threads have no cores.

        For callers that compute meanwhile; what would have to wait for peers is still done on the progress thread.
        """

    def fail(self, error: GroupError) -> None:
        """Fail the group with an error, from any thread, and tell the peers. The first reason stays."""
        self.monitor.fail(error)
        self.messages.abort()

    def stop(self) -> None:  # noqa: B027 - most have nothing to do
        """The group has failed, wherever that was found; `gate.failure` says why. Any thread, does not wait."""

    @abstractmethod
    def close(self, reason: GroupError | None) -> None:
        """Leave the group and release everything; `reason` says why when it is not an orderly end. Called once."""

    @abstractmethod
    def disown(self, error: GroupError) -> None:
        """In a child of fork: make every use raise `error`, without a word to the peers."""
