"""The loops' tiles: they are vectors and stay in registers; every transition from one size to the next."""

from __future__ import annotations

import itertools
import re

import ml_dtypes
import numpy as np
import pytest
from numba import types
from numba.core import config

from fastcoll.compiler import compiling
from fastcoll.compiler.elements import Half, element_of
from fastcoll.core.reduce_op import ReduceOp
from fastcoll.kernels import reduce
from fastcoll.kernels.custom import compile_custom
from fastcoll.kernels.fold import FEW, TILE, shapes

needs_vectors = pytest.mark.skipif(
    config.CPU_NAME is not None, reason="NUMBA_CPU_NAME may name a processor without vectors"
)
KINDS = {
    "float32": (types.float32, "fadd", "float"),
    "int8": (types.int8, "add", "i8"),
    "complex64": (types.complex64, "fadd", "float"),
    "float16": (Half("float16"), "fadd", "float"),
    "bfloat16": (Half("bfloat16"), "fadd", "float"),
}


def assert_in_vector_registers(library, instruction: str, lane: str) -> None:
    text = library.get_llvm_str()
    assert f"{instruction} <" in text
    assert f"x {lane}>" in text
    on_the_stack = set(re.findall(r"alloca ([^,\n]+)", text))
    assert on_the_stack <= {"ptr", "i8*"}, "more than Numba's own pointer to an exception"


@pytest.mark.long
@needs_vectors
@pytest.mark.parametrize("name", KINDS)
def test_the_loops_are_vectorised(name):
    _, instruction, lane = KINDS[name]
    signature = compiling.named(reduce.reducer_signature(name))
    assert_in_vector_registers(compiling.complete_c_function(reduce._reduce, signature), instruction, lane)


@needs_vectors
@pytest.mark.parametrize("name", ["float32", "int8"])
@pytest.mark.parametrize("function", [lambda a, b: a + b, lambda a, b: b + (a if abs(a) > abs(b) else b)])
def test_a_simple_custom_function_is_vectorised(name, function):
    _, instruction, lane = KINDS[name]
    made = compile_custom(ReduceOp.custom(function), np.dtype(name))
    assert_in_vector_registers(made._library, instruction, lane)


@pytest.mark.parametrize("kind", [*(kind for kind, _, _ in KINDS.values()), types.complex128, types.boolean])
def test_tiles_shrink_to_one_element(kind):
    element = element_of(kind)
    sizes = [shape.width * shape.registers * element.size for shape in shapes(element)]
    assert sizes[0] == TILE
    assert sizes[-2] == FEW
    assert sizes[-1] == element.lanes * element.size
    assert all(larger % smaller == 0 for larger, smaller in itertools.pairwise(sizes))


@pytest.mark.parametrize("dtype", ["i1", "f4", "c16", "f2", ml_dtypes.bfloat16], ids=str)
def test_every_count_up_to_two_tiles(reduce, dtype):
    dtype = np.dtype(dtype)
    random = np.random.default_rng(8)
    most = 2 * TILE // dtype.itemsize + 1
    sources = random.integers(-8, 8, (3, most)).astype(dtype)
    own = ReduceOp.custom(lambda a, b: a + b)
    for count in range(most + 1):
        want = sources[:, :count].sum(axis=0).astype(dtype)
        for op in (ReduceOp.SUM, own):
            np.testing.assert_array_equal(reduce(op, sources[:, :count], 1), want, err_msg=f"{op} {count}")


def test_more_sources_than_registers(reduce):
    sources = np.random.default_rng(9).normal(size=(100, 333)).astype("f")
    want = sources[0].copy()
    for source in sources[1:]:
        want += source
    for into in (None, 0, 57, 99):
        np.testing.assert_array_equal(reduce(ReduceOp.SUM, sources, into), want)
