"""Ranks in threads of this process, each with a fake GPU of its own and one communicator of FakeNccl.

    with world(3) as ranks:
        ranks.run(lambda rank, group: ...)

The groups are real ones over TCP. NumPy replaces fastcoll's kernels for reductions and packing, queued on
the fake streams: the kernels have tests of their own, and Numba's simulator is slow.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import oracle
import pytest

from fastcoll.core.group import ProcessGroup
from fastcoll.core.reduce_op import ReduceOp
from fastcoll.errors import GroupError, PeerDiedError
from fastcoll.gpu.nccl import bindings, communicator
from fastcoll.gpu.nccl.backend import NcclCarrier
from fastcoll.gpu.nccl.messages import NcclMessages

from .fake_nccl import FakeNccl
from .fake_runtime import FakeRuntime
from .thread_ranks import Array, Ranks, served

MOST_SOURCES = 4
INT16 = ("int16", "uint16")


class StrictRuntime(FakeRuntime):
    """A runtime where a copy to overlapping memory is an error, because CUDA leaves it undefined."""

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        assert dst + nbytes <= src or src + nbytes <= dst, "a copy overlaps itself"
        super().copy(dst, src, nbytes, stream)


class NcclRanks(Ranks):
    """The ranks of a world with NCCL, whose fake is `nccl`; those in `died` seem dead to the others."""

    def __init__(self, gpu: FakeRuntime, nccl: FakeNccl, groups: Sequence[ProcessGroup]) -> None:
        super().__init__(gpu, groups)
        self.nccl = nccl
        self.died: list[int] = []
        for rank, group in enumerate(groups):
            group.monitor.decide = partial(self._decide, rank, group.monitor.decide)  # type: ignore[method-assign]

    def _decide(self, rank: int, real: Any, needed: Sequence[int], doing: str) -> GroupError | None:
        if died := [other for other in self.died if other != rank]:
            return PeerDiedError(f"rank {died[0]} died; {doing}", died)
        return real(needed, doing)

    def failure(self, kind: type[GroupError]) -> str:
        """Return the text of the first rank's error of a kind: the failure itself, or what the peers know of it."""
        return next(str(group.failure) for group in self.groups if isinstance(group.failure, kind))

    def mail(self, rank: int) -> NcclMessages:
        """Return a rank's messages."""
        carrier: Any = self.groups[rank].devices()
        mail: NcclMessages = carrier.messages
        return mail

    def reductions(self) -> list[tuple[ReduceOp, np.dtype[Any]]]:
        # The fake kernels average 4 arrays at most.
        few = self.size <= MOST_SOURCES
        return [
            (op, t) for op, t in super().reductions() if few or op is not ReduceOp.AVG or t.name not in INT16
        ]

    def assert_reduced(self, got: Array, want: Array, op: ReduceOp = ReduceOp.SUM, what: Any = "") -> None:
        """Compare bit by bit, except float16 and bfloat16, whose sums NCCL rounds, and float32, which it averages."""
        if got.dtype in oracle.HALVES or op.name == "AVG":
            rtol = 0.05 if got.dtype.itemsize == 2 else 1e-5
            np.testing.assert_allclose(got.astype("c16"), want.astype("c16"), rtol, 0.06, err_msg=str(what))
        else:
            oracle.assert_same(got, want, what)

    def close(self) -> None:
        """Close the groups together, as ranks do."""
        self.attempt(lambda rank, group: group.close())
        self.end_streams()


@contextmanager
def world(
    size: int, devices: int | None = None, prompt: bool = True, version: int = 22605
) -> Iterator[NcclRanks]:
    """Make some ranks; at the end nothing may be left, and no rule of NCCL broken."""
    gpus = fakes(size if devices is None else devices, prompt, version)
    with gpus as (gpu, nccl), served(size, NcclCarrier) as made:
        ranks = NcclRanks(gpu, nccl, made)
        try:
            yield ranks
        finally:
            ranks.close()


