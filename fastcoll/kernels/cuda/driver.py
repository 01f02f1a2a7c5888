"""CUDA's driver library: loads compiled code and launches it with little overhead.

A kernel is loaded into the calling thread's current context, completely and at once. By default CUDA loads a kernel
when it is launched for the first time, and may then wait for all work of the context: the host would be blocked inside
CUDA behind kernels that wait for other ranks. numba-cuda's own launch is not used, because it inspects the types of all
arguments each time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from ...errors import FastcollError, UnavailableError, UsageError

_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute in cuda.h
_WAITS_OF_STREAMS = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
_NO_CONTEXT, _WRONG_CONTEXT = 201, 400  # CUresult: invalid context, invalid handle

_void, _int, _unsigned = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [_unsigned],
    "cuDeviceGetCount": [_void],
    "cuDeviceGet": [_void, _int],
    "cuDeviceGetAttribute": [_void, _int, _int],
    "cuDeviceGetUuid_v2": [_void, _int],
    "cuDeviceGetPCIBusId": [_void, _int, _int],
    "cuCtxGetCurrent": [_void],
    "cuCtxGetDevice": [_void],
    "cuGetErrorName": [_int, _void],
    "cuGetErrorString": [_int, _void],
    "cuLibraryLoadData": [_void, ctypes.c_char_p, _void, _void, _unsigned, _void, _void, _unsigned],
    "cuLibraryGetKernel": [_void, _void, ctypes.c_char_p],
    "cuKernelGetFunction": [_void, _void],
    "cuLaunchKernel": [_void, *[_unsigned] * 7, _void, _void, _void],
}
_WAIT = "cuStreamWaitValue64_v2"  # some drivers lack it
_WAIT_SIGNATURE = [_void, ctypes.c_uint64, ctypes.c_uint64, _unsigned]
_FINISH_LOADING = "cuFuncLoad"  # CUDA 12.4; before, cuKernelGetFunction loads the kernel

before_loading: list[Callable[[], None]] = []
"""Functions that are called before a kernel is loaded, which may block the host behind all work of the GPU."""


class CudaDriver:
    """The driver and its devices.

    Attributes:
        capabilities: the devices' different compute capabilities, as (major, minor), the lowest first.
        multiprocessors: the largest number of multiprocessors of any device.
        launch_kernel: cuLaunchKernel; returns a CUresult, for `check`.

    Raises:
        UnavailableError: there is no device, or the driver is older than CUDA 12.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, parameters in _SIGNATURES.items():
            function = getattr(library, name, None)
            if function is None:
                raise UnavailableError(
                    f"the CUDA driver has no {name}; CUDA kernels need a driver of CUDA 12 or later"
                )
            function.argtypes, function.restype = parameters, _int
        status = library.cuInit(0)
        if status:
            raise UnavailableError(f"the CUDA driver does not start: {self._describe(status)}")
        devices = [self._number("cuDeviceGet", i) for i in range(self._number("cuDeviceGetCount"))]
        if not devices:
            raise UnavailableError("the CUDA driver sees no device; see nvidia-smi and CUDA_VISIBLE_DEVICES")
        capabilities = {(self._attribute(d, _MAJOR), self._attribute(d, _MINOR)) for d in devices}
        self.capabilities = sorted(capabilities)
        self.multiprocessors = max(self._attribute(d, _MULTIPROCESSORS) for d in devices)
        self.launch_kernel = library.cuLaunchKernel
        self._wait = getattr(library, _WAIT, None)
        if self._wait is not None:
            self._wait.argtypes, self._wait.restype = _WAIT_SIGNATURE, _int
        self._finish_loading = getattr(library, _FINISH_LOADING, None)
        if self._finish_loading is not None:
            self._finish_loading.argtypes, self._finish_loading.restype = [_void], _int

    def uuid(self, device: int) -> bytes:
        """Return the 16 bytes that identify a device, or a MIG instance of it, in all processes."""
        name = ctypes.create_string_buffer(16)
        status = self._library.cuDeviceGetUuid_v2(name, self._number("cuDeviceGet", device))
        self.check(status, "querying a GPU's name")
        return name.raw

    def bus_id(self, device: int) -> bytes:
        """Return the PCI bus ID of a device; instances of one GPU (MIG) have the same."""
        name = ctypes.create_string_buffer(32)
        status = self._library.cuDeviceGetPCIBusId(name, len(name), self._number("cuDeviceGet", device))
        self.check(status, "querying a GPU's bus")
        return name.value

    def context(self) -> int:
        """Return the handle of this thread's current context; 0 if there is none."""
        found = ctypes.c_void_p()
        if status := self._library.cuCtxGetCurrent(ctypes.byref(found)):
            self.check(status, "querying the current context")
        return found.value or 0

    def capability(self) -> tuple[int, int]:
        """Return the compute capability of the current context's device, as (major, minor)."""
        device = self._number("cuCtxGetDevice")
        return self._attribute(device, _MAJOR), self._attribute(device, _MINOR)

    def can_wait(self, device: int) -> bool:
        """Return whether a device of this process supports `wait_value`."""
        number = self._number("cuDeviceGet", device)
        return self._wait is not None and bool(self._attribute(number, _WAITS_OF_STREAMS))

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """Make later work on a stream wait until a word of device memory is at least `value`.

        The wait occupies no multiprocessor. It does not order memory accesses. So a later kernel that reads data which
        the word announces must first read the word with an acquire.
        """
        assert self._wait is not None
        if status := self._wait(stream, address, value, 0):  # CU_STREAM_WAIT_VALUE_GEQ
            self.check(status, "queueing a wait")

    def load(self, code: bytes, name: str) -> int:
        """Load the kernel `name` from a cubin into this thread's current context.

        Returns:
            its handle in this context, valid until the process ends.
        """
        for wait in before_loading:
            wait()
        loaded, kernel, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        status = self._library.cuLibraryLoadData(ctypes.byref(loaded), code, None, None, 0, None, None, 0)
        self.check(status, "loading a kernel")
        status = self._library.cuLibraryGetKernel(ctypes.byref(kernel), loaded, name.encode())
        self.check(status, f"finding the kernel {name}")
        self.check(self._library.cuKernelGetFunction(ctypes.byref(function), kernel), "loading a kernel")
        if self._finish_loading is not None:
            self.check(self._finish_loading(function), "loading a kernel")
        assert function.value is not None
        return function.value

    def check(self, status: int, doing: str) -> None:
        """Raise an error for a CUresult other than success."""
        if status in (_NO_CONTEXT, _WRONG_CONTEXT):
            raise UsageError(
                f"CUDA: {doing} failed: {self._describe(status)}; the arrays' device must be the current one of this "
                "thread (cupy.cuda.Device(i).use(), numba.cuda.select_device(i)), and the stream one of its streams"
            )
        if status:
            raise FastcollError(f"CUDA: {doing} failed: {self._describe(status)}")

    def _number(self, function: str, *args: int) -> int:
        number = ctypes.c_int()
        self.check(getattr(self._library, function)(ctypes.byref(number), *args), function)
        return number.value

    def _attribute(self, device: int, which: int) -> int:
        return self._number("cuDeviceGetAttribute", which, device)

    def _describe(self, status: int) -> str:
        texts = []
        for function in (self._library.cuGetErrorName, self._library.cuGetErrorString):
            text = ctypes.c_char_p()
            function(status, ctypes.byref(text))
            texts.append((text.value or b"unknown").decode())
        return f"{texts[0]} ({status}): {texts[1]}"


@cache
def driver() -> CudaDriver:
    """Return this machine's driver.

    Raises:
        UnavailableError: there is no driver or no device, or the driver is too old.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnavailableError(
            f"there is no CUDA driver here ({error}); it comes with a GPU's driver"
        ) from error
    return CudaDriver(library)
