"""The engine: one compiled call carries out a collective over nonblocking sockets, first the meeting, then the plan.

    IDLE --begin--> MEET --the headers that the call needs agree--> RUN --the last phase is complete--> IDLE
                    MEET --headers differ, and Python has read all of them--> IDLE
                    MEET --combined headers differ--> GATHER --all headers have arrived and Python has read them--> IDLE

The engine returns to Python when it has waited for 50 ms without progress, or worked for 50 ms. It keeps its state in
the context (engine_layout.py), and continues from there when Python calls it again.

A plan (plans/plan.py) is a table of rows; a row is, for example, a send or a receive. Rows belong to phases. Phases run
one after the other, and the rows of a phase run concurrently. A *sweep* goes over the rows of the current phase and
moves the bytes that can be moved without waiting. Rows that use one connection in the same direction move one after the
other. Received bytes are reduced as they arrive, IO_BYTES at a time, while they are in the cache. Large rows are
divided among the *streams*, which are the connections to one peer; both sides divide a row in the same way.
"""

from __future__ import annotations

from ...compiler.jit import entry, inlined, kernel
from ...core.status import AGAIN, DONE, GARBLED, LATER, UNCONNECTED, WORKED
from ...core.travel import NARROW, WIDEN
from ...failpoints import number_of
from ...kernels.copy import copy, move
from ...kernels.failing import failing, reached
from ...kernels.lines import has, post, signal, sleep_until, take
from ...kernels.primitives import call_reducer, load_word, store_word, word_at
from ...kernels.pyobjects import DATA, ITEMS, LENGTH, Index, PyObject, integer, object_at
from ...kernels.recording import record_call, record_end
from ...kernels.sockets import READABLE, WRITABLE, receive_some, send_some, wait_ready
from ...kernels.waiting import BUDGET, now
from . import engine_layout as w
from .combine import all_agree, block_of_all, combine
from .meet import (
    PENDING,
    SEEN_EVERY,
    SOON,
    compare,
    exchange,
    finish,
    gone,
    list_missing,
    read_unread_headers,
    skip_frames,
    write_headers,
)
from .plans import plan as t
from .plans.shape import HEADER_BYTES

IO_BYTES = 256 << 10  # one call of send or recv moves no more bytes than this, half of a core's L2 cache
# Rows of at least DIVIDED bytes are divided among the streams. It is less than a segment's 256 KiB (plans/shape.py), so
# that segments are divided.
DIVIDED = 128 << 10
_POLL_MS = 50
# Numbers of failpoints. Each is the number for operation 0; to hit a failpoint, the operation's number is added.
_ENTER, _MET = number_of("tcp.OPERATION.enter"), number_of("tcp.OPERATION.after_meeting")
_MID_CHUNK, _BEFORE_DONE = number_of("tcp.OPERATION.mid_chunk"), number_of("tcp.OPERATION.before_done")
_AFTER_DONE = number_of("tcp.OPERATION.after_done")


@failing
def _hit_failpoint(d, failpoint):
    """Hit a failpoint of the operation of a prepared call."""
    reached(failpoint + (load_word(d, w.CALL) & 0xFF))


@inlined
def _row_at(d, row):
    """Return the address of a row of the plan."""
    return load_word(d, w.TABLE) + 8 * t.COLUMNS * row


@inlined
def _address_of(c, row, buffer, offset):
    return load_word(load_word(c, w.BUFFERS), load_word(row, buffer)) + load_word(row, offset)


@inlined
def _bound(d, nbytes, stream, streams):
    """Return the offset in a row at which a stream's part of the row begins.

    If the row consists of complete items, so does each part.
    """
    if nbytes < DIVIDED:
        return 0 if stream == 0 else nbytes
    unit = load_word(d, w.ITEMSIZE)
    if unit == 0 or nbytes % unit:
        unit = 1
    return nbytes // unit * stream // streams * unit


# ---- local rows -------------------------------------------------------------------------------


@inlined
def _reduce(c, d, target, count, items):
    """Reduce the operands at SOURCES into `target`."""
    call_reducer(load_word(d, w.REDUCER), load_word(d, w.CODE), target, load_word(c, w.SOURCES), count, items)


