"""The border of the CUDA kernels: device addresses, and arrays with `__cuda_array_interface__`."""

from __future__ import annotations

from typing import Any

from ...errors import ArrayError


def address_of(x: Any, nbytes: int, what: str) -> int:
    """The address of `nbytes` bytes in device memory: an int as it is, or a contiguous array's.

    Raises:
        ArrayError: it is neither, or the array is not contiguous, too small, or read-only as `what` "dst".
    """
    if type(x) is int:
        return x
    described = _described(x, what)
    shape, itemsize = described["shape"], int(described["typestr"][2:])
    size = itemsize
    for extent in shape:
        size *= extent
    if described.get("strides") is not None and described["strides"] != dense_strides(shape, itemsize):
        raise ArrayError(f"{what} has shape {shape} and strides {described['strides']}; pack it first")
    if size < nbytes:
        raise ArrayError(f"{what} has {size} bytes, and the call is for {nbytes}")
    address, read_only = described["data"]
    if read_only and what == "dst":
        raise ArrayError("dst is read-only, and the result goes there; give a writable copy of it")
    return int(address)


def layout_of(x: Any, what: str) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """An array's address, shape, strides in bytes, and bytes of an element."""
    described = _described(x, what)
    shape, itemsize = tuple(described["shape"]), int(described["typestr"][2:])
    strides = described.get("strides")
    return described["data"][0], shape, tuple(strides or dense_strides(shape, itemsize)), itemsize


def dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides in bytes of a C-contiguous array."""
    strides: list[int] = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _described(x: Any, what: str) -> dict[str, Any]:
    try:
        described: dict[str, Any] = x.__cuda_array_interface__
    except AttributeError:
        raise ArrayError(
            f"{what} must be a device address or an array with __cuda_array_interface__, got {type(x).__name__}"
        ) from None
    return described
