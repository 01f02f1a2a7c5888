"""Messages between workers as bytes: a pickle, and the memory of arrays and tensors beside it.

    offset  bytes  field (little-endian)
    0       8      length of the body
    8       8      number of the call; the caller counts its calls
    16      8      length of the pickle
    24      4      length of the context
    28      4      number of buffers
    32      1      MessageType
    33      1      kind of the call
    34      1      1: large buffers are sent through shared memory (slots.py)
    35      5      zero

The body is a table of buffer lengths (8 bytes each), the context, the pickle, and the small buffers, each at a multiple
of 64. Buffers of more than INLINE bytes follow the body, in order. Unpickling code can ask for the sender (`sender`);
reducers get the receiver (`reduce_type`).
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
INLINE = 16 << 10  # bytes; larger buffers follow the body
_ALIGNED = 64
Buffer = bytes | bytearray | memoryview
Reducer = Callable[[Any, WorkerInfo], tuple[Any, ...] | str]
Undo = Callable[[Any], None]


class MessageType(IntEnum):
    """The types of messages."""

    CALL = 1
    NOTIFY = 2  # a call without an answer
    RESULT = 3
    RAISED = 4  # the call raised an exception
    GOODBYE = 5  # the last message of a connection: the exit reason
    RING = 6  # an offer of shared memory, and its answer


_TYPES = {each.value: each for each in MessageType}


class CallContext(Protocol):
    """A value that is sent with calls of user functions: see calls.py."""

    def encode(self, to: WorkerInfo) -> bytes | None: ...

    def enter(self, value: bytes, sender: WorkerInfo) -> AbstractContextManager[Any]: ...


class RpcMessage(NamedTuple):
    """A message before it is sent, or after it was received and before it is unpickled."""

    type: MessageType
    kind: int  # of the call
    call: int  # its number
    pickled: Buffer
    buffers: Sequence[Buffer] = ()
    context: bytes = b""


contexts: dict[str, CallContext] = {}
"""The contexts by module. A module adds its own on import; a worker that receives its value imports the module."""


# ---- pickling ------------------------------------------------------------------------------------------------

_reducers: dict[type, tuple[Reducer, Undo | None]] = {}
_this_thread = threading.local()
_PREFIX = struct.Struct("<BI")  # a zero, which no pickle begins with, and the length of the prefix


def reduce_type(cls: type, reducer: Reducer, undo: Undo | None = None) -> None:
    """Pickle instances of `cls` and its subclasses, in messages to `to`, by the reduce tuple `reducer(value, to)`.

    With `undo`, instances are sent in a prefix that is unpickled even if the rest fails or arrives after the timeout.
    `undo(reduced)` is called for each of them if the message cannot be pickled.
    """
    _reducers[cls] = reducer, undo
    _table.clear()


def sender() -> WorkerInfo:
    """Return the worker that sent the message that this thread is unpickling."""
    found: WorkerInfo | None = getattr(_this_thread, "sender", None)
    if found is None:
        raise NotInitializedError("no message is being unpickled on this thread")
    return found


class SharedBuffer:
    """Memory that several objects of a message share; it is sent once, beside the pickle."""

    __slots__ = ("_buffer",)

    def __init__(self, buffer: pickle.PickleBuffer) -> None:
        self._buffer = buffer

    def __reduce__(self) -> Any:
        return _shared_buffer, (self._buffer,)


def _shared_buffer(buffer: Buffer) -> Buffer:
    return buffer


def in_message() -> dict[Any, Any]:
    """Return the notes that reducers keep for the message that this thread is pickling."""
    notes: dict[Any, Any] = _this_thread.outgoing.notes
    return notes


class _Table(dict[type, Callable[[Any], Any]]):
    """A pickler's dispatch table that also finds the reducers of base classes."""

    def __missing__(self, cls: type) -> Callable[[Any], Any]:
        if issubclass(cls, type):
            raise KeyError(cls)  # a class, whose type is a metaclass, is pickled by name
        for base in cls.__mro__:
            if (base.__module__, base.__qualname__) == ("torch", "Tensor"):
                importlib.import_module("fastcoll.rpc.tensor_buffers")
            if base in _reducers:
                self[cls] = found = partial(_for_receiver, *_reducers[base])
                return found
        return copyreg.dispatch_table.get(cls, _default_reduce)


