"""All exceptions that fastcoll raises on purpose, as one tree.

    FastcollError(RuntimeError)
    ├── UsageError(ValueError)            the call was wrong; nothing moved, the group stays usable
    │   ├── ArrayError(TypeError)         an array or dtype that cannot be used as it is
    │   ├── ArgumentTypeError(TypeError)  an argument has the wrong type
    │   ├── MismatchError                 the ranks' calls do not match
    │   ├── NotInitializedError           no process group, or one that was destroyed
    │   └── UnavailableError              a backend or extra that is not available, with the cure
    ├── RendezvousError                   the ranks could not find one another
    │   └── StoreError                    a store refused, or its server is gone
    │       ├── StoreTimeoutError(TimeoutError)
    │       └── QueueEmptyError           a store's queue is empty
    ├── ResourceError(OSError)            the machine lacks a resource (shared memory, ports)
    ├── RpcError                          a remote call failed; other calls are not affected
    │   ├── RpcTimeoutError(TimeoutError)     the call was not answered in time
    │   └── RemoteError                       an exception of another worker that cannot be pickled or built here
    └── GroupError                        the group has failed, permanently
        ├── PeerDiedError                 a rank's process ended
        ├── CollectiveTimeoutError(TimeoutError)  a rank did not arrive in time
        └── AbortedError                  the group was aborted or destroyed during the call

UsageError is a branch of its own, because the program may go on after a wrong call. DistError and torch's other names
are aliases of these classes.

The traceback of an uncaught error is printed without the frames of this package (`shorten`).
"""

from __future__ import annotations

import copyreg
import functools
import os
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)
_PACKAGE = os.path.dirname(__file__) + os.sep


def _timed_out(message: str) -> str:
    """Return the message with the words "timed out", because torch's messages have them, and programs match on them."""
    return message if "timed out" in message else f"timed out: {message}"


def install(extra: str) -> str:
    """Return how to install an extra from the sources: fastcoll is on no package index."""
    return f"pip install '.[{extra}]' in the folder of fastcoll's sources"


class FastcollError(RuntimeError):
    """Base of all errors of this library."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        _shorten_what_is_printed()


class UsageError(FastcollError, ValueError):
    """The call was wrong; no data moved and the group stays usable."""


class ArrayError(UsageError, TypeError):
    """The kind, dtype, layout or permission of an array is not supported."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument has the wrong type."""


class MismatchError(UsageError):
    """The ranks' calls do not match, or another rank refused its call; raised on every rank before data moves."""


class NotInitializedError(UsageError):
    """There is no process group, or the group of the call was destroyed."""


class UnavailableError(UsageError):
    """A backend, extra or feature that is not available here; the message has the cure."""


class RendezvousError(FastcollError):
    """The ranks could not find one another."""


class StoreError(RendezvousError):
    """A store refused an operation, or its server is gone."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A key was not set in time."""

    def __init__(self, message: str) -> None:
        super().__init__(_timed_out(message))


class QueueEmptyError(StoreError):
    """A store's queue is empty."""


class ResourceError(FastcollError, OSError):
    """The machine lacks a resource."""


class RpcError(FastcollError):
    """A remote call failed; other calls are not affected."""


class RpcTimeoutError(RpcError, TimeoutError):
    """A remote call was not answered in time; the other worker goes on with the call, and the answer is dropped."""

    def __init__(self, message: str) -> None:
        super().__init__(_timed_out(message))


class RemoteError(RpcError):
    """A remote call raised an exception that cannot be pickled or built here; `__cause__` has the remote traceback."""


class GroupError(FastcollError):
    """The group has failed; every later call on it raises this error again.

    Attributes:
        ranks: the global ranks at fault, if known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class PeerDiedError(GroupError):
    """The process of a rank ended while the group needed it."""


class CollectiveTimeoutError(GroupError, TimeoutError):
    """A rank did not arrive within the timeout."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(_timed_out(message), ranks)


class AbortedError(GroupError):
    """The group was aborted, interrupted or destroyed during the call."""


