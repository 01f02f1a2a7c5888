"""Runtime's calls of CUDA, on a fake CuPy with the traps of the real one."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from together import together

from fastcoll.errors import FastcollError, UnavailableError
from fastcoll.gpu import idle, runtime

from .fake_cupy import FakeCupy


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setattr(runtime, "cupy", lambda: fake)
    return fake


def test_calls_of_cuda(cupy: FakeCupy) -> None:
    real = runtime.Runtime()
    with real.on(0):
        cupy.calls.clear()
        assert real.new_stream(1) == 5
        assert cupy.calls == [
            ("getDevice",), ("setDevice", 1), ("streamCreateWithPriority", 1, 0), ("setDevice", 0)
        ]  # fmt: skip
        cupy.calls.clear()
        host = np.zeros(4)
        real.to_host(host, 64, 5)
        real.to_device(64, host[:0], 5)
        real.copy(64, 128, 8, 5)
        assert cupy.calls == [
            ("memcpyAsync", host.ctypes.data, 64, 32, 2, 5),
            ("memcpyAsync", 64, 128, 8, 3, 5),
        ]
        assert real.is_past(7) is False
        cupy.refused.add("eventRecord")
        with pytest.raises(FastcollError, match="recording an event failed: cudaErrorInvalid"):
            real.record(7, 5)


def test_pinned_memory_is_freed_when_no_collective_is_outstanding(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = runtime.Runtime()
    watcher = SimpleNamespace(outstanding=1)
    monkeypatch.setattr(idle, "_watchers", [watcher])
    words = real.pinned(16)
    address = words.ctypes.data
    words[:] = 7
    view = words[8:]
    del words
    real.pinned(1)
    assert view.tolist() == [7] * 8
    del view
    real.pinned(1)
    assert ("freeHost", address) not in cupy.calls
    watcher.outstanding = 0
    real.pinned(1)
    assert ("freeHost", address) in cupy.calls


@pytest.mark.usefixtures("cupy")
def test_instances_of_a_gpu_are_on_one_board(monkeypatch: pytest.MonkeyPatch) -> None:
    buses = {0: b"0000:1b:00.0", 1: b"0000:1b:00.0", 2: b"0000:2c:00.0"}
    monkeypatch.setattr(runtime, "driver", lambda: SimpleNamespace(bus_id=buses.get))
    first, second, other = map(runtime.Runtime().board, range(3))
    assert first == second != other
    assert len(first) == 16


def test_a_thread_makes_no_context_on_a_gpu_that_it_does_not_use(cupy: FakeCupy) -> None:
    real = runtime.Runtime()

    def work() -> None:
        with real.on(3):
            real.new_stream(3)
        with real.on(3):
            real.is_past(7)

    assert together(work) == [None]
    assert cupy.contexts == {3}


def test_a_thread_returns_to_its_own_gpu(cupy: FakeCupy) -> None:
    real = runtime.Runtime()
    with real.on(2):
        with real.on(3):
            assert cupy.getDevice() == 3
        assert cupy.getDevice() == 2


def test_memory_is_zero_whatever_the_default_stream_still_holds(cupy: FakeCupy) -> None:
    address = runtime.Runtime().allocate_shareable(16, 0)
    assert ctypes.string_at(address, 16) == bytes(16)
    ctypes.memset(address, 7, 16)
    cupy.settle()
    assert ctypes.string_at(address, 16) == b"\7" * 16, "what was written since has gone"
    assert [call[0] for call in cupy.calls[-2:]] == ["streamSynchronize", "streamDestroy"]


@pytest.mark.parametrize("handle", [0, 1, 2, 77])
def test_allocating_leaves_the_stream_that_the_user_chose(cupy: FakeCupy, handle: int) -> None:
    chosen = cupy.cuda.Stream(9)
    chosen.use()
    memory = runtime.Runtime().allocate(16, 0, handle)
    assert memory.stream.ptr == {1: 0}.get(handle, handle)
    assert cupy.cuda.Stream.current is chosen
    assert runtime.Runtime().allocate(16, 0).stream is chosen


@pytest.mark.usefixtures("cupy")
def test_a_gpu_is_named_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy truncates the UUID at its first zero byte, so two ranks' UUIDs may have different lengths."""
    name = b"\x13\x09\0\x61" * 4
    monkeypatch.setattr(runtime, "driver", lambda: SimpleNamespace(uuid=lambda device: name))
    assert runtime.Runtime().uuid(0) == name


def test_without_the_extra_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    runtime.cupy.cache_clear()
    with pytest.raises(UnavailableError, match=r"pip install '\.\[cuda12\]'"):
        runtime.cupy()
