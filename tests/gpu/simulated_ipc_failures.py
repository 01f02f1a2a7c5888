"""Failures with shared GPU memory, the end of waits, and the reuse of memory; run by test_ipc.py."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
from messages.worlds import until
from net.groups import everybody

from fastcoll import ReduceOp
from fastcoll.errors import (
    AbortedError,
    CollectiveTimeoutError,
    FastcollError,
    GroupError,
    UnavailableError,
    UsageError,
)
from fastcoll.gpu import idle
from fastcoll.gpu.ipc import regions
from fastcoll.gpu.ipc.backend import IpcCarrier
from fastcoll.gpu.own_stream import OwnStream
from fastcoll.gpu.staged import StagedCarrier
from fastcoll.kernels.cuda import page as at
from fastcoll.kernels.cuda import steps as kernels
from fastcoll.kernels.cuda.reducers import CudaReducer

from .fake_array import FakeArray
from .fake_runtime import FakeRuntime
from .ipc_simulator import concurrent_kernels
from .ipc_world import SLOT, IpcRanks, world
from .thread_ranks import ones, served


def meet(ranks: IpcRanks) -> None:
    """Sum ones on all ranks, and check the result."""
    arrays = ranks.each(lambda rank: np.ones(3, "f4"))
    ranks.run(lambda rank, group: group.all_reduce(ranks.array(rank, arrays[rank])))
    assert all((x == ranks.size).all() for x in arrays)


@contextmanager
def met(size: int) -> Iterator[IpcRanks]:
    """A world whose ranks have made a call."""
    with world(size) as ranks:
        meet(ranks)
        yield ranks


def reduce(ranks: IpcRanks, rank: int, count: int = 3) -> Any:
    """Begin a rank's call."""
    return ranks.groups[rank].all_reduce(ones(ranks, rank, count), async_op=True)


# ---- failures ----------------------------------------------------------------------------------------------


