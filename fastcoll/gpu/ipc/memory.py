"""The memory of GPUs that the ranks of one node share, mapped by all of them (CUDA IPC): who makes it, and its end.

Each rank's region is a page of words (kernels/cuda/ipc_page.py) and SLOTS slots. Freeing memory that a peer has still
mapped is undefined (CUDA Runtime API, cudaIpcOpenMemHandle), and that a peer has unmapped it cannot be said in that
memory. So a region is never freed: when all ranks have said BYE, the process's next group on this GPU takes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.group import ProcessGroup
from ...errors import FastcollError
from ...kernels.cuda import ipc_page as at
from .plans import SLOTS

Array = np.ndarray[Any, Any]

# CUDA shares whole blocks of 2 MiB; memory that is no multiple of it might lie in one with somebody else's.
_BLOCK = 2 << 20
_BYE_SECONDS, _BYE_NAP = 5.0, 0.001
_HANDLE = 64  # bytes of a cudaIpcMemHandle_t
_NOTE = np.dtype([("handle", f"V{_HANDLE}"), ("gpu", "V16"), ("slot", "i8"), ("error", "S256")])


@dataclass(frozen=True)
class Region:
    """Memory that `export` takes, of one GPU."""

    device: int
    nbytes: int
    address: int
    size: int
    """Ranks of the group that used it."""

    def is_free(self, runtime: Any) -> bool:
        """Whether all ranks that used it have said BYE."""
        words = runtime.pinned(at.PAGE)
        stream = runtime.new_stream(self.device)
        try:
            runtime.to_host(words, self.address, stream)
            runtime.wait_stream(stream)
        finally:
            runtime.end_stream(stream)
        byes = words.view(np.int64)[[(at.rank_words(r) + at.BYE) // 8 for r in range(self.size)]]
        return bool(byes.all())


_kept: list[Region] = []
_turn = threading.Lock()


def _region(runtime: Any, device: int, nbytes: int, size: int) -> Region:
    """One that all ranks of an earlier group have left, or a new one."""
    with _turn:
        for old in _kept:
            if (old.device, old.nbytes) == (device, nbytes) and old.is_free(runtime):
                _kept.remove(old)
                return Region(device, nbytes, old.address, size)
    return Region(device, nbytes, runtime.allocate_shareable(nbytes, device), size)


class Shared:
    """One rank's region and its peers'.

    Attributes:
        page: the address of this rank's page.
        slot: bytes of a slot.
        shares_gpu: whether two ranks of the group are on one GPU.
        control: the control words.
    """

    def __init__(self, runtime: Any, rank: int, device: int, slot: int, region: Region) -> None:
        self.page, self.slot, self.shares_gpu = region.address, slot, False
        self.control: Array = runtime.pinned(at.CONTROL_BYTES).view(np.int64)
        self.control[:] = 0
        self._runtime, self._rank, self._region = runtime, rank, region
        self._bases: list[int] = [0] * region.size
        self._header: Array = runtime.pinned(at.LINES + at.RANK_BYTES * region.size).view(np.int64)

    @classmethod
    def meet(
        cls, group: ProcessGroup, runtime: Any, device: int, slot: int, lacking: str = ""
    ) -> tuple[Shared | None, str]:
        """Make a region, and map those of all ranks; collective, inside a call of the group.

        Args:
            slot: bytes of a slot; the smallest of any rank's is taken.
            lacking: why this rank cannot take part.

        Returns:
            The memory; or None and why it cannot be had, on all ranks alike.
        """
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
        notes = _gathered(group, note)
        reason = _first_error(group, notes)
        if region is None or reason:
            _keep(region, unused=True)
            return None, reason
        shared = cls(runtime, group.rank, device, int(notes["slot"].min()), region)
        shared.shares_gpu = len(set(notes["gpu"].tolist())) < group.size
        with runtime.on(device):
            reason = _first_error(group, _gathered(group, shared._mapped(notes)))
            if reason:
                shared._unmap()
                _keep(region, unused=True)
                return None, reason
        return shared, ""

    def _mapped(self, notes: Array) -> Array:
        """Map the peers' regions and fill this rank's page; what a peer may write comes after its next message."""
        note = np.zeros(1, _NOTE)
        try:
            for peer, handle in enumerate(notes["handle"]):
                own = peer == self._rank
                self._bases[peer] = (
                    self.page if own else self._runtime.open(bytes(handle), self._region.device)
                )
            self._fill()
        except FastcollError as error:
            note["error"] = str(error).encode()[:256]
        return note

    def _fill(self) -> None:
        size, words = self._region.size, self._header
        words[:] = 0
        words[at.SIZE // 8] = size
        words[at.RANK // 8] = self._rank
        words[at.CONTROL // 8] = self.control.ctypes.data
        words[at.PEERS // 8 :][:size] = self._bases
        stream = self._runtime.new_stream(self._region.device)
        try:
            self._runtime.to_device(self.page, words.view(np.uint8), stream)
            self._runtime.wait_stream(stream)
        finally:
            self._runtime.end_stream(stream)

    def slot_of(self, rank: int, index: int) -> int:
        """The address of a rank's slot."""
        return self._bases[rank] + at.PAGE + index * self.slot

    def close(self, is_vain: Callable[[], bool]) -> None:
        """Unmap the peers' regions. This rank has said BYE, and no kernel of it uses them.

        Waits a while for the peers' BYE: the memory ends with this process, which may end next.

        Args:
            is_vain: whether a peer will never say it.
        """
        end = time.monotonic() + _BYE_SECONDS
        while not (self._region.is_free(self._runtime) or is_vain() or time.monotonic() > end):
            time.sleep(_BYE_NAP)
        with self._runtime.on(self._region.device):
            self._unmap()
        _keep(self._region)

    def lose(self) -> None:
        """Kernels that hang may still use all of it, the pinned words too: keep it until the process ends."""
        _lost.append(self)

    def _unmap(self) -> None:
        for peer, base in enumerate(self._bases):
            if peer != self._rank and base:
                with suppress(FastcollError):
                    self._runtime.shut(base)
        self._bases = [0] * len(self._bases)


_lost: list[Shared] = []


def _keep(region: Region | None, unused: bool = False) -> None:
    if region is not None:
        with _turn:
            _kept.append(Region(region.device, region.nbytes, region.address, 0) if unused else region)


def _gathered(group: ProcessGroup, note: Array) -> Array:
    """Every rank's note."""
    mine = note.view(np.uint8)
    return group.rows_of_all(mine).reshape(-1).view(_NOTE)


def _first_error(group: ProcessGroup, notes: Sequence[Any] | Array) -> str:
    """What a rank could not do, or nothing."""
    for rank, note in zip(group.ranks, notes, strict=True):
        if note["error"]:
            return f"rank {rank}: {note['error'].decode(errors='replace')}"
    return ""
