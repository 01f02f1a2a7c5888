"""Failures with shared GPU memory, the end of waits, and the reuse of memory; run by test_ipc.py."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from messages.worlds import until
from net.groups import everybody, groups

from fastcoll import ReduceOp
from fastcoll.errors import (
    AbortedError,
    CollectiveTimeoutError,
    FastcollError,
    GroupError,
    UnavailableError,
    UsageError,
)
from fastcoll.gpu.ipc import regions
from fastcoll.gpu.ipc.backend import IpcCarrier
from fastcoll.gpu.staged import StagedCarrier
from fastcoll.kernels.cuda import page as at
from fastcoll.kernels.cuda import steps as kernels

from .fake_runtime import FakeRuntime
from .ipc_simulator import concurrent_kernels
from .ipc_world import SLOT, Ranks, gpu, world

F4 = np.dtype("f4")


# ---- failures ----------------------------------------------------------------------------------------------


def failures(ranks: Ranks, call: Callable[[Any], Any]) -> list[GroupError]:
    """Return the error of each rank's Work, or of the call."""

    def attempt(group: Any) -> Any:
        work = call(group)
        work.wait(timeout=60)
        return work

    found = ranks.attempt(attempt)
    assert all(isinstance(error, GroupError) for error in found), found
    return found


MISMATCHES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "operation": (
        lambda g: (
            g.broadcast(gpu(np.ones(4, F4)), 0, async_op=True)
            if g.rank
            else g.all_reduce(gpu(np.ones(4, F4)), async_op=True)
        ),
        r"rank 0 called all_reduce\(float32, 4 elements, op=SUM\); ranks? 1.* called broadcast\(float32, 4",
    ),
    "size": (
        lambda g: g.all_reduce(gpu(np.ones(2000 if g.rank else 300, F4)), async_op=True),
        r"rank 0 called all_reduce\(float32, 300 elements.*rank.* 1.* called all_reduce\(float32, 2000",
    ),
    "dtype": (lambda g: g.all_reduce(gpu(np.ones(2, "i4" if g.rank else "f4")), async_op=True), "int32"),
    "root": (lambda g: g.broadcast(gpu(np.ones(2, F4)), g.rank % 2, async_op=True), "root=1"),
    "sizes of blocks": (
        lambda g: g.all_gather(
            [gpu(np.ones(5 if r == g.rank == 1 else 4, F4)) for r in range(g.size)],
            gpu(np.ones(5 if g.rank == 1 else 4, F4)),
            async_op=True,
        ),
        "all_gather: the sizes that ranks send and expect differ",
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_calls_that_differ_fail_on_every_rank(what: str) -> None:
    call, message = MISMATCHES[what]
    with world(2 if what == "root" else 3) as ranks:
        ranks.run(lambda group: group.all_reduce(gpu(np.ones(3, F4))))
        for error in failures(ranks, call):
            assert isinstance(error, AbortedError)
        reasons = " ".join(str(group.failure) for group in ranks.groups)
        assert "do not match (call 2 of group" in reasons
        assert re.search(message, reasons), reasons
        with pytest.raises(GroupError):
            ranks.groups[0].all_reduce(gpu(np.ones(3, F4)))


def test_an_abort_ends_waits_on_the_gpu() -> None:
    with world(3) as ranks:
        ranks.run(lambda group: group.all_reduce(gpu(np.ones(3, F4))))

        queued = threading.Barrier(3)

        def call(group: Any) -> Any:
            if group.rank == 2:
                queued.wait(60)
                group.abort("enough")
                return None
            works = [group.all_reduce(gpu(np.ones(700, F4)), async_op=True) for _ in range(3)]
            queued.wait(60)
            works[-1].wait(timeout=60)

        first, second, third = ranks.attempt(call)
        assert third is None
        for error in (first, second):
            assert isinstance(error, AbortedError)
            assert "enough" in str(error)
        ranks.fake.settle()


def test_a_missing_rank_is_named() -> None:
    with world(3) as ranks:
        ranks.run(lambda group: group.all_reduce(gpu(np.ones(3, F4))))

        def begun(rank: int) -> list[int]:
            """Return the last call that each rank has begun, as a rank sees it."""
            shared: Any = ranks.carrier(rank).shared
            return shared.control[at.ARRIVED // 8 :][:3].tolist()

        def call(group: Any) -> Any:
            if group.rank != 1:
                work = group.all_reduce(gpu(np.ones(3, F4)), async_op=True)
                until(lambda: begun(0) == begun(2) == [2, 1, 2])
                group.timeout = 0.5
                work.wait(timeout=60)

        first, _, last = ranks.attempt(call)
        assert isinstance(first, GroupError)
        assert isinstance(last, GroupError)
        errors = [error for error in (first, last) if isinstance(error, CollectiveTimeoutError)]
        assert errors
        assert "not begun on rank 1" in str(errors[0])
        assert errors[0].ranks == (1,)
        ranks.fake.settle()


def test_a_call_whose_slots_a_failed_peer_may_have_overwritten_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with world(2) as ranks:
        ranks.run(lambda group: group.all_reduce(gpu(np.ones(3, F4))))
        works = ranks.run(lambda group: group.all_reduce(gpu(np.ones(3, F4)), async_op=True))
        for work in works:
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
        real, here = ranks.fake.open, []

        def fail(handle: bytes, device: int) -> int:
            if not here:
                here.append(1)
                raise FastcollError("CUDA: mapping a peer's GPU memory failed: invalid device context")
            return real(handle, device)

        monkeypatch.setattr(ranks.fake, "open", fail)
        x = np.ones(3, F4)
        for error in ranks.attempt(lambda group: group.all_reduce(gpu(x.copy()))):
            assert isinstance(error, UnavailableError)
            assert "invalid device context; containers must share" in str(error)
        arrays = [x.copy(), x.copy()]
        ranks.run(lambda group: group.all_reduce(gpu(arrays[group.rank])))
        assert (arrays[0] == 2).all()


def test_no_rank_uses_kernels_if_one_has_none() -> None:
    def fail(kernel: Any) -> Any:
        raise RuntimeError("no compiler")

    with world(2) as ranks, mock.patch.object(kernels, "compiled", fail):
        reasons = ranks.attempt(lambda group: group.devices().meet(0))
        assert reasons == ["rank 0: RuntimeError: no compiler"] * 2


def test_a_function_that_cannot_be_compiled_leaves_the_group_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastcoll.kernels.cuda.reducers import CudaReducer

    def fail(self: Any, n: int) -> None:
        raise UsageError("Numba cannot compile the function")

    with world(2) as ranks:
        with monkeypatch.context() as patched:
            patched.setattr(CudaReducer, "prepare", fail)
            op = ReduceOp.custom(lambda a, b: a)
            for error in ranks.attempt(lambda group: group.all_reduce(gpu(np.ones(3, F4)), op)):
                assert isinstance(error, UsageError)
        arrays = [np.ones(3, F4), np.ones(3, F4)]
        ranks.run(lambda group: group.all_reduce(gpu(arrays[group.rank])))
        assert (arrays[1] == 2).all()


# ---- streams that wait, and memory ---------------------------------------------------------------------------


def test_streams_wait_if_the_driver_can_and_the_wait_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with world(2) as ranks:
        waited = []

        def wait(stream: int, address: int, word: int) -> None:
            def until() -> None:
                from fastcoll.kernels.cuda.steps import load_acquire, nap

                while load_acquire(address) < word:
                    nap()

            waited.append(word)
            ranks.fake.queue("wait", stream, until)

        monkeypatch.setattr(regions, "waits_of_streams", lambda device: wait)
        arrays = [np.ones(700, F4), np.ones(700, F4)]
        ranks.run(lambda group: group.all_reduce(gpu(arrays[group.rank])))
        assert (arrays[0] == 2).all()
        steps = [1] + [1 << at.STEP_BITS | step for step in (1, 2)]
        assert sorted(waited) == sorted(steps * 2), "a word of the peer, on each rank"

        work = ranks.groups[0].all_reduce(gpu(np.ones(3, F4)), async_op=True)
        later = ranks.groups[0].all_reduce(gpu(np.ones(3, F4)), async_op=True)
        with monkeypatch.context() as patch:
            # Allocations that might wait for a waiting GPU were made before.
            for name in ("pinned", "new_stream"):
                patch.delattr(FakeRuntime, name)
            ranks.groups[0].abort("enough")
            for each in (work, later):
                with pytest.raises(AbortedError):
                    each.wait(timeout=60)
            ranks.fake.settle()


def test_memory_is_used_again_once_all_ranks_have_left() -> None:
    fake = FakeRuntime(prompt=True)
    with concurrent_kernels(), fake.installed():
        for _ in range(3):
            with groups(2) as made:
                for group in made:
                    group.gpus.serve(lambda group: IpcCarrier(group, StagedCarrier(group), SLOT))
                works = everybody(made, lambda g: g.all_reduce(gpu(np.ones(3, F4)), async_op=True))
                assert all(work.wait(timeout=60) for work in works)
        assert len([left for left in fake.left() if left.startswith("shareable")]) == 2
        regions._reusable.clear()


def test_a_rank_leaves_after_its_peers_have_read_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank's memory ends with its process."""
    with world(2) as ranks:
        ranks.run(lambda group: group.all_reduce(gpu(np.ones(3, F4))))
        left, leaving, publish_bye = [], threading.Event(), regions.SharedRegions.publish_bye

        def publish(shared: Any, stream: int) -> None:
            publish_bye(shared, stream)
            leaving.set()

        monkeypatch.setattr(regions.SharedRegions, "publish_bye", publish)

        def close(group: Any) -> None:
            if group.rank == 1:
                assert leaving.wait(60)
                time.sleep(0.05)  # time in which a rank that does not wait would be noticed
                assert left == []
            group.close()
            left.append(group.rank)

        ranks.attempt(close)
        assert sorted(left) == [0, 1]
