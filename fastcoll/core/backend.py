"""The contracts of what carries out a group's operations: Backend for host arrays, DeviceCarrier for arrays on GPUs.

All members make a backend together, with a gate that it shares with its group. Operations need only `plan` and `fast`;
messages belong to the engine (p2p/), the state of the peers to the monitor. DeviceCarriers are in fastcoll/gpu/.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from ..arrays.arrays import Array, ImportedArray
from ..errors import AbortedError, GroupError, ResourceError, UnavailableError
from .gate import Gate
from .message import Status
from .monitor import Monitor
from .operation import Call, Operation
from .operations import NATIVE, WITH_ARRAYS
from .reduce_op import ReduceOp
from .work import Work


class Messages(Protocol):
    """Messages between the ranks of a group. Arrays are imported and arguments checked."""

    def send(self, x: ImportedArray, dst: int, tag: int) -> None:
        """Post a send as `isend` does, and wait for it.

        Raises:
            MismatchError: the receiver's array does not fit; the group stays usable.
            GroupError: the group has failed, or fails because the peer died, left or is late.
        """

    def recv(self, x: ImportedArray, src: int | None, tag: int, status: Status | None = None) -> int:
        """Post a receive as `irecv` does, wait for it, and return the sender's rank. Raises as `send`."""

    def isend(self, x: ImportedArray, dst: int, tag: int) -> Work:
        """Post a send; the array belongs to it until it is complete.

        It is complete when a receive has taken the message; to this rank, when the message is buffered. With NCCL a
        message to this rank is complete when its receive is posted.
        """

    def irecv(self, x: ImportedArray, src: int | None, tag: int, status: Status | None = None) -> Work:
        """Post a receive, from any rank if `src` is None; the Work's result is the sender's rank.

        `status` is filled before the receive is complete; with one, the message may be shorter than the array.
        """


class HostMessages(Messages, Protocol):
    """Messages of a host backend.

    Attributes:
        timeout: seconds that a message may take.
    """

    timeout: float

    def probe(self, src: int | None, tag: int) -> Status:
        """Wait for a message that a receive would take; it is not received."""

    def iprobe(self, src: int | None, tag: int) -> Status | None:
        """Return what `probe` would find now, or None. Never waits."""

    def is_entered(self) -> bool:
        """Whether messages wait for this thread: it is the progress thread, or a signal handler inside a call."""

    def poll(self) -> None:
        """Progress messages as far as possible without waiting."""

    def is_in_vain(self, work: Any) -> bool:
        """Whether no live rank can send the message that a posted operation needs."""

    def abort(self) -> None:
        """End what is under way, because the group has failed. From any thread; does not wait."""


class SymmetricMemory(ABC):
    """One array for each rank of a group, all mapped by every rank, at equal distances in this process's memory.

    It is the base of the ndarrays that lie in it, so it lives as long as any of them.

    Attributes:
        ranks: global ranks.
        rank: this process's rank in the group.
        address: of group rank 0's array.
        stride: bytes from one rank's array to the next.
        nbytes: of each array.
    """

    def __init__(self, ranks: Sequence[int], rank: int, address: int, stride: int, nbytes: int) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.address = address
        self.stride = stride
        self.nbytes = nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        length = (len(self.ranks) - 1) * self.stride + self.nbytes
        return {"version": 3, "typestr": "|u1", "shape": (length,), "data": (self.address, False)}

    def array(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Return the beginning of this rank's array, with a shape and dtype."""
        return np.ndarray(shape, dtype, np.asarray(self), self.rank * self.stride)

    def peer(self, x: Array, rank: int) -> Array:
        """Return the part of group rank `rank`'s array at the offset that x has in its rank's array."""
        offset = (x.__array_interface__["data"][0] - self.address) % self.stride
        return np.ndarray(x.shape, x.dtype, np.asarray(self), offset + rank * self.stride, x.strides)

    @abstractmethod
    def copy(self, dst: Array, src: Array) -> None:
        """Copy src to dst: both C-contiguous, of one dtype and size, without overlap. Does not wait for peers.

        Raises:
            GroupError: the group has failed.
            NotInitializedError: the group was destroyed.
        """

    @abstractmethod
    def signal(self, rank: int, channel: int) -> None:
        """Send one signal to group rank `rank`, which then sees all earlier writes of this rank. Raises as `copy`."""

    @abstractmethod
    def wait(self, rank: int, channel: int, timeout: float | None) -> None:
        """Receive one signal of group rank `rank`; blocks until there is one.

        Args:
            timeout: seconds; None for the group's own.

        Raises:
            GroupError: the peer died, left, or sent none in time; the group has failed, as after a collective.
            NotInitializedError: the group was destroyed.
            UsageError: another thread waits for the same signals.
        """

    @property
    @abstractmethod
    def channels(self) -> int:
        """The number of channels."""


class RecoveryEndpoint(ABC):
    """How the members of a failed group find one another: each can publish where it serves a store.

    Ranks are group ranks. It works until the group is closed, whatever has failed.
    """

    host: str
    """The address at which this process can be reached by the members."""

    @abstractmethod
    def offer(self, port: int) -> None:
        """Publish the port of `host` at which this member serves a store; 0: it serves none."""

    @abstractmethod
    def seek(self, rank: int) -> tuple[str, int] | None:
        """Return the host and port at which a member serves a store, or None. Blocks for at most 50 ms.

        Raises:
            ConnectionRefusedError: the member's process has ended.
        """


def memory_of(x: Array) -> SymmetricMemory | None:
    """Return the symmetric memory in which an ndarray lies; None: it is an ordinary array."""
    base: Any = x
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, SymmetricMemory) else None


