"""fastcoll's messages inside numba.njit: send, recv, isend, irecv and the methods of their Works; see njit.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core.errors import TypingError
from numba.extending import overload, overload_method, register_jitable

from ..api import p2p
from ..core.operands import ANY_TAG, LARGEST_TAG
from ..kernels import c_entries as d
from ..p2p.pipe import ANY
from ..p2p.transfers import DTYPE_BITS
from . import descriptors
from .descriptors import INVALID_TAG
from .njit_arguments import (
    array_dtype,
    check_callable_here,
    checked_descriptor,
    group_rank_of,
    is_by_group,
    or_typing_error,
    packing,
    result_of,
    size_of,
    to_global_rank,
    to_group_rank,
)
from .numba_types import (
    ANY_SENDER,
    NO_SENDER,
    call_c_entry,
    held,
    integer_of,
    is_none,
    know_dtype,
    new_work,
    words_of,
)
from .numba_types import work as work_type

_SEND, _RECV, _POST_SEND, _POST_RECV = d.SEND, d.RECV, d.POST_SEND, d.POST_RECV
_WAIT, _TEST, _WAIT_ANY = d.WAIT, d.TEST, d.WAIT_ANY


def _message(tensor: Any, writes: bool) -> int:
    check_callable_here()
    dtype = array_dtype(tensor, "tensor", writes)
    return or_typing_error(lambda: descriptors.message_word(0, dtype))


@register_jitable
def _kind(kind, tag):
    """Return a message's `call` word with this tag.

    Tags above LARGEST_TAG are invalid, because they are the library's own.
    """
    return kind | (integer_of(tag) if ANY_TAG <= tag <= LARGEST_TAG else INVALID_TAG) << DTYPE_BITS


@overload(p2p.send)
def _send(tensor, dst=None, group=None, tag=0, group_dst=None):
    kind, by_group = _message(tensor, False), is_by_group("dst", dst, group_dst)
    pack, _ = packing(tensor)

    def impl(tensor, dst=None, group=None, tag=0, group_dst=None):
        know_dtype(tensor)
        x, nbytes, _ = pack(tensor)
        descriptor = checked_descriptor(group)
        peer = group_rank_of(descriptor, dst, group_dst, by_group)
        result_of(call_c_entry(descriptor, _SEND, x, None, nbytes, _kind(kind, tag), peer))

    return impl


@overload(p2p.recv)
def _recv(tensor, src=None, group=None, tag=0, group_src=None):
    kind, by_group = _message(tensor, True), is_by_group("src", src, group_src, True)
    any_rank = is_none(src) and is_none(group_src)
    pack, put = packing(tensor)

    def impl(tensor, src=None, group=None, tag=0, group_src=None):
        know_dtype(tensor)
        x, nbytes, back = pack(tensor)
        descriptor = checked_descriptor(group)
        peer = ANY if any_rank else group_rank_of(descriptor, src, group_src, by_group)
        found = result_of(call_c_entry(descriptor, _RECV, x, None, nbytes, _kind(kind, tag), peer))
        put(back, x)
        return to_global_rank(descriptor, found)

    return impl


# ---- nonblocking messages -----------------------------------------------------------------------------


@register_jitable
def _itself(x):
    return x


@register_jitable
def _copy_of(x):
    return np.ascontiguousarray(x).copy()


@register_jitable
def _sent(descriptor, x, kind, peer):
    """Post a message; return the number of its request, which keeps the array alive."""
    nbytes = x.size * x.itemsize
    data, owner = held(x)
    return result_of(call_c_entry(descriptor, _POST_SEND, data, owner, nbytes, kind, peer))


@overload(p2p.isend)
def _isend(tensor, dst=None, group=None, tag=0, group_dst=None):
    kind, by_group = _message(tensor, False), is_by_group("dst", dst, group_dst)
    is_plain = tensor.layout == "C" and tensor.aligned
    contiguous = _itself if is_plain else _copy_of

    def impl(tensor, dst=None, group=None, tag=0, group_dst=None):
        know_dtype(tensor)
        descriptor = checked_descriptor(group)
        peer = group_rank_of(descriptor, dst, group_dst, by_group)
        return new_work(descriptor, _sent(descriptor, contiguous(tensor), _kind(kind, tag), peer), NO_SENDER)

    return impl


@overload(p2p.irecv)
def _irecv(tensor, src=None, group=None, tag=0, group_src=None):
    kind, by_group = _message(tensor, True), is_by_group("src", src, group_src, True)
    any_rank = is_none(src) and is_none(group_src)
    if tensor.layout != "C" or not tensor.aligned:
        raise TypingError(f"irecv inside njit receives into contiguous arrays, not {tensor}; copy from one")

    def impl(tensor, src=None, group=None, tag=0, group_src=None):
        know_dtype(tensor)
        descriptor = checked_descriptor(group)
        peer = ANY if any_rank else group_rank_of(descriptor, src, group_src, by_group)
        nbytes = tensor.size * tensor.itemsize
        data, owner = held(tensor)
        number = result_of(call_c_entry(descriptor, _POST_RECV, data, owner, nbytes, _kind(kind, tag), peer))
        sender = ANY_SENDER if any_rank else to_global_rank(descriptor, peer) if by_group else integer_of(src)
        return new_work(descriptor, number, sender)

    return impl


@overload(p2p.sendrecv)
def _sendrecv(input, dst, output, src=None, group=None, send_tag=0, recv_tag=0):
    any_rank = is_none(src)

    def impl(input, dst, output, src=None, group=None, send_tag=0, recv_tag=0):
        descriptor = checked_descriptor(group)
        size = size_of(descriptor)
        peer = 0 if any_rank else to_group_rank(descriptor, integer_of(src))
        if size > 0 and not (0 <= peer < size and ANY_TAG <= recv_tag <= LARGEST_TAG):
            p2p.recv(output, src, group, recv_tag)  # raises an error, before the message is sent
        sent = p2p.isend(input, dst, group, send_tag)
        source = p2p.recv(output, src, group, recv_tag)
        _wait(sent)
        return source

    return impl


@register_jitable
def _wait(work):
    """Wait for a request; return the sender's rank in the group."""
    descriptor, number, _ = words_of(work)
    return result_of(call_c_entry(descriptor, _WAIT, number, None, 0, 0, 0)) if number else 0


