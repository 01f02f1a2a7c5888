"""Making a group's communicator: who sits on which GPU, told over the group's CPU backend, and patience with NCCL."""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.group import ProcessGroup
from ...errors import CollectiveTimeoutError, GroupError, UnavailableError
from .check import exchanged
from .comm import Communicator
from .library import UNIQUE_ID_BYTES, Library

_LOOK = 0.05
"""Seconds between two looks at peers, as elsewhere (watch.py)."""
_SHARED_GPU = 23000
"""NCCL 2.30, from which NCCL_MULTI_RANK_GPU_ENABLE is known."""

_SEAT = struct.Struct(f"<16s8sII{UNIQUE_ID_BYTES}s")


@dataclass(frozen=True)
class Seat:
    """What a rank tells when a communicator is made.

    Attributes:
        gpu: its GPU's UUID.
        host: what NCCL_HOSTID makes of its host; NCCL lets ranks share a GPU if they seem to be on two hosts.
        version: of its NCCL.
        shares: whether NCCL_MULTI_RANK_GPU_ENABLE lets it share a GPU.
        identity: the communicator's id, from group rank 0.
    """

    gpu: bytes
    host: bytes
    version: int
    shares: bool
    identity: bytes

    @classmethod
    def here(cls, gpu: bytes, version: int, identity: bytes) -> Seat:
        """This process's."""
        host = hashlib.sha256(os.environ.get("NCCL_HOSTID", "").encode()).digest()[:8]
        shares = version >= _SHARED_GPU and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") not in ("", "0")
        return cls(gpu, host, version, shares, identity)

    def to_row(self) -> np.ndarray:
        """As bytes of one length."""
        packed = _SEAT.pack(self.gpu, self.host, self.version, self.shares, self.identity)
        return np.frombuffer(packed, np.uint8)

    @classmethod
    def from_row(cls, row: np.ndarray) -> Seat:
        """What `to_row` gave."""
        gpu, host, version, shares, identity = _SEAT.unpack(row.tobytes())
        return cls(gpu, host, version, bool(shares), identity)


def check_seats(seats: Sequence[Seat], ranks: Sequence[int], group: str) -> None:
    """Refuse what NCCL would hang or fail with; all ranks come to the same.

    Raises:
        UnavailableError: two ranks share a GPU, or have different versions of NCCL.
    """
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


class Patience:
    """What is asked while NCCL is busy with a call on the host: raises once waiting is in vain.

    Args:
        look: why waiting is in vain, or None; a failure counts when it is seen twice.
    """

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


def make_communicator(
    group: ProcessGroup, library: Library, runtime: Any, device: int, patience: Patience
) -> Communicator:
    """A communicator of the group's ranks, each with one GPU; collective, and blocks.

    Raises:
        UnavailableError: two ranks share a GPU, or have different versions of NCCL; on all ranks.
        NcclError, GroupError: it cannot be made.
    """
    identity = library.unique_id() if group.rank == 0 else b""
    seat = Seat.here(runtime.uuid(device), library.version, identity)
    seats = [Seat.from_row(row) for row in exchanged(group, seat.to_row())]
    check_seats(seats, group.ranks, group.name)
    with runtime.on(device):
        return Communicator.make(library, group.size, group.rank, seats[0].identity, patience)