class NativeCalls(ABC):
    """How compiled callers call a group's operations without Python: by native calls (kernels/c_entries.py).

    Attributes:
        context: the first argument of collectives.
        mailbox: the first argument of messages.
        memory: owns what both lead to.
    """

    context: int
    mailbox: int
    memory: Any

    @abstractmethod
    def open(self, op: int, call: int, dtype: np.dtype[Any] | None, reduce_op: ReduceOp | None) -> int:
        """Return the address of an operation's native call; 0: there is none.

        Args:
            call: the word that the caller passes for this call's dtype and reduction; it is valid from now on.
        """

    @abstractmethod
    def go_on(self, code: int, op: int, words: tuple[int, ...], x: Callable[[], Array]) -> int:
        """Continue a native call that has returned `code`, neither DONE nor LATER. Blocks; raises as the method.

        Args:
            words: the arguments of the native call behind the first one.
            x: makes the array of its `data` argument.

        Returns:
            The sender's group rank for a receive; else 0.
        """

    @abstractmethod
    def take_over(self) -> None:
        """Have the engine take over all requests of compiled callers that were not waited for.

        They are in p2p/handles.py afterwards. Blocks while another thread drives messages.
        """

    @abstractmethod
    def stay_awake(self) -> None:
        """Keep the progress thread awake after Python has posted a receive, so that the next ones need no Python."""

    @abstractmethod
    def torn(self, op: int, error: BaseException) -> None:
        """Fail a call that is half-done, because a signal handler has raised as `go_on` began or returned."""