class _Outgoing:
    """A message that is being pickled."""

    __slots__ = ("notes", "prefix", "receiver")

    def __init__(self, receiver: WorkerInfo) -> None:
        self.receiver = receiver
        self.prefix: list[tuple[Any, Undo]] = []
        self.notes: dict[Any, Any] = {}


def _for_receiver(reducer: Reducer, undo: Undo | None, value: Any) -> Any:
    outgoing: _Outgoing = _this_thread.outgoing
    reduced = reducer(value, outgoing.receiver)
    if undo is None:
        return reduced
    outgoing.prefix.append((reduced, undo))
    return _from_prefix, (len(outgoing.prefix) - 1,)


def _from_prefix(index: int) -> Any:
    return _this_thread.loaded_prefix[index]


def _default_reduce(value: Any) -> Any:
    return value.__reduce_ex__(5)


_table = _Table()


def dumps(value: Any, to: WorkerInfo) -> tuple[bytes, list[memoryview]]:
    """Return the pickle of a value, and the buffers beside it.

    Raises:
        UsageError: the value cannot be pickled.
    """
    file, buffers = io.BytesIO(), []

    def keep_beside(buffer: pickle.PickleBuffer) -> bool:
        try:
            buffers.append(buffer.raw())
        except BufferError:  # not contiguous
            return True
        return False

    pickler = pickle.Pickler(file, 5, buffer_callback=keep_beside)
    pickler.dispatch_table = _table
    before = getattr(_this_thread, "outgoing", None)
    _this_thread.outgoing = outgoing = _Outgoing(to)
    try:
        pickler.dump(value)
    except BaseException as error:
        for reduced, undo in outgoing.prefix:
            undo(reduced)
        if isinstance(error, UsageError) or not isinstance(error, Exception):
            raise
        raise UsageError(f"the message to {to} cannot be pickled: {error}") from error
    finally:
        _this_thread.outgoing = before
    if not outgoing.prefix:
        return file.getvalue(), buffers
    first = pickle.dumps([reduced for reduced, _ in outgoing.prefix], 5)
    return b"".join([_PREFIX.pack(0, len(first)), first, file.getvalue()]), buffers


def context_for(to: WorkerInfo) -> bytes:
    """Return the values of all contexts for a call to a worker."""
    if not contexts:
        return b""
    values = {module: context.encode(to) for module, context in contexts.items()}
    values = {module: value for module, value in values.items() if value is not None}
    return pickle.dumps(values) if values else b""


def entered(context: bytes, worker: WorkerInfo) -> AbstractContextManager[None]:
    """Enter the contexts of a call from or to `worker`."""
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
    """Unpickle a message; raises whatever unpickling raises. Only inside `receiving`."""
    if message.pickled[0]:
        return pickle.loads(message.pickled, buffers=message.buffers)
    before = getattr(_this_thread, "loaded_prefix", None)
    prefix, rest = _load_prefix(message)
    _this_thread.loaded_prefix = prefix
    try:
        return pickle.loads(rest, buffers=message.buffers)
    finally:
        _this_thread.loaded_prefix = before


def discard(message: RpcMessage) -> None:
    """Unpickle and drop the prefix of a message that no call waits for. Only inside `receiving`."""
    if not message.pickled[0]:
        _load_prefix(message)


def _load_prefix(message: RpcMessage) -> tuple[list[Any], memoryview]:
    """Unpickle the prefix of a message; return its objects, and the pickle behind it."""
    view = memoryview(message.pickled)
    end = _PREFIX.size + _PREFIX.unpack_from(view)[1]
    return [function(*args) for function, args in pickle.loads(view[_PREFIX.size : end])], view[end:]


