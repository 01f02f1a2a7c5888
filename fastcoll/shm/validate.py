"""Compiled input validation, for calls whose arrays need no preparation by Python.

An array needs no preparation if its type is exactly ndarray, it is C-contiguous and aligned, and it is writable if the
call writes it. Also, the *memo* must have the *spec* (CallSpec, a few words for compiled code) of the call's operation,
dtype and reduce operation. A list of arrays must be a tuple. An *entry*, a compiled function that Python calls, leaves
every other call to Python (LATER). Python imports or rejects the arrays, and calls the entry again with PREPARED in its
handle; the entry then validates nothing.

The memo is an open hash table that only grows. Python writes the words of a slot of this table while kernels may read
them without the GIL. Each word changes once, from 0 to its value, and the first word is published last. So an
incomplete slot does not match.
"""

from __future__ import annotations

from ..compiler.jit import inlined, kernel
from ..kernels import pyobjects as py
from ..kernels.primitives import half_word_at, load_acquire, load_word, store_word, word_at
from . import context_layout as at
from . import rounds as r

# Words of a CallSpec.
CALL, REDUCER, CODE, ITEMSIZE = range(4)
NO_MESSAGE = -1  # size in a table: nothing is sent between the two ranks
MEMO_PROBES = 8  # slots of the memo in which a spec may be
# In a key of the memo: stands in place of a ReduceOp's address if a call word stands in place of a dtype's address.
BY_CALL = 1


@inlined
def memo_slot(dtype, op, operation, probe):
    """Return the index of the memo's slot for probe number `probe`; `dtype` and `op` are addresses."""
    return ((dtype >> 4) + (op >> 4) * 7 + operation * 37 + probe) & (at.MEMO_ENTRIES - 1)


@kernel
def _find_spec(c, operation, dtype, op):
    """Return the address of a call's spec; 0: the memo does not have it."""
    for probe in range(MEMO_PROBES):
        entry = c + 8 * (at.MEMO + at.MEMO_WORDS * memo_slot(dtype, op, operation, probe))
        if load_acquire(entry) == dtype and load_word(entry, 1) == op and load_word(entry, 2) == operation:
            return load_word(entry, 3)
    return 0


@inlined
def spec_of(c, handle, operation, x, op):
    """Return the spec of a call on the array at x; 0: Python must prepare the call.

    `op` is the address of the ReduceOp, or 0 if the call does not reduce.
    """
    if handle & r.PREPARED:
        return load_word(c, at.GIVEN)
    if word_at(x + py.TYPE) != load_word(c, at.NDARRAY):
        return 0
    return _find_spec(c, operation, word_at(x + py.DESCR), op)


@inlined
def spec_by_call(c, handle, operation, call):
    """Return the spec of a compiled caller's call by its call word (callers/descriptors.py).

    0: Python must prepare the call.
    """
    if handle & r.PREPARED:
        return load_word(c, at.GIVEN)
    return _find_spec(c, operation, call, BY_CALL)


@inlined
def take_call(h, operation, call, root):
    """Take the context for a native call (callers.py) and find the call's spec; return both.

    Returns:
        0 and 0 if Python must make the call.
    """
    c = r.take(h)
    if c == 0:
        return 0, 0
    spec = spec_by_call(c, h, operation, call)
    if spec == 0 or not is_rank(c, root):
        r.give_up(h)
        return 0, 0
    return c, spec


@inlined
def is_plain(c, handle, x, flags):
    """Whether x is an ndarray, contiguous and aligned, and has the flags `flags`; True if the call is PREPARED."""
    if handle & r.PREPARED:
        return True
    flags |= py.CONTIGUOUS | py.ALIGNED
    return word_at(x + py.TYPE) == load_word(c, at.NDARRAY) and half_word_at(x + py.FLAGS) & flags == flags


@inlined
def is_like(handle, x, y):
    """Whether two arrays have the same dtype; True if the call is PREPARED."""
    return handle & r.PREPARED != 0 or word_at(x + py.DESCR) == word_at(y + py.DESCR)


@inlined
def is_rank(c, root):
    return 0 <= root < load_word(c, at.SIZE)


@inlined
def data_of(x):
    """Return the address of an array's data."""
    return word_at(x + py.DATA)


