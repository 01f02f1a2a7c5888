"""A CUDA driver library that only records: two devices, one of them older and smaller, each with a context."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

HOPPER = (9, 0)
"""The compute capability that kernels are compiled for where there is no GPU."""


class Library:
    """Returns what CUDA's driver would, and keeps the launches."""

    def __init__(self, capabilities: Sequence[tuple[int, int]] = ((9, 0), (8, 6)), **statuses: int) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.loaded: list[bytes] = []
        self.current = 0
        """The number of the current device; the handle of its context is one more."""
        self._statuses = statuses
        attributes = {
            75: [c[0] for c in capabilities],
            76: [c[1] for c in capabilities],
            16: [132, 84][: len(capabilities)],
        }
        self.define("cuInit", lambda flags: None)
        self.define("cuDeviceGetCount", lambda out: self.set(out, len(capabilities)))
        self.define("cuDeviceGet", lambda out, i: self.set(out, i))
        self.define("cuDeviceGetAttribute", lambda out, which, i: self.set(out, attributes[which][i]))
        self.define(
            "cuDeviceGetUuid_v2", lambda out, i: setattr(out, "raw", bytes([i, 0, 7]).ljust(16, b"\1"))
        )
        self.define("cuDeviceGetPCIBusId", lambda out, size, i: setattr(out, "value", b"0000:1b:00.%d" % i))
        self.define("cuCtxGetCurrent", lambda out: self.set(out, self.current + 1))
        self.define("cuCtxGetDevice", lambda out: self.set(out, self.current))
        self.define("cuGetErrorName", lambda status, out: self.set(out, f"CUDA_ERROR_{status}".encode()))
        self.define("cuGetErrorString", lambda status, out: self.set(out, b"what it means"))
        self.define(
            "cuLibraryLoadData", lambda out, code, *rest: (self.loaded.append(code), self.set(out, 7))
        )
        self.define("cuLibraryGetKernel", lambda out, library, name: self.set(out, 8))
        self.define("cuKernelGetFunction", lambda out, kernel: self.set(out, 9 + self.current))
        self.define("cuLaunchKernel", self._launch)

    @staticmethod
    def set(out: Any, value: Any) -> None:
        out._obj.value = value

    def define(self, name: str, does: Any) -> None:
        def function(*args: Any) -> int:
            status = self._statuses.get(name, 0)
            if status == 0:
                does(*args)
            return status

        setattr(self, name, function)

    def _launch(self, kernel: int, *shape_and_stream: Any) -> None:
        *shape, stream, parameters, extra = shape_and_stream
        words = [ctypes.cast(address, ctypes.POINTER(ctypes.c_int64))[0] for address in parameters]
        self.launches.append((kernel, tuple(shape), stream, words, extra))
