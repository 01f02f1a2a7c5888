"""Ranks in threads of this process, each with a fake GPU of its own and one communicator of FakeNccl.

    with world(3) as ranks:
        ranks.run(lambda rank, group: ...)

The CPU backend is a rendezvous of the threads. NumPy replaces fastcoll's kernels for reductions and packing, queued on
the fake streams: the kernels have tests of their own, and Numba's simulator is slow.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import oracle
import pytest
from together import together

from fastcoll.core.backend import Backend
from fastcoll.core.gate import Gate
from fastcoll.core.group import ProcessGroup
from fastcoll.core.monitor import Monitor
from fastcoll.core.operation import Operation
from fastcoll.core.reduce_op import ReduceOp
from fastcoll.errors import AbortedError, GroupError, PeerDiedError
from fastcoll.gpu.nccl import bindings
from fastcoll.gpu.nccl.backend import NcclCarrier

from .fake_array import FakeArray
from .fake_nccl import FakeNccl
from .fake_runtime import FakeRuntime

Array = np.ndarray[Any, Any]


class StrictRuntime(FakeRuntime):
    """A runtime where a copy to overlapping memory is an error, because CUDA leaves it undefined."""

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        assert dst + nbytes <= src or src + nbytes <= dst, "a copy overlaps itself"
        super().copy(dst, src, nbytes, stream)


class Meeting:
    """The rendezvous of the CPU backend's all_gather; broken when the group fails."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failures: list[GroupError] = []
        self.died: list[int] = []
        self._changed = threading.Condition()
        self._rows: dict[tuple[int, int], Any] = {}

    def exchange(self, number: int, rank: int, row: Any) -> list[Any]:
        """Return every rank's row of its call `number`."""
        with self._changed:
            self._rows[number, rank] = row
            self._changed.notify_all()

            def all_here() -> bool:
                return all((number, peer) in self._rows for peer in range(self.size))

            assert self._changed.wait_for(lambda: all_here() or self.failures, 120.0), "a rank did not come"
            if not all_here():
                raise self.failures[0].with_traceback(None)
            return [self._rows[number, peer] for peer in range(self.size)]

    def fail(self, error: GroupError) -> None:
        """Break the meeting; the first reason stays."""
        with self._changed:
            self.failures.append(error)
            self._changed.notify_all()


class ThreadMonitor(Monitor):
    """Reports the ranks in `meeting.died` as dead."""

    def __init__(self, meeting: Meeting) -> None:
        self.failure = self.record = None
        self._meeting = meeting

    def decide(self, needed: Sequence[int], doing: str) -> GroupError | None:
        if self._meeting.failures:
            return self._meeting.failures[0]
        died = self._meeting.died
        return PeerDiedError(f"rank {died[0]} died; {doing}", died) if died else None

    def _publish(self, state: int, reason: str) -> None: ...
    def _states(self) -> list[int]:
        return []

    def _reason(self, rank: int) -> str:
        return ""

    def _dead(self, working: Any) -> list[Any]:
        return []


class ThreadBackend(Backend):
    """The part of a CPU backend that GPU arrays need; ranks are threads."""

    name = "threads"

    def __init__(self, meeting: Meeting, rank: int, timeout: float) -> None:
        self.gate = Gate("threads", range(meeting.size), rank, timeout)
        self.monitor = ThreadMonitor(meeting)
        self.messages: Any = None
        self.calls = 0
        self.meeting = meeting

    def plan(self, operation: Operation, timeout: float | None = None) -> Any:
        if operation.kind != "all_gather":
            return lambda: None

        def call() -> None:
            self.calls += 1
            rows = self.meeting.exchange(self.calls, self.gate.rank, np.array(operation.inputs[0]))
            for out, row in zip(operation.outputs, rows, strict=True):
                out[...] = row

        return call

    def fail(self, error: GroupError) -> None:
        if self.gate.failure is None:
            self.gate.failure = self.meeting.failures[0] if self.meeting.failures else error
            self.meeting.fail(self.gate.failure)

    def limit(self, seconds: float) -> None:
        self.gate.timeout = seconds

    def close(self, reason: GroupError | None) -> None: ...
    def disown(self, error: GroupError) -> None: ...


