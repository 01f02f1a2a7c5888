"""Every collective of torch.distributed on fastcoll, against Gloo or plain torch. Checks for three ranks."""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import GatherOptions, ReduceOp
from torch.distributed.tensor.debug import CommDebugMode

from fastcoll.errors import MismatchError, UnavailableError, UsageError
from pytorch import pair
from pytorch.pair import data, equal, of_all, rank, reduced, same, size

HALVES = (torch.float16, torch.bfloat16)
GLOO_DTYPES = (*HALVES, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)


def check_all_reduce_of_every_dtype_and_operation() -> None:
    for dtype in GLOO_DTYPES:
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
            same(reduced(data(dtype, 3, 5), op))
    for dtype in (torch.uint8, torch.int32, torch.int64):
        for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
            same(reduced(data(dtype, 9), op))


def check_complex_sums_averages_and_scaled_sums() -> None:
    same(reduced(torch.complex(data(torch.float32, 4), data(torch.float32, 4, salt=1))))
    whole = of_all(torch.float64, 4).sum(0)
    equal(reduced(data(torch.float64, 4), ReduceOp.AVG)(pair.OURS), whole / size())
    equal(reduced(data(torch.float64, 4), dist._make_nccl_premul_sum(0.5))(pair.OURS), whole * 0.5)
    largest = reduced(data(torch.uint16, 6), ReduceOp.MAX)(pair.OURS)  # Gloo refuses this dtype
    equal(largest.long(), of_all(torch.int64, 6).amax(0))


def check_broadcast_and_reduce() -> None:
    for root in range(size()):

        def run(group: Any, root: int = root) -> list[torch.Tensor]:
            x, y = data(torch.int32, 2, 3), data(torch.float32, 7)
            dist.broadcast(x, root, group=group)
            dist.reduce(y, root, group=group)
            return [x, y] if rank() == root else [x]

        same(run)


def check_gathers() -> None:
    def run(group: Any) -> list[torch.Tensor]:
        outs = [torch.empty(3, dtype=torch.float16) for _ in range(size())]
        dist.all_gather(outs, data(torch.float16, 3), group=group)
        joined = torch.empty(size() * 4)
        dist.all_gather_single(joined, data(torch.float32, 4), group=group)
        root_outs = [torch.empty(2, 2) for _ in range(size())] if rank() == 1 else None
        dist.gather(data(torch.float32, 2, 2), root_outs, dst=1, group=group)
        return [*outs, joined, *(root_outs or [])]

    same(run)


def check_scatters() -> None:
    def run(group: Any) -> list[torch.Tensor]:
        out, part, piece = torch.empty(3), torch.empty(4), torch.empty(2)
        blocks = [data(torch.float32, 3, salt=r) for r in range(size())]
        dist.scatter(out, blocks if rank() == 0 else None, src=0, group=group)
        dist.reduce_scatter_single(part, data(torch.float32, 4 * size()), group=group)
        dist.reduce_scatter(piece, [data(torch.float32, 2, salt=r) for r in range(size())], group=group)
        return [out, part, piece]

    same(run)


def check_all_to_alls() -> None:
    def run(group: Any) -> list[torch.Tensor]:
        even, uneven = torch.empty(2 * size()), torch.empty((rank() + 1) * size(), 2)
        dist.all_to_all_single(even, data(torch.float32, 2 * size()), group=group)
        splits = [r + 1 for r in range(size())]
        rows = data(torch.float32, sum(splits), 2)
        dist.all_to_all_single(uneven, rows, [rank() + 1] * size(), splits, group)
        by_arrays, no_sizes = torch.empty_like(uneven), np.array([], np.int64)
        dist.all_to_all_single(by_arrays, rows, np.full(size(), rank() + 1), np.array(splits), group)
        dist.all_to_all_single(even, even.clone(), no_sizes, no_sizes, group)
        return [even, uneven, by_arrays]

    same(run)
    outs = [torch.empty(rank() + 1) for _ in range(size())]
    dist.all_to_all(outs, [data(torch.float32, r + 1) for r in range(size())], group=pair.OURS)
    equal(outs, [data(torch.float32, rank() + 1, of=r) for r in range(size())])


