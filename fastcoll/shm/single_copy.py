"""The direct algorithm: ranks read one another's arrays in place (cross-memory attach), without the slots.

A call has two rounds without data, and an all_reduce has three. The call line of a rank has the addresses of its
arrays. After the meeting (rounds.py) each rank reads from its peers' arrays, and publishes its last round when it has
read everything. A rank reads by process_vm_readv, or by ordinary loads if the array is in its owner's *arena*, memory
that peers can map (arena.py). A rank maps a peer's arena when a call first needs it. Before a rank reduces a peer's
data that is not in an arena, it copies that data into its own slots.

In an all_reduce a rank reduces its slice of all arrays into its own array, and then publishes a round. No other rank
accesses this slice of this rank's array before that. The rank also stores the result into those arrays of peers that
are in mapped arenas. Every other peer copies the result into its own array, over elements that this rank has already
read.

Invariants:

- A rank whose array is read by peers returns only after they have published that they have read it, because its caller
  may change or free the array after the return. A rank that only reads waits for no peer.
- A rank uses only data that it read after the meeting and before the owner's call ended. If the owner fails the group,
  its caller may change the array at once. So the owner publishes FAILED before it returns, and a reader checks for
  FAILED after it has read and before it publishes or returns. The array of a killed owner is read completely or not at
  all, because the kernel keeps memory while it reads from it.
- No rank writes into an array after the owner's failed call has returned. A rank that stores a result into peers'
  arrays sets PUSHING (layout.py), then checks for FAILED, then writes a piece, then clears PUSHING. The owner publishes
  FAILED, then waits until no peer has PUSHING set. Each side first stores its own word and then loads the other's, with
  a full barrier between: `swap_if_equal` and `load_after_swap` here, `publish` (kernels/shared_words.py) in the owner.
  So at least one of them sees the other's store. If a writer's process was stopped while it wrote a piece, the owner
  withdraws its array from the arena (arena.py, `withdraw`).

Ranks copy at most PIECE bytes at a time and check in between whether they must return to Python (`time_is_up`).
`tests/shm/test_single_copy_model.py` explores the schedules of this protocol.
"""

from __future__ import annotations

import errno

from ..compiler.jit import inlined, kernel
from ..core.monitor import FAILED
from ..core.status import AGAIN, DONE, UNALLOCATED, UNMAPPED, UNREADABLE, WORKED
from ..failpoints import number_of
from ..kernels.allocator import BASE, LIMIT, SHUT
from ..kernels.copy import copy, copy_from
from ..kernels.failing import reached
from ..kernels.primitives import (
    call_reducer,
    load_acquire,
    load_after_swap,
    load_word,
    order_loads,
    start_of,
    store_release,
    store_word,
    swap_if_equal,
)
from ..kernels.waiting import nap
from . import context_layout as at
from . import layout
from . import rounds as r
from . import validate as v

PIECE = 4 << 20  # bytes, which take a third of a millisecond
# Bytes of a peer that a rank copies to its slots and then reduces: a quarter of an L2 cache.
REDUCED_AT_ONCE = 256 << 10
PUSHED_AT_ONCE = 64 << 10  # bytes reduced before they are stored to peers; 16 to 256 KiB took the same time
NOTHING = 3  # result of `kind_of_blocks`: the table has no blocks
_READ, _PUSHING = number_of("shm.single_copy.piece_read"), number_of("shm.single_copy.pushing")
_LINE_OF_ELEMENTS = 64  # slices begin at multiples of 64 elements, so that ranks share no cache line


@inlined
def _arena_of(c, address, nbytes):
    """Return the base of this process's arena if these bytes are in it and peers may read them there, else 0."""
    arena = load_word(c, at.ARENA)
    base = load_acquire(arena + 8 * BASE)
    return (
        base
        if base != 0
        and load_word(arena, SHUT) == 0
        and 0 <= address - base <= load_word(arena, LIMIT) - nbytes
        else 0
    )


@kernel
def kind_of(c, address, nbytes):
    """Return SHARED if an array is in this process's arena, else ORDINARY."""
    return r.SHARED if _arena_of(c, address, nbytes) else r.ORDINARY


@kernel
def kind_of_blocks(c, which):
    """Return SHARED if all blocks of a table are in this process's arena, else ORDINARY; NOTHING: no blocks.

    Return 0 if the blocks differ in size. Such a call must not be direct, because other ranks know other sizes and may
    choose another algorithm.
    """
    kind, found = NOTHING, v.NO_MESSAGE
    for peer in range(load_word(c, at.SIZE)):
        nbytes = load_word(r.table(c, which + 1), peer)
        if nbytes == v.NO_MESSAGE:
            continue
        if found not in (v.NO_MESSAGE, nbytes):
            return 0
        found = nbytes
        kind = min(kind, kind_of(c, load_word(r.table(c, which), peer), nbytes))
    return kind