@inlined
def nbytes_of(x, spec):
    """Return the size of an array in bytes."""
    nbytes = load_word(spec, ITEMSIZE)
    shape = word_at(x + py.SHAPE)
    for k in range(half_word_at(x + py.NDIM)):
        nbytes *= word_at(shape + 8 * k)
    return nbytes


@kernel
def list_blocks(c, handle, which, holder, like, spec, flags):
    """Fill the tables `which` (addresses) and `which + 1` (sizes) from a tuple of arrays, or from one array.

    If `holder` is one array, it is divided into equal blocks of rows. `like` is an array with the dtype that the blocks
    must have. Return False if Python must prepare the call. None in a PREPARED tuple means that no block is sent.
    """
    size = load_word(c, at.SIZE)
    if word_at(holder + py.TYPE) == load_word(c, at.TUPLE):
        if word_at(holder + py.LENGTH) != size:
            return False
        for peer in range(size):
            item = word_at(holder + py.ITEMS + 8 * peer)
            if handle & r.PREPARED != 0 and item == load_word(c, at.NONE):
                store_word(r.table(c, which + 1), peer, NO_MESSAGE)
                continue
            if not (is_plain(c, handle, item, flags) and is_like(handle, item, like)):
                return False
            store_word(r.table(c, which), peer, data_of(item))
            store_word(r.table(c, which + 1), peer, nbytes_of(item, spec))
        if handle & r.PREPARED == 0 and flags & py.WRITEABLE != 0:
            # No two blocks may share memory. 64 ranks need 2,016 comparisons, which take about 1 us.
            for peer in range(1, size):
                block, nbytes = load_word(r.table(c, which), peer), load_word(r.table(c, which + 1), peer)
                if _touches(c, which, block, nbytes, peer, -1):
                    return False
        return True
    if not (is_plain(c, handle, holder, flags) and is_like(handle, holder, like)):
        return False
    nbytes = nbytes_of(holder, spec)
    if half_word_at(holder + py.NDIM) == 0 or word_at(word_at(holder + py.SHAPE)) % size != 0:
        return False
    list_equal(c, which, data_of(holder), nbytes // size)
    return True


@kernel
def _touches(c, which, address, nbytes, among, mine):
    """Whether a range shares memory with one of the first `among` blocks of a table, except block `mine`."""
    blocks, sizes = r.table(c, which), r.table(c, which + 1)
    for peer in range(among):
        block, length = load_word(blocks, peer), load_word(sizes, peer)
        if (
            nbytes > 0
            and length > 0
            and address < block + length
            and block < address + nbytes
            and peer != mine
        ):
            return True
    return False


@inlined
def are_apart(c, handle, address, nbytes, which, own):
    """Whether an array shares no memory with the blocks of a table. With `own` it may be this rank's own block."""
    if handle & r.PREPARED:
        return True
    rank = load_word(c, at.RANK)
    itself = own and load_word(r.table(c, which), rank) == address
    return not _touches(c, which, address, nbytes, load_word(c, at.SIZE), rank if itself else -1)


@inlined
def list_none(c, which):
    """Fill the tables with NO_MESSAGE."""
    for peer in range(load_word(c, at.SIZE)):
        store_word(r.table(c, which + 1), peer, NO_MESSAGE)


@inlined
def list_one(c, which, peer, address, nbytes):
    """Set a rank's block in the tables."""
    store_word(r.table(c, which), peer, address)
    store_word(r.table(c, which + 1), peer, nbytes)


@inlined
def list_equal(c, which, address, nbytes):
    """Fill the tables with consecutive blocks of nbytes."""
    for peer in range(load_word(c, at.SIZE)):
        list_one(c, which, peer, address + peer * nbytes, nbytes)


@inlined
def list_same(c, which, address, nbytes):
    """Fill the tables with the same block for every rank."""
    for peer in range(load_word(c, at.SIZE)):
        list_one(c, which, peer, address, nbytes)


@inlined
def largest_of(c, which):
    """Return the bytes of the largest block of a table."""
    largest = 0
    for peer in range(load_word(c, at.SIZE)):
        largest = max(largest, load_word(r.table(c, which + 1), peer))
    return largest


@inlined
def list_split(c, which, address, sizes):
    """Enter consecutive blocks of these sizes into the table `which`; return their sum."""
    nbytes = 0
    for peer in range(load_word(c, at.SIZE)):
        list_one(c, which, peer, address + nbytes, load_word(sizes, peer))
        nbytes += load_word(sizes, peer)
    return nbytes
