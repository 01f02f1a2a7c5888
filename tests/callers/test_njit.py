"""fastcoll inside numba.njit: layouts, groups, custom operations, refusals, errors, signals, and cached code."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import numba
import numpy as np
import pytest
from numba.core.errors import TypingError
from oracle import assert_same

import fastcoll as dist
import fastcoll.callers.njit
from fastcoll.callers import descriptors
from fastcoll.kernels import c_entries as d

ReduceOp = dist.ReduceOp
ROOT = Path(dist.__file__).parents[1]


@numba.njit(cache=True)
def total(x, op=ReduceOp.SUM, group=None):
    dist.all_reduce(x, op, group)


@numba.njit(cache=True)
def caught(x):
    try:
        dist.all_reduce(x)
    except Exception:
        return True
    return False


@pytest.mark.long
@pytest.mark.ranks(1, 2, 3)
def test_any_layout(rank, world_size):
    block = np.arange(24.0).reshape(4, 6) + rank
    want = sum(np.arange(24.0).reshape(4, 6) + r for r in range(world_size))
    for cut in (np.s_[:], np.s_[::2, 1::2], np.s_[:, 3], np.s_[2:3]):
        for order in "CF":
            x = np.array(block, order=order)
            total(x[cut])
            expected = block.copy()
            expected[cut] = want[cut]
            assert_same(x, expected, (cut, order))
    x = np.zeros(5, [("pad", "i1"), ("value", "f8")])
    x["value"] = rank + 1
    total(x["value"])  # not aligned
    assert x["value"].tolist() == [world_size * (world_size + 1) / 2] * 5
    total(np.array(1.0))


@numba.njit(cache=True)
def everything(x, whole, group):
    """Call each function once; return rank, size and the number of wrong results."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    bad = 0
    y = x.copy()
    dist.scan(y, dist.ReduceOp.SUM, group)
    bad += abs(y[0] - (rank + 1) * (rank + 2) / 2) > 0
    y = x.copy()
    dist.exscan(y, group=group)
    bad += rank > 0 and abs(y[0] - rank * (rank + 1) / 2) > 0
    y = x.copy()
    dist.reduce(y, op=dist.ReduceOp.MAX, group=group, group_dst=0)
    bad += abs(y[0] - (size if rank == 0 else rank + 1)) > 0
    y = x.copy()
    dist.broadcast(y, group=group, group_src=size - 1)
    bad += abs(y[0] - size) > 0
    dist.all_gather_into_tensor(whole, x, group=group)
    for r in range(size):
        bad += abs(whole[r * len(x)] - (r + 1)) > 0
    other = np.empty_like(whole)
    dist.all_to_all_single(other, whole, group=group)
    bad += abs(other[-1] - (rank + 1)) > 0
    dist.reduce_scatter_tensor(y, whole, group=group)
    bad += abs(y[0] - size * (rank + 1)) > 0
    dist.gather_single(x, other, group=group, group_dst=0)
    bad += rank == 0 and abs(other[-1] - size) > 0
    dist.scatter_single(y, whole, group=group, group_src=0)
    bad += abs(y[0] - (rank + 1)) > 0
    dist.barrier(group)
    return rank, size, bad


@pytest.mark.ranks(2, 3, 5)
def test_every_function_and_groups_as_arguments(rank, world_size):
    """Of one type, so that one function is compiled: test_conformance_njit.py calls without a group."""
    x = np.full(3, rank + 1.0)
    for _ in range(3):
        assert everything(x, np.empty(3 * world_size), dist.group.WORLD) == (rank, world_size, 0)
    group = dist.new_group([0, world_size - 1])
    if rank in (0, world_size - 1):
        x = np.full(3, 1.0 + (rank > 0))
        for _ in range(3):
            assert everything(x, np.empty(6), group) == (int(rank > 0), 2, 0)
        dist.destroy_process_group(group)
        with pytest.raises(dist.NotInitializedError, match="was destroyed"):
            total(x, ReduceOp.SUM, group)
    else:
        with pytest.warns(UserWarning, match="which is not in the given group, does nothing"):
            total(x, ReduceOp.SUM, group)
        assert x[0] == rank + 1


@numba.njit(cache=True)
def exchange(x, source, group):
    return dist.recv(x, group=group) if source < 0 else dist.recv(x, source, group)


@numba.njit(cache=True)
def give(x, to, group, tag=0):
    dist.send(x, to, group, tag)


