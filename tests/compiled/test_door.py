"""The door that compiled callers call, here through ctypes, without Python's lock."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from unittest.mock import patch

import numpy as np
import pytest
from oracle import assert_same

import fastcoll as dist
from fastcoll.compiled import rows as t
from fastcoll.core import signature
from fastcoll.kernels import doors as d
from fastcoll.p2p.pipe import ANY


def call(op, x=None, out=None, nbytes=0, word=0, peer=0, group=None):
    """Call the door; what it returns, or the exception that it has kept."""
    code = op if isinstance(op, int) else signature.code_of(op)
    row = t.row(group)
    door = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 8)(ctypes.c_int64.from_address(row + 8 * d.DOOR).value)
    addresses = [0 if a is None else a.ctypes.data for a in (x, out)]
    found = door(row, code, *addresses, nbytes, word, peer)
    if found == d.RAISED:
        error = t.take_error()
        assert error is not None
        raise error
    return found


def collective(name, x, op=None, peer=0, group=None):
    return call(name, x, None, x.nbytes, t.call_word(name, x.dtype, op), peer, group)


@pytest.mark.ranks(2)
def test_messages(rank, world_size):
    x = np.arange(4.0) + rank
    word = t.message_word(3, x.dtype)
    for source in (1 - rank, ANY, 1 - rank):
        y = np.zeros(4)
        if rank == 0:
            assert call(d.SEND, x, nbytes=32, word=word, peer=1) == 0
        assert call(d.RECV, y, nbytes=32, word=word, peer=source) == 1 - rank
        assert_same(y, np.arange(4.0) + 1 - rank, source)
        if rank == 1:
            assert call(d.SEND, x, nbytes=32, word=word, peer=0) == 0


@pytest.mark.ranks(3)
def test_groups_and_who_is_outside(rank, world_size):
    group = dist.new_group([0, 2])
    x = np.ones(2)
    if rank == 1:
        with pytest.warns(UserWarning, match="which is not in the given group"):
            collective("all_reduce", x, op=dist.ReduceOp.SUM, group=group)
        assert x.tolist() == [1, 1]
        return
    collective("all_reduce", x, op=dist.ReduceOp.SUM, group=group)
    assert x.tolist() == [2, 2]
    assert t.row(group) == t.row(group) != t.row(None)
    row = (ctypes.c_int64 * d.ROW_WORDS).from_address(t.row(group))
    assert row[d.RANK] == rank // 2
    assert row[d.SIZE] == 2
    assert list((ctypes.c_int64 * 2).from_address(row[d.RANKS])) == [0, 2]
    with pytest.raises(dist.UsageError, match="global rank 1 is not in the group"):
        collective("broadcast", x, peer=t.FOREIGN + 1, group=group)
    dist.destroy_process_group(group)
    assert row[d.SIZE] == 0
    with pytest.raises((dist.NotInitializedError, dist.UsageError), match="was destroyed"):
        collective("all_reduce", x, op=dist.ReduceOp.SUM, group=group)


@pytest.mark.ranks(2)
def test_a_row_is_blank_when_its_own_group_ends(rank, world_size):
    """A new world may be known before the old one has ended."""
    old, new = dist.new_group(), dist.new_group()
    row = t._Row(99, 0)
    row.fill(old)
    row.fill(new)
    dist.destroy_process_group(old)
    assert row.words[d.SIZE] == 2
    dist.destroy_process_group(new)
    assert row.words[d.SIZE] == 0


def test_ctrl_c_while_the_door_is_compiled_leaves_no_row_without_one():
    with patch.object(t, "_rows", []):
        with patch.object(d, "door_address", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            t.row(None)
        row = (ctypes.c_int64 * d.ROW_WORDS).from_address(t.row(None))
        assert row[d.DOOR] == d.door_address()


@pytest.mark.ranks(2)
def test_wrong_calls_raise_as_outside_and_the_group_stays_usable(rank, world_size):
    x = np.ones(3 + rank)
    for _ in range(2):
        with pytest.raises(dist.MismatchError, match=r"all_reduce\(float64, 3 elements, op=SUM\)"):
            collective("all_reduce", x, op=dist.ReduceOp.SUM)
        with pytest.raises(dist.UsageError, match="src is 7"):
            collective("broadcast", x, peer=7)
        dist.barrier()
        collective("all_reduce", x[:3], op=dist.ReduceOp.SUM)
    with pytest.raises(dist.UsageError, match="PREMUL_SUM"):
        t.call_word("all_reduce", x.dtype, dist.ReduceOp.PREMUL_SUM(2.0))
    assert t.take_error() is None


@pytest.mark.ranks(2)
def test_dtypes_and_operations_of_users(rank, world_size):
    pair = np.dtype([("a", np.int32), ("b", np.float64)])
    x = np.zeros(3, pair)
    x["a"], x["b"] = rank + 1, rank
    y = x.copy()
    if rank == 0:
        y["a"] = 9
    ops = [
        dist.ReduceOp.custom(lambda a, b: a if a > b else b, "larger"),
        dist.ReduceOp.custom(lambda a, b: 2 * (a + b), "twice"),
    ]
    for _ in range(3):
        collective("broadcast", x, peer=1)
        assert x["a"].tolist() == [2, 2, 2]
        for op, expected in zip(ops, (2, 6), strict=True):
            z = np.full(2, rank + 1)
            collective("all_reduce", z, op=op)
            assert z.tolist() == [expected] * 2


@pytest.mark.ranks(2)
def test_a_handler_runs_in_the_middle_of_a_call_and_what_it_raises_fails_the_group(rank, world_size):
    class Stop(Exception):
        pass

    def handler(*_):
        raise Stop

    def send_when_it_waits():
        while not dist.group.WORLD.gate.is_busy():
            time.sleep(1e-3)
        os.kill(os.getpid(), signal.SIGUSR1)

    x = np.ones(1)
    for _ in range(3):
        collective("all_reduce", x, op=dist.ReduceOp.SUM)
    if rank == 0:
        signal.signal(signal.SIGUSR1, handler)
        sender = threading.Thread(target=send_when_it_waits)
        sender.start()
        with pytest.raises(Stop):
            collective("all_reduce", x, op=dist.ReduceOp.SUM)
        sender.join()
    else:
        with pytest.raises(dist.GroupError, match=r"rank 0 .*interrupted by Stop"):
            dist.recv(x, 0)  # until the group has failed
        with pytest.raises(dist.GroupError):
            collective("all_reduce", x, op=dist.ReduceOp.SUM)
    with pytest.raises(dist.GroupError):
        collective("all_reduce", x, op=dist.ReduceOp.SUM)


@pytest.mark.ranks(2, backend="tcp")
def test_every_backend_has_a_door(rank, world_size):
    x = np.full(3, rank + 1.0)
    collective("all_reduce", x, op=dist.ReduceOp.SUM)
    assert x.tolist() == [3, 3, 3]
    assert call(d.RECV if rank else d.SEND, x, nbytes=24, word=t.message_word(0, x.dtype), peer=1 - rank) == 0


def test_without_a_world_the_door_says_so():
    with pytest.raises(dist.NotInitializedError, match="call init_process_group first"):
        call("barrier", word=signature.encode("barrier"))
