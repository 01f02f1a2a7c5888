"""Messages, objects and asynchronous operations. Checks for three ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pytorch import pair
from pytorch.pair import data, equal, rank, reduced, same, size


def check_messages() -> None:
    def run(group: Any) -> list[torch.Tensor]:
        right, left = (rank() + 1) % size(), (rank() - 1) % size()
        first, second, third = torch.empty(3), torch.empty(3), torch.empty(4)
        works = [
            dist.isend(data(torch.float32, 3, salt=1), right, group, tag=7),
            dist.isend(data(torch.float32, 3, salt=2), right, group, tag=8),
            dist.irecv(second, left, group, tag=8),
            dist.irecv(first, left, group, tag=7),
        ]
        receive = dist.P2POp(dist.irecv, third, left, group)
        send = dist.P2POp(dist.isend, data(torch.float32, 4), right, group)
        for work in [*works, *dist.batch_isend_irecv([receive, send])]:
            work.wait()
        return [first, second, third]

    same(run)


def check_messages_from_any_source_and_to_oneself() -> None:
    if rank() == 0:
        for _ in range(size() - 1):
            x = torch.empty(1)
            assert dist.recv(x, group=pair.OURS) == int(x)
    else:
        dist.send(torch.tensor([float(rank())]), 0, group=pair.OURS)
    y = torch.empty(2)
    works = [dist.isend(torch.ones(2), rank(), pair.OURS), dist.irecv(y, rank(), pair.OURS)]
    for work in works:
        work.wait()
    equal(y, torch.ones(2))


def check_objects() -> None:
    def run(group: Any) -> list[Any]:
        everyone: list[Any] = [None] * size()
        dist.all_gather_object(everyone, {"rank": rank()}, group=group)
        news = [("news", rank()), rank()]
        dist.broadcast_object_list(news, src=1, group=group)
        gathered = [None] * size() if rank() == 0 else None
        dist.gather_object("x" * rank(), gathered, dst=0, group=group)
        given: list[Any] = [None]
        gifts = [f"for {r}" for r in range(size())]
        dist.scatter_object_list(given, gifts if rank() == 2 else None, src=2, group=group)
        passed: list[Any] = [None]
        if rank() == 0:
            dist.send_object_list([[1, "2"]], dst=1, group=group)
        elif rank() == 1:
            dist.recv_object_list(passed, src=0, group=group)
        return [everyone, news, gathered or [], given, passed]

    same(run)


def check_asynchronous_works() -> None:
    xs = [data(torch.float32, 10, salt=k) for k in range(4)]
    expected = [reduced(x)(pair.GLOO) for x in xs]
    works = [dist.all_reduce(x, group=pair.OURS, async_op=True) for x in xs]
    equal(works[3].get_future().wait(), [expected[3]])
    for work in works:
        assert work.wait()
        assert (work.is_completed(), work.is_success(), work.exception()) == (True, True, None)
    equal([work.result()[0] for work in works], expected)
    equal(xs, expected)
    assert works[0].get_future().done()


def check_a_callback_may_wait_for_another_operation() -> None:
    x, y = torch.ones(4), torch.ones(2)

    def second(_: Any) -> torch.Tensor:
        return dist.all_reduce(y, group=pair.OURS, async_op=True).get_future().wait()[0]

    chained = dist.all_reduce(x, group=pair.OURS, async_op=True).get_future().then(second)
    equal(chained.wait(), torch.full((2,), float(size())))
