"""Queueing the plan of one call on a stream (ipc_plans.py), and ending what waits there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core.signature import Signature
from ...kernels.cuda import ipc as kernels
from ...kernels.cuda import ipc_page as at
from ...kernels.cuda.driver import driver
from ...kernels.cuda.flags import POISON
from ...kernels.cuda.reduce import CudaReducer
from ...kernels.cuda.toolkit import SIMULATED
from ..array import DeviceArray
from .memory import Shared
from .plans import IN, SLOT, Fold, Last, Move, Place, Plan, Step, slot_of

WaitValue = Callable[[int, int, int], None]

_POISON_EVERY = 0.005  # seconds: what a slow peer writes meanwhile is written over again
_POISON_SECONDS = 60.0


def ready(device: int) -> tuple[WaitValue | None, str]:
    """Compile the kernels, before any rank counts on this one.

    Returns:
        `wait(stream, address, value)` of the driver, if it has it for a GPU; and why there are no kernels, or nothing.
    """
    try:
        for kernel in (kernels.meet, kernels.announce, kernels.step, kernels.say):
            kernels.compiled(kernel)
        return waits_of_streams(device), ""
    except Exception as error:  # Numba lets errors of many kinds through
        return None, f"{type(error).__name__}: {error}"


def waits_of_streams(device: int) -> WaitValue | None:
    """`wait(stream, address, value)` of the driver, if it has it for a GPU."""
    if SIMULATED or not driver().can_wait(device):
        return None
    return driver().wait_value


class Queue:
    """One rank's.

    Args:
        shared: the memory.
        runtime: CUDA's.
        device: the GPU.
        rank, ranks: this one's number, and how many the group has.
        wait: what lets a stream wait for a word, where ranks share a GPU and the driver has it; else kernels poll.
    """

    def __init__(
        self, shared: Shared, runtime: Any, device: int, rank: int, ranks: int, wait: WaitValue | None
    ) -> None:
        self._shared, self._runtime, self._device = shared, runtime, device
        self._rank, self._ranks, self._wait = rank, ranks, wait
        self._meet, self._announce = kernels.compiled(kernels.meet), kernels.compiled(kernels.announce)
        self._step, self._say = kernels.compiled(kernels.step), kernels.compiled(kernels.say)
        if wait is not None:
            # Made now: pinning memory or making a stream may wait for the GPU, and that for the poison.
            self._poisoned: np.ndarray[Any, Any] = runtime.pinned(at.RANK_BYTES * ranks)
            self._poisoned.view(np.int64)[:] = POISON
            self._poisoning: int = runtime.new_stream(device)

    def run(
        self,
        stream: int,
        number: int,
        plan: Plan,
        said: Signature,
        ins: Sequence[DeviceArray],
        outs: Sequence[DeviceArray],
        reducer: CudaReducer | None,
    ) -> None:
        """Queue what a plan says; the GPU is the current one.

        Args:
            number: of the call, from 1.
            said: what is compared at the meeting.
            ins, outs: the arrays that the plan's places name.
            reducer: for its folds.
        """

        def address(place: Place) -> int:
            kind, index, offset = place
            if kind < SLOT:
                return (ins if kind == IN else outs)[index].address + offset
            return self._shared.slot_of(index, slot_of(number, kind - SLOT)) + offset

        for item in plan:
            if isinstance(item, Move):
                dst, src = address(item.dst), address(item.src)
                if dst != src:
                    self._runtime.copy(dst, src, item.nbytes, stream)
            elif isinstance(item, Fold):
                assert reducer is not None
                count = item.nbytes // (outs or ins)[0].dtype.itemsize
                reducer.launch(address(item.dst), [address(src) for src in item.srcs], count, stream)
            elif isinstance(item, Step):
                self._go_on(stream, number, item.number, said)
            else:
                assert isinstance(item, Last)
                self._say(1, stream, self._shared.page, at.STEP, number << at.STEP_BITS | at.LAST_STEP)

    def _go_on(self, stream: int, number: int, step: int, said: Signature) -> None:
        page = self._shared.page
        if step == 0:
            if self._wait is not None:
                self._announce(1, stream, page, number, *said)
                self._await(stream, at.LINE * (number % 2) + at.SEQUENCE, number)
            self._meet(1, stream, page, number, *said)
            return
        assert step < at.LAST_STEP
        word = number << at.STEP_BITS | step
        if self._wait is not None:
            self._say(1, stream, page, at.STEP, word)
            self._await(stream, at.STEP, word)
        self._step(1, stream, page, word)

    def _await(self, stream: int, offset: int, word: int) -> None:
        assert self._wait is not None
        for peer in range(self._ranks):
            if peer != self._rank:
                self._wait(stream, self._shared.page + at.rank_words(peer) + offset, word)

    def say_bye(self, stream: int) -> None:
        """This rank uses its peers' memory no more; blocks until that is said. Nothing may be queued here after it."""
        with self._runtime.on(self._device):
            self._say(1, stream, self._shared.page, at.BYE, 1)
            self._runtime.wait_stream(stream)
            if self._wait is not None:
                self._runtime.end_stream(self._poisoning)

    def stop(self, is_over: Callable[[], bool]) -> None:
        """End all waiting on this rank's streams, without waiting for it; from any thread.

        Args:
            is_over: whether nothing waits any more.
        """
        self._shared.control[at.STOP // 8] = 1
        if self._wait is not None:
            threading.Thread(
                target=self._poison, args=(is_over,), name="fastcoll-gpu-poison", daemon=True
            ).start()

    def _poison(self, is_over: Callable[[], bool]) -> None:
        """Streams that wait look at nothing but their words."""
        end = time.monotonic() + _POISON_SECONDS
        with self._runtime.on(self._device):
            while not is_over() and time.monotonic() < end:
                self._runtime.to_device(self._shared.page + at.LINES, self._poisoned, self._poisoning)
                self._runtime.wait_stream(self._poisoning)
                time.sleep(_POISON_EVERY)
            self._runtime.end_stream(self._poisoning)
