"""Ranks that share one fake GPU, as threads of this process, with simulated kernels over its memory.

with world(3) as ranks:
    ranks.run(lambda rank, group: group.all_reduce(ranks.array(rank, x)))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from messages.worlds import until
from net.groups import groups

from fastcoll.gpu.ipc import regions
from fastcoll.gpu.ipc.backend import IpcCarrier
from fastcoll.gpu.staged import StagedCarrier

from .fake_runtime import FakeRuntime
from .ipc_simulator import concurrent_kernels
from .thread_ranks import Ranks

SLOT = 1024


class IpcRanks(Ranks):
    """Some ranks on one GPU."""

    dtypes = Ranks.dtypes[:2]

    def reductions(self) -> Any:
        pairs = super().reductions()
        return pairs if self.size == 3 else pairs[:: len(pairs) // 10]

    def run(self, does: Callable[[int, Any], Any]) -> list[Any]:
        results = super().run(does)
        for group in self.groups:
            assert group.failure is None, group.failure
        return results

    def carrier(self, rank: int) -> IpcCarrier:
        carrier = self.groups[rank].devices()
        assert isinstance(carrier, IpcCarrier)
        return carrier


@contextmanager
def world(size: int) -> Iterator[IpcRanks]:
    fake = FakeRuntime(prompt=True)
    with concurrent_kernels(), fake.installed():
        with groups(size, timeout=60.0) as made:
            staged = [StagedCarrier(group) for group in made]
            for group in made:
                group.gpus.serve(lambda group: IpcCarrier(group, staged[group.rank], SLOT))
            ranks = IpcRanks(fake, made)
            yield ranks
        ranks.end_streams()
        for fallback in staged:
            fallback.close(None)
        # Memory that a failed group's kernels may still use is kept on purpose.
        lost = ("a peer", "pinned") if any(group.failure for group in made) else ()
        kinds = ("shareable", *lost)
        until(lambda: all(name.startswith(kinds) for name in fake.left()))
        regions._reusable.clear()
        regions._abandoned.clear()
