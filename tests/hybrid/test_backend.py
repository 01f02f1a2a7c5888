"""Groups over several nodes, which are ranks of one machine that believe they have different /dev/shm."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conformance import test_every_operation as ops
from net.meshes import alarm, until
from net.meshes import crew as mesh_crew
from rendezvous.observed import store_messages

import fastcoll as dist
from fastcoll import AbortedError, FastcollError, MismatchError, ReduceOp, ResourceError
from fastcoll.core.group import ProcessGroup
from fastcoll.hybrid import backend as hybrid
from fastcoll.hybrid.backend import DIRECT, HybridBackend
from fastcoll.net.tcp import mail_frames, mesh
from fastcoll.net.tcp.backend import TcpBackend
from fastcoll.net.tcp.plans.relayed import RELAYED
from fastcoll.rendezvous.assemble import GroupMeeting
from fastcoll.shm import rings as ring_words
from fastcoll.shm.backend import ShmBackend
from fastcoll.store import HashStore, PrefixStore
from fastcoll.system import processes

# Group ranks by node: of one size, of two sizes with a surplus rank, and not in order.
EVEN, UNEVEN, MIXED = [0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1, 0]
LARGE = DIRECT // 8 + 5  # float64, of a size for the internal groups
# Bytes: within the meeting, over TCP between all ranks, by rails, and in several segments (short ones here).
SEGMENT = 128 << 10
SIZES = [40, DIRECT // 2, DIRECT + 40, 5 * SEGMENT + 40_008]

Start = Callable[[list[int]], ProcessGroup]


@pytest.fixture
def start(rank: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start the job with each rank on a given node."""

    monkeypatch.setattr(hybrid, "SEGMENT", SEGMENT)

    def begin(homes: list[int]) -> ProcessGroup:
        monkeypatch.setattr(processes, "_shm_device", lambda: 1_000_000 + homes[rank])
        dist.init_process_group()
        world = dist.GroupMember.WORLD
        assert isinstance(world, ProcessGroup)
        assert isinstance(world.backend, HybridBackend)
        return world

    yield begin
    dist.destroy_process_group()


def ranks(homes: list[int]) -> pytest.MarkDecorator:
    return pytest.mark.ranks(len(homes), init=False)


