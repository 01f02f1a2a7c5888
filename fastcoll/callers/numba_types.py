"""The Numba types of groups, reduce operations and requests, and the code that calls a descriptor's C entry point.

    value                 in compiled code
    group, NonMember      the address of its descriptor (descriptors.py)
    None for a group      the address of the world's descriptor; each library of compiled code asks Python for it once
                          (`world_descriptor`)
    ReduceOp              the result of `op_word`

Numba may keep compiled code on disk, and another process may run it, perhaps with another version of fastcoll. So the
code contains no addresses of a process. When it asks for a descriptor it passes LAYOUT, a checksum of what it assumes
about descriptors; Python refuses the request if LAYOUT has changed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.core.imputils import lower_cast, lower_constant, lower_getattr_generic
from numba.core.registry import cpu_target
from numba.core.runtime import _nrt_python
from numba.core.typing.templates import AttributeTemplate, infer_getattr, infer_global
from numba.extending import NativeValue, intrinsic, models, register_model, typeof_impl, unbox
from numba.np.numpy_support import as_dtype

from ..arrays.dtypes import NUMPY
from ..core.group import ProcessGroup
from ..core.operations import OPERATIONS
from ..core.reduce_op import CUSTOM, PREMUL_SUM, ReduceOp
from ..errors import UsageError
from ..job.groups import NonMember
from ..kernels import c_entries as d
from ..p2p import handles
from . import descriptors

WORD = ir.IntType(64)
_POINTER = ir.IntType(8).as_pointer()

_REVISION = 3  # increment it if a change of the overloads makes code that was compiled before it unusable
LAYOUT = zlib.crc32(
    repr(
        (
            _REVISION,
            d.RANK,
            d.SIZE,
            d.RANKS,
            d.C_ENTRY,
            d.REDUCE_SCATTER_SPLIT,
            d.SPLIT,
            d.SEND,
            d.RECV,
            d.WAIT_ANY,
            OPERATIONS,
            CUSTOM,
            NUMPY,
            descriptors.FOREIGN,
        )
    ).encode()
)
"""A checksum of all that compiled code assumes about descriptors and words."""


class Raised(Exception):
    """The exception class that compiled code raises.

    Making an instance raises the error that `take_error` returns instead.
    """

    def __new__(cls, *args: Any) -> Raised:
        error = descriptors.take_error()
        if error is not None:
            raise error
        return super().__new__(cls, *args)


def descriptor_for(group: Any, layout: int) -> int:
    """Return the address of a group's descriptor; refuse code that was compiled for another layout."""
    if layout != LAYOUT:
        raise UsageError(
            "this code was compiled with another version of fastcoll; delete Numba's cache (__pycache__)"
        )
    return descriptors.group_descriptor(group)


def world_descriptor(layout: int) -> int:
    return descriptor_for(None, layout)


# ---- reduce operations ------------------------------------------------------------------------------------


class _ReduceOp(types.Type):
    def __init__(self) -> None:
        super().__init__("fastcoll.ReduceOp")


class _ReduceOpClass(types.Dummy):
    """The type of the class ReduceOp itself; compiled code reads its attributes, such as SUM."""


reduce_op = _ReduceOp()


@register_model(_ReduceOp)
class _ReduceOpModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, WORD)


register_model(_ReduceOpClass)(models.OpaqueModel)
infer_global(ReduceOp, _ReduceOpClass("class fastcoll.ReduceOp"))


@typeof_impl.register(ReduceOp)
def _typeof_reduce_op(op: ReduceOp, context: Any) -> types.Type:
    if op.code == PREMUL_SUM and context.purpose.name == "constant":
        try:
            descriptors.op_word(op)
        except UsageError as error:
            raise TypingError(str(error)) from None
    return reduce_op


@unbox(_ReduceOp)
def _unbox_reduce_op(kind: Any, value: Any, c: Any) -> NativeValue:
    return _call_python(c, descriptors.op_word, (value,))


