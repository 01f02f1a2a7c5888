"""The choice of a group's carrier, and the ranks' agreement in their first call."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from net.groups import everybody, groups

from fastcoll import ReduceOp
from fastcoll.core.backend import StreamCall
from fastcoll.core.work import Work
from fastcoll.errors import FastcollError, GroupError, MismatchError
from fastcoll.gpu import auto
from fastcoll.gpu.auto import IPC, NCCL, STAGED, AutoCarrier, Facts, choose
from fastcoll.gpu.carriers import carrier_for, carrier_name
from fastcoll.gpu.staged import StagedCarrier

from .fake_array import FakeArray
from .thread_ranks import served


def rank(gpu, nccl=True, kernels=True, reaches_all=True, board=None):
    return Facts(gpu.encode(), (board or gpu).encode(), nccl, kernels, reaches_all)


@pytest.mark.parametrize(
    ("facts", "one_node", "wanted"),
    [
        ([rank("a"), rank("a")], True, IPC),
        ([rank("a"), rank("b")], True, IPC),
        ([rank("a")], True, IPC),
        ([rank("a"), rank("b", reaches_all=False)], True, NCCL),
        ([rank("a"), rank("b", kernels=False)], True, NCCL),
        ([rank("a"), rank("b")], False, NCCL),
        (
            [rank("a", board="x", reaches_all=False), rank("b", board="x")],
            True,
            STAGED,
        ),  # two instances (MIG)
        ([rank("a"), rank("a")], False, STAGED),
        ([rank("a"), rank("b", nccl=False)], False, STAGED),
        ([rank("a", kernels=False), rank("a")], True, STAGED),
        ([rank("a", nccl=False), rank("b", reaches_all=False)], True, STAGED),
    ],
)
def test_choose(facts, one_node, wanted):
    assert choose(facts, one_node) == wanted


def test_backends_that_need_no_agreement(gpu):
    with groups(1) as (group,):
        for backend in ("tcp", "gloo", "mpi"):
            assert isinstance(carrier_for(backend, group), StagedCarrier)
        assert isinstance(carrier_for("auto", group), AutoCarrier)


def choosing(n):
    """Groups whose ranks choose a carrier in their first call."""
    return served(n, lambda group: carrier_for("auto", group))


def test_every_rank_publishes_the_facts_about_its_gpu(two_gpus):
    gpu = two_gpus
    with groups(2) as made:
        same = everybody(made, lambda g: auto.agree(g, 1))
        assert [each.gpu for each in same[0]] == [each.board for each in same[0]] == [gpu.uuid(1)] * 2
        assert same[0] == same[1]
        assert all(each.reaches_all for each in same[0])
        gpu.apart.add((1, 0))
        facts, _ = everybody(made, lambda g: auto.agree(g, g.rank))
        assert [each.reaches_all for each in facts] == [True, False]
        gpu.boards.update({0: bytes(16), 1: bytes(16)})
        facts, _ = everybody(made, lambda g: auto.agree(g, g.rank))
        assert [(each.gpu, each.board) for each in facts] == [(gpu.uuid(r), bytes(16)) for r in (0, 1)]
        assert auto.on_one_node(made[0])


class Queueing(StagedCarrier):
    """Replaces a carrier that queues on streams: it records who starts calls, and finishes at once."""

    started: list[str]

    def plan(self, operation, timeout=None):
        return Started()


class Started(StreamCall):
    def start(self, name, owners):
        Queueing.started.append(f"{name} {len(owners)}")
        work = Work(name)
        work.complete()
        return work


@pytest.fixture
def queueing(monkeypatch):
    """Groups whose ranks choose a Queueing carrier."""
    monkeypatch.setattr(auto, "choose", lambda facts, one_node: NCCL)
    monkeypatch.setattr(Queueing, "started", [], raising=False)
    monkeypatch.setattr("fastcoll.gpu.nccl.backend.NcclCarrier", Queueing)


@pytest.mark.usefixtures("gpu", "queueing")
def test_later_calls_are_the_chosen_carriers_own():
    with choosing(1) as (group,):
        x = FakeArray(np.ones(3))
        group.all_reduce(x, async_op=True).wait()
        group.all_reduce(x)
        # The call that made the choice finishes the owners of the first.
        assert Queueing.started == ["all_reduce 0", "all_reduce 1"]


@pytest.mark.usefixtures("gpu", "queueing")
def test_calls_stay_behind_those_that_wait_for_the_choice():
    with choosing(1) as (group,):
        x = FakeArray(np.ones(3))
        group.all_reduce(x)
        go_on = threading.Event()
        group.gate.queue.submit("holding", go_on.wait)
        second = group.all_reduce(x, async_op=True)
        assert len(Queueing.started) == 1
        go_on.set()
        second.wait()
        assert len(Queueing.started) == 2


@pytest.mark.usefixtures("gpu")
def test_ranks_that_differ_in_their_first_call_may_try_again():
    with choosing(2) as made:
        xs = [np.ones(3), np.ones(3)]
        results = everybody(made, lambda g: g.barrier() if g.rank else g.all_reduce(FakeArray(xs[0])))
        assert [type(result) for result in results] == [MismatchError] * 2
        assert "here all_reduce" in str(results[0])
        assert everybody(made, lambda g: g.all_reduce(FakeArray(xs[g.rank]), ReduceOp.MAX)) == [None, None]
        assert isinstance(made[0].devices().chosen, StagedCarrier)
        assert carrier_name(made[0]) == "StagedCarrier"


@pytest.mark.usefixtures("gpu")
def test_the_name_of_a_carrier_that_nobody_had_to_choose():
    with served(1, StagedCarrier) as (group,):
        assert carrier_name(group) == "StagedCarrier"


def test_a_rank_without_facts_fails_the_call_on_all_ranks(two_gpus, monkeypatch):
    with choosing(2) as made:
        uuid = two_gpus.uuid

        def fail(device):
            if device == 1:
                raise FastcollError("CUDA: querying a GPU's name failed")
            return uuid(device)

        monkeypatch.setattr(two_gpus, "uuid", fail)
        xs = [np.ones(3), np.ones(3)]
        two_gpus.place(xs[1], 1)
        results = everybody(made, lambda g: g.all_reduce(FakeArray(xs[g.rank])))
        assert isinstance(results[0], GroupError)
        assert "querying a GPU's name" in str(results[1])


@pytest.mark.usefixtures("queueing")
@pytest.mark.parametrize("names_its_gpu", [True, False])
def test_an_empty_first_array_chooses_its_own_gpu_or_the_current_one(two_gpus, monkeypatch, names_its_gpu):
    chosen = []
    monkeypatch.setattr(auto, "agree", lambda group, device: chosen.append(device) or [rank("a")])
    empty = FakeArray(np.ones(0))
    if names_its_gpu:
        empty.device = SimpleNamespace(id=1)
    with choosing(1) as (group,), nullcontext() if names_its_gpu else two_gpus.on(1):
        group.all_reduce(empty)
    assert chosen == [1]
