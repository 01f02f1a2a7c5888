"""The border for arrays on GPUs: any library's array becomes a dense DeviceArray, or is refused with the cure.

A strided array is packed by a kernel on its own stream, into memory of CuPy's pool; `finish` writes it back where the
call had to write. Every carrier takes its arrays in here.
"""

from __future__ import annotations

from typing import Any

from ..errors import ArrayError
from ..interop.arrays import Adopted
from .array import Described, DeviceArray, describe
from .runtime import runtime


class OnDevice(Adopted):
    """An array of a GPU as the carriers use it.

    Attributes:
        array: a dense DeviceArray: the caller's own memory, or a packed copy of it.
    """

    __slots__ = ("_strided",)

    array: Any  # a DeviceArray, where that of a host array is an ndarray

    def __init__(self, array: DeviceArray, strided: Described | None = None) -> None:
        super().__init__(array)  # type: ignore[arg-type]
        self._strided = strided

    def unpack(self, stream: int) -> None:
        """Queue, on a stream of the array's GPU, the copy of a packed writable array back; nothing for any other."""
        if self._strided is not None:
            from ..kernels.cuda.move import unpack

            with runtime().on(self.array.device):
                unpack(self._strided, self.array.address, stream)

    def finish(self) -> None:
        """As `unpack`, and wait for it."""
        if self._strided is None:
            return
        # Not on the array's own stream, whose later work may wait for what this thread is to do next.
        with runtime().on(self.array.device):
            stream = runtime().new_stream(self.array.device)
            try:
                self.unpack(stream)
                runtime().wait_stream(stream)
            finally:
                runtime().end_stream(stream)


def adopt(x: Any, *, writable: bool, what: str) -> OnDevice:
    """Take an array on a GPU in.

    Args:
        x: the caller's array, of any number of dimensions.
        writable: whether the call writes into it.
        what: the argument's name, for messages.

    Raises:
        ArrayError: it cannot be used, or is read-only where the call writes.
        UnavailableError: an extra is missing.
    """
    said = describe(x, what, runtime().device_at)
    array = said.array
    if array.dtype.hasobject:
        raise ArrayError(
            f"{what} is a {array}, whose elements are Python objects; give it a fixed-size dtype"
        )
    if writable and said.read_only:
        raise ArrayError(
            f"{what} is a read-only {array}, and the result goes there; give a writable copy of it"
        )
    if said.strides is None or array.size == 0:
        return OnDevice(array)
    if writable and _may_overlap(array.shape, said.strides, array.dtype.itemsize):
        raise ArrayError(
            f"{what} is a {array} with strides {said.strides}, so that elements share memory, and the result goes "
            "there; give a copy of it"
        )
    return OnDevice(_packed(said), said if writable else None)


def _packed(said: Described) -> DeviceArray:
    from ..kernels.cuda.move import pack

    array = said.array
    memory = runtime().allocate(array.nbytes, array.device, array.stream)
    with runtime().on(array.device):
        pack(memory.ptr, said, array.stream)
    # The caller's array stays too: the kernel that reads it is only queued.
    return DeviceArray(
        memory.ptr, array.dtype, array.shape, array.device, array.stream, (memory, array.owner)
    )


def _may_overlap(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether two elements may share memory: some stride does not step over all of the smaller ones' extent."""
    extent = itemsize
    for stride, length in sorted((abs(step), n) for step, n in zip(strides, shape, strict=True)):
        if length > 1:
            if stride < extent:
                return True
            extent += (length - 1) * stride
    return False
