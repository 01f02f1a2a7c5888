"""The body of the predefined operations' reducers: a loop nest for each operation of a dtype, chosen by its code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..core.reduce_op import AVG, SUM
from .combine import Combine, division_of, operations_of
from .elements import element_of
from .stream import Operands, Registers, as_it_is, shapes, stream
from .vectors import WORD


@intrinsic
def fold(typing_context, op, dst, srcs, n, count):
    """Reduce `n` arrays of `count` elements, whose addresses are at `srcs`, into the array at the pointer `dst`.

    A code that names no other operation (as PREMUL_SUM's) means SUM.
    """

    def emit(context, builder, signature, args):
        code, pointer, table, number, elements = args
        element = element_of(dst.dtype)
        nbytes = builder.mul(elements, WORD(element.lanes * element.size))
        operands = Operands(builder.ptrtoint(pointer, WORD), table, number, nbytes)
        ways = _ways(dst.dtype, number)
        after = builder.append_basic_block("reduced")
        blocks = {way: builder.append_basic_block(f"operation.{way}") for way in ways}
        choice = builder.switch(code, blocks[SUM])
        for way, (combine, end) in ways.items():
            if way != SUM:
                choice.add_case(WORD(way), blocks[way])
            builder.position_at_end(blocks[way])
            stream(
                builder,
                [Registers(builder, element, shape, combine, end) for shape in shapes(element)],
                operands,
            )
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(op, dst, srcs, n, count), emit


def _ways(kind: types.Type, n: ir.Value) -> dict[int, tuple[Combine, Callable[..., Any]]]:
    """What each operation of a type does to two values, and what to the fold at its end."""
    ways: dict[int, tuple[Combine, Callable[..., Any]]] = {
        code: (combine, as_it_is) for code, combine in operations_of(kind).items()
    }
    divide = division_of(kind)
    if divide is not None:
        ways[AVG] = (ways[SUM][0], partial(divide, n=n))
    return ways
