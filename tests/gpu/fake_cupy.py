"""FakeCupy: the part of CuPy that Runtime uses, with the traps of real CUDA.

The default stream is busy: work queued there runs at `settle()`. A thread that has chosen no GPU makes a context on
number 0. `with` a stream forgets, at its end, a current stream that use() has set.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class CudaError(Exception):
    """Replaces CUDARuntimeError."""


class OutOfMemory(MemoryError):
    """Replaces cupy.cuda.memory.OutOfMemoryError."""


class FakeCupy:
    """The module, with `cuda.runtime` and the other submodules.

    Attributes:
        calls: the calls of cuda.runtime, with their arguments.
        refused: names of calls that fail.
        contexts: the GPUs on which calls made a context.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refused: set[str] = set()
        self.legacy: list[Callable[[], Any]] = []
        self.contexts: set[int] = set()
        self._here = threading.local()
        self._memory: dict[int, Any] = {}
        self.cuda = SimpleNamespace(
            runtime=_Calls(self),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemory),
            PinnedMemory=lambda nbytes, flags: _Pinned(self, nbytes),
            driver=SimpleNamespace(ctxGetCurrent=lambda: getattr(self._here, "context", 0)),
            alloc=lambda nbytes: SimpleNamespace(ptr=self.malloc(nbytes), stream=self.cuda.Stream.current),
            get_current_stream=lambda: self.cuda.Stream.current,
            Stream=_streams(),
        )

    def settle(self) -> None:
        """Run the work that the default stream holds."""
        while self.legacy:
            self.legacy.pop(0)()

    # ---- calls of cuda.runtime that have an effect ------------------------------------------------------

    def getDevice(self) -> int:
        return getattr(self._here, "device", 0)

    def setDevice(self, device: int) -> None:
        self._here.device = device
        self.make_context()

    def make_context(self) -> None:
        self._here.context = 1
        self.contexts.add(self.getDevice())

    def malloc(self, nbytes: int) -> int:
        memory = ctypes.create_string_buffer(b"\xcd" * nbytes, nbytes)
        self._memory[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def memset(self, address: int, value: int, nbytes: int) -> None:
        self.legacy.append(lambda: ctypes.memset(address, value, nbytes))

    def memsetAsync(self, address: int, value: int, nbytes: int, stream: int) -> None:
        does = lambda: ctypes.memset(address, value, nbytes)  # noqa: E731
        does() if stream > 2 else self.legacy.append(does)


class _Calls:
    CUDARuntimeError = CudaError

    def __init__(self, fake: FakeCupy) -> None:
        self._fake = fake

    def __getattr__(self, name: str) -> Callable[..., Any]:
        fake = self._fake

        def call(*args: Any) -> Any:
            fake.calls.append((name, *args))
            if name in fake.refused:
                raise CudaError("cudaErrorInvalidResourceHandle")
            if name not in ("getDevice", "setDevice"):
                fake.make_context()
            return getattr(fake, name)(*args) if hasattr(fake, name) else {"eventQuery": 600}.get(name, 5)

        return call


class _Pinned:
    def __init__(self, fake: FakeCupy, nbytes: int) -> None:
        self._fake, self.ptr = fake, fake.malloc(nbytes)

    def __del__(self) -> None:
        self._fake.calls.append(("freeHost", self.ptr))


def _streams() -> Any:
    class Stream:
        current: Any

        def __init__(self, ptr: int) -> None:
            self.ptr = ptr

        def use(self) -> None:
            Stream.current = self

        def __enter__(self) -> None:
            Stream.current = self

        def __exit__(self, *error: object) -> None:
            Stream.current = Stream.null

        @staticmethod
        def from_external(stream: Any) -> Stream:
            return Stream(stream.__cuda_stream__()[1])

        null: Any
        ptds: Any

    Stream.null, Stream.ptds = Stream(0), Stream(2)
    Stream.current = Stream.null
    return Stream
