"""The loops of a reduction: a tile of every source goes through registers, in rank order, and is then written.

All sources' elements of a tile are read before any is written, so `dst` may be one of the sources; and each source is
read once, however many there are. The instructions are vectors from the start: a loop over elements that writes through
one pointer what it reads through several others fails LLVM's run-time check for overlap when two are equal, and would
need a scratch. How an element is computed depends on its place in the array alone, never on `dst`, which keeps even the
sign and payload of a wide float's NaN; LLVM leaves those to the processor.

There is a loop nest for each operation of a dtype, chosen by its code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..core.reduce_op import AVG, SUM
from .combine import Combine, division_of, operations_of
from .elements import WORD, Element, element_of, shaped, unchanged

TILE = 256
"""Bytes of a source's largest tile in memory. On a 2-core Zen 4 EPYC 128, 256 and 512 were within 10 % of one another
(float32 and halves, 2 and 4 sources, 64 KiB to 1 MiB), and 256 leaves half of AVX2's registers to the sources."""

FEW = 16
"""Bytes of the smallest tile but one element. Without it, 63 int8s from two sources took 72 ns instead of 19."""


class Tile(Protocol):
    """A way to compute some successive elements, of so many bytes: `start` takes the first source's, which are at an
    address, `take` combines them with the next source's, `finish` writes the result; each adds instructions.
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
    """Reduce whole arrays: by the first tile as far as it goes, the rest by the next; the last is one element's."""
    done = WORD(0)
    for tile in tiles:
        times = builder.udiv(builder.sub(operands.nbytes, done), WORD(tile.nbytes))
        with cgutils.for_range(builder, times) as loop:
            offset = builder.add(done, builder.mul(loop.index, WORD(tile.nbytes)))
            _reduce_tile(builder, tile, operands, offset)
        done = builder.add(done, builder.mul(times, WORD(tile.nbytes)))


def _reduce_tile(builder: ir.IRBuilder, tile: Tile, operands: Operands, offset: ir.Value) -> None:
    table = builder.inttoptr(operands.srcs, WORD.as_pointer())

    def source(rank: ir.Value) -> Any:
        return builder.add(builder.load(builder.gep(table, [rank])), offset)

    tile.start(builder, source(WORD(0)))
    with cgutils.for_range(builder, operands.n, start=WORD(1)) as loop:
        tile.take(builder, source(loop.index))
    tile.finish(builder, builder.add(operands.dst, offset))


class Shape(NamedTuple):
    """How many lanes a tile has: registers of so many each."""

    width: int
    registers: int = 1


def shapes(element: Element) -> list[Shape]:
    """The tiles for a dtype, from the largest to a single element."""
    many = TILE // (element.width * element.size)
    few = max(element.lanes, FEW // element.size)
    return [Shape(element.width, many), Shape(element.width), Shape(few), Shape(element.lanes)]


class Registers:
    """A tile of vector registers; `combine` folds a source into what was taken, `end` makes the result of it."""

    def __init__(
        self,
        builder: ir.IRBuilder,
        element: Element,
        shape: Shape,
        combine: Combine,
        end: Callable[[ir.IRBuilder, ir.Value], Any] = unchanged,
    ) -> None:
        self.nbytes = shape.registers * shape.width * element.size
        self.element, self.shape, self.combine, self._end = element, shape, combine, end
        self.taken = self.registers(builder)

    def start(self, builder: ir.IRBuilder, address: ir.Value) -> None:
        for i, new in self.load(builder, address):
            builder.store(new, self.place(builder, self.taken, i))

    def take(self, builder: ir.IRBuilder, address: ir.Value) -> None:
        for i, new in self.load(builder, address):
            place = self.place(builder, self.taken, i)
            builder.store(self.combine(builder, builder.load(place), new), place)

    def finish(self, builder: ir.IRBuilder, address: ir.Value) -> None:
        for i in range(self.shape.registers):
            value = builder.load(self.place(builder, self.taken, i))
            self.element.store(builder, self._end(builder, value), self._at(builder, address, i))

    def registers(self, builder: ir.IRBuilder) -> Any:
        """Variables on the stack, which LLVM moves to registers."""
        value = shaped(self.element.computed, self.shape.width)
        return cgutils.alloca_once(builder, value, size=self.shape.registers)

    def load(self, builder: ir.IRBuilder, address: ir.Value) -> Iterator[tuple[int, Any]]:
        for i in range(self.shape.registers):
            yield i, self.element.load(builder, self._at(builder, address, i), self.shape.width)

    def _at(self, builder: ir.IRBuilder, address: ir.Value, i: int) -> Any:
        return builder.add(address, WORD(i * self.shape.width * self.element.size))

    @staticmethod
    def place(builder: ir.IRBuilder, registers: ir.Value, i: int) -> Any:
        return builder.gep(registers, [WORD(i)])


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
        code: (combine, unchanged) for code, combine in operations_of(kind).items()
    }
    divide = division_of(kind)
    if divide is not None:
        ways[AVG] = (ways[SUM][0], partial(divide, n=n))
    return ways
