"""Nonblocking sockets in kernels: libc's send, sendmsg, recv and poll by file descriptor.

A transfer returns the number of bytes that it has moved, 0 if the socket is not ready, or a negative number if the
connection has ended: -errno, or CLOSED if the peer closed it in order.
"""

from __future__ import annotations

import errno

from ..compiler.jit import external, inlined, kernel
from .primitives import half_word_at, store_word

CLOSED = -(1 << 20)  # below every -errno

READABLE, WRITABLE = 0x1, 0x4  # POLLIN, POLLOUT

# ENOBUFS and ENOMEM: the kernel is short of memory.
_NOT_NOW = (errno.EAGAIN, errno.EINTR, errno.ENOBUFS, errno.ENOMEM)
_FLAGS = 0x4040  # MSG_DONTWAIT | MSG_NOSIGNAL

# The argument `vector` of `send_both`: a msghdr, of which words 2 and 3 are set, and from word 7 on two iovecs.
_VECTORS, _COUNT, _FIRST = 2, 3, 7
VECTOR_BYTES = 8 * (_FIRST + 4)

_send = external("send", "int64(int32, int64, int64, int32)")
_sendmsg = external("sendmsg", "int64(int32, int64, int32)")
_recv = external("recv", "int64(int32, int64, int64, int32)")
_poll = external("poll", "int32(int64, int64, int32)")
_errno_location = external("__errno_location", "int64()")


@kernel
def failure():
    """Return the meaning of a transfer's -1: 0 to retry later, else -errno."""
    number = half_word_at(_errno_location())
    for later in _NOT_NOW:
        if number == later:
            return 0
    return -number


@inlined
def send_some(fd, address, nbytes):
    """Send up to `nbytes` from `address`, without waiting."""
    moved = _send(fd, address, nbytes, _FLAGS)
    return moved if moved >= 0 else failure()


@inlined
def send_both(fd, vector, first, size, second, more):
    """Send `size` bytes at `first` and then `more` bytes at `second`, without waiting.

    Args:
        vector: address of VECTOR_BYTES bytes that belong to the caller, zeros at first.
    """
    vectors = vector + 8 * _FIRST
    store_word(vector, _VECTORS, vectors)
    store_word(vector, _COUNT, 2)
    store_word(vectors, 0, first)
    store_word(vectors, 1, size)
    store_word(vectors, 2, second)
    store_word(vectors, 3, more)
    moved = _sendmsg(fd, vector, _FLAGS)
    return moved if moved >= 0 else failure()


@inlined
def receive_some(fd, address, nbytes):
    """Receive up to `nbytes` (at least 1) at `address`, without waiting."""
    moved = _recv(fd, address, nbytes, _FLAGS)
    if moved > 0:
        return moved
    return CLOSED if moved == 0 else failure()


@inlined
def wait_ready(table, count, milliseconds):
    """Sleep until one of the `count` pollfds at `table` is ready or the time has passed.

    Returns:
        the number of ready descriptors.
    """
    ready = _poll(table, count, milliseconds)
    return ready if ready > 0 else 0