class ThreadGroup(ProcessGroup):  # type: ignore[misc]
    """A group on a ThreadBackend, which aborts its carrier of GPU arrays when it is aborted."""

    def __init__(self, meeting: Meeting, rank: int, timeout: float) -> None:
        super().__init__(ThreadBackend(meeting, rank, timeout))

    def abort(self, reason: str = "abort() was called") -> None:
        self.fail(AbortedError(reason))
        if self.gpus.carrier is not None:
            self.gpus.carrier.abort()


class Ranks:
    """The ranks of a world.

    Attributes:
        gpu, nccl: the fakes.
        groups: one per rank.
    """

    def __init__(self, gpu: FakeRuntime, nccl: FakeNccl, size: int, timeout: float) -> None:
        self.gpu, self.nccl, self.size = gpu, nccl, size
        self.meeting = Meeting(size)
        self.groups = [ThreadGroup(self.meeting, rank, timeout) for rank in range(size)]
        self._kept: list[Array] = []  # the fake identifies a GPU by addresses, which no other array may get
        # Real ranks are processes, which share no default stream: one's would wait for another's collective.
        self._streams = [gpu.new_stream(0) for _ in range(size)] if gpu.devices < size else []
        for group in self.groups:
            group.gpus.serve(NcclCarrier)

    def run(self, does: Callable[[int, ThreadGroup], Any]) -> list[Any]:
        """Run a function on all ranks at once, and let the GPUs finish; raise a rank's error."""
        results = self.attempt(does)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            raise next((f for f in failures if not isinstance(f, AssertionError)), failures[0])
        self.gpu.settle()
        return results

    def attempt(self, does: Callable[[int, ThreadGroup], Any]) -> list[Any]:
        """Run a function on all ranks at once; return the result or exception of each rank."""

        def on(rank: int) -> Any:
            with self.gpu.on(rank if self.gpu.devices > 1 else 0):
                return does(rank, self.groups[rank])

        return together(*[lambda rank=rank: on(rank) for rank in range(self.size)])

    def give_up_after(self, seconds: float) -> None:
        """Set the timeout from now on, also for outstanding work; work that must succeed had longer."""
        for group in self.groups:
            group.timeout = seconds

    def array(self, rank: int, host: Array, stream: int | None = None) -> FakeArray:
        """Return an array over the memory of `host`, on the rank's GPU."""
        self._kept.append(host if host.base is None else host.base)
        if self.gpu.devices > 1 and (host.size or host.base is None):
            start = host if host.flags.c_contiguous else host.base
            self.gpu.place(start, rank)
        if stream is None and self._streams:
            stream = self._streams[rank]
        return FakeArray(host, stream)

    def close(self) -> None:
        """Close the groups together, as ranks do."""
        self.attempt(lambda rank, group: group.close())
        for stream in self._streams:
            self.gpu.end_stream(stream)


@contextmanager
def world(
    size: int,
    timeout: float = 60.0,
    devices: int | None = None,
    prompt: bool = True,
    version: int = 22005,
) -> Iterator[Ranks]:
    """Make some ranks; at the end nothing may be left, and no rule of NCCL broken."""
    with fakes(size if devices is None else devices, prompt, version) as (gpu, nccl):
        ranks = Ranks(gpu, nccl, size, timeout)
        try:
            yield ranks
        finally:
            ranks.close()


@contextmanager
def fakes(
    devices: int = 1, prompt: bool = True, version: int = 22005
) -> Iterator[tuple[FakeRuntime, FakeNccl]]:
    """Install fake GPUs and a fake NCCL; the end is as in `world`."""
    gpu = StrictRuntime(devices=devices, prompt=prompt)
    nccl = FakeNccl(gpu, version)
    binding = bindings.NcclLibrary(nccl)
    with gpu.installed(), kernels(gpu), mock.patch.object(bindings, "library", return_value=binding):
        with mock.patch.object(bindings, "cupy"):
            yield gpu, nccl
        assert nccl.violations == []
        assert all(comm.ended or comm.aborted for comm in nccl.comms)
        gpu.await_nothing_left()


