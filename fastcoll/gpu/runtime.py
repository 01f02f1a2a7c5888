"""The calls of CUDA's runtime that the carriers make, through CuPy.

Tests replace this module's Runtime with a fake. Addresses, streams and events are integers. `stream` 0 is the legacy
default stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..compiler.cache_files import digest
from ..errors import FastcollError, UnavailableError
from ..kernels.cuda import INSTALL
from ..kernels.cuda.driver import driver
from ..system.processes import this_process
from . import idle

Array = np.ndarray[Any, Any]

_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 1, 2, 3  # cudaMemcpyKind
_NON_BLOCKING = 1  # cudaStreamNonBlocking: not ordered with the legacy default stream
_NO_TIMING = 2  # cudaEventDisableTiming
_PORTABLE = 1  # cudaHostAllocPortable: pinned for every device
_NOT_READY = 600  # cudaErrorNotReady
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_MOST_URGENT = -100  # a stream's priority; CUDA takes the highest that there is


@cache
def cupy() -> Any:
    """Return the module CuPy.

    Raises:
        UnavailableError: CuPy is not installed or finds no GPU.
    """
    try:
        import cupy as module
    except ImportError as error:
        raise UnavailableError(f"arrays on GPUs need CuPy ({error}): {INSTALL}") from error
    try:
        module.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy raises its own CUDARuntimeError
        raise UnavailableError(
            f"CuPy finds no GPU: {error}; see nvidia-smi and CUDA_VISIBLE_DEVICES"
        ) from error
    return module


class _Foreign(NamedTuple):
    """A stream handle as an object that CuPy accepts: one with CUDA's method `__cuda_stream__`."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class _Pinned:
    """Pinned memory, which is freed at some time after its last view, when no collective is outstanding.

    cudaFreeHost waits for the GPU, and the garbage collector may run on any thread.
    """

    def __init__(self, memory: Any, nbytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (memory.ptr, False),
        }
        weakref.finalize(self, idle.when_idle, [memory].clear)


