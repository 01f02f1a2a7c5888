"""Typed elements at plain addresses: what the reduction loops load, compute with and store.

| dtype in memory                | computed as             |
|--------------------------------|-------------------------|
| ints, floats, complex          | the same                |
| bool                           | any byte but 0 is True  |
| float16, bfloat16 (a `Half`)   | float32, rounded once   |
| structured                     | a private copy          |

Loads and stores claim no alignment: an array may start anywhere, and x86 and Arm vectors do not mind.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from . import half

SCRATCH = 1024
"""Elements in a scratch: 1 to 16 KiB, so that it and the sources' blocks stay in the L1 cache."""


class Half(types.Type):
    """A 16-bit float in memory, "float16" or "bfloat16"; only ever loaded as float32."""

    def __init__(self, format: str) -> None:
        self.format = format
        super().__init__(name=f"Half({format})")


@register_model(Half)
class _HalfModel(models.PrimitiveModel):
    def __init__(self, data_model_manager, half_type):
        super().__init__(data_model_manager, half_type, ir.IntType(16))


def computed_as(element: types.Type) -> types.Type:
    """The type in which elements of a type in memory are combined."""
    return types.float32 if isinstance(element, Half) else element


def reducer_signature(element: types.Type) -> Any:
    """A reducer's signature; in C, a pointer and an int64 are passed alike."""
    return types.void(types.int64, types.CPointer(element), types.int64, types.int64, types.int64)


@intrinsic
def pointer_like(typing_context, like, address):
    """`address` as a pointer of the type of the pointer `like`."""

    def emit(context, builder, signature, args):
        return builder.inttoptr(args[1], context.get_value_type(like))

    return like(like, types.int64), emit


@intrinsic
def as_integer(typing_context, pointer):
    """A pointer as an integer."""

    def emit(context, builder, signature, args):
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.int64(pointer), emit


@intrinsic
def itemsize_of(typing_context, pointer):
    """Bytes from one element of a pointer to the next."""

    def emit(context, builder, signature, args):
        data = context.get_data_type(pointer.dtype)
        return ir.Constant(ir.IntType(64), context.get_abi_sizeof(data))

    return types.int64(pointer), emit


@intrinsic
def scratch_like(typing_context, like):
    """A pointer to SCRATCH elements on the stack, of the type in which `like`'s are combined."""
    element = computed_as(like.dtype)

    def emit(context, builder, signature, args):
        return cgutils.alloca_once(builder, context.get_data_type(element), size=SCRATCH)

    return types.CPointer(element)(like), emit


@intrinsic
def load(typing_context, pointer, index):
    """Element `index` of a pointer, as it is computed with."""
    element = pointer.dtype
    if isinstance(element, Half):
        emit = _load_half
    else:
        emit = _load_record if isinstance(element, types.Record) else _load_plain
    return computed_as(element)(pointer, types.int64), emit


@intrinsic
def store(typing_context, pointer, index, value):
    """Write element `index` of a pointer; `value` has the type that `load` gives."""
    element = pointer.dtype
    if isinstance(element, Half):
        emit = _store_half
    else:
        emit = _store_record if isinstance(element, types.Record) else _store_plain
    return types.void(pointer, types.int64, computed_as(element)), emit


@intrinsic
def narrow(typing_context, value, like):
    """`value` in the type of `like`, as after a store and a load (Numba adds int8s as int64s)."""

    def emit(context, builder, signature, args):
        return context.cast(builder, args[0], value, like)

    return like(value, like), emit


@intrinsic
def divide(typing_context, value, divisor):
    """A number divided by an integer, in the number's type; integers are truncated towards zero."""
    if isinstance(value, types.Complex):
        emit = _divide_complex
    elif isinstance(value, types.Float):
        emit = _divide_float
    else:
        emit = _divide_small_integer if value.bitwidth <= 32 else _divide_integer
    return value(value, types.int64), emit


def _divide_complex(context, builder, signature, args):
    number = context.make_complex(builder, signature.return_type, args[0])
    part = signature.return_type.underlying_float
    divisor = context.cast(builder, args[1], types.int64, part)
    number.real, number.imag = builder.fdiv(number.real, divisor), builder.fdiv(number.imag, divisor)
    return number._getvalue()


def _divide_float(context, builder, signature, args):
    return builder.fdiv(args[0], context.cast(builder, args[1], types.int64, signature.return_type))


def _divide_small_integer(context, builder, signature, args):
    # Exact up to 32 bits: a quotient that is not whole misses the next integer by more than a double's rounding.
    # Processors have no vector instruction for dividing integers.
    integer, count = signature.args
    value = context.cast(builder, args[0], integer, types.float64)
    divisor = context.cast(builder, args[1], count, types.float64)
    return context.cast(builder, builder.fdiv(value, divisor), types.float64, integer)


def _divide_integer(context, builder, signature, args):
    return (builder.sdiv if signature.return_type.signed else builder.udiv)(*args)


def _load_plain(context, builder, signature, args):
    model = context.data_model_manager[signature.args[0].dtype]
    return model.load_from_data_pointer(builder, builder.gep(args[0], [args[1]]), align=1)


def _store_plain(context, builder, signature, args):
    model = context.data_model_manager[signature.args[0].dtype]
    builder.store(model.as_data(builder, args[2]), builder.gep(args[0], [args[1]]), align=1)
    return context.get_dummy_value()


def _load_record(context, builder, signature, args):
    # A record is a pointer for Numba: a copy keeps a function that writes into its argument off a peer's data.
    private = cgutils.alloca_once(builder, context.get_data_type(signature.return_type))
    private.align = 16  # Numba takes the fields of an aligned dtype to be aligned
    _copy_record(builder, private, builder.gep(args[0], [args[1]]), signature.return_type)
    return private


def _store_record(context, builder, signature, args):
    _copy_record(builder, builder.gep(args[0], [args[1]]), args[2], signature.args[2])
    return context.get_dummy_value()


def _copy_record(builder, dst, src, record):
    cgutils.raw_memcpy(builder, dst, src, ir.Constant(ir.IntType(64), record.size), 1)


def _load_half(context, builder, signature, args):
    widen, _ = half.CONVERSIONS[signature.args[0].dtype.format]
    return widen(builder, builder.load(builder.gep(args[0], [args[1]]), align=1))


def _store_half(context, builder, signature, args):
    _, round_ = half.CONVERSIONS[signature.args[0].dtype.format]
    builder.store(round_(builder, args[2]), builder.gep(args[0], [args[1]]), align=1)
    return context.get_dummy_value()
