"""Checks for one rank: the store, and the threads of futures."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from fastcoll.core.work import Work
from fastcoll.errors import AbortedError, CollectiveTimeoutError, StoreError, StoreTimeoutError, UsageError
from fastcoll.store.views import TorchStore
from fastcoll.system.processes import Member
from fastcoll.torch.jobs import make_group, meet_anew
from fastcoll.torch.registration import says_more_ranks
from fastcoll.torch.work import Completions, PendingWork


def check_torchs_store_is_one_of_ours() -> None:
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


def check_waits_end_soon_after_the_key_is_set() -> None:
    """A wait takes at most a quarter longer than needed, because making a group takes several waits in a row."""
    store, clock = TorchStore(dist.HashStore()), [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastcoll.store.store.time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
        for there in (0.001, 0.009, 0.1):
            clock[0] = 0.0
            patch.setattr(store, "check", lambda _, at=there: clock[0] >= at)
            store.wait(["a"], 1.0)
            assert there <= clock[0] <= 1.25 * there + 0.0002


def check_a_lost_store_says_so() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=60))
    store = TorchStore(client)
    store.set("a", "1")
    del server
    with pytest.raises(StoreError, match="torch's store failed"):
        store.add("n", 1)  # it has an answer; what `set` sends may seem to arrive


def check_a_persistent_store_has_a_meeting_for_each_start() -> None:
    """Also after a meeting that was not completed, and after a meeting of another size."""
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
    """Return the name that `size` ranks agree on; rank 0 joins last."""
    with ThreadPoolExecutor(size) as threads:
        names = [threads.submit(meet_anew, store, rank, size, 120.0) for rank in reversed(range(size))]
    (name,) = {each.result() for each in names}
    return name


def check_completions_wait_for_one_another_without_harm() -> None:
    completions, inner, outer = Completions(), threading.Event(), threading.Event()

    def wait_for_inner() -> None:
        assert inner.wait(60)
        outer.set()

    completions.submit(wait_for_inner)
    completions.submit(inner.set)
    assert outer.wait(60)
    assert completions.settle(60)


def check_completions_where_no_thread_can_be_started() -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    completions, done = Completions(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        completions.submit(partial(done.append, 1))
        assert done == [1]
    assert completions.settle(0)


def check_several_operations_are_one() -> None:
    """Several operations share one timeout, and the future gets the error of any of them."""
    first, second = Work("first"), Work("second")
    both = PendingWork([first, second], [], limit=60)
    limits: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastcoll.torch.work.time", SimpleNamespace(monotonic=lambda: 2.0 * len(limits)))
        patch.setattr(Work, "wait", lambda _, limit: limits.append(limit))
        both.wait()
        both.wait(timedelta(seconds=3))
    assert limits == [60, 58, 3, 1]
    with pytest.raises(CollectiveTimeoutError, match=r"2 operations are not complete after 0\.01 s"):
        both.wait(timedelta(milliseconds=10))
    future = both.get_future()
    second.complete()
    assert not future.done()
    first.complete(error=AbortedError("tested"))
    with pytest.raises(RuntimeError, match="tested"):
        future.wait()
    with pytest.raises(AbortedError, match="tested"):
        both.wait()


def check_a_launcher_of_several_ranks_is_seen() -> None:
    one = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    several = {**one, "OMPI_COMM_WORLD_SIZE": "4"}
    assert says_more_ranks(several) == "OMPI_COMM_WORLD_SIZE"
    assert says_more_ranks(one) == says_more_ranks({**several, "LOCAL_WORLD_SIZE": "1"}) == ""


def check_groups_that_only_their_members_make_name_the_cure() -> None:
    store = dist.HashStore()
    other = replace(Member.here(0, 2, "cpu:auto"), start_time=0)  # rank 0 of another group of the same name
    TorchStore(store).set_new(["fastcoll/0/join/terms", "fastcoll/0/join/member/0"], [other.to_bytes()] * 2)
    with pytest.raises(UsageError, match=r"claimed by two processes.*use_local_synchronization=True"):
        make_group(store, "3", 0, 2, 10.0, [1, 3], 4)