@numba.njit(cache=True)
def posted_receive(x, source, group):
    work = dist.irecv(x, group=group) if source < 0 else dist.irecv(x, source, group)
    return work.source_rank()


@numba.njit(cache=True)
def posted_send(x, to, group):
    dist.isend(x, to, group).wait()


@pytest.mark.ranks(3)
def test_senders_and_receivers_are_global_ranks(rank, world_size):
    group = dist.new_group([1, 2])
    x = np.zeros(2)
    for send, receive in ((give, exchange), (posted_send, posted_receive)):
        for source in (2, -1, 2, -1):
            if rank == 1:
                assert receive(x, source, group) == 2
            elif rank == 2:
                send(x, 1, group)
        for outside in (0, -1) if rank == 1 else ():
            with pytest.raises(dist.UsageError, match=f"global rank {outside} is not in the group"):
                send(x, outside, group)
    if rank == 0:
        with pytest.warns(UserWarning, match="which is not in the given group"):
            posted_send(x, 1, group)
    for tag in (-1, 1 << 31, 1 << 42, 1 << 62):  # the last do not fit into the word of a tag
        with pytest.raises(dist.UsageError, match="tags are integers from 0 to") as raised:
            give(x, rank, dist.group.WORLD, tag)
        assert "-2" not in str(raised.value)
    for tag in (np.uint64(5), np.int8(5)):
        if rank == 0:
            give(x, 1, dist.group.WORLD, tag)
        elif rank == 1:
            dist.recv(x, 0, tag=5)
    with pytest.raises(numba.TypingError, match="float64; give an integer"):
        give(x, rank, dist.group.WORLD, 1.5)


@pytest.mark.long
@pytest.mark.ranks(2, fresh=True)
def test_a_child_of_fork_has_a_world_of_its_own(rank, world_size, tmp_path):
    place = numba.njit(lambda: (dist.get_rank(), dist.get_world_size()))
    assert place() == (rank, 2)
    child = os.fork()
    if child == 0:
        with ExitStack() as stack:
            stack.callback(os._exit, 1)
            dist.init_process_group(init_method=f"file://{tmp_path}/{rank}", rank=0, world_size=1)
            os._exit(0 if place() == (0, 1) else 2)
    assert os.waitpid(child, 0)[1] == 0
    assert place() == (rank, 2)


@pytest.mark.long
@pytest.mark.ranks(2)
def test_custom_operations_and_records(rank, world_size):
    farther = ReduceOp.custom(lambda a, b: a if abs(a) > abs(b) else b, "farther")

    @numba.njit
    def frozen(x):
        dist.all_reduce(x, farther)

    for call in (total, frozen):
        for _ in range(3):
            x = np.array([rank * 2.0, -rank - 0.5])
            call(x, farther) if call is total else call(x)
            assert x.tolist() == [2.0, -1.5]
    x = np.array([(rank + 1, rank)] * 3, [("a", np.int32), ("b", np.float64)])
    for _ in range(3):
        sent_by(x, 1)
        assert x["a"].tolist() == [2, 2, 2]
    with pytest.raises(dist.UsageError, match="PREMUL_SUM's factor cannot be passed to compiled code"):
        total(np.ones(1), ReduceOp.PREMUL_SUM(2.0))
    dist.barrier()


def refusals():
    group = dist.group.WORLD
    x, y = np.ones(4), np.ones(4, np.float32)
    scaled = ReduceOp.PREMUL_SUM(2.0)
    return {
        "async_op inside njit": lambda: dist.all_reduce(x, async_op=True),
        "pass it as an argument": lambda: dist.all_reduce(x, group=group),
        "PREMUL_SUM's factor": lambda: dist.all_reduce(x, scaled),
        "make the ReduceOp outside": lambda: dist.all_reduce(x, ReduceOp.PREMUL_SUM(2.0)),
        "tensor is of type float64": lambda: dist.all_reduce(1.0),
        "read-only": lambda: dist.broadcast(x, 0),  # global arrays are read-only
        "src is missing": lambda: dist.broadcast(np.ones(1)),
        "src and group_src are both given": lambda: dist.broadcast(np.ones(1), 0, group_src=0),
        "they must be the same": lambda: dist.all_gather_into_tensor(np.ones(4), y),
        "split sizes are of type": lambda: dist.all_to_all_single(np.ones(4), x, (2.0, 2.0)),
        "split sizes are of type float64": lambda: dist.reduce_scatter_tensor(x, x, input_split_sizes=1.0),
        "reduce_scatter_tensor divides arrays along": lambda: dist.reduce_scatter_tensor(
            x, np.array(1.0), input_split_sizes=(1,)
        ),
        "use reduce_scatter_tensor": lambda: dist.reduce_scatter(np.ones(4), [x]),
        "use all_gather_into_tensor": lambda: dist.all_gather((x, x), np.ones(4)),
        "receives into contiguous arrays": lambda: dist.irecv(np.ones((4, 4))[:, 1], 0),
        "takes no timeout": lambda: dist.isend(x, 0).wait(3.0),
        "use isend and irecv, and waitall": lambda: dist.batch_isend_irecv([x]),
        "nor a timeout": lambda: dist.barrier(timeout=3.0),
    }


