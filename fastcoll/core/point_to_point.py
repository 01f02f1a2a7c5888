"""The methods of a group for messages. They check the arguments, and pass the message to the backend or DeviceCarrier.

Messages do not use the gate (gate.py), since they are independent of the group's collective calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..arrays.arrays import ImportedArray
from ..errors import UsageError
from .backend import Backend, Messages
from .message import Status
from .operands import OBJECTS_TAG, Array, checked_receive_tag, checked_tag
from .request import Request
from .work import Work


class PointToPoint:
    """The messages of one group. Ranks are group ranks.

    Args:
        checked_rank: the group's method of this name.
        import_array: the group's method of this name.
        device_messages: returns the Messages object for arrays on GPUs.
    """

    def __init__(
        self,
        backend: Backend,
        checked_rank: Callable[[str, Any], int],
        import_array: Callable[..., ImportedArray],
        device_messages: Callable[[], Messages],
    ) -> None:
        self._backend, self._gate, self._messages = backend, backend.gate, backend.messages
        self._checked_rank, self._import_array = checked_rank, import_array
        self._device_messages = device_messages

    def send(self, tensor: Any, dst: int, tag: int) -> None:
        """See ProcessGroup."""
        dst = self._checked_rank("dst", dst)
        x, messages = self._prepared(tensor, writable=False)
        messages.send(x, dst, checked_tag(tag))

    def recv(self, tensor: Any, src: int | None, tag: int, status: Status | None) -> int:
        """See ProcessGroup."""
        src = self._checked_source(src)
        x, messages = self._prepared(tensor, writable=True)
        return messages.recv(x, src, checked_receive_tag(tag), _checked_status(status))

    def isend(self, tensor: Any, dst: int, tag: int) -> Work:
        """See ProcessGroup."""
        return self.ready_isend(tensor, self._checked_rank("dst", dst), tag)()

    def irecv(self, tensor: Any, src: int | None, tag: int, status: Status | None) -> Work:
        """See ProcessGroup."""
        return self.ready_irecv(tensor, self._checked_source(src), tag, status)()

    def ready_isend(self, tensor: Any, dst: int, tag: int) -> Callable[[], Work]:
        """Check the arguments of `isend`, and return a function that posts it. `dst` is already checked."""
        x, messages = self._prepared(tensor, writable=False)
        post = self.post_send if messages is self._messages else messages.isend
        return partial(post, x, dst, checked_tag(tag))

    def ready_irecv(
        self, tensor: Any, src: int | None, tag: int, status: Status | None = None
    ) -> Callable[[], Work]:
        """Check the arguments of `irecv`, and return a function that posts it. `src` is already checked."""
        x, messages = self._prepared(tensor, writable=True)
        post = self.post_receive if messages is self._messages else messages.irecv
        return partial(post, x, src, checked_receive_tag(tag), _checked_status(status))

    def send_init(self, tensor: Any, dst: int, tag: int) -> Request:
        """See ProcessGroup."""
        self.ready_isend(tensor, self._checked_rank("dst", dst), tag)  # checks the arguments
        return Request(partial(self.isend, tensor, dst, tag))

    def recv_init(self, tensor: Any, src: int | None, tag: int, status: Status | None) -> Request:
        """See ProcessGroup."""
        self.ready_irecv(tensor, self._checked_source(src), tag, status)
        return Request(partial(self.irecv, tensor, src, tag, status))

    def probe(self, src: int | None, tag: int) -> Status:
        """See ProcessGroup."""
        return self._messages.probe(*self._sought(src, tag))

    def iprobe(self, src: int | None, tag: int) -> Status | None:
        """See ProcessGroup."""
        return self._messages.iprobe(*self._sought(src, tag))

    # ---- imported arrays ---------------------------------------------------------------------------

    def post_send(self, x: ImportedArray, dst: int, tag: int) -> Work:
        """Post a send of an imported host array."""
        self._backend.learn(x.array.dtype)
        return self._gate.unobserved.note(self._messages.isend(x, dst, tag))

    def post_receive(self, x: ImportedArray, src: int | None, tag: int, status: Status | None = None) -> Work:
        """Post a receive into an imported host array."""
        self._backend.learn(x.array.dtype)
        return self._gate.unobserved.note(self._messages.irecv(x, src, tag, status))

    def send_objects(self, data: Array, dst: int) -> None:
        """Send an array with the bytes, or the sizes, of pickled objects. Only `recv_objects` receives it."""
        self.send_apart(data, self._checked_rank("dst", dst), OBJECTS_TAG)

    def recv_objects(self, data: Array, src: int | None) -> int:
        """Receive what `send_objects` sends; return the sender's rank."""
        return self.recv_apart(data, self._checked_source(src), OBJECTS_TAG)

    def send_apart(self, x: Array, dst: int, tag: int) -> None:
        """Send a plain array with a tag that users cannot use, such as JAX_TAGS + 5. `dst` is already checked."""
        self._gate.check_usable()
        self._messages.send(ImportedArray(x), dst, tag)

    def recv_apart(self, x: Array, src: int | None, tag: int, status: Status | None = None) -> int:
        """Receive a message of `send_apart`; return the sender's rank."""
        self._gate.check_usable()
        return self._messages.recv(ImportedArray(x), src, tag, status)

    # ---- arguments ---------------------------------------------------------------------------------

    def _prepared(self, tensor: Any, *, writable: bool) -> tuple[ImportedArray, Messages]:
        """Import the array of a message, and find the Messages object that carries the message out."""
        self._gate.check_usable()
        x = self._import_array(tensor, writable=writable)
        if type(x.array) is not np.ndarray:
            return x, self._device_messages()
        self._backend.learn(x.array.dtype)
        return x, self._messages

    def _checked_source(self, src: int | None) -> int | None:
        return None if src is None else self._checked_rank("src", src)

    def _sought(self, src: int | None, tag: int) -> tuple[int | None, int]:
        self._gate.check_usable()
        return self._checked_source(src), checked_receive_tag(tag)


def _checked_status(status: Any) -> Status | None:
    if status is not None and not isinstance(status, Status):
        raise UsageError(f"status is of type {type(status).__name__}; give a Status(), which is filled")
    return status
