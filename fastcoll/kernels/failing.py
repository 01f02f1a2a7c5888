"""Failpoints in kernels: `reached(NUMBER)`, compiled only if FASTCOLL_FAILPOINT is set.

A failpoint is a place where a test can kill, stop or delay a rank, or raise an exception in it. failpoints.py has the
table of actions, which compiled code finds by the name TABLE_SYMBOL. This code calls only libc and CPython, and needs
neither the GIL nor Python, so a failpoint may be in code without the GIL.
"""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable
from typing import Any

from .. import failpoints as fp
from ..compiler import llvm
from ..compiler.jit import Part, external, has_failpoints, instruction, kernel
from ..compiler.machine_code import OWN_SYMBOLS
from .primitives import load_acquire, load_word, store_word, swap_if_equal, this_thread, ticks

TABLE_SYMBOL = "fastcoll.failpoints"
OWN_SYMBOLS[TABLE_SYMBOL] = fp.TABLE

_kill = external("kill", "int32(int32, int32)")
_getpid = external("getpid", "int32()")
_exit = external("_exit", "void(int32)")
_nanosleep = external("nanosleep", "int32(int64, int64)")
_ensure = external("PyGILState_Ensure", "int32()")
_release = external("PyGILState_Release", "void(int32)")
_raise_in = external("PyThreadState_SetAsyncExc", "int32(int64, int64)")

_KILLED, _STOPPED = int(signal.SIGKILL), int(signal.SIGSTOP)
_BILLION = 1_000_000_000


@instruction("int64")
def _table(builder):
    return builder.ptrtoint(llvm.function(builder, TABLE_SYMBOL, llvm.VOID), llvm.WORD)


def failing(function: Callable[..., Any]) -> Any:
    """Return a kernel that is compiled only if there are failpoints.

    Otherwise its calls generate no code. This is decided when Numba first uses the kernel, because the import of
    fastcoll reads no environment variables.
    """

    def nothing(builder: Any, *values: Any) -> None:
        pass

    given = inspect.signature(function).parameters.values()
    builder = inspect.Parameter("builder", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    nothing.__signature__ = inspect.Signature([builder, *given])  # type: ignore[attr-defined]

    def make() -> Any:
        return (kernel(function) if has_failpoints() else instruction("void")(nothing)).made

    return Part(make, function)


@failing
def reached(number):
    """Hit the failpoint `number`."""
    row = _table() + 8 * fp.ROW_WORDS * number
    action = load_word(row, fp.ACTION)
    if action == 0:
        return
    count = load_acquire(row + 8 * fp.COUNT)
    # Threads of a rank may hit a failpoint at the same time.
    while not swap_if_equal(row + 8 * fp.COUNT, count, count + 1):
        count = load_acquire(row + 8 * fp.COUNT)
    which = load_word(row, fp.WHICH)
    if which != 0 and which != count + 1:
        return
    value = load_word(row, fp.VALUE)
    if action == fp.KILL:
        _kill(_getpid(), _KILLED)
    elif action == fp.STOP:
        _kill(_getpid(), _STOPPED)
    elif action == fp.EXIT:
        _exit(value)
    elif action == fp.RAISE:
        state = _ensure()
        _raise_in(this_thread(), value)
        _release(state)
    else:
        if action == fp.JITTER and value > 0:
            by_chance = (ticks() * 0x5851F42D4C957F2D >> 17 & 0x3FFFFFFFFFFF) % value
            store_word(row, fp.NAP, by_chance // _BILLION)
            store_word(row, fp.NAP + 1, by_chance % _BILLION)
        _nanosleep(row + 8 * fp.NAP, 0)


@failing
def reached_by(number, moved):
    """Hit the failpoint `number` if the kernel has moved anything."""
    if moved > 0:
        reached(number)
