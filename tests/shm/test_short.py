"""The synchronous path: roots, sources and tags that compiled code reads and rejects."""

from __future__ import annotations

import numpy as np
import pytest

import fastcoll as dist
from fastcoll import UsageError

HUGE = [1 << 62, 1 << 63, 1 << 70, -(1 << 70)]
NO_RANK = [-1, -2, 2, *HUGE, 0.0, "0", np.float32(0)]
NO_TAG = [-2, 1 << 31, *HUGE, 0.0, "0", None]


def warm(rank):
    """Add float64 to the memo, so that compiled code validates the calls."""
    x = np.zeros(1)
    dist.broadcast(x, 0)
    dist.reduce(x, 0)
    dist.gather(x, [x.copy(), x.copy()] if rank == 0 else None, 0)
    dist.scatter(x, [x.copy(), x.copy()] if rank == 0 else None, 0)
    (dist.send if rank == 0 else dist.recv)(x, 1 - rank)


def assert_refused(call, values):
    """Check that the call rejects each of the values; the failure names the one that was accepted."""
    for value in values:
        with pytest.raises(UsageError):
            pytest.fail(f"{value!r} was taken: {call(value)}")


@pytest.mark.ranks(2)
def test_invalid_ranks_and_tags_are_rejected_without_effect_on_peers(rank, world_size):
    """-1 is no source, not even if a message has arrived."""
    warm(rank)
    x, got, two = np.full(2, rank + 1.0), np.zeros(2), [np.zeros(2), np.zeros(2)]
    work = dist.isend(x, 1 - rank)
    for refused in (
        lambda root: dist.broadcast(x, root),
        lambda root: dist.reduce(x, root),
        lambda root: dist.gather(x, two, root),
        lambda root: dist.scatter(x, two, root),
        lambda dst: dist.send(x, dst),
        lambda src: dist.recv(got, src),
    ):
        assert_refused(refused, NO_RANK)
    assert_refused(lambda tag: dist.send(x, 1 - rank, tag=tag), [-1, *NO_TAG])
    assert_refused(lambda tag: dist.recv(x, 1 - rank, tag=tag), NO_TAG)  # a receive's -1 is ANY_TAG
    assert dist.recv(got) == 1 - rank
    assert (got == 2 - rank).all()
    assert work.wait(60)
    dist.all_reduce(x)
    assert (x == 3).all()


@pytest.mark.ranks(2)
def test_a_tag_may_be_a_numpy_integer_whichever_message_is_first(rank, world_size):
    """The requested message is the second one, so the receive leaves the compiled call half-way."""
    warm(rank)
    for kind in (np.int8, np.uint64):
        if rank == 0:
            works = [dist.isend(np.array([float(tag)]), 1, tag=tag) for tag in (1, 100)]
            assert all(work.wait(60) for work in works)
        else:
            got = np.zeros(1)
            for tag in (100, 1):
                assert dist.recv(got, kind(0), tag=kind(tag)) == 0
                assert got == tag


@pytest.mark.ranks(1, 2)
def test_a_sender_is_returned_as_a_plain_integer(rank, world_size):
    group, got = dist.GroupMember.WORLD, np.zeros(1)
    peer = (rank + 1) % world_size
    for _ in range(2):
        work = group.fast.isend(np.ones(1), peer)
        source = group.fast.recv(got, np.int8(peer))
        assert (type(source), source) == (int, peer)
        work.wait(60)
