"""FakeRuntime: Runtime's methods over host memory; queued work runs only when a thread waits for it or queries it.

So a carrier that forgets to order two streams, or reuses a buffer too early, reads wrong data. Kernels of Numba's
simulator are queued like copies. With `prompt`, a thread runs queued work at once, and queries never block; that is for
kernels that wait for one another.

    fake = FakeRuntime()
    with fake.installed(): ...

Ranks that are threads of one process may share it: `export` and `open` return the same address. It checks that host
memory is pinned, that memory is not released before the work that uses it has run, that kernels run on the current GPU,
and that threads of fastcoll choose a GPU before they call CUDA, which would otherwise make a context on GPU 0. `left()`
lists what was not given back, `queued` the queued work in order.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from fastcoll.errors import FastcollError

Array = np.ndarray[Any, Any]

_WAIT_SECONDS = 60.0
_LEFT_SECONDS = 30.0
_JUNK = 0xCD


class _Operation:
    """Queued work: a copy or kernel. Without `run`, an event; with `behind`, a wait for another stream's event."""

    def __init__(self, stream: _Stream, run: Callable[[], None] | None, behind: _Operation | None) -> None:
        self.stream = stream
        self.run = run
        self.behind = behind
        self.done = False


class _Stream:
    def __init__(self, device: int) -> None:
        self.device = device
        self.queue: deque[_Operation] = deque()
        self.busy = False


class _Memory:
    """Memory that is released with the last reference to it."""

    def __init__(self, ptr: int, nbytes: int) -> None:
        self.ptr = ptr
        self.nbytes = nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.nbytes,), "data": (self.ptr, False)}


