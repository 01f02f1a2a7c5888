"""Carriers that queue: order of streams, Works, lifetime of memory. One rank of NCCL."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from messages.worlds import until
from together import together

from fastcoll import ReduceOp
from fastcoll.core.work import Work
from fastcoll.errors import AbortedError, CollectiveTimeoutError, FastcollError, GroupError, UsageError
from fastcoll.gpu import idle, own_stream, stream_work
from fastcoll.gpu.device_array import DeviceArray
from fastcoll.gpu.own_stream import OwnStream
from fastcoll.gpu.stream_work import StreamWork, Watcher

from .fake_array import FakeArray
from .fake_runtime import FakeRuntime
from .nccl_world import NcclRanks, world

TWICE = ReduceOp.PREMUL_SUM(2)


@pytest.fixture
def lazy() -> Iterator[NcclRanks]:
    """One rank, on a GPU where nothing runs before a thread waits for it."""
    with world(1, prompt=False) as made:
        yield made


@pytest.fixture
def streams(lazy: NcclRanks) -> Iterator[list[int]]:
    """Two streams of the lazy GPU."""
    made = [lazy.gpu.new_stream(0) for _ in range(2)]
    yield made
    for stream in made:
        lazy.gpu.end_stream(stream)


class Held:
    """One rank, on a GPU that runs by itself, and a stream whose work does not end before `let_go`."""

    def __init__(self, gpu: FakeRuntime, group: Any) -> None:
        self.gpu, self.group = gpu, group
        self.stream = self.gpu.new_stream(0)
        self._gone = threading.Event()
        self.gpu.queue("hold", self.stream, lambda: assert_set(self._gone))

    def array(self) -> FakeArray:
        return FakeArray(np.ones(2, np.float32), self.stream)

    def call(self, x: FakeArray | None = None) -> Any:
        """Begin a call that does not end before `let_go`."""
        return self.group.all_reduce(self.array() if x is None else x, async_op=True)

    def let_go(self) -> None:
        self._gone.set()

    def blocks_a_caller(self) -> bool:
        """Whether a thread waits for room; the watcher's thread waits on the same condition only without Works."""
        watcher = self.group.devices().watcher
        return bool(watcher.outstanding and watcher._changed._waiters)


@pytest.fixture
def held() -> Iterator[Held]:
    with world(1) as ranks:
        made = Held(ranks.gpu, ranks.groups[0])
        yield made
        made.let_go()
        made.gpu.end_stream(made.stream)


def assert_set(event: threading.Event) -> None:
    assert event.wait(60), "nobody let go"


def test_a_call_runs_after_writes_of_its_arrays_and_before_later_reads(
    lazy: NcclRanks, streams: list[int]
) -> None:
    """Each array of a call is waited for on its own stream."""
    gpu, (one, two) = lazy.gpu, streams
    x, out, host, seen = *(np.zeros(2, np.float32) for _ in range(3)), []
    gpu.queue("fill", one, lambda: x.fill(5))
    gpu.queue("fill", two, lambda: out.fill(1))  # must not come after the result
    lazy.groups[0].all_gather([FakeArray(out, two)], FakeArray(x, one))
    gpu.queue("overwrite", one, lambda: x.fill(9))  # must not come before the call has read it
    gpu.queue("fill", one, lambda: host.fill(3))
    lazy.groups[0].all_reduce(FakeArray(host, one), TWICE)
    gpu.queue("read", one, lambda: seen.append(host.copy()))
    assert not host.any()  # the host did not wait
    gpu.settle()
    assert out.tolist() == [5, 5]
    assert seen[0].tolist() == [6, 6]


def test_an_asynchronous_call_orders_the_stream_when_it_is_waited_for(
    lazy: NcclRanks, streams: list[int]
) -> None:
    stream, host = streams[0], np.ones(2, np.float32)
    orders = lambda: lazy.gpu.queued.count(("order", stream))  # noqa: E731
    work: Any = lazy.groups[0].all_reduce(FakeArray(host, stream), TWICE, async_op=True)
    assert orders() == 0
    assert work.wait() is True
    assert orders() <= 1  # none, if the GPU had finished
    lazy.gpu.wait_stream(stream)
    assert host.tolist() == [2, 2]


def test_packed_outputs_are_unpacked_before_the_work_ends(lazy: NcclRanks) -> None:
    base = np.ones((3, 2), np.float32)
    work: Any = lazy.groups[0].all_reduce(FakeArray(base[:, 1]), TWICE, async_op=True)
    work.wait(timeout=60)
    assert base.tolist() == [[1, 2]] * 3


