"""The interfaces that carry out a group's operations: Backend for host arrays, DeviceCarrier for arrays on GPUs.

All members of a group make its backend together. The backend and the group share one gate (gate.py), which decides
which thread may run a call. The group carries out collectives by the backend's methods `plan` and `fast` only. The
backend's engine (p2p/) carries out messages, and its monitor (monitor.py) keeps the states of the peers. DeviceCarriers
are in fastcoll/gpu/.
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
    """Messages between the ranks of a group. The caller has imported the arrays and checked the arguments."""

    def send(self, x: ImportedArray, dst: int, tag: int) -> None:
        """Post a send as `isend` does, and wait for it.

        Raises:
            MismatchError: the receiver's array does not fit; the group stays usable.
            GroupError: the group has failed, or fails because the peer died, left or is late.
        """

    def recv(self, x: ImportedArray, src: int | None, tag: int, status: Status | None = None) -> int:
        """Post a receive as `irecv` does, wait for it, and return the sender's rank. Raises the errors of `send`."""

    def isend(self, x: ImportedArray, dst: int, tag: int) -> Work:
        """Post a send. The caller must not change the array until the send is complete.

        A send is complete when a receive has taken the message. A send to this rank itself is complete as soon as the
        message is buffered or, with NCCL, as soon as the matching receive is posted.
        """

    def irecv(self, x: ImportedArray, src: int | None, tag: int, status: Status | None = None) -> Work:
        """Post a receive, from any rank if `src` is None; the Work's result is the sender's rank.

        If a `status` is given, it is filled before the receive is complete, and the message may be shorter than the
        array.
        """


class HostMessages(Messages, Protocol):
    """Messages of a host backend.

    Attributes:
        timeout: seconds that a message may take.
    """

    timeout: float

    def probe(self, src: int | None, tag: int) -> Status:
        """Wait for a message that a receive with these arguments would take. The message is not received."""

    def iprobe(self, src: int | None, tag: int) -> Status | None:
        """Return what `probe` would find now, or None. Never waits."""

    def is_entered(self) -> bool:
        """Whether messages cannot progress while the calling thread waits for them.

        This is so if the calling thread is the progress thread, or runs a signal handler that has interrupted a call.
        """

    def poll(self) -> None:
        """Progress messages as far as possible without waiting."""

    def take_over_pending(self) -> None:
        """Make a Work under way of each request that compiled code carries out. May block for a second."""

    def is_in_vain(self, work: Any) -> bool:
        """Whether a posted receive (`work`) has matched no message, and no live peer can send one."""

    def abort(self) -> None:
        """End the operations under way, because the group has failed. Any thread may call it; does not wait."""


class SymmetricMemory(ABC):
    """Memory with one array for each rank of a group. Every rank maps all arrays, `stride` bytes apart.

    Every ndarray in this memory has the SymmetricMemory as its `base`, so the memory lives as long as any such ndarray.

    Attributes:
        ranks: the group's global ranks.
        rank: this process's rank in the group.
        address: the address of group rank 0's array in this process.
        stride: bytes from one rank's array to the next.
        nbytes: the size of each array.
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
        """Return the beginning of this rank's array, as an ndarray of the given shape and dtype."""
        return np.ndarray(shape, dtype, np.asarray(self), self.rank * self.stride)

    def peer(self, x: Array, rank: int) -> Array:
        """Return the ndarray in group rank `rank`'s array that corresponds to x: same offset, shape and dtype."""
        offset = (x.__array_interface__["data"][0] - self.address) % self.stride
        return np.ndarray(x.shape, x.dtype, np.asarray(self), offset + rank * self.stride, x.strides)

    @abstractmethod
    def copy(self, dst: Array, src: Array) -> None:
        """Copy src to dst, without waiting for peers.

        Both must be C-contiguous, have the same dtype and size, and not overlap.

        Raises:
            GroupError: the group has failed.
            NotInitializedError: the group was destroyed.
        """

    @abstractmethod
    def signal(self, rank: int, channel: int) -> None:
        """Send one signal to group rank `rank`, which then sees all earlier writes of this rank.

        Raises the errors of `copy`.
        """

    @abstractmethod
    def wait(self, rank: int, channel: int, timeout: float | None) -> None:
        """Receive one signal of group rank `rank`; block until there is one.

        Args:
            timeout: seconds; None for the group's timeout.

        Raises:
            GroupError: the peer died, left, or sent no signal in time. The group has then failed, as after a collective
                that raises GroupError.
            NotInitializedError: the group was destroyed.
            UsageError: another thread waits for the same signals.
        """

    @property
    @abstractmethod
    def channels(self) -> int:
        """The number of channels."""


