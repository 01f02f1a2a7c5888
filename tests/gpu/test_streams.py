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
from together import together

from fastcoll import ReduceOp
from fastcoll.core.work import Work
from fastcoll.errors import AbortedError, CollectiveTimeoutError, FastcollError, GroupError, UsageError
from fastcoll.gpu import stream_work
from fastcoll.gpu.device_array import DeviceArray
from fastcoll.gpu.stream_work import OwnStream, StreamWork

from .fake_array import FakeArray
from .fake_runtime import FakeRuntime
from .nccl_world import Ranks, world

TWICE = ReduceOp.PREMUL_SUM(2)


@pytest.fixture
def lazy() -> Iterator[Ranks]:
    """One rank, on a GPU where nothing runs before a thread waits for it."""
    with world(1, prompt=False) as made:
        yield made


@pytest.fixture
def prompt() -> Iterator[Ranks]:
    """One rank, on a GPU that runs by itself, and whose streams can be blocked."""
    with world(1) as made:
        yield made


class Held:
    """Work on a stream that ends at `let_go`."""

    def __init__(self, ranks: Ranks, stream: int) -> None:
        self._gone = threading.Event()
        ranks.gpu.queue("hold", stream, lambda: assert_set(self._gone))

    def let_go(self) -> None:
        self._gone.set()


def assert_set(event: threading.Event) -> None:
    assert event.wait(60), "nobody let go"


def fill(ranks: Ranks, host: np.ndarray, value: float, stream: int) -> None:
    ranks.gpu.queue("fill", stream, lambda: host.fill(value))


def test_a_call_runs_after_writes_of_its_arrays_and_before_later_reads(lazy: Ranks) -> None:
    stream, host, seen = lazy.gpu.new_stream(0), np.zeros(4, np.float32), []
    fill(lazy, host, 3, stream)
    lazy.groups[0].all_reduce(FakeArray(host, stream), TWICE)
    lazy.gpu.queue("read", stream, lambda: seen.append(host.copy()))
    assert not host.any()  # the host did not wait
    lazy.gpu.wait_stream(stream)
    assert seen[0].tolist() == [6] * 4
    lazy.gpu.end_stream(stream)


def test_all_arrays_of_a_call_are_waited_for_on_their_own_streams(lazy: Ranks) -> None:
    streams = [lazy.gpu.new_stream(0) for _ in range(2)]
    x, out = np.zeros(2, np.float32), np.zeros(2, np.float32)
    fill(lazy, x, 5, streams[0])
    fill(lazy, out, 1, streams[1])  # must not come after the result
    lazy.groups[0].all_gather([FakeArray(out, streams[1])], FakeArray(x, streams[0]))
    lazy.gpu.queue("overwrite", streams[0], lambda: x.fill(9))  # must not come before the call has read it
    lazy.gpu.settle()
    assert out.tolist() == [5, 5]
    for stream in streams:
        lazy.gpu.end_stream(stream)


def test_an_asynchronous_call_orders_the_stream_when_it_is_waited_for(lazy: Ranks) -> None:
    stream, host = lazy.gpu.new_stream(0), np.ones(2, np.float32)
    orders = lambda: lazy.gpu.queued.count(("order", stream))  # noqa: E731
    work = lazy.groups[0].all_reduce(FakeArray(host, stream), TWICE, async_op=True)
    assert isinstance(work, Work)
    assert orders() == 0
    assert work.wait() is True
    assert orders() <= 1  # none, if the GPU had finished
    lazy.gpu.wait_stream(stream)
    assert host.tolist() == [2, 2]
    lazy.gpu.end_stream(stream)


def test_packed_outputs_are_unpacked_before_the_work_ends(lazy: Ranks) -> None:
    base = np.ones((3, 2), np.float32)
    work = lazy.groups[0].all_reduce(FakeArray(base[:, 1]), TWICE, async_op=True)
    assert work is not None
    work.wait(timeout=60)
    assert base[:, 1].tolist() == [2, 2, 2]
    assert base[:, 0].tolist() == [1, 1, 1]


def test_a_work_completes_when_the_gpu_has_finished(prompt: Ranks) -> None:
    stream = prompt.gpu.new_stream(0)
    held = Held(prompt, stream)
    work = prompt.groups[0].all_reduce(FakeArray(np.ones(2, np.float32), stream), async_op=True)
    assert work is not None
    called: list[Any] = []
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
    prompt.groups[0].close()
    assert called == [(work, "fastcoll-gpu-threads")]
    prompt.gpu.end_stream(stream)


