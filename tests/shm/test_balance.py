"""balance.py against a model in plain integers: the ranks' balances cancel when, and only when, all sizes agree."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastcoll.kernels.jit import entry
from fastcoll.kernels.pointers import address_of
from fastcoll.kernels.pyobjects import Index, integer
from fastcoll.shm import words
from fastcoll.shm.balance import balance_of, shape_of
from fastcoll.shm.border import NO_MESSAGE
from fastcoll.shm.context import Context
from fastcoll.shm.layout import PAGE, Layout

HEADER = np.zeros(PAGE // 8, np.int64)  # of a segment without sections
_MASK = (1 << 64) - 1
NBYTES = st.one_of(st.integers(NO_MESSAGE, 9), st.integers(NO_MESSAGE, 1 << 48))


@entry
def balance(context: Index) -> int:
    return balance_of(integer(context))


@entry
def shape(context: Index) -> int:
    return shape_of(integer(context), words.GIVES)


def ask(question, rank, gives, takes):
    """An entry's answer in a context whose tables say what this rank gives to and takes from each rank."""
    size = len(gives)
    context = Context(address_of(HEADER), Layout(size, 1024, 2048), rank, cores=size)
    for which, sizes in ((words.GIVES, gives), (words.TAKES, takes)):
        start = words.TABLES + (which + 1) * size
        context.words[start : start + size] = sizes
    return question.call(context.address)


def mixed(src, dst, nbytes):
    """splitmix64 of a pair and its bytes, in Python's integers."""
    z = ((nbytes + 1) * 0x9E3779B97F4A7C15 + (src << 32) + dst) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def model(rank, gives, takes):
    given = sum(mixed(rank, peer, n) for peer, n in enumerate(gives) if peer != rank and n >= 0)
    taken = sum(mixed(peer, rank, n) for peer, n in enumerate(takes) if peer != rank and n >= 0)
    return (given - taken) & _MASK


def table_of(data, size):
    """Bytes from each rank to each rank."""
    row = st.lists(NBYTES, min_size=size, max_size=size)
    return data.draw(st.lists(row, min_size=size, max_size=size))


def balances(gives, takes):
    """Every rank's; `takes[rank]` is what it expects."""
    return [ask(balance, r, gives[r], takes[r]) for r in range(len(gives))]


def transposed(table):
    return [list(column) for column in zip(*table, strict=True)]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 9))
def test_it_is_the_models(data, size):
    rank = data.draw(st.integers(0, size - 1))
    gives, takes = table_of(data, size)[0], table_of(data, size)[-1]
    found = ask(balance, rank, gives, takes)
    assert found & _MASK == model(rank, gives, takes)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 9))
def test_balances_cancel_when_all_sizes_agree(data, size):
    gives = table_of(data, size)
    assert sum(balances(gives, transposed(gives))) & _MASK == 0


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(2, 9))
def test_balances_do_not_cancel_when_some_sizes_differ(data, size):
    """Differences that would cancel as numbers (one byte more here, one less there) among them."""
    gives = table_of(data, size)
    takes = transposed(gives)
    pair = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)).filter(lambda p: p[0] != p[1])
    for src, dst in data.draw(st.lists(pair, min_size=1, max_size=4)):
        takes[dst][src] = max(NO_MESSAGE, takes[dst][src] + data.draw(st.sampled_from([-1, 1])))
    assume(takes != transposed(gives))
    assert sum(balances(gives, takes)) & _MASK != 0


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(2, 9))
def test_sizes_swapped_between_ranks_do_not_cancel(data, size):
    gives = table_of(data, size)
    takes = transposed(gives)
    first, second = data.draw(st.permutations(range(size)))[:2]
    takes[first], takes[second] = takes[second], takes[first]
    expected = [[n for r, n in enumerate(row) if r != k] for k, row in enumerate(transposed(gives))]
    assume([[n for r, n in enumerate(row) if r != k] for k, row in enumerate(takes)] != expected)
    assert sum(balances(gives, takes)) & _MASK != 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=9), st.data())
def test_shapes_tell_tables_apart(sizes, data):
    found = ask(shape, 0, sizes, sizes)
    if len(set(sizes)) == 1:
        assert found == sum(sizes)
    else:
        assert found < 0
    index = data.draw(st.integers(0, len(sizes) - 1))
    other = [*sizes]
    other[index] += data.draw(st.integers(1, 1 << 20))
    assert ask(shape, 0, other, other) != found


def test_a_table_of_nothing_is_balanced():
    nothing = [NO_MESSAGE] * 4
    assert balances([nothing] * 4, [nothing] * 4) == [0] * 4
