"""Transfer: the Work of one send, receive or probe, with the state that the engine needs.

A Transfer is made in 0.2 us. The parts that only longer operations need (kind, deadline) are made on first use, and the
class has no __init__, whose call would take 0.1 us. The attributes that every message uses are slots, because CPython
3.11 reads a slot in 5 ns, and an attribute that has a default in the class in 30 ns.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..arrays.imported import ImportedArray
from ..compiler.jit import Entry
from ..core import signature
from ..core import work as works
from ..core.message import Status
from ..core.monitor import Monitor, Wait
from ..core.operands import ANY_TAG, JAX_TAGS, LARGEST_TAG, OBJECTS_TAG
from ..core.status import DONE
from ..core.work import Timeout, Work
from ..errors import MismatchError
from ..kernels.primitives import address_of

Array = NDArray[Any]

DTYPE_BITS = 22
_DTYPE_MASK = (1 << DTYPE_BITS) - 1

_NO_ARRAY = np.empty(0, np.uint8)

CONTROL_MESSAGE = np.dtype([("fastcoll: control message of a GPU array", np.uint8, (192,))])
"""The dtype of the messages that announce an array on a GPU; NCCL sends the array itself (gpu/nccl/messages.py). No
user's array has this dtype."""


@lru_cache(maxsize=1024)
def _dtype_code(dtype: np.dtype[Any]) -> int:
    return signature.dtype_code(dtype)


def kind_of(tag: int, dtype: np.dtype[Any]) -> int:
    """Return the word that encodes tag and dtype in frames; with ANY_TAG it is negative, and never sent."""
    return tag << DTYPE_BITS | _dtype_code(dtype)


def tag_of(kind: int) -> int:
    """Return the tag that a kind encodes."""
    return kind >> DTYPE_BITS


def tag_text(tag: int) -> str:
    """Format a tag for error texts."""
    if abs(tag) >= JAX_TAGS:
        return f"{tag_text(tag - JAX_TAGS if tag > 0 else tag + JAX_TAGS)} of fastcoll.jax"
    return {OBJECTS_TAG: "objects", ANY_TAG: "any tag"}.get(tag) or f"tag {tag}"


def contents(kind: int, nbytes: int) -> str:
    """Describe what a message or an array holds, for error texts: `(float32, 10 elements)`."""
    if _is_on_gpu(kind):
        return "an array on a GPU"
    if tag_of(kind) == OBJECTS_TAG:
        return f"{nbytes} bytes of objects" if _is_bytes(kind) else f"{nbytes // 8} objects"
    return signature.describe_message(kind & _DTYPE_MASK, nbytes)


def _is_on_gpu(kind: int) -> bool:
    return kind & _DTYPE_MASK == _dtype_code(CONTROL_MESSAGE)


def _is_bytes(kind: int) -> bool:
    return kind & _DTYPE_MASK == _dtype_code(np.dtype(np.uint8))


def _dropped(kind: int, other: int) -> str:
    """Return the end of an error text: how to make a message and an array of these kinds fit."""
    if _is_on_gpu(kind) != _is_on_gpu(other):
        cure = "both must be on GPUs, or both in host memory"
    elif tag_of(kind) == OBJECTS_TAG and _is_bytes(kind):
        cure = "the receiver has no memory for the objects"
    elif tag_of(kind) == OBJECTS_TAG:
        cure = "both lists must have the same length"
    else:
        cure = "both must have the same dtype and number of elements"
    return f"{cure}. The message was dropped, the group stays usable"


Held = tuple[int, int]
"""Kind and bytes of a message or an array."""


def fits(array: Held, message: Held, shorter: bool) -> bool:
    """Whether an array can hold a message: same dtype and same size or, if `shorter`, at least the message's size."""
    same = (array[0] ^ message[0]) & _DTYPE_MASK == 0
    return same and (array[1] >= message[1] if shorter else array[1] == message[1])


def refused(doing: str, sender: str, message: Held, receiver: str, array: Held) -> MismatchError:
    """Make the sender's error for a message that does not fit the receiver's array."""
    return MismatchError(
        f"{doing}: the message from {sender} holds {contents(*message)}, but the array of the matching receive on "
        f"{receiver} holds {contents(*array)}; {_dropped(message[0], array[0])}"
    )


def unfit(doing: str, receiver: str, array: Held, sender: str, message: Held) -> MismatchError:
    """Make the receiver's error for a message that does not fit its array."""
    shorter = tag_of(message[0]) <= LARGEST_TAG and fits(array, message, shorter=True)
    more = "; a receive with status=Status() takes shorter messages" if shorter else ""
    return MismatchError(
        f"{doing}: the array on {receiver} holds {contents(*array)}, but the message from {sender} holds "
        f"{contents(*message)}; {_dropped(message[0], array[0])}{more}"
    )


_T = TypeVar("_T", bound="Transfer")


