"""Reducers: C functions that fold n arrays of one dtype element by element, by any of the operations.

    void reducer(int64 op, int64 dst, int64 srcs, int64 n, int64 count)

`srcs` is the address of n addresses, each of `count` elements; so many are at `dst`, which is one of the
sources or apart from all of them. Protocols are compiled once, know no dtype, and call this by its address.
There is one function a dtype, compiled at its first use and kept on disk, and one a custom operation and dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.core import cgutils
from numba.core.ccallback import CFunc
from numba.core.errors import NumbaError
from numba.extending import intrinsic, is_jitted

from ..core.reduce_op import AVG, BAND, BOR, BXOR, MAX, MIN, ReduceOp
from ..errors import ArrayError, UsageError
from .elements import WORD, Element, Half, computed_as, element_of, reducer_signature
from .fold import Combine, Operands, Registers, Shape, Tile, fold, shapes, stream
from .jit import c_function, users_function


class Reducer(NamedTuple):
    """A compiled reduction of one dtype: the C function's address, its first argument, and bytes of an element."""

    address: int
    code: int
    itemsize: int


_reducers: dict[tuple[ReduceOp | int, np.dtype[Any]], Reducer] = {}


def reducer(op: ReduceOp, dtype: np.dtype[Any]) -> Reducer:
    """The compiled reduction by `op` of arrays of `dtype`; compiled or loaded at the first call.

    ArrayError where there is no such operation for this dtype, UsageError where Numba cannot compile a user's function.
    A custom operation stays compiled, and its ReduceOp alive, until the process ends.
    """
    custom = op if op.function is not None else None
    key = (custom or op.code, dtype)
    found = _reducers.get(key)
    if found is None:
        element = memory_type(op, dtype)
        refuse_undefined(op, dtype)
        found = _reducers[key] = Reducer(_compile(custom, element, dtype).address, op.code, dtype.itemsize)
    return found


@cache  # which keeps the code alive
def _compile(custom: ReduceOp | None, element: types.Type, dtype: np.dtype[Any]) -> CFunc:
    if custom is not None:
        return compile_custom(custom, element, dtype)
    return c_function(_reduce, reducer_signature(element), f"reductions of {dtype}")


def _reduce(op, dst, srcs, n, count):
    fold(op, dst, srcs, n, count)


_KINDS = "biufc"
HALVES = ("float16", "bfloat16")
_UNDEFINED = {
    "b": ((AVG,), "convert it with .astype first, say to float32"),
    "f": ((BAND, BOR, BXOR), "view it as integers with .view if bits are meant"),
    "c": ((MIN, MAX, BAND, BOR, BXOR), "reduce abs(x), or x.real and x.imag, or use ReduceOp.custom"),
}


def kind_of(dtype: np.dtype[Any]) -> str:
    """The kind of a dtype as NumPy names it, halves among the floats."""
    return "f" if dtype.name in HALVES else dtype.kind