def check(rank: int, size: int, nbytes: int) -> None:
    """Check every operation of the internal groups, with arrays of a number of bytes."""
    for row in (ops.all_reduce, ops.reduce_and_scan, ops.broadcast, ops.all_gather, ops.reduce_scatter):
        row(rank, size, nbytes // 4)
    x = ops.numbers(rank, nbytes // 4)
    dist.all_reduce(x, ReduceOp.AVG)
    ops.equal(x, sum(ops.numbers(r, nbytes // 4) for r in range(size)) / np.float32(size))


def check_narrow(rank: int, size: int, nbytes: int) -> None:
    """Check that narrow types give all ranks the same bits, within the bound, and that nothing is lost but `lost`."""
    own = [np.random.default_rng([r, nbytes]).standard_normal(nbytes // 4).astype("f4") for r in range(size)]
    for travel, relative in (("bfloat16", 2.0**-7), ("int8", 1.01 / 127)):
        x, lost = own[rank].copy(), np.zeros_like(own[rank])
        dist.all_reduce(x, travel=travel, lost=lost)
        bound = relative * 1.01 * sum(np.abs(each).max() for each in own)
        assert np.abs(x - sum(own)).max() <= bound
        assert np.abs(x - sum(own)).max() > 0, "elements have travelled as float32"
        found: list = [None] * size
        dist.all_gather_object(found, x.tobytes())
        assert len(set(found)) == 1
        dist.all_reduce(lost)
        assert 0 < np.abs(lost).max() <= bound


@pytest.mark.limit(100)
@ranks(EVEN)
def test_a_rank_that_fails_before_its_node_meets_is_named_to_its_node(
    rank: int, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have made the group over TCP by then, and wait in the meeting of the node or of a rail."""
    start(EVEN)
    dist.barrier()
    if rank == 0:
        plain = TcpBackend.make

        def fail(*args: object) -> None:
            plain(*args).close(None)
            raise ResourceError("made to fail")

        monkeypatch.setattr(TcpBackend, "make", fail)
    with pytest.raises(FastcollError, match="made to fail"):
        dist.new_group(timeout=1000)


def call_for_ever(call: Callable[[], object]) -> None:
    while True:
        call()


@ranks(EVEN)
def test_nodes_of_one_size(rank: int, world_size: int, start: Start) -> None:
    group = start(EVEN)
    for nbytes in SIZES:
        check(rank, world_size, nbytes)
        check_narrow(rank, world_size, nbytes)
    group.timeout = 25.0
    parts = group.backend.local, group.backend.rail, group.backend.messages
    assert {each.timeout for each in (group, *parts)} == {25}


@ranks(EVEN)
def test_at_a_start_on_several_nodes_a_rank_sends_the_store_eight_messages(
    rank: int, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 sends more, as the first rank of each meeting, and rank 1 as that of the second rail."""
    asked = store_messages(monkeypatch)
    start(EVEN)
    assert len(asked) == [13, 10, 8, 8][rank]
    if rank == 3:
        exchange = ["GET", "EXCHANGE"]  # the terms, and the addresses
        assert [each.name for each in asked] == ["SET_NEW", "GET", *exchange, "GET", *exchange, "ADD"]


@pytest.mark.long
@ranks(UNEVEN)
def test_a_node_with_a_surplus_rank(rank: int, world_size: int, start: Start) -> None:
    group = start(UNEVEN)
    assert (group.backend.rail is None) == (rank == 2)
    for nbytes in SIZES[1:]:
        check(rank, world_size, nbytes)
        check_narrow(rank, world_size, nbytes)


@ranks(MIXED)
def test_nodes_whose_ranks_are_not_in_order(rank: int, world_size: int, start: Start) -> None:
    """In test_by_nodes.py also a user's function, which is applied in the order of the ranks."""
    start(MIXED)
    for nbytes in SIZES[1:3]:
        check(rank, world_size, nbytes)


@ranks(EVEN)
def test_large_blocks_of_different_sizes(rank: int, world_size: int, start: Start) -> None:
    start(EVEN)
    outs = [np.zeros(LARGE + each) for each in range(world_size)]
    dist.all_gather(outs, np.full(LARGE + rank, float(rank)))
    assert all((out == each).all() for each, out in enumerate(outs))
    part = np.zeros(LARGE + rank)
    dist.reduce_scatter(part, [np.full(LARGE + each, float(rank)) for each in range(world_size)])
    assert (part == sum(range(world_size))).all()
    sizes = [0, *[LARGE + each for each in range(1, world_size)]]
    whole = np.concatenate([np.full(size, rank + 10.0 * each) for each, size in enumerate(sizes)])
    part = np.zeros(sizes[rank])
    dist.reduce_scatter_single(part, whole, ReduceOp.AVG, input_split_sizes=sizes)
    assert (part == (world_size - 1) / 2 + 10.0 * rank).all()


@ranks(UNEVEN)
def test_small_arrays_go_through_one_rank_of_each_node(rank: int, world_size: int, start: Start) -> None:
    start(UNEVEN)
    check(rank, world_size, RELAYED)
    check_narrow(rank, world_size, RELAYED)
    check(rank, world_size, RELAYED + 8)


@ranks(EVEN)
def test_calls_of_all_sizes_in_flight_at_once(rank: int, world_size: int, start: Start) -> None:
    start(EVEN)
    xs = [np.full(nbytes // 8, 10.0 * k + rank) for k, nbytes in enumerate(SIZES * 3)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    y = np.full(3, rank)
    dist.all_reduce(y)
    assert (y == 6).all()
    assert all(work.is_success() for work in works)
    assert all((x == 40.0 * k + 6).all() for k, x in enumerate(xs))


@ranks(EVEN)
def test_groups_of_some_ranks_of_each_node(rank: int, world_size: int, start: Start) -> None:
    start(EVEN)
    kinds = {(0, 1): ShmBackend, (0, 2): TcpBackend, (0, 1, 3): HybridBackend, (3, 1, 2): HybridBackend}
    for chosen, kind in kinds.items():
        group = dist.new_group(list(chosen))
        if rank in chosen:
            assert type(group.backend) is kind
            x = np.full(LARGE, float(rank))
            dist.all_reduce(x, group=group)
            assert (x == sum(chosen)).all()
            dist.destroy_process_group(group)
    dist.barrier()


@ranks(EVEN)
def test_large_calls_that_do_not_match_leave_the_group_usable(
    rank: int, world_size: int, start: Start
) -> None:
    start(EVEN)
    for count in (DIRECT // 4, SEGMENT * 8):
        x = np.full(count + (rank == 1), 1.0, "f4")
        with pytest.raises(MismatchError, match="rank 1 called"):
            dist.all_reduce(x)
        assert (x == 1).all()
        check(rank, world_size, DIRECT + 40)


@ranks(EVEN)
def test_an_interrupt_between_the_meeting_and_the_rest(
    rank: int, world_size: int, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks continue the call, so this rank publishes its failure."""
    group = start(EVEN)
    dist.all_reduce(np.ones(LARGE))
    if rank == 2:
        meet = group.backend._everyone.plan

        def then_interrupted(*args: object, **rest: object) -> Callable[[], None]:
            call = meet(*args, **rest)  # type: ignore[arg-type]

            def run() -> None:
                call()
                raise KeyboardInterrupt

            return run

        monkeypatch.setattr(group.backend._everyone, "plan", then_interrupted)
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(np.ones(LARGE))
        with pytest.raises(AbortedError, match="KeyboardInterrupt"):
            dist.barrier()
        return
    with pytest.raises(AbortedError, match=r"rank 2 .*KeyboardInterrupt") as caught:
        dist.all_reduce(np.ones(LARGE))
    assert caught.value.ranks == (2,)


@ranks(EVEN)
def test_abort_from_another_thread(rank: int, world_size: int, start: Start) -> None:
    group = start(EVEN)
    dist.all_reduce(np.ones(16 << 20, "i1"))
    if rank == 1:
        abort = threading.Thread(target=lambda: until(group.gate.is_busy) and group.abort("had enough"))
        abort.start()
    with pytest.raises(AbortedError, match=r"rank 1 .*had enough") as caught:
        call_for_ever(lambda: dist.all_reduce(np.ones(16 << 20, "i1")))
    assert rank == 1 or caught.value.ranks == (1,)


@ranks(EVEN)
def test_a_rank_that_leaves_in_order_is_no_death(rank: int, world_size: int, start: Start) -> None:
    start(EVEN)
    group = dist.new_group()
    group.fast.all_reduce(np.ones(LARGE))
    if rank == 3:
        group.close()
    else:
        with pytest.raises(AbortedError, match=r"rank 3 .*left the group"):
            group.fast.all_reduce(np.ones(LARGE))
    dist.barrier()


@ranks(EVEN)
def test_a_handler_may_close_the_group(rank: int, world_size: int, start: Start, tmp_path: Path) -> None:
    start(EVEN)
    group = dist.new_group()
    group.fast.all_reduce(np.ones(LARGE))
    called = tmp_path / "called"

    def close(*_: object) -> None:
        called.touch()
        group.close()

    if rank == 0:
        gone = (AbortedError, dist.NotInitializedError)
        with alarm(close, group.gate.is_busy), pytest.raises(gone):
            group.fast.all_reduce(np.ones(LARGE))
    else:
        until(called.exists)
        with pytest.raises(AbortedError, match="rank 0"):
            call_for_ever(lambda: group.fast.all_reduce(np.ones(LARGE)))
    dist.barrier()


@ranks(UNEVEN)
def test_a_handler_may_close_the_group_while_another_thread_is_in_a_call(
    rank: int, world_size: int, start: Start
) -> None:
    """The handler interrupts the main thread's wait for its turn; the call reads the node's shared memory."""
    start(UNEVEN)
    group = dist.new_group()
    group.fast.all_reduce(np.ones(4))
    if rank == 1:
        errors: list[Exception] = []

        def call() -> None:
            try:
                group.fast.all_reduce(np.ones(4))
            except AbortedError as error:
                errors.append(error)

        def waits() -> bool:
            return len(group.gate._inside) == 2

        other = threading.Thread(target=call)
        other.start()
        until(group.gate.lock.locked)
        gone = (AbortedError, dist.NotInitializedError)
        with alarm(lambda *_: group.close(), waits), pytest.raises(gone):
            group.fast.all_reduce(np.ones(4))
        other.join()
        assert len(errors) == 1
    dist.barrier()


@ranks(EVEN)
def test_a_mismatch_that_is_found_late_interrupts_no_large_call(
    rank: int, world_size: int, start: Start
) -> None:
    start(EVEN)
    for _ in range(2):
        dist.broadcast(np.ones(4), 0)
    if rank == 0:
        dist.broadcast(np.ones(4), 0)  # returns before the headers of the others have arrived
    else:
        with pytest.raises(MismatchError):
            dist.barrier()
    x = np.ones(LARGE)
    with pytest.raises(MismatchError) if rank == 0 else nullcontext():
        dist.all_reduce(x)
    assert (x == world_size).all()
    dist.barrier()


@ranks(EVEN)
def test_messages_inside_a_node_use_shared_memory(rank: int, world_size: int, start: Start) -> None:
    group = start(EVEN)
    peer = rank ^ 1
    for count in (1, 1 << 18):
        for source in (peer, None, peer):
            got = np.full(count, -1.0)
            sent = dist.isend(np.full(count, float(rank)), peer)
            assert dist.recv(got, source) == peer
            assert (got == peer).all()
            sent.wait()
    assert not group.backend._everyone.pipe.is_ready(peer)


class Interrupted(Exception):
    pass


@ranks(EVEN)
@pytest.mark.parametrize("source", [1, None, 2], ids=["near", "any", "far"])
def test_an_interrupted_receive_fails_the_group_on_all_ranks(
    rank: int, world_size: int, start: Start, source: int | None
) -> None:
    start(EVEN)
    group = dist.new_group()

    def interrupt(*_: object) -> None:
        raise Interrupted

    def waits() -> bool:
        near, far = group.backend.local.backend.pipe.table, group.backend._everyone.pipe.table
        return bool(near[ring_words.BUSY] or far[mail_frames.BUSY])

    if rank == 0:
        with alarm(interrupt, waits), pytest.raises(Interrupted):
            group.fast.recv(np.zeros(3), source)
    with pytest.raises(AbortedError, match="Interrupted"):
        group.fast.recv(np.zeros(3), None if rank % 2 else rank ^ 1 if rank else source)
    dist.barrier()


def test_a_rank_that_cannot_make_the_group_ends_the_meeting_of_each_rail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its members check only the rail's own store, and the failing rank may be alone on its node."""

    def refuse(*_: object) -> None:
        raise dist.ResourceError("no port is free")

    monkeypatch.setattr(mesh.Mesh, "make", refuse)
    crew = [replace(each, boot_id=str(number // 2)) for number, each in enumerate(mesh_crew(4))]
    store = HashStore()
    with pytest.raises(dist.ResourceError):
        HybridBackend.make(store, "WORLD", crew, 3, 5.0)
    for rail in range(2):
        meeting = GroupMeeting(PrefixStore(f"rail{rail}", store), crew, 0, 5.0, "making a rail")
        with pytest.raises(dist.ResourceError, match=r"rank 3 \(.*no port is free"):
            meeting.receive("terms")
