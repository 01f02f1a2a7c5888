"""Import of JAX arrays in host memory, which are read in place and never written.

An operation that writes the arrays of other libraries in place returns a new JAX array instead.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np

from ..errors import ArrayError
from .imported import Array, FunctionalResult


def import_array(x: Any, what: str, writable: bool, functional: bool) -> FunctionalResult | Array | None:
    """Import a JAX array in host memory; return None for other objects and other devices.

    An array that has no elements in this process (traced or deleted), or is on several devices, is rejected. An array
    that the call writes is rejected too, except if the call is `functional`: it can then return a new array.
    """
    jax = sys.modules["jax"]
    if not isinstance(x, jax.Array):
        return None
    if isinstance(x, jax.core.Tracer):
        raise ArrayError(
            f"{what} is traced by JAX ({type(x).__name__}), so it has no elements yet; call from outside jax.jit, "
            "or through jax.pure_callback"
        )
    if x.is_deleted():
        raise ArrayError(f"{what} is a JAX array that was deleted or donated; give one with data")
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        raise ArrayError(f"{what} is a JAX array of {x.dtype}; give jax.random.key_data(x)")
    if len(x.devices()) != 1:
        raise ArrayError(
            f"{what} is a JAX array on {len(x.devices())} devices; give numpy.asarray(x), or the data of its "
            "addressable_shards one by one"
        )
    if next(iter(x.devices())).platform != "cpu":
        return None
    if writable and not functional:
        raise ArrayError(
            f"{what} is a JAX array, which is immutable, and the result goes there; give a NumPy array, "
            "e.g. numpy.empty(x.shape, x.dtype), and make jax.numpy.asarray of it afterwards"
        )
    # This waits for the computation. On the CPU it makes no copy, for any dtype; DLPack supports fewer dtypes.
    array = np.asarray(x)
    if not functional:
        return array
    if not writable:
        return FunctionalResult(np.ascontiguousarray(array), lambda same: x)
    return FunctionalResult(array.copy(order="C"), partial(from_numpy, sharding=x.sharding, dtype=x.dtype))


def from_numpy(array: Array, sharding: Any, dtype: Any) -> Any:
    """Return a JAX array with these elements, placed as `sharding` says."""
    jax = sys.modules["jax"]
    # Asynchronous calls end on another thread, where 64-bit dtypes may be disabled although the caller enabled them.
    if dtype.itemsize < 8:
        return jax.device_put(array, sharding)
    with jax.enable_x64(True):
        return jax.device_put(array, sharding)
