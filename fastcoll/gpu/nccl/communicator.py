"""Communicator: one rank's end of an NCCL communicator.

It is created non-blocking, so that no NCCL call can hang the host. Before the creation, the ranks exchange on the host
which rank uses which GPU (RankInfo).

    begun -> ready -> (grouped -> ready)* -> ended | aborted

While a call is in progress, the host polls its state. Between two polls it calls `look`, which may raise an error. All
calls inside a `group()` block are one NCCL operation: they start together, and none waits for another. Any thread may
call `trouble` or `abort`. After an abort, this object calls no NCCL function on its communicator.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ...arrays.dtypes import number
from ...core.group import ProcessGroup
from ...errors import AbortedError, CollectiveTimeoutError, GroupError, UnavailableError
from .bindings import SUCCESS, UNIQUE_ID_BYTES, Config, NcclError, NcclLibrary, UniqueId, dtype_code

_ASKED = 100
"""Polls of a call in progress before the first nap.

A thread of NCCL queues the calls of a group. This takes tens of microseconds if all ranks are connected. A poll takes
about two microseconds.
"""
_NAPS = (0.00002, 0.002)
"""Seconds between two later polls: the first nap, and the longest."""
_ABORT_SECONDS = 1.0
"""Seconds that an abort waits for another thread's call on the communicator.

