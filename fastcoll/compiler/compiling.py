"""Compilation of entries, kernels, helpers and C functions to machine code.

jit.py has the decorators that declare them. This is the only file with Numba's flags. It is imported only when
something has to be compiled, because it imports Numba. Fastmath is off, so that the same inputs give the same bits.
Kernels release the GIL and never raise. Their divisions have NumPy's results.

Numba types each kernel and helper once, and links it into the code that uses it; LLVM then optimises all of that code
together. By default Numba optimises each function by itself, generates machine code and a Python wrapper for it, and
repeats that for every literal argument. With this default the entries took 22 s to compile; now they take 9 s (all of
fastcoll.shm and one reducer, 2-core AMD EPYC, Numba 0.68).
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import llvmlite.binding as llvm_binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher, cpu_target
from numba.extending import intrinsic, models, register_model

from ..supported import check_version
from . import llvm
from .elements import WORD, Half
from .machine_code import SYMBOL

check_version("Numba", numba.__version__)


class _Codegen:
    """A code generator that ignores Numba's environments of helpers (`set_env`).

    The code of this package needs no environments at run time.
    """

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, env_name: str, env: Any) -> None:
        pass


_libraries: weakref.WeakSet[Any] = weakref.WeakSet()


def forget_modules() -> None:
    """Let no library free its LLVM modules; they stay until the process ends.

    llvmlite cannot free modules while Python shuts down.
    """
    for library in _libraries:
        library.forget()


class _Library(JITCodeLibrary):
    """Code to link into other libraries.

    It is neither optimised nor compiled to machine code by itself.
    """

    def __init__(self, codegen, name):
        super().__init__(codegen, name)
        _libraries.add(self)

    def forget(self) -> None:
        for module in {self._final_module, self._shared_module} - {None}:
            module.detach()

    @property
    def codegen(self):
        return _Codegen(self._codegen)

    def _optimize_functions(self, ll_module):
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self):
        pass

    def _finalize_final_module(self):
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name):
        return 0


class _Complete(_Library):
    """The code of a function and of all functions that it needs, optimised together."""

    def _optimize_final_module(self):
        # LLVM inlines an internal function with one caller, and drops what nothing calls.
        for function in self._final_module.functions:
            if not function.is_declaration and not function.name.startswith(SYMBOL):
                function.linkage = "internal"
        JITCodeLibrary._optimize_final_module(self)

    def _finalize_final_module(self):
        self._verify_declare_only_symbols()
        super()._finalize_final_module()

    def machine_code(self) -> bytes:
        """Return an object file."""
        return _machine(*self._codegen.magic_tuple()).emit_object(self._final_module)


@cache
def _machine(triple: str, name: str, features: str) -> Any:
    """Return the code generator for Numba's target processor.

    Its settings are those that machine_code.py requires.
    """
    target = llvm_binding.Target.from_triple(triple)
    return target.create_target_machine(name, features, opt=3, reloc="pic", codemodel="small")


class _Compiler(Compiler):
    def __init__(self, typingctx, targetctx, library, *args):
        super().__init__(typingctx, targetctx, library or _Library(targetctx.codegen(), "linked"), *args)


class Linked(CPUDispatcher):
    """A function for compiled code, not for Python; compiled once for each tuple of types."""

    def __init__(self, function, flags):
        no_wrappers = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        options = {"nopython": True, "boundscheck": None, **no_wrappers}
        super().__init__(function, targetoptions=options | flags, pipeline_class=_Compiler)

    def get_call_template(self, args, kws):
        plain = types.unliteral
        return super().get_call_template(tuple(map(plain, args)), {k: plain(v) for k, v in kws.items()})

    def add_overload(self, cres):
        self.overloads[tuple(cres.signature.args)] = cres  # no wrapper for Python


FLAGS = {"error_model": "numpy"}
# Kernels make no arrays, lists or strings, so their code does not need Numba's runtime (NRT).
_WORDS_ONLY = {**FLAGS, "_nrt": False, "nogil": True}


def linked(function: Callable[..., Any], **flags: bool) -> Linked:
    """Return a function for compiled code to call, with fastcoll's flags and `flags`."""
    # Without its own value of `forceinline`, a function that is compiled for a caller takes the caller's.
    return Linked(function, {**_WORDS_ONLY, "forceinline": False, **flags})


def instruction(
    emit: Callable[..., Any], returns: types.Type, *kinds: types.Type, by: Any = intrinsic
) -> Any:
    """Return a helper whose LLVM instructions `emit(builder, *values)` adds.

    Args:
        kinds: the arguments' types, if they are not all int64.
        by: Numba's `intrinsic`, or numba-cuda's.
    """
    signature = inspect.signature(emit)
    made = returns(*(kinds or [types.int64] * (len(signature.parameters) - 1)))

    def define(typing_context, *args):
        def generate(context, builder, signature, values):
            value = emit(builder, *values)
            return context.get_dummy_value() if value is None else value

        return made, generate

    define.__signature__ = signature  # type: ignore[attr-defined]  # Numba matches a call's arguments with it
    return by(define)


def external(name: str, signature: str) -> Any:
    """Return a function of libc."""
    return types.ExternalFunction(name, named(signature))


def type_of(part: Any) -> types.Type:
    """Return Numba's type of a dispatcher, an intrinsic or an external function."""
    context = cpu_target.typing_context
    context.refresh()  # the part may be new to the context
    return context.resolve_value_type(part)


# ---- types -----------------------------------------------------------------------------------------------


class _PyObject(types.Opaque):
    """The type of any Python object."""


class _Index(types.Opaque):
    """The type of an integer, or an object with `__index__`; anything else raises a TypeError."""


@register_model(_Index)
class _IndexModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, WORD)