def _call_python(c: Any, function: Any, values: Sequence[Any]) -> NativeValue:
    """Emit a call of a Python function that returns an integer, or raises."""
    callee = c.pyapi.unserialize(c.pyapi.serialize_object(function))
    answer = c.pyapi.call_function_objargs(callee, values)
    number = cgutils.alloca_once_value(c.builder, WORD(0))
    failed = cgutils.is_null(c.builder, answer)
    with c.builder.if_then(c.builder.not_(failed), likely=True):
        c.builder.store(c.pyapi.long_as_longlong(answer), number)
        c.pyapi.decref(answer)
    c.pyapi.decref(callee)
    return NativeValue(c.builder.load(number), is_error=failed)


def _constant_word(op: ReduceOp) -> Any:
    """Return an operation's code as a constant.

    The number of a custom operation is left out, because it is valid in one process only.
    """
    return WORD(descriptors.op_word(op) & 0xFFFF)


@lower_constant(_ReduceOp)
def _constant_reduce_op(context: Any, builder: Any, kind: Any, op: ReduceOp) -> Any:
    return _constant_word(op)


@lower_cast(types.Omitted, _ReduceOp)
def _omitted_reduce_op(context: Any, builder: Any, given: Any, kind: Any, value: Any) -> Any:
    return _constant_word(given.value)


@infer_getattr
class _ReduceOpAttributes(AttributeTemplate):
    key = _ReduceOpClass

    def generic_resolve(self, kind: Any, name: str) -> types.Type | None:
        if name in ("custom", "PREMUL_SUM"):
            raise TypingError(
                f"ReduceOp.{name}: make the ReduceOp outside compiled code, and pass it as an argument"
            )
        return reduce_op if isinstance(getattr(ReduceOp, name, None), ReduceOp) else None


@lower_getattr_generic(_ReduceOpClass)
def _reduce_op_attribute(context: Any, builder: Any, kind: Any, value: Any, name: str) -> Any:
    return _constant_word(getattr(ReduceOp, name))


# ---- groups ---------------------------------------------------------------------------------------------


class _Group(types.Type):
    def __init__(self) -> None:
        super().__init__("fastcoll.ProcessGroup")


group = _Group()


@register_model(_Group)
class _GroupModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, WORD)


@typeof_impl.register(ProcessGroup)
@typeof_impl.register(NonMember)
def _typeof_group(given: Any, context: Any) -> types.Type:
    if context.purpose.name == "constant":
        raise TypingError("a group cannot be a constant of compiled code; pass it as an argument")
    return group


@unbox(_Group)
def _unbox_group(kind: Any, value: Any, c: Any) -> NativeValue:
    layout = c.pyapi.long_from_longlong(WORD(LAYOUT))
    found = _call_python(c, descriptor_for, (value, layout))
    c.pyapi.decref(layout)
    return found


# ---- requests -------------------------------------------------------------------------------------------


class _Work(types.Type):
    """The type that isend and irecv return.

    A value has the group's descriptor, the request's number and the sender's global rank. The number is 0 if this
    process is not in the group. The rank is ANY_SENDER if the message will determine it, NO_SENDER for a send.
    """

    def __init__(self) -> None:
        super().__init__("fastcoll.Work")


ANY_SENDER, NO_SENDER = -1, -2
work = _Work()
_WORDS = ("descriptor", "number", "sender")


@register_model(_Work)
class _WorkModel(models.StructModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, [(name, types.int64) for name in _WORDS])


@intrinsic
def new_work(typing_context, descriptor, number, sender):
    def emit(context, builder, made, args):
        value = ir.Constant(context.get_value_type(work), ir.Undefined)
        for position, word in enumerate(args):
            value = builder.insert_value(value, word, position)
        return value

    return work(types.int64, types.int64, types.int64), emit


@intrinsic
def words_of(typing_context, given):
    """Return descriptor, number and sender of a request."""

    def emit(context, builder, made, args):
        words = [builder.extract_value(args[0], position) for position in range(len(_WORDS))]
        return context.make_tuple(builder, made.return_type, words)

    return types.UniTuple(types.int64, len(_WORDS))(work), emit


@intrinsic
def held(typing_context, array):
    """Return the words of `data_and_owner`; add a reference to the owner.

    A request will hold the reference.
    """

    def emit(context, builder, made, args):
        given = context.make_array(made.args[0])(context, builder, args[0])
        _hold(builder, given.meminfo)
        words = [builder.ptrtoint(part, WORD) for part in (given.data, given.meminfo)]
        return context.make_tuple(builder, made.return_type, words)

    return _DATA_AND_OWNER(array), emit