class Backend(ABC):
    """Carries out the operations of one group on contiguous ndarrays.

    Attributes:
        name: as in `backend=`.
        natively: the kinds of operations that it plans itself; the others are composed of these.
        native_calls: for compiled callers; None: their calls go through Python.
    """

    name: ClassVar[str]
    natively: ClassVar[frozenset[str]] = NATIVE
    gate: Gate
    monitor: Monitor
    messages: HostMessages
    native_calls: NativeCalls | None = None

    @abstractmethod
    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        """Make the call that carries out an operation of a kind in `natively`.

        Does not block, and sends nothing. The call is run by the thread that holds `gate.lock`; it blocks, and raises
        GroupError or MismatchError. The operation's arrays belong to it until it returns.

        Args:
            timeout: seconds for this call; None for the group's own.

        Raises:
            UsageError, ArrayError: this backend cannot carry it out; the caller informs the peers.
        """

    def fast(self, group: Any) -> Mapping[str, Callable[..., Any]]:
        """Return, by name, functions that replace the methods of a ProcessGroup in `group.fast`.

        Each handles the plain case with one compiled call, and calls the method for all other cases.
        """
        return {}

    def limit(self, seconds: float) -> None:
        """Set the timeout of calls and messages that begin from now on."""
        self.gate.timeout = self.messages.timeout = seconds

    def learn(self, dtype: np.dtype[Any]) -> None:  # noqa: B027 - most have no need
        """Make a dtype known to short cuts of messages, if they have a table of dtypes."""

    def symmetric_memory(self, group: Any, nbytes: int, label: str) -> SymmetricMemory:
        """Make memory of `nbytes` for each rank that all ranks map. Collective. See symmetric.py.

        Args:
            group: the ProcessGroup.
            label: the shape and dtype that the memory is for; the same on all ranks.

        Raises:
            UnavailableError: this backend has none.
        """
        raise UnavailableError(
            f"the group {self.gate.name} runs on {self.name}, which has no symmetric arrays; make one of the ranks of "
            "one node with new_group(ranks, backend='shm')"
        )

    def recovery_endpoint(self) -> RecoveryEndpoint:
        """Return the endpoint at which the survivors of a failure find one another.

        Raises:
            UnavailableError: this backend cannot survive the death of a rank.
        """
        raise UnavailableError(
            f"the group {self.gate.name} runs on {self.name}, which cannot survive the death of a rank; restart "
            "the job, or use another backend"
        )

    def begin_at_once(self) -> None:  # noqa: B027 - most have none
        """Let asynchronous operations begin on their callers' threads if the progress threads have no free cores.

        For callers that compute meanwhile. The progress thread still does what has to wait for peers.
        """

    def fail(self, error: GroupError) -> None:
        """Fail the group with an error, and publish it. From any thread. The first reason stays."""
        self.monitor.fail(error)
        self.messages.abort()

    def interrupted(self, error: BaseException, doing: str) -> None:
        """Fail the group, because an exception has ended this rank's part of a call that the peers continue."""
        if not isinstance(error, GroupError):
            here, rank = self.monitor.name(self.gate.rank), self.gate.ranks[self.gate.rank]
            why = f": {error}" if isinstance(error, ResourceError) else ""
            error = AbortedError(f"{here} was interrupted by {type(error).__name__} in {doing}{why}", [rank])
        self.fail(error)

    def stop(self) -> None:  # noqa: B027 - most have nothing to do
        """End calls under way, because the group has failed (`gate.failure`). From any thread; does not wait."""

    @abstractmethod
    def close(self, reason: GroupError | None) -> None:
        """Leave the group and release everything. Called once.

        Args:
            reason: why the group failed; None: the end is orderly.
        """

    @abstractmethod
    def disown(self, error: GroupError) -> None:
        """Make every use raise `error`, in a child of fork. Sends and publishes nothing."""


class StreamCall(ABC):
    """A call that only queues work on a GPU; `ProcessGroup.run` starts it on the caller's thread, in order."""

    @abstractmethod
    def start(self, name: str, owners: Sequence[ImportedArray]) -> Work:
        """Queue the work behind that of the arrays' streams, then `finish` the owners. Does not wait for a GPU.

        The Work's `wait` makes the current stream of the arrays' library wait, not the host; its `is_completed` queries
        the GPU.
        """

    def __call__(self) -> None:
        """Start, and make the stream wait, for callers that handle plain calls only."""
        self.start("a call on a GPU", ()).wait()


class DeviceCarrier(ABC):
    """Carries out the operations of one group on arrays in the memory of GPUs, and its messages."""

    natively = WITH_ARRAYS

    messages: Messages

    @abstractmethod
    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        """Make the call that carries out an operation: one that blocks, or a StreamCall.

        Does not block, and sends nothing.

        Raises:
            UsageError, ArrayError: what can be checked without the peers is wrong.
        """

    @abstractmethod
    def import_array(self, x: Any, *, writable: bool, what: str) -> ImportedArray:
        """Import an array on a GPU, as `arrays.import_array` imports host arrays; `array` is a dense DeviceArray.

        Strided arrays are packed on their own stream.

        Raises:
            ArrayError: the array cannot be used, or is read-only although the call writes.
            UnavailableError: an extra is missing.
        """

    @property
    def splits(self) -> bool:
        """Whether `split` can be called; the same on all ranks, between calls."""
        return False

    def split(self, group: Any) -> DeviceCarrier | None:
        """Make the carrier of a new group of some of this group's ranks from this carrier. Collective; blocks.

        Args:
            group: the new ProcessGroup, with its ranks in this group's order; None on ranks that are not in it, for
                which the result is None as well.

        Raises:
            GroupError: it cannot be made; this carrier's group has failed.
        """
        raise NotImplementedError

    @abstractmethod
    def abort(self) -> None:
        """End what is under way, because the group has failed. From any thread; does not wait."""

    @abstractmethod
    def close(self, reason: GroupError | None) -> None:
        """Release everything. Called once; `reason` says why the group failed, None: the end is orderly."""
