"""Symmetric arrays of a group in shared memory: how ranks make a segment together, and signals in it.

A segment an array. The ranks speak through the group itself: they compare what they ask for, and rank 0 tells
the name before it makes it, so that every survivor can unlink it. All unlink it at the end, whatever happened.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from ..core.backend import SymmetricMemory
from ..core.monitor import Monitor, Wait
from ..core.status import DONE
from ..errors import (
    AbortedError,
    FastcollError,
    GroupError,
    MismatchError,
    NotInitializedError,
    ResourceError,
    UsageError,
)
from ..interop.arrays import Array
from ..kernels import waiting
from ..kernels.primitives import address_of
from . import segment as shared
from .context import BUDGET, Context
from .layout import CHANNELS, SymmetricLayout
from .segment import Segment
from .symmetric_kernels import SymmetricTable, await_signal, copy_bytes, count_signal

NOTE_BYTES = 1024
_COPY_BYTES = 64 << 20  # a few ms, after which Python sees signals

Exchange = Callable[[str], list[str]]
"""Every rank's note, of at most NOTE_BYTES; collective."""


class SymmetricArrays:
    """The symmetric arrays of a group, as one of its ranks has them.

    Args:
        modes: spins and yields of a wait, see `context.patience`.
        check_usable: raises if the group has failed or was destroyed.
        fail: makes the group fail.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        timeout: float,
        vigil: Monitor,
        context: Context,
        modes: tuple[int, int],
        check_usable: Callable[[], None],
        fail: Callable[[GroupError], None],
    ) -> None:
        self.ranks, self.rank, self.timeout = tuple(ranks), rank, timeout
        self.vigil, self.modes = vigil, modes
        self.check_usable, self.fail = check_usable, fail
        self.waits: set[object] = set()
        self._table = SymmetricTable(context.words)

    def allocate(self, exchange: Exchange, nbytes: int, label: str) -> ShmMemory:
        """Memory for `nbytes` a rank, all zeros; collective."""
        layout = SymmetricLayout.of(len(self.ranks), nbytes)
        segment = self._meet(exchange, layout, label)
        memory = ShmMemory(self, segment, layout)
        own = memory.address + self.rank * memory.stride
        self._table.add(memory, own, nbytes, segment.nonce, memory.stride)
        return memory

    def _meet(self, exchange: Exchange, layout: SymmetricLayout, label: str) -> Segment:
        name = self._agree(exchange, label)
        segment: Segment | None = None
        try:
            for maker in (True, False):
                error = ""
                if maker == (self.rank == 0):
                    try:
                        segment = _make(name, layout) if maker else Segment.attach(name, layout)
                    except (ResourceError, OSError) as refused:
                        error = f"{label}: {refused}"
                self._raise_any(exchange(error))
        except BaseException as error:
            if not isinstance(error, FastcollError):
                self.fail(
                    AbortedError(
                        f"rank {self.ranks[self.rank]} was interrupted in symmetric.empty: {error!r}"
                    )
                )
            raise
        finally:
            shared.unlink(name)
        assert segment is not None
        return segment

    def _agree(self, exchange: Exchange, label: str) -> str:
        """The segment's name, if all ranks ask for the same."""
        name = shared.new_name() if self.rank == 0 else ""
        notes = exchange(f"{name}\n{_shortened(label)}")
        labels = [note.partition("\n")[2] for note in notes]
        if len(set(labels)) > 1:
            said = "; ".join(f"rank {r}: {text}" for r, text in zip(self.ranks, labels, strict=True))
            raise MismatchError(
                f"the ranks ask for different symmetric arrays: {said}; give the same shape and dtype on all ranks"
            )
        return notes[0].partition("\n")[0]

    def _raise_any(self, errors: Sequence[str]) -> None:
        for rank, error in zip(self.ranks, errors, strict=True):
            if error:
                raise ResourceError(f"rank {rank} cannot make a symmetric array of {error}")


