"""Kernels of several ranks at the same time, in threads of one process.

Numba's simulator cannot run them concurrently. This code runs their Python as the simulator does, with thread and block
numbers of the calling thread. Kernels whose threads wait for one another get threads; the others run one CUDA thread
after another.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fastcoll.kernels.cuda import kernel as launch
from fastcoll.kernels.cuda import packing, reducers, steps
from fastcoll.kernels.cuda.kernel import _BLOCKS, THREADS

MODULES = (reducers, steps, packing)


class Cuda(threading.local):
    """The part of `numba.cuda` that kernels use; this thread is one CUDA thread."""

    def begin(self, block: int, blocks: int, thread: int, threads: int, barrier: Any) -> None:
        self.blockIdx, self.threadIdx = SimpleNamespace(x=block), SimpleNamespace(x=thread)
        self.blockDim, self.gridDim = SimpleNamespace(x=threads), SimpleNamespace(x=blocks)
        self._barrier = barrier

    def grid(self, dimensions: int) -> int:
        return int(self.blockIdx.x * self.blockDim.x + self.threadIdx.x)

    def gridsize(self, dimensions: int) -> int:
        return int(self.blockDim.x * self.gridDim.x)

    def syncthreads(self) -> None:
        self._barrier.wait(120.0)


CUDA = Cuda()


def _run(kernel: Any, items: int, stream: int, *words: int) -> None:
    function = kernel._kernel.fn
    blocks = min(-(-items // THREADS), _BLOCKS)
    args = _arguments(words, kernel._words, kernel._tuples)
    if function.__module__ == steps.__name__:
        assert blocks == 1, "threads of different blocks cannot wait for one another"
        _run_block(function, args)
        return
    for block in range(blocks):
        for thread in range(THREADS):
            CUDA.begin(block, blocks, thread, THREADS, None)
            function(*args)


def _arguments(words: Sequence[int], plain: int, tuples: Sequence[int]) -> list[Any]:
    args: list[Any] = list(words[:plain])
    at = plain
    for length in tuples:
        args.append(tuple(words[at : at + length]))
        at += length
    return args


def _run_block(function: Any, args: Sequence[Any]) -> None:
    barrier, failures = threading.Barrier(THREADS), []

    def one(thread: int) -> None:
        CUDA.begin(0, 1, thread, THREADS, barrier)
        try:
            function(*args)
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=one, args=(thread,), daemon=True) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@contextmanager
def concurrent_kernels() -> Iterator[None]:
    """Run kernels like this from now on; enter it before a FakeRuntime is installed, which queues them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    with mock.patch.object(launch._Simulated, "__call__", _run):
        patches = [mock.patch.object(module, "cuda", CUDA) for module in MODULES]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()
            sys.setswitchinterval(interval)