@contextmanager
def fakes(
    devices: int = 1, prompt: bool = True, version: int = 22605
) -> Iterator[tuple[FakeRuntime, FakeNccl]]:
    """Install fake GPUs and a fake NCCL; the end is as in `world`."""
    gpu = StrictRuntime(devices=devices, prompt=prompt)
    nccl = FakeNccl(gpu, version)
    binding = bindings.NcclLibrary(nccl)
    with (
        gpu.installed(),
        kernels(gpu),
        mock.patch.object(bindings, "library", return_value=binding),
        mock.patch.object(bindings, "cupy"),
        mock.patch.object(communicator, "_FINALIZE_SECONDS", 60.0),  # a slow machine needs no abort
    ):
        yield gpu, nccl
        assert nccl.violations == []
        assert all(comm.ended or comm.aborted for comm in nccl.comms)
        gpu.await_nothing_left()


def assert_ends(work: Any, kind: type[GroupError], text: str) -> None:
    """Wait for the error with which a Work ends."""
    with pytest.raises(kind, match=text):
        work.join()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), kind)


# ---- fastcoll's kernels, by NumPy ---------------------------------------------------------------------


@contextmanager
def kernels(gpu: FakeRuntime) -> Iterator[None]:
    """Return replacements for the parts of `kernels.cuda` that carriers use."""
    reducing = SimpleNamespace(MOST_SOURCES=MOST_SOURCES, cuda_reducer=partial(_Reducer, gpu))
    moving = SimpleNamespace(
        Strided=lambda *layout: layout,
        pack=lambda dense, x, stream, back=False, and_back=False: gpu.queue(
            "pack", stream, lambda: _pack(dense, x, back)
        ),
        scale=lambda *x: gpu.queue("scale", x[-1], lambda: _scale(*x[:-1])),
    )
    # Not mock.patch.dict: at its end it removes every module imported meanwhile. Numba's cannot be imported twice, and
    # fastcoll's would exist twice.
    with pytest.MonkeyPatch.context() as patch:
        for name, module in {
            "": SimpleNamespace(__path__=[]),
            ".reducers": reducing,
            ".packing": moving,
        }.items():
            patch.setitem(sys.modules, f"fastcoll.kernels.cuda{name}", module)
        yield


class _Reducer:
    def __init__(self, gpu: FakeRuntime, op: ReduceOp, dtype: np.dtype[Any]) -> None:
        self._gpu, self._op, self._dtype = gpu, op, dtype

    def prepare(self, n: int) -> None:
        """Do nothing: there is nothing to compile."""
        assert 0 < n <= 64

    def launch(self, dst: int, srcs: Sequence[int], count: int, stream: int) -> None:
        if not count:
            return
        assert 0 < len(srcs) <= MOST_SOURCES
        op, dtype, nbytes = self._op, self._dtype, count * self._dtype.itemsize

        def run() -> None:
            sources = [_bytes_at(src, nbytes).view(dtype) for src in srcs]
            if op.function is not None:
                function = op.function
                total = reduce(
                    lambda a, b: np.array([function(x, y) for x, y in zip(a, b, strict=True)], dtype), sources
                )
            else:
                total = oracle.reduced(sources, op)
            _bytes_at(dst, nbytes).view(dtype)[:] = total

        self._gpu.queue("kernel", stream, run)


def _scale(dst: int, src: int, count: int, dtype: np.dtype[Any], factor: Any) -> None:
    nbytes, by = count * dtype.itemsize, np.zeros(1, dtype)
    by[0] = factor
    _bytes_at(dst, nbytes).view(dtype)[:] = _bytes_at(src, nbytes).view(dtype) * by[0]


def _bytes_at(address: int, nbytes: int) -> Array:
    return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), np.uint8)


def _pack(address: int, layout: tuple[Any, ...], back: bool) -> None:
    first, shape, strides, itemsize = layout
    place = SimpleNamespace(
        __array_interface__={
            "version": 3, "typestr": f"|u{itemsize}", "shape": shape, "strides": strides, "data": (first, False)
        }
    )  # fmt: skip
    view = np.asarray(place)
    dense = _bytes_at(address, view.nbytes).view(view.dtype).reshape(view.shape)
    dst, src = (view, dense) if back else (dense, view)
    dst[...] = src
