"""Send exceptions between workers: the exception is pickled without its traceback, which is sent as text."""

from __future__ import annotations

import traceback

from ..errors import RemoteError, RpcError, message_of
from . import pickling
from .worker_info import WorkerInfo

Packed = tuple[bytes | None, str, str, str]  # the pickle; texts: name of the class, message, traceback


class RemoteTraceback(Exception):
    """The text of a traceback on another worker: the `__cause__` of the exception that the caller gets."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def traceback_text(error: BaseException, worker: WorkerInfo) -> str:
    """Return the traceback of an exception as text, with the name of `worker`, which is this worker."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return f"On {worker}:\n{text}"


def pack(error: BaseException, worker: WorkerInfo) -> Packed:
    """Return what `unpack` needs to build the exception on another worker. `worker` is this worker."""
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    return pickling.pickled_error(error), name, message_of(error), traceback_text(error, worker)


def unpack(worker: WorkerInfo, packed: Packed) -> BaseException:
    """Return the exception of another worker, with its traceback as the cause.

    Raises:
        RpcError: the other worker has not made `packed` by `pack`.
    """
    if type(packed) is not tuple or len(packed) != 4 or not all(isinstance(each, str) for each in packed[1:]):
        raise RpcError(f"worker {worker} answered with {packed!r:.80} in place of an exception")
    pickled, name, message, text = packed
    error = pickling.loaded_error(pickled) if pickled is not None else None
    if error is None:
        fault = (
            "one that cannot be pickled and unpickled"
            if pickled is None
            else "of a class that cannot be built here"
        )
        error = RemoteError(
            f"{name} on worker {worker}: {message}. Original exception on remote side was {fault}"
        )
    error.__cause__ = RemoteTraceback(text)
    return error