def check_coalesced_operations() -> None:
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


def check_short_forms_that_groups_in_cpp_take() -> None:
    def run(group: Any) -> list[torch.Tensor]:
        xs = [data(torch.float32, 3, salt=k) for k in range(8)]
        outs, part, piece = [torch.empty(3) for _ in range(size())], torch.empty(3), torch.empty(3)
        blocks = [data(torch.float32, 3, salt=r) for r in range(size())]
        group.allreduce(xs[0]).wait()
        group.allreduce([xs[1]]).wait()
        group.allreduce([xs[2]], ReduceOp.MAX).wait()
        group.allreduce(xs[3], op=ReduceOp.MIN, timeout=pair.TIMEOUT).wait()
        group.broadcast(xs[4], root=1).wait()
        group.broadcast(xs[5], 2).wait()
        group.broadcast([xs[6]]).wait()
        group.reduce(xs[7], root=0, op=ReduceOp.MAX).wait()
        group.allgather(outs, blocks[0]).wait()
        gathered = [torch.empty(3) for _ in range(size())] if rank() == 1 else []
        group.gather(gathered, blocks[1], root=1).wait()
        group.scatter(part, blocks if rank() == 2 else [], root=2).wait()
        group.reduce_scatter(piece, blocks, ReduceOp.SUM).wait()
        group.barrier(timeout=pair.TIMEOUT).wait()
        return [*xs[: 8 if rank() == 0 else 7], *outs, *gathered, part, piece]

    same(run)


def check_sparse_sums() -> None:
    def run(group: Any, dtype: torch.dtype, asynchronous: bool) -> Any:
        places = [[rank(), 1, 1], [0, 2, 2]]  # two entries are at one index; rank 2 has no entry
        count = 0 if rank() == 2 else 3
        x = torch.sparse_coo_tensor(
            torch.tensor(places)[:, :count], data(dtype, 3, 4)[:count], (size(), 3, 4), check_invariants=True
        )
        work = dist.all_reduce(x, group=group, async_op=asynchronous)
        if asynchronous:
            equal(work.get_future().wait()[0].to_dense(), x.to_dense())
        return [x.is_coalesced(), x.coalesce().indices(), x.to_dense()]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for asynchronous in (False, True):
                same(partial(run, dtype=dtype, asynchronous=asynchronous))
    with pytest.raises(UnavailableError, match=r"op is MAX.*SUM"):
        dist.all_reduce(torch.eye(3).to_sparse(), ReduceOp.MAX, group=pair.OURS)
    here = "torch.float32, shape (3, 3), 2 sparse dimensions"
    for other, text in (
        (torch.eye(4), "torch.float32, shape (4, 4), 2 sparse dimensions"),
        (torch.eye(3).double(), "torch.float64, shape (3, 3), 2 sparse dimensions"),
        (torch.ones(3), "torch.float32, shape (3,), 1 sparse dimensions"),
        (torch.ones([1] * 100), "torch.float32, shape (1, 1, "),
    ):
        with pytest.raises(
            MismatchError, match=re.escape(f"sparse tensors of ranks 0 and 1 differ: {here}; {text}")
        ):
            dist.all_reduce((other if rank() == 1 else torch.eye(3)).to_sparse(), group=pair.OURS)