class RecoveryEndpoint(ABC):
    """Lets the members of a failed group find one another: a member publishes where it serves a key-value store.

    Ranks are group ranks. The endpoint also works after the group has failed, until the group is closed.
    """

    host: str
    """The address at which the members can reach this process."""

    @abstractmethod
    def offer(self, port: int) -> None:
        """Publish the port on `host` at which this member serves a store; 0 if it serves none."""

    @abstractmethod
    def seek(self, rank: int) -> tuple[str, int] | None:
        """Return the host and port at which a member serves a store, or None. Blocks for at most 50 ms.

        Raises:
            ConnectionRefusedError: the member's process has ended.
        """


def memory_of(x: Array) -> SymmetricMemory | None:
    """Return the symmetric memory in which an ndarray lies, or None for an ordinary array."""
    base: Any = x
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, SymmetricMemory) else None


class NativeCalls(ABC):
    """The native calls of a group: C functions (kernels/c_entries.py) that compiled code calls without Python.

    A *compiled caller* is code that calls them: a function compiled by Numba, or a program of JAX.

    Attributes:
        context: a handle, the first argument of the native calls of collectives.
        mailbox: a handle, the first argument of the native calls of messages.
        memory: an object that keeps the memory behind both handles alive.
    """

    context: int
    mailbox: int
    memory: Any

    @abstractmethod
    def open(self, op: int, call: int, dtype: np.dtype[Any] | None, reduce_op: ReduceOp | None) -> int:
        """Return the address of an operation's native call, or 0 if it has none.

        Args:
            call: the number by which the compiled caller will name this dtype and reduction to the native call. The
                native call accepts the number once `open` has returned.
        """

    @abstractmethod
    def go_on(self, code: int, op: int, words: tuple[int, ...], x: Callable[[], Array]) -> int:
        """Continue a native call that has returned a `code` other than DONE and LATER; block until it is complete.

        Raises the errors of the ProcessGroup's method for the operation.

        Args:
            words: the arguments of the native call after the first one.
            x: returns the array at the native call's `data` argument.

        Returns:
            The sender's group rank for a receive; else 0.
        """

    @abstractmethod
    def take_over(self) -> None:
        """Let the engine (p2p/engine.py) continue compiled callers' requests that were posted and not yet waited for.

        Afterwards p2p/handles.py has a Work for the number of each such request. This method blocks while another
        thread moves this rank's messages.
        """

    @abstractmethod
    def stay_awake(self) -> None:
        """Keep the progress thread awake after Python has posted a receive for a compiled caller.

        Then the caller's next receives do not have to call Python to wake the thread.
        """

    @abstractmethod
    def torn(self, op: int, error: BaseException) -> None:
        """Fail a half-done call after a signal handler has raised an exception just before or after `go_on`."""