def _make(name: str, layout: SymmetricLayout) -> Segment:
    # Before anything is reserved: pages that are taken and given back again may be another program's last ones.
    if layout.nbytes > shared.free_bytes():
        raise ResourceError(shared.shortage(layout.nbytes, layout.cure))
    return Segment.create(name, layout)


def _shortened(label: str) -> str:
    room = NOTE_BYTES // 2
    return (
        label if len(label.encode()) <= room else f"{label[: room // 4]}... ({zlib.crc32(label.encode()):#x})"
    )


class ShmMemory(SymmetricMemory):
    """One segment; it is unmapped when this is garbage, after its row was taken out of the table."""

    channels = CHANNELS

    def __init__(self, arrays: SymmetricArrays, segment: Segment, layout: SymmetricLayout) -> None:
        address = segment.address + layout.section(0) + layout.array_at
        super().__init__(arrays.ranks, arrays.rank, address, layout.stride, layout.slot)
        self._segment, self._layout = segment, layout
        # Weak: a failed group keeps its error, whose traceback keeps frames and so ndarrays, which keep this; and the
        # garbage collector does not see what an ndarray keeps.
        self._arrays = weakref.ref(arrays)
        self._incoming: dict[tuple[int, int], _Incoming] = {}

    def _usable_arrays(self) -> SymmetricArrays:
        arrays = self._arrays()
        if arrays is None:
            raise NotInitializedError("the group of the symmetric array was destroyed; make a new one")
        arrays.check_usable()
        return arrays

    def copy(self, dst: Array, src: Array) -> None:
        self._usable_arrays()
        to, source, nbytes = address_of(dst), address_of(src), dst.nbytes
        for start in range(0, nbytes, _COPY_BYTES):
            copy_bytes.call(to + start, source + start, min(_COPY_BYTES, nbytes - start))

    def signal(self, rank: int, channel: int) -> None:
        self._usable_arrays()
        count_signal.call(self._segment.address + self._layout.signal(self.rank, rank, channel))

    def wait(self, rank: int, channel: int, timeout: float | None) -> None:
        arrays = self._usable_arrays()
        key = rank, channel
        incoming = self._incoming.get(key) or self._incoming.setdefault(key, _Incoming(arrays.modes))
        word = self._segment.address + self._layout.signal(rank, self.rank, channel)
        if not incoming.lock.acquire(blocking=False):
            raise UsageError(
                f"two threads wait for signals of rank {self.ranks[rank]} on channel {channel}; give each a channel"
            )
        limit = arrays.timeout if timeout is None else timeout

        def trouble() -> Wait:
            return Wait(arrays.vigil, f"symmetric.wait on channel {channel}", lambda: [rank], limit)

        arrays.waits.add(incoming)  # from now on, destroying the group aborts it first
        try:
            arrays.check_usable()
            incoming.take(word, trouble)
        except GroupError as error:
            arrays.fail(error)
            raise
        finally:
            arrays.waits.discard(incoming)
            incoming.lock.release()


class _Incoming:
    """The signals that this rank takes from one peer on one channel."""

    def __init__(self, modes: tuple[int, int]) -> None:
        self.lock = threading.Lock()
        self.taken = 0
        self.patience = np.zeros(waiting.PATIENCE_WORDS, np.int64)
        self.patience[[waiting.SPINS, waiting.YIELDS]] = modes
        self.patience[waiting.BUDGET] = BUDGET
        self._address = address_of(self.patience)

    def take(self, word: int, trouble: Callable[[], Wait]) -> None:
        """Wait for one more signal than were taken; `trouble` makes what looks for it, when it takes long."""
        if await_signal.call(self._address, word, self.taken + 1) != DONE:
            wait = trouble()
            while await_signal.call(self._address, word, self.taken + 1) != DONE:
                wait.look()
            self.patience[waiting.IDLE] = 0
        self.taken += 1
