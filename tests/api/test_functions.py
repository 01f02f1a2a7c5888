"""The functions on groups: each calls its group with the right ranks and arguments."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from recorder import Recorder, finished

import fastcoll as dist
from fastcoll.api import objects
from fastcoll.errors import NotInitializedError, ResourceError, UsageError
from fastcoll.job.backends import parse_backend
from fastcoll.job.groups import groups

X, Y = object(), object()
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


@pytest.fixture
def world() -> Iterator[Recorder]:
    made = Recorder((0, 1, 2))
    groups.add(made, parse_backend("gloo"))
    yield made
    groups.clear()


@pytest.fixture
def part(world: Recorder) -> Recorder:
    """A group of the global ranks 2, 5 and 7."""
    made = Recorder((2, 5, 7))
    groups.add(made, parse_backend(None))
    return made


# function, arguments without group -> the call on the group
UNROOTED: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = [
    (dist.all_reduce, (X,), ("all_reduce", X, SUM, False)),
    (dist.all_reduce, (X, MAX), ("all_reduce", X, MAX, False)),
    (dist.scan, (X,), ("scan", X, SUM, False)),
    (dist.exscan, (X, MAX), ("exscan", X, MAX, False)),
    (dist.all_gather, ([X], Y), ("all_gather", [X], Y, False)),
    (dist.all_gather_into_tensor, (X, Y), ("all_gather_single", X, Y, False)),
    (dist.all_gather_single, (X, Y), ("all_gather_single", X, Y, False)),
    (dist.reduce_scatter, (X, [Y]), ("reduce_scatter", X, [Y], SUM, False)),
    (dist.reduce_scatter_tensor, (X, Y, MAX), ("reduce_scatter_single", X, Y, MAX, False, None)),
    (dist.reduce_scatter_single, (X, Y), ("reduce_scatter_single", X, Y, SUM, False, None)),
    (dist.all_to_all, ([X], [Y]), ("all_to_all", [X], [Y], False)),
    (dist.all_to_all_single, (X, Y, [1], [2]), ("all_to_all_single", X, Y, [1], [2], False)),
    (dist.all_reduce_coalesced, ([X], MAX), ("all_reduce_coalesced", [X], MAX, False)),
    (dist.all_gather_coalesced, ([[X]], [Y]), ("all_gather_coalesced", [[X]], [Y], False)),
    (dist.barrier, (), ("barrier", False)),
]


@pytest.mark.parametrize(("function", "args", "expected"), UNROOTED)
def test_a_call_reaches_its_group(
    world: Recorder, part: Recorder, function: Any, args: Any, expected: Any
) -> None:
    part.answers[expected[0]] = "work"
    assert function(*args, group=part, async_op=True) == "work"
    assert part.calls == [tuple(True if each is False else each for each in expected)]
    assert world.calls == []
    assert function(*args) is None
    assert world.calls == [expected]


# function, arguments, name of the root argument -> call before and after the group rank of the root
ROOTED: list[tuple[Any, tuple[Any, ...], str, tuple[Any, ...], tuple[Any, ...]]] = [
    (dist.broadcast, (X,), "src", ("broadcast", X), (False,)),
    (dist.reduce, (X,), "dst", ("reduce", X), (SUM, False)),
    (dist.gather, (X, [Y]), "dst", ("gather", X, [Y]), (False,)),
    (dist.scatter, (X, [Y]), "src", ("scatter", X, [Y]), (False,)),
    (dist.send, (X,), "dst", ("send", X), (0,)),
    (dist.recv, (X,), "src", ("recv", X), (0, None)),
    (dist.isend, (X,), "dst", ("isend", X), (0,)),
    (dist.irecv, (X,), "src", ("irecv", X), (0, None)),
]


@pytest.mark.parametrize(("function", "args", "root", "before", "after"), ROOTED)
def test_a_global_rank_becomes_a_group_rank(
    world: Recorder, part: Recorder, function: Any, args: Any, root: str, before: Any, after: Any
) -> None:
    part.answers["irecv"] = finished(0)
    function(*args, **{root: 2})
    assert world.calls == [(*before, 2, *(each for each in after if each is not None))]  # no status
    function(*args, **{root: 5}, group=part)
    function(*args, **{"group_" + root: 2}, group=part)
    assert part.calls == [(*before, 1, *after), (*before, 2, *after)]


@pytest.mark.parametrize(("function", "args", "root", "before", "after"), ROOTED)
def test_a_wrong_rank_is_refused(
    world: Recorder, part: Recorder, function: Any, args: Any, root: str, before: Any, after: Any
) -> None:
    with pytest.raises(UsageError, match=rf"{root}=5 and group_{root}=1 are both given"):
        function(*args, **{root: 5, "group_" + root: 1}, group=part)
    with pytest.raises(UsageError, match=r"global rank 0 is not in the group .*\[2, 5, 7\]"):
        function(*args, **{root: 0}, group=part)
    assert part.calls == []


def test_a_missing_root_is_refused_or_rank_0(world: Recorder) -> None:
    for function in (dist.broadcast, dist.reduce, dist.send, dist.isend):
        with pytest.raises(UsageError, match="is missing; give"):
            function(X)
    dist.gather(X)
    dist.scatter(X)
    assert world.calls == [("gather", X, None, 0, False), ("scatter", X, None, 0, False)]
    with pytest.raises(UsageError, match=r"group is 'gloo'; give a group made by new_group"):
        dist.all_reduce(X, group="gloo")  # type: ignore[arg-type]


def test_a_receive_returns_the_global_rank(world: Recorder, part: Recorder) -> None:
    assert dist.recv(X) == 2
    assert dist.recv(X, group=part, tag=9) == 7
    assert part.calls == [("recv", X, None, 9, None)]
    part.answers["irecv"] = finished(2)
    work = dist.irecv(X, group=part)
    assert work.wait(1)
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert (work.result(), work.source_rank()) == (7, 7)

    async def wait() -> Any:
        return await work

    assert asyncio.run(wait()) == 7
    seen: list[Any] = []
    work.add_done_callback(seen.append)
    assert seen == [work]
    part.answers["irecv"] = finished(error=UsageError("too long"))
    failed = dist.irecv(X, group=part)
    assert isinstance(failed.exception(), UsageError)
    assert not failed.is_success()
    with pytest.raises(UsageError, match="too long"):
        failed.result()


NOT_A_MEMBER = dist.GroupMember.NON_GROUP_MEMBER


OBJECTS: list[tuple[Any, tuple[Any, ...]]] = [
    (dist.all_gather_object, ([None], 1)),
    (dist.gather_object, (1, [None])),
    (dist.broadcast_object_list, ([1],)),
    (dist.scatter_object_list, ([None], [1])),
    (dist.send_object_list, ([1],)),
    (dist.recv_object_list, ([1],)),
]
ASK = (dist.get_rank, dist.get_world_size, dist.get_backend, dist.get_process_group_ranks)
QUERIES: list[tuple[Any, tuple[Any, ...]]] = [(ask, ()) for ask in ASK]


@pytest.mark.parametrize(("function", "args"), [each[:2] for each in (*UNROOTED, *ROOTED)])
def test_outside_the_group_a_call_warns_and_does_nothing(world: Recorder, function: Any, args: Any) -> None:
    roots = {name: 0 for name in ("src", "dst") if name in inspect.signature(function).parameters}
    with pytest.warns(UserWarning, match=r"on rank 1, which is not in the given group") as caught:
        assert function(*args, **roots, group=NOT_A_MEMBER) == (-1 if function is dist.recv else None)
    assert caught[0].filename == __file__
    assert world.calls == []


@pytest.mark.parametrize(
    ("function", "args"), [each[:2] for each in (*UNROOTED, *ROOTED, *OBJECTS, *QUERIES)]
)
def test_a_call_before_init_process_group_names_the_cure(function: Any, args: Any) -> None:
    roots = {name: 0 for name in ("src", "dst") if name in inspect.signature(function).parameters}
    assert not dist.is_initialized()
    assert dist.group.WORLD is None
    with pytest.raises(NotInitializedError, match="call init_process_group first"):
        function(*args, **roots)


def test_barriers_take_a_timeout_and_no_devices(world: Recorder) -> None:
    dist.monitored_barrier(timeout=timedelta(milliseconds=250), wait_all_ranks=True)
    dist.monitored_barrier()
    dist.barrier(timeout=timedelta(milliseconds=250))
    dist.barrier(async_op=True, timeout=2)
    barriers = [("barrier", False, 0.25), ("barrier", True, 2.0)]
    assert world.calls == [("monitored_barrier", 0.25), ("monitored_barrier", 5.0), *barriers]
    with pytest.raises(UsageError, match="timeout is -1"):
        dist.barrier(timeout=-1)
    for devices, said in (([0], r"device_ids is \[0\]"), (0, "device_ids is 0")):
        with pytest.raises(UsageError, match=said):
            dist.barrier(device_ids=devices)  # type: ignore[arg-type]


def test_a_batch_is_posted_in_order(world: Recorder, part: Recorder) -> None:
    part.answers |= {"isend": finished(), "irecv": finished(0)}
    ops = [dist.P2POp(dist.isend, X, 7, part, 3), dist.P2POp(dist.irecv, Y, group=part, group_peer=0)]
    works = dist.batch_isend_irecv(ops)
    assert part.calls == [("isend", X, 2, 3), ("irecv", Y, 0, 0)]
    assert [work.result() for work in works] == [None, 2]


def test_a_wrong_batch_posts_nothing(world: Recorder, part: Recorder) -> None:
    with pytest.raises(UsageError, match="at least one P2POp"):
        dist.batch_isend_irecv([])
    for no_list in (dist.P2POp, None, dist.P2POp(dist.isend, X, 2)):
        with pytest.raises(UsageError, match="give a list of at least one P2POp"):
            dist.batch_isend_irecv(no_list)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="peer is 3"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, X, 2), dist.P2POp(dist.irecv, X, 3)])
    with pytest.raises(UsageError, match="one group"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, X, 2), dist.P2POp(dist.irecv, X, 2, part)])
    with pytest.raises(UsageError, match=r"give fastcoll\.isend or fastcoll\.irecv"):
        dist.P2POp(dist.send, X, 1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="give one of them"):
        dist.P2POp(dist.isend, X)
    assert world.calls == part.calls == []


def test_outside_the_group_a_batch_warns_once(world: Recorder) -> None:
    ops = [dist.P2POp(op, X, 0, NOT_A_MEMBER) for op in (dist.isend, dist.irecv)]
    with pytest.warns(UserWarning, match="batch_isend_irecv on rank 1, which is not in the given") as caught:
        assert dist.batch_isend_irecv(ops) == []
    assert [warning.filename for warning in caught] == [__file__]


def test_all_of_a_list_of_objects_comes_from_one_sender(
    world: Recorder, part: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of another rank may come between the sizes of the first rank's objects and the objects."""
    asked: list[int | None] = []
    data = np.frombuffer(pickle.dumps("x"), np.uint8)

    def recv_objects(x: Any, peer: int | None) -> int:
        asked.append(peer)
        x[...] = data.size if len(asked) == 1 else data
        return 2

    monkeypatch.setattr(part.p2p, "recv_objects", recv_objects, raising=False)
    found: list[Any] = [None]
    assert dist.recv_object_list(found, group=part) == 7
    assert (found, asked) == (["x"], [None, 2])


