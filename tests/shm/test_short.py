"""The synchronous path's own arguments: what compiled code reads of roots, sources and tags, and refuses."""

from __future__ import annotations

import numpy as np
import pytest

import fastcoll as dist
from fastcoll import UsageError

HUGE = [1 << 62, 1 << 63, 1 << 70, -(1 << 70)]
NO_RANK = [-1, -2, 2, *HUGE, 0.0, "0", np.float32(0)]
_NO_TAG = [-2, 1 << 31, *HUGE, 0.0, "0", None]
NO_TAG = {dist.send: [-1, *_NO_TAG], dist.recv: _NO_TAG}  # a receive's -1 is ANY_TAG
INTEGERS = [np.int8, np.uint64]


def warm(rank):
    """Have the memo know float64, so that calls are looked at by compiled code."""
    x = np.zeros(1)
    dist.broadcast(x, 0)
    dist.reduce(x, 0)
    dist.gather(x, [x.copy(), x.copy()] if rank == 0 else None, 0)
    dist.scatter(x, [x.copy(), x.copy()] if rank == 0 else None, 0)
    (dist.send if rank == 0 else dist.recv)(x, 1 - rank)


def refusal(call):
    """The kind of error that a call raises; None if it goes through."""
    try:
        call()
    except Exception as error:
        return type(error)
    return None


@pytest.mark.ranks(2, timeout=40)
@pytest.mark.parametrize("operation", ["broadcast", "reduce", "gather", "scatter", "send"])
def test_what_is_no_rank_is_refused_and_nobody_hears_of_it(rank, world_size, operation):
    warm(rank)
    x = np.full(2, rank + 1.0)
    two = [np.zeros(2), np.zeros(2)]
    extra = {"gather": (two,), "scatter": (two,)}.get(operation, ())
    call = getattr(dist.GroupMember.WORLD, operation)
    refused = {repr(root): refusal(lambda root=root: call(x, *extra, root)) for root in NO_RANK}
    assert refused == {repr(root): UsageError for root in NO_RANK}
    dist.all_reduce(x)
    assert (x == 3).all()


@pytest.mark.ranks(2, timeout=40)
def test_minus_one_is_no_source(rank, world_size):
    """Not even while a message of somebody waits to be taken."""
    warm(rank)
    x, got = np.full(2, rank + 1.0), np.zeros(2)
    work = dist.isend(x, 1 - rank)
    refused = {repr(src): refusal(lambda src=src: dist.recv(got, src)) for src in NO_RANK}
    assert refused == {repr(src): UsageError for src in NO_RANK}
    assert dist.recv(got) == 1 - rank
    assert (got == 2 - rank).all()
    assert work.wait(10)


@pytest.mark.ranks(2, timeout=40)
def test_what_is_no_tag_is_refused(rank, world_size):
    warm(rank)
    x = np.full(2, rank + 1.0)
    for call in (dist.send, dist.recv):
        refused = {
            repr(tag): refusal(lambda tag=tag, call=call: call(x, 1 - rank, tag=tag)) for tag in NO_TAG[call]
        }
        assert refused == {repr(tag): UsageError for tag in NO_TAG[call]}
    dist.barrier()


@pytest.mark.ranks(2, timeout=30)
@pytest.mark.parametrize("kind", INTEGERS)
def test_a_tag_may_be_a_numpy_integer_whatever_comes_first(rank, world_size, kind):
    """The message asked for is the second one, so the receive leaves the compiled call half-way."""
    warm(rank)
    if rank == 0:
        works = [dist.isend(np.array([float(tag)]), 1, tag=tag) for tag in (1, 100)]
        assert all(work.wait(20) for work in works)
    else:
        got = np.zeros(1)
        for tag in (100, 1):
            assert dist.recv(got, kind(0), tag=kind(tag)) == 0
            assert got == tag


@pytest.mark.ranks(1, 2, timeout=40)
def test_a_sender_is_returned_as_a_plain_integer(rank, world_size):
    group, got = dist.GroupMember.WORLD, np.zeros(1)
    peer = (rank + 1) % world_size
    for _ in range(2):
        work = group.isend(np.ones(1), peer)
        source = group.recv(got, np.int8(peer))
        assert (type(source), source) == (int, peer)
        work.wait(20)
