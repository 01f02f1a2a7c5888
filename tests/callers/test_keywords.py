"""Keyword arguments inside `try` in compiled code, on every version of Python."""

from __future__ import annotations

import subprocess
import sys

import numba
import numpy as np
import pytest
from numba.core import byteflow
from numba.core.errors import TypingError

import fastcoll as dist
import fastcoll.callers.njit
from fastcoll.callers import keywords


@numba.njit(cache=True)
def shared(x, group):
    try:
        dist.broadcast(x, group_src=1, group=group)
    except Exception:
        return False
    return True


@pytest.mark.ranks(3)
def test_the_root_inside_try_is_the_named_rank(rank, world_size):
    group = dist.new_group([1, 2])
    if rank > 0:
        x = np.array([float(rank)])
        assert shared(x, group)
        assert x[0] == 2  # without the names, global rank 1 would be the root


def tried(x):
    try:
        dist.barrier(group=None, async_op=False)
    except Exception:
        return x
    return x


def untried(x):
    dist.barrier(group=None, async_op=False)
    try:
        dist.all_reduce(x)
    except Exception:
        return x
    return x


@pytest.fixture
def forgetful(monkeypatch):
    """Restore Numba's own table of instructions for the test."""
    monkeypatch.setattr(byteflow, "_NO_RAISE_OPS", frozenset(("LOAD_CONST", "NOP", "LOAD_DEREF", "PRECALL")))
    keywords.are_lost.cache_clear()
    yield
    keywords.are_lost.cache_clear()


def test_names_are_kept_in_supported_numba():
    assert not keywords.are_lost()


def test_a_numba_that_loses_the_names_is_detected_and_refused(forgetful):
    assert keywords.are_lost() == (sys.version_info[:2] in ((3, 11), (3, 12)))
    if keywords.are_lost():
        with pytest.raises(TypingError, match="tried calls with keyword arguments inside try"):
            numba.njit(tried).compile((numba.float64[::1],))
    numba.njit(untried).compile((numba.float64[::1],))


PROGRAM = """
import numba

@numba.njit
def named(a, b=10, c=100):
    return a + 2 * b + 3 * c

@numba.njit
def tried(x):
    found = 0
    try:
        found = named(x, c=1)
        if x:
            found = 1000 * found + named(c=2, b=3, a=x)
    except Exception:
        return -1
    return found

assert tried(1) == tried.py_func(1) == 24_013, tried(1)
"""


def test_functions_of_other_libraries_keep_their_names():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=600)