handles.release_by(_nrt_python.c_helpers["MemInfo_release"])


# ---- descriptors and the C entry point, in compiled code --------------------------------------------------


def _word_of_library(module: ir.Module, name: str) -> ir.GlobalVariable:
    """Return a global variable of a compiled library, a word.

    It is 0 in each process until the library's code sets it.
    """
    if name in module.globals:
        return module.globals[name]
    variable = ir.GlobalVariable(module, WORD, name)
    variable.linkage, variable.initializer = "linkonce_odr", WORD(0)
    return variable


def _world_descriptor(module: ir.Module) -> ir.GlobalVariable:
    """Return the variable with the address of the world's descriptor."""
    return _word_of_library(module, "fastcoll.world_descriptor")


def _finder(module: ir.Module) -> ir.Function:
    """Emit a function that imports fastcoll, if necessary, and calls `world_descriptor`.

    If that raises, the function prints the exception and returns 0.
    """
    name = "fastcoll.find_world_descriptor"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(WORD, []), name)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    half = ir.IntType(32)

    def python(name: str, returns: Any, *kinds: Any, more: bool = False) -> Any:
        return cgutils.get_or_insert_function(module, ir.FunctionType(returns, kinds, var_arg=more), name)

    def text(value: str) -> Any:
        data = cgutils.make_bytearray(value.encode() + b"\0")
        return builder.bitcast(cgutils.global_constant(module, f"fastcoll.{value}", data), _POINTER)

    state = builder.call(python("PyGILState_Ensure", half), [])
    found = builder.call(python("PyImport_ImportModule", _POINTER, _POINTER), [text(__name__)])
    descriptor = cgutils.alloca_once_value(builder, WORD(0))
    with builder.if_then(cgutils.is_not_null(builder, found)):
        ask = python("PyObject_CallMethod", _POINTER, _POINTER, _POINTER, _POINTER, more=True)
        answer = builder.call(ask, [found, text("world_descriptor"), text("L"), WORD(LAYOUT)])
        with builder.if_then(cgutils.is_not_null(builder, answer)):
            builder.store(builder.call(python("PyLong_AsLongLong", WORD, _POINTER), [answer]), descriptor)
    builder.store(builder.load(descriptor), _world_descriptor(module))
    with builder.if_then(builder.icmp_signed("==", builder.load(descriptor), WORD(0))):
        builder.call(python("PyErr_Print", ir.VoidType()), [])
    builder.call(python("PyGILState_Release", ir.VoidType(), half), [state])
    builder.ret(builder.load(descriptor))
    return function


@intrinsic
def descriptor_of(typing_context, given):
    """Return the address of a group's descriptor (None: the world's); 0 if an error was printed."""

    def emit(context, builder, made, args):
        if made.args[0] is group:
            return args[0]
        descriptor = cgutils.alloca_once_value(builder, builder.load(_world_descriptor(builder.module)))
        with builder.if_then(builder.icmp_signed("==", builder.load(descriptor), WORD(0)), likely=False):
            builder.store(builder.call(_finder(builder.module), []), descriptor)
        return builder.load(descriptor)

    if given is group or is_none(given):
        return types.int64(given), emit
    raise TypingError(f"group is of type {given}; give a group of new_group as an argument, or None")


@intrinsic
def word(typing_context, address, index):
    """Return a word of the table at an address, with acquire: Python may write the table at the same time."""

    def emit(context, builder, made, args):
        slot = builder.add(args[0], builder.mul(args[1], WORD(8)))
        return builder.load_atomic(builder.inttoptr(slot, WORD.as_pointer()), "acquire", 8)

    return types.int64(types.int64, types.int64), emit


@intrinsic
def data_and_owner(typing_context, array):
    """Return the addresses of an array's data and of its owner (Numba's MemInfo)."""

    def emit(context, builder, made, args):
        given = context.make_array(made.args[0])(context, builder, args[0])
        words = [builder.ptrtoint(part, WORD) for part in (given.data, given.meminfo)]
        return context.make_tuple(builder, made.return_type, words)

    return _DATA_AND_OWNER(array), emit


_DATA_AND_OWNER = types.UniTuple(types.int64, 2)


def _hold(builder: Any, owner: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_POINTER])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, "NRT_incref"), [owner])