class Runtime:
    """CUDA's runtime. CUDA's errors are raised as FastcollError, and name the failed action."""

    def __init__(self) -> None:
        self._cupy = cupy()
        self._calls = self._cupy.cuda.runtime

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make a GPU this thread's current one for the duration of a `with` block.

        In a thread that has not used a GPU before, this GPU stays the current one: to switch back to GPU 0 would create
        a context of some 300 MB there (CUDA 12).
        """
        fresh = not self._cupy.cuda.driver.ctxGetCurrent()
        before = self.current()
        if fresh or before != device:
            self._do(f"switching to GPU {device}", self._calls.setDevice, device)
        try:
            yield
        finally:
            if before != device and not fresh:
                self._calls.setDevice(before)

    # ---- devices -------------------------------------------------------------------------------------

    def current(self) -> int:
        """Return the number of this thread's current GPU."""
        return int(self._do("querying the current GPU", self._calls.getDevice))

    def count(self) -> int:
        """Return the number of GPUs that this process sees."""
        return int(self._do("counting GPUs", self._calls.getDeviceCount))

    def device_at(self, address: int) -> int:
        """Return the number of the GPU whose memory contains an address."""
        return int(self._do("looking up an array's GPU", self._calls.pointerGetAttributes, address).device)

    def uuid(self, device: int) -> bytes:
        """Return a GPU's 16-byte UUID.

        It is the same in all processes, even if CUDA_VISIBLE_DEVICES gives the GPU another number in some of them.
        """
        return driver().uuid(device)  # not by CuPy, which truncates the UUID at its first zero byte

    def board(self, device: int) -> bytes:
        """Return 16 bytes that identify the GPU that a device is, or is an instance of (MIG), and its machine.

        NCCL refuses two ranks on one board.
        """
        return digest(this_process().boot_id.encode(), driver().bus_id(device))

    def can_reach(self, device: int, peer: int) -> bool:
        """Return whether kernels on GPU `device` can use the memory of GPU `peer`.

        Both are numbers of GPUs in this process.
        """
        ask = self._calls.deviceCanAccessPeer
        return device == peer or bool(self._do("querying peer access", ask, device, peer))

    # ---- memory --------------------------------------------------------------------------------------

    def pinned(self, nbytes: int) -> Array:
        """Return pinned host memory as an array of bytes; it is freed some time after the last view of it."""
        idle.free_unused()
        memory = self._do("pinning host memory", self._cupy.cuda.PinnedMemory, max(nbytes, 1), _PORTABLE)
        return np.asarray(_Pinned(memory, nbytes))

    def allocate(self, nbytes: int, device: int, stream: int | None = None) -> Any:
        """Return GPU memory from CuPy's pool, for use on one stream; `.ptr` is the address.

        The pool may give the memory to the next user of the same stream as soon as the last reference is dropped, even
        if work queued on this stream still uses it. Other streams must have finished with the memory by then.

        Args:
            stream: the stream; None: CuPy's current stream.
        """
        with self.on(device), ExitStack() as ends:
            if stream is not None:
                # Not `with stream`: at the end of that block, CuPy forgets which stream was made current by use()
                # before.
                ends.callback(self._cupy.cuda.get_current_stream().use)
                self._stream(stream).use()
            return self._do("allocating GPU memory", self._cupy.cuda.alloc, max(nbytes, 1))

    def _stream(self, handle: int) -> Any:
        streams = self._cupy.cuda.Stream
        if handle in (0, 1):
            return streams.null
        return streams.ptds if handle == 2 else streams.from_external(_Foreign(handle))

    def allocate_shareable(self, nbytes: int, device: int) -> int:
        """Return the address of zeroed GPU memory for `export`.

        The memory is never freed (ipc/regions.py).
        """
        with self.on(device):
            address = self._do("allocating GPU memory", self._calls.malloc, nbytes)
            with waited_stream(self, device) as stream:
                # Not cudaMemset, which would wait for the caller's work on the default stream, and would not block the
                # host.
                self._do("clearing GPU memory", self._calls.memsetAsync, address, 0, nbytes, stream)
        return int(address)

    def to_host(self, host: Array, address: int, stream: int) -> None:
        """Queue a copy from a GPU to pinned host memory; does not wait."""
        self._copy(host.ctypes.data, address, host.nbytes, _DEVICE_TO_HOST, stream)

    def to_device(self, address: int, host: Array, stream: int) -> None:
        """Queue a copy from pinned host memory to a GPU; does not wait."""
        self._copy(address, host.ctypes.data, host.nbytes, _HOST_TO_DEVICE, stream)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Queue a copy inside a GPU, or between two that can reach each other; does not wait."""
        self._copy(dst, src, nbytes, _DEVICE_TO_DEVICE, stream)

    def _copy(self, dst: int, src: int, nbytes: int, kind: int, stream: int) -> None:
        if nbytes:
            self._do("copying", self._calls.memcpyAsync, dst, src, nbytes, kind, stream)

    # ---- streams and events --------------------------------------------------------------------------

    def new_stream(self, device: int, urgent: bool = False) -> int:
        """Create a stream that is not ordered with any other; free it with `end_stream`.

        Args:
            urgent: give it the highest priority. Streams of one priority may share a queue of the GPU, in which work of
                one stream can be stuck behind a wait of another.
        """
        create, priority = self._calls.streamCreateWithPriority, _MOST_URGENT if urgent else 0
        with self.on(device):
            return int(self._do("creating a stream", create, _NON_BLOCKING, priority))

    def end_stream(self, stream: int) -> None:
        self._do("destroying a stream", self._calls.streamDestroy, stream)

    def wait_stream(self, stream: int) -> None:
        """Block until all work queued on a stream is done."""
        self._do("waiting for a stream", self._calls.streamSynchronize, stream)

    def new_event(self, device: int) -> int:
        """Create an event; free it with `end_event`."""
        with self.on(device):
            return int(self._do("creating an event", self._calls.eventCreateWithFlags, _NO_TIMING))

    def end_event(self, event: int) -> None:
        self._do("destroying an event", self._calls.eventDestroy, event)

    def record(self, event: int, stream: int) -> None:
        """Record an event behind the work that is queued on the stream now."""
        self._do("recording an event", self._calls.eventRecord, event, stream)

    def order(self, stream: int, event: int) -> None:
        """Make work queued on a stream from now on wait for the event; the host does not wait."""
        self._do("ordering streams", self._calls.streamWaitEvent, stream, event)

    def is_past(self, event: int) -> bool:
        """Return whether the work before the recorded event is done. Never blocks."""
        status = self._calls.eventQuery(event)
        if status not in (0, _NOT_READY):
            raise FastcollError(f"CUDA: work queued on a stream failed with status {status}")
        return bool(status == 0)

    # ---- memory of other processes -------------------------------------------------------------------

    def export(self, address: int) -> bytes:
        """Return the handle by which another process maps memory of `allocate_shareable`."""
        return bytes(self._do("exporting GPU memory", self._calls.ipcGetMemHandle, address))

    def open(self, handle: bytes, device: int) -> int:
        """Map memory that another process has exported; unmap it with `shut`.

        Returns:
            its address in this process.
        """
        call = self._calls.ipcOpenMemHandle
        with self.on(device):
            return int(self._do("mapping a peer's GPU memory", call, handle, _LAZY_PEER_ACCESS))

    def shut(self, address: int) -> None:
        self._do("unmapping a peer's GPU memory", self._calls.ipcCloseMemHandle, address)

    def _do(self, doing: str, call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except (self._calls.CUDARuntimeError, self._cupy.cuda.memory.OutOfMemoryError) as error:
            raise FastcollError(f"CUDA: {doing} failed: {error}") from error


@contextmanager
def waited_stream(runtime: Runtime, device: int) -> Iterator[int]:
    """Create a stream whose work the host waits for at the end of the `with` block."""
    stream = runtime.new_stream(device)
    try:
        yield stream
        runtime.wait_stream(stream)
    finally:
        runtime.end_stream(stream)


@cache
def runtime() -> Runtime:
    """Return this process's Runtime.

    Raises:
        UnavailableError: there is no CuPy, or no GPU.
    """
    return Runtime()