@inlined
def _line(c, peer, words):
    """Return where a rank publishes its arrays' addresses, then its arena's base (0 if no array is in the arena).

    This is the call line or, if the addresses do not fit into it, the slot of the call's first round.
    """
    nbytes = _bytes_of_line(words)
    return r.payload_of(c, peer, 0, nbytes, nbytes)


@inlined
def _bytes_of_line(words):
    return 8 * (words + 1)


@inlined
def _name_arena(c, line, words, base):
    """Write the base of this process's arena behind the addresses, and copy the arena's table into the section."""
    store_word(line, words, base)
    if base:
        for k in range(4):
            there = r.section(c, load_word(c, at.RANK)) + layout.REACH + 16
            store_word(there, k, load_word(load_word(c, at.ARENA), k))


@inlined
def _is_mapped(c, peer, base):
    """Return DONE if the peer has published no arena, or one that is mapped here; else UNMAPPED."""
    if base == 0 or base == load_word(r.table(c, at.ARENA_BASES), peer):
        return DONE
    store_word(c, at.LATE, peer)
    return UNMAPPED


@inlined
def _here(c, peer, base, address, nbytes):
    """Return the address in this process of a peer's bytes if they are in the peer's published arena, else 0."""
    inside = 0 <= address - base <= load_word(r.table(c, at.ARENA_BYTES), peer) - nbytes
    return address + load_word(r.table(c, at.ARENA_SHIFTS), peer) if base != 0 and inside else 0


@kernel
def _read(c, peer, dst, src, nbytes):
    """Copy bytes of a peer's memory; return DONE, UNREADABLE, or AGAIN if the peer has ended, which Python detects."""
    while nbytes > 0:
        moved = copy_from(load_word(r.table(c, at.PIDS), peer), c + 8 * at.VECTORS, dst, src, nbytes)
        if moved <= 0:
            store_word(c, at.LATE, peer)
            nap(c + 8 * at.BACKOFF)
            return AGAIN if moved == -errno.ESRCH else UNREADABLE
        dst, src, nbytes = dst + moved, src + moved, nbytes - moved
    return DONE


@inlined
def _check_sound(c, peer):
    """Return DONE if a peer has not failed the group, so that the data read from its array is valid; else AGAIN.

    The order of accesses: this rank's loads of the data, and its store of PUSHING, are before the load of STATE; the
    owner's store of STATE is before its caller's writes to the array.
    """
    order_loads()
    if load_after_swap(r.section(c, peer) + layout.STATE) != FAILED:
        return DONE
    store_word(c, at.LATE, peer)
    return AGAIN


@kernel
def _check_all_sound(c):
    for peer in range(load_word(c, at.SIZE)):
        if peer != load_word(c, at.RANK) and _check_sound(c, peer) != DONE:
            return AGAIN
    return DONE


@inlined
def _peer_after(c, shift):
    return (load_word(c, at.RANK) + shift) % load_word(c, at.SIZE)


@inlined
def _go_to(c, shift):
    store_word(c, at.NEXT, shift)
    store_word(c, at.DID, 0)


@kernel
def _fetch(c, peer, dst, src, nbytes, here):
    """Copy nbytes of a peer's array, of which DID bytes are copied already.

    Copy from address `here` of this process, or by the system call from address `src` of the peer if `here` is 0.
    """
    while load_word(c, at.DID) < nbytes:
        did = load_word(c, at.DID)
        part = min(PIECE, nbytes - did)
        if here:
            copy(dst + did, here + did, part)
        else:
            code = _read(c, peer, dst + did, src + did, part)
            if code != DONE:
                return code
        store_word(c, at.DID, did + part)
        reached(_READ)
        if did + part < nbytes and r.time_is_up(c):
            return WORKED if _check_sound(c, peer) == DONE else AGAIN
    return _check_sound(c, peer)


