"""Messages between workers as bytes: pickles, with the memory of arrays and tensors beside them.

    offset  bytes  field (little-endian)
    0       8      bytes of the body
    8       8      number of the call, of its caller
    16      8      bytes of the pickle
    24      4      bytes of the context
    28      4      number of buffers
    32      1      what it is: see MessageType
    33      1      the kind of the call
    34      1      1: large buffers come through shared memory (slots.py)
    35      5      zero

The body is a table of the buffers (8 bytes each: how many bytes it has), the context, the pickle, and the small
buffers, each at a multiple of 64. Buffers of more than INLINE bytes follow the body, in order. What unpickles a
message, sees from whom it is (`sender`); what pickles one, may see to whom it goes (`reduce_type`).
"""

from __future__ import annotations

import copyreg
import importlib
import io
import pickle
import struct
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from ..errors import NotInitializedError, UsageError
from .worker_info import WorkerInfo

HEADER = struct.Struct("<QQQIIBBB5x")
INLINE = 16 << 10  # bytes of a buffer that travel in the body
_ALIGNED = 64
Piece = bytes | bytearray | memoryview
Reducer = Callable[[Any, WorkerInfo], tuple[Any, ...] | str]
Undo = Callable[[Any], None]


class MessageType(IntEnum):
    """A call, one that is not answered, an answer, an exception, the last message of all, and of shared memory."""

    CALL = 1
    NOTIFY = 2
    RESULT = 3
    RAISED = 4
    GOODBYE = 5
    RING = 6


_TYPES = {each.value: each for each in MessageType}


class CallContext(Protocol):
    """What travels with calls of user functions: see calls.py."""

    def encode(self, to: WorkerInfo) -> bytes | None: ...

    def enter(self, value: bytes, sender: WorkerInfo) -> AbstractContextManager[Any]: ...


class RpcMessage(NamedTuple):
    """A message that is to be sent, or was received and is not unpickled yet."""

    type: MessageType
    kind: int  # of the call
    call: int  # its number
    pickled: Piece
    buffers: Sequence[Piece] = ()
    context: bytes = b""


contexts: dict[str, CallContext] = {}
"""By the module that enters it here when it is imported, as a worker does that a call with such a context reaches."""


# ---- pickling ------------------------------------------------------------------------------------------------

_reducers: dict[type, tuple[Reducer, Undo | None]] = {}
_here = threading.local()
_AHEAD = struct.Struct(
    "<BI"
)  # a zero, which no pickle begins with, and the bytes of what is ahead of the pickle


def reduce_type(cls: type, reducer: Reducer, undo: Undo | None = None) -> None:
    """Ask `reducer(value, to)` for the reduce tuple of instances of `cls` and its subclasses, in messages to `to`.

    With `undo`, instances are ahead of the rest of their message: they come to be at the receiver also where the rest
    cannot be unpickled, or is late. `undo(reduced)` is called for each if the message cannot be pickled.
    """
    _reducers[cls] = reducer, undo
    _table.clear()


def sender() -> WorkerInfo:
    """The worker from whom the message comes that this thread unpickles."""
    found: WorkerInfo | None = getattr(_here, "sender", None)
    if found is None:
        raise NotInitializedError("no message is being unpickled on this thread")
    return found


class SharedBuffer:
    """Memory beside a pickle that several objects of a message share; it is sent once."""

    __slots__ = ("_buffer",)

    def __init__(self, buffer: pickle.PickleBuffer) -> None:
        self._buffer = buffer

    def __reduce__(self) -> Any:
        return _came_beside, (self._buffer,)


def _came_beside(buffer: Piece) -> Piece:
    return buffer


def in_message() -> dict[Any, Any]:
    """Return the notes that reducers keep for the message that this thread is pickling."""
    notes: dict[Any, Any] = _here.outgoing.notes
    return notes


class _Table(dict[type, Callable[[Any], Any]]):
    """A pickler's dispatch table, which finds the reducers of base classes as well."""

    def __missing__(self, cls: type) -> Callable[[Any], Any]:
        if issubclass(cls, type):
            raise KeyError(cls)  # classes, of metaclasses, are pickled by name
        for base in cls.__mro__:
            if (base.__module__, base.__qualname__) == ("torch", "Tensor"):
                importlib.import_module("fastcoll.rpc.tensor_buffers")
            if base in _reducers:
                self[cls] = found = partial(_for_receiver, *_reducers[base])
                return found
        return copyreg.dispatch_table.get(cls, _by_itself)