If the user has set NCCL_COMM_BLOCKING=1, such a call may block; otherwise it returns at once.
"""
_END_OF_ABORT_SECONDS = 10.0
_FINALIZE_SECONDS = 10.0
_HOST = 1  # ncclScalarHostImmediate
_NO_COLOR = -1  # NCCL_SPLIT_NOCOLOR

_LOOK = 0.05
"""Seconds between two checks for dead peers, as in core/monitor.py."""
_SHARED_GPU = 23000
"""NCCL 2.30, the first version that supports NCCL_MULTI_RANK_GPU_ENABLE."""

_RANK_INFO = struct.Struct(f"<16s8sII{UNIQUE_ID_BYTES}s")

Look = Callable[[str, float], None]
"""`look(doing, seconds)` raises an error if it is useless to wait longer for a call that has taken `seconds` so far."""


class RankInfo(NamedTuple):
    """The facts that a rank publishes before a communicator is created."""

    gpu: bytes  # its GPU's board (gpu/runtime.py)
    host: bytes  # hash of NCCL_HOSTID; NCCL lets ranks share a GPU if they seem to be on two hosts
    version: int  # NCCL_VERSION_CODE
    shares: bool  # NCCL_MULTI_RANK_GPU_ENABLE lets the rank share its GPU
    identity: bytes  # id of the communicator; empty except from the rank that has created the id

    @classmethod
    def here(cls, gpu: bytes, version: int, identity: bytes) -> RankInfo:
        host = hashlib.sha256(os.environ.get("NCCL_HOSTID", "").encode()).digest()[:8]
        shares = version >= _SHARED_GPU and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") not in ("", "0")
        return cls(gpu, host, version, shares, identity)

    def to_array(self) -> np.ndarray:
        """Return the fields as bytes of a fixed length."""
        packed = _RANK_INFO.pack(self.gpu, self.host, self.version, self.shares, self.identity)
        return np.frombuffer(packed, np.uint8)

    @classmethod
    def from_array(cls, row: np.ndarray) -> RankInfo:
        gpu, host, version, shares, identity = _RANK_INFO.unpack(row.tobytes())
        return cls(gpu, host, version, bool(shares), identity)


def check_ranks(infos: Sequence[RankInfo], ranks: Sequence[int], group: str) -> None:
    """Reject ranks with which NCCL would hang or fail; all ranks make the same decision.

    Raises:
        UnavailableError: versions differ, or two ranks share a GPU.
    """
    versions = {info.version // 100 for info in infos}
    if len(versions) > 1:
        text = ", ".join(f"rank {r} {info.version}" for r, info in zip(ranks, infos, strict=True))
        raise UnavailableError(
            f"the ranks of {group} have different versions of NCCL ({text}); install the same on all"
        )
    first: dict[tuple[bytes, bytes], int] = {}
    for rank, info in zip(ranks, infos, strict=True):
        other = first.setdefault((info.gpu, info.host), rank)
        if other != rank and not info.shares:
            raise UnavailableError(
                f"ranks {other} and {rank} of {group} use one GPU, which NCCL refuses; give each rank a GPU of its "
                "own (LOCAL_RANK, CUDA_VISIBLE_DEVICES), use backend 'auto' or 'shm', or set "
                "NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30)"
            )


class Communicator:
    """One rank's end of a communicator; see the module docstring.

    Args:
        look: called while a call is in progress.
    """

    def __init__(self, library: NcclLibrary, handle: Any, look: Look) -> None:
        self._library, self._calls, self._handle, self._look = library, library.calls, handle, look
        self._lock = threading.RLock()
        self._ended = False
        # Kept alive here, because NCCL may write to this handle after the wait for a split has ended with an error.
        self._splitting = ctypes.c_void_p()

    @classmethod
    def make(cls, library: NcclLibrary, size: int, rank: int, identity: bytes, look: Look) -> Communicator:
        """Create the communicator on the current GPU, with the other ranks.

        Collective, and blocks. The communicator is aborted if `look` raises.
        """
        handle, config = ctypes.c_void_p(), ctypes.byref(Config.non_blocking())
        unique, make = UniqueId.from_buffer_copy(identity), library.calls.ncclCommInitRankConfig
        status = make(ctypes.byref(handle), size, unique, rank, config)
        return cls._begun(library, handle, look, status, "creating a communicator")

    def split(self, rank: int | None) -> Communicator | None:
        """Create a communicator of the ranks that pass their new `rank`; return None if `rank` is None.

        Collective over all ranks. No work may be outstanding on the GPU. The new communicator uses this one's `look`
        until `ask` replaces it.
        """
        doing, config = "splitting a communicator", ctypes.byref(Config.non_blocking())
        color, made = _NO_COLOR if rank is None else 0, ctypes.c_void_p()
        self._splitting = made
        with self._lock:
            self._check_open()
            status = self._calls.ncclCommSplit(self._handle, color, rank or 0, ctypes.byref(made), config)
        self._settle(status, doing)  # NCCL sets the handle only when the call is complete
        return None if rank is None else self._begun(self._library, made, self._look, SUCCESS, doing)

    def ask(self, look: Look) -> None:
        """Replace `look`."""
        self._look = look

    @classmethod
    def _begun(cls, library: NcclLibrary, handle: Any, look: Look, status: int, doing: str) -> Communicator:
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
        """Queue the calls of a `with` block as one operation; block until it is queued."""
        with self._lock:
            self._check_open()
            self._check(self._calls.ncclGroupStart(), doing)
            try:
                yield
            finally:
                status = self._calls.ncclGroupEnd()
        self._settle(status, doing)

    def queue(self, operation: str, stream: int, *args: int) -> None:
        """Queue an NCCL operation; `args` are nccl.h's arguments before the communicator:

        all_reduce, reduce_scatter  src, dst, count, datatype, operation     `count` numbers of the result
        reduce                      src, dst, count, datatype, operation, root
        broadcast, all_gather       src, dst, nbytes, BYTES[, root]          `dst` may be, or contain, `src`
        send, recv                  address, nbytes, BYTES, peer
        """
        self._check(self._library.operations[operation](*args, self._handle, stream), operation)

    @contextmanager
    def premultiplied_sum(self, factor: Any, dtype: np.dtype[Any]) -> Iterator[int]:
        """Yield the code of an NCCL operation that multiplies this rank's numbers by `factor` and adds."""
        made, scalar = ctypes.c_int(), number(factor, dtype)
        with self._lock:
            self._check_open()
            status = self._calls.ncclRedOpCreatePreMulSum(
                ctypes.byref(made), scalar.ctypes.data, dtype_code(dtype), _HOST, self._handle
            )
            self._check(status, "creating a scaled sum")
        yield made.value
        with self._lock:
            if not self._ended:
                self._check(self._calls.ncclRedOpDestroy(made.value, self._handle), "destroying a scaled sum")

    # ---- waiting, errors and the end -----------------------------------------------------------------

    def trouble(self) -> NcclError | None:
        """Return an error of the network or of a peer, or None. Never blocks."""
        if not self._lock.acquire(blocking=False):
            return None  # another thread is in a call, which reports its errors itself
        try:
            if not self._ended:
                self._check(self._state(), "communication")
        except NcclError as error:
            return error
        finally:
            self._lock.release()
        return None

    def abort(self) -> None:
        """Cancel the work on the GPU and end the communicator. A second call does nothing."""
        held = self._lock.acquire(timeout=_ABORT_SECONDS)
        try:
            first, self._ended = not self._ended, True
            if first:
                self._calls.ncclCommAbort(self._handle)  # its result does not matter
        finally:
            if held:
                self._lock.release()

    def close(self) -> None:
        """Finalize and destroy the communicator; this rank must have no work outstanding.

        A second call does nothing.
        """
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
            self.abort()  # a peer is gone, so there is nothing to wait for

    def _settle(self, status: int, doing: str, limit: float = float("inf")) -> None:
        """Wait until the call that returned `status` is complete."""
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
                raise NcclError(f"NCCL: {doing} is not complete after {limit:g} s")
            asked += 1
            if asked > _ASKED:
                time.sleep(nap)
                nap = min(2 * nap, _NAPS[1])

    def _state(self) -> int:
        """Return ncclSuccess or ncclInProgress, or raise the communicator's error."""
        state = ctypes.c_int()
        status = self._calls.ncclCommGetAsyncError(self._handle, ctypes.byref(state))
        self._check(status, "querying its state")
        return state.value

    def _check(self, status: int, doing: str) -> None:
        self._library.check(status, doing, self._handle)

    def _check_open(self) -> None:
        if self._ended:
            raise AbortedError("the NCCL communicator was aborted")


