"""CUDA's runtime as CuPy binds it: the few calls that the carriers make, in one place, so that tests can stand in.

Addresses, streams and events are integers. `stream` 0 is the legacy default stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import FastcollError, UnavailableError
from ..kernels.cuda import INSTALL
from ..kernels.cuda.driver import driver

Array = np.ndarray[Any, Any]

_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 1, 2, 3  # cudaMemcpyKind
_NON_BLOCKING = 1  # cudaStreamNonBlocking: not ordered with the legacy default stream
_NO_TIMING = 2  # cudaEventDisableTiming
_PORTABLE = 1  # cudaHostAllocPortable: pinned for every device
_NOT_READY = 600  # cudaErrorNotReady
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


@cache
def cupy() -> Any:
    """The module; UnavailableError where it is not installed, or finds no GPU."""
    try:
        import cupy as module
    except ImportError as error:
        raise UnavailableError(f"arrays on GPUs need CuPy ({error}): {INSTALL}") from error
    try:
        module.cuda.runtime.getDeviceCount()
    except Exception as error:  # CUDARuntimeError, which is CuPy's own
        raise UnavailableError(
            f"CuPy finds no GPU: {error}; see nvidia-smi and CUDA_VISIBLE_DEVICES"
        ) from error
    return module


class _Foreign(NamedTuple):
    """A stream by its handle, in CUDA's protocol for streams."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class Runtime:
    """The calls. Errors of CUDA are raised as FastcollError, with what was being done."""

    def __init__(self) -> None:
        self._cupy = cupy()
        self._calls = self._cupy.cuda.runtime

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make a GPU this thread's current one, and then the earlier one again.

        A thread that has used none stays there: turning to number 0 would make a context on it (CUDA 12), some 300 MB.
        """
        fresh = not self._cupy.cuda.driver.ctxGetCurrent()
        before = self._do("asking for the current GPU", self._calls.getDevice)
        if fresh or before != device:
            self._do(f"turning to GPU {device}", self._calls.setDevice, device)
        try:
            yield
        finally:
            if before != device and not fresh:
                self._calls.setDevice(before)

    # ---- devices -------------------------------------------------------------------------------------

    def count(self) -> int:
        """How many GPUs this process sees."""
        return int(self._do("counting GPUs", self._calls.getDeviceCount))

    def device_at(self, address: int) -> int:
        """The number of the GPU that an address belongs to."""
        return int(self._do("asking for an array's GPU", self._calls.pointerGetAttributes, address).device)

    def uuid(self, device: int) -> bytes:
        """A GPU's name of 16 bytes, the same in all processes, whatever CUDA_VISIBLE_DEVICES makes its number."""
        return driver().uuid(device)  # CuPy's ends at the first zero byte

    def can_reach(self, device: int, peer: int) -> bool:
        """Whether kernels on one GPU may use the memory of another of this process."""
        ask = self._calls.deviceCanAccessPeer
        return device == peer or bool(self._do("asking for peer access", ask, device, peer))

    # ---- memory --------------------------------------------------------------------------------------

    def pinned(self, nbytes: int) -> Array:
        """Pinned host memory, as bytes; released with the last view of it."""
        memory = self._do("pinning host memory", self._cupy.cuda.PinnedMemory, max(nbytes, 1), _PORTABLE)
        flat: Array = np.frombuffer(self._cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)
        return flat

    def allocate(self, nbytes: int, device: int, stream: int | None = None) -> Any:
        """GPU memory from CuPy's pool, for use on one stream (None: CuPy's current one); `.ptr` is its address.

        It goes to the stream's next user when the last reference has gone, although what was queued on the stream may
        still use it. Other streams that use it must be through by then.
        """
        with self.on(device), ExitStack() as ends:
            if stream is not None:
                # Not `with` a stream: at its end CuPy forgets a current one that was chosen by use().
                ends.callback(self._cupy.cuda.get_current_stream().use)
                self._stream(stream).use()
            return self._do("allocating GPU memory", self._cupy.cuda.alloc, max(nbytes, 1))

    def _stream(self, handle: int) -> Any:
        streams = self._cupy.cuda.Stream
        if handle in (0, 1):
            return streams.null
        return streams.ptds if handle == 2 else streams.from_external(_Foreign(handle))

    def allocate_shareable(self, nbytes: int, device: int) -> int:
        """GPU memory of its own, which `export` takes, zeroed; it is never freed (ipc/regions.py)."""
        with self.on(device):
            address = self._do("allocating GPU memory", self._calls.malloc, nbytes)
            with waited_stream(self, device) as stream:
                # Not cudaMemset: it is queued behind the caller's work on the default stream, and the host goes on.
                self._do("clearing GPU memory", self._calls.memsetAsync, address, 0, nbytes, stream)
        return int(address)

    def to_host(self, host: Array, address: int, stream: int) -> None:
        """Copy from a GPU into pinned host memory; does not wait."""
        self._copy(host.ctypes.data, address, host.nbytes, _DEVICE_TO_HOST, stream)

    def to_device(self, address: int, host: Array, stream: int) -> None:
        """Copy pinned host memory to a GPU; does not wait."""
        self._copy(address, host.ctypes.data, host.nbytes, _HOST_TO_DEVICE, stream)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Copy inside a GPU, or between two that reach each other; does not wait."""
        self._copy(dst, src, nbytes, _DEVICE_TO_DEVICE, stream)

    def _copy(self, dst: int, src: int, nbytes: int, kind: int, stream: int) -> None:
        if nbytes:
            self._do("copying", self._calls.memcpyAsync, dst, src, nbytes, kind, stream)

    # ---- streams and events --------------------------------------------------------------------------

    def new_stream(self, device: int) -> int:
        """A stream that is not ordered with any other; for `end_stream`."""
        with self.on(device):
            return int(self._do("making a stream", self._calls.streamCreateWithFlags, _NON_BLOCKING))

    def end_stream(self, stream: int) -> None:
        self._do("ending a stream", self._calls.streamDestroy, stream)

    def wait_stream(self, stream: int) -> None:
        """Block until all that is queued on a stream is done."""
        self._do("waiting for a stream", self._calls.streamSynchronize, stream)

    def new_event(self, device: int) -> int:
        """An event, for `end_event`."""
        with self.on(device):
            return int(self._do("making an event", self._calls.eventCreateWithFlags, _NO_TIMING))

    def end_event(self, event: int) -> None:
        self._do("ending an event", self._calls.eventDestroy, event)

    def record(self, event: int, stream: int) -> None:
        """Make the event stand for what is queued on the stream up to here."""
        self._do("recording an event", self._calls.eventRecord, event, stream)

    def order(self, stream: int, event: int) -> None:
        """Make what is queued on a stream from here on wait for the event; the host does not."""
        self._do("ordering streams", self._calls.streamWaitEvent, stream, event)

    def is_past(self, event: int) -> bool:
        """Whether what the event stands for is done. Never blocks."""
        status = self._calls.eventQuery(event)
        if status not in (0, _NOT_READY):
            raise FastcollError(f"CUDA: what was queued on a stream failed with status {status}")
        return bool(status == 0)

    # ---- memory of other processes -------------------------------------------------------------------

    def export(self, address: int) -> bytes:
        """What another process of the node opens to map memory of `allocate_shareable`."""
        return bytes(self._do("exporting GPU memory", self._calls.ipcGetMemHandle, address))

    def open(self, handle: bytes, device: int) -> int:
        """The address here of what another process exported; for `shut`."""
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
    """A stream of its own, whose end the host waits for."""
    stream = runtime.new_stream(device)
    try:
        yield stream
        runtime.wait_stream(stream)
    finally:
        runtime.end_stream(stream)


@cache
def runtime() -> Runtime:
    """This process's; UnavailableError where there is no CuPy, or no GPU."""
    return Runtime()
