"""Copies between a GPU and pinned host memory, on streams of their own, for one group.

Pinned memory and events are reused, because pinning costs more than a copy of the same size.

Before the host queues a copy, it waits for the array's stream; this wait ends with an error at the group's timeout, or
when the group fails. So a queued copy waits for no other work. It ends by itself, and its memory can then be reused.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ..arrays.arrays import Array
from ..core.group import ProcessGroup
from ..errors import CollectiveTimeoutError, NotInitializedError
from .device_array import DeviceArray
from .runtime import Runtime, runtime

_SPINS = 50
_NAPS = (1e-5, 1e-3)  # seconds between two polls of an event: the first, and the longest
_CLOSE_SECONDS = 5.0

LEAST = 4096
KEPT = 64 << 20
"""How many bytes a pool may keep in free buffers; other buffers are freed after use. An estimate, not measured."""

Marks = list[tuple[int, int]]
"""Pairs of a GPU and an event on it, behind the work that must be waited for."""


class CudaEvents:
    """A pool of events. Thread-safe, because list operations are."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._all: Marks = []

    def take(self, device: int) -> int:
        """Return an event of a GPU; give it back with `give`."""
        try:
            return self._free[device].pop()
        except IndexError:
            event = runtime().new_event(device)
            self._all.append((device, event))
            return event

    def give(self, device: int, events: Sequence[int]) -> None:
        """Take back events that are no longer in use."""
        self._free[device].extend(events)

    def close(self) -> None:
        """Destroy all events, including those that were not given back."""
        ended, self._all = self._all, []
        self._free.clear()
        for device, event in ended:
            with runtime().on(device):
                runtime().end_event(event)


class PinnedPool:
    """A pool of pinned buffers, by size; sizes are powers of two. Thread-safe."""

    def __init__(self, runtime: Runtime) -> None:
        self.kept = 0  # bytes in free buffers
        self._runtime = runtime
        self._free: dict[int, list[Array]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def take(self, nbytes: int) -> Array:
        """Return a buffer of at least `nbytes`; give it back with `give`, or drop it."""
        size = max(LEAST, 1 << (nbytes - 1).bit_length()) if nbytes else LEAST
        with self._lock:
            if free := self._free.get(size):
                self.kept -= size
                return free.pop()
        return self._runtime.pinned(size)

    def give(self, buffer: Array) -> None:
        """Take back a buffer that is no longer in use."""
        with self._lock:
            if not self._closed and self.kept + buffer.nbytes <= KEPT:
                self.kept += buffer.nbytes
                self._free.setdefault(buffer.nbytes, []).append(buffer)

    @contextmanager
    def lent(self, nbytes: int) -> Iterator[Array]:
        """Lend a buffer for a `with` block; after an error the buffer is dropped.

        The block must wait for the copies that it queues.
        """
        buffer = self.take(nbytes)
        yield buffer
        self.give(buffer)

    def close(self) -> None:
        """Release the free buffers, and keep none from now on."""
        with self._lock:
            self._closed = True
            self._free.clear()
            self.kept = 0


class Staging:
    """The copies of one group, with pinned memory and events for them."""

    def __init__(self, group: ProcessGroup) -> None:
        self.pool = PinnedPool(runtime())
        self.events = CudaEvents()
        self._group = group
        self._streams: dict[tuple[int, str], int] = {}
        self._changed = threading.Condition()
        self._users = 0
        self._here = threading.local()
        self._closed = False

    # ---- when arrays are ready -----------------------------------------------------------------------

    def mark(self, arrays: Sequence[DeviceArray]) -> Marks:
        """Record events behind the work that is queued on the arrays' streams now; for `await_marks`.

        Must run in the thread that uses these streams.
        """
        marks: Marks = []
        with self.in_use(arrays):
            for device, stream in dict.fromkeys((x.device, x.stream) for x in arrays if x.size):
                event = self.events.take(device)
                marks.append((device, event))
                with runtime().on(device):
                    runtime().record(event, stream)
        return marks

    def await_marks(self, marks: Marks, doing: str) -> None:
        """Block until the work before the marks is done.

        Raises:
            GroupError: the group has failed, or its timeout has passed.
        """
        for device, event in marks:
            self.until(event, doing)
            self.events.give(device, [event])

    def until(self, event: int, doing: str) -> None:
        """Block until an event is complete; raise the errors of `await_marks`."""
        limit = self._group.timeout
        deadline, nap, looks = time.monotonic() + limit, _NAPS[0], 0
        while not runtime().is_past(event):
            if self._group.failure is not None:
                raise self._group.failure.with_traceback(None)
            if time.monotonic() >= deadline:
                raise CollectiveTimeoutError(
                    f"{doing}: earlier work on the arrays' streams is not complete after {limit:g} s"
                )
            looks += 1
            if looks > _SPINS:
                time.sleep(nap)
                nap = min(2 * nap, _NAPS[1])

    # ---- copies ----------------------------------------------------------------------------------------

    def stream(self, device: int, direction: str) -> int:
        """Return the stream of a GPU for one direction, "down" or "up"."""
        with self._changed:
            if (device, direction) not in self._streams:
                self._streams[device, direction] = runtime().new_stream(device)
            return self._streams[device, direction]

    def copy(self, direction: str, arrays: Sequence[DeviceArray], hosts: Sequence[Array]) -> None:
        """Copy arrays to pinned host memory ("down") or from it ("up"), and block until this is done.

        The caller must have waited for earlier work on the arrays.
        """
        for device in {x.device for x in arrays if x.size}:
            stream = self.stream(device, direction)
            for x, host in zip(arrays, hosts, strict=True):
                if direction == "down":
                    runtime().to_host(host, x.address, stream)
                else:
                    runtime().to_device(x.address, host, stream)
            runtime().wait_stream(stream)

    # ---- the end ---------------------------------------------------------------------------------------

    @contextmanager
    def in_use(self, arrays: Sequence[DeviceArray]) -> Iterator[None]:
        """Keep the streams alive, and the arrays' GPU current, for the duration of a `with` block.

        If no GPU is current in a thread, CUDA creates a context of some 300 MB on GPU 0.
        """
        with self._changed:
            if self._closed:
                raise NotInitializedError(f"the group {self._group.name} was destroyed; make a new one")
            self._users += 1
            self._here.depth = getattr(self._here, "depth", 0) + 1
        try:
            with runtime().on(next((x.device for x in arrays if x.size), arrays[0].device)):
                yield
        finally:
            with self._changed:
                self._users -= 1
                self._here.depth -= 1
                self._changed.notify_all()

    def settle(self) -> None:
        """Block until all queued copies have ended."""
        for stream in list(self._streams.values()):
            runtime().wait_stream(stream)

    def close(self) -> None:
        """Release everything once the calls in progress have ended. Closing twice is fine."""
        with self._changed:
            self._closed = True
            own = getattr(self._here, "depth", 0)  # a signal handler must not wait for its own thread's calls
            unused = self._changed.wait_for(lambda: self._users <= own, _CLOSE_SECONDS) and not own
        self.pool.close()
        if unused:
            for (device, _), stream in self._streams.items():
                with runtime().on(device):
                    runtime().end_stream(stream)
            self._streams.clear()
            self.events.close()


def host_views(buffer: Array, arrays: Sequence[DeviceArray]) -> list[Array]:
    """Return host arrays like `arrays`, one after the other in pinned memory."""
    hosts, end = [], 0
    for x in arrays:
        start, end = end, end + x.nbytes
        hosts.append(np.frombuffer(buffer, x.dtype, x.size, start) if x.nbytes else np.empty(x.size, x.dtype))
    return hosts