def test_elements_of_an_input_may_share_memory(lazy: NcclRanks) -> None:
    out = np.zeros(3, np.float32)
    lazy.groups[0].all_gather([FakeArray(out)], FakeArray(np.broadcast_to(np.ones(1, np.float32), (3,))))
    lazy.gpu.settle()
    assert out.tolist() == [1, 1, 1]


def test_a_work_completes_when_the_gpu_has_finished(held: Held) -> None:
    work, called = held.call(), []
    work.add_done_callback(lambda w: called.append((w, threading.current_thread().name)))
    assert not work.is_completed()
    assert not work.is_success()
    assert work.exception() is None
    with pytest.raises(CollectiveTimeoutError, match=r"all_reduce\(float32, 2 elements\) on GPU 0"):
        work.wait(timeout=0.01)
    held.let_go()
    assert work.wait(timeout=60)
    assert work.is_success()
    assert work.result() is None
    work.join()
    held.group.close()
    assert called == [(work, "fastcoll-gpu-WORLD")]


def test_a_callback_may_start_a_call_but_not_block(held: Held) -> None:
    done, found = threading.Event(), []
    held.group.all_reduce(FakeArray(np.ones(2, np.float32)))
    second = Held(held.gpu, held.group)

    def callback(_: Work) -> None:
        other = second.call()
        other.wait()
        with pytest.raises(UsageError) as caught:
            other.wait(timeout=60)
        found.append(str(caught.value))
        done.set()

    held.call().add_done_callback(callback)
    held.let_go()
    assert_set(done)
    second.let_go()
    assert "callback may not wait" in found[0]
    held.gpu.end_stream(second.stream)


def test_arrays_stay_alive_until_the_gpu_has_finished(held: Held) -> None:
    x = held.array()
    alive, work = weakref.ref(x), held.call(x)
    del x
    gc.collect()
    assert alive() is not None
    held.let_go()
    work.join()
    gc.collect()
    assert alive() is None


def test_a_gpu_that_fails_fails_the_group(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    work = held.call()
    with monkeypatch.context() as patch:
        patch.setattr(type(held.gpu), "is_past", lambda *_: broken_gpu())
        with pytest.raises(AbortedError, match="illegal address"):
            work.join()
    assert isinstance(held.group.failure, AbortedError)


def broken_gpu() -> None:
    raise FastcollError("CUDA: work queued on a stream failed: an illegal address")


def test_memory_of_hanging_work_is_given_up(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    later = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0], sleep=time.sleep)
    monkeypatch.setattr(stream_work, "time", clock)
    work, end = held.call(), OwnStream.end
    held.group.abort("enough")
    with pytest.raises(AbortedError, match="enough"):
        work.join()

    def let_go_first(*args: Any) -> None:
        """Let the work end once the memory is given up: in the fake, ending the stream waits for it."""
        assert work.is_completed()
        held.let_go()
        end(*args)

    monkeypatch.setattr(OwnStream, "end", let_go_first)
    later[0] = 5.1  # the GPU had its seconds
    assert together(held.group.close) == [None]


def test_the_watching_thread_ends(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_work, "_IDLE", 0.02)
    held.let_go()
    for _ in range(2):
        held.call().join()
        for thread in [t for t in threading.enumerate() if t.name.startswith("fastcoll-gpu-WORLD")]:
            thread.join(60)
            assert not thread.is_alive()


def watching(timeout: float, found: Any = lambda doing: None) -> tuple[Watcher, list[GroupError], list[Any]]:
    """Return a watcher, the failures that it reports, and two Works."""
    failed: list[GroupError] = []
    works = [StreamWork(name, OwnStream(FakeRuntime(), 0), ()) for name in ("one", "two")]
    return Watcher("g", lambda: timeout, found, failed.append), failed, works


def test_a_work_may_outrun_the_death_of_a_peer() -> None:
    """Work queued before a peer died may still end; it fails only if it has not ended at the next check."""
    watcher, failed, (work, other) = watching(1000.0, lambda doing: AbortedError(f"{doing} is in vain"))
    suspect = watcher._judge(work, work.began, None)
    assert watcher._judge(other, other.began, suspect) is other
    assert failed == []
    watcher._judge(other, other.began, other)
    assert str(failed[0]) == "two is in vain"


def test_the_time_of_a_work_begins_when_those_before_it_have_ended() -> None:
    watcher, failed, (first, second) = watching(1000.0)
    first.began = second.began = time.monotonic() - 2000
    watcher._works.extend([first, second])
    assert watcher._judge(first, time.monotonic(), None) is first
    watcher._judge(first, time.monotonic(), first)
    assert "one is not complete after 1000 s" in str(failed[0])
    watcher._end(first)
    assert watcher._judge(second, time.monotonic(), second) is None
    assert len(failed) == 1