def test_a_callback_may_start_a_call_but_not_block(prompt: Ranks) -> None:
    group, stream, host = prompt.groups[0], prompt.gpu.new_stream(0), np.ones(2, np.float32)
    group.all_reduce(FakeArray(np.ones(2, np.float32)))
    held, done, found = Held(prompt, stream), threading.Event(), []

    def callback(_: Work) -> None:
        other = group.all_reduce(FakeArray(host, stream), async_op=True)
        assert other is not None
        other.wait()
        try:
            other.wait(timeout=1)
        except UsageError as error:
            found.append(str(error))
        done.set()

    work = group.all_reduce(FakeArray(np.ones(2, np.float32)), async_op=True)
    assert work is not None
    work.add_done_callback(callback)
    assert_set(done)
    held.let_go()
    assert "callback may not wait" in found[0]
    prompt.gpu.settle()
    prompt.gpu.end_stream(stream)


def test_arrays_stay_alive_until_the_gpu_has_finished(prompt: Ranks) -> None:
    stream = prompt.gpu.new_stream(0)
    held = Held(prompt, stream)
    x = FakeArray(np.ones(2, np.float32), stream)
    alive = weakref.ref(x)
    work = prompt.groups[0].all_reduce(x, async_op=True)
    assert work is not None
    del x
    gc.collect()
    assert alive() is not None
    held.let_go()
    work.join()
    gc.collect()
    assert alive() is None
    prompt.gpu.end_stream(stream)


def test_a_gpu_that_fails_fails_the_group(prompt: Ranks) -> None:
    group, stream = prompt.groups[0], prompt.gpu.new_stream(0)
    held = Held(prompt, stream)
    work = group.all_reduce(FakeArray(np.ones(2, np.float32), stream), async_op=True)
    assert work is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(prompt.gpu), "is_past", lambda *_: broken_gpu())
        with pytest.raises(AbortedError, match="illegal address"):
            work.join()
    assert isinstance(group.failure, AbortedError)
    held.let_go()
    prompt.gpu.end_stream(stream)


def broken_gpu() -> None:
    raise FastcollError("CUDA: work queued on a stream failed: an illegal address")


def test_memory_of_hanging_work_is_given_up(prompt: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    later = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0], sleep=time.sleep)
    monkeypatch.setattr(stream_work, "time", clock)
    group, stream = prompt.groups[0], prompt.gpu.new_stream(0)
    held = Held(prompt, stream)
    work = group.all_reduce(FakeArray(np.ones(2, np.float32), stream), async_op=True)
    assert work is not None
    group.abort("enough")
    with pytest.raises(AbortedError, match="enough"):
        work.join()
    end = OwnStream.end

    def let_go_first(*args: Any) -> None:
        """Let the work end once the memory is given up: in the fake, ending the stream waits for it."""
        assert work.is_completed()
        held.let_go()
        end(*args)

    monkeypatch.setattr(OwnStream, "end", let_go_first)
    later[0] = 5.1  # the GPU had its seconds
    assert together(group.close) == [None]
    prompt.gpu.end_stream(stream)


def test_the_watching_thread_ends(prompt: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_work, "_IDLE", 0.02)
    group = prompt.groups[0]
    for _ in range(2):
        work = group.all_reduce(FakeArray(np.ones(2, np.float32)), async_op=True)
        assert work is not None
        work.join()
        watchers = [t for t in threading.enumerate() if t.name == "fastcoll-gpu-threads"]
        for thread in watchers:
            thread.join(60)
            assert not thread.is_alive()


def test_a_work_may_outrun_the_death_of_a_peer() -> None:
    """Work queued before a peer died may still end; it fails only if it has not ended at the next check."""
    failed: list[GroupError] = []
    watcher = stream_work.Watcher(
        "g", lambda: 10.0, lambda doing: AbortedError(f"{doing} is in vain"), failed.append
    )
    work, other = (
        StreamWork("one", OwnStream(FakeRuntime(), 0), ()),
        StreamWork("two", OwnStream(FakeRuntime(), 0), ()),
    )
    suspect = watcher._judge(work, work.began, None)
    assert watcher._judge(other, other.began, suspect) is other
    assert failed == []
    watcher._judge(other, other.began, other)
    assert str(failed[0]) == "two is in vain"


