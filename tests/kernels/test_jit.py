"""The byte copy."""

from __future__ import annotations

import numpy as np
import pytest

from fastcoll.kernels import jit
from fastcoll.kernels.copy import copy


@jit.inlined
def move(dst, src, nbytes):
    copy(dst, src, nbytes)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4096, 100_003])
def test_copy_moves_exactly_the_bytes(nbytes):
    source = np.random.default_rng(1).integers(1, 256, nbytes + 2, np.uint8)
    target = np.zeros(nbytes + 2, np.uint8)
    move(target.ctypes.data + 1, source.ctypes.data + 1, nbytes)
    assert (target[1 : nbytes + 1] == source[1 : nbytes + 1]).all()
    assert target[0] == target[-1] == 0


def test_copy_onto_itself_leaves_the_data():
    data = np.arange(100)
    move(data.ctypes.data, data.ctypes.data, data.nbytes)
    assert (data == np.arange(100)).all()