@kernel
def _combine_data(c, target):
    """Reduce the data behind the two headers at SOURCES, if the current call's headers carry data."""
    d, sources = load_word(c, w.CARRYING), load_word(c, w.SOURCES)
    if d != 0:
        for k in range(2):
            store_word(sources, k, load_word(sources, k) + HEADER_BYTES)
        _reduce(c, d, target + HEADER_BYTES, 2, load_word(d, w.CARRIED_ITEMS))


@kernel
def _convert(c, d, row):
    """Carry out a row that converts to or from a narrow type."""
    kind, offset, sources = load_word(row, t.KIND), load_word(row, t.OFFSET2), load_word(c, w.SOURCES)
    store_word(sources, 0, _address_of(c, row, t.BUFFER2, t.OFFSET2))
    store_word(sources, 1, load_word(load_word(c, w.BUFFERS), t.FIRST_ARRAY + 1) + offset)
    code = WIDEN if kind == t.WIDEN else NARROW
    target, count = _address_of(c, row, t.BUFFER, t.OFFSET), load_word(row, t.NBYTES) // 4
    n = 2 if kind == t.NARROW_KEEPING else 1
    call_reducer(load_word(d, w.REDUCER), code, target, sources, n, count)


@inlined
def _line_of(c, row):
    """Return the address of the line of a POST, AWAIT, SIGNAL or WAIT row."""
    return load_word(load_word(c, w.LINES), load_word(row, t.PEER))


@kernel
def _take(c, row, progress, listing):
    """Copy the header that an AWAIT row waits for, if it is posted; a WAIT row only looks for the number.

    With `listing`, list the line instead. Returns DONE if an earlier sweep has found the header or number, PENDING if
    this one has, else PENDING - 1.
    """
    if load_word(progress, 0) != 0:
        return DONE
    line, number = _line_of(c, row), load_word(c, w.CALLS)
    if listing:
        store_word(c, w.AWAITED, line)
        return PENDING - 1
    if load_word(row, t.KIND) == t.WAIT:
        found = has(line, number)
    else:
        found = take(line, number, _address_of(c, row, t.BUFFER, t.OFFSET), load_word(row, t.NBYTES))
    store_word(progress, 0, 1 if found else 0)
    return PENDING if found else PENDING - 1


@kernel
def begin_phase(c, d, row):
    """Begin the phase whose first row is `row`.

    Finds its last row, carries out its local rows, and resets the progress of all its rows.
    """
    end = row
    phase = load_word(_row_at(d, row), t.PHASE)
    while end < load_word(d, w.ROWS) and load_word(_row_at(d, end), t.PHASE) == phase:
        at = _row_at(d, end)
        if load_word(at, t.KIND) == t.FOLD:
            count = load_word(at, t.PEER)
            for k in range(count):  # the SOURCE rows follow, in order
                source = _address_of(c, _row_at(d, end + 1 + k), t.BUFFER, t.OFFSET)
                store_word(load_word(c, w.SOURCES), k, source)
            items = load_word(at, t.NBYTES) // load_word(d, w.ITEMSIZE)
            target = _address_of(c, at, t.BUFFER, t.OFFSET)
            if load_word(d, w.REDUCER) == 0:
                combine(target, load_word(c, w.SOURCES))
                _combine_data(c, target)
            else:
                _reduce(c, d, target, count, items)
        elif load_word(at, t.KIND) == t.COPY:
            source = _address_of(c, at, t.BUFFER2, t.OFFSET2)
            copy(_address_of(c, at, t.BUFFER, t.OFFSET), source, load_word(at, t.NBYTES))
        elif load_word(at, t.KIND) == t.POST:
            post(_line_of(c, at), _address_of(c, at, t.BUFFER, t.OFFSET), load_word(at, t.NBYTES))
            _hit_failpoint(d, _MID_CHUNK)
        elif load_word(at, t.KIND) == t.SIGNAL:
            signal(_line_of(c, at), load_word(c, w.CALLS))
            _hit_failpoint(d, _MID_CHUNK)
        elif load_word(at, t.KIND) >= t.NARROW:
            _convert(c, d, at)
        end += 1
    for word in range(2 * (end - row) * load_word(c, w.STREAMS)):
        store_word(load_word(c, w.PROGRESS), word, 0)
    store_word(c, w.PHASE, row)
    store_word(c, w.PHASE_END, end)


