"""Groups whose ranks meet by nodes, as groups of many ranks do: shared memory in the node, one rank a node goes out."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conformance import test_every_operation as ops
from net.meshes import alarm, until

import fastcoll as dist
from fastcoll import AbortedError, MismatchError, ReduceOp
from fastcoll.core.group import ProcessGroup
from fastcoll.hybrid import backend as hybrid
from fastcoll.kernels import waiting
from fastcoll.net.tcp import backend as tcp
from fastcoll.net.tcp import engine_layout as words
from fastcoll.net.tcp.plans.node_meeting import CARRIED
from fastcoll.net.tcp.plans.relayed import RELAYED
from fastcoll.shm import context_layout as shm_words
from fastcoll.system import processes

# Group ranks by node: in order, with a surplus rank, and interleaved.
EVEN, UNEVEN = [0, 0, 1, 1], [0, 0, 0, 1, 1]
SIX = [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1], [0, 1, 2, 0, 1, 2]
_TCP_INFO_BYTES_SENT = 200  # offset in struct tcp_info of linux/tcp.h

Start = Callable[[list[int]], ProcessGroup]


@pytest.fixture
def start(rank: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start the job with each rank on a given node."""
    monkeypatch.setattr(hybrid, "FLAT", 0)

    def begin(homes: list[int]) -> ProcessGroup:
        monkeypatch.setattr(processes, "_shm_device", lambda: 1_000_000 + homes[rank])
        dist.init_process_group()
        world = dist.GroupMember.WORLD
        assert isinstance(world, ProcessGroup)
        return world

    yield begin
    dist.destroy_process_group()


def ranks(homes: list[int]) -> pytest.MarkDecorator:
    return pytest.mark.ranks(len(homes), init=False)


@contextmanager
def announced(path: Path, so: Callable[[], bool]) -> Iterator[None]:
    """Create a file as soon as `so` is true, which may be while this thread waits in a call."""

    def announce() -> None:
        until(so)
        path.touch()

    watch = threading.Thread(target=announce)
    watch.start()
    yield
    watch.join()


def sent_by(group: ProcessGroup) -> int:
    """Return how many bytes this rank has sent over the connections of its collectives."""
    backends = [group.backend._everyone, *([group.backend.rail.backend] if group.backend.rail else [])]
    total = 0
    for fd in {int(fd) for backend in backends for fd in backend.context.fds.flat if fd >= 0}:
        with socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        total += struct.unpack_from("Q", info, _TCP_INFO_BYTES_SENT)[0]
    return total


@pytest.mark.ranks(6, init=False)
@pytest.mark.parametrize("homes", SIX)
def test_one_rank_of_each_node_sends_in_a_barrier_and_small_reductions(
    rank: int, world_size: int, start: Start, homes: list[int]
) -> None:
    group, x = start(homes), np.ones(3)
    for turn in range(2):  # the first turn makes connections
        before = sent_by(group)
        for call in (dist.barrier, lambda: dist.all_reduce(x), lambda: dist.reduce(x, 0), dist.barrier):
            call()
        sent = sent_by(group) - before
        assert turn == 0 or (sent > 0) == (rank == homes.index(homes[rank]))


