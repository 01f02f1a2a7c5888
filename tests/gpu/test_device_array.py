"""The import of GPU arrays, and the fidelity of the fake runtime."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fastcoll.errors import ArrayError, FastcollError
from fastcoll.gpu import device_array, runtime
from fastcoll.gpu.device_array import current_stream, describe

from .fake_array import FakeArray
from .fake_runtime import FakeRuntime


def imported(x, writable=True):
    return device_array.import_array(x, writable=writable, what="tensor")


class Saying:
    """An array with a different interface."""

    def __init__(self, x, **other):
        self.__cuda_array_interface__ = {**FakeArray(x).__cuda_array_interface__, **other}


def test_a_dense_array_is_taken_as_it_is(two_gpus):
    x = np.ones((2, 3), "f4")
    two_gpus.place(x, 1)
    array = imported(FakeArray(x, stream=7)).array
    assert (array.address, array.dtype, array.shape, array.ndim) == (x.ctypes.data, x.dtype, x.shape, 2)
    assert (array.device, array.stream) == (1, 7)
    assert repr(array) == "float32 array of shape (2, 3) on GPU 1"
    flat = array.reshape(-1)
    assert (flat[2:5].address, flat[2:5].size) == (x.ctypes.data + 8, 3)
    assert flat[2:5].owner is array.owner
    assert flat[5:2].size == 0
    assert flat[:3].overlaps(flat[2:])
    assert not flat[:3].overlaps(flat[3:])


@pytest.mark.usefixtures("gpu")
def test_dense_strides_are_not_packed():
    x = np.ones((1, 3), "f4")
    assert imported(Saying(x, strides=(12, 4))).array.address == x.ctypes.data
    assert imported(FakeArray(np.ones((0, 3))[:, ::2])).array.size == 0
    assert imported(FakeArray(np.array(3.0)), writable=False).array.shape == ()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (FakeArray(np.ones(3), read_only=True), "read-only float64 array"),
        (FakeArray(np.broadcast_to(np.ones(3), (2, 3)), read_only=False), "share memory"),
        (Saying(np.ones(3), mask=np.ones(3, bool)), "mask"),
    ],
)
def test_refused(x, message):
    with pytest.raises(ArrayError, match=message):
        imported(x)


def test_another_device_is_refused():
    x = SimpleNamespace(__dlpack_device__=lambda: (10, 0))
    with pytest.raises(ArrayError, match="DLPack's type 10"):
        describe(x, "tensor", None)


@pytest.mark.parametrize(
    ("module", "stream", "want"), [("cupy", None, 41), ("cupy", 40, 41), ("other", None, 0)]
)
def test_cupy_is_asked_for_the_stream_of_the_arrays_gpu(two_gpus, monkeypatch, module, stream, want):
    """The interface of CuPy's arrays names no stream, or that of the current GPU."""
    ask = SimpleNamespace(get_current_stream=lambda device: SimpleNamespace(ptr=40 + device))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=ask))
    x = np.ones(3)
    two_gpus.place(x, 1)
    described = type("ndarray", (FakeArray,), {"__module__": module})(x, stream)
    assert imported(described).array.stream == want


@pytest.mark.usefixtures("gpu")
def test_a_users_subclass_of_a_tensor_has_torchs_stream(monkeypatch):
    current = SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=7 + device))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=current))
    tensor = type("Tensor", (), {"__module__": "torch"})
    assert current_stream(type("Mine", (tensor,), {"__module__": "program"})(), 1) == 8
    assert current_stream(object(), 1, unknown=3) == 3


def test_the_fake_has_the_real_ones_calls():
    for name, real in inspect.getmembers(runtime.Runtime, inspect.isfunction):
        if not name.startswith("_"):
            fake = getattr(FakeRuntime, name)
            assert list(inspect.signature(fake).parameters) == list(inspect.signature(real).parameters), name


def test_the_fake_detects_errors(gpu):
    x, stream = np.ones(4, "u1"), gpu.new_stream(0)
    with pytest.raises(AssertionError, match="not pinned"):
        gpu.to_host(np.zeros(4, "u1"), x.ctypes.data, stream)
    host = gpu.pinned(4)
    gpu.to_host(host, x.ctypes.data, stream)
    assert host.tolist() != [1] * 4  # no thread has waited
    del host
    with pytest.raises(FastcollError, match="used after it was released"):
        gpu.wait_stream(stream)
    gpu._failures.clear()
    gpu.end_stream(stream)


def test_streams_run_in_the_order_that_events_make(gpu):
    one, two, event, seen = gpu.new_stream(0), gpu.new_stream(0), gpu.new_event(0), []
    gpu.queue("kernel", one, lambda: seen.append(1))
    gpu.record(event, one)
    gpu.queue("kernel", one, lambda: seen.append(3))
    gpu.order(two, event)
    gpu.queue("kernel", two, lambda: seen.append(2))
    gpu.wait_stream(two)
    assert seen == [1, 2]
    assert gpu.is_past(event)
    gpu.wait_stream(one)
    assert seen == [1, 2, 3]
    for stream in (one, two):
        gpu.end_stream(stream)
    gpu.end_event(event)