def follows(error: BaseException | None) -> bool:
    """Return whether an error is the consequence of another rank's failure.

    It is if the error is a GroupError, or has one as a cause, as a context, or as a member of an ExceptionGroup.
    """
    pending, seen = [error], set[int]()
    while pending:
        one = pending.pop()
        if isinstance(one, GroupError):
            return True
        if isinstance(one, BaseException) and id(one) not in seen:
            seen.add(id(one))
            members = getattr(one, "exceptions", ())  # Python 3.10 has no ExceptionGroup, but a package has
            pending += [one.__cause__, one.__context__, *(members if isinstance(members, tuple) else ())]
    return False


def shorten(error: BaseException) -> None:
    """Remove this package's frames from the tracebacks of a FastcollError and of its causes.

    A cause all of whose frames are in this package is removed, because the text of the error repeats it. The traceback
    of a FastcollError that is the cause of another error (`raise Mine from error`) is shortened as well.
    FASTCOLL_DEBUG=1 keeps all frames.
    """
    if os.environ.get("FASTCOLL_DEBUG") == "1":
        return
    ours, later, seen = False, error, set[int]()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:  # each of two errors may be the cause of the other
        seen.add(id(one))
        ours = ours or isinstance(one, FastcollError)
        if ours:
            rest = _others(one.__traceback__)
            if rest is not None:
                one.__traceback__ = rest
            elif one is not error:
                later.__cause__ = None
                return
        later, one = one, one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def message_of(error: BaseException) -> str:
    """Return the text of an exception of the user's program, whose `__str__` may raise another one."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"  # Python's words in a traceback


def encodable(text: str) -> str:
    """Escape what UTF-8 cannot encode: the surrogates that Python puts into file names that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def reduced(error: BaseException) -> tuple[Any, ...] | None:
    """Return the arguments with which `rebuilt` copies an exception; None if its class defines its own pickling.

    Python pickles and copies an exception by a call of its class with `args`. If the class's constructor makes the
    message itself, or has other parameters than `args`, that changes the message or fails.
    """
    cls = type(error)
    is_builtin = cls.__reduce__ is _builtin(cls).__reduce__ and cls.__reduce_ex__ is object.__reduce_ex__
    if (
        not is_builtin
        or cls in copyreg.dispatch_table
        or any("__slots__" in vars(base) for base in cls.__mro__)
    ):
        return None  # only the constructor sets slots
    made: Any = error.__reduce__()
    return cls, *made[1:]


def rebuilt(cls: type[E], args: tuple[Any, ...], state: Any = None) -> E:
    """Build an exception from what `reduced` returned, without the constructor that its class may define."""
    base = _builtin(cls)
    error: E = base.__new__(cls, *args)
    base.__init__(error, *args)
    if state:
        error.__setstate__(state)
    if isinstance(error, FastcollError):
        _shorten_what_is_printed()
    return error


def _builtin(cls: Any) -> Any:
    """Return the class of Python's own that defines the memory layout of the instances of an exception class."""
    while cls.__module__ != "builtins":
        cls = cls.__base__
    return cls


def _others(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the entries of this package; None if no other entries are left."""
    entries = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            entries.append(trace)
        trace = trace.tb_next
    following = None
    for entry in reversed(entries):
        entry.tb_next, following = following, entry
    return following


@functools.cache
def _shorten_what_is_printed() -> None:
    """Have Python's hooks for uncaught errors shorten a traceback before they print it.

    The first FastcollError that is created calls this, so an import of the package does not change the hooks.
    """
    print_uncaught, print_of_thread = sys.excepthook, threading.excepthook

    def on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        shorten(error)
        return print_uncaught(kind, error, error.__traceback__ or trace)

    def on_thread(args: threading.ExceptHookArgs) -> Any:
        if args.exc_value is not None:
            shorten(args.exc_value)
        return print_of_thread(args)

    sys.excepthook, threading.excepthook = on_uncaught, on_thread


DistError = FastcollError
DistBackendError = GroupError
DistNetworkError = RendezvousError
DistStoreError = StoreError
