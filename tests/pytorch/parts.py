"""What needs no second rank: the store, the threads of futures, the adapter for a torch that is not here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastcoll.errors import AbortedError, CollectiveTimeoutError, StoreError, StoreTimeoutError
from fastcoll.reduce_op import ReduceOp
from fastcoll.torch.backend import BackendCalls, FastcollBackend
from fastcoll.torch.calls import TorchCalls
from fastcoll.torch.completion import Completions
from fastcoll.torch.dynamo import methods_of
from fastcoll.torch.meeting import meet_anew
from fastcoll.torch.process_group import FastcollProcessGroup
from fastcoll.torch.registration import adapter
from fastcoll.torch.store import TorchStore
from fastcoll.torch.work import PendingWork
from fastcoll.work import Work

# What torch's dispatcher calls on a backend written in Python (PyBackend.hpp).
BACKEND_METHODS = """
    allreduce allreduce_coalesced reduce reduce_scatter reduce_scatter_single reduce_scatter_single_coalesced
    broadcast allgather all_gather_single all_gather_single_coalesced allgather_coalesced gather scatter alltoall
    all_to_all_single barrier monitored_barrier send recv recv_anysource set_timeout abort shutdown getBackendName
""".split()


def torchs_store_is_one_of_ours() -> None:
    store = TorchStore(dist.HashStore())
    store.set("a", b"\x00\xff")
    assert store.add("n", 2) == 2
    assert store.add("n", 3) == 5
    assert store.multi_get(["a", "n"]) == [b"\x00\xff", b"5"] == store.fetch(["a", "n"], 1.0)
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    assert store.peek(["b", "a"]) == [None, b"\x00\xff"]
    with pytest.raises(StoreTimeoutError, match=r"'b'.*0.01 s"):
        store.wait(["b"], 0.01)


def a_lost_store_says_so() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    store = TorchStore(client)
    store.set("a", "1")
    del server
    with pytest.raises(StoreError, match="torch's store failed"):
        store.multi_set(["a", "b", "c"], ["1", "2", "3"])  # what was sent last before the end is not missed


def a_store_that_lives_on_has_a_meeting_for_each_start() -> None:
    """Also after ranks that came to one in vain, and after one of another size."""
    store = TorchStore(dist.HashStore())
    met = {_meeting(store, 3) for _ in range(3)}
    with pytest.raises(StoreTimeoutError, match=r"as rank 0 of 3: rank\(s\) 1, 2 did not come"):
        meet_anew(store, 0, 3, 0.01)
    with pytest.raises(StoreTimeoutError, match=r"as rank 1 of 3: others, which rank 0 knows, did not"):
        meet_anew(store, 1, 3, 0.01)
    met |= {_meeting(store, 3), _meeting(store, 2), _meeting(store, 1), _meeting(store, 3)}
    assert len(met) == 7
    with pytest.raises(StoreTimeoutError, match=r"as rank 1 of 2: rank 0 did not come within 0\.01 s"):
        meet_anew(store, 1, 2, 0.01)


def _meeting(store: TorchStore, size: int) -> str:
    """The name on which `size` ranks agree, of which rank 0 comes last."""
    with ThreadPoolExecutor(size) as threads:
        names = [threads.submit(meet_anew, store, rank, size, 30.0) for rank in reversed(range(size))]
    (name,) = {each.result() for each in names}
    return name


def completions_wait_for_one_another_without_harm() -> None:
    completions, inner, outer = Completions(), threading.Event(), threading.Event()

    def wait_for_inner() -> None:
        assert inner.wait(10)
        outer.set()

    completions.submit(wait_for_inner)
    completions.submit(inner.set)
    assert outer.wait(10)
    assert completions.settle(10)


def completions_where_no_thread_can_be_started() -> None:
    completions, done = Completions(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        completions.submit(partial(done.append, 1))
        assert done == [1]
    assert completions.settle(0)


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def several_operations_are_one() -> None:
    """They share the time that waiting may take, and the future has the error of any."""
    first, second = Work("first"), Work("second")
    both = PendingWork([first, second], [], limit=60)
    limits: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "wait", lambda _, limit: limits.append(limit))
        both.wait()
        both.wait(timedelta(seconds=3))
    assert 60 >= limits[0] > limits[1] > 3 >= limits[2] > limits[3] > 0
    with pytest.raises(CollectiveTimeoutError, match=r"2 operations are not complete after 0\.01 s"):
        both.wait(timedelta(milliseconds=10))
    future = both.get_future()
    second._finish()
    assert not future.done()
    first._finish(error=AbortedError("tested"))
    with pytest.raises(RuntimeError, match="tested"):
        future.wait()
    with pytest.raises(AbortedError, match="tested"):
        both.wait()


class Recorder:
    """Stands for rank 1 of a group of fastcoll: remembers the calls."""

    rank, size = 1, 3

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Work | None:
            later = options.pop("async_op", name in ("isend", "irecv"))
            self.calls.append((name, later, *args, *options.values()))
            work = Work(name)
            work._finish(2)
            return work if later else None

        return call


class BackendWithConstructor:
    """As torch's Backend is from 2.14 on."""

    def __init__(self, rank: int, size: int) -> None:
        self.place = rank, size