class RequestPipe(Protocol):
    """The part of a Pipe (pipe.py) that transfers use."""

    def test_request(self, number: int) -> bool | None:
        """Return whether a request has ended; None if the engine must continue it."""


class Driver(Protocol):
    """The part of Progress (progress.py) that transfers use.

    Attributes:
        forks: what `forks` of core/work.py returned when the Driver was made.
        timeout: seconds that an operation may take.
        requests: the pipe that has the requests of Python.
        request_waits, request_table: that pipe's `waits` and `address`.
    """

    rank: int
    monitor: Monitor
    timeout: float
    forks: int
    requests: RequestPipe
    request_waits: Entry
    request_table: int

    def await_end(self, transfer: Transfer, limit: float) -> bool:
        """Block until a transfer has ended, for at most `limit` seconds; return whether it has."""

    def poll(self) -> None:
        """Progress messages as far as possible without waiting."""

    def crossing(self, peer: int) -> str:
        """Return a hint for the error of a send to `peer` that no receive takes, or an empty text."""

    def call_back(self, transfer: Transfer) -> None:
        """Have the progress thread call the callbacks of a transfer that has ended."""


class Transfer(Work):
    """A send, a receive or a probe.

    Attributes:
        array: the caller's array, or its packed copy.
        peer: the other group rank; None for a receive from any rank.
        is_plain: whether a short cut of the pipe may begin the operation.
        posted: the time of posting, by time.monotonic; 0 while a request is not in the engine.
        is_awaited: whether a thread waits for the operation in the engine.
        is_small: whether a short cut of the pipe has posted the operation.
        number: for a send that a short cut has posted, the message's number among those to its peer; else 0.
        request: the number of its request (`Pipe.request`); 0: it never had one.
    """

    __slots__ = (
        "_engine", "array", "ended", "has_listeners", "noted_by", "peer", "request", "returned", "tag",
    )  # fmt: skip

    if TYPE_CHECKING:

        def __init__(self) -> None: ...
    else:
        __init__ = object.__init__  # `of` sets the attributes

    is_plain = True
    is_small = is_awaited = False
    number = 0
    posted = 0.0
    needs_copy_back = False
    _kind: int | None = None
    _watch: Wait | None = None

    def of(
        self: _T, engine: Driver, array: Array, peer: int | None, tag: int, result: int | None = None
    ) -> _T:
        """Set what every operation has, and return self.

        `result` is the Work's result if a request completes the operation.
        """
        self._engine = engine
        self.array = array
        self.peer = peer
        self.tag = tag
        self.returned = result
        self.request = 0
        self.noted_by = None
        self.ended = self.has_listeners = False
        return self

    @property
    def name(self) -> str:
        """Name the operation and its peer, for error texts."""
        raise NotImplementedError

    @property
    def describe(self) -> str:  # type: ignore[override]
        return f"{self.name}, {tag_text(self.tag)}"

    @property
    def forks(self) -> int:  # type: ignore[override]
        return self._engine.forks

    @property
    def kind(self) -> int:
        """The message's tag and dtype, encoded by `kind_of`."""
        if self._kind is None:
            self._kind = kind_of(self.tag, self.array.dtype)
        return self._kind

    def be_of(self, kind: int) -> None:
        """Set the message's kind, if `array` has the message's bytes but not its dtype."""
        self._kind = kind

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return self.array.nbytes

    @property
    def address(self) -> int:
        """Address of the array."""
        return address_of(self.array)

    def needed(self) -> list[int]:
        """Return the ranks that the operation waits for."""
        return _needed(self._engine.monitor, self._engine.rank, self.peer, isinstance(self, Send))

    @property
    def watch(self) -> Wait:
        """The check of the operation's deadline and of the peers that it needs."""
        if self._watch is None:
            monitor, timeout = self._engine.monitor, self._engine.timeout
            # `late` has no reference to this transfer: a cycle would keep its array until the garbage collector runs.
            late = partial(_needed, monitor, self._engine.rank, self.peer, isinstance(self, Send))
            self._watch = Wait(monitor, self.describe, late, timeout, self.posted, is_message=True)
            if isinstance(self, Send) and self.peer != self._engine.rank:
                self._watch.hint = partial(self._engine.crossing, self.peer)
        return self._watch

    # ---- as a Work ---------------------------------------------------------------------------------

    def await_end(self, limit: float) -> bool:
        return self._engine.await_end(self, limit)

    def wait(self, timeout: Timeout = None) -> bool:
        """Do what a Work's `wait` does; complete a request with one compiled call if nothing goes wrong."""
        refuses = works.has_progressing and works.is_progressing()
        if timeout is None and self.request and not self.ended and not refuses:
            engine = self._engine
            if engine.request_waits.call(engine.request_table, self.request) < DONE:
                # This is `complete` without its call. Two threads may do so at the same time.
                self.ended = True
                if self.has_listeners or self.noted_by is not None:
                    self.complete()
                return True
        return super().wait(timeout)

    def complete_request(self) -> None:
        """Record that the operation's request has ended without an error. Two threads may do so at the same time."""
        self.complete()

    def is_completed(self) -> bool:
        """Progress messages, and return whether the operation has ended, with success or an error. Never blocks."""
        if not self.ended:
            has_ended = self._engine.requests.test_request(self.request) if self.request else None
            if has_ended:
                self.complete_request()
            elif has_ended is None:
                self._engine.poll()
        return self.ended

    def dispatch_callbacks(self) -> None:
        self._engine.call_back(self)