@kernel
def exchange(c, call, shape, balance, spread):
    """Copy peers' blocks into the blocks of table TAKES; the peers read the blocks of table GIVES.

    `spread` is explained in `run_exchange` (movement.py).
    """
    rank, size = load_word(c, at.RANK), load_word(c, at.SIZE)
    sends, send_sizes = r.table(c, at.GIVES), r.table(c, at.GIVES + 1)
    receives, receive_sizes = r.table(c, at.TAKES), r.table(c, at.TAKES + 1)
    words = size if spread > 1 else 1
    if load_word(c, at.WROTE) == 0:
        opened = r.open_slot(c, _bytes_of_line(words))
        if opened != DONE:
            return opened
        line, base = _line(c, rank, words), 0
        for peer in range(size):
            nbytes = load_word(send_sizes, peer)
            if peer != rank and nbytes > 0:
                address = load_word(sends, peer)
                store_word(line, peer if spread > 1 else 0, address)
                base = max(base, _arena_of(c, address, nbytes))
        _name_arena(c, line, words, base)
        _go_to(c, 0)
        r.publish(c, call, shape, balance)
    met = r.meet(c, call, shape, balance)
    if met != DONE:
        return met
    while load_word(c, at.NEXT) < size:
        peer = _peer_after(c, load_word(c, at.NEXT))
        nbytes = load_word(receive_sizes, peer)
        if nbytes > 0:
            here = load_word(sends, peer)
            src = here
            if peer != rank:
                line = _line(c, peer, words)
                base = load_word(line, words)
                if _is_mapped(c, peer, base) != DONE:
                    return UNMAPPED
                src = load_word(line, rank if spread > 1 else 0)
                here = _here(c, peer, base, src, nbytes)
            code = _fetch(c, peer, load_word(receives, peer), src, nbytes, here)
            if code != DONE:
                return code
        _go_to(c, load_word(c, at.NEXT) + 1)
    if load_word(c, at.WROTE) == 1:
        r.close_round(c, 2)
        r.publish(c, call, shape, balance)
    for peer in range(size):
        given = peer != rank and load_word(send_sizes, peer) > 0
        if given and r.await_peer(c, peer, 1) != DONE:
            return AGAIN
    r.close_round(c, 2)
    return r.finish(c)


@kernel
def _locate(c, words, index, nbytes):
    """Fill the table TAKES with the addresses of all ranks' arrays, of nbytes each.

    If an array is mapped here, TAKES and the next table both get its address in this process. Otherwise TAKES gets its
    address in its owner, and the next table 0. Word `index` of a rank's line has the address of its array.
    """
    rank = load_word(c, at.RANK)
    for peer in range(load_word(c, at.SIZE)):
        line = _line(c, peer, words)
        address, base = load_word(line, index), load_word(line, words)
        here = address
        if peer != rank:
            if _is_mapped(c, peer, base) != DONE:
                return UNMAPPED
            here = _here(c, peer, base, address, nbytes)
        store_word(r.table(c, at.TAKES), peer, here or address)
        store_word(r.table(c, at.TAKES + 1), peer, here)
    return DONE


@kernel
def _push(c, src, offset, nbytes):
    """Store a result into the peers' arrays that are mapped here; return DONE, or AGAIN if a peer has failed."""
    rank = load_word(c, at.RANK)
    pushing = r.section(c, rank) + layout.REACH + 8 * layout.PUSHING
    swap_if_equal(pushing, 0, 1)
    for shift in range(1, load_word(c, at.SIZE)):
        peer = _peer_after(c, shift)
        if load_word(r.table(c, at.TAKES + 1), peer) != 0:
            if _check_sound(c, peer) != DONE:
                store_release(pushing, 0)
                return AGAIN
            reached(_PUSHING)
            copy(load_word(r.table(c, at.TAKES), peer) + offset, src, nbytes)
    store_release(pushing, 0)
    return DONE


