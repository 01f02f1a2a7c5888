"""The door: how compiled callers, which have addresses and numbers, call the operations of a group.

A group has a *row*, a table of words in memory that stays where it is and is never used for another group:

    word           what
    CONTEXT        handle of the ways of collectives (shm: the context, rounds.py), 0: none
    MAILBOX        handle of the ways of messages (shm: the mailbox, rings.py), 0: none
    RANK, SIZE     this process's rank in the group and how many there are; SIZE is 0 where nobody has asked yet or the
                   group is gone; both are -1 where this process is not in the group
    RANKS          address of a word for each rank, its global rank; 0: they are the same
    NUMBER         which row it is (callers/rows.py)
    DOOR           address of `door`
    ASK, TORN      Python's functions that do what no way can, and that are told of an exception
    ERRORS         a dict of what they raised, by thread
    AGAIN          an object whose truth raises what is in ERRORS, if no handler of compiled code may end that
    WAYS + op      of each operation the address of a *way*, a C function that does the plain case of it alone; 0: none

    int64 door(int64 row, int64 op, int64 data, int64 out, int64 nbytes, int64 call, int64 peer)
    int64 way(int64 handle, int64 data, int64 out, int64 nbytes, int64 call, int64 peer)

A way returns a status (core/status.py); one that has a result, such as a receive (the sender's rank), returns -1 -
result on success. Every status except DONE leaves the operation to Python. Threads
write rows with Python's lock, and compiled callers read them without: each word has a value at any time that does no
harm beside those that the other words had or will have.
"""

from __future__ import annotations

from functools import cache

from ..compiler import llvm
from ..compiler.jit import NJIT, c_function, external, inlined, instruction, kernel
from ..core.operations import OPERATIONS
from ..core.status import DONE, LATER
from .primitives import load_acquire, load_word, store_word, this_thread

CONTEXT, MAILBOX, RANK, SIZE, RANKS, NUMBER, DOOR, ASK, TORN, ERRORS, AGAIN, WAYS = range(12)
# Operations in addition to those of core/signature.py.
REDUCE_SCATTER_SPLIT, SPLIT, SEND, RECV, POST_SEND, POST_RECV, WAIT, TEST, WAIT_ANY = range(28, 37)
ROW_WORDS = WAYS + WAIT_ANY + 1
RAISED = -1  # what the door returns for an exception, which is kept

# The words of a question to Python: the door's arguments, the status so far, and room for the three of an exception.
QUESTION_WORDS = 8

assert len(OPERATIONS) <= REDUCE_SCATTER_SPLIT

_has_gil = external("PyGILState_Check", "int32()")
_leave = external("PyEval_SaveThread", "int64()")
_return = external("PyEval_RestoreThread", "void(int64)")
ensure = external("PyGILState_Ensure", "int32()")
release = external("PyGILState_Release", "void(int32)")
_call = external("PyObject_CallObject", "int64(int64, int64)")
_new_tuple = external("PyTuple_New", "int64(int64)")
_set_element = external("PyTuple_SetItem", "int32(int64, int64, int64)")
_keep = external("Py_IncRef", "void(int64)")
drop = external("Py_DecRef", "void(int64)")
new_integer = external("PyLong_FromLongLong", "int64(int64)")
value_of = external("PyLong_AsLongLong", "int64(int64)")
_fetch = external("PyErr_Fetch", "void(int64, int64, int64)")
_normalize = external("PyErr_NormalizeException", "void(int64, int64, int64)")
_set_traceback = external("PyException_SetTraceback", "int32(int64, int64)")
_add_pending = external("Py_AddPendingCall", "int32(int64, int64)")
_set_item = external("PyDict_SetItem", "int32(int64, int64, int64)")


@instruction("int64")
def own_words(builder):
    """The address of some words of this function's own: room for a question, or for an exception."""
    with builder.goto_entry_block():
        place = builder.alloca(llvm.ir.ArrayType(llvm.WORD, QUESTION_WORDS + 3))
    return builder.ptrtoint(place, llvm.WORD)


@instruction("int64")
def _go(builder, way, handle, data, out, nbytes, call, peer):
    kind = llvm.ir.FunctionType(llvm.WORD, [llvm.WORD] * 6)
    return builder.call(llvm.pointer(builder, way, kind), [handle, data, out, nbytes, call, peer])


@inlined
def call_with(function, given):
    """Call a Python function with one object; return a new reference, or 0. (3.10 has no PyObject_CallOneArg.)"""
    arguments = _new_tuple(1)
    _keep(given)
    _set_element(arguments, 0, given)
    answer = _call(function, arguments)
    drop(arguments)
    return answer


@inlined
def keep_error(errors, words):
    """Put the exception that is under way into a dict; nothing of this runs Python code, where a signal could come."""
    kind = words + 8 * QUESTION_WORDS
    error, trace = kind + 8, kind + 16
    _fetch(kind, error, trace)
    _normalize(kind, error, trace)
    if load_word(trace, 0) != 0:
        _set_traceback(load_word(error, 0), load_word(trace, 0))
        drop(load_word(trace, 0))
    thread = new_integer(this_thread())
    _set_item(errors, thread, load_word(error, 0))
    drop(thread)
    drop(load_word(error, 0))
    drop(load_word(kind, 0))


@instruction("int64")
def _truth(builder):
    """The address of what asks an object for its truth, as a pending call: -1, if that raises an exception."""
    function = llvm.function(builder, "PyObject_IsTrue", llvm.HALF_WORD, llvm.BYTE.as_pointer())
    return builder.ptrtoint(function, llvm.WORD)


@kernel
def _ask(row, question):
    """What Python's function makes of the question: a number from 0 on, or RAISED.

    A signal's handler may raise before the function's first line, or after its last: so what it raised is taken here,
    and the group is told of it by a second call (TORN), which raises what is right for the caller.

    The caller may catch it, and Numba knows no handler but `except Exception`: so Python's main thread looks at it once
    more (AGAIN) as it runs Python code next, where the caller returns at the latest.
    """
    state = ensure()
    given = new_integer(question)
    answer = call_with(load_word(row, ASK), given)
    if answer == 0:
        keep_error(load_word(row, ERRORS), question)
        answer = call_with(load_word(row, TORN), given)
        if answer == 0:
            keep_error(load_word(row, ERRORS), question)
        else:
            drop(answer)
        _add_pending(_truth(), load_word(row, AGAIN))
        value = RAISED
    else:
        value = value_of(answer)
        drop(answer)
    drop(given)
    release(state)
    return value


def door(row, op, data, out, nbytes, call, peer):
    """Carry an operation out; see callers/rows.py for callers."""
    code = LATER
    way, handle = load_acquire(row + 8 * (WAYS + op)), load_word(row, MAILBOX if op >= SEND else CONTEXT)
    if way != 0 and handle != 0:
        thread = _leave() if _has_gil() else 0
        code = _go(way, handle, data, out, nbytes, call, peer)
        if thread != 0:
            _return(thread)
        if code <= DONE:
            return -1 - code if code < DONE else DONE
    question = own_words()
    store_word(question, 0, row)
    store_word(question, 1, op)
    store_word(question, 2, data)
    store_word(question, 3, out)
    store_word(question, 4, nbytes)
    store_word(question, 5, call)
    store_word(question, 6, peer)
    store_word(question, 7, code)
    return _ask(row, question)


@cache
def door_address() -> int:
    """The address of `door`, compiled or loaded."""
    return c_function(door, f"int64({', '.join(['int64'] * 7)})", "the door", NJIT)
