"""Communicator: one rank's end of a NCCL communicator, made non-blocking, so that nothing of NCCL can hang the host.

Before one is made, its ranks tell each other on the host who sits on which GPU (Seat).

    begun -> ready -> (grouped -> ready)* -> ended | aborted

A call that goes on is asked for until it is through; meanwhile `look` may raise. All calls between `group()`'s begin
and end are one operation of NCCL's: they start together, and none waits for another. Any thread may ask for `trouble`
or abort; after that no function of NCCL is called any more.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ...core.group import ProcessGroup
from ...errors import AbortedError, CollectiveTimeoutError, GroupError, UnavailableError
from .bindings import SUCCESS, UNIQUE_ID_BYTES, Config, Library, NcclError, UniqueId, dtype_code

_ASKED = 100
"""Questions whether a call is through before the first nap. A group is queued by a thread of NCCL's, within tens of
microseconds if all is connected; a question takes about two."""
_NAPS = (0.00002, 0.002)
"""Seconds between two more questions: at first, and at most."""
_ABORT_SECONDS = 1.0
"""How long an abort waits for a call that another thread is in: NCCL_COMM_BLOCKING=1 makes it block there."""
_FINALIZE_SECONDS = 10.0
_HOST = 1  # ncclScalarHostImmediate
_NO_COLOR = -1  # NCCL_SPLIT_NOCOLOR

_LOOK = 0.05
"""Seconds between two looks at peers, as elsewhere."""
_SHARED_GPU = 23000
"""NCCL 2.30, from which NCCL_MULTI_RANK_GPU_ENABLE is known."""

_SEAT = struct.Struct(f"<16s8sII{UNIQUE_ID_BYTES}s")

Look = Callable[[str, float], None]
"""`look(doing, seconds)`: raises when waiting on is in vain."""


class Seat(NamedTuple):
    """What a rank tells when a communicator is made."""

    gpu: bytes  # its GPU's UUID
    host: bytes  # what NCCL_HOSTID makes of its host; NCCL lets ranks share a GPU if they seem to be on two hosts
    version: int  # of its NCCL
    shares: bool  # whether NCCL_MULTI_RANK_GPU_ENABLE lets it share a GPU
    identity: bytes  # the communicator's id, from group rank 0

    @classmethod
    def here(cls, gpu: bytes, version: int, identity: bytes) -> Seat:
        host = hashlib.sha256(os.environ.get("NCCL_HOSTID", "").encode()).digest()[:8]
        shares = version >= _SHARED_GPU and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") not in ("", "0")
        return cls(gpu, host, version, shares, identity)

    def to_row(self) -> np.ndarray:
        """As bytes of one length."""
        packed = _SEAT.pack(self.gpu, self.host, self.version, self.shares, self.identity)
        return np.frombuffer(packed, np.uint8)

    @classmethod
    def from_row(cls, row: np.ndarray) -> Seat:
        gpu, host, version, shares, identity = _SEAT.unpack(row.tobytes())
        return cls(gpu, host, version, bool(shares), identity)


def check_seats(seats: Sequence[Seat], ranks: Sequence[int], group: str) -> None:
    """Refuse what NCCL would hang or fail with; all ranks come to the same."""
    versions = {seat.version // 100 for seat in seats}
    if len(versions) > 1:
        text = ", ".join(f"rank {r} {seat.version}" for r, seat in zip(ranks, seats, strict=True))
        raise UnavailableError(
            f"the ranks of {group} have different versions of NCCL ({text}); install the same on all"
        )
    first: dict[tuple[bytes, bytes], int] = {}
    for rank, seat in zip(ranks, seats, strict=True):
        other = first.setdefault((seat.gpu, seat.host), rank)
        if other != rank and not seat.shares:
            raise UnavailableError(
                f"ranks {other} and {rank} of {group} use one GPU, which NCCL refuses; give each rank a GPU of its "
                "own (LOCAL_RANK, CUDA_VISIBLE_DEVICES), use backend 'auto' or 'shm', or set "
                "NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30)"
            )


class Communicator:
    """See this module's docstring; `look` is asked while a call goes on."""

    def __init__(self, library: Library, handle: Any, look: Look) -> None:
        self._library, self._calls, self._handle, self._look = library, library.calls, handle, look
        self._lock = threading.RLock()
        self._ended = False
        self._splitting = ctypes.c_void_p()  # written to by NCCL, even if nobody waits for it any more

    @classmethod
    def make(cls, library: Library, size: int, rank: int, identity: bytes, look: Look) -> Communicator:
        """Meet the other ranks, on the current GPU; collective, and blocks; aborted if `look` raises."""
        handle, config = ctypes.c_void_p(), ctypes.byref(Config.non_blocking())
        unique, make = UniqueId.from_buffer_copy(identity), library.calls.ncclCommInitRankConfig
        status = make(ctypes.byref(handle), size, unique, rank, config)
        return cls._begun(library, handle, look, status, "making a communicator")

    def split(self, place: int | None) -> Communicator | None:
        """A communicator of those ranks that give their `place` in it, None on others; collective over all ranks.

        Nothing may be under way on the GPU. The new one asks as this one does, until it is told to `ask` another.
        """
        doing, config = "splitting a communicator", ctypes.byref(Config.non_blocking())
        color, made = _NO_COLOR if place is None else 0, ctypes.c_void_p()
        self._splitting = made
        with self._lock:
            self._check_open()
            status = self._calls.ncclCommSplit(self._handle, color, place or 0, ctypes.byref(made), config)
        self._settle(status, doing)  # only then is there a handle
        return None if place is None else self._begun(self._library, made, self._look, SUCCESS, doing)

    def ask(self, look: Look) -> None:
        """Ask `look` from now on."""
        self._look = look

    @classmethod
    def _begun(cls, library: Library, handle: Any, look: Look, status: int, doing: str) -> Communicator:
        if not handle.value:
            library.check(status or 3, doing)
        made = cls(library, handle, look)
        try:
            made._settle(status, doing)
        except BaseException:
            made.abort()
            raise
        return made

    # ---- operations ----------------------------------------------------------------------------------

    @contextmanager
    def group(self, doing: str) -> Iterator[None]:
        """What is called inside is queued as one operation when this ends; blocks until it is queued."""
        with self._lock:
            self._check_open()
            self._check(self._calls.ncclGroupStart(), doing)
            try:
                yield
            finally:
                status = self._calls.ncclGroupEnd()
        self._settle(status, doing)

    def queue(self, operation: str, stream: int, *args: int) -> None:
        """Queue an operation of NCCL's, with what nccl.h says stands before the communicator:

        all_reduce, reduce_scatter  src, dst, count, datatype, operation     `count` numbers of the result
        reduce                      src, dst, count, datatype, operation, root
        broadcast, all_gather       src, dst, nbytes, BYTES[, root]          `dst` may be, or hold, `src`
        send, recv                  address, nbytes, BYTES, peer
        """
        self._check(self._library.operations[operation](*args, self._handle, stream), operation)

    @contextmanager
    def premultiplied_sum(self, factor: Any, dtype: np.dtype[Any]) -> Iterator[int]:
        """An operation that multiplies this rank's numbers by `factor` before it adds; for use inside."""
        made, scalar = ctypes.c_int(), np.array(factor, dtype)
        with self._lock:
            self._check_open()
            status = self._calls.ncclRedOpCreatePreMulSum(
                ctypes.byref(made), scalar.ctypes.data, dtype_code(dtype), _HOST, self._handle
            )
            self._check(status, "making a scaled sum")
        yield made.value
        with self._lock:
            if not self._ended:
                self._check(self._calls.ncclRedOpDestroy(made.value, self._handle), "ending a scaled sum")

    # ---- waiting, errors and the end -----------------------------------------------------------------

    def trouble(self) -> NcclError | None:
        """What went wrong on the network or in a peer since, if anything. Never blocks."""
        if not self._lock.acquire(blocking=False):
            return None  # a call is being made, which tells for itself
        try:
            if not self._ended:
                self._check(self._state(), "communication")
        except NcclError as error:
            return error
        finally:
            self._lock.release()
        return None

    def abort(self) -> None:
        """End what is under way on the GPU, and the communicator. Twice is fine."""
        held = self._lock.acquire(timeout=_ABORT_SECONDS)
        try:
            first, self._ended = not self._ended, True
            if first:
                self._calls.ncclCommAbort(self._handle)  # which has nothing more to tell
        finally:
            if held:
                self._lock.release()

    def close(self) -> None:
        """End the communicator in order; nothing may be under way here. Twice is fine."""
        try:
            with self._lock:
                if self._ended:
                    return
                status = self._calls.ncclCommFinalize(self._handle)
            self._settle(status, "ending a communicator", _FINALIZE_SECONDS)
            with self._lock:
                if not self._ended:
                    self._ended = True
                    self._check(self._calls.ncclCommDestroy(self._handle), "ending a communicator")
        except (NcclError, GroupError):
            self.abort()  # a peer is gone: nothing is lost by not waiting for it

    def _settle(self, status: int, doing: str, limit: float = float("inf")) -> None:
        """Wait until the call that returned `status` is through."""
        started, nap, asked = time.monotonic(), _NAPS[0], 0
        while True:
            self._check(status, doing)
            with self._lock:
                self._check_open()
                if (status := self._state()) == SUCCESS:
                    return
            waited = time.monotonic() - started
            self._look(doing, waited)
            if waited > limit:
                raise NcclError(f"NCCL: {doing} is not through after {limit:g} s")
            asked += 1
            if asked > _ASKED:
                time.sleep(nap)
                nap = min(2 * nap, _NAPS[1])

    def _state(self) -> int:
        """ncclSuccess, ncclInProgress, or what went wrong."""
        state = ctypes.c_int()
        status = self._calls.ncclCommGetAsyncError(self._handle, ctypes.byref(state))
        self._check(status, "asking for its state")
        return state.value

    def _check(self, status: int, doing: str) -> None:
        self._library.check(status, doing, self._handle)

    def _check_open(self) -> None:
        if self._ended:
            raise AbortedError("the NCCL communicator was aborted")


class Patience:
    """What is asked while NCCL is busy with a call on the host: raises what `look` has found twice in a row."""

    def __init__(self, group: ProcessGroup, look: Callable[[str], GroupError | None]) -> None:
        self._group, self._look = group, look
        self._looked, self._suspicious = 0.0, False

    def __call__(self, doing: str, waited: float) -> None:
        group, now = self._group, time.monotonic()
        if group.failure is not None:
            raise group.failure.with_traceback(None)
        if waited > group.timeout:
            raise CollectiveTimeoutError(f"{doing}: NCCL was not through within {group.timeout:g} s")
        if now - self._looked >= _LOOK:
            self._looked = now
            found = self._look(doing)
            if found is not None and self._suspicious:
                raise found
            self._suspicious = found is not None
