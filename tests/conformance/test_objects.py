"""The object collectives: their results, and that one rank's failure raises on every rank."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import fastcoll as dist
from fastcoll import config
from fastcoll.api import objects
from fastcoll.errors import MismatchError, ResourceError, UnavailableError, UsageError


def unpicklable() -> None:
    """Return a function that pickle refuses, like a lambda: its name cannot be imported."""


unpicklable.__qualname__ = "nowhere"


def thing(rank: int) -> Any:
    """Return an object of another size on every rank."""
    return {"rank": rank, "text": "x" * (7**rank), "array": np.arange(rank)}


def same(left: Any, right: Any) -> bool:
    return bool(
        left["rank"] == right["rank"]
        and left["text"] == right["text"]
        and np.array_equal(left["array"], right["array"])
    )


@pytest.mark.ranks(1, 3)
def test_every_object_collective(rank: int, world_size: int) -> None:
    root, things = world_size - 1, [thing(r) for r in range(world_size)]
    everywhere: list[Any] = [None] * world_size
    at_root: list[Any] | None = [None] * world_size if rank == root else None
    dist.all_gather_object(everywhere, thing(rank))
    dist.gather_object(thing(rank), at_root, dst=root)
    for found in filter(None, (everywhere, at_root)):
        assert all(map(same, found, things))
    large = np.arange(1 << 20)
    news: list[Any] = [thing(1), None, "ü", large] if rank == root else [None] * 4
    dist.broadcast_object_list(news, src=root, device="cpu")
    assert same(news[0], thing(1))
    assert news[1:3] == [None, "ü"]
    assert np.array_equal(news[3], large)
    dist.broadcast_object_list([])
    given: list[Any] = [None, "stays"]
    dist.scatter_object_list(given, tuple(things) if rank == root else None, src=root)
    assert same(given[0], thing(rank))
    assert given[1] == "stays"


@pytest.mark.ranks(3)
def test_objects_from_one_to_another(rank: int) -> None:
    if rank == 0:
        found: list[Any] = [None, None]
        senders = {dist.recv_object_list(found), dist.recv_object_list(found)}
        assert senders == {1, 2}
        dist.barrier()
        assert dist.recv_object_list(found, src=2) == 2
        assert found == ["last", 2]
    else:
        dist.send_object_list((thing(rank), rank), dst=0)
        dist.barrier()  # a second message of rank 2 would otherwise be one of the first two
        if rank == 2:
            dist.send_object_list(["last", 2], group_dst=0, use_batch=True)


@pytest.mark.ranks(4)
def test_objects_in_a_group(rank: int) -> None:
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        found: list[Any] = [None] * 2
        dist.all_gather_object(found, rank, group)
        assert found == [1, 3]
        one: list[Any] = [rank]
        dist.broadcast_object_list(one, src=3, group=group)
        assert one == [3]
        dist.scatter_object_list(one, ["a", "b"] if rank == 1 else None, group_src=0, group=group)
        assert one == ["a" if rank == 1 else "b"]
        if rank == 1:
            dist.send_object_list(["p"], dst=3, group=group)
        else:
            assert dist.recv_object_list(one, group=group) == 1
    else:
        with pytest.warns(UserWarning, match="all_gather_object on rank"):
            dist.all_gather_object([], rank, group)
        with pytest.warns(UserWarning, match="recv_object_list on rank"):
            assert dist.recv_object_list([None], group=group) == -1


@pytest.mark.ranks(2)
def test_arrays_of_any_tag_and_objects_do_not_mix(rank: int) -> None:
    largest = 2**31 - 1
    if rank == 0:
        # Bytes that could be read as the size of an object, and then as the object.
        text = np.frombuffer(pickle.dumps("foreign"), np.uint8)
        works = [dist.isend(np.array([text.size]), 1, tag=largest), dist.isend(text, 1, tag=largest)]
        dist.send_object_list(["mine"], 1)
        for work in works:
            assert work is not None
            work.wait()
    else:
        found: list[Any] = [None]
        assert dist.recv_object_list(found) == 0
        assert found == ["mine"]
        size = np.empty(1, int)
        dist.recv(size, 0, tag=largest)
        dist.recv(np.empty(size[0], np.uint8), tag=largest)
    for tag in (largest + 1, largest + 2, largest + 3):  # where objects and announcements are
        with pytest.raises(UsageError, match=r"tags are integers from 0 to 2\*\*31 - 1"):
            dist.send(np.ones(1), 1 - rank, tag=tag)


@pytest.mark.ranks(3)
def test_no_memory_for_objects_is_an_error_on_every_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(size: int, *_: Any) -> Any:
        raise ResourceError(f"{size} bytes, for which there is no memory")

    def raises_everywhere(name: str) -> Any:
        return pytest.raises(
            ResourceError if rank == 1 else UsageError,
            match="^[0-9]+ bytes"
            if rank == 1
            else rf"rank 1's {name} was refused: ResourceError: [0-9]+ bytes",
        )

    everywhere: list[Any] = [None] * 3
    with monkeypatch.context() as patch:
        if rank == 1:
            patch.setattr(objects, "_room", no_room)
        with raises_everywhere("all_gather_object"):
            dist.all_gather_object(everywhere, rank)
        with raises_everywhere("gather_object"):
            dist.gather_object(rank, everywhere if rank == 1 else None, dst=1)
        with raises_everywhere("broadcast_object_list"):
            dist.broadcast_object_list([rank])
        with raises_everywhere("scatter_object_list"):
            dist.scatter_object_list([None], everywhere if rank == 0 else None)
        if rank == 0:
            with pytest.raises(MismatchError, match=r"no memory for the objects\. The message was dropped"):
                dist.send_object_list(["x" * 1000], 1)
        elif rank == 1:
            with pytest.raises(ResourceError, match="no memory"):
                dist.recv_object_list([None], 0)
    if rank == 0:
        dist.send_object_list(["y"], 1)
    elif rank == 1:
        dist.recv_object_list(everywhere[:1], 0)
    dist.all_gather_object(everywhere, rank)
    assert everywhere == [0, 1, 2]


@pytest.mark.ranks(3)
def test_an_object_that_cannot_be_pickled_is_an_error_on_every_rank(rank: int) -> None:
    bad = 1
    own = unpicklable if rank == bad else rank
    everywhere: list[Any] = [None] * 3

    def raises_everywhere(name: str) -> Any:
        refused = rf"rank 1's {name} was refused: UsageError: .*cannot be pickled: \w+: "
        return pytest.raises(UsageError, match="^the object cannot" if rank == bad else refused)

    with raises_everywhere("all_gather_object"):
        dist.all_gather_object(everywhere, own)
    with raises_everywhere("gather_object"):
        dist.gather_object(own, everywhere if rank == 2 else None, dst=2)
    with raises_everywhere("broadcast_object_list"):
        dist.broadcast_object_list([own, own], src=bad)
    with raises_everywhere("scatter_object_list"):
        dist.scatter_object_list([None], [0, unpicklable, 0] if rank == bad else None, src=bad)
    message = "cannot be pickled" if rank == bad else "rank 1 could not send its objects"
    if rank != 2:
        with pytest.raises(UsageError, match=message):
            dist.send_object_list([own], dst=0) if rank == bad else dist.recv_object_list([None], src=bad)
    dist.all_gather_object(everywhere, rank)  # the group is as it was
    assert everywhere == [0, 1, 2]


@pytest.mark.ranks(2)
def test_a_wrong_list_is_an_error_on_every_rank(rank: int) -> None:
    wrong = "give a list of 2 items, one for each rank of the group"
    with pytest.raises(UsageError, match=wrong):
        dist.all_gather_object([None] * (2 + rank), rank)
    with pytest.raises(UsageError, match=wrong):
        dist.gather_object(rank, None, dst=1)
    with pytest.raises(UsageError, match=wrong):
        dist.scatter_object_list([None], [1, 2, 3] if rank == 1 else None, src=1)
    with pytest.raises(UsageError, match="is empty"):
        dist.scatter_object_list([], [1, 2] if rank == 1 else None, src=1)
    with pytest.raises(UsageError, match="leave it out"):
        dist.broadcast_object_list([1], device="cuda")
    check_usable(rank)


def check_usable(rank: int) -> None:
    found: list[Any] = [None] * 2
    dist.all_gather_object(found, rank)
    assert found == [0, 1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("given", [(1, 2), None, 5, np.zeros(2, object)], ids=["tuple", "None", "5", "array"])
def test_an_argument_that_is_no_list_is_refused_before_data_moves(rank: int, given: Any) -> None:
    calls: list[Any] = [
        lambda: dist.all_gather_object(given, rank),
        lambda: dist.gather_object(rank, given if rank == 0 else None, dst=0),
        lambda: dist.broadcast_object_list(given, 0),
        lambda: dist.scatter_object_list(given, [1, 2] if rank == 0 else None, 0),
        lambda: dist.scatter_object_list([None], 5 if rank == 0 else None, 0),
        lambda: dist.recv_object_list(given, 1 - rank),
        lambda: dist.send_object_list(None if given is None else 5, 1 - rank),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="give a list"):
            call()
    check_usable(rank)


@pytest.mark.ranks(2)
def test_error_texts_call_objects_objects(rank: int) -> None:
    gather = (dist.all_gather_object, [None, None], 1) if rank == 0 else (dist.broadcast, np.ones(2), 0)
    text = r"all_gather\(objects\); rank 1 called broadcast\(float64, 2 el"
    with pytest.raises(dist.MismatchError, match=text):
        gather[0](*gather[1:])
    lengths = r"broadcast\(1 objects, root=0\).*broadcast\(2 objects, root=0\)"
    with pytest.raises(dist.MismatchError, match=lengths):
        dist.broadcast_object_list([None] * (1 + rank), src=0)
    message = (dist.send_object_list, [1, 2], 1) if rank == 0 else (dist.recv_object_list, [None] * 3, 0)
    with pytest.raises(dist.MismatchError, match=r"objects: .* [23] objects.* [23] objects; both lists"):
        message[0](*message[1:])


@pytest.mark.ranks(2)
def test_nothing_is_unpickled_from_a_network_without_a_secret(
    rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTCOLL_SECRET", raising=False)
    monkeypatch.setenv("FASTCOLL_INSECURE", "1")
    config.forget()
    try:
        group = dist.new_group(backend="tcp")
        x = np.ones(3)
        dist.all_reduce(x, group=group)
        assert (x == 2).all()
        found: list[Any] = [None] * 2
        for call in (
            lambda: dist.all_gather_object(found, 1, group=group),
            lambda: dist.gather_object(1, found if rank == 0 else None, group=group),
            lambda: dist.broadcast_object_list([1], group=group),
            lambda: dist.scatter_object_list([None], [1, 2] if rank == 0 else None, group=group),
            lambda: dist.send_object_list([1], 1 - rank, group=group),
            lambda: dist.recv_object_list([None], 1 - rank, group=group),
        ):
            with pytest.raises(
                UnavailableError, match=r"unpickles .* FASTCOLL_INSECURE=1 .* give every rank"
            ):
                call()
        if dist.get_backend() == "shm":  # where all have mapped a segment of this user
            dist.all_gather_object(found, rank)
            assert found == [0, 1]
    finally:
        config.forget()