def test_the_time_of_a_work_begins_when_those_before_it_have_ended() -> None:
    failed: list[GroupError] = []
    watcher = stream_work.Watcher("g", lambda: 1000.0, lambda doing: None, failed.append)
    first, second = (StreamWork(name, OwnStream(FakeRuntime(), 0), ()) for name in ("one", "two"))
    first.began = second.began = time.monotonic() - 2000
    watcher._works.extend([first, second])
    watcher._judge(first, time.monotonic(), None)
    assert "one is not complete after 1000 s" in str(failed[0])
    watcher._end(first)
    watcher._judge(second, time.monotonic(), None)
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
    own, seen = OwnStream(gpu, 0), []
    work = StreamWork("one", own, [DeviceArray(0, np.dtype("f4"), (0,), 0, 0, None)])
    event = own.event()
    gpu.record(event, own.stream)
    work.queued(own, event, None, None)

    def order(stream: int, event: int) -> None:
        """Run the watcher's part while this blocks."""
        watcher = threading.Thread(target=lambda: seen.append(work.is_past()) or work.let_go())
        watcher.start()
        watcher.join(60)
        assert own.event() != event, "another Work got the event that is in use"

    monkeypatch.setattr(gpu, "order", order)
    work.wait()
    assert seen == [True]
    assert own.event() == event, "and then it is free"


def test_a_gpu_is_chosen_by_the_watcher() -> None:
    gpu = FakeRuntime(devices=2)
    own, failed = OwnStream(gpu, 1), []
    watcher = stream_work.Watcher("g", lambda: 10.0, lambda doing: None, failed.append)
    work, event = StreamWork("one", own, ()), own.event()
    with gpu.on(1):
        gpu.record(event, own.stream)
    work.queued(own, event, None, None)
    watcher.add(work)
    assert_set(work.end_event)
    watcher.close()
    own.end()
    assert (failed, gpu.left()) == ([], [])


def test_calls_wait_while_too_much_is_outstanding(prompt: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_work, "_MOST", 2)
    group, stream, begun = prompt.groups[0], prompt.gpu.new_stream(0), []
    held = Held(prompt, stream)

    def calls() -> None:
        while len(begun) < 4:
            begun.append(group.all_reduce(FakeArray(np.ones(2, np.float32), stream), async_op=True))

    thread = threading.Thread(target=calls)
    thread.start()
    while len(begun) < 2:
        thread.join(0.001)
    thread.join(0.05)
    assert len(begun) == 2
    held.let_go()
    thread.join(60)
    assert len(begun) == 4
    for work in begun:
        work.join()
    prompt.gpu.end_stream(stream)


def test_an_abort_ends_the_wait_for_room(prompt: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_work, "_MOST", 1)
    group, stream = prompt.groups[0], prompt.gpu.new_stream(0)
    held = Held(prompt, stream)
    group.all_reduce(FakeArray(np.ones(2, np.float32), stream), async_op=True)
    timer = threading.Timer(0.05, group.abort, ["enough"])
    timer.start()
    with pytest.raises(AbortedError, match="enough"):
        group.all_reduce(FakeArray(np.ones(2, np.float32), stream))
    timer.join()
    held.let_go()
    prompt.gpu.end_stream(stream)


def test_a_stream_that_cannot_be_followed_fails_the_group(
    prompt: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peers wait for the call, whose number is used."""
    group = prompt.groups[0]
    group.all_reduce(FakeArray(np.ones(2, np.float32)))
    with monkeypatch.context() as patch:
        patch.setattr(OwnStream, "follow", lambda *_: broken_gpu())
        with pytest.raises(AbortedError, match="illegal address"):
            group.all_reduce(FakeArray(np.ones(2, np.float32)))
    assert isinstance(group.failure, AbortedError)


def test_read_only_arrays_and_overlapping_elements_are_refused(lazy: Ranks) -> None:
    group = lazy.groups[0]
    with pytest.raises(UsageError, match="read-only"):
        group.all_reduce(FakeArray(np.ones(2, np.float32), read_only=True))
    spread = np.broadcast_to(np.ones(1, np.float32), (3,))
    with pytest.raises(UsageError, match="elements share memory"):
        group.all_reduce(FakeArray(spread, read_only=False))
    out = np.zeros(3, np.float32)
    group.all_gather([FakeArray(out)], FakeArray(spread))
    lazy.gpu.settle()
    assert out.tolist() == [1, 1, 1]