class receiving:
    """Set `sender` while this thread unpickles. A class, because a generator takes 1 us more, twice per call."""

    __slots__ = ("_before", "_worker")

    def __init__(self, worker: WorkerInfo) -> None:
        self._worker = worker

    def __enter__(self) -> None:
        self._before, _this_thread.sender = getattr(_this_thread, "sender", None), self._worker

    def __exit__(self, *_: object) -> None:
        _this_thread.sender = self._before


def pickled_error(error: BaseException) -> bytes | None:
    """Return the pickle of an exception, without its traceback; None if it cannot be unpickled."""
    try:
        data = pickle.dumps(error, 5)
        pickle.loads(data)
    except Exception:
        return None
    return data


def loaded_error(pickled: bytes) -> BaseException | None:
    """Return the exception that another worker has pickled; None if this process lacks its class."""
    try:
        error = pickle.loads(pickled)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


# ---- bytes -----------------------------------------------------------------------------------------------------


def encode(message: RpcMessage, by_ring: bool = False) -> tuple[bytes, list[memoryview]]:
    """Return a message as bytes, and the large buffers that follow them."""
    message_type, kind, call, pickled, buffers, context = message
    if not buffers and not context:
        return HEADER.pack(len(pickled), call, len(pickled), 0, 0, message_type, kind, 0) + pickled, []
    views = [memoryview(buffer) for buffer in buffers]
    sizes = [view.nbytes for view in views]
    start = [struct.pack(f"<{len(sizes)}Q", *sizes), context, pickled]
    at, inline, large = sum(map(len, start)), list[Buffer](), list[memoryview]()
    for view, nbytes in zip(views, sizes, strict=True):
        if nbytes > INLINE:
            large.append(view)
        else:
            gap = -at % _ALIGNED
            inline += [bytes(gap), view]
            at += gap + nbytes
    header = HEADER.pack(at, call, len(pickled), len(context), len(sizes), message_type, kind, by_ring)
    return b"".join([header, *start, *inline]), large


def copied(message: RpcMessage) -> RpcMessage:
    """Return a message of this worker to itself with copies of its buffers, as its receiver gets other objects."""
    return message._replace(buffers=[bytearray(buffer) for buffer in message.buffers])


class Assembler:
    """Makes messages of received bytes: the connection writes into `space`, then calls `add` with their number.

    Many small messages may be received into one buffer, and are copied out of it. The rest of a larger body, and each
    large buffer, are received at their final address. `take` fills a buffer from shared memory. A message is not parsed
    until the caller has consumed the previous one, because that one may have announced the shared memory.
    """

    def __init__(self, take: Callable[[memoryview], None], nbytes: int = 64 << 10) -> None:
        self._take = take
        self._buffer = memoryview(bytearray(nbytes))
        self._start = self._end = 0
        self._steps = self._run()
        self.space = cast(memoryview, next(self._steps))

    def add(self, nbytes: int) -> Iterator[RpcMessage]:
        """Parse `nbytes` new bytes in `space`; yields the complete messages. The caller consumes all of them."""
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
            nbytes, call, npickled, ncontext, nbuffers, message_type, kind, by_ring = HEADER.unpack_from(
                self._buffer, self._start
            )
            self._start += HEADER.size
            body = memoryview(bytearray(nbytes))
            yield from self._fill(body)
            if not nbuffers and not ncontext:
                yield RpcMessage(_TYPES[message_type], kind, call, body)
                del body  # nothing here refers to a consumed message
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
            yield RpcMessage(_TYPES[message_type], kind, call, pickled, buffers, context)
            del body, pickled, buffers

    def _fill(self, target: memoryview) -> Generator[memoryview, int, None]:
        """Fill `target`, first with bytes that were received already."""
        filled = min(target.nbytes, self._end - self._start)
        target[:filled] = self._buffer[self._start : self._start + filled]
        self._start += filled
        while filled < target.nbytes:
            filled += yield target[filled:]
