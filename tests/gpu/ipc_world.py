"""Ranks that share one fake GPU, as threads of this process, with simulated kernels over its memory.

with world(3) as ranks:
    ranks.run(lambda group: group.all_reduce(gpu(x)))
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from messages.worlds import until
from net.groups import everybody, groups

from fastcoll.gpu.ipc import regions
from fastcoll.gpu.ipc.backend import IpcCarrier
from fastcoll.gpu.staged import StagedCarrier

from .fake_array import FakeArray
from .fake_runtime import FakeRuntime
from .ipc_simulator import concurrent_kernels

Array = np.ndarray[Any, Any]

SLOT = 1024
HERE = threading.local()  # .stream: the stream of this thread's rank; processes share no default stream


class Ranks:
    """Some ranks on one GPU."""

    def __init__(self, fake: FakeRuntime, made: list[Any]) -> None:
        self.fake, self.groups, self.size = fake, made, len(made)
        self._streams = [fake.new_stream(0) for _ in made]

    def attempt(self, call: Callable[[Any], Any]) -> list[Any]:
        """Make a call on each rank; return the results or exceptions."""

        def on(group: Any) -> Any:
            HERE.stream = self._streams[group.rank]
            return call(group)

        return everybody(self.groups, on)

    def close(self) -> None:
        for stream in self._streams:
            self.fake.end_stream(stream)

    def run(self, call: Callable[[Any], Any]) -> list[Any]:
        """Make a call on each rank, and return the results once the GPU has finished."""
        results = self.attempt(call)
        for error in results:
            if isinstance(error, BaseException):
                raise error
        self.fake.settle()
        for group in self.groups:
            assert group.failure is None, group.failure
        return results

    def each(self, make: Callable[[int], Array]) -> list[Array]:
        return [make(rank) for rank in range(self.size)]

    def carrier(self, rank: int) -> IpcCarrier:
        carrier = self.groups[rank].devices()
        assert isinstance(carrier, IpcCarrier)
        return carrier


@contextmanager
def world(size: int, timeout: float = 60.0, slot: int = SLOT) -> Iterator[Ranks]:
    fake = FakeRuntime(prompt=True)
    with concurrent_kernels(), fake.installed():
        with groups(size, timeout=timeout) as made:
            staged = [StagedCarrier(group) for group in made]
            for group in made:
                group.gpus.serve(lambda group: IpcCarrier(group, staged[group.rank], slot))
            ranks = Ranks(fake, made)
            yield ranks
        ranks.close()
        for fallback in staged:
            fallback.close(None)
        # Memory that a failed group's kernels may still use is kept on purpose.
        lost = ("a peer", "pinned") if any(group.failure for group in made) else ()
        kinds = ("shareable", *lost)
        until(lambda: all(name.startswith(kinds) for name in fake.left()))
        regions._reusable.clear()
        regions._abandoned.clear()


def gpu(x: Array) -> FakeArray:
    return FakeArray(x, getattr(HERE, "stream", None))
