"""Ranks that are threads of this process, with arrays on fake GPUs; each carrier's world is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import oracle
from net.groups import groups
from together import together

from fastcoll import ReduceOp
from fastcoll.core.group import ProcessGroup

from .fake_array import FakeArray
from .fake_runtime import FakeRuntime

Array = np.ndarray[Any, Any]


@contextmanager
def served(size: int, carrier: Callable[[Any], Any]) -> Iterator[list[ProcessGroup]]:
    """Groups of ranks over TCP whose arrays on GPUs are carried by `carrier(group)`."""
    with groups(size, timeout=60.0) as made:
        for group in made:
            group.gpus.serve(carrier)
        yield made


class Ranks:
    """The ranks of a world, each on a GPU of its own, or all on one.

    Attributes:
        gpu: the fake.
        groups: one per rank.
        dtypes: some dtypes that the carrier reduces in different ways.
    """

    dtypes: Sequence[np.dtype[Any]] = (*map(np.dtype, ("f4", "i2", "c8", "?")), np.dtype(ml_dtypes.bfloat16))

    def __init__(self, gpu: FakeRuntime, groups: Sequence[Any]) -> None:
        self.gpu, self.groups, self.size = gpu, groups, len(groups)
        self._kept: list[Array] = []  # the fake identifies a GPU by addresses, which no other array may get
        # Real ranks are processes, which share no default stream: one's would wait for another's collective.
        self._streams = [gpu.new_stream(0) for _ in groups] if gpu.devices < self.size else []

    def run(self, does: Callable[[int, Any], Any]) -> list[Any]:
        """Run a function on all ranks at once, and let the GPUs finish; raise a rank's error."""
        results = self.attempt(does)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            raise next((f for f in failures if not isinstance(f, AssertionError)), failures[0])
        self.gpu.settle()
        return results

    def attempt(self, does: Callable[[int, Any], Any]) -> list[Any]:
        """Run a function on all ranks at once; return the result or exception of each rank."""

        def on(rank: int) -> Any:
            with self.gpu.on(rank if self.gpu.devices > 1 else 0):
                return does(rank, self.groups[rank])

        return together(*[lambda rank=rank: on(rank) for rank in range(self.size)])

    def give_up_after(self, seconds: float) -> None:
        """Set the timeout from now on, also for outstanding work; work that must succeed had longer."""
        for group in self.groups:
            group.timeout = seconds

    def array(self, rank: int, host: Array, stream: int | None = None) -> FakeArray:
        """Return an array over the memory of `host`, on the rank's GPU."""
        self._kept.append(host if host.base is None else host.base)
        if self.gpu.devices > 1 and (host.size or host.base is None):
            start = host if host.flags.c_contiguous else host.base
            self.gpu.place(start, rank)
        if stream is None and self._streams:
            stream = self._streams[rank]
        x = FakeArray(host, stream)
        x.device = SimpleNamespace(id=rank if self.gpu.devices > 1 else 0)  # of an array without elements
        return x

    def arrays(self, rank: int, hosts: Sequence[Array]) -> list[FakeArray]:
        return [self.array(rank, host) for host in hosts]

    def each(self, make: Callable[[int], Array]) -> list[Array]:
        """Return `make(rank)` of all ranks."""
        return [make(rank) for rank in range(self.size)]

    def end_streams(self) -> None:
        for stream in self._streams:
            self.gpu.end_stream(stream)

    def reductions(self) -> list[tuple[ReduceOp, np.dtype[Any]]]:
        """Return the operations and dtypes to try."""
        return [(op, dtype) for dtype in oracle.DTYPES for op in oracle.ops_for(dtype)]

    def assert_reduced(self, got: Array, want: Array, op: ReduceOp = ReduceOp.SUM, what: Any = "") -> None:
        oracle.assert_same(got, want, what)


def ones(ranks: Ranks, rank: int, count: int = 3) -> FakeArray:
    """Return an array of a rank's GPU."""
    return ranks.array(rank, np.ones(count, np.float32))
