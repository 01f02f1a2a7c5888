"""The C entry point, through which compiled callers call a group's operations.

Compiled callers (Numba's njit functions, and JAX) have addresses and numbers, no Python objects. A group has a
*descriptor*, a table of words at a fixed address, which is never reused for another group:

    word           content
    CONTEXT        first argument of the native calls of collectives (shm: the context, rounds.py), 0: none
    MAILBOX        first argument of the native calls of messages (shm: the mailbox, rings.py), 0: none
    RANK, SIZE     this process's rank in the group and the number of ranks; SIZE is 0 before the first use and after
                   the end of the group; both are -1 if this process is not in the group
    RANKS          address of a table of the ranks' global ranks; 0: they equal the ranks in the group
    NUMBER         number of the descriptor (callers/descriptors.py)
    C_ENTRY        address of `c_entry`, the entry point
    ASK, TORN      Python functions: ASK executes the calls that no native call completes; TORN handles an exception
                   that ASK has raised
    ERRORS         a dict of the exceptions that these functions have raised, by thread
    AGAIN          an object; testing its truth raises the exceptions in ERRORS that compiled code must not suppress
    NATIVE_CALLS + op
                   address of an operation's *native call*, a C function that completes the operation in the common
                   cases; 0: none

    int64 c_entry(int64 descriptor, int64 op, int64 data, int64 out, int64 nbytes, int64 call, int64 peer)
    int64 native_call(int64 handle, int64 data, int64 out, int64 nbytes, int64 call, int64 peer)

A native call returns a status (core/status.py). A native call that has a result, such as the sender's rank for a
receive, returns -1 - result on success. After every status except DONE, Python executes or completes the operation.

Threads write descriptors with the GIL, and compiled callers read them without it. Invariant: every value of a word is
harmless in combination with every earlier or later value of the other words. Python publishes the words that refer to
something else (kernels/shared_words.py), and compiled callers acquire them.
"""

from __future__ import annotations

from functools import cache

from ..compiler import llvm
from ..compiler.jit import NJIT, c_function, external, inlined, instruction, kernel
from ..core.operations import OPERATIONS
from ..core.status import DONE, LATER
from .primitives import load_acquire, load_word, store_word, this_thread

CONTEXT, MAILBOX, RANK, SIZE, RANKS, NUMBER, C_ENTRY, ASK, TORN, ERRORS, AGAIN, NATIVE_CALLS = range(12)
# Numbers of operations in addition to those of core/signature.py.
REDUCE_SCATTER_SPLIT, SPLIT, SEND, RECV, POST_SEND, POST_RECV, WAIT, TEST, WAIT_ANY = range(28, 37)
DESCRIPTOR_WORDS = NATIVE_CALLS + WAIT_ANY + 1
NATIVE_CALL = "int64(int64, int64, int64, int64, int64, int64)"
RAISED = -1  # result of the entry point after an exception, which is kept in ERRORS

# The words of a request to Python: the entry point's seven arguments, and the status so far.
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
    """Return the address of words on the caller's stack: a request, then three words for an exception."""
    with builder.goto_entry_block():
        room = builder.alloca(llvm.ir.ArrayType(llvm.WORD, QUESTION_WORDS + 3))
    return builder.ptrtoint(room, llvm.WORD)


@instruction("int64")
def _go(builder, native_call, handle, data, out, nbytes, call, peer):
    kind = llvm.ir.FunctionType(llvm.WORD, [llvm.WORD] * 6)
    return builder.call(llvm.pointer(builder, native_call, kind), [handle, data, out, nbytes, call, peer])


@inlined
def call_with(function, given):
    """Call a Python function with one object; return a new reference, or 0.

    Python 3.10 has no PyObject_CallOneArg.
    """
    arguments = _new_tuple(1)
    _keep(given)
    _set_element(arguments, 0, given)
    answer = _call(function, arguments)
    drop(arguments)
    return answer


@inlined
def keep_error(errors, words):
    """Move the current exception into a dict.

    Nothing here runs Python code, so no signal handler can interrupt it.
    """
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
    """Return the address of PyObject_IsTrue.

    It can be a pending call, because it returns -1 after an exception.
    """
    function = llvm.function(builder, "PyObject_IsTrue", llvm.HALF_WORD, llvm.BYTE.as_pointer())
    return builder.ptrtoint(function, llvm.WORD)


@kernel
def _ask(descriptor, question):
    """Let the Python function ASK execute a request; return its result or RAISED.

    A signal handler may raise before ASK's first line or after its last one, where no `try` in ASK is active. So any
    exception of ASK is stored in ERRORS here, and the function TORN then reports it to the group. If TORN raises, its
    exception replaces the stored one.

    Numba's `except Exception` catches every exception, so the caller may suppress even a KeyboardInterrupt. Therefore a
    pending call tests AGAIN, which raises the KeyboardInterrupt again, when Python's main thread next runs Python code,
    at the latest when the caller returns.
    """
    state = ensure()
    given = new_integer(question)
    answer = call_with(load_word(descriptor, ASK), given)
    if answer == 0:
        keep_error(load_word(descriptor, ERRORS), question)
        answer = call_with(load_word(descriptor, TORN), given)
        if answer == 0:
            keep_error(load_word(descriptor, ERRORS), question)
        else:
            drop(answer)
        _add_pending(_truth(), load_word(descriptor, AGAIN))
        value = RAISED
    else:
        value = value_of(answer)
        drop(answer)
    drop(given)
    release(state)
    return value


def c_entry(descriptor, op, data, out, nbytes, call, peer):
    """Execute an operation; callers/descriptors.py describes the arguments and the result.

    If the native call does not complete the operation, ASK gets the arguments and the status.
    """
    code = LATER
    native_call, handle = (
        load_acquire(descriptor + 8 * (NATIVE_CALLS + op)),
        load_acquire(descriptor + 8 * (MAILBOX if op >= SEND else CONTEXT)),
    )
    if native_call != 0 and handle != 0:
        thread = _leave() if _has_gil() else 0
        code = _go(native_call, handle, data, out, nbytes, call, peer)
        if thread != 0:
            _return(thread)
        if code <= DONE:
            return -1 - code if code < DONE else DONE
    question = own_words()
    store_word(question, 0, descriptor)
    store_word(question, 1, op)
    store_word(question, 2, data)
    store_word(question, 3, out)
    store_word(question, 4, nbytes)
    store_word(question, 5, call)
    store_word(question, 6, peer)
    store_word(question, 7, code)
    return _ask(descriptor, question)


@cache
def c_entry_address() -> int:
    """Return the address of `c_entry`, compiled or loaded."""
    return c_function(c_entry, f"int64({', '.join(['int64'] * 7)})", "the C entry point", NJIT)