def refuse_undefined(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """Raise ArrayError, with the cure, where an operation means nothing for a dtype."""
    codes, cure = _UNDEFINED.get(kind_of(dtype), ((), ""))
    if op.code in codes:
        raise ArrayError(f"{op!r} is not defined for dtype {dtype}; {cure}")


def memory_type(op: ReduceOp, dtype: np.dtype[Any]) -> types.Type:
    """Numba's type of an element in memory."""
    if not dtype.isnative:
        raise ArrayError(
            f"{op!r} needs the machine's byte order, got dtype {dtype}; use x.astype({dtype.newbyteorder('=')!r})"
        )
    if dtype.name in HALVES:
        return Half(dtype.name)
    if dtype.isbuiltin != 2 and dtype.kind in _KINDS and dtype.itemsize <= (16 if dtype.kind == "c" else 8):
        return from_dtype(dtype)
    if dtype.names is None or op.function is None:
        raise ArrayError(f"{op!r} cannot reduce dtype {dtype}; {_cure(dtype)}")
    try:
        return from_dtype(dtype)
    except (NotImplementedError, TypeError, NumbaError) as error:
        raise ArrayError(
            f"Numba has no type for dtype {dtype} ({error}); reduce its fields one by one"
        ) from error


def _cure(dtype: np.dtype[Any]) -> str:
    if dtype.names is not None:
        return "reduce its fields one by one, or use ReduceOp.custom with a function of two records"
    if dtype.kind in "mM":
        return "reduce x.view(numpy.int64), where NaT is the smallest integer"
    if dtype.kind in "fc" and dtype.isbuiltin != 2:  # 2: float8 of ml_dtypes
        return "use .astype to float64 or complex128, the widest that are compiled"
    if dtype.kind == "O":
        return "give it a numeric dtype with .astype, or use the object collectives"
    return "use an integer, float or complex dtype, bool, float16 or bfloat16"


# ---- a user's own elementwise function f(a, b), in the same loops ------------------------------------------


def plain_function(function: Callable[[Any, Any], Any]) -> Any:
    """The function as Python wrote it, also of one that is jitted; a ufunc or builtin through a lambda."""
    python = getattr(function, "py_func", function)
    return python if isinstance(python, FunctionType) else lambda a, b: function(a, b)


def compile_custom(op: ReduceOp, element: types.Type, dtype: np.dtype[Any]) -> CFunc:
    """Compile a reducer for a custom operation, or raise UsageError; its code is not kept on disk.

    The function gets scalars of the dtype (float32 for float16 and bfloat16), or private records it may write
    to. What it returns is converted as by an assignment. It must not raise.
    """
    function: Any = op.function
    if not is_jitted(function):
        function = users_function(plain_function(function))

    def reduce(op, dst, srcs, n, count):
        _fold_by(function, dst, srcs, n, count)

    try:
        return c_function(reduce, reducer_signature(element), f"{op!r} of {dtype}", keep=False)
    except Exception as error:  # Numba lets errors of many kinds through
        raise UsageError(
            f"{op!r}: Numba cannot compile the function {op.name!r} for elements of dtype {dtype}; "
            f"it must take two of them and return one. Numba says: {error}"
        ) from error


@intrinsic
def _fold_by(typing_context, function, dst, srcs, n, count):
    """Reduce `n` arrays of `count` elements, whose addresses are at `srcs`, into `dst` by a jitted function."""
    kind = dst.dtype
    operand = computed_as(kind)
    call = function.get_call_type(typing_context, (operand, operand), {})

    def emit(context, builder, signature, args):
        _, pointer, table, number, elements = args
        implementation = context.get_function(function, call)

        def combine(builder, a, b):
            return context.cast(builder, implementation(builder, (a, b)), call.return_type, operand)

        if isinstance(kind, types.Record):
            tiles: list[Tile] = [_Record(context, builder, kind, combine)]
        else:
            element, model = element_of(kind), context.data_model_manager[operand]
            tiles = [_OneByOne(builder, element, shape, combine, model) for shape in shapes(element)]
        nbytes = builder.mul(elements, WORD(tiles[-1].nbytes))
        stream(builder, tiles, Operands(builder.ptrtoint(pointer, WORD), table, number, nbytes))
        return context.get_dummy_value()

    return types.void(function, dst, srcs, n, count), emit


class _OneByOne(Registers):
    """Registers that are combined element by element, in a loop of fixed length that LLVM vectorises: it touches two
    private arrays and nothing else, so there is no overlap to check; where the function is simple they end up in
    registers.
    """

    def __init__(
        self, builder: ir.IRBuilder, element: Element, shape: Shape, combine: Combine, model: Any
    ) -> None:
        super().__init__(builder, element, shape, combine)
        self._model = model
        self._new = self.registers(builder)

    def take(self, builder: ir.IRBuilder, address: ir.Value) -> None:
        for i, new in self.load(builder, address):
            builder.store(new, self.place(builder, self._new, i))
        data = self._model.get_data_type().as_pointer()
        first, second = builder.bitcast(self.taken, data), builder.bitcast(self._new, data)
        elements = self.shape.registers * self.shape.width // self.element.lanes
        with cgutils.for_range(builder, WORD(elements)) as loop:
            place = builder.gep(first, [loop.index])
            a = self._model.load_from_data_pointer(builder, place)
            b = self._model.load_from_data_pointer(builder, builder.gep(second, [loop.index]))
            builder.store(self._model.as_data(builder, self.combine(builder, a, b)), place)


class _Record:
    """A structured element: private copies keep a function that writes into its arguments off a peer's data."""

    def __init__(self, context: Any, builder: ir.IRBuilder, record: types.Record, combine: Combine) -> None:
        self.nbytes = max(1, record.size)  # a dtype without fields has no bytes, and loops divide by this
        self._combine = combine
        self._size, kind = WORD(record.size), context.get_data_type(record)
        self._taken, self._new = (cgutils.alloca_once(builder, kind) for _ in range(2))
        for private in (self._taken, self._new):
            private.align = 16  # Numba takes the fields of an aligned dtype to be aligned

    def _copy(self, builder: ir.IRBuilder, dst: ir.Value, src: ir.Value) -> None:
        cgutils.raw_memcpy(builder, dst, src, self._size, 1)

    def _pointer(self, builder: ir.IRBuilder, address: ir.Value) -> Any:
        return builder.inttoptr(address, self._taken.type)

    def start(self, builder: ir.IRBuilder, address: ir.Value) -> None:
        self._copy(builder, self._taken, self._pointer(builder, address))

    def take(self, builder: ir.IRBuilder, address: ir.Value) -> None:
        self._copy(builder, self._new, self._pointer(builder, address))
        self._copy(builder, self._taken, self._combine(builder, self._taken, self._new))

    def finish(self, builder: ir.IRBuilder, address: ir.Value) -> None:
        self._copy(builder, self._pointer(builder, address), self._taken)
