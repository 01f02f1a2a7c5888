"""The loops of a reduction.

A loop processes one tile (some successive elements) at a time: it combines the tile of every source in registers, in
rank order, then writes the result. All sources' elements of a tile are read before any is written, so `dst` may be one
of the sources. Each source is read once, however many there are.

This file emits the vector instructions itself, instead of a loop over elements that LLVM vectorises. Such a loop would
check at run time whether the arrays overlap, and would run without vector instructions if `dst` is one of the sources.
To avoid that, it would have to write to scratch memory. An element's computation depends only on its position in the
array, never on `dst`. So the result does not depend on `dst`, not even the sign and payload of a float32 or float64
NaN, which LLVM leaves to the processor.

There is a loop nest for each operation of a dtype, chosen by the operation's code. Fastmath is off: each lane is
rounded as IEEE 754 says, and no operations are fused. Functions that add LLVM instructions to a `builder` return the
resulting value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..compiler.elements import (
    WORD,
    Element,
    Half,
    constant,
    element_of,
    like,
    shaped,
    shuffled,
    splat,
    unchanged,
)
from ..core.reduce_op import AVG, BAND, BOR, BXOR, LAND, LOR, LXOR, MAX, MIN, PRODUCT, SUM

_B = ir.IRBuilder
Combine = Callable[[ir.IRBuilder, ir.Value, ir.Value], Any]
Divide = Callable[..., Any]

TILE = 256
"""Bytes of a source's largest tile.

On a 2-core Zen 4 EPYC, tiles of 128, 256 and 512 bytes were within 10 % of one another (float32 and halves, 2 and 4
sources, 64 KiB to 1 MiB), and 256 bytes leave half of AVX2's registers to the sources.
"""

FEW = 16
"""Bytes of the smallest tile of more than one element.

Without this tile, 63 int8s from two sources took 72 ns instead of 19.
"""


class Tile(Protocol):
    """The computation of `nbytes` bytes of successive elements.

    Each method adds LLVM instructions. `start` loads the first source's elements from an address, `take` combines them
    with the next source's, and `finish` writes the result.
    """

    nbytes: int

    def start(self, builder: ir.IRBuilder, address: ir.Value) -> None: ...
    def take(self, builder: ir.IRBuilder, address: ir.Value) -> None: ...
    def finish(self, builder: ir.IRBuilder, address: ir.Value) -> None: ...


class Operands(NamedTuple):
    """The values of a reducer's arguments."""

    dst: ir.Value
    srcs: ir.Value
    n: ir.Value
    nbytes: ir.Value


def stream(builder: ir.IRBuilder, tiles: Sequence[Tile], operands: Operands) -> None:
    """Reduce complete arrays.

    The first of `tiles` is used as often as it fits, then the next ones for the rest. The last is one element.
    """
    done = WORD(0)
    for tile in tiles:
        times = builder.udiv(builder.sub(operands.nbytes, done), WORD(tile.nbytes))
        with cgutils.for_range(builder, times) as loop:
            offset = builder.add(done, builder.mul(loop.index, WORD(tile.nbytes)))
            table = builder.inttoptr(operands.srcs, WORD.as_pointer())
            tile.start(builder, builder.add(builder.load(table), offset))
            with cgutils.for_range(builder, operands.n, start=WORD(1)) as ranks:
                source = builder.load(builder.gep(table, [ranks.index]))
                tile.take(builder, builder.add(source, offset))
            tile.finish(builder, builder.add(operands.dst, offset))
        done = builder.add(done, builder.mul(times, WORD(tile.nbytes)))


class TileShape(NamedTuple):
    """The lanes of a tile: `registers` registers of `width` lanes."""

    width: int
    registers: int = 1