MISMATCHES: dict[str, tuple[Callable[[Any, int, Callable[..., Any]], Any], str]] = {
    "operation": (
        lambda g, r, x: g.broadcast(x(4), 0, async_op=True) if r else g.all_reduce(x(4), async_op=True),
        r"rank 0 called all_reduce\(float32, 4 elements, op=SUM\); ranks? 1.* called broadcast\(float32, 4",
    ),
    "size": (
        lambda g, r, x: g.all_reduce(x(2000 if r else 300), async_op=True),
        r"rank 0 called all_reduce\(float32, 300 elements.*rank.* 1.* called all_reduce\(float32, 2000",
    ),
    "dtype": (lambda g, r, x: g.all_reduce(x(2, "i4" if r else "f4"), async_op=True), "int32"),
    "root": (lambda g, r, x: g.broadcast(x(2), r % 2, async_op=True), "root=1"),
    "sizes of blocks": (
        lambda g, r, x: g.all_gather(
            [x(5 if p == r == 1 else 4) for p in range(3)], x(5 if r == 1 else 4), async_op=True
        ),
        "all_gather: the sizes that ranks send and expect differ",
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_calls_that_differ_fail_on_every_rank(what: str) -> None:
    call, message = MISMATCHES[what]

    def does(rank: int, group: Any) -> None:
        array = lambda count, dtype="f4": ranks.array(rank, np.ones(count, dtype))  # noqa: E731
        call(group, rank, array).wait(timeout=60)

    with met(2 if what == "root" else 3) as ranks:
        errors = ranks.attempt(does)
        assert all(isinstance(error, AbortedError) for error in errors), errors
        reasons = " ".join(str(group.failure) for group in ranks.groups)
        assert "do not match (call 2 of group" in reasons
        assert re.search(message, reasons), reasons
        with pytest.raises(GroupError):
            reduce(ranks, 0)


def test_an_abort_ends_waits_on_the_gpu() -> None:
    queued = threading.Barrier(3)

    def call(rank: int, group: Any) -> None:
        works = [] if rank == 2 else [reduce(ranks, rank, 700) for _ in range(3)]
        queued.wait(60)
        if rank == 2:
            group.abort("enough")
        else:
            with pytest.raises(AbortedError, match="enough"):
                works[-1].wait(timeout=60)

    with met(3) as ranks:
        assert ranks.attempt(call) == [None] * 3
        ranks.gpu.settle()


def test_a_missing_rank_is_named() -> None:
    def begun(rank: int) -> list[int]:
        """Return the last call that each rank has begun, as a rank sees it."""
        shared: Any = ranks.carrier(rank).shared
        return shared.control[at.ARRIVED // 8 :][:3].tolist()

    def call(rank: int, group: Any) -> None:
        if rank != 1:
            work = reduce(ranks, rank)
            until(lambda: begun(0) == begun(2) == [2, 1, 2])
            group.timeout = 0.1
            work.wait(timeout=60)

    with met(3) as ranks:
        found = ranks.attempt(call)[::2]
        assert all(isinstance(error, GroupError) for error in found), found
        first = next(error for error in found if isinstance(error, CollectiveTimeoutError))
        assert "not begun on rank 1" in str(first)
        assert first.ranks == (1,)
        ranks.gpu.settle()


def test_a_call_whose_slots_a_failed_peer_may_have_overwritten_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with met(2) as ranks:
        for work in ranks.run(lambda rank, group: reduce(ranks, rank)):
            assert work.wait(timeout=60)
        # Its own stream has finished, but rank 0 has failed the group before this rank checks.
        monkeypatch.setattr(ranks.carrier(1), "look", lambda doing: None)
        ranks.groups[0].abort("spoilt")
        monitor = ranks.groups[1].monitor
        until(lambda: ranks.groups[1].failure is not None or monitor.decide([], "") is not None)
        ranks.carrier(1).judge(2)
        assert "spoilt" in str(ranks.groups[1].failure)


def test_memory_that_cannot_be_mapped_raises_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with world(2) as ranks:
        real, here = ranks.gpu.open, []

        def fail(handle: bytes, device: int) -> int:
            if not here:
                here.append(1)
                raise FastcollError("CUDA: mapping a peer's GPU memory failed: invalid device context")
            return real(handle, device)

        monkeypatch.setattr(ranks.gpu, "open", fail)
        for error in ranks.attempt(lambda rank, group: reduce(ranks, rank)):
            assert isinstance(error, UnavailableError)
            assert "invalid device context; containers must share" in str(error)
        meet(ranks)


def test_no_rank_uses_kernels_if_one_has_none() -> None:
    def fail(kernel: Any) -> Any:
        raise RuntimeError("no compiler")

    with world(2) as ranks, mock.patch.object(kernels, "compiled", fail):
        reasons = ranks.attempt(lambda rank, group: group.devices().meet(0))
        assert reasons == ["rank 0: RuntimeError: no compiler"] * 2


def test_a_function_that_cannot_be_compiled_leaves_the_group_usable() -> None:
    def fail(self: Any, n: int) -> None:
        raise UsageError("Numba cannot compile the function")

    with world(2) as ranks:
        with mock.patch.object(CudaReducer, "prepare", fail):
            op = ReduceOp.custom(lambda a, b: a)
            errors = ranks.attempt(lambda rank, group: group.all_reduce(ones(ranks, rank), op))
        assert [type(error) for error in errors] == [UsageError] * 2
        meet(ranks)


# ---- streams that wait, and memory ---------------------------------------------------------------------------


def test_streams_wait_if_the_driver_can_and_the_wait_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    def wait(stream: int, address: int, word: int) -> None:
        def until() -> None:
            while kernels.load_acquire(address) < word:
                kernels.nap()

        waited.append(word)
        ranks.gpu.queue("wait", stream, until)

    monkeypatch.setattr(regions, "waits_of_streams", lambda device: wait)
    with world(2) as ranks:
        ranks.run(lambda rank, group: group.all_reduce(ones(ranks, rank, 700)))
        steps = [1] + [1 << at.STEP_BITS | step for step in (1, 2)]
        assert sorted(waited) == sorted(steps * 2), "a word of the peer, on each rank"
        works = [reduce(ranks, 0) for _ in range(2)]
        with monkeypatch.context() as patch:
            # Allocations that might wait for a waiting GPU were made before.
            for name in ("pinned", "new_stream"):
                patch.delattr(FakeRuntime, name)
            ranks.groups[0].abort("enough")
            for work in works:
                with pytest.raises(AbortedError):
                    work.wait(timeout=60)
            ranks.gpu.settle()


def test_memory_is_used_again_once_all_ranks_have_left() -> None:
    fake = FakeRuntime(prompt=True)
    with concurrent_kernels(), fake.installed():
        for _ in range(3):
            with served(2, lambda group: IpcCarrier(group, StagedCarrier(group), SLOT)) as made:
                works = everybody(made, lambda g: g.all_reduce(FakeArray(np.ones(3)), async_op=True))
                assert all(work.wait(timeout=60) for work in works)
        assert len([left for left in fake.left() if left.startswith("shareable")]) == 2
        regions._reusable.clear()


def test_a_region_is_mapped_once_however_many_groups_use_it() -> None:
    gpu = FakeRuntime()
    handle = gpu.export(gpu.allocate_shareable(8, 0))
    first, second = regions._map(gpu, 0, handle), regions._map(gpu, 0, handle)
    assert first == second
    regions._unmap(gpu, 0, handle)
    idle.free_unused()
    assert gpu.left()[1:] == [f"a peer's memory {first}"]
    regions._unmap(gpu, 0, handle)
    idle.free_unused()
    assert gpu.left()[1:] == []


def test_a_large_call_is_queued_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has more launches than the driver's queue holds."""
    counted: list[int] = []
    monkeypatch.setattr(OwnStream, "make_room", lambda own, launches, check: counted.append(launches))
    with met(2) as ranks:
        counted.clear()
        ranks.run(lambda rank, group: group.all_reduce(ones(ranks, rank, 20_000)))
        assert len(counted) > 2 * 10
        assert max(counted) <= 8


def test_a_rank_leaves_after_its_peers_have_read_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank's memory ends with its process."""
    left: list[int] = []
    polls: list[bool] = []
    is_free = regions.Region.is_free

    def noted(*args: Any) -> bool:
        polls.append(is_free(*args))
        return polls[-1]

    def close(rank: int, group: Any) -> None:
        if rank == 1:
            until(lambda: polls[2:] or left)  # rank 0 has looked, has gone on waiting, and has looked again
            assert (left, any(polls)) == ([], False)
        group.close()
        left.append(rank)

    with met(2) as ranks:
        monkeypatch.setattr(regions, "_BYE_SECONDS", 60.0)
        monkeypatch.setattr(regions.Region, "is_free", noted)
        assert ranks.attempt(close) == [None] * 2
        assert sorted(left) == [0, 1]