# ---- rows of sockets --------------------------------------------------------------------------


@kernel
def _receive_and_reduce(c, d, row, progress, slot, fd, address, nbytes):
    """Receive into the staging area, and reduce complete items into the array.

    Returns how many bytes were received, or an error.
    """
    item = load_word(d, w.ITEMSIZE)
    done, reduced = load_word(progress, 0), load_word(progress, 1)
    staging = load_word(c, w.STAGING) + slot * 2 * IO_BYTES
    rest = done - reduced  # bytes of an incomplete item
    moved = receive_some(fd, staging + rest, min(nbytes - done, IO_BYTES))
    if moved <= 0:
        return moved
    complete = (rest + moved) // item * item
    target = address + reduced
    left = load_word(row, t.OFFSET2)
    store_word(load_word(c, w.SOURCES), left, target)
    store_word(load_word(c, w.SOURCES), 1 - left, staging)
    _reduce(c, d, target, 2, complete // item)
    move(staging, staging + complete, rest + moved - complete)
    store_word(progress, 1, reduced + complete)
    return moved


@inlined
def _transfer(c, d, row, progress, slot, fd, start, nbytes):
    """Move some bytes of a row on one stream; return how many, or an error."""
    address = _address_of(c, row, t.BUFFER, t.OFFSET) + start
    kind, done = load_word(row, t.KIND), load_word(progress, 0)
    if kind == t.SEND:
        return send_some(fd, address + done, min(nbytes - done, IO_BYTES))
    if kind == t.REDUCE:
        return _receive_and_reduce(c, d, row, progress, slot, fd, address, nbytes)
    return receive_some(fd, address + done, min(nbytes - done, IO_BYTES))


@inlined
def _may_move(c, row, stream):
    """Reserve the connection in the row's direction for this sweep.

    Returns False if an earlier row has reserved it.
    """
    direction = 0 if load_word(row, t.KIND) == t.SEND else 1
    connection = (2 * load_word(row, t.PEER) + direction) * load_word(c, w.STREAMS) + stream
    if load_word(load_word(c, w.BUSY), connection) == load_word(c, w.SWEEP):
        return False
    store_word(load_word(c, w.BUSY), connection, load_word(c, w.SWEEP))
    return True


@kernel
def sweep(c, d, listing):
    """Do one sweep over the rows of the phase.

    Returns DONE when all rows are complete, else PENDING, PENDING - 1 (nothing moved) or GONE. With `listing`, this
    moves nothing but lists the pollfds of the connections, or a line, that the phase waits for.
    """
    first, streams = load_word(c, w.PHASE), load_word(c, w.STREAMS)
    store_word(c, w.SWEEP, load_word(c, w.SWEEP) + 1)
    any_moved, any_left, slot, listed = False, False, 0, 0
    if listing:
        store_word(c, w.AWAITED, 0)
    for number in range(first, load_word(c, w.PHASE_END)):
        row = _row_at(d, number)
        if load_word(row, t.KIND) == t.AWAIT or load_word(row, t.KIND) == t.WAIT:
            taken = _take(c, row, load_word(c, w.PROGRESS) + 16 * (number - first) * streams, listing)
            any_moved |= taken == PENDING
            any_left |= taken < PENDING
        if load_word(row, t.KIND) > t.REDUCE:
            continue
        peer, total = load_word(row, t.PEER), load_word(row, t.NBYTES)
        for stream in range(streams):
            start = _bound(d, total, stream, streams)
            nbytes = _bound(d, total, stream + 1, streams) - start
            progress = load_word(c, w.PROGRESS) + 16 * ((number - first) * streams + stream)
            if load_word(progress, 0) == nbytes:
                continue
            any_left = True
            if not _may_move(c, row, stream):
                continue
            fd = load_word(load_word(c, w.FDS), peer * streams + stream)
            if listing:
                event = WRITABLE if load_word(row, t.KIND) == t.SEND else READABLE
                store_word(load_word(c, w.POLLFDS), listed, fd | event << 32)
                listed += 1
                continue
            moved = _transfer(c, d, row, progress, slot + stream, fd, start, nbytes)
            if moved < 0:
                return gone(c, peer, moved)
            if moved > 0:
                any_moved = True
                _hit_failpoint(d, _MID_CHUNK)
                store_word(progress, 0, load_word(progress, 0) + moved)
        if load_word(row, t.KIND) == t.REDUCE:
            slot += streams
    if listing:
        store_word(c, w.WAITING, listed)
        store_word(c, w.LISTED, listed)
    if not any_left:
        return DONE
    return PENDING if any_moved else PENDING - 1


# ---- a call -------------------------------------------------------------------------------------------


@inlined
def _time(c):
    return now(c + 8 * w.BACKOFF)


@inlined
def _begin_plan(c, row):
    store_word(c, w.PHASE, row)
    store_word(c, w.PHASE_END, row)


@inlined
def _wait(c):
    """Wait for what `sweep` or `list_missing` has listed; return False after 50 ms without progress."""
    if load_word(c, w.AWAITED) != 0:
        return sleep_until(c + 8 * w.BACKOFF, load_word(c, w.AWAITED), load_word(c, w.CALLS))
    return wait_ready(load_word(c, w.POLLFDS), load_word(c, w.LISTED), _POLL_MS) != 0


@kernel
def _run(c, d, exchanges, idle):
    """Continue the plan of a prepared call, or the meeting.

    With `exchanges`, this continues the meeting in which each rank sends its header to every other. Returns DONE,
    AGAIN, WORKED, GONE or GARBLED. `idle` is the number of sweeps in a row, up to now, in which nothing moved.
    """
    while True:
        if exchanges:
            status = exchange(c, d, idle)
            if status == DONE:
                return DONE
        else:
            if load_word(c, w.PHASE) == load_word(c, w.PHASE_END):
                if load_word(c, w.PHASE) == load_word(d, w.ROWS):
                    return DONE
                begin_phase(c, d, load_word(c, w.PHASE))
            status = sweep(c, d, False)
            if status == DONE:
                store_word(c, w.PHASE, load_word(c, w.PHASE_END))
        if status > DONE:
            return status
        idle = idle + 1 if status < PENDING else 0
        if idle > load_word(c, w.BACKOFF_SWEEPS):
            if exchanges:
                list_missing(c, d)
            else:
                sweep(c, d, True)
            if not _wait(c):
                return AGAIN
            idle |= SEEN_EVERY - 1
        if _time(c) - load_word(c, w.SINCE) > load_word(c, w.BACKOFF + BUDGET):
            return WORKED


@kernel
def _meet(c, d, idle):
    """Continue the meeting.

    Returns DONE when all headers that the call needs agree, else MISMATCH or a status of `_run`.
    """
    status = PENDING
    if load_word(c, w.MEETING) == 0:
        while status == PENDING:
            status = _run(c, d, True, idle)
            if status == DONE:
                status = compare(c, d)
        return status
    if load_word(c, w.STAGE) == w.MEET:
        status = _run(c, load_word(c, w.MEETING), False, idle)
        if status != DONE or all_agree(c):
            return status
        _begin_plan(c, 0)
        store_word(c, w.STAGE, w.GATHER)
    status = _run(c, load_word(c, w.GATHERING), False, idle)
    if status == DONE:
        status = compare(c, d)
    return GARBLED if status == DONE else status


@inlined
def _note_arrays(c, d, table):
    """Write the addresses of the arrays into BUFFERS.

    Returns False if one or both of two arrays hold the blocks of all ranks, and they overlap.
    """
    buffers, given = load_word(c, w.BUFFERS) + 8 * t.FIRST_ARRAY, word_at(table + LENGTH)
    for k in range(given):
        store_word(buffers, k, word_at(word_at(table + ITEMS + 8 * k) + DATA))
    size, split = load_word(c, w.SIZE), load_word(d, w.SPLIT_ARRAY)
    if given != 2 or split < 0:
        return True
    progress = load_word(d, w.BLOCK_BYTES)
    out, x = load_word(buffers, 0), load_word(buffers, 1)
    if size == 1:
        return out == x or out + progress <= x or x + progress <= out
    if split == w.BOTH:
        for k in range(size):
            store_word(buffers, k, out + k * progress)
            store_word(buffers, size + k, x + k * progress)
        return out + size * progress <= x or x + size * progress <= out
    first, other = (out, x) if split == 0 else (x, out)
    for k in range(size):
        store_word(buffers, split + k, first + k * progress)
    if split == 0:
        store_word(buffers, size, other)
    return other + progress <= first or first + size * progress <= other


@entry
def collective(context: Index, prepared: Index, arrays: PyObject) -> int:
    """Carry out a prepared call on a tuple of arrays.

    Returns DONE, AGAIN, WORKED, MISMATCH, GONE, GARBLED, LATER or UNCONNECTED. After MISMATCH, either this call did
    not match and is in progress until `after_mismatch`, or it is complete and an earlier call did not match.

    Args:
        context: the address of the group's context; tagged with RESUMED to continue the current call, and with
            MAY_RETURN_EARLY if the call may return before all ranks have made it.
        prepared: the address of the prepared call.
        arrays: contiguous ndarrays in the plan's order, which the caller keeps until the call is complete. If there
            are two and the plan has more, one or both hold the blocks of all ranks; the call then returns LATER if the
            two overlap.
    """
    tagged, d = integer(context), integer(prepared)
    c = tagged & ~(w.RESUMED | w.MAY_RETURN_EARLY)
    if tagged & w.RESUMED == 0:
        if not _note_arrays(c, d, object_at(arrays)):
            return LATER
        _hit_failpoint(d, _ENTER)
        store_word(c, w.CALLS, load_word(c, w.CALLS) + 1)
        began = _time(c)
        soon = began - load_word(c, w.SINCE) < SOON
        store_word(c, w.STREAK, load_word(c, w.STREAK) + 1 if soon else 0)
        store_word(c, w.BEGAN, began)
        if load_word(c, w.RING) != 0:
            record_call(
                load_word(c, w.RING),
                load_word(c, w.CALLS),
                load_word(d, w.CALL),
                load_word(d, w.SHAPE),
                began,
            )
        write_headers(c, d, tagged & w.MAY_RETURN_EARLY != 0 and load_word(d, w.CAN_RETURN_EARLY) != 0)
        _begin_plan(c, 0)
        store_word(c, w.STAGE, w.MEET)
    store_word(c, w.SINCE, _time(c))
    idle = 0 if tagged & w.RESUMED == 0 else SEEN_EVERY - 1
    if load_word(c, w.STAGE) == w.RUN:
        d = load_word(c, w.RUNNING)
    else:
        status = _meet(c, d, idle)
        if status != DONE:
            return status
        if load_word(d, w.EVEN) != 0 and block_of_all(c) >= 0:
            d = load_word(d, w.EVEN)
        store_word(c, w.RUNNING, d)
        _begin_plan(c, load_word(d, w.PAYLOADS))
        store_word(c, w.STAGE, w.RUN)
        _hit_failpoint(d, _MET)
        if load_word(d, w.LACKS_PEERS) != 0:
            return UNCONNECTED
    status = _run(c, d, False, idle)
    if status == DONE:
        _hit_failpoint(d, _BEFORE_DONE)
        status = finish(c)
        if status != GARBLED:
            store_word(c, w.STAGE, w.IDLE)
            store_word(c, w.FINISHED, load_word(c, w.CALLS))
            if load_word(c, w.RING) != 0:
                record_end(load_word(c, w.RING), load_word(c, w.CALLS), load_word(c, w.BEGAN), _time(c))
            _hit_failpoint(d, _AFTER_DONE)
    return status


@entry
def after_mismatch(context: Index) -> int:
    """End a call that did not match, after Python has read its headers."""
    c = integer(context)
    skip_frames(c)
    store_word(c, w.STAGE, w.IDLE)
    return DONE


@entry
def settle(context: Index, milliseconds: Index) -> int:
    """Read the headers that early-return calls have skipped.

    Must be called between two calls. Returns DONE when no header is unread, GONE, GARBLED, or AGAIN if headers have not
    arrived: call again then.
    """
    c = integer(context)
    status = read_unread_headers(c)
    if status == PENDING:
        wait_ready(load_word(c, w.POLLFDS), load_word(c, w.LISTED), integer(milliseconds))
        status = AGAIN
    return status
