"""Direct calls: cases beyond the conformance suite, which also runs with all calls direct."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path

import numpy as np
import pytest
from faults.failing_victims import arm
from shm.groups import algorithm_of
from together import together

import fastcoll as dist
from fastcoll import AbortedError, GroupError, PeerDiedError, config, failpoints
from fastcoll.shm import autotune
from fastcoll.shm import context_layout as at
from fastcoll.shm.single_copy import PIECE

LARGE = 2 * PIECE // 4 + 1009  # float32 of three pieces


@contextmanager
def direct_group(algorithms="direct"):
    """A group of all ranks whose calls may use these algorithms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTCOLL_SHM_ALGORITHMS", algorithms)
        config.forget()
        group = dist.new_group()
    config.forget()
    try:
        yield group
    finally:
        group.close()


@pytest.mark.ranks(2, 3)
def test_arrays_of_several_pieces(rank, world_size):
    base = np.arange(LARGE, dtype=np.float32)
    with direct_group() as group:
        x = base + rank
        group.fast.all_reduce(x)
        assert (x == base * world_size + sum(range(world_size))).all()
        x = base + rank
        group.fast.broadcast(x, world_size - 1)
        assert (x == base + world_size - 1).all()
        assert algorithm_of(group) == autotune.DIRECT
        blocks = np.full((world_size, LARGE), 1.0 + rank)
        group.fast.reduce_scatter_single(blocks[rank], blocks)  # in place
        assert (blocks[rank] == world_size * (world_size + 1) / 2).all()
        assert algorithm_of(group) == autotune.DIRECT
        x, y = np.zeros_like(base), base + 1
        after, before = (rank + 1) % world_size, (rank - 1) % world_size
        works = [group.fast.isend(y, after), group.fast.irecv(x, before)]
        for work in works:
            work.wait()
        assert (x == y).all()


@pytest.mark.long
@pytest.mark.ranks(9)
def test_more_arrays_than_slots_for_their_copies(rank, world_size):
    with direct_group() as group:
        x = np.arange(100_003) + rank
        group.fast.all_reduce(x)
        assert (x == np.arange(100_003) * world_size + sum(range(world_size))).all()
        out = np.zeros(1009, np.int64)
        group.fast.reduce_scatter(out, [np.full(1009, 100 * rank + k) for k in range(world_size)])
        assert (out == 100 * sum(range(world_size)) + rank * world_size).all()


@pytest.mark.ranks(3)
def test_ranks_with_blocks_of_different_sizes_use_the_slots(rank, world_size):
    sizes = [20_000 * (k + 1) for k in range(world_size)]
    with direct_group() as group:
        for _ in range(3):
            outs = [np.zeros(n) for n in sizes] if rank == 0 else None
            group.fast.gather(np.full(sizes[rank], 1.0 + rank), outs, 0)
            for k, out in enumerate(outs or []):
                assert (out == 1 + k).all()
            assert algorithm_of(group) != autotune.DIRECT
        x = np.ones(20_000)
        group.fast.all_reduce(x)
        assert algorithm_of(group) == autotune.DIRECT


@pytest.mark.ranks(2)
def test_ranks_that_choose_different_algorithms_soon_agree(rank, world_size):
    """Ranks whose arrays differ in size have different rows, and so may choose differently."""
    with direct_group("direct,close") as group:
        words = group.backend.context.words
        if rank == 0:
            words[at.DIRECT_FROM] = autotune.NEVER
        went = []
        for turn in range(40):
            x = np.full(100_000, turn + rank, np.float32)
            group.fast.all_reduce(x)
            assert (x == 2 * turn + 1).all()
            went.append(algorithm_of(group))
        assert autotune.DIRECT not in went


@pytest.fixture
def unreadable(rank):
    """An array that peers cannot read, as if another thread of its owner, rank 0, had unmapped it."""
    memory = mmap.mmap(-1, 1 << 20)
    x = np.frombuffer(memory, np.float32)
    if rank == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(1 << 20), 0) == 0
    return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("operation", ["broadcast", "message"])