class FakeRuntime:
    """The calls of `fastcoll.gpu.runtime.Runtime`.

    Attributes:
        queued: (what, stream) of all work queued so far.
        apart: (device, peer) pairs of GPUs that do not reach each other.
        boards: boards of devices that are instances of a GPU.
    """

    def __init__(self, devices: int = 1, prompt: bool = False, name: int = 0) -> None:
        """Make some GPUs; `name` makes their UUIDs different from those of another FakeRuntime."""
        self.devices = devices
        self.apart: set[tuple[int, int]] = set()
        self.queued: list[tuple[str, int]] = []
        self.boards: dict[int, bytes] = {}
        self._prompt, self._name = prompt, name
        self._changed = threading.Condition(threading.RLock())
        self._here = threading.local()
        self._defaults = {device: _Stream(device) for device in range(devices)}
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, _Operation | None] = {}
        self._event_devices: dict[int, int] = {}
        self._places: list[tuple[int, int, int]] = []
        self._memory: dict[int, Array] = {}
        self._pinned: dict[int, int] = {}
        self._freed: list[tuple[int, int]] = []
        self._shared: set[int] = set()
        self._opened: list[int] = []
        self._last = 1000
        self._failures: list[BaseException] = []

    # ---- for tests -------------------------------------------------------------------------------------

    @contextmanager
    def installed(self) -> Iterator[FakeRuntime]:
        """Replace `fastcoll.gpu.runtime.runtime()`, and run the simulator's kernels here."""
        from fastcoll.gpu import runtime as module

        with mock.patch.object(module, "Runtime", return_value=self), self._kernels():
            module.runtime.cache_clear()
            try:
                yield self
            finally:
                module.runtime.cache_clear()

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        import numba

        if not numba.config.ENABLE_CUDASIM:
            yield
            return
        from fastcoll.kernels.cuda import kernel as launch

        before = launch._Simulated.__call__
        call = getattr(before, "real", before)  # not the one of another FakeRuntime

        # The simulator's kernels share a global, so they run one at a time, except those that wait for one another.
        turn = contextlib.nullcontext() if self._prompt else threading.Lock()

        def queue(kernel: Any, items: int, stream: int, *words: int) -> None:
            def run() -> None:
                with turn:
                    call(kernel, items, stream, *words)

            self.queue("kernel", stream, run)

        queue.real = call  # type: ignore[attr-defined]
        with mock.patch.object(launch._Simulated, "__call__", queue):
            yield

    def place(self, x: Array, device: int) -> None:
        """Assign the memory of `x` to a GPU other than number 0."""
        # An array without elements also has an address, which no other object has while the array lives.
        self._places.append((x.ctypes.data, x.ctypes.data + max(x.nbytes, 1), device))

    def left(self) -> list[str]:
        """List the objects that were made and not given back."""
        kinds = {
            "stream": self._streams,
            "event": self._events,
            "pinned memory": self._pinned,
            "shareable memory": self._shared,
            "a peer's memory": self._opened,
        }
        return [f"{kind} {number}" for kind, numbers in kinds.items() for number in list(numbers)]

    def await_nothing_left(self) -> None:
        """Fail if anything is left after the threads that may still hold it had time to end.

        It fails before the 60 s limit of a test of ranks, so that the failure names what is left.
        """
        end, collect = time.monotonic() + _LEFT_SECONDS, 0.0
        while left := self.left():
            if time.monotonic() >= collect:  # rarely, because it delays those threads
                gc.collect()
                collect = time.monotonic() + 2
            assert time.monotonic() < end, left
            time.sleep(0.01)

    def settle(self) -> None:
        """Run everything that is queued, as a GPU does in time."""
        for stream in [*self._defaults.values(), *self._streams.values()]:
            self._until(self._push(stream, None))

    def forget(self) -> None:
        """Drop released memory, and stop detecting uses of it: between tests that share this object."""
        self.settle()
        for start, _ in self._freed:
            self._memory.pop(start, None)
        self._freed.clear()
        self.queued.clear()

    def queue(self, what: str, stream: int, run: Callable[[], None]) -> None:
        """Queue `run` on a stream, as kernels are."""
        place = self._stream(stream)
        assert place.device == self.current(), (
            f"a {what} for a stream of GPU {place.device}: another is current"
        )
        self.queued.append((what, stream))
        self._push(place, run)

    def device_of(self, stream: int) -> int:
        """Return the GPU of a stream."""
        return self._stream(stream).device

    def current(self) -> int:
        """Return this thread's current GPU."""
        return getattr(self._here, "device", 0)

    # ---- devices -----------------------------------------------------------------------------------------

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        assert 0 <= device < self.devices, f"there is no GPU {device}"
        before, self._here.chosen = self.current(), True
        self._here.device = device
        try:
            yield
        finally:
            self._here.device = before

    def count(self) -> int:
        return self.devices

    def device_at(self, address: int) -> int:
        for start, end, device in self._places:
            if start <= address < end:
                return device
        return 0

    def uuid(self, device: int) -> bytes:
        return bytes([self._name, device] * 8)

    def board(self, device: int) -> bytes:
        return self.boards.get(device, self.uuid(device))

    def can_reach(self, device: int, peer: int) -> bool:
        return (device, peer) not in self.apart

    # ---- memory ------------------------------------------------------------------------------------------

    def pinned(self, nbytes: int) -> Array:
        memory = _Memory(self._new_memory(nbytes, 0), nbytes)
        self._pinned[memory.ptr] = nbytes
        weakref.finalize(memory, self._unpin, memory.ptr, nbytes)
        return np.asarray(memory)

    def _unpin(self, start: int, nbytes: int) -> None:
        del self._pinned[start]
        self._freed.append((start, start + nbytes))

    def allocate(self, nbytes: int, device: int, stream: int | None = None) -> Any:
        memory = _Memory(self._new_memory(nbytes, device), nbytes)
        with self.on(device):
            place = self._stream(stream or 0)
        # Work that the stream holds by then may still use it.
        span = (memory.ptr, memory.ptr + nbytes)
        weakref.finalize(memory, self._push, place, lambda: self._freed.append(span))
        return memory

    def allocate_shareable(self, nbytes: int, device: int) -> int:
        address = self._new_memory(nbytes, device)
        self._memory[address][:] = 0
        self._shared.add(address)
        return address

    def to_host(self, host: Array, address: int, stream: int) -> None:
        self._check_pinned(host)
        self._copy("to_host", host.ctypes.data, address, host.nbytes, stream)

    def to_device(self, address: int, host: Array, stream: int) -> None:
        self._check_pinned(host)
        self._copy("to_device", address, host.ctypes.data, host.nbytes, stream)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._copy("copy", dst, src, nbytes, stream)

    def _new_memory(self, nbytes: int, device: int) -> int:
        room = np.full(max(nbytes, 1) + 256, _JUNK, np.uint8)
        memory = room[-room.ctypes.data % 256 :][: max(nbytes, 1)]
        address = memory.ctypes.data
        # Kept to the end, so that no other array gets these addresses and a late use is detected.
        self._memory[address] = memory
        if device:
            self.place(memory, device)
        return address

    def _copy(self, what: str, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._check_context()
        if nbytes == 0:
            return

        def run() -> None:
            self._check_alive(dst, nbytes)
            self._check_alive(src, nbytes)
            ctypes.memmove(dst, src, nbytes)

        self.queued.append((what, stream))
        self._push(self._stream(stream), run)

    def _check_context(self) -> None:
        here = threading.current_thread()
        ours = here.name.startswith("fastcoll") and self.devices > 1
        assert not ours or hasattr(self._here, "chosen"), f"{here.name} would make a context on GPU 0"

    def _check_pinned(self, host: Array) -> None:
        start, end = host.ctypes.data, host.ctypes.data + host.nbytes
        # A copy: making a list of pairs may run the garbage collector, which releases pinned memory.
        pinned = self._pinned.copy()
        inside = any(first <= start and end <= first + nbytes for first, nbytes in pinned.items())
        assert inside or not host.nbytes, "the host's side of a copy is not pinned"

    def _check_alive(self, address: int, nbytes: int) -> None:
        for start, end in list(self._freed):
            assert address + nbytes <= start or end <= address, "used after it was released"

    # ---- streams and events ------------------------------------------------------------------------------

    def new_stream(self, device: int, urgent: bool = False) -> int:
        number = self._number()
        self._streams[number] = _Stream(device)
        return number

    def end_stream(self, stream: int) -> None:
        self._check_context()
        self._until(self._push(self._streams[stream], None))
        del self._streams[stream]

    def wait_stream(self, stream: int) -> None:
        self._check_context()
        self._until(self._push(self._stream(stream), None))

    def new_event(self, device: int) -> int:
        number = self._number()
        self._events[number], self._event_devices[number] = None, device
        return number

    def end_event(self, event: int) -> None:
        self._check_context()
        del self._events[event]

    def record(self, event: int, stream: int) -> None:
        self._check_context()
        place = self._stream(stream)
        assert place.device == self._event_devices[event], "an event is recorded on streams of its own GPU"
        self.queued.append(("record", stream))
        self._events[event] = self._push(place, None)

    def order(self, stream: int, event: int) -> None:
        self._check_context()
        self.queued.append(("order", stream))
        self._push(self._stream(stream), None, self._events[event])

    def is_past(self, event: int) -> bool:
        self._check_context()
        mark = self._events[event]
        if mark is not None and not self._prompt:
            self._until(mark)
        self._raise()
        return mark is None or mark.done

    # ---- memory of other processes -----------------------------------------------------------------------

    def export(self, address: int) -> bytes:
        assert address in self._shared, "only memory of allocate_shareable can be exported"
        return address.to_bytes(8, "little").ljust(64, b"\0")

    def open(self, handle: bytes, device: int) -> int:
        address = int.from_bytes(handle[:8], "little")
        self._opened.append(address)
        return address

    def shut(self, address: int) -> None:
        self._opened.remove(address)

    # ---- running queued work -----------------------------------------------------------------------------

    def _number(self) -> int:
        with self._changed:
            self._last += 1
            return self._last

    def _stream(self, number: int) -> _Stream:
        # 0, 1 and 2 are the default streams: of the current GPU; not per thread, to keep it simple.
        return self._defaults[self.current()] if number < 3 else self._streams[number]

    def _push(
        self, stream: _Stream, run: Callable[[], None] | None, behind: _Operation | None = None
    ) -> _Operation:
        operation = _Operation(stream, run, behind)
        with self._changed:
            stream.queue.append(operation)
            self._changed.notify_all()
        if self._prompt:
            threading.Thread(target=self._until, args=(operation,), daemon=True).start()
        return operation

    def _until(self, wanted: _Operation) -> None:
        """Run the operations that must precede an operation, and itself, unless another thread runs them."""
        while True:
            with self._changed:
                if wanted.done:
                    self._raise()
                    return
                stream = self._runnable(wanted.stream)
                if stream is None:
                    assert self._changed.wait(_WAIT_SECONDS), "what is queued does not end"
                    continue
                stream.busy = True
                operation = stream.queue[0]
            try:
                with self.on(stream.device):
                    if operation.run is not None:
                        operation.run()
            except BaseException as error:
                self._failures.append(error)
            finally:
                with self._changed:
                    operation.done = True
                    stream.queue.popleft()
                    stream.busy = False
                    self._changed.notify_all()

    def _runnable(self, stream: _Stream) -> _Stream | None:
        """Return the stream whose first operation can run now and lets `stream` proceed.

        None: another thread runs it.
        """
        while not stream.busy:
            behind = stream.queue[0].behind
            if behind is None or behind.done:
                return stream
            stream = behind.stream
        return None

    def _raise(self) -> None:
        if self._failures:
            raise FastcollError(f"CUDA: what was queued failed: {self._failures[0]!r}") from self._failures[0]
