"""Entries: accepted arguments, errors, and the fields that they read from Python's objects."""

from __future__ import annotations

import ctypes
import threading
from functools import partial

import numpy as np
import pytest
from together import together

from fastcoll.compiler import compiling
from fastcoll.compiler.cache import KernelCache
from fastcoll.compiler.jit import entry, kernel
from fastcoll.kernels import pyobjects
from fastcoll.kernels.primitives import (
    address_of,
    half_word_at,
    swap_if_equal,
    this_thread,
    word_at,
)
from fastcoll.kernels.pyobjects import Index, PyObject, integer, object_at


@entry
def field(x: PyObject, offset: Index) -> int:
    """Return a 64-bit field of an object."""
    return word_at(object_at(x) + integer(offset))


@entry
def flags_of(x: PyObject) -> int:
    return half_word_at(object_at(x) + pyobjects.FLAGS)


@entry
def swap(address: Index, expected: Index, value: Index) -> int:
    return swap_if_equal(integer(address), integer(expected), integer(value))


@entry
def thread() -> int:
    return this_thread()


@entry
def double(n: Index) -> int:
    """Return twice an integer."""
    return 2 * integer(n)


def test_an_entry_is_compiled_at_its_first_call_and_keeps_its_name():
    assert double.call(4) == 8
    assert double.call(-(1 << 40)) == -(1 << 41)
    assert (double.name, double.__doc__) == ("double", "Return twice an integer.")


def test_only_integer_like_objects_are_accepted_as_integers():
    assert double.call(np.int8(-3)) == -6
    assert double.call(True) == 2
    with pytest.raises(OverflowError):
        double.call(1 << 70)
    for wrong in (1.0, "1", None, np.float32(2)):
        with pytest.raises(TypeError):
            double.call(wrong)


def test_the_fields_of_an_array_are_read_where_they_are():
    x = np.zeros((3, 5), np.int16)[1:]
    assert field.call(x, pyobjects.DATA) == address_of(x)
    assert field.call(x, pyobjects.DESCR) == id(x.dtype)
    assert field.call(x, pyobjects.TYPE) == id(np.ndarray)
    assert flags_of.call(x) == x.flags.num
    x.flags.writeable = False
    assert not flags_of.call(x) & pyobjects.WRITEABLE
    assert field.call((x, None), pyobjects.ITEMS + 8) == id(None)
    assert field.call((x, None, x), pyobjects.LENGTH) == 3


def test_a_word_is_swapped_only_if_it_holds_what_was_expected():
    words = np.array([5, 6], np.int64)
    assert swap.call(address_of(words), 5, 7) == 1
    assert swap.call(address_of(words), 5, 8) == 0
    assert words.tolist() == [7, 6]


def test_of_many_threads_one_swaps_the_word():
    words = np.zeros(1, np.int64)

    def contend(number: int) -> int:
        return sum(swap.call(address_of(words), 0, number) for _ in range(2000))

    wins = together(*[partial(contend, number) for number in (1, 2, 3)])
    assert sum(wins) == 1
    assert wins[words[0] - 1] == 1


def test_this_thread_returns_pythons_thread_id():
    assert thread.call() == threading.get_ident()


@kernel
def doubled(x):
    return 2 * x


@entry
def twice(x: Index) -> int:
    return doubled(integer(x))


@twice.twin("int64(int64)")
def twice_for_c(x):
    return doubled(x)


@twice.twin("int64(int64, int64)")
def twice_the_sum_for_c(x, y):
    return doubled(x + y)


def test_twins_are_compiled_with_their_entry():
    assert twice.call(4) == 8
    before = KernelCache.compiled
    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(twice_for_c.address)(4) == 8
    assert ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 2)(twice_the_sum_for_c.address)(4, 1) == 10
    assert KernelCache.compiled == before


def test_llvm_decides_whether_kernels_are_inlined():
    def plain(x: Index) -> int:
        return doubled(integer(x))

    compiling.entry(plain, False)
    assert [overload.fndesc.inline for overload in doubled.made.overloads.values()] == [False]