@pytest.mark.ranks(6, init=False)
@pytest.mark.parametrize("homes", SIX)
def test_every_operation(rank: int, world_size: int, start: Start, homes: list[int]) -> None:
    start(homes)
    for count in (2, 1009, RELAYED // 4 + 5):
        for row in ops.ROWS.values():
            row(rank, world_size, count)


@pytest.mark.ranks(6, init=False)
@pytest.mark.parametrize("homes", SIX)
def test_headers_and_first_ranks_carry_small_data_of_every_type(
    rank: int, world_size: int, start: Start, homes: list[int]
) -> None:
    """The internal groups make no call, but they do for one element more."""
    node = start(homes).backend.local.backend.context
    for dtype in map(np.dtype, ("i1", "u2", "f4", "f8", "c16")):
        least, most = CARRIED // dtype.itemsize, RELAYED // dtype.itemsize
        for count in (1, least // world_size, least, least + 1, most // world_size, most, most + 1):
            inputs = [(np.arange(count) * (r + 1) % 11).astype(dtype) for r in range(world_size)]
            total, before, root = sum(inputs), node[shm_words.CALLS], count % world_size
            x = inputs[rank].copy()
            dist.all_reduce(x)
            ops.equal(x, total)
            dist.broadcast(x := inputs[rank].copy(), root)
            ops.equal(x, inputs[root])
            dist.reduce(x := inputs[rank].copy(), root)
            ops.equal(x, total if rank == root else inputs[rank])
            if dtype.kind != "c":
                dist.all_reduce(x := inputs[rank].copy(), ReduceOp.MAX)
                ops.equal(x, np.max(inputs, axis=0))
            if count * world_size <= most:
                blocks = np.concatenate(inputs)
                dist.all_gather_into_tensor(found := np.zeros_like(blocks), inputs[rank])
                ops.equal(found, blocks)
                dist.reduce_scatter_tensor(found := np.zeros(count, dtype), blocks * dtype.type(2))
                ops.equal(found, inputs[rank] * dtype.type(2 * world_size))
            assert (node[shm_words.CALLS] > before) == (count > most)
    sizes = [0, 3, 1, 0, 2, 5]  # of the ranks' blocks, which may differ
    outs = [np.zeros(size) for size in sizes]
    dist.all_gather(outs, np.full(sizes[rank], rank + 0.5))
    assert [out.tolist() for out in outs] == [[r + 0.5] * size for r, size in enumerate(sizes)]


@ranks(UNEVEN)
def test_every_root(rank: int, world_size: int, start: Start) -> None:
    """Also a root on a rank without a rail."""
    start(UNEVEN)
    for root in range(world_size):
        for count in (3, RELAYED):
            x = ops.numbers(rank, count)
            dist.reduce(x, root, ReduceOp.AVG)
            total = sum(ops.numbers(r, count) for r in range(world_size)) / np.float32(world_size)
            ops.equal(x, total if rank == root else ops.numbers(rank, count))
            x = ops.numbers(rank, count)
            dist.broadcast(x, root)
            ops.equal(x, ops.numbers(root, count))


@ranks(EVEN)
def test_a_reduce_sends_each_byte_once_towards_the_root(rank: int, world_size: int, start: Start) -> None:
    group, nbytes, root = start(EVEN), 4 << 20, 1
    x, found = np.ones(nbytes // 8), np.zeros(world_size, np.int64)
    dist.reduce(x.copy(), root)
    dist.all_gather_into_tensor(found, np.zeros(1, np.int64))
    before = sent_by(group)
    dist.reduce(x, root)
    dist.barrier()  # the root has received all, so nothing is left in the senders' buffers
    assert (x == (world_size if rank == root else 1)).all()
    dist.all_gather_into_tensor(found, np.array([sent_by(group) - before]))
    assert found[2:].sum() >= nbytes
    assert found.sum() < 1.01 * nbytes, found


def connected(group: ProcessGroup) -> set[int]:
    """Return the ranks with which this rank has connections for the collectives of all ranks."""
    return {*np.flatnonzero((group.backend._everyone.context.fds >= 0).any(axis=1)).tolist()}


@pytest.mark.ranks(6, init=False)
@pytest.mark.parametrize("homes", SIX)
def test_small_blocks_for_a_node_travel_together(
    rank: int, world_size: int, start: Start, homes: list[int]
) -> None:
    """Small blocks of one size need no connections but those of the first rank of each node."""
    group = start(homes)
    dist.barrier()
    met, firsts = connected(group), {homes.index(node) for node in homes}
    for count in (0, 1, 5, 450):
        every = [np.full(count, 10 * rank + peer, np.int32) for peer in range(world_size)]
        outs = [np.empty(count, np.int32) for _ in range(world_size)]
        for root in range(world_size):
            dist.gather(every[root], outs if rank == root else None, root)
            if rank == root:
                assert all((out == 10 * peer + root).all() for peer, out in enumerate(outs))
            own = np.empty(count, np.int32)
            dist.scatter(own, every if rank == root else None, root)
            assert (own == 10 * root + rank).all()
        dist.all_to_all(outs, every)
        assert all((out == 10 * peer + rank).all() for peer, out in enumerate(outs))
        table, result = np.concatenate(every), np.empty(count * world_size, np.int32)
        dist.all_to_all_single(result, table)
        ops.equal(result, np.concatenate(outs))
    assert connected(group) - met <= (firsts if rank in firsts else set())


@pytest.mark.ranks(6, init=False)
def test_blocks_of_which_one_pair_differs_in_size(rank: int, world_size: int, start: Start) -> None:
    """Only two ranks know that not all blocks have one size."""
    homes = SIX[2]
    start(homes)
    sizes = np.full((world_size, world_size), 3)
    sizes[1, 4] = 5
    outs = [np.full(sizes[peer, rank], -1) for peer in range(world_size)]
    dist.all_to_all(outs, [np.full(n, 10 * rank + peer) for peer, n in enumerate(sizes[rank])])
    assert [out.tolist() for out in outs] == [
        [10 * peer + rank] * sizes[peer, rank] for peer in range(world_size)
    ]
    for root in (0, 2):
        outs = [np.full(sizes[peer, 4], -1) for peer in range(world_size)]
        dist.gather(np.full(sizes[rank, 4], rank), outs if rank == root else None, root)
        assert rank != root or [out.tolist() for out in outs] == [[r] * n for r, n in enumerate(sizes[:, 4])]
        own = np.full(sizes[1, rank], -1)
        dist.scatter(own, [np.full(n, r) for r, n in enumerate(sizes[1])] if rank == root else None, root)
        assert own.tolist() == [rank] * sizes[1, rank]


@ranks(EVEN)
def test_blocks_of_other_types(rank: int, world_size: int, start: Start) -> None:
    start(EVEN)
    pair = np.dtype([("key", ">i4"), ("value", "f8")])
    for dtype in (np.dtype(">f8"), np.dtype(bool), np.dtype("complex64"), pair):
        given = [
            np.array([(rank, peer)], pair) if dtype == pair else np.array([rank], dtype) for peer in range(4)
        ]
        outs = [np.empty(1, dtype) for _ in range(world_size)]
        dist.all_to_all(outs, given)
        for peer, out in enumerate(outs):
            ops.equal(out, np.array([(peer, rank)], pair) if dtype == pair else np.array([peer], dtype))


@ranks(EVEN)
def test_no_room_for_relayed_data_is_an_error_on_all_ranks(
    rank: int, world_size: int, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise dist.ResourceError("there is no room")

    group = start(EVEN)
    group.fast.all_reduce(np.ones(3))  # carried by headers
    if rank == 1:
        monkeypatch.setattr(group.backend._everyone, "_allocate_relay", refuse)
    with pytest.raises(dist.ResourceError if rank == 1 else AbortedError, match="there is no room"):
        group.fast.all_reduce(np.ones(CARRIED))


# ---- calls that do not match, and ranks that are missing -------------------------------------------------


@ranks(UNEVEN)
def test_calls_that_do_not_match_leave_the_group_usable(rank: int, world_size: int, start: Start) -> None:
    start(UNEVEN)
    for odd in range(world_size):
        with pytest.raises(MismatchError, match=rf"rank {odd} called all_reduce\(float64, 4 elements"):
            dist.all_reduce(np.ones(3 + (rank == odd)))
        with pytest.raises(MismatchError, match=rf"rank {odd} called all_reduce\(float64, 3 elements"):
            dist.all_reduce(np.ones(3 if rank == odd else 300))  # only one of them carries its data
        with pytest.raises(MismatchError, match=rf"rank {odd} called barrier"):
            dist.barrier() if rank == odd else dist.scan(np.ones(3))
        if rank == odd:
            with pytest.raises(dist.UsageError):
                dist.broadcast(np.ones(3), 99)
        else:
            with pytest.raises(MismatchError, match=rf"rank {odd}'s broadcast was refused"):
                dist.broadcast(np.ones(3), 0)
        dist.barrier()


class Interrupted(Exception):
    pass


def interrupt(*_: object) -> None:
    raise Interrupted


@ranks(EVEN)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_waits_in_the_meeting_can_be_interrupted(
    rank: int, world_size: int, start: Start, victim: int
) -> None:
    """Whether it waits for a rank of its node, for other nodes, or for its node's first rank."""
    start(EVEN)
    group = dist.new_group()
    group.fast.all_reduce(np.ones(3))
    if rank == victim:
        with (
            alarm(interrupt, lambda: group.backend._everyone.context.in_progress),
            pytest.raises(Interrupted),
        ):
            group.fast.barrier()
    if rank == 3:  # it makes no call, with which the others could complete theirs
        until(lambda: group.monitor.decide([], "testing"))
    else:
        with pytest.raises(AbortedError, match=rf"rank {victim} .*Interrupted"):
            group.fast.barrier()
    dist.barrier()


@ranks(EVEN)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_handler_may_close_a_group_whose_ranks_meet(
    rank: int, world_size: int, start: Start, victim: int
) -> None:
    """The call that it interrupts no longer uses the shared memory of the node."""
    start(EVEN)
    group = dist.new_group()
    group.fast.barrier()
    if rank == victim:
        gone = pytest.raises((AbortedError, dist.NotInitializedError))
        with alarm(lambda *_: group.close(), lambda: group.backend._everyone.context.in_progress), gone:
            group.fast.barrier()
    elif rank == 3:
        until(lambda: group.monitor.decide([victim], "testing"))
    else:
        with pytest.raises(AbortedError, match=f"rank {victim}"):
            group.fast.barrier()
    dist.barrier()


@ranks(EVEN)
@pytest.mark.parametrize(("end", "why"), [("abort", "abort.. was called"), ("close", "left the group")])
def test_a_rank_that_aborts_or_leaves_ends_the_meeting_on_all_ranks(
    rank: int, world_size: int, start: Start, tmp_path: Path, end: str, why: str
) -> None:
    """Of ranks that wait for a rank of their node, for other nodes, and for their node's first rank."""
    start(EVEN)
    group = dist.new_group()
    group.fast.barrier()
    if rank == 3:
        until(lambda: all((tmp_path / str(peer)).exists() for peer in range(3)))
        getattr(group, end)()
    else:
        with (
            announced(tmp_path / str(rank), lambda: group.backend._everyone.context.in_progress),
            pytest.raises(AbortedError, match=rf"rank 3 .*{why}.*barrier\(\), call 2 "),
        ):
            group.fast.barrier()
    dist.barrier()


@ranks(EVEN)
def test_an_interrupt_while_the_reason_of_a_failure_is_sought_fails_the_group(
    rank: int, world_size: int, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(EVEN)
    group = dist.new_group()
    group.fast.all_reduce(np.ones(RELAYED))
    monkeypatch.setattr(hybrid, "_REASON_SECONDS", 60.0)  # no other rank ends the search
    if rank == 0:
        monkeypatch.setattr(hybrid, "time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupt))
        group.backend.local.abort("a test")
        with pytest.raises(Interrupted):
            group.fast.all_reduce(np.ones(RELAYED))
        assert isinstance(group.failure, AbortedError)
    else:
        with pytest.raises(AbortedError, match="a test"):
            group.fast.all_reduce(np.ones(RELAYED))
    dist.barrier()


def mapped() -> int:
    """Return how many segments of shared memory this process has mapped."""
    return Path("/proc/self/maps").read_text().count("/dev/shm/fastcoll")


@ranks(EVEN)
def test_a_closed_group_unmaps_the_memory_of_its_node(rank: int, world_size: int, start: Start) -> None:
    start(EVEN)
    before = mapped()
    for _ in range(3):
        group, x = dist.new_group(), np.full(3, float(rank))
        works = [group.isend(x, rank ^ 1), group.irecv(np.zeros(3), rank ^ 1)]
        for work in works:
            work.wait()
        group.fast.all_reduce(x)
        assert mapped() > before
        group.close()
        assert mapped() == before


@ranks(EVEN)
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
def test_memory_that_a_running_meeting_uses_stays_mapped(
    rank: int, world_size: int, start: Start, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the thread of an aborted call had no core for seconds."""
    start(EVEN)
    group = dist.new_group()
    group.fast.barrier()
    if rank == victim:
        monkeypatch.setattr(tcp, "_CLOSE_SECONDS", 0.0)
        # The thread sleeps for so long in the compiled call.
        group.backend._everyone.context.words[words.BACKOFF + waiting.BUDGET] = 999_999_999
        caught: list[BaseException] = []

        def meet() -> None:
            try:
                group.fast.barrier()
            except dist.FastcollError as error:
                caught.append(error)

        thread = threading.Thread(target=meet)
        thread.start()
        until(lambda: group.backend._everyone.context.in_progress)
        group.close()
        thread.join()
        assert isinstance(caught[0], AbortedError | dist.NotInitializedError)
    dist.barrier()


# ---- the order of a reduction ----------------------------------------------------------------------------


def in_order_of_nodes(inputs: Sequence[np.ndarray], homes: list[int]) -> np.ndarray:
    """Return the sum that docs/operations.md promises: in each node in rank order, then node by node."""
    nodes = [
        [x for x, home in zip(inputs, homes, strict=True) if home == node] for node in range(max(homes) + 1)
    ]
    return reduce(np.add, [reduce(np.add, node) for node in nodes])


@pytest.mark.ranks(6, init=False)
@pytest.mark.parametrize("homes", SIX[1:])
def test_floats_are_added_in_the_nodes_and_then_node_by_node(
    rank: int, world_size: int, start: Start, homes: list[int]
) -> None:
    start(homes)
    for count in (11, RELAYED // 4 + 5):
        inputs = [
            np.random.default_rng(r).standard_normal(count * world_size).astype("f4")
            for r in range(world_size)
        ]
        want, root = in_order_of_nodes(inputs, homes), world_size - 1
        assert (want != reduce(np.add, inputs)).any(), "the order makes no difference"
        x, y, part = inputs[rank].copy(), inputs[rank].copy(), np.zeros(count, "f4")
        for _ in range(2):
            x[:] = y[:] = inputs[rank]
            dist.all_reduce(x)
            ops.equal(x, want)
            dist.reduce(y, root)
            ops.equal(y, want if rank == root else inputs[rank])
            dist.reduce_scatter_single(part, inputs[rank])
            by_nodes = (
                count == 11 or homes == SIX[2]
            )  # headers carry small arrays; larger ones need equal nodes
            ops.equal(part, (want if by_nodes else reduce(np.add, inputs))[rank * count :][:count])


def ends(a: int, b: int) -> int:
    """Join two strings of digits, each given by its first digit (the tens) and its last (the ones); 0 is empty."""
    if a and b:
        return a // 10 * 10 + b % 10
    return a + b


def joined(digits: Sequence[np.ndarray]) -> np.ndarray:
    """Return the combination of all ranks' numbers in the order of the ranks."""
    return np.array([reduce(ends, map(int, column), 0) for column in np.transpose(digits)])


ENDS = ReduceOp.custom(ends)  # made once, since each new one is compiled anew


@pytest.mark.ranks(6, init=False)
@pytest.mark.parametrize("homes", SIX[1:])
def test_functions_that_do_not_commute_are_applied_in_rank_order(
    rank: int, world_size: int, start: Start, homes: list[int]
) -> None:
    start(homes)
    for count in (5, RELAYED // 8 + 5):
        # In element k, all ranks have digits except for the last k % 3 ranks and the first k % 2.
        at = np.arange(count)
        inputs = [
            np.where((at % 3 < world_size - r) & (at % 2 <= r), 11 * (r + 1), 0) for r in range(world_size)
        ]
        want = joined(inputs)
        x, y, z = (inputs[rank].copy() for _ in range(3))
        dist.all_reduce(x, ENDS)
        ops.equal(x, want)
        dist.reduce(y, 1, ENDS)
        ops.equal(y, want if rank == 1 else inputs[rank])
        dist.scan(z, ENDS)
        ops.equal(z, joined(inputs[: rank + 1]))
        part = np.zeros(count, inputs[0].dtype)
        dist.reduce_scatter(part, [inputs[rank]] * world_size, ENDS)
        ops.equal(part, want)
