"""GPU memory that the ranks of a node share and map (CUDA IPC), and the work queued on it.

Each rank's region is a page of words (kernels/cuda/page.py) and SLOTS slots. To free memory that a peer still maps is
undefined behaviour (CUDA Runtime API, cudaIpcOpenMemHandle), and once a peer has unmapped a region, it cannot write
that into the region. So a region is never freed. A rank sets BYE in its peers' pages when it no longer uses their
memory. Once all ranks have set BYE in a region, a later group of the process reuses the region on the same GPU. A peer
may then still have the region mapped for the earlier group; a process maps a region once for all its groups.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...core.group import ProcessGroup
from ...core.signature import Signature
from ...errors import FastcollError
from ...kernels.cuda import page as at
from ...kernels.cuda import steps as kernels
from ...kernels.cuda.driver import driver
from ...kernels.cuda.kernel import SIMULATED
from ...kernels.cuda.reducers import CudaReducer
from ...kernels.cuda.steps import POISON
from .. import idle
from ..device_array import DeviceArray
from ..runtime import waited_stream
from .schedules import IN, SLOT, SLOTS, BlockLocation, Move, ReduceStep, Schedule, Step, slot_of

Array = np.ndarray[Any, Any]
WaitValue = Callable[[int, int, int], None]

# CUDA shares memory in blocks of 2 MiB. An allocation of another size might share a block with other memory.
_BLOCK = 2 << 20
_BYE_SECONDS, _BYE_NAP = 5.0, 0.001
_HANDLE = 64  # bytes of a cudaIpcMemHandle_t
_NOTE = np.dtype([("handle", f"V{_HANDLE}"), ("gpu", "V16"), ("slot", "i8"), ("error", "S256")])
# Seconds between two writes of POISON, the value that ends a stream's wait for a word. One write is not enough, because
# a slow peer may overwrite it.
_POISON_EVERY = 0.005
_POISON_SECONDS = 60.0


class Region(NamedTuple):
    """Memory of one GPU that a group of `size` ranks maps."""

    device: int
    nbytes: int
    address: int
    size: int

    def is_free(self, runtime: Any, words: Array, stream: int) -> bool:
        """Return whether all ranks that used the region have set BYE.

        Args:
            words: pinned memory of `header_bytes` for the copy of the page.
            stream: a stream on which nothing waits.
        """
        runtime.to_host(words, self.address, stream)
        runtime.wait_stream(stream)
        byes = words.view(np.int64)[[(at.rank_words(r) + at.BYE) // 8 for r in range(self.size)]]
        return bool(byes.all())


_reusable: list[Region] = []
_lock = threading.Lock()


def _region(runtime: Any, device: int, nbytes: int, size: int) -> Region:
    """Return a region that all ranks of an earlier group have left, or a new one."""
    with _lock:
        fitting = [old for old in _reusable if (old.device, old.nbytes) == (device, nbytes)]
        if fitting:
            words = runtime.pinned(header_bytes(at.MOST_RANKS))
            with waited_stream(runtime, device) as stream:
                for old in fitting:
                    if old.is_free(runtime, words, stream):
                        _reusable.remove(old)
                        return old._replace(size=size)
    return Region(device, nbytes, runtime.allocate_shareable(nbytes, device), size)


def header_bytes(size: int) -> int:
    """Return the bytes at the beginning of a page that `size` ranks use."""
    return at.LINES + at.RANK_BYTES * size


_mapped: dict[tuple[Any, int, bytes], list[int]] = {}
"""By runtime, GPU and handle: the address of a peer's region in this process, once for each group that uses it."""


def _map(runtime: Any, device: int, handle: bytes) -> int:
    with _lock:
        uses = _mapped.get((runtime, device, handle)) or []
        uses.append(uses[0] if uses else runtime.open(handle, device))
        _mapped[runtime, device, handle] = uses
        return uses[0]


def _unmap(runtime: Any, device: int, handle: bytes) -> None:
    """End one use; unmap the region after the last one, when no collective is outstanding."""
    with _lock:
        uses = _mapped[runtime, device, handle]
        base = uses.pop()
        if uses:
            return
        del _mapped[runtime, device, handle]

    def shut() -> None:
        with suppress(FastcollError), runtime.on(device):
            runtime.shut(base)

    idle.when_idle(shut)