class NewBackend(BackendCalls, BackendWithConstructor):
    def __init__(self, group: Any) -> None:
        super().__init__(group.rank, group.size)
        self.fastcoll = group


def the_adapter_for_newer_torch_calls_the_group() -> None:
    missing = [name for name in BACKEND_METHODS if name not in vars(BackendCalls) | vars(TorchCalls)]
    assert missing == []
    assert {method.__name__ for method in methods_of(NewBackend)} >= set(BACKEND_METHODS)
    group = Recorder()
    backend = NewBackend(group)
    now, later, some = dist.AllreduceOptions(), dist.AllreduceOptions(), dist.GatherOptions()
    now.asyncOp, now.reduceOp, some.rootRank = False, dist.ReduceOp.MAX, 1
    barrier = dist.BarrierOptions()
    barrier.timeout, barrier.asyncOp = timedelta(seconds=3), False
    x, y, z = torch.ones(1), torch.ones(2), torch.ones(3)
    assert backend.place == (1, 3)
    assert backend.getBackendName() == "fastcoll"
    for work in (
        backend.allreduce([x], now),
        backend.allreduce([x], later),
        backend.gather([[x, y, z]], [y], some),
        backend.all_to_all_single(x, y, [], [], later),
        backend.all_gather_single_coalesced([x, y], [y, z], later),
        backend.recv([x], 2, 7),
    ):
        assert work.wait(timedelta(seconds=1))
        assert work.get_future().wait() is not None
    assert backend.recv_anysource([x], 7).source_rank() == 2
    backend.monitored_barrier(barrier, True)
    backend.barrier(barrier)
    assert group.calls == [
        ("all_reduce", False, x, ReduceOp.MAX),
        ("all_reduce", True, x, ReduceOp.SUM),
        ("gather", True, y, [x, y, z], 1),
        ("all_to_all_single", True, x, y, None, None),
        ("all_gather_single", True, x, y),
        ("all_gather_single", True, y, z),
        ("irecv", True, x, 2, 7),
        ("irecv", True, x, None, 7),
        ("monitored_barrier", False, 3.0),
        ("barrier", False, 3.0),
    ]


def the_adapter_that_this_torch_takes() -> None:
    """With a newer torch this fails: then the other checks must run with the other adapter."""
    assert adapter() is FastcollProcessGroup
    with pytest.raises(TypeError, match="No constructor"):
        FastcollBackend(Recorder())


CHECKS = (
    torchs_store_is_one_of_ours,
    a_lost_store_says_so,
    a_store_that_lives_on_has_a_meeting_for_each_start,
    completions_wait_for_one_another_without_harm,
    completions_where_no_thread_can_be_started,
    several_operations_are_one,
    the_adapter_for_newer_torch_calls_the_group,
    the_adapter_that_this_torch_takes,
)
