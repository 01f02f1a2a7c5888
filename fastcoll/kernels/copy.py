"""Moving bytes between addresses: through the caches, or past them.

`copy` is libc's memcpy; loops over elements are up to 4 times slower. `stream` writes with non-temporal stores, which
leave nothing in this core's caches. That helps for arrays larger than the last-level cache. It also helps if another
core reads the data next, on a processor that reads modified lines from another core's cache slowly.
"""

from __future__ import annotations

from ..compiler import llvm
from ..compiler.jit import external, inlined, instruction, kernel
from ..compiler.llvm import pointer
from ..compiler.processor import emit_fence_of_streams
from .primitives import half_word_at, store_word

LINE = 64

_memcpy = external("memcpy", "int64(int64, int64, int64)")
_process_vm_readv = external("process_vm_readv", "int64(int64, int64, int64, int64, int64, int64)")
_errno_location = external("__errno_location", "int64()")
_memmove = external("memmove", "int64(int64, int64, int64)")


@inlined
def copy(dst, src, nbytes):
    """Copy `nbytes` bytes from address `src` to `dst`; the two ranges are equal or disjoint."""
    if nbytes > 0 and dst != src:
        _memcpy(dst, src, nbytes)


@inlined
def move(dst, src, nbytes):
    """Copy bytes between ranges that may overlap."""
    _memmove(dst, src, nbytes)


def _emit_prefetch(builder, address, write):
    kinds = [llvm.BYTE.as_pointer(), *[llvm.HALF_WORD] * 3]
    fetch = llvm.function(builder, "llvm.prefetch.p0i8", llvm.VOID, *kinds)
    to_all_caches, data = llvm.HALF_WORD(3), llvm.HALF_WORD(1)
    builder.call(fetch, [pointer(builder, address, llvm.BYTE), llvm.HALF_WORD(write), to_all_caches, data])


@instruction("void")
def prefetch(builder, address):
    """Start to fetch the cache line at an address, which may be invalid, for a read."""
    _emit_prefetch(builder, address, 0)


@instruction("void")
def prefetch_to_write(builder, address):
    """Start to fetch the cache line at an address, which may be invalid, for a write."""
    _emit_prefetch(builder, address, 1)


@instruction("void")
def _stream_line(builder, dst, src):
    """Copy LINE bytes to `dst`, a multiple of LINE, past the caches."""
    vector = llvm.ir.VectorType(llvm.WORD, LINE // 8)
    line = builder.load(pointer(builder, src, vector))
    line.align = 1
    store = builder.store(line, pointer(builder, dst, vector))
    store.align = LINE
    store.set_metadata("nontemporal", builder.module.add_metadata([llvm.HALF_WORD(1)]))


@instruction("void")
def _order_streamed(builder):
    """Order non-temporal stores before later stores."""
    emit_fence_of_streams(builder)


@kernel
def stream(dst, src, nbytes):
    """Copy bytes past the caches; the two ranges are equal or disjoint."""
    head = min(nbytes, -dst % LINE)
    copy(dst, src, head)
    end = head + (nbytes - head) // LINE * LINE
    for start in range(head, end, LINE):
        _stream_line(dst + start, src + start)
    copy(dst + end, src + end, nbytes - end)
    _order_streamed()


@inlined
def copy_from(pid, vectors, dst, src, nbytes):
    """Copy bytes from address `src` of another process.

    Args:
        vectors: address of four words of scratch memory.

    Returns:
        the number of bytes, or -errno.
    """
    store_word(vectors, 0, dst)
    store_word(vectors, 1, nbytes)
    store_word(vectors, 2, src)
    store_word(vectors, 3, nbytes)
    moved = _process_vm_readv(pid, vectors, 1, vectors + 16, 1, 0)
    return moved if moved >= 0 else -half_word_at(_errno_location())


@inlined
def copy_or_stream(past, dst, src, nbytes):
    """Copy bytes, past the caches if `past`."""
    if past:
        stream(dst, src, nbytes)
    else:
        copy(dst, src, nbytes)