def ones(ranks: Ranks, rank: int, count: int = 3) -> FakeArray:
    """Return an array of a rank's GPU."""
    return ranks.array(rank, np.ones(count, np.float32))


def assert_ends(work: Any, kind: type[GroupError], text: str) -> None:
    """Wait for the error with which a Work ends."""
    with pytest.raises(kind, match=text):
        work.join()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), kind)


# ---- fastcoll's kernels, by NumPy ---------------------------------------------------------------------


@contextmanager
def kernels(gpu: FakeRuntime) -> Iterator[None]:
    """Return replacements for the parts of `kernels.cuda` that carriers use."""
    reducing, moving = ModuleType("reducers"), ModuleType("packing")
    reducing.MOST_SOURCES = 4  # type: ignore[attr-defined]
    reducing.cuda_reducer = lambda op, dtype: _Reducer(gpu, op, dtype)  # type: ignore[attr-defined]
    moving.Strided = lambda *layout: layout  # type: ignore[attr-defined]
    moving.pack = lambda dense, x, stream, back=False: gpu.queue(  # type: ignore[attr-defined]
        "unpack" if back else "pack", stream, lambda: _pack(dense, x, back)
    )
    moving.scale = lambda dst, src, count, dtype, factor, stream: gpu.queue(  # type: ignore[attr-defined]
        "scale", stream, lambda: _scale(dst, src, count, dtype, factor)
    )
    names = {f"fastcoll.kernels.cuda.{module.__name__}": module for module in (reducing, moving)}
    package = ModuleType("fastcoll.kernels.cuda")
    package.__path__ = []
    # Not mock.patch.dict: at its end it removes every module imported meanwhile. Numba's cannot be imported twice, and
    # fastcoll's would exist twice.
    with pytest.MonkeyPatch.context() as patch:
        for name, module in {"fastcoll.kernels.cuda": package, **names}.items():
            patch.setitem(sys.modules, name, module)
        yield


class _Reducer:
    def __init__(self, gpu: FakeRuntime, op: ReduceOp, dtype: np.dtype[Any]) -> None:
        self._gpu, self._op, self._dtype = gpu, op, dtype

    def launch(self, dst: int, srcs: Sequence[int], count: int, stream: int) -> None:
        if not count:
            return
        assert 0 < len(srcs) <= 4
        op, dtype, nbytes = self._op, self._dtype, count * self._dtype.itemsize

        def run() -> None:
            sources = [_bytes_at(src, nbytes).view(dtype) for src in srcs]
            if op.function is not None:
                function = op.function
                total = reduce(
                    lambda a, b: np.array([function(x, y) for x, y in zip(a, b, strict=True)], dtype), sources
                )
            else:
                total = oracle.reduced(sources, op)
            _bytes_at(dst, nbytes).view(dtype)[:] = total

        self._gpu.queue("kernel", stream, run)


def _scale(dst: int, src: int, count: int, dtype: np.dtype[Any], factor: Any) -> None:
    nbytes, by = count * dtype.itemsize, np.zeros(1, dtype)
    by[0] = factor
    _bytes_at(dst, nbytes).view(dtype)[:] = _bytes_at(src, nbytes).view(dtype) * by[0]


def _bytes_at(address: int, nbytes: int) -> Array:
    return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), np.uint8)


def _pack(address: int, layout: tuple[Any, ...], back: bool) -> None:
    first, shape, strides, itemsize = layout
    place = mock.Mock(spec=["__array_interface__"])
    place.__array_interface__ = {
        "version": 3, "typestr": f"|u{itemsize}", "shape": shape, "strides": strides, "data": (first, False),
    }  # fmt: skip
    view = np.asarray(place)
    dense = _bytes_at(address, view.nbytes).view(view.dtype).reshape(view.shape)
    dst, src = (view, dense) if back else (dense, view)
    dst[...] = src
