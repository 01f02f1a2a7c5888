"""The byte copy, and that the reduction loops are vectorised."""

from __future__ import annotations

import numpy as np
import pytest
from numba import types
from numba.core import config

from fastcoll.kernels import jit, reduce
from fastcoll.kernels.copy import copy
from fastcoll.kernels.elements import reducer_signature


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


@pytest.mark.skipif(config.CPU_NAME is not None, reason="NUMBA_CPU_NAME may name a processor without vectors")
@pytest.mark.parametrize("number", [types.float32, types.int8, types.complex64], ids=str)
def test_the_loops_are_vectorised(number):
    loops = {"float32": reduce._floats, "int8": reduce._integers, "complex64": reduce._complexes}
    made = jit.c_function(loops[str(number)], reducer_signature(number), keep=False)
    text = made._library.get_llvm_str()
    element = {"float32": "float", "int8": "i8", "complex64": "float"}[str(number)]
    kind = "add" if element == "i8" else "fadd"
    assert f"{kind} <" in text
    assert f"x {element}>" in text