def _needed(monitor: Monitor, rank: int, peer: int | None, sends: bool) -> list[int]:
    """Return the ranks that a transfer of `rank` with `peer` waits for."""
    # A rank that is leaving may still receive a message. While this rank is leaving, job/leaving.py ends the operations
    # that no peer can complete, without failing the group.
    if monitor.is_leaving(peer if peer is not None and sends else rank):
        return []
    if peer is not None:
        return [peer]
    # A receive from any rank is hopeless when all other ranks have left. Another thread of this rank could still send,
    # but that does not count, because then no check would ever find that this rank is stuck.
    others = [other for other in range(len(monitor.members)) if other != rank] or [rank]
    return [other for other in others if not monitor.has_left(other)] or others


class Send(Transfer):
    """A send to `peer`. If `peer` is this rank, `array` is a copy of the caller's array."""

    peer: int

    @property
    def name(self) -> str:
        return f"send to {self._engine.monitor.name(self.peer)}"

    def misfit(self, kind: int, nbytes: int) -> MismatchError:
        """Make the error for a receiver whose array has this kind and size."""
        monitor = self._engine.monitor
        here, there = monitor.name(self._engine.rank), monitor.name(self.peer)
        return refused(self.describe, here, (self.kind, self.nbytes), there, (kind, nbytes))


class Receive(Transfer):
    """A receive from `peer`, or from any rank."""

    needs_message = True
    _imported: ImportedArray | None = None
    _status: Status | None = None

    def into(self, imported: ImportedArray | None, status: Status | None = None) -> Receive:
        """Set what the general path needs, and return self.

        Args:
            imported: the caller's array, if the message may have to be copied back to it at the end; else None.
            status: filled when the receive completes. If it is given, the message may be shorter than the array.
        """
        self._imported, self._status = imported, status
        self.is_plain = self.tag >= 0 and status is None
        return self

    @property
    def name(self) -> str:
        return f"recv from {'any rank' if self.peer is None else self._engine.monitor.name(self.peer)}"

    def fits(self, kind: int, nbytes: int) -> bool:
        """Whether the array can hold a message."""
        return fits((self.kind, self.nbytes), (kind, nbytes), self._status is not None)

    def note(self, source: int, kind: int, nbytes: int) -> None:
        """Fill the Status, if there is one, with the sender, tag and size of the message."""
        if self._status is not None:
            self._status.fill(source, tag_of(kind), nbytes // (self.array.itemsize or 1), nbytes)
            if self._imported is not None:
                self._imported.received(nbytes)

    def misfit(self, source: int, kind: int, nbytes: int) -> MismatchError:
        """Make the error for a message of another kind or size."""
        monitor = self._engine.monitor
        here, there = monitor.name(self._engine.rank), monitor.name(source)
        return unfit(self.describe, here, (self.kind, self.nbytes), there, (kind, nbytes))

    def put(self, address: int, nbytes: int) -> None:
        """Copy the first bytes of the message, which were buffered, to the array."""
        if self._imported is None:
            ctypes.memmove(self.address, address, nbytes)
        else:
            self._imported.put(address, nbytes)

    @property
    def needs_copy_back(self) -> bool:  # type: ignore[override]
        """Whether `finish` has anything to do, which may take long."""
        return self._imported is not None and self._imported.needs_copy_back

    def finish(self) -> None:
        """Copy the message back to the caller's array if that is needed."""
        if self._imported is not None:
            self._imported.finish()


def status_of(source: int, kind: int, nbytes: int) -> Status:
    """Build the Status of a probe."""
    status, itemsize = Status(), signature.itemsize_of(kind)
    nbytes = -1 if _is_on_gpu(kind) else nbytes
    status.fill(source, tag_of(kind), nbytes // itemsize if itemsize else -1, nbytes)
    return status


class Probe(Transfer):
    """A probe for a message from `peer`, or from any rank; the result is the message's Status.

    Attributes:
        at_once: if true, the probe does not wait, and its result is None if there is no message.
    """

    is_plain = False
    needs_message = True

    def at(self, engine: Driver, peer: int | None, tag: int, at_once: bool) -> Probe:
        """Set what a probe has, and return self."""
        self.at_once = at_once
        return self.of(engine, _NO_ARRAY, peer, tag)

    @property
    def name(self) -> str:
        return f"probe of {'any rank' if self.peer is None else self._engine.monitor.name(self.peer)}"
