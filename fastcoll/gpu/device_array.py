"""DeviceArray, the carriers' view of an array in GPU memory, and the import of callers' arrays.

In core/, a DeviceArray replaces an ndarray: it has dtype, shape, size, nbytes and reshape(-1), and can be sliced if it
is flat. Views keep the caller's array alive. `import_array` converts a dense array of any library without a copy, or
raises an error that says what to do. A strided array is *packed*: a kernel on the array's stream copies it densely into
memory of CuPy's pool, and `finish` copies it back if the call writes into the array.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arrays import ImportedArray, libraries, may_overlap
from ..arrays.dtypes import dtype_of
from ..errors import ArrayError
from .runtime import cupy, runtime, waited_stream

_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged (dlpack.h)


class DeviceArray:
    """A dense array on a GPU, in C order, with an ndarray's `dtype`, `shape`, `size`, `nbytes`.

    Attributes:
        device: the GPU's number in this process.
        stream: the handle of the stream that the caller's library uses on the GPU. Work that writes the array is
            already queued on this stream.
        owner: the object that keeps the memory alive: the caller's array, or memory of the runtime.
    """

    __slots__ = ("address", "device", "dtype", "nbytes", "owner", "shape", "size", "stream")

    def __init__(
        self, address: int, dtype: np.dtype[Any], shape: tuple[int, ...], device: int, stream: int, owner: Any
    ) -> None:
        self.address, self.dtype, self.shape, self.owner = address, dtype, shape, owner
        self.device, self.stream = device, stream
        self.size = prod(shape)
        self.nbytes = self.size * dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def reshape(self, length: int) -> DeviceArray:
        """Return a flat view of all elements; `length` must be -1."""
        assert length == -1
        return self._view(self.address, self.size)

    def __getitem__(self, part: slice) -> DeviceArray:
        """Return a view of consecutive elements of a flat array."""
        start, stop, step = part.indices(self.size)
        assert step == 1
        return self._view(self.address + start * self.dtype.itemsize, max(stop - start, 0))

    def _view(self, address: int, size: int) -> DeviceArray:
        return DeviceArray(address, self.dtype, (size,), self.device, self.stream, self.owner)

    def overlaps(self, other: DeviceArray) -> bool:
        """Return whether two arrays share memory."""
        return (
            self.device == other.device
            and self.address < other.address + other.nbytes
            and other.address < self.address + self.nbytes
        )

    def __repr__(self) -> str:
        return f"{self.dtype} array of shape {self.shape} on GPU {self.device}"


def joined(arrays: Sequence[DeviceArray]) -> DeviceArray | None:
    """Return one flat array over all `arrays`, or None if they are not adjacent.

    Arrays are adjacent if each begins where the one before it ends.
    """
    first, end = arrays[0], arrays[0].address
    for x in arrays:
        if x.address != end:
            return None
        end += x.nbytes
    size = sum(x.size for x in arrays)
    return DeviceArray(first.address, first.dtype, (size,), first.device, first.stream, first.owner)


def parts(flat: DeviceArray, like: Sequence[DeviceArray]) -> list[DeviceArray]:
    """Cut a flat array into consecutive parts with the sizes of the arrays `like`."""
    end = 0
    return [flat[end : (end := end + x.size)] for x in like]


class Described(NamedTuple):
    """A library's description of its array, before anything is packed.

    `strides` are in bytes, None for a dense array.
    """

    array: DeviceArray
    strides: tuple[int, ...] | None
    read_only: bool = False


def describe(x: Any, what: str, gpus: Any) -> Described:
    """Return the description of a GPU array without touching its data.

    Args:
        x: a torch.Tensor, an object with `__cuda_array_interface__`, or an object that CuPy can import by DLPack.
        gpus: the Runtime.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _of_torch(torch, x, what)
    if not hasattr(x, "__cuda_array_interface__"):
        kind, number = x.__dlpack_device__()
        if kind not in _DLPACK_CUDA:
            raise ArrayError(
                f"{what} is on a device of DLPack's type {int(kind)}, number {number}; arrays in host memory and on "
                "CUDA GPUs are accepted"
            )
        x = cupy().from_dlpack(x)
    interface = x.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise ArrayError(f"{what} has a mask, which would be ignored; give the array without it")
    address, read_only = interface["data"]
    dtype = x.dtype if isinstance(getattr(x, "dtype", None), np.dtype) else np.dtype(interface["typestr"])
    shape = tuple(interface["shape"])
    # An empty array has no address to look up. An empty array of CuPy still names its GPU; for other libraries the
    # thread's current GPU is the best guess, as it is where the library would put an array.
    if prod(shape):
        device = gpus.device_at(address)
    else:
        named = getattr(getattr(x, "device", None), "id", None)
        device = gpus.current() if named is None else int(named)
    # The interface of a CuPy array names the stream of the current GPU, which may not be the array's GPU. So
    # `current_stream` asks CuPy.
    stream = current_stream(x, device, interface.get("stream") or 0)
    return Described(
        DeviceArray(address, dtype, shape, device, stream, x), interface.get("strides"), read_only
    )