@pytest.mark.ranks(1)
def test_compile_errors_name_their_reason(rank, world_size):
    for reason, call in refusals().items():
        with pytest.raises(TypingError, match=reason):
            numba.njit(call)()


@numba.njit(parallel=True)
def in_parallel(x, inside):
    for i in numba.prange(len(x)):
        x[i] = dist.get_rank()  # local, so allowed
        if inside is not None:
            dist.barrier()
    total(x)


@pytest.mark.ranks(1)
def test_calls_in_parallel_loops_are_refused(rank, world_size):
    in_parallel(np.ones(2), None)
    with pytest.raises(TypingError, match=r"a call inside numba\.prange"):
        in_parallel(np.ones(2), 1)


def wrong_sizes(world_size):
    """Return split sizes that are wrong where each rank has two rows."""
    negative = (-2, 4 + 2 * (world_size - 2), *(2,) * (world_size - 2))
    return (1,) * world_size, (2,) * (world_size + 1), negative


@numba.njit(cache=True)
def divide(out, x, of_out, of_x):
    dist.all_to_all_single(out, x, of_out, of_x)


@pytest.mark.long
@pytest.mark.ranks(2, 3)  # the first world compiles the native call
def test_split_sizes(rank, world_size):
    ranks = range(world_size)
    given, taken = [rank + 2 * other for other in ranks], [other + 2 * rank for other in ranks]  # one is 0
    # Each pair of types compiles anew.
    for tail, dtype, kind in (((), np.float64, tuple), ((), np.float64, np.array), ((2,), np.int8, np.array)):
        x = np.concatenate([np.full((n, *tail), 10 * rank + to, dtype) for to, n in enumerate(given)])
        want = np.concatenate([np.full((n, *tail), 10 * to + rank, dtype) for to, n in enumerate(taken)])
        for _ in range(2):  # first by Python, then by the native call
            out = np.zeros_like(want)
            divide(out, x, kind(taken), kind(given))
            assert_same(out, want, (kind, tail))
        out = np.zeros_like(want)
        if rank:
            divide(out, x, np.array(taken), np.array(given))
        else:
            dist.all_to_all_single(out, x, taken, given)
        assert_same(out, want, tail)
    x, out, even = np.arange(2.0 * world_size), np.zeros(2 * world_size), (2,) * world_size
    for equal in (None, (), np.empty(0, np.int64)):
        out.fill(0)
        divide(out, x, equal, even)
        assert_same(out, np.tile(x[2 * rank : 2 * rank + 2], world_size), "equal parts")
    for sizes in wrong_sizes(world_size):
        with pytest.raises(dist.UsageError, match=rf"split sizes must be {world_size} numbers >= 0"):
            divide(out, x, even, sizes)
    odd = (3 - rank, 1 + rank, *even[2:]) if rank < 2 else even
    with pytest.raises(dist.UsageError, match=r"must have the same dtype and number of elements"):
        divide(out, x, even, odd)
    divide(out, x, even, even)


@numba.njit(cache=True)
def reduce_parts(out, x, sizes, op):
    dist.reduce_scatter_tensor(out, x, op, input_split_sizes=sizes)


