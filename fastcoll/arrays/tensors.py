"""PyTorch tensors in host memory, as ndarrays over the same memory.

`Tensor.numpy` is not used. It rejects tensors that require grad, views that conjugate or negate, and a third of torch's
dtypes. It also makes the storage unresizable: from then on `untyped_storage().resize_`, with which FSDP frees memory,
raises an error. Instead, NumPy gets the address of the memory.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import ArrayError
from .dtypes import dtype_of
from .imported import Array, ImportedArray, OnDeviceError

_CURES = {
    "AsyncCollectiveTensor": "give x.wait()",
    "DTensor": "give x.to_local(), or x.full_tensor()",
    "FakeTensor": "it has no data; give a real tensor",
    "NestedTensor": "give its x.unbind() one by one, or x.values()",
    "UninitializedParameter": "it has no data; run the module once, or materialize it",
}


def import_array(x: Any, what: str, writable: bool, functional: bool) -> ImportedArray | Array | None:
    """Import a tensor in host memory; return None for other objects.

    A tensor that has no ordinary elements in memory (`_oddity`) is rejected.
    """
    torch = sys.modules["torch"]
    if not isinstance(x, torch.Tensor):
        return None
    if not (x.is_cpu or x.is_meta):
        raise OnDeviceError(what, str(x.device))
    if odd := _oddity(torch, x):
        raise _refusal(what, x, *odd)
    x = x.detach()
    try:
        if x.is_conj() or x.is_neg():
            # A lazily conjugated or negated view: import a copy, and copy it back the same way.
            copy = x.resolve_conj().resolve_neg().contiguous()
            return ImportedArray(_memory(copy), owner=_Back(x) if writable else None)
        array = _memory(x)
    except RuntimeError as error:
        raise _refusal(what, x, f"has no memory of its own ({error})", "give a tensor with data") from error
    if not plain_types:
        plain_types.update((torch.Tensor, torch.nn.Parameter))
    return array


def _oddity(torch: Any, x: Any) -> tuple[str, str] | None:
    """Return why a tensor cannot be used, and the cure; or None.

    Such a tensor has no elements in memory, or elements that mean nothing alone, such as quantized ones.
    """
    kind = type(x)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or kind.__name__ in _CURES:
        cure = _CURES.get(kind.__name__, "give the plain torch.Tensors that it is made of")
        return "keeps its data in its own way", cure
    if x.is_meta:
        cure = "make it with device='cpu', or use torch.empty_like(x, device='cpu')"
        return "is on the device meta, where it has no data", cure
    if x.is_nested:
        return "is nested", "give its x.unbind() one by one, or a padded tensor"
    if x.is_quantized:
        cure = "give x.int_repr() and send the scale and zero point, or x.dequantize()"
        return f"is quantized ({x.dtype})", cure
    if x.layout is not torch.strided:
        return f"has the layout {x.layout}", "give x.to_dense(), or its indices and values one by one"
    return None


def _refusal(what: str, x: Any, why: str, cure: str) -> ArrayError:
    kind = type(x)
    name = "torch.Tensor" if kind.__module__ == "torch" else f"{kind.__module__}.{kind.__qualname__}"
    return ArrayError(f"{what} is a {name} that {why}; {cure}")


class _Back:
    """A wrapper that supports `x[...] = array` for a tensor that NumPy cannot write to."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __setitem__(self, everything: Any, array: Array) -> None:
        self._x.copy_(sys.modules["torch"].from_numpy(array))


def _memory(x: Any) -> Array:
    """Return an ndarray over a tensor's memory, which keeps the tensor alive."""
    dtype = _dtype_of(x)
    shape = tuple(x.shape)
    if x.numel() == 0:
        return np.empty(shape, dtype)
    if not _is_backed(x):
        raise RuntimeError("its storage was resized to less than the tensor")
    strides = tuple(step * dtype.itemsize for step in x.stride())
    return _at(x.data_ptr(), shape, strides, dtype, x)


class _Interface:
    """The array interface of some memory, with the object that keeps it alive."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def _at(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: np.dtype[Any], owner: Any
) -> Array:
    data, typestr = (address, False), _typestr(dtype)
    interface = {"version": 3, "data": data, "shape": shape, "strides": strides, "typestr": typestr}
    array = np.asarray(_Interface(interface, owner))
    return array if array.dtype is dtype else array.view(dtype)


@lru_cache(maxsize=256)
def _typestr(dtype: np.dtype[Any]) -> str:
    """Return a dtype's name in the array interface; if it has none, the name of as many raw bytes."""
    known = dtype.type.__module__ == "numpy" and dtype.names is None
    return dtype.str if known else f"|V{dtype.itemsize}"


def _is_backed(x: Any) -> bool:
    """Return whether the storage has all of the elements; `resize_` may have freed it."""
    if x.is_contiguous():
        extent = x.numel()
    else:
        extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return bool(x.untyped_storage().nbytes() >= (x.storage_offset() + extent) * x.element_size())


def _dtype_of(x: Any) -> np.dtype[Any]:
    return dtype_of(str(x.dtype).removeprefix("torch."), x.element_size())


# ---- the short path ---------------------------------------------------------------------------------
#
# A *header* is an ndarray that points to a tensor's elements and owns nothing. It is reused for tensors at the same
# address, so that no ndarray has to be made. Finding a header takes 0.5 us; x.numpy() takes 0.65, and
# x.detach().numpy() 1.0 (2-core AMD EPYC, torch 2.13). Reusing a header is safe for three reasons. The key of a header
# is everything that the header contains (address, shape and dtype, read from the tensor in each call). A header is used
# only during a call that holds the tensor. A header is never given to the user. A cache keyed by tensors would not be
# safe, because `set_`, `resize_` and `data` move a tensor's elements.

_LARGEST_MEMO = 4096

plain_types: set[type] = set()
"""Tensor and Parameter, once a tensor has been imported."""

_headers: dict[Any, Array] = {}
_complex_headers: dict[Any, Array] = {}  # separate, because only complex tensors can be conjugated


def headers_for(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a compiled call, with headers in the place of tensors.

    Tensors in tuples are replaced too.
    """
    seen = []
    for x in args:
        if type(x) in plain_types:
            x = header_of(x)
        elif type(x) is tuple:
            x = tuple([header_of(y) if type(y) in plain_types else y for y in x])
        seen.append(x)
    return tuple(seen)


def header_of(x: Any) -> Any:
    """Return a header for a tensor of a plain type, or the tensor itself if it needs preparation.

    The caller keeps the tensor alive while the header is used.
    """
    try:
        if x.is_contiguous() and x.is_cpu and not x.is_neg():
            key = (x.data_ptr(), x.shape, x.dtype)
            header = _headers.get(key)
            return _new_header(key, x) if header is None else header
    except RuntimeError:  # no memory, or no shape: the general path reports it
        pass
    return x


def _new_header(key: tuple[int, Any, Any], x: Any) -> Any:
    if key[0] == 0 or x.is_quantized or x.is_conj() or not _is_backed(x):
        return x
    headers = _complex_headers if x.is_complex() else _headers
    header = headers.get(key)
    if header is None:
        if len(headers) >= _LARGEST_MEMO:
            headers.clear()
        header = headers[key] = _at(key[0], tuple(key[1]), None, _dtype_of(x), None)
    return header
