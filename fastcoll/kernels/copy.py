"""Moving bytes between addresses: through the caches, or past them.

`copy` is libc's memcpy, which element loops cannot match (up to 4 times slower). `stream` writes with
non-temporal stores, which leave nothing in this core's caches: good for what another core reads next where
reading another core's dirty lines is slow, and for arrays that are larger than the last-level cache.
"""

from __future__ import annotations

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import inlined, kernel

LINE = 64

_memcpy = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))
_memmove = types.ExternalFunction("memmove", types.int64(types.int64, types.int64, types.int64))
_VECTOR = ir.VectorType(ir.IntType(64), LINE // 8).as_pointer()


@inlined
def copy(dst, src, nbytes):
    """Copy `nbytes` bytes from address `src` to address `dst`; the two ranges are equal or disjoint."""
    if nbytes > 0 and dst != src:
        _memcpy(dst, src, nbytes)


@inlined
def move(dst, src, nbytes):
    """As `copy`, for ranges that may overlap."""
    _memmove(dst, src, nbytes)


def _emit_prefetch(builder, address, write):
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    to_all_caches, data = ir.Constant(word, 3), ir.Constant(word, 1)
    builder.call(prefetch, [builder.inttoptr(address, byte), ir.Constant(word, write), to_all_caches, data])


@intrinsic
def prefetch(typing_context, address):
    """Begin to fetch the cache line at an address, any address, which will be read soon."""

    def emit(context, builder, signature, args):
        _emit_prefetch(builder, args[0], 0)
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def prefetch_to_write(typing_context, address):
    """Begin to take the cache line at an address, any address, from other cores: it will be written soon."""

    def emit(context, builder, signature, args):
        _emit_prefetch(builder, args[0], 1)
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def _stream_line(typing_context, dst, src):
    """Copy LINE bytes past the caches to `dst`, a multiple of LINE."""

    def emit(context, builder, signature, args):
        line = builder.load(builder.inttoptr(args[1], _VECTOR))
        line.align = 1
        store = builder.store(line, builder.inttoptr(args[0], _VECTOR))
        store.align = LINE
        one = ir.Constant(ir.IntType(32), 1)
        store.set_metadata("nontemporal", builder.module.add_metadata([one]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def _streamed(typing_context):
    """Order non-temporal stores before all later ones, which on x86 a release store alone does not."""

    def emit(context, builder, signature, args):
        if platform.machine() in ("x86_64", "AMD64"):
            fence = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, fence, "llvm.x86.sse.sfence"), [])
        else:
            builder.fence("release")
        return context.get_dummy_value()

    return types.void(), emit


@kernel
def stream(dst, src, nbytes):
    """As `copy`, past the caches."""
    head = min(nbytes, -dst % LINE)
    copy(dst, src, head)
    end = head + (nbytes - head) // LINE * LINE
    for start in range(head, end, LINE):
        _stream_line(dst + start, src + start)
    copy(dst + end, src + end, nbytes - end)
    _streamed()