def test_queries_of_groups(world: Recorder, part: Recorder) -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (1, 3)
    assert (dist.get_rank(part), dist.get_world_size(part)) == (1, 3)
    assert (dist.get_rank(NOT_A_MEMBER), dist.get_world_size(NOT_A_MEMBER)) == (-1, -1)
    assert dist.get_process_group_ranks(part) == [2, 5, 7]
    assert dist.get_process_group_ranks() == [0, 1, 2]
    assert (dist.get_group_rank(part, 7), dist.get_global_rank(part, 2)) == (2, 7)
    assert (dist.get_backend(), dist.get_backend(part)) == ("gloo", "shm")
    assert dist.get_backend_config(part) == "cpu:auto"
    assert dist.group.WORLD is world
    assert dist.GroupMember.WORLD is world
    with pytest.raises(UsageError, match="global rank 3 is not in the group"):
        dist.get_group_rank(part, 3)
    with pytest.raises(UsageError, match=r"group_rank is 0\.0, a float"):
        dist.get_global_rank(part, 0.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"group rank 3 is not in the group .* 0\.\.2"):
        dist.get_global_rank(part, 3)
    with pytest.raises(UsageError, match="not in the group"):
        dist.get_process_group_ranks(NOT_A_MEMBER)


def test_queries_of_a_destroyed_group(world: Recorder, part: Recorder) -> None:
    dist.destroy_process_group(part)
    for ask in (
        *ASK,
        dist.get_backend_config,
        lambda group: dist.get_group_rank(group, 5),
        lambda group: dist.get_global_rank(group, 1),
    ):
        with pytest.raises(NotInitializedError, match="'recorder' was destroyed"):
            ask(part)
    assert dist.get_rank() == 1