register_model(_PyObject)(models.OpaqueModel)
_PARAMETERS = {"PyObject": _PyObject(name="PyObject"), "Index": _Index(name="Index")}
_NAMES = {**vars(types), **_PARAMETERS, "Half": Half}


def named(text: str) -> Any:
    """Return the type or signature that Numba's notation `text` names."""
    return eval(text, _NAMES)


# ---- entry points for Python and C -----------------------------------------------------------------------


class Function(NamedTuple):
    """A function of an object file.

    `emit(builder, call, *values)` adds its instructions: `values` are its arguments, and `call` emits the call of the
    Python function `body`.

    Attributes:
        signature: the types with which `body` is compiled.
        kind: LLVM's type of the function.
    """

    body: Callable[..., Any]
    signature: Any
    kind: ir.FunctionType
    emit: Callable[..., None]


def entry(
    function: Callable[..., Any], locked: bool, twins: Sequence[tuple[Callable[..., Any], str]] = ()
) -> bytes:
    """Return the object file of an entry.

    It has the function `PyObject *(PyObject *self, PyObject *const *args, Py_ssize_t count)`, and then the twins.

    Args:
        locked: whether the function runs with the GIL held.
        twins: C functions, with their signatures.
    """
    parameters = [parameter.annotation for parameter in inspect.signature(function).parameters.values()]
    data = llvm.BYTE.as_pointer()

    def emit(builder: ir.IRBuilder, call: Callable[..., Any], this: Any, given: Any, count: Any) -> None:
        python = partial(llvm.function, builder)
        with cgutils.if_unlikely(builder, builder.icmp_unsigned("!=", count, WORD(len(parameters)))):
            builder.call(python("PyErr_BadArgument", llvm.HALF_WORD), [])
            builder.ret(data(None))
        values = []
        for number, parameter in enumerate(parameters):
            value = builder.load(builder.gep(given, [WORD(number)]))
            if parameter == "Index":
                value = builder.call(python("PyLong_AsLongLong", WORD, data), [value])
                with cgutils.if_unlikely(builder, builder.icmp_unsigned("==", value, WORD(-1))):
                    error = builder.call(python("PyErr_Occurred", data), [])
                    with cgutils.if_unlikely(builder, cgutils.is_not_null(builder, error)):
                        builder.ret(data(None))
            values.append(value)
        thread = None if locked else builder.call(python("PyEval_SaveThread", WORD), [])
        status, result = call(values)
        if thread is not None:
            builder.call(python("PyEval_RestoreThread", llvm.VOID, WORD), [thread])
        with cgutils.if_unlikely(builder, status.is_error):
            builder.call(python("PyErr_BadInternalCall", llvm.VOID), [])
            builder.ret(data(None))
        builder.ret(builder.call(python("PyLong_FromLongLong", data, WORD), [result]))

    signature = types.int64(*map(_PARAMETERS.__getitem__, parameters))
    for_python = Function(function, signature, ir.FunctionType(data, [data, data.as_pointer(), WORD]), emit)
    for_c = [_for_c(twin, named(words)) for twin, words in twins]
    return link_complete(for_python, *for_c).machine_code()


def c_function(function: Callable[..., Any], signature: str) -> bytes:
    """Return the object file of a function for C."""
    return complete_c_function(function, named(signature)).machine_code()


def complete_c_function(function: Callable[..., Any], signature: Any) -> _Complete:
    """Return the library of a function for C."""
    return link_complete(_for_c(function, signature))


def _for_c(function: Callable[..., Any], signature: Any) -> Function:
    kind = cpu_target.target_context.get_value_type
    nothing = signature.return_type == types.void
    returns = llvm.VOID if nothing else kind(signature.return_type)

    def emit(builder: ir.IRBuilder, call: Callable[..., Any], *values: Any) -> None:
        _, result = call(values)
        builder.ret_void() if nothing else builder.ret(result)

    return Function(function, signature, ir.FunctionType(returns, list(map(kind, signature.args))), emit)


def link_complete(*functions: Function) -> _Complete:
    """Compile functions, and all that they call, into one library."""
    name, context = functions[0].body.__name__, cpu_target.target_context
    with compilation():
        library = _Complete(context.codegen(), name)
        module = library.create_ir_module(name)
        for number, function in enumerate(functions):
            _add_function(library, module, f"{SYMBOL}{number}", function)
        library.add_ir_module(module)
        library.finalize()
    return library


def _add_function(library: _Complete, module: ir.Module, symbol: str, function: Function) -> None:
    part = linked(function.body, forceinline=True)
    part.compile(function.signature)
    compiled = part.overloads[function.signature.args]
    context, what = compiled.target_context, compiled.fndesc
    made = ir.Function(module, function.kind, symbol)
    builder = ir.IRBuilder(made.append_basic_block())
    callee = context.declare_function(module, what)

    def call(values: Sequence[Any]) -> tuple[Any, Any]:
        return context.call_conv.call_function(builder, callee, what.restype, what.argtypes, values)

    function.emit(builder, call, *made.args)
    library.add_linking_library(compiled.library)


@contextmanager
def compilation() -> Iterator[None]:
    """Hold Numba's lock, and disable the garbage collector, NUMBA_DISABLE_JIT and NUMBA_OPT=0.

    These settings are for the user's functions; code that is not optimised at all has variables, which machine_code.py
    does not load. Numba keeps millions of objects; the collector would spend 8 % of the time on scanning them.
    """
    with global_compiler_lock:
        was_on, disabled, level = gc.isenabled(), config.DISABLE_JIT, config.OPT
        gc.disable()
        config.DISABLE_JIT, config.OPT = 0, level or type(level)(1)
        try:
            yield
        finally:
            config.DISABLE_JIT, config.OPT = disabled, level
            if was_on:
                gc.enable()
