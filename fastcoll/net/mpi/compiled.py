"""Compiled code of the MPI backend: waiting for requests, the meeting of a call, and complete calls with small data.

In the meeting (agreement.py), each rank sends every other rank a row: the header of its call and, if its data is small,
the data. *Entries* are the functions that Python calls. They return a status, or minus the code of an MPI error. All
state is in tables of 8-byte words. A wait *sweeps* over its requests: it tests each of them in turn. It has this table:

    0-9     the state of the back-off (kernels/waiting.py), with the time at which the wait has used up its budget
    MODE    0: wait until all requests are complete, with back-off between sweeps; ANY: wait until one request is
            complete; the flag BUSY can be added to both: yield the core between sweeps, and never sleep
    TEST    address of MPI_Test
    BELL    not 0: return after the current sweep; any thread may set it
    FLAG    flag that MPI_Test sets if the request is complete
    COUNT   number of slots, one for each request
    STATUS  an MPI_Status (at most 24 bytes), which is never read
    SLOTS   the first slot. A slot has the address of the request's handle, or 0 once the request is complete

A group has one context for its meetings. An entry gets the context's address; if RESUMED is added to the address, the
entry continues the current call. The context has these words:

    ROWS, STRIDE     address of the rows, and bytes of each
    SIZE, RANK       number of ranks in the group, and this process's rank
    CALLS            number of calls begun
    IN_PROGRESS      not 0: a call has begun and has not ended
    TABLE, START     addresses of the table of the wait, and of MPI_Start
    NEAR             whether MPI's collective operations can address this rank's arrays (execution.py); once all rows
                     have arrived, whether they can address the arrays of every rank
    SOURCE, ATTACHED the data to attach to this rank's row: address and number of bytes
    HANDLES          address of the requests' handles: one receive for each peer; then, for each size of rows, one send
                     for each peer
    SOURCES          address of a table with the address of each rank's attached data
    RING, FINISHED   as in tcp/engine_layout.py
    LIMITS           the first of several words: how many bytes can be attached to a row of each size, ascending

Each prepared call has a table. Its first three words are copied into this rank's row:

    CODE, SHAPE, BALANCE     as in core/signature.py
    FINISH           how to complete the call when all rows have arrived
    NBYTES           bytes of each rank's array, which is attached to its row
    ROOT             root of the call
    REDUCER, OP, ELEMENTS    as in kernels/reduce.py
"""

from __future__ import annotations

from ...compiler.jit import Entry, entry, inlined, kernel
from ...core.status import AGAIN, DONE, MISMATCH
from ...kernels.copy import copy
from ...kernels.headers import calls_match
from ...kernels.primitives import call_foreign, call_reducer, load_word, store_word, word_at
from ...kernels.pyobjects import DATA, Index, PyObject, integer, object_at
from ...kernels.recording import record_call
from ...kernels.waiting import BUDGET, POLLING_WORDS, moved, now, rest, yield_core

MODE, TEST, BELL, FLAG, COUNT, STATUS = range(POLLING_WORDS, POLLING_WORDS + 6)
SLOTS = STATUS + 16
ANY, BUSY = 1, 2

RESUMED = 1
(ROWS, STRIDE, SIZE, RANK, CALLS, IN_PROGRESS, TABLE, START) = range(8)
(NEAR, SOURCE, ATTACHED, HANDLES, SOURCES, RING, FINISHED, LIMITS) = range(8, 16)

CODE, SHAPE, BALANCE, FINISH, NBYTES, ROOT, REDUCER, OP, ELEMENTS, CALL_WORDS = range(10)
NO_FINISH, NOTHING, REDUCE, FROM_ROOT, FROM_ALL = range(5)  # NO_FINISH: Python completes the call

# A row: the header of a rank's call, which kernels/headers.py compares, and the rank's data if that is small.
ROW_NUMBER, ROW_CODE, ROW_SHAPE, ROW_BALANCE, ROW_NEAR, ROW_PAYLOAD = range(6)
HEAD_BYTES = 8 * ROW_PAYLOAD

_TIMED_EVERY = 16  # one in this many calls is timed in the group's flight record (record/)
ON_GPU = 1 << 7  # in the word CODE: the arrays are on GPUs; the operation's number does not use this bit
_CLOCK_EVERY = 32  # sweeps between two readings of the clock; a reading takes 30 ns


# ---- waiting: MPI moves most data only while it is called ---------------------------------------


@kernel
def wait(table):
    """Wait for the requests of a table.

    Returns DONE; AGAIN after 50 ms, or if BELL is set; or minus the code of an MPI error.
    """
    mode = load_word(table, MODE)
    start = 0
    for slot in range(load_word(table, COUNT)):
        start += load_word(table, SLOTS + slot) != 0
    attempts = 0
    end = 0
    while True:
        left = 0
        for slot in range(load_word(table, COUNT)):
            request = load_word(table, SLOTS + slot)
            if request == 0:
                continue
            store_word(table, FLAG, 0)
            code = call_foreign(load_word(table, TEST), request, table + 8 * FLAG, table + 8 * STATUS)
            if code != 0:
                return -code
            if load_word(table, FLAG) & 0xFFFFFFFF:
                store_word(table, SLOTS + slot, 0)
                moved(table)
            else:
                left += 1
        if left == 0 or (mode & ANY and left < start):
            return DONE
        if load_word(table, BELL) != 0:
            return AGAIN
        if mode & BUSY:
            if attempts % _CLOCK_EVERY == 0:
                time = now(table)
                end = end if end else time + load_word(table, BUDGET)
                if time > end:
                    return AGAIN
            yield_core()
        elif not rest(table, attempts):
            return AGAIN
        attempts += 1


@entry
def poll(address: Index) -> int:
    """Call `wait` for the table at `address`."""
    return wait(integer(address))


