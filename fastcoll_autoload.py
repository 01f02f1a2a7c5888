"""The entry points of fastcoll that torch and Numba run.

torch 2.5 and later load the entry point `torch.backends` when torch is imported, in every process, including spawned
children and other libraries' workers. It registers the backend's name `fastcoll`, and a rendezvous for ranks that
mpiexec or srun has started. This module lies beside the package, whose import takes a tenth of a second; the first
group imports it. An exception would break `import torch` for every user, so errors become warnings.

Numba runs the entry point `numba_extensions` before it compiles or loads the first function of a process. To cost
nothing in programs without fastcoll, it registers fastcoll's types and functions only when Numba meets the first one.
It also repairs a table of Numba's, because of which keyword arguments inside `try` lose their names (`keep_keywords`).
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

_NJIT = "fastcoll.callers.njit"
# The modules of the public functions and types. Numba also compiles kernels, which are in other modules.
_TYPED = ("fastcoll.api.", "fastcoll.job.", "fastcoll.core.group", "fastcoll.core.reduce_op")
_READ = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FORGETFUL = ((3, 11), (3, 12))
_NEVER_RAISE = frozenset(("LOAD_CONST", "NOP", "LOAD_DEREF", "PRECALL"))
_LAUNCHERS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")


def register() -> None:
    """Register the backend, and make it the default if FASTCOLL_TORCH_DEFAULT is set."""
    try:
        import torch.distributed as dist

        if os.environ.get("FASTCOLL_TORCH_DEFAULT"):
            import fastcoll.torch  # noqa: F401 - does both
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
    """Make Numba keep the names of keyword arguments inside `try`, on Python 3.11 and 3.12.

    In these versions an instruction before the call (KW_NAMES) loads the names. Inside `try` Numba begins a new block
    after every instruction that is not in its table of instructions that never raise, and a block does not have the
    names that the previous block has loaded. So `f(x, b=1)` is compiled as `f(x, 1)`, without an error. Numba 0.60 to
    0.68 lack KW_NAMES in that table, and CACHE, which is between KW_NAMES and the call on 3.11. Other tables are not
    changed; callers/keywords.py refuses such calls of fastcoll if names are still lost.
    """
    from numba.core import byteflow

    if sys.version_info[:2] in _FORGETFUL and getattr(byteflow, "_NO_RAISE_OPS", None) == _NEVER_RAISE:
        byteflow._NO_RAISE_OPS = _NEVER_RAISE | {"KW_NAMES", "CACHE"}


def register_numba() -> None:
    """Make Numba register fastcoll's functions, groups and reduce operations when it first meets one."""
    from numba.extending import typeof_impl

    keep_keywords()

    def watch(kind: type) -> None:
        """Replace Numba's `typeof` for values of this kind by one that recognises fastcoll's."""
        plain = typeof_impl.dispatch(kind)

        def typeof(value: Any, context: Any) -> Any:
            module = getattr(value, "__module__", None)
            if _NJIT not in sys.modules and isinstance(module, str) and module.startswith(_TYPED):
                import fastcoll.callers.njit  # noqa: F401 - registers them

                return typeof_impl.dispatch(type(value))(value, context)
            return plain(value, context)

        typeof_impl.register(kind)(typeof)

    watch(object)
    watch(type)


def _know_launchers() -> None:
    """Make env:// use fastcoll's rendezvous if torch would raise for a missing variable under a known launcher."""
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    of_torch = handlers["env"]

    def env(url: str, **named: Any) -> Any:
        lacks = any(not os.environ.get(name) and f"{name.lower()}=" not in url for name in _READ)
        if not lacks or os.environ.keys().isdisjoint(_LAUNCHERS):
            return of_torch(url, **named)
        from fastcoll.torch.launchers import meet

        return meet(url, of_torch, **named)

    handlers["env"] = env
