"""Compile a user's elementwise function f(a, b) into the loops of fold.py.

Each process compiles it; the code is not kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.core import cgutils
from numba.core.ccallback import CFunc
from numba.core.errors import NumbaError, TypingError
from numba.extending import intrinsic, is_jitted

from ..compiler.cache import ProgressLog
from ..compiler.compiling import FLAGS, compilation
from ..compiler.elements import CONVERSIONS, WORD, Element, Half, computed_as, element_of
from ..core.reduce_op import ReduceOp
from ..errors import ArrayError, UsageError
from .fold import Combine, Operands, Registers, Tile, TileShape, shapes, stream


def plain_function(function: Callable[[Any, Any], Any]) -> Any:
    """Return the Python function of a plain or jitted one; wrap any other callable."""
    python = getattr(function, "py_func", function)
    return python if isinstance(python, FunctionType) else lambda a, b: function(a, b)


def memory_type(dtype: np.dtype[Any]) -> types.Type:
    """Return Numba's type of an element in memory."""
    if dtype.name in CONVERSIONS:
        return Half(dtype.name)
    try:
        return from_dtype(dtype)
    except (NotImplementedError, TypeError, NumbaError) as error:
        raise ArrayError(
            f"Numba has no type for dtype {dtype} ({error}); reduce its fields one by one"
        ) from error


@cache  # the cache keeps the code alive
def compile_custom(op: ReduceOp, dtype: np.dtype[Any]) -> CFunc:
    """Compile a reducer for a custom operation, or raise UsageError.

    The reducer's `address` is valid as long as the returned object lives. The user's function gets scalars of the dtype
    (float32 for float16 and bfloat16), or private records, which it may modify. Its result is converted to the dtype as
    in an assignment. It must not raise.
    """
    function: Any = op.function
    if not is_jitted(function):
        with compilation():
            function = numba.njit(**FLAGS, forceinline=True, no_cfunc_wrapper=True)(plain_function(function))

    def reduce(op, dst, srcs, n, count):
        _fold_by(function, dst, srcs, n, count)

    element = memory_type(dtype)
    words = types.int64, types.CPointer(element), *[types.int64] * 3
    compiled = CFunc(reduce, (words, types.void), locals={}, options=dict(FLAGS))
    try:
        with compilation(), ProgressLog(f"{op!r} of {dtype}"):
            compiled.compile()
    except Exception as error:  # Numba raises errors of many kinds
        raise UsageError(
            f"{op!r}: Numba cannot compile the function {op.name!r} for elements of dtype {dtype}; "
            f"it must take two of them and return one. Numba says: {error}"
        ) from error
    return compiled


@intrinsic
def _fold_by(typing_context, function, dst, srcs, n, count):
    """Reduce `n` arrays of `count` elements into `dst` by a jitted function.

    The arrays' addresses are at `srcs`.
    """
    kind = dst.dtype
    operand = computed_as(kind)
    call = function.get_call_type(typing_context, (operand, operand), {})
    if isinstance(call.return_type, types.Optional):
        raise TypingError("a path through it ends without a `return`, or returns None")

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
    """Registers that are combined element by element.

    LLVM vectorises the loop, which has a fixed length. The loop accesses two private arrays and nothing else, so there
    is no overlap to check. If the function is simple, LLVM keeps the two arrays in registers.
    """

    def __init__(
        self, builder: ir.IRBuilder, element: Element, shape: TileShape, combine: Combine, model: Any
    ) -> None:
        super().__init__(builder, element, shape, combine)
        self._model = model
        self._new = self.registers(builder)

    def take(self, builder: ir.IRBuilder, address: ir.Value) -> None:
        for i, new in self.load(builder, address):
            builder.store(new, self.register(builder, self._new, i))
        data = self._model.get_data_type().as_pointer()
        first, second = builder.bitcast(self.taken, data), builder.bitcast(self._new, data)
        elements = self.shape.registers * self.shape.width // self.element.lanes
        with cgutils.for_range(builder, WORD(elements)) as loop:
            register = builder.gep(first, [loop.index])
            a = self._model.load_from_data_pointer(builder, register)
            b = self._model.load_from_data_pointer(builder, builder.gep(second, [loop.index]))
            builder.store(self._model.as_data(builder, self.combine(builder, a, b)), register)


class _Record:
    """A structured element.

    Private copies ensure that a function that modifies its arguments does not modify a peer's data.
    """

    def __init__(self, context: Any, builder: ir.IRBuilder, record: types.Record, combine: Combine) -> None:
        self.nbytes = max(1, record.size)  # a dtype without fields has no bytes, and loops divide by this
        self._combine = combine
        self._size, kind = WORD(record.size), context.get_data_type(record)
        # Not by cgutils.alloca_once, which fills the memory with zeros: LLVM took 48 s for 8 KiB of them.
        with builder.goto_entry_block():
            self._taken, self._new = (builder.alloca(kind) for _ in range(2))
        for private in (self._taken, self._new):
            private.align = 16  # Numba assumes that the fields of an aligned dtype are aligned

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