@intrinsic
def call_c_entry(typing_context, descriptor, op, data, out, nbytes, call, peer):
    """Call the C entry point of a descriptor.

    `data` and `out` are each a pair from `data_and_owner`, a number, None, or an array, which Numba keeps alive until
    the call returns. `nbytes` is a number or an array. If the call returns RAISED, the operation may still run later,
    so the owners in the pairs are never freed. The arrays are not freed either, because Numba never frees the arrays of
    a function that raises.
    """

    def emit(context, builder, made, args):
        def address(kind: Any, value: Any) -> Any:
            if isinstance(kind, types.Array):
                return builder.ptrtoint(context.make_array(kind)(context, builder, value).data, WORD)
            if kind == _DATA_AND_OWNER:
                return builder.extract_value(value, 0)
            return value if isinstance(kind, types.Integer) else WORD(0)

        slot = builder.add(args[0], WORD(8 * d.C_ENTRY))
        c_entry = builder.load(builder.inttoptr(slot, WORD.as_pointer()))
        kind = ir.FunctionType(WORD, [WORD] * 7).as_pointer()
        found = builder.call(builder.inttoptr(c_entry, kind), list(map(address, made.args, args)))
        with builder.if_then(builder.icmp_signed("<", found, WORD(0)), likely=False):
            for value in (
                value for kind, value in zip(made.args, args, strict=True) if kind == _DATA_AND_OWNER
            ):
                _hold(builder, builder.inttoptr(builder.extract_value(value, 1), _POINTER))
        return found

    number = types.int64
    size = nbytes if isinstance(nbytes, types.Array) else number
    return number(number, number, data, out, size, number, number), emit


@intrinsic
def op_word_of(typing_context, op):
    """Return the bits of a ReduceOp in a call word."""

    def emit(context, builder, made, args):
        return context.cast(builder, args[0], made.args[0], reduce_op)

    if op is reduce_op or (isinstance(op, types.Omitted) and isinstance(op.value, ReduceOp)):
        return types.int64(op), emit
    raise TypingError(f"op is of type {op}; give a ReduceOp")


@intrinsic
def integer_of(typing_context, value):
    """Return an integer, or 0 for None."""

    def emit(context, builder, made, args):
        kind = made.args[0]
        if isinstance(kind, types.Omitted):
            return WORD(kind.value or 0)
        return WORD(0) if is_none(kind) else context.cast(builder, args[0], kind, types.int64)

    kind = types.unliteral(value)
    kind = kind.type if isinstance(kind, types.Optional) else kind
    accepted = types.Integer | types.IntEnumMember | types.Boolean | types.Omitted
    if not (is_none(value) or isinstance(kind, accepted)):
        raise TypingError(f"an argument is of type {value}; give an integer")
    return types.int64(value), emit


@intrinsic
def know_dtype(typing_context, array):
    """Register an array's dtype in this process, unless it is one of NumPy's numeric dtypes.

    This registers the dtypes of records, for example. Code that is loaded from disk was compiled by another process,
    which registered the dtype only there.
    """
    numpys = as_dtype(array.dtype)

    def emit(context, builder, made, args):
        if numpys.name in NUMPY:
            return context.get_dummy_value()
        known = _word_of_library(builder.module, f"fastcoll.knows.{zlib.crc32(repr(numpys).encode())}")
        with builder.if_then(builder.icmp_signed("==", builder.load(known), WORD(0)), likely=False):
            python = context.get_python_api(builder)
            state = python.gil_ensure()
            learn = python.unserialize(python.serialize_object(partial(descriptors.learn, numpys)))
            answer = python.call_function_objargs(learn, ())
            with builder.if_else(cgutils.is_null(builder, answer)) as (failed, done):
                with failed:
                    python.err_write_unraisable(learn)
                with done:
                    builder.store(WORD(1), known)
                    python.decref(answer)
            python.decref(learn)
            python.gil_release(state)
        return context.get_dummy_value()

    return types.void(array), emit


def is_none(given: Any) -> bool:
    """Whether an argument, by its type, is None or omitted."""
    return given is None or isinstance(given, types.NoneType) or getattr(given, "value", 0) is None


def refresh() -> None:
    """Make Numba read new registrations at once, even in the middle of a compilation."""
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
