"""LLVM's types for functions that emit instructions; llvmlite is imported at the first access.

WORD, HALF_WORD, BYTE   integers of 64, 32 and 8 bits
VOID                    the result type of functions that return nothing
ir                      the module llvmlite.ir
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MADE: dict[str, Callable[[Any], Any]] = {
    "ir": lambda ir: ir,
    "WORD": lambda ir: ir.IntType(64),
    "HALF_WORD": lambda ir: ir.IntType(32),
    "BYTE": lambda ir: ir.IntType(8),
    "VOID": lambda ir: ir.VoidType(),
}


def __getattr__(name: str) -> Any:
    if name not in _MADE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llvmlite import ir

    return _MADE[name](ir)


def pointer(builder: Any, address: Any, lane: Any = None) -> Any:
    """Convert an address to an LLVM pointer to type `lane`; None: a 64-bit word."""
    word = __getattr__("WORD")
    return builder.inttoptr(address, (word if lane is None else lane).as_pointer())


def function(builder: Any, name: str, returns: Any, *kinds: Any) -> Any:
    """Declare and return a function of LLVM, CPython or libc, or one of OWN_SYMBOLS.

    machine_code.py has OWN_SYMBOLS, names of this package's own objects.
    """
    there = builder.module.globals.get(name)
    ir = __getattr__("ir")
    return there if there is not None else ir.Function(builder.module, ir.FunctionType(returns, kinds), name)
