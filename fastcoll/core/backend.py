"""The contract of backends: what carries a group's operations out. A group holds one for arrays in host memory.

A backend is made by all members together, with a gate that it shares with its group. `plan` and `fast` are all that an
operation needs; messages are the p2p engine's, life and death the monitor's. For arrays on GPUs a group has a
DeviceCarrier beside it; see fastcoll/gpu/.
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
    """Point-to-point between the ranks of a group; arrays are adopted, arguments right."""

    def send(self, x: ImportedArray, dst: int, tag: int) -> None:
        """Post a send and wait for it, as `isend` does."""

    def recv(self, x: ImportedArray, src: int | None, tag: int, status: Status | None = None) -> int:
        """As `irecv` and waiting for it; the sender's rank."""

    def isend(self, x: ImportedArray, dst: int, tag: int) -> Work:
        """Post a send. It is complete when a receive has taken it; to this rank, when it is buffered.

        With NCCL a message to this rank is complete when its receive is posted.
        """

    def irecv(self, x: ImportedArray, src: int | None, tag: int, status: Status | None = None) -> Work:
        """Post a receive, from any rank if `src` is None; the result is the sender's rank.

        `status` is filled before the receive is complete; with one, the message may be shorter than the array.
        """


class HostMessages(Messages, Protocol):
    """Messages of a host backend, which its group asks more."""

    timeout: float  # seconds that a message may take

    def probe(self, src: int | None, tag: int) -> Status:
        """Wait for a message that a receive would take, without receiving it."""

    def iprobe(self, src: int | None, tag: int) -> Status | None:
        """Return what `probe` would find now, or None. Never waits."""

    def is_entered(self) -> bool:
        """Whether this thread is in the middle of a message: then this is a signal handler."""

    def poll(self) -> None:
        """Progress messages as far as possible without waiting."""

    def is_in_vain(self, work: Any) -> bool:
        """Whether no rank is left that could send the message which one of the operations needs."""

    def abort(self) -> None:
        """The group has failed: end what is under way, from any thread."""


class SymmetricMemory(ABC):
    """An array of each rank of a group, all of them mapped by every rank, at equal distances in this process's memory.

    The ndarrays that lead into it have it as their base, so it stays as long as there is one of them. Its `ranks` are
    global, its `rank` is this process's in the group. The `address` is that of group rank 0's array; each has `nbytes`,
    and the next one begins after `stride` bytes.
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
        """The beginning of this rank's array."""
        return np.ndarray(shape, dtype, np.asarray(self), self.rank * self.stride)

    def peer(self, x: Array, rank: int) -> Array:
        """What x, a part of one rank's array, is in the array of group rank `rank`."""
        offset = (x.__array_interface__["data"][0] - self.address) % self.stride
        return np.ndarray(x.shape, x.dtype, np.asarray(self), offset + rank * self.stride, x.strides)

    @abstractmethod
    def copy(self, dst: Array, src: Array) -> None:
        """dst = src, both C-contiguous and apart, of one dtype and size. Does not wait for anybody.

        Raises:
            GroupError: the group has failed.
            NotInitializedError: it was destroyed.
        """

    @abstractmethod
    def signal(self, rank: int, channel: int) -> None:
        """Count one signal to group rank `rank`, who then sees all that was written before; raises as `copy`."""

    @abstractmethod
    def wait(self, rank: int, channel: int, timeout: float | None) -> None:
        """Take one signal from group rank `rank`; blocks until there is one.

        Args:
            timeout: seconds; None for the group's own.

        Raises:
            GroupError: the peer died, left, or sent none in time; the group has failed then, as after a collective.
            NotInitializedError: it was destroyed.
            UsageError: another thread waits for the same signals.
        """

    @property
    @abstractmethod
    def channels(self) -> int:
        """How many channels there are."""


class RecoveryEndpoint(ABC):
    """How the members of a group that has failed find one another: each can say where it serves a store.

    Ranks are group ranks. It works until the group is closed, whatever has failed.
    """

    host: str
    """The address at which this process can be reached by the members."""

    @abstractmethod
    def offer(self, port: int) -> None:
        """Tell the members at which port of `host` this one serves a store; 0: at none any more."""

    @abstractmethod
    def seek(self, rank: int) -> tuple[str, int] | None:
        """The host and port at which a member serves a store; None: it has not said so. Blocks for 50 ms at most.

        Raises:
            ConnectionRefusedError: the member's process has ended.
        """


def memory_of(x: Array) -> SymmetricMemory | None:
    """The symmetric memory that an ndarray leads into; None: it is an ordinary one."""
    base: Any = x
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, SymmetricMemory) else None