@kernel
def _reduce_slice(c, spec, dst, offset, nbytes, push):
    """Reduce nbytes of all ranks' arrays, from `offset` on, into dst; DID bytes are reduced already.

    `push`: whether to store the result into peers' arrays as well. Data that the system call reads goes into this
    rank's slots first. After the meeting the slots are free, except that of the call's first round, which may have
    addresses.
    """
    rank, size, itemsize = load_word(c, at.RANK), load_word(c, at.SIZE), load_word(spec, v.ITEMSIZE)
    sources = r.table(c, at.SOURCES)
    a_slot = -(-(size - 1) // (layout.SLOTS - 1))
    room = load_word(c, at.SLOT) // a_slot
    piece = max(1, min(PUSHED_AT_ONCE if push else REDUCED_AT_ONCE, room) // itemsize) * itemsize
    while load_word(c, at.DID) < nbytes:
        did = load_word(c, at.DID)
        part = min(piece, nbytes - did)
        for shift in range(size):
            peer = (rank + shift) % size
            source = load_word(r.table(c, at.TAKES), peer) + offset + did
            if load_word(r.table(c, at.TAKES + 1), peer) == 0:
                if load_word(c, at.ALLOCATED) == 0:
                    return UNALLOCATED
                scratch = r.slot_of(c, rank, 1 + (shift - 1) // a_slot) + (shift - 1) % a_slot * room
                code = _read(c, peer, scratch, source, part)
                if code != DONE:
                    return code
                source = scratch
                reached(_READ)
            store_word(sources, peer, source)
        reducer, code = load_word(spec, v.REDUCER), load_word(spec, v.CODE)
        call_reducer(reducer, code, dst + did, sources, size, part // itemsize)
        if push and _push(c, dst + did, offset + did, part) != DONE:
            return AGAIN
        store_word(c, at.DID, did + part)
        if did + part < nbytes and r.time_is_up(c):
            return WORKED if _check_all_sound(c) == DONE else AGAIN
    return _check_all_sound(c)


@kernel
def _begin_with_one(c, x, nbytes, call, base):
    """Publish the address of this rank's array and its arena, meet, and locate the arrays of all ranks."""
    if load_word(c, at.WROTE) == 0:
        line = _line(c, load_word(c, at.RANK), 1)
        store_word(line, 0, x)
        _name_arena(c, line, 1, base)
        _go_to(c, 1)
        r.publish(c, call, nbytes, 0)
    met = r.meet(c, call, nbytes, 0)
    return _locate(c, 1, 0, nbytes) if met == DONE else met


@kernel
def all_reduce(c, x, nbytes, spec, call):
    """Reduce this rank's slice of all arrays, then store the result into peers' arrays or let the peers read it."""
    rank, size = load_word(c, at.RANK), load_word(c, at.SIZE)
    unit = _LINE_OF_ELEMENTS * load_word(spec, v.ITEMSIZE)
    base = 0
    if load_word(c, at.WROTE) == 0:
        base = _arena_of(c, x, nbytes)
        store_word(c, at.EXPOSED_BYTES, nbytes)
        store_word(c, at.EXPOSED, x if base else 0)
    code = _begin_with_one(c, x, nbytes, call, base)
    if code != DONE:
        return code
    if load_word(c, at.WROTE) == 1:
        low = start_of(nbytes, size, rank, unit)
        code = _reduce_slice(c, spec, x + low, low, start_of(nbytes, size, rank + 1, unit) - low, True)
        if code != DONE:
            return code
        r.close_round(c, 3)
        _go_to(c, 1)
        r.publish(c, call, nbytes, 0)
    while load_word(c, at.NEXT) < size:
        peer = _peer_after(c, load_word(c, at.NEXT))
        if r.await_peer(c, peer, 1) != DONE:
            return AGAIN
        if load_word(c, at.EXPOSED) == 0:
            low = start_of(nbytes, size, peer, unit)
            part = start_of(nbytes, size, peer + 1, unit) - low
            source = load_word(r.table(c, at.TAKES), peer) + low
            here = source if load_word(r.table(c, at.TAKES + 1), peer) else 0
            code = _fetch(c, peer, x + low, source, part, here)
            if code != DONE:
                return code
        _go_to(c, load_word(c, at.NEXT) + 1)
    if load_word(c, at.WROTE) == 2:
        r.close_round(c, 3)
        r.publish(c, call, nbytes, 0)
    for peer in range(size):
        reads = peer != rank and load_word(r.table(c, at.TAKES + 1), peer) == 0
        if reads and r.await_peer(c, peer, 2) != DONE:
            return AGAIN
    r.close_round(c, 3)
    store_word(c, at.EXPOSED, 0)
    return r.finish(c)


@kernel
def reduce(c, out, x, nbytes, spec, call, root):
    """Reduce all ranks' arrays on the root, which reads them; other ranks wait until the root has read theirs."""
    here = load_word(c, at.RANK) == root
    code = _begin_with_one(c, x, nbytes, call, _arena_of(c, x, nbytes))
    if code != DONE:
        return code
    if load_word(c, at.WROTE) == 1:
        if here:
            code = _reduce_slice(c, spec, out, 0, nbytes, False)
            if code != DONE:
                return code
        r.close_round(c, 2)
        r.publish(c, call, nbytes, 0)
    if not here and r.await_peer(c, root, 1) != DONE:
        return AGAIN
    r.close_round(c, 2)
    return r.finish(c)


@kernel
def reduce_scatter(c, out, nbytes, shape, spec, call):
    """Read and reduce the blocks that all ranks have for this rank."""
    rank, size = load_word(c, at.RANK), load_word(c, at.SIZE)
    if load_word(c, at.WROTE) == 0:
        opened = r.open_slot(c, _bytes_of_line(size))
        if opened != DONE:
            return opened
        line, base = _line(c, rank, size), 0
        for peer in range(size):
            address = load_word(r.table(c, at.GIVES), peer)
            store_word(line, peer, address)
            base = max(base, _arena_of(c, address, nbytes))
        _name_arena(c, line, size, base)
        _go_to(c, 1)
        r.publish(c, call, shape, 0)
    code = r.meet(c, call, shape, 0)
    if code == DONE:
        code = _locate(c, size, rank, nbytes)
    if code != DONE:
        return code
    if load_word(c, at.WROTE) == 1:
        code = _reduce_slice(c, spec, out, 0, nbytes, False)
        if code != DONE:
            return code
        r.close_round(c, 2)
        r.publish(c, call, shape, 0)
    if r.await_all(c) != DONE:
        return AGAIN
    r.close_round(c, 2)
    return r.finish(c)
