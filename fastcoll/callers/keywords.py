"""Refuse functions in which this Numba would drop the names of keyword arguments inside `try`.

`fastcoll_autoload.keep_keywords` repairs the one table of Numba that is known to lose the names. This module tests on a
function of a few instructions whether the installed Numba still loses names. If it does, this module refuses every
function that has a call with keyword arguments inside `try`, because without names an overload cannot distinguish
`broadcast(x, group_src=1, group=g)` from `broadcast(x, 1, g)`.
"""

from __future__ import annotations

import dis
from functools import cache
from types import CodeType
from typing import Any

from numba.core.compiler import run_frontend
from numba.core.errors import TypingError
from numba.core.ir import Expr


def _tries(called: Any) -> None:
    try:
        called(named=1)
    except Exception:
        return


@cache
def are_lost() -> bool:
    """Whether Numba drops the names of keyword arguments in a call inside `try`."""
    blocks = run_frontend(_tries).blocks.values()
    calls = [call for block in blocks for call in block.find_exprs("call")]
    return not any(isinstance(call, Expr) and call.kws for call in calls)


def refuse_lost(code: CodeType) -> None:
    """Refuse a function with keyword arguments in a call inside `try`, if Numba drops their names.

    Raises:
        TypingError: the function has such a call. It may be a call of any function, because the bytecode does not show
            which calls are fastcoll's.
    """
    if are_lost() and _names_inside_try(code):
        raise TypingError(
            f"{code.co_name} calls with keyword arguments inside try, and this Numba passes them by position on "
            "Python 3.11 and 3.12; give all arguments inside try by position"
        )


def _names_inside_try(code: CodeType) -> bool:
    instructions = dis.Bytecode(code)
    guarded = [(entry.start, entry.end) for entry in getattr(instructions, "exception_entries", ())]
    return any(
        start <= instruction.offset < end
        for instruction in instructions
        if instruction.opname == "KW_NAMES"
        for start, end in guarded
    )
