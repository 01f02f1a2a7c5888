"""What torch and Numba run where fastcoll is installed.

By `import torch` torch.distributed learns the name of the backend `fastcoll`, and how ranks find one another that
mpiexec or srun has started: torch 2.5 and later load the entry point `torch.backends` as they are imported, in every
process, spawned children and other people's workers included. So this is beside the package, which takes a tenth of a
second to import and is imported with the first group. An exception would break `import torch` for everybody: a warning
says instead what is wrong.

Numba runs the entry point `numba_extensions` before it compiles, or loads, the first function of a process. So that
this costs nothing where fastcoll is not used, its types and functions are registered as Numba meets the first of them.
It also mends one table of Numba's, by which keyword arguments inside `try` lose their names (`keep_keywords`).
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

_NJIT = "fastcoll.callers.njit"
# Where the public functions and types are; the kernels, which Numba compiles, too, are elsewhere.
_TYPED = ("fastcoll.api.", "fastcoll.job.", "fastcoll.core.group", "fastcoll.core.reduce_op")
_READ = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FORGETFUL = ((3, 11), (3, 12))
_NEVER_RAISE = frozenset(("LOAD_CONST", "NOP", "LOAD_DEREF", "PRECALL"))
_LAUNCHERS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")


def register() -> None:
    """Register the backend, and make it the default that FASTCOLL_TORCH_DEFAULT asks for."""
    try:
        import torch.distributed as dist

        if os.environ.get("FASTCOLL_TORCH_DEFAULT"):
            import fastcoll.torch  # noqa: F401 - which does both
        elif dist.is_available():
            dist.Backend.register_backend("fastcoll", _create, extended_api=True, devices=["cpu"])
        if dist.is_available():
            _know_launchers()
    except Exception as error:
        warnings.warn(f"torch has no backend fastcoll: {type(error).__name__}: {error}", stacklevel=2)


def _create(options: Any, pg_options: Any) -> Any:
    from fastcoll.torch.registration import create, register

    register()
    return create(options, pg_options)


def keep_keywords() -> None:
    """Have Numba keep the names of keyword arguments inside `try`, on Python 3.11 and 3.12.

    There the names are an instruction (KW_NAMES) before that of the call. Inside `try` Numba begins a new block after
    every instruction that is not in its table of those that never raise, and a block does not know the names that the
    one before has read: `f(x, b=1)` is compiled as `f(x, 1)`, without an error. Numba 0.60 to 0.68 lack KW_NAMES in
    that table, and CACHE, which stands between the two on 3.11. Any other table is left alone: callers/keywords.py
    refuses such calls of fastcoll where names are still lost.
    """
    from numba.core import byteflow

    if sys.version_info[:2] in _FORGETFUL and getattr(byteflow, "_NO_RAISE_OPS", None) == _NEVER_RAISE:
        byteflow._NO_RAISE_OPS = _NEVER_RAISE | {"KW_NAMES", "CACHE"}


def register_numba() -> None:
    """Have Numba know fastcoll's functions, groups and reduce operations when it is asked for one."""
    from numba.extending import typeof_impl

    keep_keywords()

    def watch(kind: type) -> None:
        """Of what Numba has no type of its own for, and of classes."""
        plain = typeof_impl.dispatch(kind)

        def typeof(value: Any, context: Any) -> Any:
            module = getattr(value, "__module__", None)
            if _NJIT not in sys.modules and isinstance(module, str) and module.startswith(_TYPED):
                import fastcoll.callers.njit  # noqa: F401 - which registers them

                return typeof_impl.dispatch(type(value))(value, context)
            return plain(value, context)

        typeof_impl.register(kind)(typeof)

    watch(object)
    watch(type)


def _know_launchers() -> None:
    """Where torch's env:// lacks one of its variables, and would raise, let fastcoll read those of the launcher."""
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    of_torch = handlers["env"]

    def env(url: str, **named: Any) -> Any:
        lacks = any(not os.environ.get(name) and f"{name.lower()}=" not in url for name in _READ)
        if not lacks or os.environ.keys().isdisjoint(_LAUNCHERS):
            return of_torch(url, **named)
        from fastcoll.torch.launchers import meet

        return meet(url, of_torch, **named)

    handlers["env"] = env
