"""torch's tensors in messages: each storage is sent once, and tensors that share it share it at the receiver.

torch's own pickling writes a tensor through a file in memory: 16 MiB take 108 ms, here 0.03 ms (AMD EPYC). A tensor
that is a small part of its storage is sent as a copy of that part, as in torch: it shares nothing at the receiver.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch

from . import wire

_KINDS = (torch.Tensor, torch.nn.Parameter)
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
# Storages of up to this size are part of the pickle: beside it they are copied four times less, but cost 5 us more.
_IN_PICKLE = 4 << 10
_PART_NBYTES, _PART = (
    8 << 10,
    2,
)  # from this storage size on, a tensor of at most half of its storage is a small part


def reduced(tensor: Any, to: object = None) -> Any:
    """The reduce tuple of a tensor. Whether it needs a gradient travels, its graph does not."""
    is_plain = (
        type(tensor) in _KINDS
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype in _NUMBERS
        and not (tensor.is_conj() or tensor.is_neg())
    )
    if not is_plain or not tensor.numel():
        return tensor.__reduce_ex__(5)
    kind = (type(tensor) is not torch.Tensor) << 1 | tensor.requires_grad
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if nbytes >= _PART_NBYTES and nbytes >= _PART * tensor.nbytes:
        tensor = tensor.detach().clone()
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
    is_whole = nbytes == tensor.nbytes and tensor.is_contiguous()
    layout = None if is_whole else (tensor.stride(), tensor.storage_offset())
    return _built, (_memory(storage, nbytes), _NUMBERS[tensor.dtype], tuple(tensor.shape), layout, kind)


def _memory(storage: Any, nbytes: int) -> Any:
    """Return a storage's bytes: one object for all tensors of a message that share the storage."""
    known, address = wire.in_message(), storage.data_ptr()
    if (found := known.get(address)) is not None:
        return found[0]
    # Through the address: any call of torch's dispatcher takes longer than everything else here.
    block = (ctypes.c_ubyte * nbytes).from_address(address)
    block.storage = storage  # type: ignore[attr-defined]  # so the address is not reused while the block exists
    found = bytearray(block) if nbytes <= _IN_PICKLE else wire.SharedBuffer(pickle.PickleBuffer(block))
    known[address] = found, block
    return found


def _built(memory: Any, dtype: int, shape: tuple[int, ...], layout: Any, kind: int) -> Any:
    # No views are made: autograd then allows changes of the result in place.
    if layout is None:
        tensor = torch.frombuffer(memory, dtype=_DTYPES[dtype])
        if len(shape) != 1:
            tensor.resize_(shape)
    else:
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        strides, offset = layout
        tensor = torch.empty(0, dtype=_DTYPES[dtype]).set_(storage, offset, shape, strides)
    if kind == 0:
        return tensor
    return torch.nn.Parameter(tensor, kind == 3) if kind > 1 else tensor.requires_grad_()


wire.reduce_type(torch.Tensor, reduced)
