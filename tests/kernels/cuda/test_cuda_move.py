"""Copies, packing and unpacking on a GPU against NumPy's own strides."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.gpu

VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.T,
    "column": lambda x: x[:, 1],
    "every-other": lambda x: x[::2, 1::3],
    "backwards": lambda x: x[::-1, ::-1],
    "rows": lambda x: x[::2],
    "blocks": lambda x: x[1:, 2:6],
    "repeated": lambda x: np.broadcast_to(x[:, None, :2], (4, 3, 2)),
    "cube": lambda x: x.reshape(4, 4, 2).transpose(2, 0, 1)[:, ::2],
    "one": lambda x: x[2:3, 5:6],
    "scalar": lambda x: x[2, 5, ...],
    "none": lambda x: x[:0],
}
DTYPES = ["u1", "f2", "f4", "f8", "c16", "S3", "S12", "S32", [("a", "f4"), ("b", "u1")]]


def strided(placed, whole, view):
    """Return a view of an array on the device."""
    from fastcoll.kernels.cuda.packing import Strided

    offset = view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return Strided(placed.address + offset, view.shape, view.strides, whole.itemsize)


def table(dtype) -> np.ndarray:
    dtype = np.dtype(dtype)
    data = np.random.default_rng(1).integers(0, 256, (4, 8, dtype.itemsize), np.uint8)
    return data.view(dtype)[..., 0] if dtype.names is None else data.view(dtype).reshape(4, 8)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack_and_unpack(device, name, dtype):
    from fastcoll.kernels.cuda.packing import pack

    whole = table(dtype)
    view = VIEWS[name](whole)
    placed, dense = device(whole), device(np.zeros(view.shape, whole.dtype))
    pack(dense.address, strided(placed, whole, view), 0)
    assert dense.get().tobytes() == np.ascontiguousarray(view).tobytes()
    if name == "repeated":
        return
    other = np.zeros_like(whole)
    VIEWS[name](other)[...] = view
    into = device(np.zeros_like(whole))
    pack(dense.address, strided(into, whole, view), 0, back=True)
    assert into.get().tobytes() == other.tobytes()


def test_dimensions_are_merged(device):
    from fastcoll.kernels.cuda.packing import coalesced

    assert coalesced((3, 1, 4, 5), (80, 7, 20, 4)) == ((60,), (4,))
    assert coalesced((3, 4, 5), (160, 20, 4)) == ((3, 20), (160, 4))
    assert coalesced((1, 1), (9, 9)) == ((1,), (0,))
    assert coalesced((2, 3), (0, 8)) == ((2, 3), (0, 8))