@pytest.mark.ranks(2, 3)  # the first world compiles the native call
def test_reduce_scatter_of_parts(rank, world_size):
    sizes = [2 * other for other in range(world_size)]  # rank 0 has none
    for tail, dtype, kind in (((), np.float64, tuple), ((2,), np.int8, np.array)):  # each compiles anew
        x = np.concatenate([np.full((n, *tail), rank + 10 * to, dtype) for to, n in enumerate(sizes)])
        total, most = sum(range(world_size)) + 10 * rank * world_size, world_size - 1 + 10 * rank
        for op, number in ((ReduceOp.SUM, total), (ReduceOp.MAX, most)):
            want = np.full((sizes[rank], *tail), number, dtype)
            for from_python in (False, rank > 0):  # calls from Python meet one from compiled code
                out = np.zeros_like(want)
                if from_python:
                    dist.reduce_scatter_tensor(out, x, op, input_split_sizes=sizes)
                else:
                    reduce_parts(out, x, kind(sizes), op)
                assert_same(out, want, (kind, tail))
    x, even = np.ones(2 * world_size), np.full(world_size, 2)
    for wrong in wrong_sizes(world_size):
        with pytest.raises(dist.UsageError, match=rf"split sizes must be {world_size} numbers >= 0"):
            reduce_parts(np.ones(2), x, np.array(wrong), ReduceOp.SUM)
    out = np.zeros(2)
    reduce_parts(out, x, even[:0], ReduceOp.SUM)
    assert_same(out, np.full(2, float(world_size)), "equal parts")
    with pytest.raises(dist.UsageError, match="must have the same dtype and number of elements"):
        reduce_parts(np.ones(3), x, even, ReduceOp.SUM)
    other = np.array((1, 3, *even[2:]) if rank == 1 else (3, 1, *even[2:]))
    with pytest.raises(
        dist.MismatchError, match="rank 1 gives 8 bytes for rank 0, expected 24 as rank 0 gives"
    ):
        reduce_parts(np.ones(other[rank]), x, other, ReduceOp.SUM)
    out = np.ones(2)
    reduce_parts(out, x, even, ReduceOp.SUM)
    assert (out == world_size).all()


@numba.njit(cache=True)
def sent_by(x, src):
    dist.broadcast(x, src)


@numba.njit(cache=True)
def whole_of(out, x):
    dist.all_gather_into_tensor(out, x)


@pytest.mark.ranks(2)
def test_wrong_calls_raise_on_all_ranks_and_the_group_stays_usable(rank, world_size):
    x = np.ones(3 + rank)
    for _ in range(2):
        with pytest.raises(
            dist.MismatchError, match=r"rank 1 called all_reduce\(float64, 4 elements, op=SUM\)"
        ):
            total(x)
        assert caught(x)
        with pytest.raises(
            dist.UsageError, match="has 5 elements; expected 6" if rank else "rank 1's all_gather was"
        ):
            whole_of(np.empty(5 if rank else 6), np.ones(3))
        with pytest.raises(dist.UsageError, match="src is 7"):
            sent_by(x, 7)
        total(x[:3])
    total(x[:0])


@pytest.mark.long
@pytest.mark.ranks(2, fresh=True, may_die=True)
def test_a_dead_peer_is_named(rank, world_size):
    """By a collective, and by posted messages in a group of their own."""
    group, x = dist.new_group(), np.zeros(1)
    for _ in range(2):
        total(np.ones(1))
        if rank == 0:
            posted_send(x, 1, group)
        else:
            posted_receive(x, 0, group)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.PeerDiedError, match="rank 0"):
        total(np.ones(1))
    with pytest.raises(dist.PeerDiedError, match="rank 0"):
        posted_receive(x, 0, group)


@pytest.mark.long
@pytest.mark.ranks(2, fresh=True)
def test_a_call_times_out_if_a_peer_is_late(rank, world_size):
    group = dist.new_group()
    total(np.ones(1), ReduceOp.SUM, group)
    if rank == 0:
        group.timeout = 0.5
        with pytest.raises(dist.CollectiveTimeoutError, match="rank 1"):
            total(np.ones(1), ReduceOp.SUM, group)
    dist.barrier()


@numba.njit(cache=True)
def total_after(begun, x):
    begun[0] = 1
    dist.all_reduce(x)


@numba.njit(cache=True, nogil=True)
def caught_after(begun, x):
    begun[0], raised = 1, 0
    for _ in range(2):
        try:
            dist.all_reduce(x)
        except Exception:
            raised += 1
    return raised


def interrupt(begun, number):
    """Send this process a signal when compiled code has begun and released the GIL, so that it waits in its call."""
    while not begun[0]:
        time.sleep(0.001)
    os.kill(os.getpid(), number)