def abort_all(communicators: Iterable[Communicator]) -> None:
    """Abort communicators at the same time, and wait for at most some seconds until they have ended.

    An abort waits for the GPU, and so for the work of another communicator, which may itself wait for a dead peer until
    it is aborted.
    """
    aborts = []
    for each in communicators:
        abort = threading.Thread(target=each.abort, name="fastcoll-abort", daemon=True)
        try:
            abort.start()
        except RuntimeError:  # no thread can be started, for example at the interpreter's end
            each.abort()
        else:
            aborts.append(abort)
    for abort in aborts:
        abort.join(_END_OF_ABORT_SECONDS)


class Backoff:
    """The `look` of a group's communicators.

    It raises the group's failure if the group has failed, and CollectiveTimeoutError at the group's timeout. It raises
    an error that the function `look` returns only if `look` has returned one in the check before, too.
    """

    def __init__(self, group: ProcessGroup, look: Callable[[str], GroupError | None]) -> None:
        self._group, self._look = group, look
        self._looked, self._suspicious = 0.0, False

    def __call__(self, doing: str, waited: float) -> None:
        group, now = self._group, time.monotonic()
        if group.failure is not None:
            raise group.failure.with_traceback(None)
        if waited > group.timeout:
            raise CollectiveTimeoutError(f"{doing}: NCCL was not complete within {group.timeout:g} s")
        if now - self._looked >= _LOOK:
            self._looked = now
            found = self._look(doing)
            if found is not None and self._suspicious:
                raise found
            self._suspicious = found is not None
