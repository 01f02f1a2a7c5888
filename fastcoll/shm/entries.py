"""Every entry there is, for whoever wants them compiled ahead. A test finds those that are missing here."""

from __future__ import annotations

from ..kernels import waiting
from ..kernels.jit import Entry
from . import movement as moving
from . import reductions as collectives
from . import ring_kernels, symmetric_kernels

ENTRIES: tuple[Entry, ...] = (
    waiting.seize,
    collectives.barrier,
    collectives.all_reduce,
    collectives.reduce,
    collectives.scan,
    collectives.reduce_scatter,
    moving.broadcast,
    moving.all_gather,
    moving.gather,
    moving.scatter,
    moving.all_to_all,
    ring_kernels.send,
    ring_kernels.receive,
    ring_kernels.post_send,
    ring_kernels.post_receive,
    ring_kernels.begin,
    ring_kernels.accept,
    ring_kernels.acknowledge,
    ring_kernels.advance,
    ring_kernels.retire,
    symmetric_kernels.copy_bytes,
    symmetric_kernels.count_signal,
    symmetric_kernels.await_signal,
)
