"""Functions that are only ever part of others: typed once, linked, and left to LLVM where they are used.

By default Numba optimizes each helper by itself, makes machine code and a Python wrapper of it, and does all that
again for every literal that it is called with. Helpers need none of it: the entries took 22 s to compile with it,
and take 9 s so (all of fastcoll.shm and one reducer, 2-core AMD EPYC, Numba 0.68).
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher


class _Codegen:
    """A library's code generator, to which a helper's environment is unknown: nothing runs there that needs it."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, env_name: str, env: Any) -> None:
        pass


class _Library(JITCodeLibrary):
    """Code to link into other libraries: neither optimized nor made machine code of by itself."""

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


class _Compiler(Compiler):
    def __init__(self, typingctx, targetctx, library, *args):
        super().__init__(typingctx, targetctx, library or _Library(targetctx.codegen(), "linked"), *args)


class Linked(CPUDispatcher):
    """A function that compiled code calls, and Python cannot; compiled once for each tuple of types.

    Args:
        function: what is compiled.
        flags: Numba's options.
    """

    def __init__(self, function, flags):
        options = {
            "nopython": True,
            "boundscheck": None,
            "no_cpython_wrapper": True,
            "no_cfunc_wrapper": True,
        }
        super().__init__(function, targetoptions=options | flags, pipeline_class=_Compiler)

    def get_call_template(self, args, kws):
        plain = types.unliteral
        return super().get_call_template(
            tuple(map(plain, args)), {name: plain(kind) for name, kind in kws.items()}
        )

    def add_overload(self, cres):
        self.overloads[tuple(cres.signature.args)] = cres  # and nothing for Python to call

    def _compile_for_args(self, *args, **kws):
        raise TypeError(f"{self.py_func.__name__} is a part of compiled code; call it from an entry")