# ---- the meeting ---------------------------------------------------------------------------------------


@inlined
def _start(context, first, slot):
    """Start one request for each peer, from handle `first` on.

    Stores the requests' handles in the slots of the wait's table, from `slot` on.
    """
    handles = load_word(context, HANDLES)
    table = load_word(context, TABLE)
    for peer in range(load_word(context, SIZE) - 1):
        request = load_word(handles, first + peer)
        code = call_foreign(load_word(context, START), request, 0, 0)
        if code != 0:
            return -code
        store_word(table, SLOTS + slot + peer, request)
    return DONE


@kernel
def _begin(context, call, source, nbytes):
    """Begin to send this rank's row to all peers, and to receive the peers' rows.

    The `nbytes` bytes at `source` are attached to this rank's row.
    """
    row = load_word(context, ROWS) + load_word(context, STRIDE) * load_word(context, RANK)
    number = load_word(context, CALLS) + 1
    store_word(context, CALLS, number)
    store_word(context, IN_PROGRESS, 1)
    # Reading the clock takes 25 ns, and a call takes one or two microseconds, so only some calls are timed.
    began = now(load_word(context, TABLE)) if number & (_TIMED_EVERY - 1) == 0 else 0
    record_call(
        load_word(context, RING), number, load_word(call, CODE) & ~ON_GPU, load_word(call, SHAPE), began
    )
    store_word(row, ROW_NUMBER, number)
    store_word(row, ROW_CODE, load_word(call, CODE))
    store_word(row, ROW_SHAPE, load_word(call, SHAPE))
    store_word(row, ROW_BALANCE, load_word(call, BALANCE))
    store_word(row, ROW_NEAR, load_word(context, NEAR))
    copy(row + HEAD_BYTES, source, nbytes)
    peers = load_word(context, SIZE) - 1
    table = load_word(context, TABLE)
    store_word(table, MODE, 0)
    store_word(table, COUNT, 2 * peers)
    sends = peers
    limit = LIMITS
    while nbytes > load_word(context, limit):
        limit += 1
        sends += peers
    code = _start(context, 0, 0)
    return code if code != DONE else _start(context, sends, peers)


@kernel
def _meet(context, call, source, nbytes):
    """Exchange and compare rows.

    Returns DONE, MISMATCH, AGAIN (call again with RESUMED), or minus the code of an MPI error.
    """
    if not context & RESUMED:
        code = _begin(context, call, source, nbytes)
        if code != DONE:
            return code
    context &= ~RESUMED
    code = wait(load_word(context, TABLE))
    if code != DONE:
        return code
    # All rows have arrived: compare them.
    rows, stride = load_word(context, ROWS), load_word(context, STRIDE)
    if not calls_match(rows, stride, load_word(context, SIZE)):
        return MISMATCH
    near = 1
    for rank in range(load_word(context, SIZE)):
        near &= load_word(rows + stride * rank, ROW_NEAR)
    store_word(context, NEAR, near)
    return DONE


@kernel
def _finish(context, call, out):
    """Complete a small call whose rows have all arrived.

    `out` is the address of the result.
    """
    finish = load_word(call, FINISH)
    sources = load_word(context, SOURCES)
    nbytes = load_word(call, NBYTES)
    size = load_word(context, SIZE)
    if finish == REDUCE:
        call_reducer(
            load_word(call, REDUCER), load_word(call, OP), out, sources, size, load_word(call, ELEMENTS)
        )
    elif finish == FROM_ROOT:
        if load_word(context, RANK) != load_word(call, ROOT):
            copy(out, load_word(sources, load_word(call, ROOT)), nbytes)
    elif finish == FROM_ALL:
        for rank in range(size):
            copy(out + nbytes * rank, load_word(sources, rank), nbytes)


@entry
def meet(context: Index, call: Index) -> int:
    """Do the meeting of a call, with the data at SOURCE attached to the row."""
    address = integer(context)
    plain = address & ~RESUMED
    return _meet(address, integer(call), load_word(plain, SOURCE), load_word(plain, ATTACHED))


@entry
def carry_out(context: Index, call: Index, out: PyObject, x: PyObject) -> int:
    """Carry out a call, including its meeting. Its FINISH must not be NO_FINISH.

    `out` and `x` are plain ndarrays. If FINISH is NOTHING, they are not read and may be any objects.
    """
    address = integer(context)
    plain = address & ~RESUMED
    finish = load_word(integer(call), FINISH)
    source = 0
    nbytes = 0
    target = 0
    if finish != NOTHING:
        target = word_at(object_at(out) + DATA)
        if finish != FROM_ROOT or load_word(plain, RANK) == load_word(integer(call), ROOT):
            source = word_at(object_at(x) + DATA)
            nbytes = load_word(integer(call), NBYTES)
    if address == plain:
        store_word(plain, NEAR, 1)
    code = _meet(address, integer(call), source, nbytes)
    if code != DONE:
        return code
    _finish(plain, integer(call), target)
    store_word(plain, IN_PROGRESS, 0)
    store_word(plain, FINISHED, load_word(plain, CALLS))
    return DONE


@entry
def reduce(reducer: Index, op: Index, target: Index, sources: Index, many: Index, count: Index) -> int:
    """Call a reducer (kernels/reduce.py)."""
    call_reducer(
        integer(reducer), integer(op), integer(target), integer(sources), integer(many), integer(count)
    )
    return 0


@entry
def address(x: PyObject) -> int:
    """Return the address of an ndarray's first element. This takes 60 ns; Python code would take 800."""
    return word_at(object_at(x) + DATA)


ENTRIES: tuple[Entry, ...] = (poll, meet, carry_out, reduce, address)
"""Every compiled entry of net/mpi, for ahead-of-time compilation."""