def shapes(element: Element) -> list[TileShape]:
    """Return the tiles for a dtype, from the largest to a single element."""
    many = TILE // (element.width * element.size)
    few = max(element.lanes, FEW // element.size)
    return [
        TileShape(element.width, many),
        TileShape(element.width),
        TileShape(few),
        TileShape(element.lanes),
    ]


class Registers:
    """A tile of vector registers.

    Args:
        combine: combines the value so far with a source.
        end: converts the last value to the result.
    """

    def __init__(
        self,
        builder: ir.IRBuilder,
        element: Element,
        shape: TileShape,
        combine: Combine,
        end: Callable[[ir.IRBuilder, ir.Value], Any] = unchanged,
    ) -> None:
        self.nbytes = shape.registers * shape.width * element.size
        self.element, self.shape, self.combine, self._end = element, shape, combine, end
        self.taken = self.registers(builder)

    def start(self, builder: ir.IRBuilder, address: ir.Value) -> None:
        for i, new in self.load(builder, address):
            builder.store(new, self.register(builder, self.taken, i))

    def take(self, builder: ir.IRBuilder, address: ir.Value) -> None:
        for i, new in self.load(builder, address):
            register = self.register(builder, self.taken, i)
            builder.store(self.combine(builder, builder.load(register), new), register)

    def finish(self, builder: ir.IRBuilder, address: ir.Value) -> None:
        for i in range(self.shape.registers):
            value = builder.load(self.register(builder, self.taken, i))
            self.element.store(builder, self._end(builder, value), self._at(builder, address, i))

    def registers(self, builder: ir.IRBuilder) -> Any:
        """Return variables on the stack, which LLVM moves to registers."""
        value = shaped(self.element.computed, self.shape.width)
        return cgutils.alloca_once(builder, value, size=self.shape.registers)

    def load(self, builder: ir.IRBuilder, address: ir.Value) -> Iterator[tuple[int, Any]]:
        for i in range(self.shape.registers):
            yield i, self.element.load(builder, self._at(builder, address, i), self.shape.width)

    def _at(self, builder: ir.IRBuilder, address: ir.Value, i: int) -> Any:
        return builder.add(address, WORD(i * self.shape.width * self.element.size))

    @staticmethod
    def register(builder: ir.IRBuilder, registers: ir.Value, i: int) -> Any:
        return builder.gep(registers, [WORD(i)])


@intrinsic
def fold(typing_context, op, dst, srcs, n, count):
    """Reduce `n` arrays of `count` elements, at the addresses in `srcs`, into the array at `dst`.

    An operation that has no function for this dtype, such as PREMUL_SUM, is computed as SUM.
    """

    def emit(context, builder, signature, args):
        code, pointer, table, number, elements = args
        element = element_of(dst.dtype)
        nbytes = builder.mul(elements, WORD(element.lanes * element.size))
        operands = Operands(builder.ptrtoint(pointer, WORD), table, number, nbytes)
        # For each operation: the function of two values, and the function of the final value.
        operations = {which: (combine, unchanged) for which, combine in operations_of(dst.dtype).items()}
        if (divide := division_of(dst.dtype)) is not None:
            operations[AVG] = operations[SUM][0], partial(divide, n=number)
        after = builder.append_basic_block("reduced")
        blocks = {which: builder.append_basic_block(f"operation.{which}") for which in operations}
        choice = builder.switch(code, blocks[SUM])
        for which, (combine, end) in operations.items():
            if which != SUM:
                choice.add_case(WORD(which), blocks[which])
            builder.position_at_end(blocks[which])
            tiles = [Registers(builder, element, shape, combine, end) for shape in shapes(element)]
            stream(builder, tiles, operands)
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(op, dst, srcs, n, count), emit


# ---- what an operation does to two values, and AVG to a sum ------------------------------------------------


def operations_of(element: types.Type) -> Mapping[int, Combine]:
    """Return the operations of a type, by code; AVG is SUM followed by a division."""
    if isinstance(element, types.Boolean):
        return _BOOL
    if isinstance(element, types.Integer):
        return _SIGNED if element.signed else _UNSIGNED
    return _COMPLEX if isinstance(element, types.Complex) else _FLOAT


def division_of(element: types.Type) -> Divide | None:
    """Return how AVG divides values of a type by an int64; None if there is no AVG."""
    if isinstance(element, types.Boolean):
        return None
    if isinstance(element, types.Float | types.Complex | Half):

        def divide_floats(builder: ir.IRBuilder, value: ir.Value, n: ir.Value) -> Any:
            lane = value.type.element if isinstance(value.type, ir.VectorType) else value.type
            return builder.fdiv(value, splat(builder, builder.sitofp(n, lane), value))

        return divide_floats
    if element.bitwidth == 64:
        divide = _B.sdiv if element.signed else _B.udiv
        return lambda builder, value, n: divide(builder, value, splat(builder, n, value))
    return _by_reciprocal(ir.FloatType() if element.bitwidth <= 16 else ir.DoubleType(), element.signed)


def _first_float_if(relation: str) -> Combine:
    """Return a function that chooses like `numpy.minimum` or `numpy.maximum`.

    Of two equal numbers it returns the first; of a number and a NaN it returns the NaN.
    """

    def choose(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> Any:
        wins = builder.or_(builder.fcmp_ordered(relation, a, b), builder.fcmp_unordered("uno", a, a))
        return builder.select(wins, a, b)

    return choose


def _first_if(relation: str, signed: bool) -> Combine:
    compare = _B.icmp_signed if signed else _B.icmp_unsigned
    return lambda builder, a, b: builder.select(compare(builder, relation, a, b), a, b)


def _logical(combine: Combine) -> Combine:
    """Return a function that combines two values by their truth, lane by lane; its result is 1 or 0 in each lane.

    A lane is true if it is not 0.
    """

    def choose(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> Any:
        zero = constant(0, a)
        lane = a.type.element if isinstance(a.type, ir.VectorType) else a.type
        is_integer = isinstance(lane, ir.IntType)
        differs = builder.icmp_unsigned if is_integer else builder.fcmp_unordered
        truth = combine(builder, differs("!=", a, zero), differs("!=", b, zero))
        return (builder.zext if is_integer else builder.uitofp)(truth, a.type)

    return choose


def _multiply_complex(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> Any:
    """Return (a.re b.re - a.im b.im, a.re b.im + a.im b.re) in each pair of lanes."""
    lanes = range(a.type.count)
    real = shuffled(builder, a, a, [i & ~1 for i in lanes])
    imaginary = shuffled(builder, a, a, [i | 1 for i in lanes])
    straight = builder.fmul(real, b)
    crossed = builder.fmul(imaginary, shuffled(builder, b, b, [i ^ 1 for i in lanes]))
    difference, total = builder.fsub(straight, crossed), builder.fadd(straight, crossed)
    return shuffled(builder, difference, total, [i + a.type.count if i & 1 else i for i in lanes])


def _by_reciprocal(wide: ir.Type, signed: bool) -> Divide:
    """Return a division of small integers, truncated towards zero.

    Processors have no vector instruction for integer division, so the value is multiplied by a reciprocal of n that is
    too large by a relative 2**-22 (2**-50 in float64). The truncated product is the exact quotient, for two reasons. If
    the quotient is an integer, the product is not below it. If not, the quotient is at least 1/n below the next
    integer, and the product's error is less than that: at most |value| * 2**-21 / n for 16 bits (2**-49 for 32).
    """
    excess = 1 + 2.0 ** (-22 if isinstance(wide, ir.FloatType) else -50)
    widen, truncate = (_B.sitofp, _B.fptosi) if signed else (_B.uitofp, _B.fptoui)

    def divide(builder: ir.IRBuilder, value: ir.Value, n: ir.Value) -> Any:
        reciprocal = builder.fdiv(ir.Constant(wide, excess), builder.sitofp(n, wide))
        number = widen(builder, value, like(wide, value))
        return truncate(builder, builder.fmul(number, splat(builder, reciprocal, value)), value.type)

    return divide


_LOGICAL = {LAND: _logical(_B.and_), LOR: _logical(_B.or_), LXOR: _logical(_B.xor)}
_INTEGER: dict[int, Combine] = _LOGICAL | {
    SUM: _B.add,
    PRODUCT: _B.mul,
    BAND: _B.and_,
    BOR: _B.or_,
    BXOR: _B.xor,
}
_SIGNED = _INTEGER | {MIN: _first_if("<=", True), MAX: _first_if(">=", True)}
_UNSIGNED = _INTEGER | {MIN: _first_if("<=", False), MAX: _first_if(">=", False)}
_FLOAT: dict[int, Combine] = _LOGICAL | {SUM: _B.fadd, PRODUCT: _B.fmul}
_FLOAT |= {MIN: _first_float_if("<="), MAX: _first_float_if(">=")}
_COMPLEX: dict[int, Combine] = {SUM: _B.fadd, PRODUCT: _multiply_complex}
_BOOL: dict[int, Combine] = dict.fromkeys((SUM, MAX, BOR, LOR), _B.or_) | {BXOR: _B.xor, LXOR: _B.xor}
_BOOL |= dict.fromkeys((PRODUCT, MIN, BAND, LAND), _B.and_)