def check_single_gathers() -> None:
    """Call gather_single on the group, because torch.distributed lacks it up to 2.13."""
    options = GatherOptions()
    options.rootRank = 1
    out = torch.zeros(size(), 2) if rank() == 1 else torch.zeros(0)
    pair.OURS.gather_single(out, data(torch.float32, 2), options).wait()
    if rank() == 1:
        equal(out, of_all(torch.float32, 2))
        refused = pytest.raises(UsageError, match=r"gather_tensor .*shape \(3,\).*6 elements")
    else:
        refused = pytest.raises(MismatchError, match="rank 1's gather_single was refused")
    with refused:
        pair.OURS.gather_single(torch.zeros(3), data(torch.float32, 2), options).wait()
    if hasattr(dist, "gather_single"):
        again = torch.zeros(size(), 2)
        dist.gather_single(data(torch.float32, 2), again if rank() == 0 else None, dst=0, group=pair.OURS)
        equal(again, of_all(torch.float32, 2) if rank() == 0 else torch.zeros(size(), 2))


def check_calls_that_are_counted() -> None:
    def counts(group: Any) -> dict[str, int]:
        x, outs = data(torch.float32, size()), [torch.empty(size()) for _ in range(size())]
        with CommDebugMode() as mode:
            dist.all_reduce(x, group=group)
            dist.all_reduce(x, group=group, async_op=True).wait()
            dist.all_gather(outs, x, group=group)
            dist.reduce_scatter_single(torch.empty(1), x, group=group)
            dist.broadcast(x, 0, group=group)
            functional.all_reduce(x, "sum", group) + 0
        return {str(name): count for name, count in mode.get_comm_counts().items()}

    same(counts)
    assert sum(counts(pair.OURS).values()) == 6


def check_functional_gathers_into_a_given_tensor() -> None:
    def run(group: Any) -> torch.Tensor:
        gather = torch.ops._c10d_functional.all_gather_into_tensor_out
        out = torch.empty(size() * 2)
        return functional.wait_tensor(gather(data(torch.float32, 2), size(), group.group_name, out=out))

    same(run)


def check_wrong_calls_are_refused_at_once() -> None:
    x, xs, group = torch.ones(2), [torch.ones(2)] * size(), pair.OURS
    root, elsewhere = dist.BroadcastOptions(), (rank() + 1) % size()
    root.rootTensor = 1
    for match, call in {
        "rootTensor is 1": lambda: group.broadcast([x], root),
        "gather_list must be None or empty": lambda: group.gather([xs], [x], root=elsewhere),
        "gather_list is None on the root": lambda: group.gather([], [x], root=rank()),
        "scatter_list must be None or empty": lambda: group.scatter([x], [xs], root=elsewhere),
        "scatter_list is None on the root": lambda: group.scatter([x], [], root=rank()),
        "2 outputs and 1 inputs": lambda: group.all_gather_single_coalesced(xs[:2], [x]),
        "1 outputs and 2 inputs": lambda: group.reduce_scatter_single_coalesced([x], xs[:2]),
        r"outputs has lists of \[2, 1, 1\]": lambda: group.allgather_coalesced([xs[:2], [x], [x]], [x]),
        "tensor_list.*3": lambda: group.allgather([xs[:2]], [x]),
        "input_list": lambda: group.reduce_scatter(x, [torch.ones(3)] * size()),
        "output_tensor": lambda: group.all_gather_single(torch.ones(5), x),
        "rootRank is 'x'": lambda: group.broadcast(x, root="x"),
        "reduceOp is 'x'": lambda: group.allreduce(x, "x"),
    }.items():
        with pytest.raises(UsageError, match=match):
            call()
    dist.barrier(pair.OURS)


def check_the_profiler_names_the_calls() -> None:
    x, outs = torch.ones(2), torch.empty(2 * size())
    with torch.profiler.profile() as profile:
        dist.all_reduce(x, group=pair.OURS)
        dist.all_gather_into_tensor(outs, x, pair.OURS, async_op=True).wait()
        dist.barrier(pair.OURS)
    dist.all_reduce(x, group=pair.OURS)
    counts = {event.key: event.count for event in profile.key_averages()}
    named = {name: count for name, count in counts.items() if name.startswith("fastcoll:")}
    assert named == {"fastcoll:all_reduce": 1, "fastcoll:all_gather_single": 1, "fastcoll:barrier": 1}, counts