class SharedRegions:
    """One rank's region and its peers', and the work that this rank queues on them.

    Args:
        slot: bytes of a slot.
        wait: makes a stream wait for a word; None if the driver cannot do that. It is used only if ranks share a GPU;
            otherwise kernels poll.
    """

    def __init__(
        self, runtime: Any, rank: int, slot: int, region: Region, shares_gpu: bool, wait: WaitValue | None
    ) -> None:
        self.slot, self._page, self._wait = slot, region.address, wait if shares_gpu else None
        self.control: Array = runtime.pinned(at.CONTROL_BYTES).view(np.int64)
        self.control[:] = 0
        self._runtime, self._rank, self._region = runtime, rank, region
        self._bases: list[int] = [0] * region.size
        self._unmaps: list[Callable[[], None]] = []
        self._header: Array = runtime.pinned(header_bytes(region.size)).view(np.int64)
        self._meet, self._announce = kernels.compiled(kernels.meet), kernels.compiled(kernels.announce)
        self._step, self._publish = kernels.compiled(kernels.step), kernels.compiled(kernels.publish)
        if self._wait is not None:
            # Allocated now: later, pinning memory or creating a stream might wait for the GPU, which waits for POISON.
            self._poisoned: Array = runtime.pinned(at.RANK_BYTES * region.size)
            self._poisoned.view(np.int64)[:] = POISON
            self._poisoning: int = runtime.new_stream(region.device, urgent=True)

    @classmethod
    def meet(
        cls, group: ProcessGroup, runtime: Any, device: int, slot: int
    ) -> tuple[SharedRegions | None, str]:
        """Allocate a region, and map those of all ranks; collective.

        The slot size is the smallest `slot` of any rank.

        Returns:
            the regions and an empty text, or None and the reason for the failure, which is the same on all ranks.
        """
        with runtime.on(device):
            wait, lacking = ready(device)
        note = np.zeros(1, _NOTE)
        note["slot"], note["error"] = slot, lacking.encode()[:256]
        region = None
        try:
            nbytes = -(-(at.PAGE + SLOTS * slot) // _BLOCK) * _BLOCK
            region = _region(runtime, device, nbytes, group.size)
            with runtime.on(device):
                note["handle"] = np.void(runtime.export(region.address))
            note["gpu"] = np.void(runtime.uuid(device))
        except FastcollError as error:
            note["error"] = str(error).encode()[:256]
        notes, reason = _exchanged(group, note)
        if region is not None and not reason:
            shares_gpu = len(set(notes["gpu"].tolist())) < group.size
            with runtime.on(device):
                shared = cls(runtime, group.rank, int(notes["slot"].min()), region, shares_gpu, wait)
                # Peers write to this rank's page only after this exchange; `_mapped` initialises the page before it.
                _, reason = _exchanged(group, shared._mapped(notes["handle"]))
                if not reason:
                    return shared, ""
                shared._unmap()
                shared._end_poisoning()
        if region is not None:
            _keep(region._replace(size=0))
        return None, reason

    def _mapped(self, handles: Array) -> Array:
        """Map the peers' regions and initialise this rank's page; return a note, with the error if this failed."""
        note, size, words = np.zeros(1, _NOTE), self._region.size, self._header
        try:
            self._bases[self._rank] = self._page
            for peer, handle in enumerate(handles):
                if peer != self._rank:
                    where = (self._runtime, self._region.device, bytes(handle))
                    self._bases[peer] = _map(*where)
                    self._unmaps.append(partial(_unmap, *where))
            words[:] = 0
            words[at.SIZE // 8] = size
            words[at.RANK // 8] = self._rank
            words[at.CONTROL // 8] = self.control.ctypes.data
            words[at.PEERS // 8 :][:size] = self._bases
            with waited_stream(self._runtime, self._region.device) as stream:
                self._runtime.to_device(self._page, words.view(np.uint8), stream)
        except FastcollError as error:
            note["error"] = str(error).encode()[:256]
        return note

    def close(self, is_vain: Callable[[], bool]) -> None:
        """Unmap the peers' regions, after this rank has set BYE and none of its kernels uses them.

        First wait until all peers have set BYE in this rank's region: this process may exit next, which frees the
        memory that they use. The wait ends after 5 s, or when `is_vain` returns True.
        """
        end, runtime, words = time.monotonic() + _BYE_SECONDS, self._runtime, self._header.view(np.uint8)
        with runtime.on(self._region.device), waited_stream(runtime, self._region.device) as stream:
            while not (self._region.is_free(runtime, words, stream) or is_vain() or time.monotonic() > end):
                time.sleep(_BYE_NAP)
        self._unmap()
        _keep(self._region)

    def abandon(self) -> None:
        """Keep all memory, including the pinned words, until the process ends: hanging kernels may use it."""
        _abandoned.append(self)

    def _unmap(self) -> None:
        for unmap in self._unmaps:
            unmap()
        self._unmaps.clear()
        self._bases = [0] * len(self._bases)

    # ---- calls ---------------------------------------------------------------------------------------

    def run(
        self,
        stream: int,
        number: int,
        schedule: Schedule,
        signature: Signature,
        ins: Sequence[DeviceArray],
        outs: Sequence[DeviceArray],
        reducer: CudaReducer | None,
    ) -> None:
        """Queue the work of a schedule for call `number`; the GPU must be the current one.

        Args:
            number: calls are counted from 1.
            signature: the values that the ranks compare in step 0.
            ins, outs: the arrays that the schedule refers to.
            reducer: executes the schedule's ReduceSteps.
        """

        def address(location: BlockLocation) -> int:
            kind, index, offset = location
            if kind < SLOT:
                return (ins if kind == IN else outs)[index].address + offset
            return self._bases[index] + at.PAGE + slot_of(number, kind - SLOT) * self.slot + offset

        for item in schedule:
            if isinstance(item, Move):
                dst, src = address(item.dst), address(item.src)
                if dst != src:
                    self._runtime.copy(dst, src, item.nbytes, stream)
            elif isinstance(item, ReduceStep):
                assert reducer is not None
                count = item.nbytes // (outs or ins)[0].dtype.itemsize
                reducer.launch(address(item.dst), [address(src) for src in item.srcs], count, stream)
            elif isinstance(item, Step):
                self._take_step(stream, number, item.number, signature)
            else:
                self._publish(1, stream, self._page, at.STEP, number << at.STEP_BITS | at.LAST_STEP)

    def launches(self, schedule: Schedule) -> int:
        """Return how many launches and waits a part of a schedule queues, at most."""
        most = 1 if self._wait is None else self._region.size + 2
        return sum(most if isinstance(item, Step) else 1 for item in schedule)

    def _take_step(self, stream: int, number: int, step: int, signature: Signature) -> None:
        assert step < at.LAST_STEP
        page, word, offset = self._page, number << at.STEP_BITS | step, at.STEP
        if step == 0:
            word, offset = number, at.LINE * (number % 2) + at.SEQUENCE
        if self._wait is not None:
            if step == 0:
                self._announce(1, stream, page, number, *signature)
            else:
                self._publish(1, stream, page, at.STEP, word)
            for peer in range(self._region.size):
                if peer != self._rank:
                    self._wait(stream, page + at.rank_words(peer) + offset, word)
        if step == 0:
            self._meet(1, stream, page, number, *signature)
        else:
            self._step(1, stream, page, word)

    def publish_bye(self, stream: int) -> None:
        """Set BYE: this rank no longer uses its peers' memory. Blocks until the peers can see it.

        Nothing may be queued here afterwards.
        """
        with self._runtime.on(self._region.device):
            self._publish(1, stream, self._page, at.BYE, 1)
            self._runtime.wait_stream(stream)
            self._end_poisoning()

    def _end_poisoning(self) -> None:
        if self._wait is not None:
            self._runtime.end_stream(self._poisoning)

    def stop(self, is_over: Callable[[], bool]) -> None:
        """End all waits on this rank's streams, without blocking; any thread may call this.

        Args:
            is_over: returns whether no work is left on the streams; until it returns True, later waits are ended, too.
        """
        self.control[at.STOP // 8] = 1
        if self._wait is None:
            return

        def poison() -> None:  # a waiting stream looks only at its word, not at STOP
            end = time.monotonic() + _POISON_SECONDS
            with self._runtime.on(self._region.device):
                while not is_over() and time.monotonic() < end:
                    self._runtime.to_device(self._page + at.LINES, self._poisoned, self._poisoning)
                    self._runtime.wait_stream(self._poisoning)
                    time.sleep(_POISON_EVERY)
                self._end_poisoning()

        threading.Thread(target=poison, name="fastcoll-gpu-poison", daemon=True).start()


_abandoned: list[SharedRegions] = []


def _keep(region: Region) -> None:
    with _lock:
        _reusable.append(region)


def _exchanged(group: ProcessGroup, note: Array) -> tuple[Array, str]:
    """Exchange the ranks' notes, records of the type _NOTE.

    Returns:
        all notes, and the error of the first rank that reports one, or an empty text.
    """
    notes: Array = group.rows_of_all(note.view(np.uint8)).reshape(-1).view(_NOTE)
    for rank, error in zip(group.ranks, notes["error"].tolist(), strict=True):
        if error:
            return notes, f"rank {rank}: {error.decode(errors='replace')}"
    return notes, ""


def ready(device: int) -> tuple[WaitValue | None, str]:
    """Compile and load the kernels before any rank depends on this one; the GPU must be the current one.

    Returns:
        the result of `waits_of_streams` and an empty text; if the kernels cannot be compiled, None and the reason.
    """
    try:
        for kernel in (kernels.meet, kernels.announce, kernels.step, kernels.publish):
            kernels.compiled(kernel).load()
        return waits_of_streams(device), ""
    except Exception as error:  # Numba raises errors of many kinds
        return None, f"{type(error).__name__}: {error}"


def waits_of_streams(device: int) -> WaitValue | None:
    """Return the driver's `wait(stream, address, value)`, or None if this GPU does not support it."""
    if SIMULATED or not driver().can_wait(device):
        return None
    return driver().wait_value
