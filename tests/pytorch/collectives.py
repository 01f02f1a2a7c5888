"""Every collective of torch.distributed on fastcoll, against Gloo or plain torch. Checks for three ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from pytorch import pair
from pytorch.pair import data, equal, of_all, rank, reduced, same, size

HALVES = (torch.float16, torch.bfloat16)
GLOO_DTYPES = (*HALVES, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
MORE_DTYPES = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
ONLY_MOVED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32, torch.complex128, torch.bool)


def all_reduce_of_every_dtype_and_operation() -> None:
    for dtype in GLOO_DTYPES:
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
            same(reduced(data(dtype, 3, 5), op))
    for dtype in (torch.uint8, torch.int32, torch.int64):
        for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
            same(reduced(data(dtype, 9), op))


def dtypes_that_gloo_refuses() -> None:
    for dtype in MORE_DTYPES:
        largest = reduced(data(dtype, 6), ReduceOp.MAX)(pair.OURS)
        equal(largest.long(), of_all(torch.int64, 6).amax(0))
    anywhere = reduced(torch.tensor([rank() == 1, False, True]), ReduceOp.MAX)(pair.OURS)
    equal(anywhere, torch.tensor([True, False, True]))


def complex_sums_averages_and_scaled_sums() -> None:
    same(reduced(torch.complex(data(torch.float32, 4), data(torch.float32, 4, salt=1))))
    whole = of_all(torch.float64, 4).sum(0)
    equal(reduced(data(torch.float64, 4), ReduceOp.AVG)(pair.OURS), whole / size())
    equal(reduced(data(torch.float64, 4), dist._make_nccl_premul_sum(0.5))(pair.OURS), whole * 0.5)


def tensors_that_need_care() -> None:
    expected = of_all(torch.float32, 4, 6).sum(0)
    grid = data(torch.float32, 4, 6)
    dist.all_reduce(grid.t(), group=pair.OURS)
    equal(grid, expected)
    parameter = data(torch.float32, 4, 6).requires_grad_()
    dist.all_reduce(parameter, group=pair.OURS)
    equal(parameter.detach(), expected)
    single = torch.tensor(float(rank()))
    dist.all_reduce(torch.empty(0), group=pair.OURS)
    dist.all_reduce(single, group=pair.OURS)
    equal(single, torch.tensor(3.0))


def broadcast_and_reduce() -> None:
    for root in range(size()):

        def run(group: Any, root: int = root) -> list[torch.Tensor]:
            x, y = data(torch.int32, 2, 3), data(torch.float32, 7)
            dist.broadcast(x, root, group=group)
            dist.reduce(y, root, group=group)
            return [x, y] if rank() == root else [x]

        same(run)


def gathers() -> None:
    def run(group: Any) -> list[torch.Tensor]:
        outs = [torch.empty(3, dtype=torch.float16) for _ in range(size())]
        dist.all_gather(outs, data(torch.float16, 3), group=group)
        joined = torch.empty(size() * 4)
        dist.all_gather_single(joined, data(torch.float32, 4), group=group)
        root_outs = [torch.empty(2, 2) for _ in range(size())] if rank() == 1 else None
        dist.gather(data(torch.float32, 2, 2), root_outs, dst=1, group=group)
        return [*outs, joined, *(root_outs or [])]

    same(run)


def gathers_that_gloo_refuses() -> None:
    outs = [torch.empty(r + 1, 2, dtype=torch.int64) for r in range(size())]
    dist.all_gather(outs, data(torch.int64, rank() + 1, 2), group=pair.OURS)
    equal(outs, [data(torch.int64, r + 1, 2, of=r) for r in range(size())])
    stacked = torch.empty(size(), 4)
    dist.all_gather_single(stacked, data(torch.float32, 4), group=pair.OURS)
    equal(stacked, of_all(torch.float32, 4))


def scatters() -> None:
    def run(group: Any) -> list[torch.Tensor]:
        out, part, piece = torch.empty(3), torch.empty(4), torch.empty(2)
        blocks = [data(torch.float32, 3, salt=r) for r in range(size())]
        dist.scatter(out, blocks if rank() == 0 else None, src=0, group=group)
        dist.reduce_scatter_single(part, data(torch.float32, 4 * size()), group=group)
        dist.reduce_scatter(piece, [data(torch.float32, 2, salt=r) for r in range(size())], group=group)
        return [out, part, piece]

    same(run)


def all_to_alls() -> None:
    def run(group: Any) -> list[torch.Tensor]:
        even, uneven = torch.empty(2 * size()), torch.empty((rank() + 1) * size(), 2)
        dist.all_to_all_single(even, data(torch.float32, 2 * size()), group=group)
        splits = [r + 1 for r in range(size())]
        rows = data(torch.float32, sum(splits), 2)
        dist.all_to_all_single(uneven, rows, [rank() + 1] * size(), splits, group)
        return [even, uneven]

    same(run)
    outs = [torch.empty(rank() + 1) for _ in range(size())]
    dist.all_to_all(outs, [data(torch.float32, r + 1) for r in range(size())], group=pair.OURS)
    equal(outs, [data(torch.float32, rank() + 1, of=r) for r in range(size())])


def dtypes_that_are_only_moved() -> None:
    for dtype in ONLY_MOVED:
        # Bytes 0 and 1 are numbers of every dtype.
        contents = [(torch.arange(8 * dtype.itemsize) + r).to(torch.uint8) % 2 for r in range(size())]
        outs = [torch.empty_like(content).view(dtype) for content in contents]
        dist.all_gather(outs, contents[rank()].view(dtype), group=pair.OURS)
        equal([out.view(torch.uint8) for out in outs], contents)


def coalesced_operations() -> None:
    def run(group: Any) -> list[torch.Tensor]:
        xs = [data(torch.float32, 3), data(torch.float32, 2, 2)]
        with dist._coalescing_manager(group):
            for x in xs:
                dist.all_reduce(x, group=group)
        outs = [torch.empty(size() * 3), torch.empty(size() * 2)]
        with dist._coalescing_manager(group, async_ops=True) as manager:
            for n, out in zip((3, 2), outs, strict=True):
                dist.all_gather_single(out, data(torch.float32, n), group=group)
        manager.wait()
        parts = [torch.empty(2), torch.empty(1)]
        with dist._coalescing_manager(group):
            for part in parts:
                dist.reduce_scatter_single(part, data(torch.float32, size() * len(part)), group=group)
        lists = [[torch.empty(2), torch.empty(3)] for _ in range(size())]
        dist.all_gather_coalesced(lists, [data(torch.float32, 2), data(torch.float32, 3)], group=group)
        return [*xs, *outs, *parts, *(x for xs in lists for x in xs)]

    same(run)


CHECKS = (
    all_reduce_of_every_dtype_and_operation,
    dtypes_that_gloo_refuses,
    complex_sums_averages_and_scaled_sums,
    tensors_that_need_care,
    broadcast_and_reduce,
    gathers,
    gathers_that_gloo_refuses,
    scatters,
    all_to_alls,
    dtypes_that_are_only_moved,
    coalesced_operations,
)