class Backend(ABC):
    """Carries out the operations of one group on contiguous ndarrays.

    Attributes:
        name: the backend's name, which `backend=` takes.
        natively: the kinds of operations that the backend plans itself; other kinds are composed of these.
        narrows: whether the backend plans an all_reduce whose array travels in a narrow type (travel.py).
        native_calls: the native calls for compiled callers; None if compiled callers must call Python for
            every operation.
    """

    name: ClassVar[str]
    natively: ClassVar[frozenset[str]] = NATIVE
    narrows: bool = False
    gate: Gate
    monitor: Monitor
    messages: HostMessages
    native_calls: NativeCalls | None = None

    @abstractmethod
    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        """Return the call, a function without arguments, that carries out an operation.

        The operation's kind must be in `natively`. `plan` does not block, and sends nothing. The thread that holds
        `gate.lock` runs the call, which blocks, and may raise GroupError or MismatchError. Nothing else may use the
        operation's arrays until the call returns.

        Args:
            timeout: seconds for this call; None for the group's timeout.

        Raises:
            UsageError, ArrayError: this backend cannot carry out the operation. The caller of `plan` informs the peers.
        """

    def fast(self, group: Any) -> Mapping[str, Callable[..., Any]]:
        """Return functions by method name; `group.fast` has them instead of the ProcessGroup's methods of these names.

        Each function handles the plain case with one compiled call, and calls the method in all other cases.
        """
        return {}

    def limit(self, seconds: float) -> None:
        """Set the timeout of calls and messages that begin from now on."""
        self.gate.timeout = self.messages.timeout = seconds

    def learn(self, dtype: np.dtype[Any]) -> None:  # noqa: B027 - most backends have no such table
        """Add a dtype to the table that the backend's compiled functions for messages use, if they have one."""

    def symmetric_memory(self, group: Any, nbytes: int, label: str) -> SymmetricMemory:
        """Make a memory with `nbytes` for each rank, and map it on all ranks. Collective. See symmetric.py.

        Args:
            group: the ProcessGroup.
            label: the shape and dtype that the memory is for; the same on all ranks.

        Raises:
            UnavailableError: this backend has no symmetric memory.
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

    def begin_at_once(self) -> None:  # noqa: B027 - most backends do nothing here
        """Let long asynchronous operations begin on their callers' threads too, if progress threads have no free cores.

        Called for programs that compute while operations are under way. Other threads still do all work that has to
        wait for peers.
        """

    def fail(self, error: GroupError) -> None:
        """Fail the group with an error and publish the error, if the group has not failed before.

        Any thread may call this.
        """
        try:
            self.monitor.fail(error)
        finally:
            self.messages.abort()

    def interrupted(self, error: BaseException, doing: str) -> None:
        """Fail the group, because an exception has ended this rank's part of a call while the peers continue theirs."""
        if not isinstance(error, GroupError):
            here, rank = self.monitor.name(self.gate.rank), self.gate.ranks[self.gate.rank]
            why = f": {error}" if isinstance(error, ResourceError) else ""
            error = AbortedError(f"{here} was interrupted by {type(error).__name__} in {doing}{why}", [rank])
        self.fail(error)

    def stop(self) -> None:  # noqa: B027 - most backends do nothing here
        """End calls under way, because the group has failed (`gate.failure`). Any thread may call it; does not wait."""

    @abstractmethod
    def close(self, reason: GroupError | None) -> None:
        """Leave the group and release everything. Called once.

        Args:
            reason: why the group failed; None if it has not failed.
        """

    @abstractmethod
    def disown(self, error: GroupError) -> None:
        """In a child process made by fork: make every later use raise `error`. Sends and publishes nothing."""


class StreamCall(ABC):
    """A call that only queues work on a GPU; `ProcessGroup.run` starts it on the thread that called `run`."""

    @abstractmethod
    def start(self, name: str, owners: Sequence[ImportedArray]) -> Work:
        """Queue the work after all work on the arrays' streams, then call `finish` of all `owners`.

        Does not wait for a GPU.

        `wait` of the Work does not block the host: it makes the current stream of the arrays' library wait.
        `is_completed` queries the GPU.
        """

    def __call__(self) -> None:
        """Start the call, and make the arrays' library's current stream wait for it.

        For callers that expect a call without arguments.
        """
        self.start("a call on a GPU", ()).wait()


class DeviceCarrier(ABC):
    """Carries out the operations and messages of one group on arrays in GPU memory."""

    natively = WITH_ARRAYS

    messages: Messages

    @abstractmethod
    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        """Return the call that carries out an operation: a function that blocks, or a StreamCall.

        `plan` does not block, and sends nothing.

        Raises:
            UsageError, ArrayError: the operation is wrong, as far as this rank can check without its peers.
        """

    @abstractmethod
    def import_array(self, x: Any, *, writable: bool, what: str) -> ImportedArray:
        """Import an array on a GPU, like `arrays.import_array` for host arrays.

        `array` of the result is a contiguous DeviceArray. A strided array is packed on the array's own stream.

        Raises:
            ArrayError: the array cannot be used, or is read-only although the call writes.
            UnavailableError: an optional package that is needed for the array is not installed.
        """

    @property
    def splits(self) -> bool:
        """Whether `split` can be called. While no call is in progress, the answer is the same on all ranks."""
        return False

    def split(self, group: Any) -> DeviceCarrier | None:
        """Make a carrier for a new group, whose ranks are some of this group's. Collective in this group; blocks.

        Args:
            group: the new ProcessGroup, with its ranks in this group's order; None on ranks that are not in it.

        Returns:
            The new group's carrier; None on ranks that are not in it.

        Raises:
            GroupError: the carrier cannot be made. This carrier's group has then failed.
        """
        raise NotImplementedError

    @abstractmethod
    def abort(self) -> None:
        """End the operations under way, because the group has failed. Any thread may call it; does not wait."""

    @abstractmethod
    def close(self, reason: GroupError | None) -> None:
        """Release everything. Called once. `reason`: why the group failed; None if it has not failed."""