@overload_method(type(work_type), "wait")
def _work_wait(work, timeout=None):
    if not is_none(timeout):
        raise TypingError("wait inside njit takes no timeout; the group's own timeout holds")

    def impl(work, timeout=None):
        _wait(work)
        return True

    return impl


@overload_method(type(work_type), "is_completed")
def _work_is_completed(work):
    def impl(work):
        descriptor, number, _ = words_of(work)
        return number == 0 or result_of(call_c_entry(descriptor, _TEST, number, None, 0, 0, 0)) != 0

    return impl


@overload_method(type(work_type), "source_rank")
def _work_source_rank(work):
    def impl(work):
        descriptor, _, sender = words_of(work)
        found = _wait(work)
        if sender == ANY_SENDER:
            return to_global_rank(descriptor, found)
        return sender if sender >= 0 else -1

    return impl


def _requests(works: Any) -> None:
    if getattr(works, "dtype", None) != work_type:
        raise TypingError(f"works are of type {works}; give a list or tuple of what isend and irecv return")


@overload(p2p.waitall)
def _waitall(works):
    _requests(works)

    def impl(works):
        for work in works:
            _wait(work)

    return impl


@overload(p2p.waitany)
def _waitany(works):
    _requests(works)

    def impl(works):
        count = len(works)
        if count == 0:
            raise ValueError("waitany: there is no operation; give at least one Work")
        table, descriptor = np.empty(2 * count, np.int64), np.int64(0)
        for index in range(count):
            descriptor, number, _ = words_of(works[index])
            if number == 0:
                return index
            table[index], table[count + index] = number, descriptor
        return result_of(call_c_entry(descriptor, _WAIT_ANY, table, None, count, 0, 0))

    return impl