def _of_torch(torch: Any, x: Any, what: str) -> Described:
    if x.device.type != "cuda":
        raise ArrayError(
            f"{what} is on the device {x.device}; arrays in host memory and on CUDA GPUs are accepted"
        )
    x = x.detach()
    if x.is_conj() or x.is_neg():
        raise ArrayError(f"{what} is a conjugated or negated view; give x.resolve_conj().resolve_neg()")
    dtype = dtype_of(str(x.dtype).removeprefix("torch."), x.element_size())
    device = x.device.index
    array = DeviceArray(x.data_ptr(), dtype, tuple(x.shape), device, current_stream(x, device), x)
    return Described(array, tuple(step * dtype.itemsize for step in x.stride()))


def current_stream(x: Any, device: int, unknown: int = 0) -> int:
    """Return the handle of the stream that the library of `x` uses now on a GPU.

    Args:
        unknown: the result for libraries other than torch and CuPy.
    """
    found = libraries(x)
    if "torch" in found:
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    if "cupy" in found:
        return int(sys.modules["cupy"].cuda.get_current_stream(device).ptr)
    return unknown


class OnDevice(ImportedArray):
    """A GPU array of a call: the caller's own memory, or a packed copy of it."""

    __slots__ = ("_strided",)

    array: Any  # a dense DeviceArray; in the base class, an ndarray

    def __init__(self, array: DeviceArray, strided: Any = None) -> None:
        super().__init__(array)  # type: ignore[arg-type]
        self._strided = strided  # the caller's array, for the copy back; a Strided (kernels/cuda/packing.py)

    def unpack(self, stream: int) -> None:
        """Queue the copy of a packed writable array back to the caller's array.

        Does nothing for any other array.

        Args:
            stream: a stream of the array's GPU.
        """
        if self._strided is not None:
            from ..kernels.cuda.packing import pack

            with runtime().on(self.array.device):
                pack(self.array.address, self._strided, stream, back=True)

    def finish(self) -> None:
        """Do what `unpack` does, and wait for it."""
        if self._strided is None:
            return
        # Not on the array's stream: work queued there later may wait for an action of this thread.
        device = self.array.device
        with runtime().on(device), waited_stream(runtime(), device) as stream:
            self.unpack(stream)


def import_array(x: Any, *, writable: bool, what: str) -> OnDevice:
    """Import a GPU array; see `DeviceCarrier.import_array`."""
    array, strides, read_only = describe(x, what, runtime())
    if array.dtype.hasobject:
        raise ArrayError(
            f"{what} is a {array}, whose elements are Python objects; give it a fixed-size dtype"
        )
    if writable and read_only:
        raise ArrayError(
            f"{what} is a read-only {array}, and the result goes there; give a writable copy of it"
        )
    shape, itemsize = array.shape, array.dtype.itemsize
    dense = tuple(itemsize * prod(shape[k + 1 :]) for k in range(len(shape)))
    if strides is None or array.size == 0 or strides == dense:
        return OnDevice(array)
    if writable and may_overlap(shape, strides, itemsize):
        raise ArrayError(
            f"{what} is a {array} with strides {strides}, so that elements share memory, and the result goes "
            "there; give a copy of it"
        )
    from ..kernels.cuda.packing import Strided, pack

    strided = Strided(array.address, shape, strides, itemsize)
    memory = runtime().allocate(array.nbytes, array.device, array.stream)
    with runtime().on(array.device):
        pack(memory.ptr, strided, array.stream, and_back=writable)
    # The caller's array must stay alive, because the kernel that reads it may not have run yet.
    owner = (memory, array.owner)
    packed = DeviceArray(memory.ptr, array.dtype, array.shape, array.device, array.stream, owner)
    return OnDevice(packed, strided if writable else None)


def scratch(size: int, dtype: np.dtype[Any], device: int, stream: int, owner: Any = None) -> DeviceArray:
    """Return a flat array in GPU memory, for use on a stream.

    Args:
        owner: an array of the caller's library: `StreamWork.wait` makes the current stream of this library wait.
    """
    memory = runtime().allocate(size * dtype.itemsize, device, stream)
    return DeviceArray(memory.ptr, dtype, (size,), device, stream, (memory, owner))
