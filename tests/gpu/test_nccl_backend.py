"""`backend="nccl"`: its meaning, and the errors where it cannot be used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fastcoll as dist
from fastcoll.core.group import ProcessGroup
from fastcoll.errors import AbortedError, UnavailableError, UsageError
from fastcoll.gpu.nccl import bindings
from fastcoll.job.backends import parse_backend

from .fake_array import FakeArray
from .nccl_world import fakes


def test_nccl_alone_has_the_default_backend_for_host_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "why_unavailable", lambda: None)
    assert str(parse_backend("NCCL")) == "cpu:auto,cuda:nccl"
    assert dist.is_nccl_available()
    assert dist.is_backend_available("nccl")


def test_missing_nccl_is_refused_with_the_command() -> None:
    if (why := bindings.why_unavailable()) is None:
        pytest.skip("NCCL is there")
    assert not dist.is_nccl_available()
    with pytest.raises(UnavailableError, match="backend 'nccl' is not available here") as caught:
        parse_backend("nccl")
    assert why in str(caught.value)
    assert "available: auto, shm, gloo, tcp" in str(caught.value)
    # No error before the first GPU array.
    assert str(parse_backend("cpu:auto,cuda:nccl")) == "cpu:auto,cuda:nccl"


def test_nccl_without_cupy_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnavailableError(f"arrays on GPUs need CuPy: {bindings.INSTALL}")

    with fakes():
        monkeypatch.setattr(bindings, "cupy", missing)
        with pytest.raises(UnavailableError, match=r"pip install '\.\[cuda12\]'"):
            parse_backend("nccl")


def test_a_job_of_one_rank() -> None:
    host, other = np.ones(3, np.float32), np.ones(2)
    with fakes() as (_, nccl):
        assert dist.is_nccl_available()
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        try:
            assert dist.get_backend() == "nccl"
            assert dist.get_backend_config() == "cpu:auto,cuda:nccl"
            dist.all_reduce(FakeArray(host), dist.ReduceOp.PREMUL_SUM(2))
            dist.all_reduce(other)  # in host memory
            group = dist.new_group([0])
            work: Any = dist.all_reduce(
                FakeArray(host), dist.ReduceOp.PREMUL_SUM(2), group=group, async_op=True
            )
            work.wait(timeout=60)
            dist.barrier()
            mine, theirs, last = np.arange(3.0), np.zeros(3), np.zeros(3)
            received = dist.irecv(FakeArray(theirs), 0, tag=3)
            dist.isend(FakeArray(mine), 0, tag=3).wait()
            received.wait()
            dist.send(FakeArray(2 * mine), 0)
            assert dist.recv(FakeArray(last)) == 0
            assert isinstance(group, ProcessGroup)
            group.abort("enough")
            with pytest.raises(AbortedError, match="enough"):
                dist.all_reduce(FakeArray(host), group=group)
        finally:
            dist.destroy_process_group()
    assert host.tolist() == [4, 4, 4]
    assert (theirs.tolist(), last.tolist()) == ([0, 1, 2], [0, 2, 4])
    ends = [nccl.calls.count(f"ncclComm{name}") for name in ("InitRankConfig", "Split", "Destroy", "Abort")]
    assert ends == [1, 1, 1, 1]


def test_nccl_is_no_backend_for_host_arrays() -> None:
    with pytest.raises(UsageError, match="no backend for CPU arrays that is available"):
        parse_backend("cpu:nccl")