class _Outgoing:
    """A message that is being pickled."""

    __slots__ = ("ahead", "notes", "receiver")

    def __init__(self, receiver: WorkerInfo) -> None:
        self.receiver = receiver
        self.ahead: list[tuple[Any, Undo]] = []
        self.notes: dict[Any, Any] = {}


def _for_receiver(reducer: Reducer, undo: Undo | None, value: Any) -> Any:
    outgoing: _Outgoing = _here.outgoing
    reduced = reducer(value, outgoing.receiver)
    if undo is None:
        return reduced
    outgoing.ahead.append((reduced, undo))
    return _came_ahead, (len(outgoing.ahead) - 1,)


def _came_ahead(index: int) -> Any:
    return _here.came[index]


def _by_itself(value: Any) -> Any:
    return value.__reduce_ex__(5)


_table = _Table()


def dumps(value: Any, to: WorkerInfo) -> tuple[bytes, list[memoryview]]:
    """The pickle of a value, and the buffers beside it; UsageError: it cannot be pickled."""
    file, buffers = io.BytesIO(), []

    def beside(buffer: pickle.PickleBuffer) -> bool:
        try:
            buffers.append(buffer.raw())
        except BufferError:  # not contiguous
            return True
        return False

    pickler = pickle.Pickler(file, 5, buffer_callback=beside)
    pickler.dispatch_table = _table
    before = getattr(_here, "outgoing", None)
    _here.outgoing = outgoing = _Outgoing(to)
    try:
        pickler.dump(value)
    except BaseException as error:
        for reduced, undo in outgoing.ahead:
            undo(reduced)
        if isinstance(error, UsageError) or not isinstance(error, Exception):
            raise
        raise UsageError(f"what goes to {to} cannot be pickled: {error}") from error
    finally:
        _here.outgoing = before
    if not outgoing.ahead:
        return file.getvalue(), buffers
    first = pickle.dumps([reduced for reduced, _ in outgoing.ahead], 5)
    return b"".join([_AHEAD.pack(0, len(first)), first, file.getvalue()]), buffers


def context_for(to: WorkerInfo) -> bytes:
    """What the contexts send along with a call."""
    if not contexts:
        return b""
    values = {module: context.encode(to) for module, context in contexts.items()}
    values = {module: value for module, value in values.items() if value is not None}
    return pickle.dumps(values) if values else b""


def entered(context: bytes, worker: WorkerInfo) -> AbstractContextManager[None]:
    """Inside of what a call from or to `worker` has brought along."""
    return _all_entered(context, worker) if context else _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _all_entered(context: bytes, worker: WorkerInfo) -> Iterator[None]:
    with ExitStack() as stack:
        for module, value in pickle.loads(context).items():
            if module not in contexts:
                importlib.import_module(module)
            stack.enter_context(contexts[module].enter(value, worker))
        yield


def loads(message: RpcMessage) -> Any:
    """What a message holds; any error that unpickling brings. Only inside of `receiving`."""
    if message.pickled[0]:
        return pickle.loads(message.pickled, buffers=message.buffers)
    before = getattr(_here, "came", None)
    came, rest = _take_ahead(message)
    _here.came = came
    try:
        return pickle.loads(rest, buffers=message.buffers)
    finally:
        _here.came = before


def discard(message: RpcMessage) -> None:
    """Nobody waits for the message: what is ahead of it comes to be, and ends. Only inside of `receiving`."""
    if not message.pickled[0]:
        _take_ahead(message)


def _take_ahead(message: RpcMessage) -> tuple[list[Any], memoryview]:
    """What comes ahead of a message's pickle, and the pickle."""
    view = memoryview(message.pickled)
    end = _AHEAD.size + _AHEAD.unpack_from(view)[1]
    return [function(*args) for function, args in pickle.loads(view[_AHEAD.size : end])], view[end:]


class receiving:
    """Mark that this thread unpickles a message of `worker`. A class: a generator takes 1 us more, twice per call."""

    __slots__ = ("_before", "_worker")

    def __init__(self, worker: WorkerInfo) -> None:
        self._worker = worker

    def __enter__(self) -> None:
        self._before, _here.sender = getattr(_here, "sender", None), self._worker

    def __exit__(self, *_: object) -> None:
        _here.sender = self._before