def test_every_parameter_of_torch_exists_at_the_same_position() -> None:
    torch = pytest.importorskip("torch.distributed", exc_type=ImportError)
    shared = [n for n in dist.__all__ if inspect.isfunction(getattr(dist, n)) and hasattr(torch, n)]
    assert len(shared) > 40
    for name in shared:
        theirs = [p for p in inspect.signature(getattr(torch, name)).parameters if not p.startswith("_")]
        assert list(inspect.signature(getattr(dist, name)).parameters)[: len(theirs)] == theirs, name


def test_torch_names_of_errors() -> None:
    torch = pytest.importorskip("torch.distributed", exc_type=ImportError)
    names = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "QueueEmptyError")
    for name in names:
        for base in names:
            if issubclass(getattr(torch, name), getattr(torch, base)):
                assert issubclass(getattr(dist, name), getattr(dist, base)), (name, base)
    assert issubclass(dist.CollectiveTimeoutError, dist.DistBackendError)
    assert issubclass(dist.StoreTimeoutError, dist.DistStoreError)


@pytest.mark.parametrize(
    ("device", "said"),
    [(good, "rank is 'x'") for good in (None, 0, "cpu", "cuda:1")]  # the next thing that is checked
    + [(wrong, r"device_id is .* give a device") for wrong in (-1, True, 1.5, "gpu", [0])],
)
def test_a_device_may_be_given_in_every_form_of_torch(device: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        dist.init_process_group(device_id=device, rank="x")  # type: ignore[arg-type]


def test_a_configuration_has_the_backend_of_each_device() -> None:
    named = {"cpu": "gloo", "cuda": "nccl"}
    assert dist.BackendConfig("cpu:gloo,cuda:nccl").get_device_backend_map() == named
    assert repr(dist.BackendConfig("cpu:GLOO,cuda:nccl")) == "cpu:gloo,cuda:nccl"
    assert repr(dist.BackendConfig(dist.Backend.UNDEFINED)) == "cpu:auto"
    with pytest.raises(UsageError, match="there is no backend 'ucc'"):
        dist.BackendConfig("ucc")


def test_the_local_rank_is_the_launchers_or_else_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert dist.get_node_local_rank(fallback_rank=2) == 2
    with pytest.raises(UsageError, match="give fallback_rank"):
        dist.get_node_local_rank()
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert dist.get_node_local_rank(2) == 3
    monkeypatch.setenv("LOCAL_RANK", "")
    assert dist.get_node_local_rank(2) == 2
    for wrong in ("x", "-1", "1" * 5000):
        monkeypatch.setenv("LOCAL_RANK", wrong)
        with pytest.raises(UsageError, match=r"LOCAL_RANK='.* must be a whole number"):
            dist.get_node_local_rank(2)


@pytest.mark.parametrize("name", ["shm", "GLOO", "nccl", "undefined", "a:b", "", 5])
def test_a_backend_name_that_is_taken_or_not_a_word_is_refused(name: Any) -> None:
    with pytest.raises(UsageError, match="give a word that is not among"):
        dist.Backend.register_backend(name, lambda *args: Recorder())


@pytest.mark.parametrize("size", [-5, 1 << 62])
def test_an_impossible_size_of_objects_names_its_sender(size: int) -> None:
    group = Mock(ranks=[3, 4])
    with pytest.raises(ResourceError, match=rf"rank 4 announced {size} bytes of objects"):
        objects._room(size, group, 1)
