"""The engine: one compiled call carries out a collective over nonblocking sockets, the meeting and then the plan.

    IDLE --begin--> MEET --all headers are here and agree--> RUN --the last phase is complete--> IDLE
                    MEET --they differ, and Python has read them--> IDLE

It comes back within 50 ms, with its state in the context, whenever it can't go on or has worked for so long.
"""

from __future__ import annotations

from ...core.status import AGAIN, DONE, WORKED
from ...kernels.jit import entry, inlined, kernel
from ...kernels.primitives import load_word, store_word, word_at
from ...kernels.pyobjects import DATA, ITEMS, LENGTH, Index, PyObject, integer, object_at
from ...kernels.sockets import wait_ready
from ...kernels.waiting import BUDGET, now
from . import words as w
from .meet import GOES_ON, compare, exchange, forget_frames, keep_rest, list_missing, write_headers
from .plans.table import FIRST_ARRAY
from .rows import begin_phase, list_waiting, sweep
from .words import IDLE, MEET, RESUMED, RUN, STAGE

_POLL_MS = 50


@inlined
def _time(c):
    return now(c + 8 * w.PATIENCE)


@inlined
def _is_over(c):
    """Whether this run has lasted for as long as it may."""
    return _time(c) - load_word(c, w.SINCE) > load_word(c, w.PATIENCE + BUDGET)


@inlined
def _sleep(c, connections):
    """Sleep until one of the listed connections is ready; False: none was for a while."""
    return wait_ready(load_word(c, w.POLLFDS), connections, _POLL_MS) > 0


@kernel
def _run_plan(c, d):
    """Go on with the plan of a prepared call: DONE, AGAIN, WORKED or GONE."""
    idle = 0
    while True:
        if load_word(c, w.PHASE) == load_word(c, w.PHASE_END):
            if load_word(c, w.PHASE) == load_word(d, w.ROWS):
                return DONE
            begin_phase(c, d, load_word(c, w.PHASE))
        status = sweep(c, d)
        if status == DONE:
            store_word(c, w.PHASE, load_word(c, w.PHASE_END))
        elif status > DONE:
            return status
        elif status == GOES_ON:
            idle = 0
        else:
            idle += 1
            if idle > load_word(c, w.PATIENT_SWEEPS) and not _sleep(c, list_waiting(c, d)):
                return AGAIN
        if _is_over(c):
            return WORKED


@inlined
def _begin_plan(c, row):
    store_word(c, w.PHASE, row)
    store_word(c, w.PHASE_END, row)


@kernel
def _exchange_all(c, d):
    """Go on with the meeting of a group in which everybody sends to everybody: DONE, AGAIN, WORKED or GONE."""
    idle = 0
    while True:
        status = exchange(c, d)
        if status >= DONE:
            return status
        if status == GOES_ON:
            idle = 0
        else:
            idle += 1
            if idle > load_word(c, w.PATIENT_SWEEPS) and not _sleep(c, list_missing(c)):
                return AGAIN
        if _is_over(c):
            return WORKED


@inlined
def _meet(c, d):
    meeting = load_word(c, w.MEETING)
    return _exchange_all(c, d) if meeting == 0 else _run_plan(c, meeting)


@inlined
def _take_arrays(c, arrays):
    """The addresses of the call's arrays, as buffers of the plan."""
    for k in range(word_at(arrays + LENGTH)):
        array = word_at(arrays + ITEMS + 8 * k)
        store_word(load_word(c, w.BUFFERS), FIRST_ARRAY + k, word_at(array + DATA))


@kernel
def _go_on(c, d):
    store_word(c, w.SINCE, _time(c))
    if load_word(c, STAGE) == MEET:
        status = _meet(c, d)
        if status != DONE:
            return status
        status = compare(c, d)
        if status != DONE:
            return status
        _begin_plan(c, load_word(d, w.PAYLOADS))
        store_word(c, STAGE, RUN)
    status = _run_plan(c, d)
    if status == DONE:
        forget_frames(c)
        store_word(c, STAGE, IDLE)
    return status


@entry
def collective(context: Index, prepared: Index, arrays: PyObject) -> int:
    """Carry out a prepared call on a tuple of arrays; returns a status of words.py.

    Args:
        context: the address of the group's context, with RESUMED to go on with the call under way.
        prepared: the address of the prepared call.
        arrays: contiguous ndarrays, as the plan numbers them; the caller keeps them until the call is over.
    """
    tagged, d = integer(context), integer(prepared)
    c = tagged & ~RESUMED
    if tagged & RESUMED == 0:
        _take_arrays(c, object_at(arrays))
        store_word(c, w.CALLS, load_word(c, w.CALLS) + 1)
        write_headers(c, d)
        _begin_plan(c, 0)
        store_word(c, STAGE, MEET)
    return _go_on(c, d)


@entry
def after_mismatch(context: Index) -> int:
    """Make ready for the next call, once the headers of one that did not match have been read."""
    c = integer(context)
    keep_rest(c)
    store_word(c, STAGE, IDLE)
    return DONE
