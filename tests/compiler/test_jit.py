"""How Numba sees helpers and entries; and the byte copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from programs import python

from fastcoll.compiler import jit
from fastcoll.kernels.copy import copy
from fastcoll.kernels.pyobjects import Index, integer


@jit.entry
def _move(dst: Index, src: Index, nbytes: Index) -> int:
    copy(integer(dst), integer(src), integer(nbytes))
    return 0


def move(*args):
    _move.call(*args)


def test_a_helper_is_typed_once_for_all_literals_and_is_not_for_python():
    @jit.inlined
    def twice(n):
        return 2 * n

    @jit.entry
    def sums(n: Index) -> int:
        return twice(integer(n)) + twice(3) + twice(5)

    assert sums.call(1) == 18
    assert len(twice.made.overloads) == 1
    with pytest.raises(TypeError, match="twice is a part of compiled code"):
        twice(1)


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


COMPILES_AT_EXIT = """
from __future__ import annotations
import atexit
from fastcoll.compiler import jit
from fastcoll.kernels.pyobjects import Index, integer

@jit.kernel
def twice(n):
    return 2 * n

@jit.entry
def first(n: Index) -> int:
    return twice(integer(n))

@jit.entry
def second(n: Index) -> int:
    return twice(integer(n)) + 1

atexit.register(lambda: print(second.call(4)))
assert first.call(4) == 8
"""


def test_an_exit_hook_may_compile(tmp_path: Path) -> None:
    """The hook that leaves a job does, if no call has needed a kernel for leaving yet."""
    program = tmp_path / "program.py"
    program.write_text(COMPILES_AT_EXIT)
    done = python(program, environ={"NUMBA_CACHE_DIR": str(tmp_path)})
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["9"]), done.stderr