def test_a_failure_is_seen_as_soon_as_the_gpu_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that completes the Work may be between the two steps."""
    work, finish = StreamWork("one", OwnStream(FakeRuntime(), 0), ()), StreamWork.complete

    def late(*args: Any) -> None:
        with pytest.raises(AbortedError):
            work.wait(timeout=60)
        finish(*args)

    monkeypatch.setattr(StreamWork, "complete", late)
    work.settle(AbortedError("in vain"))
    assert work.is_completed()


def test_a_thread_that_orders_a_full_stream_does_not_block_the_watcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeRuntime()
    own = OwnStream(gpu, 0)
    work = StreamWork("one", own, [DeviceArray(0, np.dtype("f4"), (0,), 0, 0, None)])
    event = own.event()
    gpu.record(event, own.stream)
    work.queued(own, event, None, None)

    def order(stream: int, event: int) -> None:
        """Run the watcher's part while this blocks."""
        assert together(lambda: [work.is_past(), work.let_go()]) == [[True, None]]
        assert own.event() != event, "another Work got the event that is in use"

    monkeypatch.setattr(gpu, "order", order)
    work.wait()
    assert own.event() == event, "and then it is free"


def test_a_failure_is_seen_while_the_watcher_is_blocked_inside_cuda(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may hold CUDA's lock until a collective ends, for example to load a kernel."""
    held.call()
    real, blocked = type(held.gpu).is_past, threading.Event()

    def block(gpu: FakeRuntime, event: int) -> bool:
        if threading.current_thread().name.startswith("fastcoll-gpu"):
            blocked.set()
            assert_set(held._gone)
        return real(gpu, event)

    monkeypatch.setattr(type(held.gpu), "is_past", block)
    assert_set(blocked)
    held.group.timeout = 0.0
    work = held.call()
    with pytest.raises(CollectiveTimeoutError, match="not complete after"):
        work.join()


def test_kernels_are_loaded_and_memory_is_freed_when_no_call_is_outstanding(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[int] = []
    work = held.call()
    idle.when_idle(lambda: freed.append(1))
    idle.free_unused()
    assert (freed, idle.is_idle()) == ([], False)
    monkeypatch.setattr(
        idle, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: held.let_go())
    )
    idle.await_idle()
    assert work.wait(timeout=60)
    assert idle.is_idle()
    assert freed == []
    held.call().join()
    assert freed == [1]


def test_loading_waits_for_a_peer_only_for_some_seconds(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    later = [0.0]

    def sleep(seconds: float) -> None:
        later[0] += 1

    monkeypatch.setattr(idle, "time", SimpleNamespace(monotonic=lambda: later[0], sleep=sleep))
    held.call()
    idle.await_idle()
    assert later == [5.0]


def test_a_stream_holds_no_more_launches_than_the_drivers_queue(held: Held) -> None:
    own, checks = OwnStream(held.gpu, 0), []

    def check() -> None:
        checks.append(1)
        held.let_go()

    own.follow([held.stream])
    for _ in range(own_stream._PORTIONS + 1):
        own.make_room(own_stream._PORTION, check)
        assert checks == []
    own.make_room(1, check)
    assert checks
    own.end()


def test_a_gpu_is_chosen_by_the_watcher() -> None:
    gpu = FakeRuntime(devices=2)
    own, (watcher, failed, _) = OwnStream(gpu, 1), watching(1000.0)
    work, event = StreamWork("one", own, ()), own.event()
    with gpu.on(1):
        gpu.record(event, own.stream)
    work.queued(own, event, None, None)
    watcher.add(work)
    assert_set(work.end_event)
    watcher.close()
    own.end()
    assert (failed, gpu.left()) == ([], [])


def test_calls_wait_while_too_much_is_outstanding(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_work, "_MOST", 2)
    begun: list[Any] = []

    def waits() -> None:
        until(lambda: held.blocks_a_caller() or len(begun) > 2)
        assert len(begun) == 2
        held.let_go()

    assert together(lambda: begun.extend(held.call() for _ in range(4)), waits) == [None] * 2
    for work in begun:
        work.join()


def test_an_abort_ends_the_wait_for_room(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_work, "_MOST", 1)
    monkeypatch.setattr(stream_work, "_GIVE_UP", 600.0)  # the watcher's end would end the wait, too
    held.call()
    error, _ = together(held.call, lambda: until(held.blocks_a_caller) and held.group.abort("enough"))
    assert isinstance(error, AbortedError)
    assert "enough" in str(error)


def test_a_stream_that_cannot_be_followed_fails_the_group(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peers wait for the call, whose number is used."""
    held.let_go()
    held.call().join()
    with monkeypatch.context() as patch:
        patch.setattr(OwnStream, "follow", lambda *_: broken_gpu())
        with pytest.raises(AbortedError, match="illegal address"):
            held.call()
    assert isinstance(held.group.failure, AbortedError)
