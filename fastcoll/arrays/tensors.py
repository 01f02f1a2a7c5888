"""Tensors of PyTorch in host memory, as ndarrays over the same memory.

`Tensor.numpy` is not used. It refuses tensors that require grad, views that conjugate or negate and a third of torch's
dtypes, and it pins the storage for good: `untyped_storage().resize_`, by which FSDP frees memory, raises from then on.
Instead NumPy is told where the memory is.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import ArrayError
from .adopted import Adopted, Array, OnDeviceError
from .dtypes import dtype_of

_CURES = {
    "AsyncCollectiveTensor": "give x.wait()",
    "DTensor": "give x.to_local(), or x.full_tensor()",
    "FakeTensor": "it has no data; give a real tensor",
    "NestedTensor": "give its x.unbind() one by one, or x.values()",
    "UninitializedParameter": "it has no data; run the module once, or materialize it",
}


def adopt(x: Any, what: str, writable: bool, renew: bool) -> Adopted | Array | None:
    """A tensor in host memory; None for what is no tensor. One whose elements do not lie as an array's is refused."""
    torch = sys.modules["torch"]
    if not isinstance(x, torch.Tensor):
        return None
    if not (x.is_cpu or x.is_meta):
        raise OnDeviceError(what, str(x.device))
    if odd := _oddity(torch, x):
        raise _refusal(what, x, *odd)
    x = x.detach()
    try:
        if (
            x.is_conj() or x.is_neg()
        ):  # the view of memory does more than lie there: a copy, and back the same way
            copy = x.resolve_conj().resolve_neg().contiguous()
            return Adopted(_memory(copy), owner=_Back(x) if writable else None)
        array = _memory(x)
    except RuntimeError as error:
        raise _refusal(what, x, f"has no memory of its own ({error})", "give a tensor with data") from error
    if not plain_types:
        plain_types.update((torch.Tensor, torch.nn.Parameter))
    return array


def _oddity(torch: Any, x: Any) -> tuple[str, str] | None:
    """Why a tensor has no elements in memory, or none that mean something alone, and the cure."""
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
    """`[...] =` for tensors that NumPy cannot write to."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __setitem__(self, everything: Any, array: Array) -> None:
        self._x.copy_(sys.modules["torch"].from_numpy(array))


def _memory(x: Any) -> Array:
    """An ndarray over a tensor's memory, which keeps the tensor alive."""
    dtype = _dtype_of(x)
    shape = tuple(x.shape)
    if x.numel() == 0:
        return np.empty(shape, dtype)
    if not _is_backed(x):
        raise RuntimeError("its storage was resized to less than the tensor")
    strides = tuple(step * dtype.itemsize for step in x.stride())
    return _at(x.data_ptr(), shape, strides, dtype, x)


class _Interface:
    """What NumPy asks for an array's memory, and what keeps that alive."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, said: dict[str, Any], owner: Any) -> None:
        self.__array_interface__ = said
        self.owner = owner


def _at(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: np.dtype[Any], owner: Any
) -> Array:
    data, typestr = (address, False), _typestr(dtype)
    said = {"version": 3, "data": data, "shape": shape, "strides": strides, "typestr": typestr}
    array = np.asarray(_Interface(said, owner))
    return array if array.dtype is dtype else array.view(dtype)


@lru_cache(maxsize=256)
def _typestr(dtype: np.dtype[Any]) -> str:
    """How the array interface names a dtype, or as many bytes for one that it has no name for."""
    known = dtype.type.__module__ == "numpy" and dtype.names is None
    return dtype.str if known else f"|V{dtype.itemsize}"


def _is_backed(x: Any) -> bool:
    """Whether the storage has all of the elements; `resize_` frees it under its tensors."""
    if x.is_contiguous():
        extent = x.numel()
    else:
        extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return bool(x.untyped_storage().nbytes() >= (x.storage_offset() + extent) * x.element_size())


def _dtype_of(x: Any) -> np.dtype[Any]:
    return dtype_of(str(x.dtype).removeprefix("torch."), x.element_size())


# ---- the short path ---------------------------------------------------------------------------------
#
# A *header* is an ndarray that says where a tensor's elements are and owns nothing. The same headers serve again for
# tensors at the same place, so nothing has to be made: 0.5 us, where x.numpy() takes 0.65 and x.detach().numpy() 1.0
# (2-core AMD EPYC, torch 2.13). That is sound, as a header is looked up by all that it says (address, shape and
# dtype, asked of the tensor in each call), is used only during a call that holds the tensor, and is never handed out. A
# memo of tensors would not be: `set_`, `resize_` and `data` move a tensor's elements.

_LARGEST_MEMO = 4096

plain_types: set[type] = set()
"""Tensor and Parameter, once a tensor was adopted."""

_headers: dict[Any, Array] = {}
_complex_headers: dict[Any, Array] = {}  # by themselves, as no other tensors can be conjugated


def headers_for(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a compiled call with headers for tensors, also in tuples, as `header_of` gives them."""
    seen = []
    for x in args:
        if type(x) in plain_types:
            x = header_of(x)
        elif type(x) is tuple:
            x = tuple([header_of(y) if type(y) in plain_types else y for y in x])
        seen.append(x)
    return tuple(seen)


def header_of(x: Any) -> Any:
    """A header for a tensor of a plain type; the tensor itself where it needs preparation.

    The caller keeps the tensor alive while the header is used.
    """
    try:
        if x.is_contiguous() and x.is_cpu and not x.is_neg():
            place = (x.data_ptr(), x.shape, x.dtype)
            header = _headers.get(place)
            return _new_header(place, x) if header is None else header
    except RuntimeError:  # no memory, or no shape: the general path says what it is
        pass
    return x


def _new_header(place: tuple[int, Any, Any], x: Any) -> Any:
    if place[0] == 0 or x.is_quantized or x.is_conj() or not _is_backed(x):
        return x
    headers = _complex_headers if x.is_complex() else _headers
    header = headers.get(place)
    if header is None:
        if len(headers) >= _LARGEST_MEMO:
            headers.clear()
        header = headers[place] = _at(place[0], tuple(place[1]), None, _dtype_of(x), None)
    return header
