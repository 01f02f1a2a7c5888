"""FakeArray: host memory that claims to be on a GPU, with `__cuda_array_interface__` version 3."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class FakeArray:
    """An array on a GPU of FakeRuntime, in the memory of `host`, which has the result once the GPU has finished.

    Attributes:
        host: any ndarray, also strided.
        stream: the handle of the stream that its library uses; None: the interface names none.
        read_only: it may only be read; by default as `host`.
        device: has the GPU's number as `id`, as CuPy's arrays have.
    """

    device: Any = None

    def __init__(self, host: Array, stream: int | None = None, read_only: bool | None = None) -> None:
        self.host = host
        self.stream = stream
        self.read_only = not host.flags.writeable if read_only is None else read_only

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.host.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.host.shape

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        host = self.host
        return {
            "shape": host.shape,
            "typestr": host.dtype.str,
            "data": (host.ctypes.data if host.size else 0, self.read_only),
            "strides": None if host.flags.c_contiguous else host.strides,
            "stream": self.stream,
            "version": 3,
        }
