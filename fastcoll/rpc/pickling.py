"""Pickle and unpickle the values in messages, and the contexts that are sent with calls (calls.py).

Reducers (`reduce_type`) get the receiver of the message; unpickling code can ask for the message's sender (`sender`).
The memory of arrays and tensors is not copied into a pickle; it is sent beside the pickle (wire.py).
"""

from __future__ import annotations

import copyreg
import importlib
import io
import pickle
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

from ..errors import NotInitializedError, UsageError, message_of, rebuilt, reduced
from .wire import Buffer, RpcMessage
from .worker_info import WorkerInfo

Reducer = Callable[[Any, WorkerInfo], tuple[Any, ...] | str]
Undo = Callable[[Any], None]


class CallContext(Protocol):
    """A value that is sent with calls of user functions: see calls.py."""

    def encode(self, to: WorkerInfo) -> bytes | None: ...

    def enter(self, value: bytes, sender: WorkerInfo) -> AbstractContextManager[Any]: ...


contexts: dict[str, CallContext] = {}
"""The contexts, by module name. A module adds its context on import; a worker that gets a value imports the module."""


_reducers: dict[type, tuple[Reducer, Undo | None]] = {}
_this_thread = threading.local()
UNREADABLE = (pickle.UnpicklingError, EOFError, UnicodeDecodeError, struct.error)
"""What `loads` and `discard` raise for bytes that are not a pickle; the code that a pickle runs may raise anything."""

_PREFIX = struct.Struct("<BI")  # a zero, which no pickle begins with, and the length of the prefix


def reduce_type(cls: type, reducer: Reducer, undo: Undo | None = None) -> None:
    """Pickle instances of `cls` and its subclasses by `reducer(value, to)`, in messages to worker `to`.

    The reducer returns a reduce tuple, like `__reduce__`. With `undo`, instances are sent in a prefix of the pickle.
    The receiver unpickles the prefix even if it cannot unpickle the rest, or if the call has timed out. If the message
    cannot be pickled, `undo(reduced)` is called for each instance that was reduced before the error.
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
    """Return a dictionary in which reducers keep notes on the message that this thread is pickling."""
    notes: dict[Any, Any] = _this_thread.outgoing.notes
    return notes


class _Table(dict[type, Callable[[Any], Any]]):
    """A pickler's dispatch table that also finds the reducers of base classes."""

    def __missing__(self, cls: type) -> Callable[[Any], Any]:
        if issubclass(cls, type):
            raise KeyError(cls)  # `cls` is a metaclass: its instances, which are classes, are pickled by name
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
        except BufferError:  # the buffer is not contiguous: it becomes a part of the pickle
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
        raise UsageError(f"the message to {to} cannot be pickled: {message_of(error)}") from error
    finally:
        _this_thread.outgoing = before
    if not outgoing.prefix:
        return file.getvalue(), buffers
    first = pickle.dumps([reduced for reduced, _ in outgoing.prefix], 5)
    return b"".join([_PREFIX.pack(0, len(first)), first, file.getvalue()]), buffers


def context_for(to: WorkerInfo) -> bytes:
    """Return the pickled values of all contexts for a call to a worker; empty if no context has a value."""
    if not contexts:
        return b""
    # Iterate over a copy: another thread may import a module that adds its context.
    values = {module: context.encode(to) for module, context in list(contexts.items())}
    values = {module: value for module, value in values.items() if value is not None}
    return pickle.dumps(values) if values else b""


def entered(context: bytes, worker: WorkerInfo) -> AbstractContextManager[None]:
    """Return a context manager that enters the contexts of a call from or to `worker`."""
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
    """Unpickle a message; raise whatever unpickling raises. The caller is inside `receiving`."""
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
    """Unpickle and drop the prefix of a message for which no call waits. The caller is inside `receiving`."""
    if not message.pickled[0]:
        _load_prefix(message)


def _load_prefix(message: RpcMessage) -> tuple[list[Any], memoryview]:
    """Unpickle the prefix of a message; return its objects, and the pickle that follows the prefix."""
    view = memoryview(message.pickled)
    end = _PREFIX.size + _PREFIX.unpack_from(view)[1]
    return [function(*args) for function, args in pickle.loads(view[_PREFIX.size : end])], view[end:]


class receiving:
    """Make `sender` return `worker` while this thread unpickles a message.

    This is a class because a context manager made from a generator takes 1 us more, and a call enters two of them.
    """

    __slots__ = ("_before", "_worker")

    def __init__(self, worker: WorkerInfo) -> None:
        self._worker = worker

    def __enter__(self) -> None:
        self._before, _this_thread.sender = getattr(_this_thread, "sender", None), self._worker

    def __exit__(self, *_: object) -> None:
        _this_thread.sender = self._before


class _ErrorPickler(pickle.Pickler):
    """Pickles exceptions, also those inside others, in a way that builds them without their constructors."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, BaseException) and (found := reduced(value)) is not None:
            return rebuilt, found
        return NotImplemented


def pickled_error(error: BaseException) -> bytes | None:
    """Return the pickle of an exception, without its traceback; None if it cannot be pickled and unpickled."""
    file = io.BytesIO()
    try:
        _ErrorPickler(file, 5).dump(error)
        pickle.loads(file.getvalue())
    except Exception:
        return None
    return file.getvalue()


def loaded_error(pickled: bytes) -> BaseException | None:
    """Return the exception that another worker has pickled; None if this process lacks its class."""
    try:
        error = pickle.loads(pickled)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