def test_an_unreadable_array_ends_the_call_long_before_its_timeout(rank, world_size, unreadable, operation):
    unread = pytest.raises(AbortedError, match=r"the array of rank 0 .* could not be read")
    with direct_group() as group, unread:
        if operation == "broadcast":
            group.fast.broadcast(unreadable, 0)
        else:
            (group.fast.recv if rank else group.fast.send)(unreadable, 1 - rank)


@pytest.mark.ranks(2)
def test_the_failure_of_the_owner_is_the_reason_if_its_array_is_unreadable(rank, world_size, unreadable):
    """A survivor of a death may free its array before the other ranks have found the death."""
    with direct_group() as group:
        if rank == 1:
            group.backend.monitor.decide = lambda needed, doing: PeerDiedError("rank 7 died", [7])
        with pytest.raises(GroupError, match="rank 7 died") as caught:
            group.fast.broadcast(unreadable, 0)
        assert caught.value.ranks == (7,)


@pytest.fixture
def stop(rank):
    """Stop a rank at a failpoint; the other then aborts the call, writes into its array and continues the rank."""
    arm("shm.barrier.enter:delay=0")  # now kernels are compiled with failpoints
    dist.init_process_group()
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())

    def stop(place, victim, call, x):
        def is_aborted():
            with pytest.raises(AbortedError, match="it stopped"):
                call(group)

        def abort():
            while Path(f"/proc/{pids[victim]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(1e-3)
            group.abort("it stopped")

        with direct_group() as group:
            if rank == victim:
                failpoints.arm(failpoints.parse(f"shm.single_copy.{place}:stop@3"), rank)
                is_aborted()
            else:
                assert together(is_aborted, abort) == [None, None]
                x[:] = 7
                os.kill(pids[victim], signal.SIGCONT)
            dist.barrier()

    yield stop
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.ranks(2, init=False, fresh=True)
def test_a_rank_that_is_too_late_returns_no_wrong_data_and_writes_nothing(rank, world_size, stop, caplog):
    # A rank that reads an array that the other one has changed.
    for operation, root, victim in (("broadcast", 0, 1), ("reduce", 0, 0), ("reduce", 1, 1)):
        x = np.full(2 * LARGE, 1.0 + rank, np.float32)
        stop("piece_read", victim, methodcaller(operation, x, root), x)
    # A rank that writes into an array whose owner's call has failed.
    with dist.shared_arrays():
        x = np.ones(LARGE, np.float32)
    stop("pushing", 1, methodcaller("all_reduce", x), x)
    assert rank or (x == 7).all()
    assert ("shares no more arrays" in caplog.text) == (rank == 0)
    with dist.shared_arrays():
        y = np.full(300_000, rank + 1.0)
    for array in (x, y):
        array[:] = rank + 1
        dist.all_reduce(array)
        assert (array == 3).all()


FORBIDDEN = """
import ctypes, struct
import numpy as np
import fastcoll as dist
from fastcoll.shm import context_layout as at

def forbid():
    "process_vm_readv fails with EPERM from now on, as seccomp has it in containers"
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 310), (0x06, 0, 0, 0x50000 | 1), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program) == 0

import os
if os.environ["RANK"] == "1":
    forbid()
dist.init_process_group()
rank = dist.get_rank()
x = np.full(300_000, rank + 1.0)
dist.all_reduce(x)
assert (x == 3).all()
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
group = dist.new_group()
assert group.backend.context[at.ONLY_SHARED] == 1
print("right", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls")
def test_all_ranks_use_the_slots_if_one_may_not_read_memory(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(FORBIDDEN)
    words = [sys.executable, "-m", "fastcoll.launch", "-n", "2", str(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.stdout.count("right") == 2, done.stderr
