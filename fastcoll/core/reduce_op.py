"""Reduction operations: the predefined ones, a scaled sum, and a user's own function."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from numbers import Number
from types import CodeType, FunctionType, NoneType
from typing import Any, ClassVar

import numpy as np

from ..errors import UsageError


@dataclass(frozen=True, slots=True, repr=False)
class ReduceOp:
    """An operation that combines the arrays of several ranks into one, element by element and in rank order.

    Predefined: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, LAND, LOR, LXOR. AVG divides the sum by
    the number of ranks (integers: truncated towards zero, as in NCCL). MIN and MAX propagate NaN, like
    `numpy.minimum`. On bool, SUM and MAX are "or", PRODUCT and MIN are "and", as in NumPy.
    LAND, LOR and LXOR are MPI's: every element except 0 is true, also NaN. If two or more ranks are
    combined, each element of the result is 0 or 1 in the array's dtype. If only one rank's array is
    reduced (in a group of one rank, or for rank 0 in a scan), the result is that array, unchanged.

    Attributes:
        name: "SUM", ..., "PREMUL_SUM", or a custom function's name.
        code: a small integer that is the same on all ranks; that of a custom function is a checksum of it.
        factor: PREMUL_SUM's scalar, else None.
        function: a custom operation's elementwise `f(a, b)`, else None.
    """

    SUM: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    LAND: ClassVar[ReduceOp]
    LOR: ClassVar[ReduceOp]
    LXOR: ClassVar[ReduceOp]

    name: str
    code: int
    factor: Any = None
    function: Callable[[Any, Any], Any] | None = None

    @staticmethod
    def PREMUL_SUM(factor: Any) -> ReduceOp:
        """Multiply this rank's array by the scalar `factor`, then add over the ranks.

        The factor may differ from rank to rank. Float and complex dtypes only.

        Args:
            factor: a number, or an array of one element; real for float dtypes.

        Raises:
            UsageError: the factor is neither a number nor an array of one element.
        """
        return ReduceOp("PREMUL_SUM", PREMUL_SUM, factor=_number(factor))

    @staticmethod
    def custom(function: Callable[[Any, Any], Any], name: str | None = None) -> ReduceOp:
        """Make a reduction from an elementwise, associative `function(a, b)`, compiled by Numba.

        The function need not be commutative: ranks are combined in the order 0..n-1. It gets and
        returns scalars of the array's dtype (records for structured dtypes). Make the ReduceOp once
        and keep it, since every ReduceOp is compiled separately.

        Raises:
            UsageError: `function` cannot be called with two arguments.

        Examples:
            >>> absmax = ReduceOp.custom(lambda a, b: a if abs(a) >= abs(b) else b, "absmax")
        """
        if not callable(function):
            raise UsageError(f"ReduceOp.custom takes a function f(a, b), got {type(function).__name__}")
        if type(function).__hash__ is None:
            raise UsageError(
                f"ReduceOp.custom got a {type(function).__name__}, which has no hash; give a function that calls it"
            )
        text = label = name or str(getattr(function, "__name__", "custom"))
        plain = getattr(function, "py_func", function)
        if isinstance(plain, FunctionType):
            cells = []
            for cell in plain.__closure__ or ():
                with suppress(ValueError):  # the name that the function refers to is not bound yet
                    cells.append(cell.cell_contents)
            text += _describe_code(plain.__code__) + _describe_values([*(plain.__defaults__ or ()), *cells])
        # The code has 15 bits of a checksum, which is the same on all ranks if the functions are the same.
        return ReduceOp(label, CUSTOM + (zlib.crc32(text.encode()) & 0x7FFF), function=function)

    def __repr__(self) -> str:
        return f"ReduceOp.{self.name}" if self.factor is None else f"ReduceOp.{self.name}({self.factor!r})"


# Codes fit in 16 bits, since they are part of the word that ranks compare.
SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM, LAND, LOR, LXOR, CUSTOM = range(1, 14)
NAMES = {code: name for name, code in list(globals().items()) if isinstance(code, int) and name.isupper()}
PREDEFINED = {code: ReduceOp(name, code) for code, name in NAMES.items() if code not in (PREMUL_SUM, CUSTOM)}
"""The operations without a factor and function, by code."""

for _op in PREDEFINED.values():
    setattr(ReduceOp, _op.name, _op)


def _number(factor: Any) -> Any:
    """Return PREMUL_SUM's factor, which may be an array of one element, as a number."""
    value = factor
    if hasattr(factor, "item") and not isinstance(factor, Number):
        with suppress(RuntimeError, TypeError, ValueError):  # more than one element
            value = factor.item()
    if not isinstance(value, Number):
        raise UsageError(f"PREMUL_SUM's factor is {factor!r:.80}, a {type(factor).__name__}; give one number")
    return value


def _describe_code(code: CodeType) -> str:
    return f"{code.co_code.hex()} {code.co_names} {_describe_values(code.co_consts)}"


def _describe_values(values: Iterable[Any]) -> str:
    return " ".join(map(_describe, values))


def _describe(value: Any) -> str:
    """Describe a number, a text, nested code, or a tuple or set of these by value, and another object by its type.

    The repr of other objects may contain an address, which differs between ranks.
    """
    if isinstance(value, CodeType):
        return _describe_code(value)
    if isinstance(value, tuple):
        return f"({_describe_values(value)})"
    if isinstance(value, frozenset):
        return f"{{{' '.join(sorted(map(_describe, value)))}}}"
    is_value = isinstance(value, int | float | complex | str | bytes | NoneType | np.generic)
    return repr(value) if is_value else type(value).__name__


class _DeprecatedReduceOp:
    """The class of `reduce_op`, which has SUM, PRODUCT, MIN and MAX as in torch's first releases; use ReduceOp."""

    def __getattr__(self, name: str) -> ReduceOp:
        if name not in ("SUM", "PRODUCT", "MIN", "MAX"):
            raise AttributeError(f"reduce_op has SUM, PRODUCT, MIN and MAX, not {name}; use ReduceOp")
        warnings.warn("fastcoll.reduce_op is deprecated, use fastcoll.ReduceOp", FutureWarning, stacklevel=2)
        op: ReduceOp = getattr(ReduceOp, name)
        return op


reduce_op = _DeprecatedReduceOp()
