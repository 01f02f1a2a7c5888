"""The loops of the reducers of narrow types (core/travel.py), which also convert from and to float32.

    op       dst                 srcs
    NARROW   items               float32; with n = 2 also the array `lost`, of float32
    WIDEN    float32             items
    SUM, AVG items               items

`count` is the number of elements for NARROW and WIDEN, and of items for a reduction. A reduction widens all sources,
adds in rank order in float32, and rounds once. With `lost`, NARROW converts v = x + lost, and sets lost to v minus what
the items represent.

A block of int8 has the scale s = (largest magnitude)/127, rounded to float32, and the integers round(v/s). If the
largest magnitude is below 2**-100, s is 0. If it is infinite or NaN, s is NaN, so the whole block is widened to NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..compiler.elements import (
    WIDTHS,
    WORD,
    Element,
    Half,
    constant,
    element_of,
    shuffled,
    splat,
)
from ..core.reduce_op import AVG
from ..core.travel import BLOCK, WIDEN

_FLOAT, _U32, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(8)
_F32 = element_of(types.float32)
_I8 = Element(_BYTE, _BYTE, 1, 16)
_LANES = 16  # of a vector of a block
_PARTS = BLOCK // _LANES
_ITEM = BLOCK + 4
_TINY = 2.0**-100
_LARGEST_SCALE = float(np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0)))
Values = Sequence[Any]
"""Successive elements as float32: some vectors of equal length, or one number."""


def _load(builder: ir.IRBuilder, address: ir.Value, parts: int, width: int) -> Values:
    return [_F32.load(builder, builder.add(address, WORD(4 * width * k)), width) for k in range(parts)]


def _store(builder: ir.IRBuilder, values: Values, address: ir.Value, width: int) -> None:
    for k, value in enumerate(values):
        _F32.store(builder, value, builder.add(address, WORD(4 * width * k)))


# ---- halves ------------------------------------------------------------------------------------------------


class _Halves:
    """The conversion of one vector of halves, or of one number."""

    parts = 1

    def __init__(self, half: Half, width: int) -> None:
        self.element, self.width, self.elements, self.nbytes = element_of(half), width, width, 2 * width
        lanes = [*range(0, width, 2), *range(1, width, 2)]
        # Wide vectors of bfloat16 have their even lanes before their odd ones (elements.py).
        self._order = lanes if half.format == "bfloat16" and width > 1 else None

    def pack(self, builder: ir.IRBuilder, values: Values, address: ir.Value) -> None:
        (value,) = values
        if self._order is not None:
            value = shuffled(builder, value, value, self._order)
        self.element.store(builder, value, address)

    def unpack(self, builder: ir.IRBuilder, address: ir.Value) -> Values:
        value = self.element.load(builder, address, self.width)
        if self._order is not None:
            places = sorted(range(self.width), key=self._order.__getitem__)
            value = shuffled(builder, value, value, places)
        return [value]


# ---- blocks of int8 ----------------------------------------------------------------------------------------


class _Int8Block:
    """The conversion of a block of int8."""

    parts, width, elements, nbytes = _PARTS, _LANES, BLOCK, _ITEM

    def pack(self, builder: ir.IRBuilder, values: Values, address: ir.Value) -> None:
        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.icmp_unsigned(">", a, b), a, b)

        # The bits of magnitudes are ordered as integers; those of a NaN are larger than infinity's.
        vector = ir.VectorType(_U32, _LANES)
        bits = [builder.bitcast(value, vector) for value in values]
        top = reduce(larger, [builder.and_(each, constant(0x7FFFFFFF, each)) for each in bits])
        for lanes in (8, 4, 2, 1):
            low, high = range(lanes), range(lanes, 2 * lanes)
            top = larger(shuffled(builder, top, top, low), shuffled(builder, top, top, high))
        top = builder.bitcast(builder.extract_element(top, ir.Constant(_U32, 0)), _FLOAT)
        # A comparison with a NaN is false, so `usual` excludes NaN and infinity.
        usual = builder.fcmp_ordered("<", top, ir.Constant(_FLOAT, float("inf")))
        zero, nan = ir.Constant(_FLOAT, 0.0), ir.Constant(_FLOAT, float("nan"))
        scale = builder.fdiv(top, ir.Constant(_FLOAT, 127.0))
        scale = builder.select(builder.fcmp_ordered("<", top, ir.Constant(_FLOAT, _TINY)), zero, scale)
        # Rounding up could make the largest float32 infinite when it is widened again.
        most = ir.Constant(_FLOAT, _LARGEST_SCALE)
        scale = builder.select(builder.fcmp_ordered(">", scale, most), most, scale)
        scale = builder.select(usual, scale, nan)
        has_numbers = builder.fcmp_ordered(">", scale, zero)
        divisor = builder.select(has_numbers, scale, ir.Constant(_FLOAT, 1.0))
        factor = splat(builder, builder.fdiv(ir.Constant(_FLOAT, 1.0), divisor), values[0])
        for k, value in enumerate(values):
            number = builder.fmul(value, factor)
            rint = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(value.type, [value.type]), f"llvm.rint.v{_LANES}f32"
            )
            number = builder.call(rint, [number])
            nothing = ir.Constant(number.type, [0.0] * _LANES)
            number = builder.select(has_numbers, number, nothing)
            integers = builder.fptosi(number, ir.VectorType(_U32, _LANES))
            stored = builder.trunc(integers, ir.VectorType(_BYTE, _LANES))
            _I8.store(builder, stored, builder.add(address, WORD(_LANES * k)))
        _F32.store(builder, scale, builder.add(address, WORD(BLOCK)))

    def unpack(self, builder: ir.IRBuilder, address: ir.Value) -> Values:
        scale = _F32.load(builder, builder.add(address, WORD(BLOCK)), 1)
        found = []
        for k in range(_PARTS):
            integers = _I8.load(builder, builder.add(address, WORD(_LANES * k)), _LANES)
            number = builder.sitofp(integers, ir.VectorType(_FLOAT, _LANES))
            found.append(builder.fmul(number, splat(builder, scale, number)))
        return found


# ---- loops -------------------------------------------------------------------------------------------------


def _narrow_item(builder: ir.IRBuilder, kind: Any, dst: ir.Value, x: ir.Value, lost: ir.Value | None) -> None:
    values = _load(builder, x, kind.parts, kind.width)
    if lost is not None:
        before = _load(builder, lost, kind.parts, kind.width)
        values = [builder.fadd(a, b) for a, b in zip(values, before, strict=True)]
    kind.pack(builder, values, dst)
    if lost is None:
        return
    rests = []
    for value, sent in zip(values, kind.unpack(builder, dst), strict=True):
        rest = builder.fsub(value, sent)
        nothing = builder.fsub(
            rest, rest
        )  # NaN if the rest is NaN or infinite; such a rest is not sent later
        is_number = builder.fcmp_ordered("==", nothing, constant(0, nothing))
        rests.append(builder.select(is_number, rest, constant(0, rest)))
    _store(builder, rests, lost, kind.width)


def _widen_item(builder: ir.IRBuilder, kind: Any, dst: ir.Value, items: ir.Value) -> None:
    _store(builder, kind.unpack(builder, items), dst, kind.width)


def _copy_floats(builder: ir.IRBuilder, dst: ir.Value, src: ir.Value | None, count: ir.Value | int) -> None:
    """Copy `count` numbers, or write zeros."""
    number = WORD(count) if isinstance(count, int) else count
    with cgutils.for_range(builder, number) as loop:
        offset = builder.mul(loop.index, WORD(4))
        value = ir.Constant(_FLOAT, 0.0) if src is None else _F32.load(builder, builder.add(src, offset), 1)
        _F32.store(builder, value, builder.add(dst, offset))


def _convert(
    builder: ir.IRBuilder, element: types.Type, convert: Callable[..., None], sides: Any, count: Any
) -> None:
    """Convert `count` elements; `sides` has each array's address, and whether it has items (else float32).

    The last array of float32 that `convert` writes is the first of `sides` to WIDEN, and `lost` to NARROW.
    """
    addresses, is_item = [address for address, _ in sides], [each for _, each in sides]
    kinds = (
        [_Halves(element, WIDTHS[element.format]), _Halves(element, 1)]
        if isinstance(element, Half)
        else [_Int8Block()]
    )
    for kind in kinds:
        sizes = [kind.nbytes if item else 4 * kind.elements for item in is_item]
        times = builder.udiv(count, WORD(kind.elements))

        def at(index: Any, starts: Any = addresses, sizes: Any = sizes) -> list[Any]:
            return [
                builder.add(start, builder.mul(index, WORD(n)))
                for start, n in zip(starts, sizes, strict=True)
            ]

        with cgutils.for_range(builder, times) as loop:
            convert(builder, kind, *at(loop.index))
        addresses, count = at(times), builder.sub(count, builder.mul(times, WORD(kind.elements)))
    if isinstance(element, Half):
        return
    with builder.if_then(builder.icmp_unsigned(">", count, WORD(0))):
        rooms = []  # an incomplete block is converted on the stack, with zeros behind its elements
        for address, item in zip(addresses, is_item, strict=True):
            room = address
            if not item:
                room = builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(_FLOAT, BLOCK)), WORD)
                _copy_floats(builder, room, None, BLOCK)
                _copy_floats(builder, room, address, count)
            rooms.append(room)
        convert(builder, _Int8Block(), *rooms)
        for written in (0, 2):  # dst of WIDEN, `lost` of NARROW
            if written < len(rooms) and not is_item[written]:
                _copy_floats(builder, addresses[written], rooms[written], count)


@intrinsic
def convert(typing_context, op, dst, srcs, n, count):
    """Convert `count` elements of `srcs`: to items, with `lost` if n is 2, or to float32 if `op` is WIDEN."""

    def emit(context, builder, signature, args):
        code, pointer, table, number, elements = args
        table = builder.inttoptr(table, WORD.as_pointer())
        to, source = builder.ptrtoint(pointer, WORD), builder.load(table)
        run = partial(_convert, builder, dst.dtype)
        with builder.if_else(builder.icmp_signed("==", code, WORD(WIDEN))) as (widens, narrows):
            with widens:
                run(_widen_item, [(to, False), (source, True)], elements)
            with narrows, builder.if_else(builder.icmp_unsigned("==", number, WORD(2))) as (keeping, plain):
                sides = [(to, True), (source, False)]
                with keeping:
                    lost = builder.load(builder.gep(table, [WORD(1)]))
                    run(_narrow_item, [*sides, (lost, False)], elements)
                with plain:
                    run(partial(_narrow_item, lost=None), sides, elements)
        return context.get_dummy_value()

    return types.void(op, dst, srcs, n, count), emit


@intrinsic
def fold_blocks(typing_context, op, dst, srcs, n, count):
    """Reduce `count` blocks of each source."""

    def emit(context, builder, signature, args):
        code, pointer, table, number, items = args
        table = builder.inttoptr(table, WORD.as_pointer())
        kind = _Int8Block()
        total = [cgutils.alloca_once(builder, ir.VectorType(_FLOAT, _LANES)) for _ in range(_PARTS)]
        averages = builder.icmp_signed("==", code, WORD(AVG))
        divisor = builder.select(averages, builder.sitofp(number, _FLOAT), ir.Constant(_FLOAT, 1.0))
        with cgutils.for_range(builder, items) as loop:
            offset = builder.mul(loop.index, WORD(_ITEM))
            first = kind.unpack(builder, builder.add(builder.load(table), offset))
            for room, value in zip(total, first, strict=True):
                builder.store(value, room)
            with cgutils.for_range(builder, number, start=WORD(1)) as ranks:
                source = builder.load(builder.gep(table, [ranks.index]))
                for room, value in zip(total, kind.unpack(builder, builder.add(source, offset)), strict=True):
                    builder.store(builder.fadd(builder.load(room), value), room)
            values = [builder.load(room) for room in total]
            values = [builder.fdiv(value, splat(builder, divisor, value)) for value in values]
            kind.pack(builder, values, builder.add(builder.ptrtoint(pointer, WORD), offset))
        return context.get_dummy_value()

    return types.void(op, dst, srcs, n, count), emit
