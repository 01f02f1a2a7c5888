"""fastcoll's functions inside numba.njit: the same names and arguments, in nopython code.

Each overload checks the arguments' types, refuses wrong types by TypingError, and returns the function that is
compiled. That function packs arrays that are not contiguous, calls the C entry point (kernels/c_entries.py), and raises
the exception of the call, if there is one. If arguments have wrong values, such as sizes that do not fit, the function
calls the C entry point with the operation REFUSED, so that the peers get an error too.

Importing this module registers the overloads, most of which are in njit_collectives.py and njit_messages.py. Numba
imports it through an entry point when it first compiles a use of fastcoll (fastcoll_autoload.py), so neither
`import numba` nor `import fastcoll` takes longer for it.
"""

from __future__ import annotations

from typing import Any

from numba.core.errors import TypingError
from numba.extending import overload

from ..api import collectives, p2p
from ..job import groups
from ..kernels import c_entries as d
from . import njit_collectives, njit_messages  # noqa: F401 - register their overloads
from .njit_arguments import checked_descriptor, size_of
from .numba_cache import lock_caches
from .numba_types import refresh, word

_RANK = d.RANK

lock_caches()


@overload(groups.get_rank)
def _get_rank(group=None):
    def impl(group=None):
        descriptor = checked_descriptor(group)
        size_of(descriptor)
        return word(descriptor, _RANK)

    return impl


@overload(groups.get_world_size)
def _get_world_size(group=None):
    def impl(group=None):
        return size_of(checked_descriptor(group))

    return impl


# ---- functions that compiled code cannot call ---------------------------------------------------------------

_INSTEAD = {
    collectives.all_gather: "all_gather_into_tensor, which takes one array with a block for each rank",
    collectives.gather: "gather_single, which takes one array with a block for each rank",
    collectives.scatter: "scatter_single, which takes one array with a block for each rank",
    collectives.reduce_scatter: "reduce_scatter_tensor, which takes one array with a block for each rank",
    collectives.all_to_all: "all_to_all_single, which takes one array with a block for each rank",
    p2p.batch_isend_irecv: "isend and irecv, and waitall",
}


def _refuse(function: Any, instead: str) -> None:
    @overload(function)
    def refused(*args: Any, **kwargs: Any) -> None:
        raise TypingError(f"{function.__name__} cannot be called inside njit; use {instead}")


for _function, _instead in _INSTEAD.items():
    _refuse(_function, _instead)

refresh()
