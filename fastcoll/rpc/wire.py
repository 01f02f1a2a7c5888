"""The format of messages between workers: a pickle, and beside it the memory of arrays and tensors.

    offset  bytes  field (little-endian)
    0       8      length of the body
    8       8      number of the call, counted by the caller
    16      8      length of the pickle
    24      4      length of the context
    28      4      number of buffers
    32      1      MessageType
    33      1      kind of the call
    34      1      1 if large buffers are sent through shared memory (slots.py), else 0
    35      5      zero

The body is a table of buffer lengths (8 bytes each), the context (pickling.py), the pickle, and the small buffers. Each
small buffer begins at a multiple of 64 bytes from the body's start. Buffers of more than INLINE bytes follow the body,
in order.

A peer's bytes are checked before they are used, and no length of a header causes memory to be written, so a broken peer
costs its connection only.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import cast

import numpy as np

HEADER = struct.Struct("<QQQIIBBB5x")
INLINE = 16 << 10  # bytes; larger buffers follow the body
_ALIGNED = 64
Buffer = bytes | bytearray | memoryview


class MessageType(IntEnum):
    """The types of messages."""

    CALL = 1
    NOTIFY = 2  # a call without an answer
    RESULT = 3
    RAISED = 4  # the call raised an exception
    GOODBYE = 5  # the last message of a connection: the exit reason
    RING = 6  # an offer of shared memory, or the answer to one


_TYPES = {each.value: each for each in MessageType}
_NO_SPACE = memoryview(b"")
_WITHOUT_PICKLE = (MessageType.GOODBYE, MessageType.RING)


class MessageError(ValueError):
    """The peer's bytes violate the format; its connection is closed."""


@dataclass(slots=True)  # takes 0.28 us to build, a NamedTuple 0.42 us
class RpcMessage:
    """A message before it is sent, or after it was received and before it is unpickled."""

    type: MessageType
    kind: int  # the kind of the call (`Agent.on`)
    call: int  # the number of the call
    pickled: Buffer
    buffers: Sequence[Buffer] = ()
    context: bytes = b""


def encode(message: RpcMessage, by_ring: bool = False) -> tuple[bytes, list[memoryview]]:
    """Return a message as bytes, and the large buffers that follow them."""
    pickled, buffers, context = message.pickled, message.buffers, message.context
    if not buffers and not context:
        nbytes = len(pickled)
        return HEADER.pack(nbytes, message.call, nbytes, 0, 0, message.type, message.kind, 0) + pickled, []
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
    header = HEADER.pack(
        at, message.call, len(pickled), len(context), len(sizes), message.type, message.kind, by_ring
    )
    return b"".join([header, *start, *inline]), large


def copied(message: RpcMessage) -> RpcMessage:
    """Return a copy of a message that this worker sends to itself.

    The buffers are copied, too, because the receiver of a message owns the buffers and may write to them.
    """
    return replace(message, buffers=[bytearray(buffer) for buffer in message.buffers])


class Assembler:
    """Parse received bytes into messages.

    The link writes received bytes into `space`, and then calls `add` with the number of these bytes. Most bytes are
    received into one buffer, out of which messages are copied. If this buffer holds only a part of a message body, the
    rest of the body is received directly into the body's own memory. Each large buffer of a message is also received
    directly into its own memory, unless `take` fills it from shared memory. A message is not parsed until the caller
    has consumed the previous one, because the previous one may set up the shared memory that the message needs.

    `take(buffer)` yields while it waits for data in shared memory. Then `space` is empty, and `add(0)` continues.
    """

    def __init__(self, take: Callable[[memoryview], Iterator[None]], nbytes: int = 64 << 10) -> None:
        self._take = take
        self._buffer = memoryview(bytearray(nbytes))
        self._start = self._end = 0
        self._steps = self._run()
        self.space = cast(memoryview, next(self._steps))

    def add(self, nbytes: int) -> Iterator[RpcMessage]:
        """Parse `nbytes` new bytes in `space`; yield the complete messages. The caller consumes all of them."""
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
            type = _checked_type(message_type, nbytes, npickled, 8 * nbuffers + ncontext)
            body = _memory(nbytes)
            yield from self._fill(body)
            if not nbuffers and not ncontext:
                yield RpcMessage(type, kind, call, body)
                del body  # else this generator would keep a consumed message alive
                continue
            sizes = struct.unpack_from(f"<{nbuffers}Q", body)
            at = 8 * nbuffers + ncontext
            context, pickled = bytes(body[8 * nbuffers : at]), body[at : at + npickled]
            at, buffers = at + npickled, []
            _check_sizes(sizes, at, nbytes)
            for size in sizes:
                if size <= INLINE:
                    at += -at % _ALIGNED
                    buffers.append(body[at : at + size])
                    at += size
                else:
                    buffers.append(_memory(size))
                    if by_ring:
                        for _ in self._take(buffers[-1]):
                            yield _NO_SPACE
                    else:
                        yield from self._fill(buffers[-1])
            yield RpcMessage(type, kind, call, pickled, buffers, context)
            del body, pickled, buffers

    def _fill(self, target: memoryview) -> Generator[memoryview, int, None]:
        """Fill `target`, first with bytes that were received already."""
        filled = min(target.nbytes, self._end - self._start)
        target[:filled] = self._buffer[self._start : self._start + filled]
        self._start += filled
        while filled < target.nbytes:
            filled += yield target[filled:]


def _checked_type(code: int, nbytes: int, npickled: int, nothers: int) -> MessageType:
    """Return the type of a message whose body has `nbytes`, of which `nothers` are ahead of the pickle."""
    type = _TYPES.get(code)
    if type is None:
        raise MessageError(f"there is no message type {code}")
    # Without buffers nothing follows the pickle.
    if nothers + npickled > nbytes or (not nothers and npickled != nbytes):
        raise MessageError(
            f"a body of {nbytes} bytes has a pickle of {npickled} bytes behind {nothers} others"
        )
    if not npickled and type not in _WITHOUT_PICKLE:
        raise MessageError(f"a message of type {type.name} has no pickle")
    return type


def _check_sizes(sizes: Sequence[int], at: int, nbytes: int) -> None:
    """Check that the small buffers, which begin behind `at`, end where the body of `nbytes` ends."""
    for size in sizes:
        if size <= INLINE:
            at += -at % _ALIGNED + size
    if at != nbytes:
        raise MessageError(f"the parts of a body of {nbytes} bytes have {at} bytes")


def _memory(nbytes: int) -> memoryview:
    """Return memory for bytes to come.

    Large memory is not written here: the kernel provides each page when its first bytes arrive. So a wrong length takes
    address space only.
    """
    try:
        return memoryview(bytearray(nbytes) if nbytes <= INLINE else np.empty(nbytes, np.uint8).data)
    except (MemoryError, OverflowError, ValueError) as error:
        raise MessageError(f"{nbytes} bytes are announced, for which there is no memory") from error