# ---- bytes -----------------------------------------------------------------------------------------------------


def encode(message: RpcMessage, by_ring: bool = False) -> tuple[bytes, list[memoryview]]:
    """Return a message as bytes, and the large buffers that follow them."""
    kind_of_message, kind, call, pickled, buffers, context = message
    if not buffers and not context:
        return HEADER.pack(len(pickled), call, len(pickled), 0, 0, kind_of_message, kind, 0) + pickled, []
    views = [memoryview(buffer) for buffer in buffers]
    sizes = [view.nbytes for view in views]
    start = [struct.pack(f"<{len(sizes)}Q", *sizes), context, pickled]
    at, inline, behind = sum(map(len, start)), list[Piece](), list[memoryview]()
    for view, nbytes in zip(views, sizes, strict=True):
        if nbytes > INLINE:
            behind.append(view)
        else:
            gap = -at % _ALIGNED
            inline += [bytes(gap), view]
            at += gap + nbytes
    header = HEADER.pack(at, call, len(pickled), len(context), len(sizes), kind_of_message, kind, by_ring)
    return b"".join([header, *start, *inline]), behind


def copied(message: RpcMessage) -> RpcMessage:
    """Return a message of this worker to itself with copies of its buffers, as its receiver gets other objects."""
    return message._replace(buffers=[bytearray(buffer) for buffer in message.buffers])


class Assembler:
    """Messages out of what a connection brings: `space` is where the next bytes go, `came` is told how many there are.

    Small messages come many at a time into one buffer, and are copied out of it. Of a larger one the rest of the body,
    and each large buffer, are received where they stay; `take` fills one from shared memory, of which the message
    before may have told: nothing of a message is looked at before the caller of `came` is done with the one before.
    """

    def __init__(self, take: Callable[[memoryview], None], nbytes: int = 64 << 10) -> None:
        self._take = take
        self._buffer = memoryview(bytearray(nbytes))
        self._start = self._end = 0
        self._steps = self._run()
        self.space = cast(memoryview, next(self._steps))

    def came(self, nbytes: int) -> Iterator[RpcMessage]:
        """So many bytes have come into `space`; the messages that are whole now, all of which are to be taken."""
        found = self._steps.send(nbytes)
        while isinstance(found, RpcMessage):
            yield found
            found = self._steps.send(0)
        self.space = found

    def _run(self) -> Generator[memoryview | RpcMessage, int, None]:
        while True:
            while self._end - self._start < HEADER.size:
                left = self._end - self._start
                if self._start:
                    self._buffer[:left] = bytes(self._buffer[self._start : self._end])
                    self._start, self._end = 0, left
                self._end += yield self._buffer[self._end :]
            nbytes, call, npickled, ncontext, nbuffers, kind_of_message, kind, by_ring = HEADER.unpack_from(
                self._buffer, self._start
            )
            self._start += HEADER.size
            body = memoryview(bytearray(nbytes))
            yield from self._fill(body)
            if not nbuffers and not ncontext:
                yield RpcMessage(_TYPES[kind_of_message], kind, call, body)
                del body  # what was taken is kept nowhere here
                continue
            sizes = struct.unpack_from(f"<{nbuffers}Q", body)
            at = 8 * nbuffers + ncontext
            context, pickled = bytes(body[8 * nbuffers : at]), body[at : at + npickled]
            at, buffers = at + npickled, []
            for size in sizes:
                if size <= INLINE:
                    at += -at % _ALIGNED
                    buffers.append(body[at : at + size])
                    at += size
                else:
                    buffers.append(memoryview(np.empty(size, np.uint8).data))
                    if by_ring:
                        self._take(buffers[-1])
                    else:
                        yield from self._fill(buffers[-1])
            yield RpcMessage(_TYPES[kind_of_message], kind, call, pickled, buffers, context)
            del body, pickled, buffers

    def _fill(self, target: memoryview) -> Generator[memoryview, int, None]:
        """Fill `target`, first with what is in the buffer."""
        here = min(target.nbytes, self._end - self._start)
        target[:here] = self._buffer[self._start : self._start + here]
        self._start += here
        while here < target.nbytes:
            here += yield target[here:]