def stop(number, frame):
    sys.exit(f"by signal {number}")


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize(
    ("number", "function"),
    [
        pytest.param(signal.SIGINT, caught_after, id="Ctrl-C, caught"),
        pytest.param(signal.SIGINT, total_after, id="Ctrl-C, uncaught", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, caught_after, id="exit, caught", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, total_after, id="exit, uncaught", marks=pytest.mark.long),
    ],
)
def test_ctrl_c_ends_a_call_and_is_raised_once_even_if_compiled_code_catches_it(
    rank, world_size, number, function
):
    begun = np.zeros(1)
    for _ in range(2):
        function(begun, np.ones(1))
    if rank == 0:
        signal.signal(signal.SIGTERM, stop)
        begun[0] = 0
        thread = threading.Thread(target=interrupt, args=(begun, number))
        thread.start()
        with pytest.raises(SystemExit if number == signal.SIGTERM else KeyboardInterrupt):
            function(begun, np.ones(1))
        thread.join()
        with pytest.raises(dist.GroupError):
            total(np.ones(1))
        assert descriptors.take_error() is None
    else:
        with pytest.raises(dist.GroupError, match=r"SystemExit|KeyboardInterrupt"):
            dist.recv(np.ones(1), 0)


@pytest.mark.ranks(2)
def test_calls_run_after_earlier_asynchronous_calls(rank, world_size):
    x, y = np.full(100_000, rank + 1.0), np.ones(1)
    for _ in range(5):
        x[:] = rank + 1
        work = dist.all_reduce(x, async_op=True)
        total(y)
        work.wait()
        assert x[0] == 3
    assert y[0] == 2**5


@pytest.mark.ranks(2, backend="tcp")
def test_other_backends(rank, world_size):
    group, x = dist.group.WORLD, np.arange(5.0) + rank
    assert everything(np.full(3, rank + 1.0), np.empty(6), group) == (rank, 2, 0)
    for sender in (0, 1):
        if rank == sender:
            give(x, 1 - rank, group)
        else:
            assert exchange(x, sender if sender else -1, group) == sender
    assert x[0] == 0


PROGRAM = """
import sys
import numba, numpy as np
import fastcoll_autoload
fastcoll_autoload.register_numba()
import fastcoll as dist

@numba.njit(cache=True)
def f(x, op, group):
    {body}
    return dist.get_rank()

assert "fastcoll.callers" not in sys.modules
dist.init_process_group(init_method=f"file://{{__file__}}.store", rank=0, world_size=1)
x = np.ones(2)
assert f(x, dist.ReduceOp.custom(lambda a, b: a), dist.group.WORLD) == 0
print(sum(f.stats.cache_hits.values()), sum(f.stats.cache_misses.values()))
"""


@pytest.mark.long
def test_cached_code_is_used_until_the_file_changes(tmp_path):
    program = tmp_path / "program.py"

    def run(body):
        program.write_text(PROGRAM.format(body=body))
        os.utime(program, (len(body), len(body)))  # Numba compares the time and the size
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(program)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert run("dist.all_reduce(x)") == ["0", "1"]
    assert run("dist.all_reduce(x)") == ["1", "0"]
    assert run("dist.all_reduce(x, op, group)") == ["0", "1"]


def test_without_a_world_the_functions_say_so():
    with pytest.raises(dist.NotInitializedError, match="call init_process_group first"):
        total(np.ones(1))
    with pytest.raises(dist.NotInitializedError):
        numba.njit(lambda: dist.get_rank())()


@pytest.mark.ranks(2)
def test_a_descriptor_is_zeroed_when_its_own_group_ends(rank, world_size):
    """A new world may be in the descriptor before the old one has ended."""
    old, new = dist.new_group(), dist.new_group()
    descriptor = descriptors._Descriptor(99, 0)
    descriptor.fill(old)
    descriptor.fill(new)
    dist.destroy_process_group(old)
    assert descriptor.words[d.SIZE] == 2
    dist.destroy_process_group(new)
    assert descriptor.words[d.SIZE] == 0


def test_ctrl_c_during_compilation_leaves_no_descriptor_without_c_entry():
    with patch.object(descriptors, "_descriptors", []):
        with (
            patch.object(d, "c_entry_address", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            descriptors.group_descriptor(None)
        descriptor = (ctypes.c_int64 * d.DESCRIPTOR_WORDS).from_address(descriptors.group_descriptor(None))
        assert descriptor[d.C_ENTRY] == d.c_entry_address()


def test_njit_without_fastcoll_does_not_import_it():
    code = (
        "import sys, fastcoll, fastcoll_autoload, numba; fastcoll_autoload.register_numba()\n"
        "assert numba.njit(lambda x: x + 1)(1) == 2; print('fastcoll.callers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.stdout.split() == ["False"], done.stderr
