"""Keyword arguments inside `try`: refuse calls of fastcoll whose arguments' names this Numba loses.

`fastcoll_autoload.keep_keywords` mends the table of Numba's that is known. What another Numba does is tried here, on a
function of a few instructions, and if it loses the names, functions that have such a call are refused: an overload
cannot tell `broadcast(x, group_src=1, group=g)` without its names from `broadcast(x, 1, g)`.
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
    """Whether Numba compiles a call inside `try` without the names of its arguments."""
    blocks = run_frontend(_tries).blocks.values()
    calls = [call for block in blocks for call in block.find_exprs("call")]
    return not any(isinstance(call, Expr) and call.kws for call in calls)


def refuse_lost(code: CodeType) -> None:
    """Refuse a function that calls with keyword arguments inside `try`, if their names are lost.

    Raises:
        TypingError: it does so, whatever it calls: the bytecode does not say which call is fastcoll's.
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