class NativeCalls(ABC):
    """How compiled callers call a group's operations without Python; see kernels/c_entries.py for ways and operations."""

    context: int  # the handle of the ways of collectives
    mailbox: int  # and of messages
    memory: Any  # what the handles lead to

    @abstractmethod
    def open(self, op: int, call: int, dtype: np.dtype[Any] | None, reduce_op: ReduceOp | None) -> int:
        """The address of an operation's way, which knows the caller's word `call` from now on; 0: there is none."""

    @abstractmethod
    def go_on(self, code: int, op: int, words: tuple[int, ...], x: Callable[[], Array]) -> int:
        """Go on with a call whose way came back with `code`, neither DONE nor LATER; blocks, and raises as the method.

        Args:
            words: what the way was given behind the handle.
            x: makes the array at its `data`.

        Returns:
            The group rank of the sender, of a receive; else 0.
        """

    @abstractmethod
    def take_over(self) -> None:
        """Have the engine take over all requests of compiled callers that were not waited for.

        They are in p2p/handles.py afterwards. Blocks while another thread drives messages.
        """

    @abstractmethod
    def stay_awake(self) -> None:
        """Python has posted a receive: make it possible to post the next ones without Python."""

    @abstractmethod
    def torn(self, op: int, error: BaseException) -> None:
        """As `go_on` was about to begin or to return, a signal's handler has raised: fail what is half-way."""


class Backend(ABC):
    """What carries operations on contiguous ndarrays out, in one group."""

    name: ClassVar[str]  # as in `backend=`
    # The kinds that it plans itself; of the others it is given compositions of these.
    natively: ClassVar[frozenset[str]] = NATIVE
    gate: Gate
    monitor: Monitor
    messages: HostMessages
    native_calls: NativeCalls | None = None
    """For compiled callers; None: all their calls go the way of Python's."""

    @abstractmethod
    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        """What carries an operation of one of its kinds out, by the thread that has the turn.

        Does not block, and talks to no peer. The arrays belong to the call until it has returned; the call blocks.

        Args:
            timeout: seconds for this call; None for the group's own.

        Raises:
            UsageError, ArrayError: it cannot be done here; the peers are told.
        """

    def fast(self, group: Any) -> Mapping[str, Callable[..., Any]]:
        """Functions that `group.fast`, of a ProcessGroup, has in the place of the group's methods of these names.

        Each does the plain case with the least that it takes, one compiled call, and leaves the rest to the method.
        """
        return {}

    def limit(self, seconds: float) -> None:
        """From now on let each call and each message take so many seconds."""
        self.gate.timeout = self.messages.timeout = seconds

    def learn(self, dtype: np.dtype[Any]) -> None:  # noqa: B027 - most have no need
        """Let short cuts of messages know a dtype, where these have a memory."""

    def symmetric_memory(self, group: Any, nbytes: int, label: str) -> SymmetricMemory:
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

    def recovery_endpoint(self) -> RecoveryEndpoint:
        """Where the survivors of a failure meet.

        Raises:
            UnavailableError: this backend does not outlive the death of a rank.
        """
        raise UnavailableError(
            f"the group {self.gate.name} runs on {self.name}, which does not outlive the death of a rank; start the "
            "job anew, or with another backend"
        )

    def begin_at_once(self) -> None:  # noqa: B027 - most have none
        """Let asynchronous operations begin on their callers' threads, where progress threads have no cores.

        For callers that compute meanwhile; what would have to wait for peers is still done on the progress thread.
        """

    def fail(self, error: GroupError) -> None:
        """Fail the group with an error, from any thread, and tell the peers. The first reason stays."""
        self.monitor.fail(error)
        self.messages.abort()

    def interrupted(self, error: BaseException, doing: str) -> None:
        """Fail the group: an exception has ended this rank's part of a call, with which the peers go on."""
        if not isinstance(error, GroupError):
            here, rank = self.monitor.name(self.gate.rank), self.gate.ranks[self.gate.rank]
            why = f": {error}" if isinstance(error, ResourceError) else ""
            error = AbortedError(f"{here} was interrupted by {type(error).__name__} in {doing}{why}", [rank])
        self.fail(error)

    def stop(self) -> None:  # noqa: B027 - most have nothing to do
        """The group has failed, wherever that was found; `gate.failure` says why. Any thread, does not wait."""

    @abstractmethod
    def close(self, reason: GroupError | None) -> None:
        """Leave the group and release everything; `reason` says why when it is not an orderly end. Called once."""

    @abstractmethod
    def disown(self, error: GroupError) -> None:
        """In a child of fork: make every use raise `error`, without a word to the peers."""


class StreamCall(ABC):
    """A call that only queues work on a GPU; `ProcessGroup.run` starts it on the caller's thread, in order."""

    @abstractmethod
    def start(self, name: str, owners: Sequence[ImportedArray]) -> Work:
        """Queue the work behind what the arrays' streams hold, then `finish` of the owners; does not wait for a GPU.

        The Work's `wait` makes the stream that is then current in the arrays' library wait, and not the host; its
        `is_completed` asks the GPU.
        """

    def __call__(self) -> None:
        """As `start` and waiting for it on the stream, for callers that know calls only."""
        self.start("a call on a GPU", ()).wait()


class DeviceCarrier(ABC):
    """What carries operations on the arrays of GPUs out, in one group."""

    natively = WITH_ARRAYS

    messages: Messages
    """What carries messages out."""

    @abstractmethod
    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        """What carries an operation out: a call that blocks, or a StreamCall.

        Checks what it can without talking to peers (UsageError, ArrayError); does not block.
        """

    @abstractmethod
    def import_array(self, x: Any, *, writable: bool, what: str) -> ImportedArray:
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
